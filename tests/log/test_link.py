"""Peer links over real sockets on loopback, on both event loops that nodes use."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from holdfast.log.connection import LinkLimits
from holdfast.log.handshake import Handshake, Role
from holdfast.log.link import Backoff, Links
from holdfast.log.sockets import Address
from tests.log.links import SECRET, Expected, Node, Run, Stranger, certificates, connected, eventually, started


class Proxy:
    """A TCP proxy that can change, hold back or cut the bytes that pass."""

    def __init__(self, target: Address) -> None:
        self.target = target
        self.change: Callable[[bytes], bytes] = lambda data: data
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.accepted = 0
        self.pause_s = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(self.target.host, self.target.port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        for source, sink, forth in ((reader, far_writer, True), (far_reader, writer, False)):
            task = asyncio.create_task(self._pump(source, sink, forth))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, forth: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self.flowing.wait()
                if forth:
                    await asyncio.sleep(self.pause_s)
                sink.write(self.change(data) if forth else data)
                await sink.drain()
        sink.close()


@contextlib.asynccontextmanager
async def proxied(left: Node, right: Node) -> AsyncIterator[Proxy]:
    """Two connected nodes with a proxy between: `left` dials through it."""
    await left.links.start()
    await right.links.start()
    try:
        async with Proxy(right.address) as proxy:
            right.links.set_peers({left.name: left.address})
            left.links.set_peers({right.name: proxy.address})
            await left.until(lambda: right.name in left.live)
            await right.until(lambda: left.name in right.live)
            yield proxy
            left.links.set_peers({})
    finally:
        await left.links.stop()
        await right.links.stop()
        assert left.late == [] and right.late == []


# Sessions and frames.


def test_two_nodes_find_each_other_and_talk_both_ways(run: Run) -> None:
    async def scenario() -> None:
        a, b = Node("a"), Node("b")
        async with connected(a, b):
            assert a.send("b", b"to b") and b.send("a", b"to a")
            await a.until(lambda: a.frames == [b"to a"])
            await b.until(lambda: b.frames == [b"to b"])

            assert a.disks == {"b": "disk-of-b"} and b.disks == {"a": "disk-of-a"}
            status = a.links.status()["b"]
            assert status.connected and status.session == a.live["b"] and status.since is not None
            assert status.bytes_in > 0 and status.bytes_out > 0 and status.incarnation == 1
        assert [kind for kind, _, _ in a.events] == [kind for kind, _, _ in b.events] == ["up", "down"]
        assert not a.links.status()["b"].connected

    run(scenario())


def test_session_numbers_are_unique_in_the_process_and_grow(run: Run) -> None:
    async def scenario() -> None:
        nodes = [Node(name) for name in "abc"]
        async with started(*nodes):
            for node in nodes:
                await node.until(lambda node=node: len(node.live) == 2)  # type: ignore[misc]
            numbers = [session for node in nodes for session in node.sessions()]

            assert len(set(numbers)) == 6
            assert all(node.sessions() == sorted(node.sessions()) for node in nodes)

    run(scenario())


@pytest.mark.parametrize("secret", [SECRET, None])
def test_ten_thousand_frames_arrive_in_order(run: Run, secret: bytes | None) -> None:
    async def scenario() -> None:
        a, b = Node("a", secret=secret), Node("b", secret=secret)
        frames = [b"%d:" % number + bytes(number % 700) for number in range(10_000)]
        async with connected(a, b):
            for frame in frames:
                assert b.send("a", frame)
            await a.until(lambda: len(a.frames) == len(frames))

            assert a.frames == frames

    run(scenario())


def test_large_and_small_frames_alternate_without_a_mark(run: Run) -> None:
    async def scenario() -> None:
        a, b = Node("a"), Node("b")
        noise = random.Random(5)
        sizes = [20 * 1024 * 1024, 1, 300_000, 262_144 - 20, 262_144 - 19, 262_144, 7, 5 * 1024 * 1024, 3, 3, 1_000_000]
        frames = [noise.randbytes(size) for size in sizes]
        async with connected(a, b):
            for frame in frames:
                assert a.send("b", frame)
            await b.until(lambda: len(b.frames) == len(frames))

            assert b.frames == frames

    run(scenario())


def test_a_frame_above_the_limit_is_the_callers_bug(run: Run) -> None:
    async def scenario() -> None:
        limits = LinkLimits(frame_bytes_max=1000)
        a, b = Node("a", limits=limits), Node("b", limits=limits)
        async with connected(a, b):
            assert a.send("b", bytes(1000))
            with pytest.raises(ValueError, match="1001"):
                a.send("b", bytes(1001))
            await b.until(lambda: b.frames == [bytes(1000)])

    run(scenario())


def test_an_announced_length_above_the_limit_ends_the_session_before_its_bytes_come(run: Run) -> None:
    async def scenario() -> None:
        b = Node("b", limits=LinkLimits(frame_bytes_max=1000))
        async with started(b):
            b.links.set_peers({"a": Address("127.0.0.1", 1)})
            stranger = await Stranger("a").connect(b.address)
            await stranger.greet("b")
            await stranger.loop.sock_sendall(stranger.sock, struct.pack(">I", 1001) + bytes(16))

            await stranger.closed()
            assert "1001" in b.error("a")

    run(scenario())


def test_sending_to_a_session_that_is_gone_drops_the_frame(run: Run) -> None:
    async def scenario() -> None:
        a, b = Node("a"), Node("b")
        async with connected(a, b):
            assert not a.links.send("b", a.live["b"] + 1_000_000, b"x")
            assert not a.links.send("nobody", a.live["b"], b"x")
        assert not a.links.send("b", a.sessions()[0], b"x")

    run(scenario())


# Losing and finding again.


def test_a_killed_connection_is_reported_and_dialed_again(run: Run) -> None:
    async def scenario() -> None:
        # An hour between retries: only the first one, which does not wait, can bring the link back.
        slow = LinkLimits(backoff_min_s=3600, backoff_max_s=3600)
        a, b = Node("a", limits=slow), Node("b")
        async with proxied(a, b) as proxy:
            old = a.live["b"]
            proxy.cut()
            await a.until(lambda: a.live.get("b", old) != old)
            await b.until(lambda: len(b.sessions()) == 2 and "a" in b.live)

            assert [kind for kind, _, _ in a.events] == ["up", "down", "up"]
            assert not a.links.send("b", old, b"for the dead") and a.send("b", b"hello again")
            await b.until(lambda: b.frames == [b"hello again"])

    run(scenario())


def test_nodes_may_start_in_any_order_and_restart(run: Run) -> None:
    async def scenario() -> None:
        a, b = Node("a"), Node("b")
        await b.links.start()
        port = b.links.port
        await b.links.stop()
        await a.links.start()
        a.links.set_peers({"b": Address("127.0.0.1", port)})
        await eventually(lambda: "Connection refused" in a.error("b"))
        for _ in range(2):
            b = Node("b", port=port)
            b.links.set_peers({"a": a.address})
            await b.links.start()
            await a.until(lambda: "b" in a.live)
            await b.links.stop()
            await a.until(lambda: "b" not in a.live)
        await a.links.stop()

    run(scenario())


def test_a_newer_connection_replaces_the_older_and_silences_it(run: Run) -> None:
    async def scenario() -> None:
        b = Node("b")
        async with started(b):
            b.links.set_peers({"a": Address("127.0.0.1", 1)})
            first = await Stranger("a", secret=SECRET).connect(b.address)
            await first.greet("b")
            second = await Stranger("a").connect(b.address)
            await second.greet("b")
            await b.until(lambda: len(b.events) == 3)

            one, two = b.sessions()
            assert b.events == [("up", "a", one), ("down", "a", one), ("up", "a", two)] and one < two
            await first.closed()
            assert not b.links.send("a", one, b"x") and b.links.send("a", two, b"x")

    run(scenario())


def test_received_frames_of_a_replaced_connection_are_dropped(run: Run) -> None:
    """The first frame's handler makes the peer vanish; the other frames of the same read must not follow."""

    async def scenario() -> None:
        a, b = Node("a"), Node("b")
        async with connected(a, b):
            b.react = lambda peer, session, payload: b.links.set_peers({})
            a.send("b", b"1")
            a.send("b", b"2")
            a.send("b", b"3")
            await b.until(lambda: "a" not in b.live)

            assert b.frames == [b"1"]

    run(scenario())


