"""Records for people and scripts: JSON with names, times as text, and decoded payloads.

A payload is bytes that a node never interprets; only here, for an operator, it is decoded as JSON if possible. A large
value is not read for that: its size and its sha256 are shown.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NotRequired, TypedDict

from holdfast.cluster.admin.shapes import approvals, deployments, invocations, objects
from holdfast.cluster.admin.shapes.approvals import ApprovalDecision
from holdfast.cluster.admin.shapes.cluster import Pause
from holdfast.cluster.errors import BadRequest
from holdfast.cluster.handlers.health import Health
from holdfast.cluster.handlers.views import show_health, why_down
from holdfast.cluster.routing.reader import Description, Keyed
from holdfast.cluster.times import show_time
from holdfast.sdk.bounds import load_json
from holdfast.sdk.ids import ID_BYTES, InvocationId, format_approval, format_awakeable, format_id
from holdfast.sdk.journal import (
    NOTHING,
    OP_NAMES,
    Decided,
    Failure,
    Op,
    Step,
    unpack_decided,
)
from holdfast.statemachine import refs
from holdfast.statemachine.commands import Mode, Payload, Ref
from holdfast.statemachine.effects import STATUS_NAMES, Status
from holdfast.statemachine.history import ENDED_NAMES, EndedAttempt
from holdfast.statemachine.inbox import Approval
from holdfast.statemachine.meta import Deployment, Handler, MetaState, Service
from holdfast.statemachine.ops import ROWS
from holdfast.statemachine.outcomes import failure_of, is_success, payload_of, succeeded
from holdfast.statemachine.pauses import Standing, why_paused
from holdfast.statemachine.queries import ServiceStatistics, ShownFailure, completed_ms, shown_status
from holdfast.statemachine.records import END_NAMES, Invocation, Object
from holdfast.statemachine.survey import Queue

SHOWN_BYTES_MAX: Final = 64 * 1024  # of one payload in a journal; longer ones are cut
SHOWN_ELEMENTS_MAX: Final = 2000  # of one payload that is shown as JSON; others are shown as text

MODE_NAMES: Final[Mapping[int, str]] = {
    Mode.PLAIN: "plain",
    Mode.EXCLUSIVE: "exclusive",
    Mode.SHARED: "shared",
    Mode.WORKFLOW: "main",
}


def show_payload(payload: Payload, bytes_max: int = SHOWN_BYTES_MAX) -> Any:
    """JSON as JSON, text as text, anything else as {"base64": ...}."""
    if not isinstance(payload, bytes):
        return {"bytes": refs.size_of(payload), "sha256": payload.data[:32].hex()}
    if len(payload) > bytes_max:
        return {"bytes": len(payload), "begins": show_payload(payload[:200])}
    if not payload:
        return None
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(payload).decode()}
    try:
        return load_json(payload, SHOWN_ELEMENTS_MAX)
    except ValueError:
        return text


def read_payload(value: Any) -> bytes:
    """The inverse: any JSON value, or exactly {"base64": "..."} for bytes."""
    if isinstance(value, dict) and set(value) == {"base64"} and isinstance(value["base64"], str):
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (binascii.Error, ValueError):
            raise BadRequest('{"base64": ...} must hold base64') from None
    return json.dumps(value, separators=(",", ":")).encode()


def show_outcome(outcome: list[Any]) -> invocations.Outcome:
    failure = failure_of(outcome)
    if failure is None:
        return {"value": show_payload(payload_of(outcome))}
    return {"failure": _show_failure(failure)}


def _show_failure(failure: Failure) -> invocations.Failure:
    shown: invocations.Failure = {"code": failure.code, "message": failure.message, "kind": failure.kind or None}
    return {**shown, **_show_extra(failure.extra)}


class _Extra(TypedDict):
    """What some failures have."""

    metadata: NotRequired[dict[str, str]]
    trace: NotRequired[list[str]]


def _show_extra(extra: dict[str, Any] | None) -> _Extra:
    shown: _Extra = {}
    if extra and "metadata" in extra:
        shown["metadata"] = extra["metadata"]
    if extra and "trace" in extra:
        shown["trace"] = extra["trace"]
    return shown


def show_invocation(record: Invocation, failure: ShownFailure | None = None) -> invocations.InvocationRow:
    """One line of a list."""
    return {
        "id": format_id(record.id),
        "service": record.service,
        "handler": record.handler,
        "key": record.key,
        "status": STATUS_NAMES[shown_status(record)],
        "end": END_NAMES[record.end] if record.status == Status.COMPLETED else None,
        "created_at": show_time(record.created_ms),
        "since": show_time(record.since_ms),
        "completed_at": show_time(completed_ms(record)),
        "failure": {"code": failure.code, "message": failure.message, "kind": failure.kind or None}
        if failure is not None
        else None,
        "parent": format_id(record.caller) if record.caller else None,
        "deployment": record.deployment,
        "attempts": record.epoch,
        "failures": record.failures + record.step_failures,
        "lost_streams": record.losses,
        "steps": record.length,
        "idempotency_key": record.idempotency_key,
        "tags": dict(record.tags or {}),
    }


def show_pause(standing: Standing) -> Pause:
    service, key = standing.scope
    return {
        "service": service or None,
        "key": key,
        "by": standing.by,
        "since": show_time(standing.since_ms),
        "reason": standing.reason,
        "stop": standing.recall,
    }


def _why_not_running(description: Description, healths: Sequence[Health], standing: Standing | None) -> str | None:
    record = description.record
    if standing is not None and record.status != Status.COMPLETED:
        going_on = "An attempt that runs goes on until it suspends." if record.status == Status.RUNNING else ""
        return " ".join(filter(None, (why_paused(standing), description.why_not_running or going_on)))
    return (why_down(healths) if record.status == Status.RUNNING else None) or description.why_not_running or None


def show_description(
    description: Description,
    healths: Sequence[Health] = (),
    *,
    standing: Standing | None = None,
    children: int | None = None,
) -> invocations.Invocation:
    """`healths`: of the deployment that will run it. `standing`: the pause that covers it. `children`: how many invocations
    it called and sent, if known."""
    record = description.record
    due = show_time(record.due_ms)
    failure = description.last_failure
    return {
        **show_invocation(record, description.failure),
        "mode": MODE_NAMES[record.mode],
        "why_not_running": _why_not_running(description, healths, standing),
        "starts_at": due if record.status == Status.SCHEDULED else None,
        "next_attempt_at": due if record.status == Status.BACKING_OFF else None,
        "forgotten_at": due if record.status == Status.COMPLETED else None,
        "called_by": {"id": format_id(record.caller), "step": record.caller_step} if record.caller else None,
        "call_depth": record.depth,
        "children": children,
        "steps_copied_from": format_id(record.origin) if record.origin else None,
        "cancelling": record.cancelled,
        "journal_bytes": record.size,
        "journal_nearly_full": record.nearly_full,
        "large_values": record.blobs
        + (description.outcome is not None and refs.in_outcome(description.outcome) is not None),
        "large_bytes": record.blob_bytes,
        "waiting_steps": record.pending,
        "last_failure": {
            "attempt": failure.epoch,
            "at": show_time(failure.at_ms),
            "code": failure.code,
            "message": failure.message,
            "kind": failure.kind or None,
            **_show_extra(failure.extra),
        }
        if failure is not None
        else None,
        "attempt_history": [_show_attempt(attempt) for attempt in description.history],
        "outcome": show_outcome(description.outcome) if description.outcome is not None else None,
    }


def _show_attempt(attempt: EndedAttempt) -> invocations.Attempt:
    error: invocations.Failure | None = (
        {"code": attempt.code, "message": attempt.message, "kind": attempt.kind or None} if attempt.code else None
    )
    return {
        "attempt": attempt.epoch,
        "started_at": show_time(attempt.started_ms),
        "ended_at": show_time(attempt.ended_ms),
        "how": ENDED_NAMES.get(attempt.how, str(attempt.how)),
        "deployment": attempt.deployment,
        "node": attempt.node or None,
        "error": error,
    }


def show_decision(decided: Decided) -> ApprovalDecision:
    """What was decided about an approval. `payload` is there only if it was edited."""
    shown: ApprovalDecision = {
        "choice": decided.choice,
        "by": {"id": decided.by_id or None, "name": decided.by} if decided.choice is not None else None,
        "comment": decided.comment or None,
        "at": show_time(decided.at_ms),
    }
    if decided.payload is not None:
        shown["payload"] = show_payload(decided.payload)
    return shown


def show_approval(row: Approval) -> approvals.Approval:
    """Its id is a name: the secret of it is for the handler and those that it tells."""
    return {
        "id": format_approval(row.invocation, row.step),
        "invocation": format_id(row.invocation),
        "step": row.step,
        "step_key": row.step_key,
        "service": row.service,
        "handler": row.handler,
        "key": row.key,
        "title": row.title,
        "payload": show_payload(row.payload) if row.payload is not None else None,
        "payload_bytes": row.payload_bytes,
        "choices": list(row.choices),
        "assignee": row.assignee,
        "editable": row.editable,
        "since": show_time(row.since_ms),
        "due_at": show_time(row.due_ms),
        "remind_at": show_time(row.remind_ms),
        "reminded_at": show_time(row.reminded_ms),
        "status": row.status,
        "decision": show_decision(unpack_decided(row.decided)) if row.decided is not None else None,
    }


def show_step(id_: InvocationId, index: int, step: Step, *, with_ids: bool = True) -> invocations.Step:
    outcome = None
    if step.outcome is not None:
        outcome = _show_result(step)
    shown: invocations.Step = {
        "index": index,
        "op": OP_NAMES.get(step.op, str(step.op)),
        "key": step.key,
        "argument": _show_argument(step),
        "outcome": outcome,
        "journaled_as": step.made,
        "completed_as": step.done or None,
        "abandoned": step.abandoned,
        "began_at": show_time(step.began_ms),
        "journaled_at": show_time(step.journaled_ms),
        "duration_ms": step.journaled_ms - step.began_ms if step.began_ms and step.done else None,
        "attempt": step.epoch or None,
    }
    if step.op == Op.AWAKEABLE and with_ids:
        shown["argument"]["id"] = format_awakeable(id_, index, *step.argument)
    return shown


def _show_result(step: Step) -> invocations.Outcome:
    """The outcome of a step."""
    outcome = unwrapped(step)
    payload = payload_of(outcome) if step.op == Op.APPROVAL and is_success(outcome) else None
    return {"value": show_decision(unpack_decided(payload))} if isinstance(payload, bytes) else show_outcome(outcome)


def unwrapped(step: Step) -> list[Any]:
    """Values that may be absent have a leading mark."""
    assert step.outcome is not None
    outcome = step.outcome
    row = ROWS.get(step.op)
    if row is None or not row.signature.maybe or not is_success(outcome):
        return outcome
    ref = refs.in_outcome(outcome)
    if ref is not None:
        return succeeded(Ref(ref.code - 1, ref.data))
    payload = payload_of(outcome)
    assert isinstance(payload, bytes), "references were handled above"
    return succeeded(payload[1:] if payload != NOTHING else b"")


def _show_argument(step: Step) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    argument = list(step.argument)
    row = ROWS.get(step.op)
    if row is None:
        return shown
    if row.invokes and argument and _is_id(argument[-1]):
        shown["invocation"] = format_id(argument.pop())
    for kept, value in zip(row.kept, argument, strict=False):
        if not kept.name:
            continue
        if kept.is_time:
            value = show_time(value) if isinstance(value, int) else value
        elif kept.is_invocation and isinstance(value, bytes) and len(value) >= ID_BYTES:
            value = format_id(InvocationId(value[:ID_BYTES]))  # The secret of an awakeable may follow.
        shown[kept.name] = show_payload(value) if isinstance(value, bytes | Ref) else value
    return shown


def _is_id(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) == 16


def show_deployment(
    deployment: Deployment, state: MetaState, in_flight: int, healths: Sequence[Health]
) -> deployments.Deployment:
    return {
        **show_deployment_row(deployment, state, in_flight, healths),
        "services": [
            {
                **_show_offered(deployment, service, state),
                "handlers": [show_handler(handler) for handler in service.handlers],
            }
            for service in deployment.services
        ],
    }


def _show_offered(deployment: Deployment, service: Service, state: MetaState) -> deployments.OfferedServiceRow:
    return {
        "name": service.name,
        "kind": service.kind,
        "revision": deployment.revisions[service.name],
        "current": state.offers[service.name][-1] == deployment.id,
    }


def show_deployment_row(
    deployment: Deployment, state: MetaState, in_flight: int, healths: Sequence[Health]
) -> deployments.DeploymentRow:
    """One line of a list."""
    return {
        "id": deployment.id,
        "uri": deployment.uri,
        "services": [_show_offered(deployment, service, state) for service in deployment.services],
        "in_flight": in_flight,
        "health": show_health(healths),
        "modes": deployment.modes,
        "protocol": {"name": deployment.protocol_name, "min": deployment.protocol[0], "max": deployment.protocol[1]},
        "sdk": deployment.sdk,
        "metadata": deployment.metadata,
        "created_at": show_time(deployment.created_ms),
    }


def show_handler(handler: Handler) -> deployments.Handler:
    return {
        "name": handler.name,
        "mode": handler.mode,
        "doc": handler.doc,
        "input": {"content_type": handler.input_type, "schema": _schema(handler.input_schema)},
        "output": {"content_type": handler.output_type, "schema": _schema(handler.output_schema)},
        "options": handler.options,
    }


def _schema(text: str | None) -> Any:
    return json.loads(text) if text is not None else None


def show_service_row(
    service: Service, deployment: Deployment, state: MetaState, counts: Mapping[str, int]
) -> deployments.ServiceRow:
    """One line of a list."""
    return {
        "name": service.name,
        "kind": service.kind,
        "doc": service.doc,
        "revision": deployment.revisions[service.name],
        "deployment": deployment.id,
        "uri": deployment.uri,
        "private": service.options.get("private", False),
        "handlers": [handler.name for handler in service.handlers],
        "invocations": dict(counts),
        "revisions": [
            {
                "revision": state.deployments[offer].revisions[service.name],
                "deployment": offer,
                "uri": state.deployments[offer].uri,
            }
            for offer in state.offers[service.name]
        ],
    }


def show_service(
    service: Service, deployment: Deployment, state: MetaState, figures: ServiceStatistics
) -> deployments.Service:
    return {
        **show_service_row(service, deployment, state, figures.by_status),
        "handlers": [show_handler(handler) for handler in service.handlers],
        "options": service.options,
        "totals": show_figures(figures),
    }


def show_figures(figures: ServiceStatistics) -> invocations.ServiceFigures:
    return {
        "invoked": figures.invoked,
        "succeeded": figures.succeeded,
        "failed": figures.failed,
        "cancelled": figures.cancelled,
        "killed": figures.killed,
        "attempts": figures.attempts,
        "attempts_failed": figures.attempts_failed,
        "steps": figures.steps,
    }


def show_keyed(service: str, key: str, keyed: Keyed) -> objects.State:
    record = keyed.record
    return {
        "service": service,
        "key": key,
        "held_by": format_id(record.holder) if record is not None and record.holder else None,
        "waiting": record.waiting if record is not None else 0,
        "state": {name: show_payload(payload, refs.size_of(payload)) for name, payload in keyed.state.items()},
        "complete": keyed.complete,
    }


def show_object(record: Object) -> objects.Key:
    """One line of a list of keys."""
    return {
        "key": record.key,
        "held_by": format_id(record.holder) if record.holder else None,
        "waiting": record.waiting,
        "values": record.names,
        "bytes": record.size,
        "promises": record.promises,
    }


def show_queue(found: Queue) -> objects.Queue:
    return {
        "holder": show_invocation(found.holder) if found.holder is not None else None,
        "waiting": [
            {"id": format_id(record.id), "handler": record.handler, "created_at": show_time(record.created_ms)}
            for record in found.waiting
        ],
        "more": found.more,
    }


def show_promise(name: str, outcome: list[Any] | None) -> objects.Promise:
    return {
        "name": name,
        "completed": outcome is not None,
        "outcome": show_outcome(outcome) if outcome is not None else None,
    }
