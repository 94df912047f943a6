"""Code that changed since its journal was written is detected."""

import asyncio

import pytest

from holdfast.sdk import Context, Service
from holdfast.sdk.journal import Op
from tests.sdk.fake_node import FakeNode
from tests.sdk.until import until


def changing(parts: list[str]) -> Service:
    service = Service("changing")

    @service.handler
    async def work(ctx: Context) -> str:
        for part in parts:
            kind, _, name = part.partition(" ")
            if kind == "run":
                await ctx.run(name, lambda: None)
            elif kind == "sleep":
                await ctx.sleep(0.01)
            elif kind == "call":
                await ctx.call(f"changing/{name}")
            elif kind == "keyed":
                await ctx.run(name, lambda: None, key="fixed")
            elif kind == "wait":
                await ctx.awakeable().future
        return "done"

    @service.handler
    async def other(ctx: Context) -> None: ...

    @service.handler
    async def another(ctx: Context) -> None: ...

    return service


@pytest.mark.parametrize(
    ("before", "after", "expected", "found"),
    [
        (["run a", "run b", "wait"], ["run x", "run b", "wait"], "run 'a'", "run 'x'"),
        (["keyed a", "wait"], ["keyed b", "wait"], "run 'a'", "run 'b'"),
        (["run sleep", "wait"], ["sleep", "wait"], "run 'sleep'", "sleep ''"),
        (["run a", "run b", "wait"], ["run a"], "run 'b'", "the handler returns"),
        (["call other", "wait"], ["call another", "wait"], "call 'changing/other'", "call 'changing/another'"),
    ],
)
def test_changed_code_is_detected_and_pauses(before: list[str], after: list[str], expected: str, found: str) -> None:
    async def main() -> None:
        node = FakeNode()
        node.connect([changing(before)])
        invocation = node.invoke("changing", "work")
        await until(lambda: len(invocation.steps) == len(before) + 1 and invocation.steps[-1].op == Op.AWAKEABLE)
        await node.crash()
        node.connect([changing(after)])
        async with asyncio.timeout(30):
            await invocation.paused.wait()

        (failure,) = invocation.errors
        assert failure.kind == "NonDeterminismError"
        assert f"the journal has: {expected}" in failure.message
        assert f"the code does:   {found}" in failure.message

    asyncio.run(main())


def test_code_that_waits_without_repeating_its_operations_pauses() -> None:
    def service(parts: int) -> Service:
        service = Service("asks")

        @service.handler
        async def work(ctx: Context) -> None:
            futures = [ctx.awakeable().future for _ in range(parts)]
            await futures[0]

        return service

    async def main() -> None:
        node = FakeNode()
        node.connect([service(2)])
        invocation = node.invoke("asks", "work")
        await until(lambda: len(invocation.steps) == 3)
        await node.crash()
        invocation.order += 1
        invocation.steps[1] = invocation.steps[1]._replace(done=invocation.order, outcome=[0, b"1"])
        node.connect([service(1)], suspend_after=0.02)
        async with asyncio.timeout(30):
            await invocation.paused.wait()

        assert invocation.errors[0].kind == "NonDeterminismError"

    asyncio.run(main())
