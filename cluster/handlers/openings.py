"""What an attempt starts with: read from the state, or taken from the effect that starts a first attempt."""

from __future__ import annotations

from typing import Final, TypeAlias

from holdfast.cluster.handlers.attempts import Opening
from holdfast.sdk.ids import InvocationId, ObjectId
from holdfast.sdk.journal import INT_MAX
from holdfast.statemachine import queries
from holdfast.statemachine.effects import First
from holdfast.statemachine.records import Invocation
from holdfast.statemachine.txn import ReadTxn

EAGER_STATE_BYTES: Final = 64 * 1024

#: The state to send with an attempt (None: its handler has none), and whether it is complete.
EagerState: TypeAlias = tuple[dict[str, bytes] | None, bool]
#: For handlers without a key.
NO_STATE: Final[EagerState] = (None, False)


def eager_state(txn: ReadTxn, oid: ObjectId) -> EagerState:
    """Values that would have to be fetched are left out."""
    found, complete = queries.eager_state(txn, oid, EAGER_STATE_BYTES)
    here = {name: payload for name, payload in found.items() if isinstance(payload, bytes)}
    return here, complete and len(here) == len(found)


def opening_of(
    record: Invocation,
    steps: list[bytes],
    eager: EagerState,
    *,
    now_ms: int,
    suspects_max: int,
    journal_limits: tuple[int, int],
) -> Opening:
    state, complete = eager
    journal_steps_max, journal_bytes_max = journal_limits
    return Opening(
        service=record.service,
        handler=record.handler,
        key=record.key,
        now_ms=now_ms,
        seed=record.seed,
        steps=steps,
        # The endpoint receives a step with its large values, so its size includes them.
        sizes=[queries.whole_step_size(raw) for raw in steps] if record.blobs else [len(raw) for raw in steps],
        state=state,
        state_complete=complete,
        cancelled=record.cancelled,
        suspects_max=suspects_max,
        journal_steps_max=journal_steps_max,
        journal_bytes_max=journal_bytes_max,
    )


def opening_of_first(
    ident: InvocationId,
    first: First,
    eager: EagerState,
    *,
    now_ms: int,
    suspects_max: int,
    journal_limits: tuple[int, int],
) -> Opening:
    """The opening of a first attempt. The effect has everything that the record and the journal have."""
    state, complete = eager
    journal_steps_max, journal_bytes_max = journal_limits
    return Opening(
        service=first.service,
        handler=first.handler,
        key=first.key,
        now_ms=now_ms,
        seed=_seed(ident),
        steps=[first.input],
        sizes=[len(first.input) + first.large],
        state=state,
        state_complete=complete,
        cancelled=False,
        suspects_max=suspects_max,
        journal_steps_max=journal_steps_max,
        journal_bytes_max=journal_bytes_max,
    )


def _seed(ident: InvocationId) -> int:
    seed = int.from_bytes(ident[8:16], "big") >> 1
    assert seed <= INT_MAX
    return seed
