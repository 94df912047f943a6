"""The audit trail: who changed what. Part of the meta group's state: pure, like all of it.

The state keeps the newest acts, bounded in number and in bytes. An act says nothing about payloads, and has no secrets: the
node that recorded it made sure of both (`cluster.http.audit`).
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

from holdfast.statemachine.effects import Code, Result

ACTS_MAX: Final = 10_000
BYTES_MAX: Final = 4 * 1024 * 1024
#: Of the newest commands, to know one that was proposed twice.
BATCHES_MAX: Final = 1024
_ACT_BYTES: Final = 256  # Around its texts, in memory.


class Act(NamedTuple):
    """One request that changed something, or was refused because its sender may not change that."""

    at_ms: int
    node: str  # that answered it
    principal: str  # the id of a token; empty: there was none
    name: str  # of the principal, for people
    address: str  # of the client, as the node sees it
    door: str  # "ingress" or "admin"
    method: str
    action: str
    targets: dict[str, str]  # by the name of the parameter: id, key, node
    status: int  # of the answer; 0: the client disconnected, so nobody saw how it ended
    error: str = ""  # the kind of the error
    unrecorded: int = 0  # acts before this one that this node did not record, because there were too many


class RecordActs(NamedTuple):
    batch: bytes  # Unique: a command that was proposed twice counts once.
    acts: list[Act]


class Recorded(NamedTuple):
    sequence: int
    act: Act


class Trail:
    def __init__(self) -> None:
        self.acts: deque[Act] = deque()  # oldest first
        self.next = 1  # the sequence number of the next act
        self.bytes = 0
        self._batches: dict[bytes, None] = {}

    def record(self, command: RecordActs) -> Result:
        if command.batch in self._batches:
            return Result(Code.UNCHANGED, "recorded before")
        self._batches[command.batch] = None
        if len(self._batches) > BATCHES_MAX:
            del self._batches[next(iter(self._batches))]
        for act in command.acts:
            self.acts.append(act)
            self.bytes += size_of(act)
            self.next += 1
        while len(self.acts) > ACTS_MAX or self.bytes > BYTES_MAX:
            self.bytes -= size_of(self.acts.popleft())
        return Result()

    def newest_first(self, before: int | None = None) -> list[Recorded]:
        """The acts that are older than the one with the sequence number `before`, if it is given."""
        first = self.next - len(self.acts)
        numbered = [Recorded(first + offset, act) for offset, act in enumerate(self.acts)]
        if before is not None:
            del numbered[max(0, before - first) :]
        return numbered[::-1]


def size_of(act: Act) -> int:
    texts = [act.node, act.principal, act.name, act.address, act.door, act.method, act.action, act.error]
    for name, value in act.targets.items():
        texts += (name, value)
    return _ACT_BYTES + sum(len(text.encode()) for text in texts)


def read_acts(rows: list[list[Any]]) -> list[Act]:
    """From the log, where an act is a list."""
    return [Act(*row) for row in rows]
