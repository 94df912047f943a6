"""Request/response mode: one batch each way, and nothing is acknowledged in between."""

import asyncio
from typing import Any

import aiohttp
import pytest

from holdfast.sdk import Context, Server, Service
from holdfast.sdk.endpoint import Endpoint, Superseded
from holdfast.sdk.frames import TO_NODE, Ack, Error, Frame, StepFrame, Waiting, decode_batch, encode_batch
from holdfast.sdk.journal import ProtocolError
from tests.sdk.fake_node import FakeNode, Invocation


async def drive(node: FakeNode, endpoint: Endpoint, invocation: Invocation) -> list[list[str]]:
    """Run an invocation by requests only; returns the names of the frames of each response."""
    answers = []
    for _ in range(100):
        body = encode_batch([node.start_frame(invocation)])
        answer = await endpoint.invoke(invocation.service, invocation.handler, body)
        frames: list[Frame] = decode_batch(answer, TO_NODE)
        answers.append([type(frame).__name__ for frame in frames])
        for frame in frames:
            node._apply(frame)
        if invocation.status == "completed":
            return answers
        async with asyncio.timeout(30):
            while invocation.status != "running":
                await asyncio.sleep(0.001)
    raise AssertionError(answers)


def begin(node: FakeNode, service: str, handler: str) -> Invocation:
    return node.invoke(service, handler)


STRICT = [["StepFrame", "Waiting"]] * 3 + [["StepFrame"] * 3 + ["Waiting"], ["Output"]]
AHEAD = [["StepFrame", "Waiting"], ["StepFrame", "StepFrame", "Waiting"], ["StepFrame"] * 3 + ["Output"]]


@pytest.mark.parametrize(("run_ahead", "expected"), [(False, STRICT), (True, AHEAD)])
def test_an_attempt_returns_at_every_wait_and_before_every_further_effect(
    run_ahead: bool, expected: list[list[str]]
) -> None:
    ran: list[str] = []
    service = Service("serverless", run_ahead=run_ahead)

    @service.handler
    async def work(ctx: Context) -> str:
        await ctx.run("a", ran.append, "a")
        await ctx.run("b", ran.append, "b")
        await ctx.sleep(0.1)
        await asyncio.gather(*(ctx.run(f"c{n}", ran.append, f"c{n}") for n in range(3)))
        return "done"

    async def main() -> None:
        node = FakeNode()
        endpoint = Endpoint([service])
        invocation = begin(node, "serverless", "work")
        answers = await drive(node, endpoint, invocation)

        assert answers == expected
        assert invocation.outcome == [0, b'"done"']
        assert not endpoint.attempts

    asyncio.run(main())

    assert ran[:2] == ["a", "b"]
    assert sorted(ran[2:]) == ["c0", "c1", "c2"]


def test_a_failed_step_waits_for_its_backoff_outside() -> None:
    tries: list[int] = []
    service = Service("serverless")

    def flaky() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("not yet")
        return "worked"

    @service.handler
    async def work(ctx: Context) -> str:
        return await ctx.run("flaky", flaky)

    async def main() -> None:
        node = FakeNode()
        invocation = begin(node, "serverless", "work")
        answers = await drive(node, Endpoint([service]), invocation)

        assert answers == [["RunFailed", "Waiting"], ["RunFailed", "Waiting"], ["RunDone", "Waiting"], ["Output"]]

    asyncio.run(main())

    assert len(tries) == 3


def test_at_most_once_without_a_stream_is_refused() -> None:
    service = Service("serverless")

    @service.handler
    async def work(ctx: Context) -> None:
        await ctx.run("charge", lambda: None, effect="at_most_once")

    async def main() -> None:
        node = FakeNode()
        invocation = begin(node, "serverless", "work")
        body = encode_batch([node.start_frame(invocation)])
        answer = await Endpoint([service]).invoke("serverless", "work", body)
        (error,) = decode_batch(answer, TO_NODE)

        assert isinstance(error, Error)
        assert error.pause
        assert "needs a stream" in error.failure[2]

    asyncio.run(main())


def test_bodies_other_than_one_complete_start_are_refused() -> None:
    service = Service("serverless")

    @service.handler
    async def work(ctx: Context) -> None: ...

    async def main() -> None:
        node = FakeNode()
        endpoint = Endpoint([service])
        start = node.start_frame(begin(node, "serverless", "work"))
        wrong: list[tuple[str, Any]] = [
            ("work", b""),
            ("work", b"\xc1"),
            ("work", encode_batch([])),
            ("work", encode_batch([start, start])),
            ("work", encode_batch([start._replace(more=True)])),
            ("work", encode_batch([start._replace(journal=[])])),
            ("work", encode_batch([start._replace(journal=[b"nonsense"])])),
            ("other", encode_batch([start])),
            ("work", encode_batch([Ack(start.invocation, 1, 1)])),
        ]
        for handler, body in wrong:
            with pytest.raises(ProtocolError):
                await endpoint.invoke("serverless", handler, body)
            assert not endpoint.attempts

    asyncio.run(main())


def test_an_older_attempt_gives_way_to_a_newer_one() -> None:
    service = Service("serverless")
    gate = asyncio.Event()

    @service.handler
    async def work(ctx: Context) -> None:
        await ctx.run("hold", gate.wait)

    async def main() -> None:
        node = FakeNode()
        endpoint = Endpoint([service])
        start = node.start_frame(begin(node, "serverless", "work"))
        first = asyncio.ensure_future(endpoint.invoke("serverless", "work", encode_batch([start])))
        await asyncio.sleep(0.01)
        newer = asyncio.ensure_future(
            endpoint.invoke("serverless", "work", encode_batch([start._replace(epoch=start.epoch + 1)]))
        )
        with pytest.raises(Superseded):
            await first
        with pytest.raises(Superseded):
            await endpoint.invoke("serverless", "work", encode_batch([start]))
        gate.set()

        assert await newer

    asyncio.run(main())


def test_requests_reach_the_built_in_server() -> None:
    service = Service("serverless")

    @service.handler
    async def work(ctx: Context) -> str:
        return await ctx.run("work", lambda: "worked")

    async def main() -> None:
        server = Server([service])
        await server.start(port=0)
        node = FakeNode()
        start = node.start_frame(begin(node, "serverless", "work"))
        url = f"{server.uri}/invoke/serverless/work"
        async with aiohttp.ClientSession() as session:
            async with session.post(url, data=encode_batch([start], 1)) as response:
                frames = decode_batch(await response.read(), TO_NODE)
                assert response.status == 200
            assert [type(frame) for frame in frames] == [StepFrame, Waiting]
            for version in ("1", "2"):
                again = node.start_frame(begin(node, "serverless", "work"))
                body = encode_batch([again], int(version))
                async with session.post(url, data=body, headers={"x-holdfast-protocol": version}) as response:
                    assert decode_batch(await response.read(), TO_NODE, int(version))
                    assert response.headers["x-holdfast-protocol"] == version
                    assert response.headers["x-holdfast-protocol-max"] == "2"
            async with session.post(url, data=b"nonsense") as response:
                assert response.status == 400
                assert "msgpack" in (await response.json())["message"]
            async with session.post(url, data=b"", headers={"x-holdfast-protocol": "9"}) as response:
                assert response.status == 400
                assert "version 1" in (await response.json())["message"]
            async with session.get(f"{server.uri}/stream", headers={"x-holdfast-protocol": "9"}) as response:
                assert response.status == 400
        await server.stop()

    asyncio.run(main())
