"""Approvals in handlers: what people are asked, what their decision is, and what becomes of one that lost a race."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast.sdk import Approval, Context, Decision, MisusedContext, Service, TerminalError
from holdfast.sdk.frames import Abandon
from holdfast.sdk.ids import parse_approval
from holdfast.sdk.journal import Decided, Op
from tests.sdk.fake_node import FakeNode, Invocation

AT_MS = 1_700_000_000_000
ANN = Decided("approve", "Ann", "tk1", "fine", AT_MS)


@dataclasses.dataclass
class Refund:
    order: int
    eur: int


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def asked(invocation: Invocation) -> list[int]:
    """The approvals that wait."""
    return [
        index
        for index, step in enumerate(invocation.steps)
        if step.op == Op.APPROVAL and step.outcome is None and not step.abandoned
    ]


async def decided(ask: Callable[[Context], Awaitable[Any]], *decisions: Decided) -> tuple[list[Any], Invocation]:
    """What `ask` returned in an attempt that saw the decisions live, and in one that replayed them; and the invocation."""
    seen: list[Any] = []
    service = Service("shop")

    @service.handler
    async def refund(ctx: Context) -> None:
        seen.append(await ask(ctx))
        await ctx.awakeable().future

    node = FakeNode()
    node.connect([service])
    invocation = node.invoke("shop", "refund")
    for decision in decisions:
        await until(lambda: asked(invocation))
        node.decide(invocation, asked(invocation)[0], decision)
    await until(lambda: seen)
    await node.crash()
    node.connect([service])
    await until(lambda: len(seen) == 2 or invocation.paused.is_set())
    assert not invocation.errors, invocation.errors
    return seen, invocation


def test_a_decision_says_who_chose_what_and_when_in_every_attempt() -> None:
    async def ask(ctx: Context) -> Decision[dict[str, int]]:
        return await ctx.approval("Refund order 17?", {"order": 17}, assignee="finance", timeout=timedelta(days=2))

    [live, replayed], invocation = asyncio.run(decided(ask, ANN))

    assert (
        live
        == replayed
        == Decision(
            choice="approve",
            approved=True,
            by="Ann",
            comment="fine",
            payload={"order": 17},
            decided_at=datetime.fromtimestamp(AT_MS / 1000, UTC),
        )
    )
    step = invocation.steps[1]
    assert step.argument[:-1] == [
        "Refund order 17?", b'{"order":17}', ["approve", "reject"], "finance", 172_800_000, 0, True
    ]  # fmt: skip


def test_the_payload_is_the_edited_one_in_the_type_that_was_shown() -> None:
    async def ask(ctx: Context) -> list[Any]:
        first = await ctx.approval("Refund?", Refund(17, 240))
        second = await ctx.approval("Refund?", {"order": 18, "eur": 1}, payload_type=Refund)
        return [first.payload, first.edited, second.payload, second.edited]

    [live, replayed], _ = asyncio.run(decided(ask, ANN._replace(payload=b'{"order":17,"eur":200}'), ANN))

    assert live == replayed == [Refund(17, 200), True, Refund(18, 1), False]


def test_an_edited_payload_of_another_type_is_an_error_that_the_code_can_handle() -> None:
    async def ask(ctx: Context) -> str:
        try:
            await ctx.approval("Refund?", Refund(17, 240))
        except TerminalError as error:
            return f"{error.code} {error.kind} {error}"
        return "no error"

    [live, replayed], _ = asyncio.run(decided(ask, ANN._replace(payload=b'{"order":"x","eur":1}')))

    assert live == replayed
    assert live.startswith(
        "400 BadValue the payload of approval 'Refund?', as Ann edited it, does not have its type: at .order"
    )


@pytest.mark.parametrize(
    ("choices", "choice", "approved"),
    [
        (("approve", "reject"), "approve", True),
        (("approve", "reject"), "reject", False),
        (("reject", "approve"), "approve", True),
        (("reject", "approve"), "reject", False),
        (("ship", "hold", "return"), "ship", True),
        (("ship", "hold", "return"), "hold", False),
        (("ship", "hold"), None, False),
    ],
)
def test_a_decision_is_true_only_if_it_approves(choices: tuple[str, ...], choice: str | None, approved: bool) -> None:
    async def ask(ctx: Context) -> tuple[bool, bool, bool]:
        decision = await ctx.approval("Ship?", choices=choices)
        return decision.approved, bool(decision), decision.timed_out

    [live, replayed], _ = asyncio.run(decided(ask, ANN._replace(choice=choice)))

    assert live == replayed == (approved, approved, choice is None)


def test_the_id_of_an_approval_has_a_secret_that_later_attempts_find_in_the_journal() -> None:
    async def ask(ctx: Context) -> str:
        return ctx.approval("Refund?").id

    [live, replayed], invocation = asyncio.run(decided(ask))

    id_ = parse_approval(live)
    assert live == replayed and id_[:2] == (invocation.id, 1)
    assert id_.secret == invocation.steps[1].argument[7] and len(id_.secret) == 8


def test_a_key_names_the_step() -> None:
    async def ask(ctx: Context) -> None:
        ctx.approval("Refund?", key="call_17")
        ctx.approval("Refund?")

    _, invocation = asyncio.run(decided(ask))

    assert invocation.journal()[:2] == [("approval", "=call_17"), ("approval", "approval")]


LOSES: dict[str, Callable[[Context, Approval[None]], Awaitable[Any]]] = {
    "race": lambda ctx, approval: ctx.race(approval, ctx.sleep(0.1)),
    "select": lambda ctx, approval: ctx.select(decision=approval, late=ctx.sleep(0.1)),
    "any": lambda ctx, approval: ctx.any(approval, ctx.sleep(0.1)),
    "timeout": lambda ctx, approval: ctx.timeout(approval, 0.1),
    "asyncio": lambda ctx, approval: asyncio.wait_for(approval, 0.05),
}


@pytest.mark.parametrize("how", LOSES)
def test_an_approval_that_loses_is_withdrawn(how: str) -> None:
    async def ask(ctx: Context) -> str:
        approval = ctx.approval("Refund?")
        with contextlib.suppress(TimeoutError):
            await LOSES[how](ctx, approval)
        try:
            await approval
        except MisusedContext:
            return "cannot be awaited again"
        return "decided"

    [live, replayed], invocation = asyncio.run(decided(ask))

    assert live == replayed == "cannot be awaited again"
    assert asked(invocation) == [] and invocation.steps[1].abandoned


@pytest.mark.parametrize("how", ["race", "select", "timeout"])
def test_an_approval_that_is_kept_may_be_awaited_after_it_lost(how: str) -> None:
    async def ask(ctx: Context) -> str:
        approval = ctx.approval("Refund?", keep=True)
        with contextlib.suppress(TimeoutError):
            await LOSES[how](ctx, approval)
        await ctx.run("escalate", lambda: None)
        return (await approval).by

    async def main() -> None:
        seen: list[str] = []
        service = Service("shop")

        @service.handler
        async def refund(ctx: Context) -> None:
            seen.append(await ask(ctx))

        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("shop", "refund")
        await until(lambda: ("run", "escalate") in invocation.journal())
        assert asked(invocation) == [1]
        node.decide(invocation, 1, ANN)
        await node.result(invocation)

        assert seen == ["Ann"]

    asyncio.run(main())


def test_an_approval_that_another_task_still_awaits_is_not_withdrawn() -> None:
    async def ask(ctx: Context) -> str:
        approval = ctx.approval("Refund?")
        task = asyncio.create_task(ctx.gather(approval))
        await asyncio.sleep(0)
        await ctx.race(approval, ctx.sleep(0.01))
        return (await task)[0].by

    [live, replayed], _ = asyncio.run(decided(ask, ANN))

    assert live == replayed == "Ann"


def test_an_approval_that_wins_abandons_nothing_and_returns_its_decision() -> None:
    async def ask(ctx: Context) -> Any:
        return await ctx.race(ctx.approval("Refund?"), ctx.sleep(days=300))

    async def main() -> None:
        [live, replayed], _ = await decided(ask, ANN)
        assert live == replayed and live.approved

    asyncio.run(main())


def test_an_attempt_that_waits_for_an_approval_is_suspended_until_somebody_decides() -> None:
    async def main() -> None:
        service = Service("shop")

        @service.handler
        async def refund(ctx: Context) -> str:
            return (await ctx.approval("Refund?")).by

        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("shop", "refund")
        async with asyncio.timeout(30):
            await invocation.suspended.wait()
        node.decide(invocation, 1, ANN)

        assert await node.result(invocation) == b'"Ann"' and invocation.epoch == 2
        assert not any(isinstance(frame, Abandon) for frame in node.frames)

    asyncio.run(main())


WRONG: dict[str, Callable[[Context], Any]] = {
    "title": lambda ctx: ctx.approval(""),
    "long title": lambda ctx: ctx.approval("x" * 513),
    "no choices": lambda ctx: ctx.approval("Refund?", choices=[]),
    "one text": lambda ctx: ctx.approval("Refund?", choices="approve"),
    "the same twice": lambda ctx: ctx.approval("Refund?", choices=["a", "a"]),
    "no list of choices": lambda ctx: ctx.approval("Refund?", choices=None),  # type: ignore[call-overload]
    "choices without an order": lambda ctx: ctx.approval("Refund?", choices={"a", "b"}),  # type: ignore[call-overload]
    "choices that are not texts": lambda ctx: ctx.approval("Refund?", choices=[["a"], ["b"]]),  # type: ignore[list-item]
    "too many choices": lambda ctx: ctx.approval("Refund?", choices=[str(number) for number in range(17)]),
    "long choice": lambda ctx: ctx.approval("Refund?", choices=["x" * 65]),
    "assignee": lambda ctx: ctx.approval("Refund?", assignee=""),
    "timeout": lambda ctx: ctx.approval("Refund?", timeout=0),
    "timeout as text": lambda ctx: ctx.approval("Refund?", timeout="2d"),  # type: ignore[call-overload]
    "reminder at a time": lambda ctx: ctx.approval("Refund?", remind_after=datetime.now(UTC)),  # type: ignore[call-overload]
    "negative timeout": lambda ctx: ctx.approval("Refund?", timeout=-1),
    "reminder after the deadline": lambda ctx: ctx.approval("Refund?", timeout=5, remind_after=5),
    "payload of another type": lambda ctx: ctx.approval("Refund?", {"order": 17}, payload_type=Refund),
    "field of another type": lambda ctx: ctx.approval("Refund?", Refund("17", 240)),  # type: ignore[arg-type]
    "large payload": lambda ctx: ctx.approval("Refund?", "x" * 65_536),
    "key twice": lambda ctx: (ctx.approval("Refund?", key="k"), ctx.approval("Refund?", key="k")),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_argument_of_an_approval_is_refused_where_it_is_made(what: str) -> None:
    async def main() -> None:
        service = Service("shop")

        @service.handler
        async def refund(ctx: Context) -> str:
            try:
                WRONG[what](ctx)
            except MisusedContext:
                return "refused"
            return "taken"

        node = FakeNode()
        node.connect([service])

        assert await node.call("shop", "refund") == b'"refused"'

    asyncio.run(main())


def test_an_approval_is_tried_again_until_the_cluster_is_upgraded() -> None:
    async def main() -> None:
        service = Service("shop")

        @service.handler
        async def refund(ctx: Context) -> str:
            return (await ctx.approval("Refund?")).by

        node = FakeNode(secrets=False)
        node.connect([service])
        invocation = node.invoke("shop", "refund")
        await until(lambda: invocation.errors)
        assert not invocation.paused.is_set() and len(invocation.steps) == 1
        assert "every node of the cluster runs release 0.2" in invocation.errors[0].message

        node.secrets = True
        await until(lambda: asked(invocation))
        node.decide(invocation, 1, ANN)

        assert await node.result(invocation) == b'"Ann"'

    asyncio.run(main())
