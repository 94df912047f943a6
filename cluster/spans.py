"""An invocation as spans: made of its record, journal and history once it has completed, so that no span is made in replay.

Everything is derived from what is journaled, ids included. A step is one span however often it was tried. Payloads, headers
and state never become attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from holdfast.sdk.ids import InvocationId, format_id
from holdfast.sdk.journal import OP_NAMES, Kind, Step
from holdfast.sdk.trace_context import (
    attempt_span,
    invocation_span,
    read_parent,
    root_id,
    step_span,
    trace_id_for,
)
from holdfast.statemachine.history import EndedAttempt
from holdfast.statemachine.ops import ROWS
from holdfast.statemachine.outcomes import failure_of
from holdfast.statemachine.records import Invocation

#: Of a step that calls, the span of what is called is a child.
CLIENT: Final = "client"
PRODUCER: Final = "producer"
SERVER: Final = "server"
INTERNAL: Final = "internal"
NAME_MAX: Final = 128
TEXT_MAX: Final = 1024


class Span(NamedTuple):
    trace_id: str
    span_id: str
    parent_id: str  # empty: none
    name: str
    kind: str
    start_ms: int
    end_ms: int
    attributes: Mapping[str, str | int | bool]
    error: str | None = None  # why it failed


def is_wanted(record: Invocation, headers: Mapping[str, str], ratio: float) -> bool:
    """Whether its caller wants the trace; if nobody decided, a share of all traces is."""
    parent = read_parent(headers)
    return parent.sampled if parent is not None else in_share(trace_id_for(record.id), ratio)


def in_share(trace_id: str, ratio: float) -> bool:
    """The same for every node, as the sampler TraceIdRatioBased of OpenTelemetry decides."""
    return int(trace_id[16:], 16) < ratio * (1 << 64)


def of_invocation(
    record: Invocation, steps: Sequence[Step], ended: Sequence[EndedAttempt], *, outcome: list[Any], dropped: int = 0
) -> Iterator[Span]:
    """The spans of a completed invocation. `steps` without `dropped` ones, which were too many."""
    ident = record.id
    headers = steps[0].argument[0] if steps and steps[0].argument else {}
    parent = read_parent(headers)
    trace_id = parent.trace_id if parent is not None else trace_id_for(ident)
    parent_id = parent.span_id if parent is not None and parent.span_id != root_id(ident) else ""
    about: dict[str, str | int | bool] = {
        "holdfast.invocation.id": format_id(ident),
        "holdfast.service": record.service,
        "holdfast.handler": record.handler,
        **({"holdfast.key": record.key[:TEXT_MAX]} if record.key is not None else {}),
    }
    yield Span(
        trace_id=trace_id,
        span_id=invocation_span(ident),
        parent_id=parent_id,
        name=f"{record.service}/{record.handler}"[:NAME_MAX],
        kind=SERVER,
        start_ms=record.created_ms,
        end_ms=record.since_ms,
        attributes={
            **about,
            "holdfast.attempts": record.epoch,
            "holdfast.steps": max(record.length - 1, 0),
            **({"holdfast.deployment": record.deployment} if record.deployment is not None else {}),
            **({"holdfast.steps.dropped": dropped} if dropped else {}),
        },
        error=_error(outcome),
    )
    known = set()
    for attempt in _attempts(record, steps, ended, trace_id=trace_id, about=about):
        known.add(attempt.span_id)
        yield attempt
    for index, step in enumerate(steps):
        if index and step.journaled_ms and not step.abandoned:
            own = attempt_span(ident, step.epoch)
            yield _step(trace_id, ident, index, step, parent_id=own if own in known else invocation_span(ident))


def _attempts(
    record: Invocation,
    steps: Sequence[Step],
    ended: Sequence[EndedAttempt],
    *,
    trace_id: str,
    about: Mapping[str, str | int | bool],
) -> Iterator[Span]:
    """Those that failed or were lost have their times in the history; of others, the first and last step tell."""
    failed = {each.epoch: each for each in ended}
    times: dict[int, tuple[int, int]] = {each.epoch: (each.started_ms, each.ended_ms) for each in ended}
    for step in steps:
        if step.epoch and step.journaled_ms and step.epoch not in failed:
            began = step.began_ms or step.journaled_ms
            first, last = times.get(step.epoch, (began, step.journaled_ms))
            times[step.epoch] = min(first, began), max(last, step.journaled_ms)
    if record.epoch and record.epoch not in failed:
        first, _ = times.get(record.epoch, (record.created_ms if record.epoch == 1 else record.since_ms, 0))
        times[record.epoch] = first, record.since_ms
    for epoch, (start_ms, end_ms) in sorted(times.items()):
        end = failed.get(epoch)
        yield Span(
            trace_id=trace_id,
            span_id=attempt_span(record.id, epoch),
            parent_id=invocation_span(record.id),
            name=f"attempt {epoch}",
            kind=INTERNAL,
            start_ms=start_ms,
            end_ms=end_ms,
            attributes={**about, "holdfast.attempt": epoch, **({"holdfast.node": end.node} if end is not None else {})},
            error=(f"{end.kind}: {end.message}"[:TEXT_MAX] if end.message else "cut short")
            if end is not None
            else None,
        )


def _step(trace_id: str, ident: InvocationId, index: int, step: Step, *, parent_id: str) -> Span:
    name, kind = OP_NAMES.get(step.op, str(step.op)), INTERNAL
    argument, row = step.argument, ROWS.get(step.op)
    if row is not None and row.invokes:
        kind = CLIENT if row.signature.awaited else PRODUCER
        name = f"{name} {argument[0]}/{argument[1]}"
    elif row is not None and argument and row.signature.parts[0].kind is Kind.NAME:
        name = f"{name} {argument[0]}"
    return Span(
        trace_id=trace_id,
        span_id=step_span(ident, step.key),
        parent_id=parent_id,
        name=name[:NAME_MAX],
        kind=kind,
        start_ms=min(step.began_ms or step.journaled_ms, step.journaled_ms),
        end_ms=step.journaled_ms,
        attributes={
            "holdfast.invocation.id": format_id(ident),
            "holdfast.step.key": step.key[:TEXT_MAX],
            "holdfast.step.index": index,
            "holdfast.step.op": OP_NAMES.get(step.op, str(step.op)),
            "holdfast.step.completed": step.outcome is not None or step.done > 0,
            "holdfast.attempt": step.epoch,
        },
        error=_error(step.outcome),
    )


def _error(outcome: list[Any] | None) -> str | None:
    """Of an outcome that is a failure: its kind and message."""
    failure = failure_of(outcome) if outcome is not None else None
    return f"{failure.kind}: {failure.message}"[:TEXT_MAX] if failure is not None else None
