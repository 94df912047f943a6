"""The requests of clients and their answers, with times: the evidence that a checker judges.

A history is written while it happens. An operation's first line is on file before the operation leaves the client,
so a client that dies leaves an operation of unknown outcome, never a missing one. Times are CLOCK_MONOTONIC of one
machine since one boot; histories of different clocks are refused, because their times cannot be compared.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Value = None | bool | int | float | str | tuple["Value", ...] | frozenset["Value"]


class BadHistory(Exception):
    """The record itself is unusable, so it says nothing about the system under test."""


class Kind(StrEnum):
    """What a client can ask. A key is either a register (read, write, cas) or an append-only set (add, read-all)."""

    READ = "read"
    WRITE = "write"
    CAS = "cas"  # The argument is (old, new); the result is True if it was swapped, False if another value was found.
    ADD = "add"
    READ_ALL = "read-all"  # The result is a tuple in log order, or a frozenset.


class Outcome(StrEnum):
    OK = "ok"  # It happened, with this result.
    FAIL = "fail"  # It definitely did not happen and never will.
    INFO = "info"  # Unknown: it may take effect at any time after its invocation, or never.


@dataclass(frozen=True, slots=True)
class Operation:
    client: str
    key: str
    kind: Kind
    argument: Value
    result: Value
    invoked: float
    returned: float | None  # When the client knew the outcome; for `info`, when it gave up, if it lived to do so.
    outcome: Outcome

    def __post_init__(self) -> None:
        if self.outcome is Outcome.OK and self.returned is None:
            raise BadHistory(f"an acknowledged operation must have a time of return: {self}")
        if self.returned is not None and not self.invoked <= self.returned:
            raise BadHistory(f"an operation must return after it was invoked: {self}")

    @property
    def deadline(self) -> float:
        """The latest moment at which the operation can have taken effect."""
        if self.outcome is not Outcome.OK or self.returned is None:
            return math.inf
        return self.returned

    def __str__(self) -> str:
        asked = "" if self.argument is None else f" {self.argument!r}"
        told = f" -> {abbreviate(self.result)}" if self.outcome is Outcome.OK else f" ({self.outcome})"
        until = "..." if self.deadline == math.inf else f"{self.deadline:.6f}"
        return f"[{self.invoked:.6f} {until}] {self.client}: {self.kind} {self.key}{asked}{told}"


def abbreviate(value: Value) -> str:
    """A value for a reader: the two ends of a long collection are enough to recognise it."""
    if isinstance(value, frozenset):
        return f"set of {len(value)}" if len(value) > 12 else "{" + ", ".join(sorted(map(repr, value))) + "}"
    if isinstance(value, tuple) and len(value) > 12:
        first, last = ", ".join(map(repr, value[:4])), ", ".join(map(repr, value[-4:]))
        return f"({first}, ... {len(value) - 8} more ..., {last})"
    return repr(value)


@dataclass(frozen=True, slots=True)
class History:
    clock: str  # Names the machine's boot: times of equal clocks can be compared.
    operations: tuple[Operation, ...]  # In order of invocation.


def machine_clock() -> str:
    """The name of this machine's CLOCK_MONOTONIC."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Recorder:
    """Appends one process's operations to a JSON-lines file. Each line reaches the kernel before the call returns."""

    def __init__(self, path: Path, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last = 0
        self._open: set[int] = set()
        # One `write` per line with O_APPEND: what a killed process leaves is whole lines and at most one torn one.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._line({"clock": machine_clock()})

    def invoke(self, client: str, key: str, kind: Kind, argument: Value = None) -> int:
        """Record that an operation is about to leave; the number returned ends it."""
        self._last += 1
        self._open.add(self._last)
        self._line(
            {
                "invoke": self._last,
                "client": client,
                "key": key,
                "kind": kind,
                "argument": to_json(argument),
                "at": self._now(),
            }
        )
        return self._last

    def end(self, operation: int, outcome: Outcome, result: Value = None) -> None:
        """Record what the client now knows. Called at once when the answer is there: a late time hides violations."""
        at = self._now()
        if operation not in self._open:
            raise BadHistory(f"operation {operation} is not open")
        self._open.remove(operation)
        self._line({"end": operation, "outcome": outcome, "result": to_json(result), "at": at})

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _line(self, record: dict[str, object]) -> None:
        line = json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        if os.write(self._file, line) != len(line):
            raise BadHistory("the history's disk is full")


def load(path: Path) -> History:
    """Read a file back. Operations that never ended are `info`; a torn last line is what a killed client leaves."""
    lines = path.read_bytes().split(b"\n")
    if lines.pop() and not lines:
        raise BadHistory(f"{path}: no whole line")
    clock: str | None = None
    operations: dict[int, Operation] = {}
    ended: set[int] = set()
    for number, line in enumerate(lines, start=1):
        try:
            record: dict[str, Any] = json.loads(line)
            if "clock" in record:
                clock = record["clock"]
            elif "invoke" in record:
                operations[record["invoke"]] = Operation(
                    client=record["client"],
                    key=record["key"],
                    kind=Kind(record["kind"]),
                    argument=from_json(record["argument"]),
                    result=None,
                    invoked=record["at"],
                    returned=None,
                    outcome=Outcome.INFO,
                )
            else:
                if record["end"] in ended:
                    raise BadHistory("ended twice")
                ended.add(record["end"])
                operations[record["end"]] = replace(
                    operations[record["end"]],
                    outcome=Outcome(record["outcome"]),
                    result=from_json(record["result"]),
                    returned=record["at"],
                )
        except (ValueError, KeyError, TypeError, BadHistory) as error:
            raise BadHistory(f"{path}, line {number}: {error!r}") from error
    if clock is None:
        raise BadHistory(f"{path}: the line that names the clock is missing")
    return History(clock, tuple(sorted(operations.values(), key=_by_invocation)))


def merge(histories: Iterable[History]) -> History:
    """One history of several clients, in order of invocation."""
    histories = list(histories)
    clocks = {history.clock for history in histories}
    if len(clocks) != 1:
        raise BadHistory(f"times of different clocks cannot be compared: {sorted(clocks)}")
    everything = [operation for history in histories for operation in history.operations]
    return History(clocks.pop(), tuple(sorted(everything, key=_by_invocation)))


def to_json(value: Value) -> object:
    if isinstance(value, tuple):
        return [to_json(part) for part in value]
    if isinstance(value, frozenset):
        return {"set": sorted((to_json(part) for part in value), key=json.dumps)}
    return value


def from_json(value: object) -> Value:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return tuple(from_json(part) for part in value)
        case {"set": list() as parts}:
            return frozenset(from_json(part) for part in parts)
        case _:
            raise BadHistory(f"not a value: {value!r}")


def _by_invocation(operation: Operation) -> float:
    return operation.invoked