def test_an_abandoned_connection_does_not_replace_a_newer_one(run: Run) -> None:
    async def scenario() -> None:
        b = Node("b")
        async with started(b):
            b.links.set_peers({"a": Address("127.0.0.1", 1)})
            older = await Stranger("a").connect(b.address)
            # Its hello was answered, so it was accepted first, but its proof is late.
            handshake = Handshake(role=Role.DIALER, us=older.us, peer="b", secret=SECRET)
            await older.loop.sock_sendall(older.sock, handshake.take_output())
            handshake.receive(await older.loop.sock_recv(older.sock, 4096))
            newer = await Stranger("a").connect(b.address)
            await newer.greet("b")
            await older.loop.sock_sendall(older.sock, handshake.take_output())

            await older.closed()
            assert len(b.sessions()) == 1 and b.send("a", b"x")

    run(scenario())


def test_a_removed_peer_is_closed_and_refused_until_it_is_added_again(run: Run) -> None:
    async def scenario() -> None:
        a, b = Node("a"), Node("b")
        async with connected(a, b):
            session = b.live["a"]
            b.links.set_peers({})
            assert "a" in b.live, "no callback runs inside set_peers"
            assert not b.links.send("a", session, b"x")
            await b.until(lambda: "a" not in b.live)
            await a.until(lambda: "b" not in a.live)
            await eventually(lambda: "not among the peers" in a.error("b"))

            b.links.set_peers({"a": a.address})
            await a.until(lambda: "b" in a.live)

            a.links.set_peers({})
            await a.until(lambda: "b" not in a.live)
            await b.until(lambda: "a" not in b.live)
            assert a.links.status() == {}

    run(scenario())


