"""One attempt and the next: steps, replay, order."""

import asyncio
from typing import Any

from holdfast.sdk import Context, Service
from tests.sdk.fake_node import FakeNode


def test_steps_run_once_and_recovery_lands_on_the_failing_one() -> None:
    ran: list[str] = []
    trips = Service("trips")

    @trips.handler
    async def book(ctx: Context, city: str) -> str:
        flight = await ctx.run("flight", note, f"flight {city}")
        hotel = await ctx.run("hotel", note, f"hotel {city}")
        car = await ctx.run("car", note, f"car {city}")
        return f"{flight}, {hotel}, {car}"

    async def note(what: str) -> str:
        ran.append(what)
        return what

    async def main() -> None:
        node = FakeNode()
        node.crash_at = lambda frame: "after" if getattr(frame, "key", "") == "hotel" else None
        node.connect([trips])
        invocation = node.invoke("trips", "book", b'"Rome"')
        await node.crashed.wait()
        node.crash_at = None
        node.connect([trips])

        assert await node.result(invocation) == b'"flight Rome, hotel Rome, car Rome"'
        assert ran == ["flight Rome", "hotel Rome", "car Rome"]
        assert invocation.journal() == [("run", "flight"), ("run", "hotel"), ("run", "car")]

    asyncio.run(main())


def test_sleep_call_and_sync_functions_work() -> None:
    services = Service("services")

    def double(n: int) -> int:
        return 2 * n

    @services.handler
    async def outer(ctx: Context, n: int) -> dict[str, Any]:
        await ctx.sleep(0.1)
        called = await ctx.call(inner, n)
        return {"called": called, "doubled": await ctx.run("double", double, called)}

    @services.handler
    async def inner(ctx: Context, n: int) -> int:
        return n + 1

    async def main() -> None:
        node = FakeNode()
        node.connect([services])

        assert await node.call("services", "outer", b"4") == b'{"called":5,"doubled":10}'

    asyncio.run(main())
