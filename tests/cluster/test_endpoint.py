"""One deployment as a node sees it: the protocol version that both sides use, and whether it is reachable."""

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest
import uvicorn

from holdfast.sdk import Context, Service, endpoint
from holdfast.sdk.frames import VERSION
from holdfast.sdk.ids import InvocationId, format_id
from holdfast.statemachine import queries
from holdfast.statemachine.effects import Status
from tests.cluster.harness import Handled, Script, echo, eventually, world

MODES = pytest.mark.parametrize("modes", [("stream",), ("request-response",)])


@MODES
@pytest.mark.parametrize("highest", range(1, VERSION + 1))
def test_the_highest_common_version_is_spoken(tmp_path: Path, modes: tuple[str, ...], highest: int) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/echo": echo}, modes=modes, highest=highest)

            assert await it.call("greeter/echo", b"hello") == [0, b"hello"]

            assert endpoint.versions == [highest]

    asyncio.run(run())


@MODES
@pytest.mark.parametrize(("registered", "now"), [(1, VERSION), (VERSION, 1)])
def test_the_current_protocol_version_of_the_endpoint_counts_not_the_registered_one(
    tmp_path: Path, modes: tuple[str, ...], registered: int, now: int
) -> None:
    """Its process was redeployed with a newer or older SDK."""

    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/echo": echo}, modes=modes, highest=registered)
            endpoint.highest = now

            for number in range(3):
                assert await it.call("greeter/echo", b"%d" % number) == [0, b"%d" % number]

            assert endpoint.versions[-1] == now

    asyncio.run(run())


def test_a_node_knows_which_handlers_are_down_since_when_and_why(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/echo": echo})
            await it.call("greeter/echo")
            (before,) = it.node.ground.healths.here()
            assert not before.is_down and before.failures == 0 and before.uri == endpoint.uri
            began_ms = it.node.environment.clock.now_ms()
            await endpoint.stop()
            ident = await it.send("greeter/echo")
            await eventually(lambda: it.node.ground.healths.here()[0].failures > 2)

            (health,) = it.node.ground.healths.here(before.deployment)

            assert health.is_down and began_ms <= health.down_since_ms <= it.node.environment.clock.now_ms()
            assert str(endpoint.port) in health.last_error
            assert health.next_try_ms >= it.node.environment.clock.now_ms() - 100
            assert (health.in_flight, health.waiting) == (0, 1)
            await endpoint.start()
            await it.completed(ident)
            (after,) = await it.node.ground.healths.everywhere(before.deployment)
            assert after == before

    asyncio.run(run())


large = Service("large")


@large.handler
async def measure(ctx: Context, text: str) -> int:
    await ctx.sleep(0.05)
    return await ctx.run("length", lambda: len(text))


def test_a_value_that_the_server_of_the_endpoint_would_refuse_travels_in_pieces(tmp_path: Path) -> None:
    limit = 256 * 1024

    async def run() -> None:
        app = endpoint([large], suspend_after=0.02, message_bytes_max=limit)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", ws_max_size=limit))
        serving = asyncio.ensure_future(server.serve())
        await eventually(lambda: server.started)
        async with world(tmp_path) as it:
            port = server.servers[0].sockets[0].getsockname()[1]
            await it.node.ground.registry.register(f"http://127.0.0.1:{port}", force=True)

            outcome = await it.call("large/measure", b'"%s"' % (b"x" * 3_000_000))

            assert outcome == [0, b"3000000"]
            assert it.node.ground.healths.here()[0].failures == 0, "the stream did not break"
        server.should_exit = True
        await serving

    asyncio.run(run())


def test_an_older_sdk_whose_server_refuses_a_value_harms_no_other_invocation(tmp_path: Path) -> None:
    began: list[InvocationId] = []

    async def slow(handled: Handled) -> None:
        began.append(handled.id)
        await asyncio.sleep(0.5)
        handled.output(b"slow")

    async def run() -> None:
        async with world(tmp_path) as it:
            handlers: dict[str, Script] = {"large/take": echo, "slow/take": slow}
            await it.register(handlers, highest=1, modes=("stream",), message_bytes_max=1024 * 1024)
            innocent = await it.send("slow/take")
            await eventually(lambda: began)

            for _ in range(2):
                ident = await it.send("large/take", b"x" * 3_000_000)
                await it.reaches(ident, Status.PAUSED)

                with it.node.serving.router.partition(ident).state.read() as txn:
                    failure = queries.last_failure(txn, ident)
                assert failure is not None and failure.kind == "TooLarge" and "--ws-max-size" in failure.message
            assert await it.completed(innocent) == [0, b"slow"]
            record = it.record(innocent)
            assert record is not None and record.losses == record.failures_total == 0
            assert len(began) == 2, "the first message broke the stream, and the second one was not sent"

    asyncio.run(run())


@pytest.mark.slow("a handler is convicted after pauses of half a second to two seconds")
def test_an_attempt_that_is_held_back_as_a_suspect_says_so(tmp_path: Path) -> None:
    """Its handler ended the process whenever it ran alone. Now one attempt hangs, and the others wait for their turn."""

    async def run() -> None:
        async with world(tmp_path) as it:
            endpoint = await it.register({"greeter/bad": echo}, highest=1)  # It does not report that an attempt begins.
            calm = False

            async def end_process(handled: Handled) -> None:
                if not calm:
                    endpoint.cut()

            endpoint.add("greeter/bad", end_process)
            for _ in range(3):
                await it.send("greeter/bad")
            (station,) = it.node.ground.invoker.endpoints.values()
            await eventually(lambda: station.queue.convicted, "the handler is convicted")
            calm = True
            idents = [await it.send("greeter/bad") for _ in range(4)]

            async def why(ident: InvocationId) -> str:
                url = f"{it.node.doors.urls.admin}/invocations/{format_id(ident)}"
                async with aiohttp.ClientSession() as session, session.get(url) as answer:
                    shown = await answer.json()
                assert shown["status"] == "running"
                return str(shown["why_not_running"])

            async with asyncio.timeout(30):
                while not (said := await why(idents[-1])).startswith("It is waiting for its turn"):
                    await asyncio.sleep(0.02)  # It says first that the process is gone.
            assert said.startswith(f"It is waiting for its turn at {endpoint.uri} (dp_")
            assert "its handler ended the process 2 times" in said and "attempts run one at a time" in said
            assert re.search(r"; [2-6] are ahead of it\.$", said)

    asyncio.run(run())