def test_a_changed_address_is_dialed(run: Run) -> None:
    async def scenario() -> None:
        a, b = Node("a"), Node("b")
        async with connected(a, b), Proxy(b.address) as proxy:
            old = a.live["b"]
            a.links.set_peers({"b": proxy.address})
            await a.until(lambda: a.live.get("b", old) != old)
            assert proxy.accepted == 1

            current = a.live["b"]
            b.links.set_peers({"a": Address("127.0.0.1", 9)})
            a.links.set_peers({"b": proxy.address})
            b.send("a", b"still here")
            await a.until(lambda: a.frames == [b"still here"])
            assert a.live["b"] == current, "the same address, or the address of one who dials us, changes nothing"

    run(scenario())


def test_the_smaller_id_dials_and_the_larger_is_refused_with_that_reason(run: Run) -> None:
    async def scenario() -> None:
        a, b = Node("a"), Node("b")
        async with started(a):
            a.links.set_peers({"b": Address("127.0.0.1", 1)})
            stranger = await Stranger("b").connect(a.address)
            with pytest.raises(Exception, match="smaller id dials"):
                await stranger.greet("a")
            assert a.events == []
        del b

    run(scenario())


# Hostile and broken networks.


@pytest.mark.parametrize("offset", [0, 3, 4, 19, 20, 400])
def test_a_flipped_bit_ends_the_session_and_nothing_wrong_is_delivered(run: Run, offset: int) -> None:
    async def scenario() -> None:
        # The offset is in the first frame: length, MAC, payload. A longer length waits for bytes, so more follow.
        a, b = Node("a"), Node("b")
        sent = [b"x" * 500, *(b"%d" % number * 50 for number in range(200))]
        async with proxied(a, b) as proxy:
            session = b.live["a"]
            flipped = False

            def flip(data: bytes) -> bytes:
                nonlocal flipped
                if flipped or len(data) <= 400:
                    return data
                flipped = True
                return data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]

            proxy.change = flip
            for frame in sent:
                a.send("b", frame)
            await b.until(lambda: b.live.get("a") != session)

            assert flipped and b.frames == []
            await b.until(lambda: "a" in b.live)

    run(scenario())


