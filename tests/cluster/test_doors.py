"""A closing listener: every accepted connection is answered, and none is closed during a request."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import closing

import pytest
from aiohttp import web

from holdfast.cluster.config import HostPort
from holdfast.cluster.http.doors import FRESH_S, IDLE_S, Door
from holdfast.sdk.loop import new_event_loop

PATIENCE_S = 60.0
ASK = b"GET / HTTP/1.1\r\nHost: door\r\n\r\n"


class Client:
    """A connection that is used without the loop that serves it."""

    def __init__(self, port: int, source: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S, (source, 0))

    def send(self, data: bytes = ASK) -> None:
        self.socket.sendall(data)

    async def receive(self) -> bytes:
        """Everything until the other side closes; a reset raises."""

        def read() -> bytes:
            found = b""
            while piece := self.socket.recv(65536):
                found += piece
            return found

        return await asyncio.to_thread(read)

    async def receive_one(self) -> bytes:
        return await asyncio.to_thread(self.socket.recv, 65536)


Scenario = Callable[[Door, web.Server], Awaitable[None]]


def run(
    scenario: Scenario,
    *,
    handler: Callable[[web.BaseRequest], Awaitable[web.Response]] | None = None,
    connections_max: int | None = None,
    per_address_max: int | None = None,
) -> None:
    """On both event loops that nodes use: they accept, read and close in different orders."""

    async def main() -> None:
        async def answer(request: web.BaseRequest) -> web.Response:
            response = await handler(request) if handler is not None else web.Response(text="hello")
            if door.leaving:
                response.force_close()
            return response

        server = web.Server(answer, access_log=None)
        door = Door(server, connections_max=connections_max, per_address_max=per_address_max)
        await door.open(HostPort("127.0.0.1", 0))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await scenario(door, server)
        finally:
            await door.close()

    for factory in (asyncio.new_event_loop, new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())


def test_connections_in_the_queue_of_the_kernel_are_accepted_and_answered() -> None:
    async def scenario(door: Door, server: web.Server) -> None:
        clients = [Client(door.port) for _ in range(100)]  # They are not accepted yet, because the loop did not turn.

        finishing = asyncio.ensure_future(door.finish(PATIENCE_S))
        await asyncio.sleep(0.05)
        for client in clients:
            with closing(client.socket):
                client.send()
                answer = await client.receive()
                assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer.lower()
        await finishing

        with pytest.raises(ConnectionRefusedError):
            Client(door.port)

    run(scenario)


def test_a_door_without_clients_closes_at_once() -> None:
    async def scenario(door: Door, server: web.Server) -> None:
        began = time.monotonic()

        await door.finish(PATIENCE_S)

        assert time.monotonic() - began < IDLE_S

    run(scenario)


def test_a_closing_listener_still_accepts_and_closes_with_every_answer() -> None:
    async def scenario(door: Door, server: web.Server) -> None:
        with closing(Client(door.port).socket) as plain:
            old = Client.__new__(Client)
            old.socket = plain
            old.send()
            assert b"connection: close" not in (await old.receive_one()).lower()
            door.leave()
            new = Client(door.port)
            with closing(new.socket):
                for client in (old, new):
                    client.send()
                    answer = await client.receive()
                    assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer.lower()

        await door.finish(PATIENCE_S)

        assert not door.connections

    run(scenario)


def test_idle_connections_are_closed_after_a_while() -> None:
    async def scenario(door: Door, server: web.Server) -> None:
        used, fresh = Client(door.port), Client(door.port)
        with closing(used.socket), closing(fresh.socket):
            used.send()
            await used.receive_one()
            began = time.monotonic()
            door.leave()
            assert await used.receive() == b""
            assert time.monotonic() - began >= IDLE_S
            assert await fresh.receive() == b""
            assert time.monotonic() - began >= FRESH_S

        await door.finish(PATIENCE_S)

    run(scenario)


def test_a_connection_is_never_closed_with_a_request_unread() -> None:
    async def scenario(door: Door, server: web.Server) -> None:
        client = Client(door.port)
        with closing(client.socket):
            client.send()
            await client.receive_one()
            (connection,) = server.connections
            transport = connection.transport
            assert transport is not None
            transport.pause_reading()  # As if the loop had not reached it.
            client.send()
            finishing = asyncio.ensure_future(door.finish(PATIENCE_S))
            await asyncio.sleep(2 * IDLE_S)
            assert not finishing.done()
            transport.resume_reading()

            assert (await client.receive()).startswith(b"HTTP/1.1 200")
            await finishing

    run(scenario)


def test_requests_in_progress_are_waited_for() -> None:
    gate: list[asyncio.Event] = []

    async def handler(request: web.BaseRequest) -> web.Response:
        await gate[-1].wait()
        return web.Response(text="late")

    async def scenario(door: Door, server: web.Server) -> None:
        gate.append(asyncio.Event())
        client = Client(door.port)
        with closing(client.socket):
            client.send()
            finishing = asyncio.ensure_future(door.finish(PATIENCE_S))
            await asyncio.sleep(2 * IDLE_S)
            assert not finishing.done()
            gate[-1].set()

            assert (await client.receive()).endswith(b"late")
            await finishing

    run(scenario, handler=handler)


def test_a_door_that_is_passed_on_is_never_shut() -> None:
    async def scenario(door: Door, server: web.Server) -> None:
        waiting = Client(door.port)  # In the kernel's queue of the old listener.
        with closing(waiting.socket):
            sockets = door.pass_on()
            between = Client(door.port)  # There is no listener.

            async def answer(request: web.BaseRequest) -> web.Response:
                response = web.Response(text="the next one")
                response.force_close()
                return response

            successor = Door(web.Server(answer, access_log=None))
            await successor.open(HostPort("127.0.0.1", 0), sockets)
            assert successor.port == door.port
            with closing(between.socket):
                for client in (waiting, between):
                    client.send()
                    assert (await client.receive()).endswith(b"the next one")
            await successor.finish(PATIENCE_S)
            await successor.close()

    run(scenario)


async def connected(door: Door, count: int) -> None:
    while door.connections != count:
        await asyncio.sleep(0.005)


def test_the_oldest_idle_connection_makes_room_for_the_next_client() -> None:
    async def scenario(door: Door, server: web.Server) -> None:
        idle = []
        for number in range(4):
            idle.append(Client(door.port))
            await connected(door, number + 1)

        new = [Client(door.port) for _ in range(2)]
        for client in new:
            client.send()

        for client in new:
            assert (await client.receive_one()).startswith(b"HTTP/1.1 200")
        assert await idle[0].receive() == await idle[1].receive() == b""  # Closed, in good order.
        idle[2].send()
        assert (await idle[2].receive_one()).startswith(b"HTTP/1.1 200")
        assert (door.closed_idle, door.turned_away) == (2, 0)
        for client in (*idle, *new):
            client.socket.close()

    run(scenario, connections_max=4)


def test_a_client_without_room_gets_retry_after_and_no_busy_connection_is_closed() -> None:
    released: list[bool] = []

    async def waits(request: web.BaseRequest) -> web.Response:
        while not released:
            await asyncio.sleep(0.005)
        return web.Response(text="at last")

    async def scenario(door: Door, server: web.Server) -> None:
        released.clear()
        busy = [Client(door.port) for _ in range(4)]
        for client in busy:
            client.send()
        while sum(each._request_in_progress for each in server.connections) < 4:
            await asyncio.sleep(0.005)

        late = Client(door.port)
        answer = await late.receive()
        released.append(True)

        assert answer.startswith(b"HTTP/1.1 503") and b"Retry-After: 1" in answer
        for client in busy:
            assert b"at last" in await client.receive_one()
        assert (door.closed_idle, door.turned_away) == (0, 1)
        for client in (*busy, late):
            client.socket.close()

    run(scenario, handler=waits, connections_max=4)


def test_a_refused_client_that_sent_its_request_reads_the_reason_and_is_not_reset() -> None:
    released: list[bool] = []

    async def waits(request: web.BaseRequest) -> web.Response:
        while not released:
            await asyncio.sleep(0.005)
        return web.Response(text="at last")

    async def scenario(door: Door, server: web.Server) -> None:
        released.clear()
        busy = Client(door.port)
        busy.send()
        while not any(each._request_in_progress for each in server.connections):
            await asyncio.sleep(0.005)

        for _ in range(10):
            late = Client(door.port)
            late.send(b"POST / HTTP/1.1\r\nHost: door\r\nContent-Length: 5000\r\n\r\n" + bytes(5000))
            await asyncio.sleep(0.02)
            answer = await late.receive()
            assert answer.startswith(b"HTTP/1.1 503") and b"Retry-After: 1" in answer
            late.socket.close()

        released.append(True)
        assert b"at last" in await busy.receive_one()
        busy.socket.close()

    run(scenario, handler=waits, connections_max=1)


def test_one_address_does_not_take_all_places() -> None:
    released: list[bool] = []

    async def waits(request: web.BaseRequest) -> web.Response:
        while request.path == "/busy" and not released:
            await asyncio.sleep(0.005)
        return web.Response(text="at last")

    async def scenario(door: Door, server: web.Server) -> None:
        released.clear()
        crowd = [Client(door.port, "127.0.0.2") for _ in range(3)]
        for client in crowd:
            client.socket.send(b"GET /busy HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while sum(each._request_in_progress for each in server.connections) < 3:
            await asyncio.sleep(0.005)

        refused = Client(door.port, "127.0.0.2")
        assert b"too many connections from this address" in await refused.receive()
        other = Client(door.port, "127.0.0.3")
        other.send()
        assert (await other.receive_one()).startswith(b"HTTP/1.1 200")
        released.append(True)
        for client in crowd:
            assert b"at last" in await client.receive_one(), "what was let in stays"

        crowd[1].socket.close()
        await connected(door, 3)
        again = Client(door.port, "127.0.0.2")
        again.send()
        assert (await again.receive_one()).startswith(b"HTTP/1.1 200")
        assert (door.closed_idle, door.turned_away) == (0, 1)
        for client in (*crowd, refused, other, again):
            client.socket.close()

    run(scenario, handler=waits, connections_max=100, per_address_max=3)


def test_an_idle_connection_is_closed_for_a_new_one_of_the_same_address() -> None:
    async def scenario(door: Door, server: web.Server) -> None:
        idle = [Client(door.port, "127.0.0.2") for _ in range(3)]
        await connected(door, 3)
        other = Client(door.port, "127.0.0.3")
        await connected(door, 4)

        new = [Client(door.port, "127.0.0.2") for _ in range(2)]
        for client in new:
            client.send()
            assert (await client.receive_one()).startswith(b"HTTP/1.1 200")

        other.send()
        assert (await other.receive_one()).startswith(b"HTTP/1.1 200"), "others are left alone"
        assert await idle[0].receive() == await idle[1].receive() == b"", "the oldest were closed, in good order"
        assert (door.closed_idle, door.turned_away) == (2, 0)
        for client in (*idle, *new, other):
            client.socket.close()

    run(scenario, connections_max=100, per_address_max=3)
