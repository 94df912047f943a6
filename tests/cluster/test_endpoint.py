"""One deployment as a node reaches it: the version of the protocol that both speak, and whether it can be reached."""

import asyncio
from pathlib import Path

import pytest
import uvicorn

from holdfast.sdk import Context, Service, endpoint
from holdfast.sdk.frames import VERSION
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
def test_what_the_endpoint_speaks_now_counts_and_not_what_it_was_registered_with(
    tmp_path: Path, modes: tuple[str, ...], registered: int, now: int
) -> None:
    """Its process was deployed again, with a newer SDK or with an older one."""

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
            (before,) = it.node.healths.here()
            assert not before.is_down and before.failures == 0 and before.uri == endpoint.uri
            began_ms = it.node.clock.now_ms()
            await endpoint.stop()
            ident = await it.send("greeter/echo")
            await eventually(lambda: it.node.healths.here()[0].failures > 2)

            (health,) = it.node.healths.here(before.deployment)

            assert health.is_down and began_ms <= health.down_since_ms <= it.node.clock.now_ms()
            assert str(endpoint.port) in health.last_error
            assert health.next_try_ms >= it.node.clock.now_ms() - 100
            assert (health.in_flight, health.waiting) == (0, 1)
            await endpoint.start()
            await it.completed(ident)
            (after,) = await it.node.healths.everywhere(before.deployment)
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
            await it.node.registry.register(f"http://127.0.0.1:{port}", force=True)

            outcome = await it.call("large/measure", b'"%s"' % (b"x" * 3_000_000))

            assert outcome == [0, b"3000000"]
            assert it.node.healths.here()[0].failures == 0, "the stream did not break"
        server.should_exit = True
        await serving

    asyncio.run(run())


def test_an_older_sdk_whose_server_refuses_a_value_costs_nobody_else_anything(tmp_path: Path) -> None:
    began: list[bytes] = []

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

                with it.node.router.partition(ident).state.read() as txn:
                    failure = queries.last_failure(txn, ident)
                assert failure is not None and failure.kind == "TooLarge" and "--ws-max-size" in failure.message
            assert await it.completed(innocent) == [0, b"slow"]
            record = it.record(innocent)
            assert record is not None and record.losses == record.failures_total == 0
            assert len(began) == 2, "the first message broke the stream, and the second one was not sent"

    asyncio.run(run())