@pytest.mark.parametrize("offset", [1, 2])
def test_a_damaged_length_on_a_quiet_link_does_not_keep_it_waiting(run: Run, offset: int) -> None:
    """Pings continue, so bytes keep arriving; but they are swallowed by a frame that never completes."""

    async def scenario() -> None:
        limits = LinkLimits(ping_s=0.2, idle_s=1.0)
        a, b = Node("a", limits=limits), Node("b", limits=limits)
        async with proxied(a, b) as proxy:
            session = b.live["a"]

            def flip(data: bytes) -> bytes:
                return data[:offset] + bytes([data[offset] ^ 8]) + data[offset + 1 :] if len(data) > 400 else data

            proxy.change = flip
            a.send("b", b"x" * 500)
            await b.until(lambda: b.live.get("a") != session)

            assert b.frames == []

    run(scenario())


def test_a_large_frame_may_take_longer_than_the_silence_that_ends_a_session(run: Run) -> None:
    async def scenario() -> None:
        limits = LinkLimits(ping_s=0.2, idle_s=1.0)
        a, b = Node("a", limits=limits), Node("b", limits=limits)
        frame = random.Random(3).randbytes(2_000_000)
        async with proxied(a, b) as proxy:
            session = b.live["a"]
            proxy.pause_s = 0.1
            a.send("b", frame)
            await b.until(lambda: b.frames == [frame])

            assert b.live["a"] == session

    run(scenario())


@pytest.mark.parametrize("order", [[0, 0], [1, 0], [0, 2]], ids=["repeated", "reordered", "dropped"])
def test_frames_cannot_be_repeated_reordered_or_dropped(run: Run, order: list[int]) -> None:
    async def scenario() -> None:
        a, b = Node("a"), Node("b")
        async with proxied(a, b) as proxy:
            session = b.live["a"]
            held = bytearray()
            size = 20 + 100

            def shuffle(data: bytes) -> bytes:
                held.extend(data)
                if len(held) < 3 * size:
                    return b""
                return b"".join(bytes(held[number * size :][:size]) for number in order)

            proxy.change = shuffle
            for number in range(3):
                a.send("b", b"%d" % number * 100)
            await b.until(lambda: b.live.get("a") != session)

            assert b.frames == ([b"0" * 100] if order[0] == 0 else [])

    run(scenario())


