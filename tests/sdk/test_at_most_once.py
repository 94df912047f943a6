"""Steps that run at most once: when they are in doubt, and how that is decided."""

import asyncio
from typing import Any

import pytest

from holdfast.sdk import Context, RunAgain, Service, TerminalError, current_step
from tests.sdk.fake_node import FakeNode


def test_at_most_once_is_in_doubt_after_a_crash_and_pauses() -> None:
    charged: list[str] = []
    service = Service("payments")
    gate = asyncio.Event()

    async def charge() -> str:
        charged.append(current_step().effect_key)
        await gate.wait()
        return "receipt"

    @service.handler
    async def pay(ctx: Context) -> str:
        return await ctx.run("charge", charge, effect="at_most_once")

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("payments", "pay")
        while not charged:
            await asyncio.sleep(0.001)
        await node.crash()
        node.connect([service])
        async with asyncio.timeout(30):
            await invocation.paused.wait()

        assert invocation.errors[0].kind == "InDoubt"
        assert charged[0] in invocation.errors[0].message
        assert len(charged) == 1

        # An operator decides that it did happen.
        invocation.order += 1
        invocation.steps[1] = invocation.steps[1]._replace(done=invocation.order, outcome=[0, b'"found"'])
        node._begin(invocation)
        assert await node.result(invocation) == b'"found"'

    asyncio.run(main())

    assert len(charged) == 1


def test_a_run_that_is_decided_not_to_have_happened_is_in_doubt_again_before_it_begins() -> None:
    charged: list[str] = []
    service = Service("payments")

    async def charge() -> str:
        charged.append(current_step().effect_key)
        await asyncio.Event().wait()
        return "receipt"

    @service.handler
    async def pay(ctx: Context) -> str:
        return await ctx.run("charge", charge, effect="at_most_once")

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("payments", "pay")
        while not charged:
            await asyncio.sleep(0.001)
        await node.crash()
        node.connect([service])
        async with asyncio.timeout(30):
            await invocation.paused.wait()
            invocation.paused.clear()

            # An operator decides that it did not happen.
            invocation.steps[1] = invocation.steps[1]._replace(argument=["charge", 0, 0, "", 0])
            node._begin(invocation)
            while len(charged) < 2:
                await asyncio.sleep(0.001)
            assert invocation.steps[1].argument == ["charge"]
            await node.crash()
            node.connect([service])
            await invocation.paused.wait()

    asyncio.run(main())

    assert len(charged) == 2


@pytest.mark.parametrize(("answer", "expected", "charges"), [("found", b'"found"', 1), (RunAgain(), b'"receipt"', 2)])
def test_a_reconcile_hook_decides_a_step_in_doubt(answer: Any, expected: bytes, charges: int) -> None:
    charged: list[str] = []
    asked: list[str] = []
    service = Service("payments")

    async def charge() -> str:
        charged.append(current_step().effect_key)
        if len(charged) == 1:
            await asyncio.Event().wait()
        return "receipt"

    def reconcile(effect_key: str) -> str:
        asked.append(effect_key)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    @service.handler
    async def pay(ctx: Context) -> str:
        return await ctx.run("charge", charge, effect="at_most_once", reconcile=reconcile)

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("payments", "pay")
        while not charged:
            await asyncio.sleep(0.001)
        await node.crash()
        node.connect([service])

        assert await node.result(invocation) == expected

    asyncio.run(main())

    assert asked == charged[:1]
    assert len(charged) == charges


def test_a_failing_reconcile_hook_is_retried_without_the_code_noticing() -> None:
    charged: list[str] = []
    asked: list[str] = []
    service = Service("payments")

    async def charge() -> str:
        charged.append(current_step().effect_key)
        await asyncio.Event().wait()
        return "receipt"

    def reconcile(effect_key: str) -> str:
        asked.append(effect_key)
        if len(asked) == 1:
            raise ConnectionError("the bank does not answer")
        return "found"

    @service.handler
    async def pay(ctx: Context) -> str:
        try:
            return await ctx.run("charge", charge, effect="at_most_once", reconcile=reconcile)
        except Exception:
            return "not paid"

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("payments", "pay")
        while not charged:
            await asyncio.sleep(0.001)
        await node.crash()
        node.connect([service])

        assert await node.result(invocation) == b'"found"'
        assert [failure.message for failure in invocation.errors] == ["ConnectionError: the bank does not answer"]

    asyncio.run(main())

    assert len(charged) == 1 and len(asked) == 2


def test_at_most_once_fails_with_the_first_exception() -> None:
    service = Service("payments")
    tries: list[int] = []

    def charge() -> str:
        tries.append(1)
        raise TimeoutError("no answer")

    @service.handler
    async def pay(ctx: Context) -> str:
        return await ctx.run("charge", charge, effect="at_most_once")

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        with pytest.raises(TerminalError, match="TimeoutError: no answer"):
            await node.call("payments", "pay")

    asyncio.run(main())

    assert tries == [1]
