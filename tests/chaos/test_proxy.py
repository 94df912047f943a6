"""The proxy: each mode affects a real connection like the fault that it represents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from holdfast.chaos.proxy import HELD_BYTES_MAX, Blackhole, Cut, Delay, Direction, Errors, Pass, Proxy, Throttle
from holdfast.snapshots.errors import Denied, StoreFailed
from holdfast.snapshots.opening import open_store

PATIENCE_S = 20.0
SILENCE_S = 0.3
LOOPBACK = ("127.0.0.1", 0)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
dialled: list[asyncio.StreamWriter] = []  # Closed when the test ends.


class Target:
    """A server that echoes, and records what it received."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.connections = 0
        self.ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while chunk := await reader.read(65536):
                self.received += chunk
                writer.write(chunk)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            self.ended.set()
            writer.close()


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[Proxy, Target]]:
    target = Target()
    server = await asyncio.start_server(target.serve, *LOOPBACK)
    host, port = server.sockets[0].getsockname()
    async with Proxy(LOOPBACK, (host, port)) as proxy:
        yield proxy, target
    server.close()
    while dialled:
        dialled.pop().transport.abort()
    await asyncio.sleep(0)


async def dial(proxy: Proxy) -> Streams:
    reader, writer = await asyncio.open_connection(*proxy.address)
    dialled.append(writer)
    return reader, writer


async def say(streams: Streams, message: bytes) -> bytes:
    reader, writer = streams
    writer.write(message)
    return await asyncio.wait_for(reader.readexactly(len(message)), PATIENCE_S)


async def silent(reader: asyncio.StreamReader) -> bool:
    try:
        await asyncio.wait_for(reader.read(1), SILENCE_S)
    except TimeoutError:
        return True
    return False


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def run(test: Callable[[Proxy, Target], Awaitable[None]]) -> None:
    async def main() -> None:
        async with proxied() as (proxy, target):
            await test(proxy, target)

    asyncio.run(main())


def test_it_hands_on_bytes_both_ways() -> None:
    async def test(proxy: Proxy, target: Target) -> None:
        message = bytes(range(256)) * 4000

        assert await say(await dial(proxy), message) == message
        assert target.received == message
        assert proxy.passed_bytes[Direction.FORWARD] == len(message)

    run(test)


def test_the_end_of_a_connection_is_handed_on() -> None:
    async def test(proxy: Proxy, target: Target) -> None:
        reader, writer = await dial(proxy)
        await say((reader, writer), b"hello")

        writer.write_eof()

        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        assert target.ended.is_set()

    run(test)


def test_a_cut_resets_open_connections_refuses_new_ones_and_heals_on_the_same_port() -> None:
    async def test(proxy: Proxy, target: Target) -> None:
        address = proxy.address
        reader, writer = await dial(proxy)
        await say((reader, writer), b"before")

        proxy.mode(Cut())

        with pytest.raises(ConnectionRefusedError):
            await dial(proxy)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), PATIENCE_S)
        await asyncio.wait_for(target.ended.wait(), PATIENCE_S)

        proxy.mode(Pass())

        assert proxy.address == address
        assert await say(await dial(proxy), b"after") == b"after"
        assert target.received == b"beforeafter"

    run(test)


def test_a_blackhole_holds_bytes_and_delivers_them_in_order_when_it_ends() -> None:
    async def test(proxy: Proxy, target: Target) -> None:
        reader, writer = await dial(proxy)
        await say((reader, writer), b"before ")

        proxy.mode(Blackhole())
        writer.write(b"one ")
        await writer.drain()
        writer.write(b"two ")

        assert await silent(reader)
        assert target.received == b"before "

        proxy.mode(Pass())

        assert await asyncio.wait_for(reader.readexactly(8), PATIENCE_S) == b"one two "

    run(test)


def test_a_blackhole_accepts_connections_without_the_target() -> None:
    async def test(proxy: Proxy, target: Target) -> None:
        proxy.mode(Blackhole())

        reader, writer = await dial(proxy)
        writer.write(b"hello")

        assert await silent(reader)
        assert target.connections == 0

        proxy.mode(Pass())

        assert await asyncio.wait_for(reader.readexactly(5), PATIENCE_S) == b"hello"

    run(test)


def test_a_blackhole_hides_that_a_peer_died() -> None:
    async def test(proxy: Proxy, target: Target) -> None:
        streams = await dial(proxy)
        await say(streams, b"hello")

        proxy.mode(Blackhole())
        streams[1].transport.abort()
        await asyncio.sleep(SILENCE_S)

        assert not target.ended.is_set()

        proxy.mode(Pass())

        await asyncio.wait_for(target.ended.wait(), PATIENCE_S)

    run(test)