@pytest.mark.parametrize("tls", [False, True])
def test_a_peer_that_does_not_read_is_dropped_at_the_bound(run: Run, tls: bool, tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = LinkLimits(frame_bytes_max=100_000, outbox_bytes_max=1_000_000)
        files = certificates(tmp_path, "a", "b") if tls else {}
        a = Node("a", limits=limits, tls=files.get("a"), secret=None if tls else SECRET)
        b = Node("b", limits=limits, tls=files.get("b"), secret=None if tls else SECRET)
        async with proxied(a, b) as proxy:
            session = a.live["b"]
            proxy.flowing.clear()
            sent = 0
            while sent < 10_000:
                if not a.links.send("b", session, bytes(100_000)):
                    break
                sent += 1
                assert a.links.status()["b"].outbox_bytes <= limits.outbox_bytes_max
                await asyncio.sleep(0)

            assert 10 <= sent < 10_000
            # In the turn of the loop in which send failed, on_down has not run inside it.
            await a.until(lambda: a.live.get("b") != session)
            assert "too slow" in a.error("b")
            proxy.flowing.set()

    run(scenario())


def test_a_silent_peer_is_dropped_and_a_talking_one_is_not(run: Run) -> None:
    async def scenario() -> None:
        limits = LinkLimits(ping_s=0.2, idle_s=1.0)
        a, b = Node("a", limits=limits), Node("b", limits=limits)
        async with proxied(a, b) as proxy:
            session = a.live["b"]
            await asyncio.sleep(3 * limits.idle_s)
            assert a.live.get("b") == session, "pings kept an idle session alive"
            assert a.frames == b.frames == [], "pings are not frames"

            proxy.flowing.clear()
            await a.until(lambda: "b" not in a.live)
            await b.until(lambda: "a" not in b.live)
            assert "it sent nothing for" in a.error("b")
            proxy.flowing.set()

    run(scenario())


# Callbacks.


def test_a_callback_that_raises_ends_the_session_and_is_reported(run: Run) -> None:
    async def scenario() -> None:
        a, b = Node("a"), Node("b")

        def fail(peer: str, session: int, payload: bytes) -> None:
            raise Expected("a bug above")

        async with connected(a, b):
            b.react = fail
            session = b.live["a"]
            a.send("b", b"1")
            a.send("b", b"2")
            await b.until(lambda: b.live.get("a") != session)

            assert b.frames == [b"1"]
            assert [str(error) for error in b.fatal] == ["a bug above"]

    run(scenario())


@pytest.mark.parametrize("tls", [False, True])
def test_frames_sent_before_stop_still_arrive(run: Run, tls: bool, tmp_path: Path) -> None:
    async def scenario() -> None:
        files = certificates(tmp_path, "a", "b") if tls else {}
        a, b = Node("a", tls=files.get("a")), Node("b", tls=files.get("b"))
        async with connected(a, b):
            frames = [bytes([number]) * 100_000 for number in range(50)]
            for frame in frames:
                assert a.send("b", frame)
            await a.links.stop()
            await b.until(lambda: "a" not in b.live)

            assert b.frames == frames

    run(scenario())


# What is refused before anything runs.


def make(host: str, *, secret: bytes | None = None) -> Links:
    return Links(
        cluster="c1",
        node="a",
        disk="d",
        incarnation=1,
        listen=Address(host, 0),
        secret=secret,
        tls=None,
        on_up=lambda peer, session, disk: None,
        on_down=lambda peer, session: None,
        on_frame=lambda peer, session, payload: None,
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.0.2.1", "example.org"])
def test_without_authentication_only_loopback_may_be_used(host: str) -> None:
    with pytest.raises(ValueError, match="secret or TLS"):
        make(host)
    with pytest.raises(ValueError, match="secret or TLS"):
        make("127.0.0.1").set_peers({"b": Address(host, 1)})
    make(host, secret=SECRET).set_peers({"b": Address(host, 1)})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_may_go_without_authentication(host: str) -> None:
    make(host).set_peers({"b": Address(host, 1)})


def test_a_short_secret_and_impossible_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="16"):
        make("127.0.0.1", secret=b"short")
    for impossible in ({"frame_bytes_max": 1 << 32}, {"outbox_bytes_max": 1000}, {"idle_s": 0.6}):
        with pytest.raises(ValueError):
            LinkLimits(**impossible)


def test_the_backoff_hurries_once_then_doubles_up_to_its_bound_and_forgets_after_a_steady_session() -> None:
    limits = LinkLimits()
    backoff = Backoff(limits, random.Random(7))

    assert backoff.after_session(0.1) == 0.0
    waits = [backoff.after_session(0.1), *(backoff.after_failure() for _ in range(9))]
    assert all(0.5 * bound <= wait <= bound for wait, bound in zip(waits, doubling(limits), strict=False))
    assert backoff.after_session(limits.steady_s + 1) == 0.0
    assert backoff.after_failure() <= limits.backoff_min_s


def doubling(limits: LinkLimits) -> Iterator[float]:
    bound = limits.backoff_min_s
    while True:
        yield bound
        bound = min(2 * bound, limits.backoff_max_s)
