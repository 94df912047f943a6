"""What `holdfast dev` prints about failures and pauses: one line each, counted when repeated, with the next action."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import click

from holdfast.cli.client import printable
from holdfast.cluster.durations import format_duration_ms
from holdfast.sdk.ids import format_id
from holdfast.statemachine import queries
from holdfast.statemachine.commands import Command, Complete, FailAttempt, Pause, RecordRunFailure, RecordStep
from holdfast.statemachine.effects import Result, Status
from holdfast.statemachine.outcomes import failure_of, is_success, message_of
from holdfast.statemachine.records import Invocation

if TYPE_CHECKING:
    from holdfast.cluster.partition.door import Partition

KNOWN_MAX: Final = 1000  # invocations whose failures are counted
_KINDS: Final = frozenset({FailAttempt, RecordRunFailure, Complete, Pause, RecordStep})


class Reporter:
    """Receives every command applied on this node, and prints failures."""

    def __init__(self) -> None:
        self._failures: OrderedDict[bytes, int] = OrderedDict()

    def __call__(self, partition: Partition, command: Command, result: Result) -> None:
        if type(command) not in _KINDS or (type(command) is RecordStep and result.code != 409):
            return
        if type(command) is Complete and (is_success(command.outcome) or result.code):
            return
        if type(command) in (FailAttempt, RecordRunFailure, Pause) and result.code:
            return  # The attempt had already ended, or the invocation was already paused.
        with partition.state.read() as txn:
            record = queries.load(txn, command.id)  # type: ignore[union-attr]
            last = queries.last_failure(txn, command.id)  # type: ignore[union-attr]
        if record is None:
            return
        if record.status == Status.PAUSED:
            self._failures.pop(record.id, None)
            _say("PAUSED", record, why_paused(command, last), _resume(record))
        elif type(command) is Complete:
            self._failures.pop(record.id, None)
            failure = failure_of(command.outcome)
            assert failure is not None, "successes were passed over"
            _say("failed", record, f"{failure.message} ({failure.code} {failure.kind})".replace(" )", ")"))
        elif type(command) in (FailAttempt, RecordRunFailure, RecordStep):
            count = self._count(record.id)
            if count & count - 1:
                return  # Print the 1st, 2nd, 4th, 8th, ... failure of one invocation.
            times = f"; {count} failures so far" if count > 1 else ""
            _say(_what(command), record, _reason(command, result.message), _next(record, partition, command) + times)

    def _count(self, id_: bytes) -> int:
        count = self._failures.pop(id_, 0) + 1
        self._failures[id_] = count
        if len(self._failures) > KNOWN_MAX:
            self._failures.popitem(last=False)
        return count


def _what(command: Command) -> str:
    if isinstance(command, RecordRunFailure):
        return f"step {command.name!r} failed"
    return f"attempt {command.epoch} failed" if isinstance(command, FailAttempt | RecordStep) else "failed"


def why_paused(command: Command, last: queries.FailedAttempt | None) -> str:
    if last is not None and isinstance(command, FailAttempt) and message_of(command.failure) in last.message:
        return last.message  # It says more, for example how often the process ended.
    return _reason(command, last.message if last is not None else "")


def _reason(command: Command, otherwise: str) -> str:
    packed: list[Any] | None = getattr(command, "failure", None)
    failure = failure_of(packed) if packed is not None else None
    if failure is None:
        return otherwise if not isinstance(command, Pause) else "by an operator"
    trace = (failure.extra or {}).get("trace")
    return f"{failure.message} (at {trace[-1]})" if trace else failure.message


def _next(record: Invocation, partition: Partition, command: Command) -> str:
    """When the invocation continues by itself."""
    if record.status == Status.BACKING_OFF and record.due_ms:
        return f"next attempt in {format_duration_ms(max(record.due_ms - partition.now_ms(), 0))}"
    return "it will be retried" if isinstance(command, RecordRunFailure) else "the next attempt begins now"


def _resume(record: Invocation) -> str:
    return f"continue with: holdfast invocations resume {format_id(record.id)}"


def _say(what: str, record: Invocation, why: str, after: str = "") -> None:
    key = f"/{record.key}" if record.key is not None else ""
    colour = "red" if what in ("PAUSED", "failed") else "yellow"
    why = why if len(why) <= 500 else f"{why[:497]}..."
    about = printable(f"{record.service}{key}/{record.handler} {format_id(record.id)}: {why}")
    click.echo(f"{click.style(what, fg=colour)}: {about}")
    if after:
        click.echo(f"        {after}")