def test_a_one_way_blackhole_forward_lets_answers_through_but_no_questions() -> None:
    async def test(proxy: Proxy, target: Target) -> None:
        reader, writer = await dial(proxy)
        await say((reader, writer), b"hello")

        proxy.mode(Blackhole(frozenset({Direction.FORWARD})))
        writer.write(b"question")

        assert await silent(reader)
        assert target.received == b"hello"

    run(test)


def test_a_one_way_blackhole_backward_lets_questions_through_but_no_answers() -> None:
    async def test(proxy: Proxy, target: Target) -> None:
        proxy.mode(Blackhole(frozenset({Direction.BACKWARD})))
        reader, writer = await dial(proxy)

        writer.write(b"question")

        await eventually(lambda: target.received == b"question")
        assert await silent(reader)
        proxy.mode(Pass())
        assert await asyncio.wait_for(reader.readexactly(8), PATIENCE_S) == b"question"

    run(test)


def test_a_sender_into_a_blackhole_feels_backpressure_instead_of_filling_memory() -> None:
    async def test(proxy: Proxy, target: Target) -> None:
        proxy.mode(Blackhole())
        _, writer = await dial(proxy)
        flood = b"x" * (64 * HELD_BYTES_MAX)

        writer.write(flood)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.drain(), SILENCE_S)

    run(test)


def test_a_delay_holds_each_message_back_keeps_the_order_and_overlaps() -> None:
    async def test(proxy: Proxy, target: Target) -> None:
        streams = await dial(proxy)
        await say(streams, b"hello")

        proxy.mode(Delay(delay_ms=100, jitter_ms=50))
        started = time.monotonic()
        for number in range(20):
            streams[1].write(b"%02d" % number)
            await asyncio.sleep(0.01)
        answer = await asyncio.wait_for(streams[0].readexactly(40), PATIENCE_S)
        took = time.monotonic() - started

        assert answer == b"".join(b"%02d" % number for number in range(20))
        assert took >= 0.2, "there and back"
        assert took < 20 * 0.2, "the delays of several messages run side by side"

    run(test)


def test_a_throttle_bounds_the_bytes_per_second() -> None:
    async def test(proxy: Proxy, target: Target) -> None:
        streams = await dial(proxy)
        await say(streams, b"hello")

        proxy.mode(Throttle(bytes_per_second=50_000))
        started = time.monotonic()
        await say(streams, b"x" * 25_000)

        assert time.monotonic() - started >= 0.45

    run(test)


def test_a_missing_target_resets_the_dialer() -> None:
    async def main() -> None:
        server = await asyncio.start_server(Target().serve, *LOOPBACK)
        host, port = server.sockets[0].getsockname()
        server.close()
        await server.wait_closed()

        async with Proxy(LOOPBACK, (host, port)) as proxy:
            reader, _ = await dial(proxy)
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(reader.read(), PATIENCE_S)

    asyncio.run(main())


def test_a_closed_proxy_leaves_nothing_open() -> None:
    async def main() -> None:
        async with proxied() as (proxy, target):
            address = proxy.address
            await say(await dial(proxy), b"hello")
            await proxy.close()

            await asyncio.wait_for(target.ended.wait(), PATIENCE_S)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(*address)

    asyncio.run(main())


def test_errors_are_answered_to_each_request_and_the_target_sees_none_of_them() -> None:
    async def test(proxy: Proxy, target: Target) -> None:
        before = await dial(proxy)
        await say(before, b"before")
        proxy.mode(Errors(((503, "SlowDown"),)))

        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(before[0].read(), PATIENCE_S)
        answers = []
        for request in (b"PUT /a HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", b"HEAD /a HTTP/1.1\r\nHost: x\r\n\r\n"):
            reader, writer = await dial(proxy)
            writer.write(request)
            answers.append(await asyncio.wait_for(reader.read(), PATIENCE_S))

        assert all(answer.startswith(b"HTTP/1.1 503 SlowDown\r\n") for answer in answers)
        assert b"<Code>SlowDown</Code>" in answers[0] and answers[1].endswith(b"\r\n\r\n")
        assert proxy.answered == 2
        assert target.received == b"before"

        proxy.mode(Pass())

        assert await say(await dial(proxy), b"after") == b"after"

    run(test)


@pytest.mark.parametrize(
    ("answers", "kind"),
    [(((500, "InternalError"), (503, "SlowDown")), StoreFailed), (((403, "AccessDenied"),), Denied)],
)
def test_a_node_takes_these_errors_for_those_of_a_store(
    answers: tuple[tuple[int, str], ...], kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    async def test(proxy: Proxy, target: Target) -> None:
        proxy.mode(Errors(answers))
        host, port = proxy.address
        store = open_store(f"s3://bucket/prefix?endpoint_url=http://{host}:{port}&region=us-east-1&attempts=1")

        with pytest.raises(kind):
            await asyncio.to_thread(store.put_bytes, b"data", "name")
        with pytest.raises(kind):
            await asyncio.to_thread(store.read, "name")
        assert proxy.answered >= 2 and not target.received

    run(test)
