"""One partition's state machine on a table in memory, driven command by command.

Every command is a transaction of its own, so the decoded records of the state must survive flushing. Ids are short names:
`ident("a")` is the same 16 bytes everywhere.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from holdfast.sdk.ids import DeploymentId, InvocationId, object_id, partition_key
from holdfast.sdk.journal import Failure, Step, unpack_step
from holdfast.statemachine import queries
from holdfast.statemachine.commands import (
    Command,
    Complete,
    FireTimers,
    Invoke,
    Mode,
    Payload,
    RecordRunFailure,
    RecordStep,
    Retry,
    decode_command,
    encode_command,
)
from holdfast.statemachine.effects import ArmTimer, Effect, Result, StartAttempt
from holdfast.statemachine.machine import apply
from holdfast.statemachine.memory import Memory
from holdfast.statemachine.records import Invocation
from holdfast.statemachine.state import State

DP_1 = DeploymentId("dp_1")

HOUR_MS = 3_600_000
T0 = 1_700_000_000_000
RESULT = [0, b"result"]
BOOM = [1, 500, "boom", "ValueError"]
RETRY = Retry(100, 2000, 60_000, 3)


def ident(name: str, *, service: str = "greeter", key: str | None = None) -> InvocationId:
    tail = blake2b(name.encode(), digest_size=12).digest()
    return InvocationId((tail[:4] if key is None else partition_key(service, key)) + tail)


def failure(outcome: list[Any] | None) -> Failure:
    assert outcome is not None and outcome[0] == 1, outcome
    return Failure(*outcome[1:])


class Rig:
    def __init__(self, partition: int = 0, partitions: int = 1) -> None:
        self.txn = Memory()
        self.state = State(partition, partitions)
        self.now_ms = T0
        self.armed: list[int] = []
        self.effects: list[Effect] = []
        self.result = Result()

    def do(self, command: Command) -> list[Effect]:
        """Apply it, encoded and decoded, and return its effects, except reminders of timers, which go to `armed`."""
        self.state.begin(self.txn)
        self.result = apply(self.state, self.now_ms, decode_command(encode_command(command)))
        self.state.flush()
        effects = self.state.take_effects()
        self.armed = [effect.due_ms for effect in effects if isinstance(effect, ArmTimer)]
        self.effects = [effect for effect in effects if not isinstance(effect, ArmTimer)]
        return self.effects

    def pass_time(self, ms: int, *, limit: int = 100) -> list[Effect]:
        self.now_ms += ms
        return self.do(FireTimers(limit))

    # -- common actions of tests -------------------------------------------------------------------------------------

    def invoke(
        self,
        name: str,
        *,
        service: str = "greeter",
        handler: str = "greet",
        key: str | None = None,
        mode: int | None = None,
        start_at_ms: int = 0,
        caller: tuple[InvocationId, int] | None = None,
        retention_ms: int = HOUR_MS,
        payload: bytes = b"input",
    ) -> InvocationId:
        which = ident(name, service=service, key=key)
        if mode is None:
            mode = Mode.PLAIN if key is None else Mode.EXCLUSIVE
        by, step = caller or (None, -1)
        self.do(Invoke(which, service, handler, key, mode, payload, {}, start_at_ms, by, step, retention_ms))
        return which

    def step(
        self,
        which: InvocationId,
        op: int,
        argument: list[Any] | None = None,
        outcome: list[Any] | None = None,
        *,
        child: Invoke | None = None,
        epoch: int | None = None,
        digest: bytes = b"",
    ) -> int:
        """Record the next step of its newest attempt, and return its index."""
        record = self.load(which)
        row = None if child is None else list(child)
        self.do(
            RecordStep(
                which,
                record.epoch if epoch is None else epoch,
                record.length,
                op,
                f"/{record.length}",
                argument or [],
                outcome,
                DP_1,
                row,
                digest,
            )
        )
        return record.length

    def complete(self, which: InvocationId, outcome: list[Any] | None = None) -> list[Effect]:
        return self.do(Complete(which, self.load(which).epoch, outcome or RESULT, DP_1))

    # -- observations of tests ---------------------------------------------------------------------------------------

    def load(self, which: InvocationId) -> Invocation:
        record = queries.load(self.txn, which)
        assert record is not None
        return record

    def status(self, which: InvocationId) -> int:
        return self.load(which).status

    def outcome(self, which: InvocationId) -> list[Any] | None:
        return queries.outcome(self.txn, which)

    def journal(self, which: InvocationId) -> list[Step]:
        return [unpack_step(raw) for raw in queries.journal(self.txn, which, 0, 1000)]

    def values(self, service: str, key: str) -> dict[str, Payload]:
        return queries.eager_state(self.txn, object_id(service, key), 1 << 20)[0]

    def started(self) -> list[InvocationId]:
        return [effect.id for effect in self.effects if isinstance(effect, StartAttempt)]


def run_failure(rig: Rig, which: InvocationId, index: int, retry: Retry = RETRY) -> RecordRunFailure:
    return RecordRunFailure(which, rig.load(which).epoch, index, "/pay", "pay", BOOM, retry, 0, DP_1)
