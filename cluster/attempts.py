"""Attempts as the leader knows them: one object per attempt that runs somewhere, and a ticket for each that waits its turn.

An attempt that only waits for a place at its endpoint is an id and an epoch; everything else is in the state and read when
its turn comes. A suspended invocation is nothing here at all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

from holdfast.cluster.blobs import HASHED_BYTES_MAX
from holdfast.cluster.objects import Objects
from holdfast.cluster.partition import Partition
from holdfast.cluster.registry import Target
from holdfast.log.errors import ProposalError, TooLarge
from holdfast.sdk.protocol import Completion, Frame, Journal, Start, encode_batch
from holdfast.statemachine import queries, refs
from holdfast.statemachine.blobs import chunks_of
from holdfast.statemachine.commands import Command, Ref
from holdfast.statemachine.effects import First, Result

READ_CHUNKS: Final = 8  # of a large value, between two turns of the loop


class Owner(Protocol):
    """The leadership in whose name an attempt runs: what it does not want to know any more is not started."""

    partition: Partition
    ended: bool
    held: bool

    def redispatch(self, invocation: bytes, epoch: int) -> None: ...

    def scan(self, first: bytes = b"", only: str | None = None) -> None:
        """Look for what should run, from an id on, at one deployment or at any: there is room again."""


class Ticket(NamedTuple):
    """An attempt that waits for its turn."""

    owner: Owner
    id: bytes
    epoch: int
    first: First | None  # Only while it is started at once: a waiting one is read again.


class Carrier(Protocol):
    """What carries frames to an attempt's handler."""

    attempts: dict[bytes, Attempt]

    def send(self, frame: Frame | Deferred) -> None: ...

    def acknowledge(self, attempt: Attempt) -> None: ...

    def let_go(self, attempt: Attempt) -> None: ...


class Attempts(Protocol):
    """Whom an attempt tells that it is of no use any more."""

    def drop(self, attempt: Attempt, reason: str) -> None: ...

    def lost(self, attempt: Attempt, why: str) -> None: ...

    def fail(self, attempt: Attempt, failure: list[Any], *, pause: bool = False) -> None: ...


class PendingAck:
    """An acknowledgement in its place among the frames of an attempt.

    Later ones join it until a completion is queued behind it: the order of the two is the order of the log, and an SDK
    places its own results among the completions by it.
    """

    __slots__ = ("attempt", "length")

    def __init__(self, attempt: Attempt, length: int) -> None:
        self.attempt = attempt
        self.length = length


class Deferred:
    """A frame that refers to large values. They are read at the moment it is sent: what waits its turn takes no memory.

    Those that are in the shared store are fetched before, because that may take long, and nobody else is to wait for it.
    """

    __slots__ = ("attempt", "fetched", "frame", "held", "size")

    def __init__(self, attempt: Attempt, frame: Start | Journal | Completion, size: int) -> None:
        self.attempt = attempt
        self.frame = frame
        self.size = size  # with the values in it
        self.fetched: dict[bytes, bytes] = {}
        self.held = 0  # Of its carrier's bound on what is fetched and not sent.

    def _refs(self) -> list[Ref]:
        frame = self.frame
        if isinstance(frame, Completion):
            ref = refs.in_outcome(frame.outcome)
            return [] if ref is None else [ref]
        return [ref for raw in frame.journal for ref in refs.in_packed_step(raw)]

    def to_fetch(self) -> dict[bytes, str]:
        """Its values that are in the shared store, and their objects. What is gone is found when it is read."""
        found: dict[bytes, str] = {}
        with self.attempt.partition.state.read() as txn:
            for ref in self._refs():
                with suppress(queries.Gone):
                    if ref.data not in self.fetched and (name := queries.place(txn, ref.data)):
                        found[ref.data] = name
        return found

    async def fetch(self, objects: Objects) -> None:
        """Raises StoreDown or ValueLost."""
        for blob, name in self.to_fetch().items():
            self.fetched[blob] = await objects.get(self.attempt.partition.number, blob, name)

    async def read(self) -> dict[bytes, list[bytes]]:
        """The pieces of its values, a few at a time: the loop has other things to do. Raises queries.Gone."""
        pieces: dict[bytes, list[bytes]] = {}
        for ref in self._refs():
            if ref.data in pieces:
                continue
            mine = pieces[ref.data] = []
            if ref.data in self.fetched:
                mine.append(self.fetched[ref.data])
                continue
            count = chunks_of(refs.stored_size(ref.data))
            for first in range(0, count, READ_CHUNKS):
                if first:
                    await asyncio.sleep(0)
                with self.attempt.partition.state.read() as txn:
                    mine += [queries.chunk(txn, ref.data, at) for at in range(first, min(first + READ_CHUNKS, count))]
        return pieces

    def filled(self, pieces: dict[bytes, list[bytes]]) -> Start | Journal | Completion:
        """The frame with its values. In any thread."""
        frame = self.frame

        def value_of(ref: Ref) -> bytes:
            return refs.restored(ref, b"".join(pieces[ref.data]))

        if isinstance(frame, Completion):
            outcome = refs.filled_outcome(frame.outcome, value_of)
            assert outcome is not None
            return frame._replace(outcome=outcome)
        return frame._replace(journal=[refs.filled_step(raw, value_of) for raw in frame.journal])


