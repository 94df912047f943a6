"""A handler that calls itself without end, on a real node that loses its leader meanwhile."""

import asyncio
from collections import Counter
from pathlib import Path

from holdfast.sdk import CallFailed, Client, Context, ObjectContext, Server, Service, TerminalError, VirtualObject
from holdfast.statemachine import queries
from tests.cluster.harness import World, eventually

LIMIT = 8


class Handlers:
    def __init__(self) -> None:
        self.begun: Counter[int] = Counter()
        self.gate = asyncio.Event()
        self.messages: list[str] = []
        self.service = service = Service("deep")
        self.mirror = mirror = VirtualObject("mirror")

        @service.handler
        async def dig(ctx: Context, depth: int) -> int:
            self.begun[depth] += 1
            if depth == 5:
                await self.gate.wait()
            below: int = await ctx.call(dig, depth + 1)
            return below

        @service.handler
        async def start(ctx: Context) -> str:
            try:
                await ctx.call(mirror_look, 1, key="1")
            except TerminalError as error:
                self.messages.append(error.message)
                return "ended"
            return "endless"

        @mirror.handler
        async def look(ctx: ObjectContext, depth: int) -> None:
            await ctx.call(mirror_look, depth + 1, key=str(depth + 1))

        mirror_look = look


def test_a_handler_that_calls_itself_without_end_fails_at_the_limit(tmp_path: Path) -> None:
    async def run() -> None:
        it = World(tmp_path, call_depth_max=LIMIT)
        await it.start()
        handlers = Handlers()
        server = Server([handlers.service, handlers.mirror], suspend_after=0.05)
        await server.start(port=0)
        await it.node.ground.registry.register(server.uri, force=True)
        try:
            async with Client(it.node.doors.urls.ingress) as client:
                handle = await client.send("deep/dig", 0)
                await eventually(lambda: handlers.begun[5], "the chain reaches its middle")

                await it.restart()
                handlers.gate.set()

            async with Client(it.node.doors.urls.ingress) as client:
                try:
                    await client.attach(handle.invocation_id)
                    raise AssertionError("it came back from the deep")
                except CallFailed as error:
                    assert error.code == 409
                    assert f"the limit is {LIMIT}" in error.message and "→ deep/dig → deep/dig" in error.message
                assert max(handlers.begun) == LIMIT, "replay and the new leader count as the old one did"

                assert await client.call("deep/start") == "ended"
                assert handlers.messages[0].count("mirror/") == 6, "five callers, and what was called"
                assert f"mirror/{LIMIT}/look → mirror/{LIMIT + 1}/look." in handlers.messages[0]
            for partition in it.node.partitions:
                with partition.state.read() as txn:
                    assert queries.meta(txn).call_depth_max == LIMIT
        finally:
            await server.stop()
            await it.stop()

    asyncio.run(run())
