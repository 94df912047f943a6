"""Handlers that call each other endlessly are stopped at a limit on depth."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.sdk.ids import InvocationId, PartitionNumber
from holdfast.sdk.journal import Op, unpack_step
from holdfast.statemachine import queries
from holdfast.statemachine.commands import (
    CALL_DEPTH_MAX,
    Deliver,
    Invoke,
    Mode,
    RaiseLevel,
    RecordStep,
    Restart,
    SetLimits,
    TrimOutbox,
)
from holdfast.statemachine.effects import Status
from holdfast.statemachine.levels import LEVEL
from holdfast.statemachine.machine import apply
from holdfast.statemachine.memory import Memory
from holdfast.statemachine.records import NO_OBJECT, Invocation, pack_invocation, unpack_invocation
from holdfast.statemachine.state import State
from tests.statemachine.rig import HOUR_MS, RESULT, T0, Rig, failure, ident


def calls(
    rig: Rig, caller: InvocationId, name: str, *, service: str = "shop", handler: str = "go", op: int = Op.CALL
) -> tuple[int, InvocationId]:
    which = ident(name, service=service)
    child = Invoke(which, service, handler, None, Mode.PLAIN, b"", {}, 0, caller, 0, HOUR_MS)
    argument: list[Any] = [service, handler, None, b"", {}]
    return rig.step(caller, op, [*argument, 0] if op == Op.SEND else argument, child=child), which


def nest(rig: Rig, depth: int) -> InvocationId:
    """Make a chain of invocations, each called by the one before it, and return the last."""
    last = rig.invoke("0", service="shop", handler="h0")
    for n in range(1, depth + 1):
        _, last = calls(rig, last, str(n), handler=f"h{n}")
    return last


def limits(call_depth_max: int) -> SetLimits:
    return SetLimits(1000, 1 << 20, 1000, 1 << 20, call_depth_max=call_depth_max)


def test_a_chain_of_calls_ends_at_the_limit_with_its_last_members_in_the_message() -> None:
    rig = Rig()
    last = nest(rig, CALL_DEPTH_MAX)
    assert rig.status(last) == Status.RUNNING and rig.load(last).depth == CALL_DEPTH_MAX

    step, beyond = calls(rig, last, "beyond", handler="beyond")

    found = failure(rig.journal(last)[step].outcome)
    assert (found.code, found.kind) == (409, "CallTooDeep")
    assert "101 deep" in found.message and "the limit is 100" in found.message and "call_depth_max" in found.message
    assert "… → shop/h96 → shop/h97 → shop/h98 → shop/h99 → shop/h100 → shop/beyond" in found.message
    assert queries.load(rig.txn, beyond) is None, "nothing began"


def test_the_limit_is_a_setting() -> None:
    rig = Rig()
    rig.do(limits(2))
    last = nest(rig, 2)

    step, _ = calls(rig, last, "beyond", handler="beyond")

    message = failure(rig.journal(last)[step].outcome).message
    assert "the limit is 2" in message and "): shop/h0 → shop/h1 → shop/h2 → shop/beyond." in message


def test_the_caller_of_a_refused_call_continues() -> None:
    rig = Rig()
    rig.do(limits(1))
    last = nest(rig, 1)

    calls(rig, last, "beyond")
    rig.complete(last)

    assert rig.journal(ident("0", service="shop"))[1].outcome == RESULT


def test_a_send_begins_a_new_chain_because_nobody_waits_for_it() -> None:
    rig = Rig()
    rig.do(limits(3))
    last = nest(rig, 3)

    _, sent = calls(rig, last, "sent", op=Op.SEND)

    assert rig.load(sent).depth == 0 and rig.status(sent) == Status.RUNNING


def test_a_restarted_invocation_begins_a_new_chain() -> None:
    rig = Rig()
    last = nest(rig, 3)
    rig.complete(last)

    rig.do(Restart(last, ident("again", service="shop"), 0, None))

    assert rig.load(ident("again", service="shop")).depth == 0


def test_a_call_of_a_known_invocation_gets_its_outcome_at_any_depth() -> None:
    rig = Rig()
    rig.do(limits(2))
    known = rig.invoke("known", service="shop", handler="go")
    last = nest(rig, 2)

    step, _ = calls(rig, last, "known")
    rig.complete(known)

    assert rig.journal(last)[step].outcome == RESULT


def test_before_level_2_depth_is_not_counted() -> None:
    rig = Rig()
    rig.state = State(0, 1, level=1)
    last = nest(rig, CALL_DEPTH_MAX + 5)

    assert rig.status(last) == Status.RUNNING and rig.load(last).depth == 0

    rig.do(RaiseLevel(LEVEL))
    _, child = calls(rig, last, "child")
    assert rig.load(child).depth == 1, "what came before the level began as a chain of its own"


def test_a_record_without_a_chain_keeps_the_bytes_of_earlier_releases() -> None:
    record = Invocation(ident("a"), Status.RUNNING, 1, "s", "h", None, 0, NO_OBJECT, T0, T0, HOUR_MS, None, -1, None)
    raw = pack_invocation(record)

    deep = Invocation(**{**{name: getattr(record, name) for name in record.__slots__}, "depth": 3})

    assert unpack_invocation(record.id, pack_invocation(deep)).depth == 3
    assert len(pack_invocation(deep)) > len(raw)
    assert unpack_invocation(record.id, raw).depth == 0


@pytest.mark.parametrize("partitions", [2, 3])
def test_depth_is_counted_exactly_across_partitions(partitions: int) -> None:
    """Each call goes to the next partition, through the outbox; every message is delivered twice."""
    states = [State(number, partitions) for number in range(partitions)]
    tables = [Memory() for _ in states]

    def do(at: int, command: Any) -> None:
        states[at].begin(tables[at])
        apply(states[at], T0, command)
        states[at].flush()
        states[at].take_effects()

    def deliver() -> None:
        for source in range(partitions):
            for target in range(partitions):
                first, messages = queries.outbox(tables[source], PartitionNumber(target), 0, 100)
                if not messages:
                    continue
                for _ in range(2):
                    do(target, Deliver(PartitionNumber(source), first, messages))
                do(source, TrimOutbox(PartitionNumber(target), first + len(messages) - 1))

    def here(number: int, depth: int) -> InvocationId:
        tail = depth.to_bytes(12, "big")
        ids = (InvocationId(head.to_bytes(4, "big") + tail) for head in range(0, 2**32, 2**24 + 1))
        return next(each for each in ids if states[number].is_here(each))

    at, last = 0, here(0, 0)
    do(0, limits(7))
    for number in range(1, partitions):
        do(number, limits(7))
    do(0, Invoke(last, "shop", "go", None, Mode.PLAIN, b"", {}, 0, None, -1, HOUR_MS))
    for depth in range(1, 9):
        to = (at + 1) % partitions
        which = here(to, depth)
        child = Invoke(which, "shop", "go", None, Mode.PLAIN, b"", {}, 0, last, 0, HOUR_MS)
        do(at, RecordStep(last, 1, 1, Op.CALL, "/call", ["shop", "go", None, b"", {}], None, None, list(child)))
        deliver()
        deliver()
        record = queries.load(tables[to], which)
        if depth <= 7:
            assert record is not None and record.depth == depth
            at, last = to, which
        else:
            assert record is None
            step = unpack_step(queries.journal(tables[at], last, 0, 10)[1])
            assert failure(step.outcome).kind == "CallTooDeep"