async def encode(frames: Sequence[Frame | Deferred], gone: Callable[[Attempt, queries.Gone], None]) -> bytes | None:
    """One message; None if there is nothing left to say. What is large is put together in a thread, because copying it takes
    longer than a loop may stand still; `gone` is told of attempts whose values cannot be read."""
    filled: dict[int, dict[bytes, list[bytes]]] = {}
    size = 0
    for offset, frame in enumerate(frames):
        if isinstance(frame, Deferred) and not frame.attempt.over:
            try:
                filled[offset] = await frame.read()
                size += frame.size
            except queries.Gone as error:
                gone(frame.attempt, error)

    def put_together() -> bytes | None:
        whole: list[Frame] = []
        for offset, frame in enumerate(frames):
            if not isinstance(frame, Deferred):
                whole.append(frame)
            elif offset in filled:
                whole.append(frame.filled(filled.pop(offset)))
        return encode_batch(whole) if whole else None

    if size <= HASHED_BYTES_MAX:
        return put_together()
    return await asyncio.get_running_loop().run_in_executor(None, put_together)


class Attempt:
    """One attempt that was started. It ends once: by its last frame, or by somebody who drops it."""

    __slots__ = (
        "_attempts",
        "ack_waits",
        "asked_at",
        "backlog",
        "carrier",
        "epoch",
        "id",
        "last_frame_at",
        "length",
        "order",
        "over",
        "owner",
        "partition",
        "pinned",
        "sent",
        "target",
        "unsent",
    )

    def __init__(
        self,
        attempts: Attempts,
        ticket: Ticket,
        target: Target,
        carrier: Carrier,
        *,
        pinned: bool,
        order: int,
        length: int,
        now: float,
    ) -> None:
        self._attempts = attempts
        self.owner = ticket.owner
        self.partition = ticket.owner.partition
        self.id = ticket.id
        self.epoch = ticket.epoch
        self.target = target
        self.carrier = carrier
        self.pinned = pinned
        self.order = order  # Events of the journal up to this one were in its START.
        self.length = self.sent = length  # Steps below are acknowledged, or about to be; and those it has sent.
        self.ack_waits: PendingAck | None = None  # Later acknowledgements may join it.
        self.last_frame_at = now
        #: What it said behind a large value that is still being staged, in order: commands, and whether they are its last.
        self.backlog: deque[tuple[Command, bool]] = deque()
        self.unsent = 0  # Frames with large values for it that wait their turn: it cannot answer what it has not got.
        self.asked_at = 0.0  # When it was asked to suspend; 0: it was not.
        self.over = False

    def now_ms(self) -> int:
        return self.partition.now_ms()

    def answered(self, answer: Result | ProposalError) -> None:
        """What became of one of its commands. As a rule, nothing is to be done: acknowledgements are effects."""
        if type(answer) is Result:
            if answer.code in (0, 200):
                return
            if answer.code in (409, 413):
                self._attempts.drop(self, answer.message)  # The state has moved on already, without this attempt.
                return
            why = answer.message
        elif isinstance(answer, TooLarge):
            self._attempts.fail(self, [1, 413, str(answer), "TooLarge"], pause=True)
            return
        else:
            why = str(answer)
        # The state does not hold what this attempt believes. Another one begins with what it does hold.
        self._attempts.lost(self, why)
