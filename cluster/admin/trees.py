"""What belongs to one invocation beside its record: the tree of calls, and whole values of its steps."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from holdfast.cluster.admin.choices import PARTS
from holdfast.cluster.admin.parameters import AdminRequest, Parameters, id_of, json_answer, step_of
from holdfast.cluster.admin.shapes.invocations import Tree, TreeNode
from holdfast.cluster.admin.views import unwrapped
from holdfast.cluster.errors import NotFound, TooLarge, UnknownInvocation
from holdfast.cluster.http.exchange import JSON, Answer
from holdfast.cluster.routing.reader import Reader
from holdfast.cluster.routing.trees import Node, Trees
from holdfast.cluster.times import show_time
from holdfast.sdk.ids import ID_BYTES, InvocationId, format_id
from holdfast.sdk.journal import Kind, Op, Step
from holdfast.statemachine import refs
from holdfast.statemachine.commands import Payload
from holdfast.statemachine.effects import STATUS_NAMES, Status
from holdfast.statemachine.ops import ROWS
from holdfast.statemachine.outcomes import is_success, payload_of
from holdfast.statemachine.queries import completed_ms, shown_status
from holdfast.statemachine.records import END_NAMES

VALUE_BYTES_MAX: Final = 32 * 1024 * 1024
AT_A_TIME: Final = 4  # whole values and trees that are read at once
OCTETS: Final = "application/octet-stream"
OUTCOME: Final = "outcome"


class TreeAdmin:
    def __init__(self, reader: Reader, trees: Trees) -> None:
        self._reader = reader
        self._trees = trees
        self._turns = asyncio.Semaphore(AT_A_TIME)

    async def on_tree(self, request: AdminRequest) -> Answer:
        Parameters(request)
        id_ = id_of(request)
        description = await self._reader.describe(id_)
        if description is None:
            raise UnknownInvocation(f"there is no invocation {format_id(id_)}")
        async with self._turns:
            tree = await self._trees.tree(description.record)
        nodes = [_show(node) for node in tree.nodes]
        shown: Tree = {"root": format_id(tree.root), "nodes": nodes, "complete": tree.complete}
        return json_answer(200, shown)

    async def on_step_value(self, request: AdminRequest) -> Answer:
        part = Parameters(request, "part").choice("part", PARTS)
        id_ = id_of(request)
        if request.path["step"] == OUTCOME:
            payload = await self._outcome(id_)
        else:
            index = step_of(request)
            step = await self._step(id_, index)
            payload = await self._input(step, index) if part == "input" else _output(step, index)
        async with self._turns:
            body = await self._whole(id_, payload)
            is_json = await asyncio.to_thread(_is_json, body)
        return Answer(200, body, JSON if is_json else OCTETS)

    async def _outcome(self, id_: InvocationId) -> Payload:
        description = await self._reader.describe(id_)
        if description is None:
            raise UnknownInvocation(f"there is no invocation {format_id(id_)}")
        if description.outcome is None:
            raise NotFound("the invocation has no outcome yet")
        return _success(description.outcome, "the invocation")

    async def _step(self, id_: InvocationId, index: int) -> Step:
        steps = await self._reader.journal(id_, index, 1)
        if steps is None:
            raise UnknownInvocation(f"there is no invocation {format_id(id_)}")
        if not steps:
            raise NotFound(f"there is no step {index}")
        return steps[0]

    async def _input(self, step: Step, index: int) -> Payload:
        """What a step was given. The input of a call is in the journal of the invocation that it began."""
        row = ROWS.get(step.op)
        if step.op == Op.INPUT:
            return _output(step, index)
        if row is not None and (at := row.signature.offset_of(Kind.VALUE)) is not None:
            payload: Payload = step.argument[at]
            return payload
        if row is None or not row.invokes or not _is_id(step.argument[-1:]):
            raise NotFound(f"step {index} was given no value")
        child = InvocationId(step.argument[-1])
        steps = await self._reader.journal(child, 0, 1)
        if not steps:
            raise NotFound(f"the input of step {index} was removed with {format_id(child)}")
        return _output(steps[0], 0)

    async def _whole(self, id_: InvocationId, payload: Payload) -> bytes:
        if refs.size_of(payload) > VALUE_BYTES_MAX:
            raise TooLarge(f"the value has {refs.size_of(payload)} bytes, and at most {VALUE_BYTES_MAX} are shown")
        return payload if isinstance(payload, bytes) else await self._reader.value(id_, payload)


def _output(step: Step, index: int) -> Payload:
    if step.outcome is None:
        raise NotFound(f"step {index} has no outcome" + ("" if step.done or step.abandoned else " yet"))
    return _success(unwrapped(step), f"step {index}")


def _success(outcome: list[Any], whose: str) -> Payload:
    if not is_success(outcome):
        raise NotFound(f"{whose} failed, and has no value")
    return payload_of(outcome)


def _is_id(last: list[Any]) -> bool:
    return bool(last) and isinstance(last[0], bytes) and len(last[0]) == ID_BYTES


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _show(node: Node) -> TreeNode:
    record = node.record
    done = record is not None and record.status == Status.COMPLETED
    return {
        "id": format_id(node.id),
        "parent": format_id(node.parent) if node.parent is not None else None,
        "step": node.step,
        "service": node.service,
        "handler": node.handler,
        "key": node.key,
        "status": STATUS_NAMES[shown_status(record)] if record is not None else None,
        "end": END_NAMES[record.end] if record is not None and done else None,
        "created_at": show_time(record.created_ms) if record is not None else None,
        "completed_at": show_time(completed_ms(record)) if record is not None else None,
    }
