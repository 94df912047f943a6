"""The peer link: one authenticated connection per pair of nodes, carrying opaque frames.

Of two nodes the one with the smaller id dials and the other accepts, so a pair never ends up with two
connections that each side would resolve differently. Every connection that has proved itself becomes a
session with a number of its own. Within a session frames arrive unaltered, once each and in order, or the
session ends; across sessions nothing is promised: what was in flight when a session ended may be lost.
That is all the log needs, so the link drops a session whenever in doubt and never retries a frame.

`on_up`, `on_frame` and `on_down` of a session come in this order, and a peer's old session is down before
its new one is up. They run on the loop, never inside `send` or `set_peers` (but `stop` calls `on_down`),
and must not raise: a raising callback ends the session and is handed to `on_fatal`, because a frame that
was half handled is a bug, not a circumstance.

docs/peer-link.md has the bytes and the limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import itertools
import logging
import os
import random
import socket
import ssl
import struct
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from holdfast.log.handshake import (
    UNPROVED_BYTES_MAX,
    Established,
    Fault,
    Handshake,
    HandshakeRefused,
    Identity,
    Role,
    check_id,
    check_secret,
)

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct(">I")
_COUNTER = struct.Struct(">Q")
_MAC_BYTES: Final = 16
# Large enough for hundreds of small frames per system call, small enough to keep one for every peer.
_RECEIVE_BYTES: Final = 256 * 1024
# Above this a sealed frame proves its length before its payload: else a damaged length could
# keep a session waiting, apparently alive, for as long as it takes pings to add up to megabytes.
_LARGE_BYTES: Final = 64 * 1024
_BACKLOG: Final = 128
_WARN_EVERY_S: Final = 10.0

# One counter for the process, so that a number never means two sessions, whatever the peer.
_session_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: our certificate (with its chain), its key, and the CA that signs the certificates of all nodes."""

    cert: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class LinkLimits:
    frame_bytes_max: int = 32 * 1024 * 1024
    outbox_bytes_max: int = 64 * 1024 * 1024
    handshakes_max: int = 64
    handshake_s: float = 5.0
    dial_s: float = 2.0
    idle_s: float = 3.0
    ping_s: float = 0.5
    backoff_min_s: float = 0.02
    backoff_max_s: float = 0.25  # So soon a node that comes back is heard again by those who dial it.
    steady_s: float = 5.0
    flush_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.frame_bytes_max < 1 << 32:
            raise ValueError(f"frame_bytes_max must fit the 32-bit length of a frame, not {self.frame_bytes_max}")
        if self.outbox_bytes_max < self.frame_bytes_max + _LENGTH.size + 2 * _MAC_BYTES:
            raise ValueError("outbox_bytes_max must have room for one frame of frame_bytes_max and its header")
        if not 0 < 2 * self.ping_s <= self.idle_s:
            raise ValueError("idle_s must be at least twice ping_s, or a healthy session would be taken for idle")


DEFAULT_LIMITS: Final = LinkLimits()


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """`since` is the wall clock (seconds) at which the session came up; bytes count all sessions with this peer."""

    address: Address
    connected: bool
    session: int | None
    since: float | None
    incarnation: int | None
    bytes_in: int
    bytes_out: int
    outbox_bytes: int
    last_error: str | None


class Backoff:
    """How long a dialer waits before it dials again."""

    def __init__(self, limits: LinkLimits, jitter: random.Random) -> None:
        self._limits = limits
        self._jitter = jitter
        self._next_s = limits.backoff_min_s
        self._hurried = False

    def after_failure(self) -> float:
        wait_s = self._next_s * self._jitter.uniform(0.5, 1.0)
        self._next_s = min(self._next_s * 2, self._limits.backoff_max_s)
        return wait_s

    def after_session(self, lived_s: float) -> float:
        """A lost session is redialed at once, but two nodes that keep losing each other do not spin."""
        if lived_s > self._limits.steady_s:
            self._next_s = self._limits.backoff_min_s
            self._hurried = False
        if self._hurried:
            return self.after_failure()
        self._hurried = True
        return 0.0


class _Peer:
    """What we know of one peer, across its sessions."""

    __slots__ = ("address", "bytes_in", "bytes_out", "current", "dialing", "last_error", "node")

    def __init__(self, node: str, address: Address) -> None:
        self.node = node
        self.address = address
        self.current: _Connection | None = None
        self.dialing: asyncio.Task[None] | None = None
        self.last_error: str | None = None
        self.bytes_in = 0
        self.bytes_out = 0


class Links:
    """All peer links of one node. Everything here runs on one event loop."""

    def __init__(
        self,
        *,
        cluster: str,
        node: str,
        disk: str,
        incarnation: int,
        listen: Address,
        secret: bytes | None,
        tls: TlsFiles | None,
        on_up: Callable[[str, int, str], None],
        on_down: Callable[[str, int], None],
        on_frame: Callable[[str, int, bytes], None],
        on_fatal: Callable[[BaseException], None] | None = None,
        limits: LinkLimits = DEFAULT_LIMITS,
        jitter: random.Random | None = None,
    ) -> None:
        if secret is not None:
            check_secret(secret)
        self._open = secret is None and tls is None
        if self._open and not _is_loopback(listen.host):
            raise ValueError(
                f"listening on {listen} needs a cluster secret or TLS: without them anybody who reaches that address "
                "could speak as a peer. Only a loopback address may go without"
            )
        self.us = Identity(cluster, node, disk, incarnation)
        self.secret = secret
        self.on_frame = on_frame
        self.limits = limits
        # Half the ping interval: precise enough for both limits, and four wake-ups a second when idle.
        self.tick_s = limits.ping_s / 2
        self._listen = listen
        self._port = listen.port
        self._server_tls: ssl.SSLContext | None = None
        self._client_tls: ssl.SSLContext | None = None
        if tls is not None:
            self._server_tls, self._client_tls = _tls_contexts(tls)
        self._on_up = on_up
        self._on_down = on_down
        self._on_fatal = on_fatal
        self._jitter = random.Random() if jitter is None else jitter
        self._peers: dict[str, _Peer] = {}
        self._connections: set[_Connection] = set()
        self._greeting: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrivals = itertools.count(1)
        self._listener: socket.socket | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._running = False
        self._warned: dict[str, tuple[float, int]] = {}

    @property
    def port(self) -> int:
        """The port we really listen on: after `start`, also where `listen.port` was 0."""
        return self._port

    async def start(self) -> None:
        """Listen and dial. Raises OSError when the address cannot be had."""
        assert not self._running, "links start once"
        self.loop = asyncio.get_running_loop()
        host = self._listen.host or None
        found = await self.loop.getaddrinfo(host, self._listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, where = found[0]
        self._listener = socket.create_server(cast(Any, where), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._port = self._listener.getsockname()[1]
        self._running = True
        self._spawn(self._accept_forever(self._listener))
        for peer in self._peers.values():
            self._maybe_dial(peer)
        self._ticker = self.loop.call_later(self.tick_s, self._tick)

    async def stop(self) -> None:
        """Stop listening and dialing; end all sessions (`on_down`). Frames already sent get `flush_s` to leave."""
        if not self._running:
            return
        self._running = False
        if self._ticker is not None:
            self._ticker.cancel()
        leaving = [peer.current for peer in self._peers.values() if peer.current is not None]
        for connection in leaving:
            connection.end("we stop", flush=True)
        tasks = self._tasks | self._greeting
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        lost = [connection.lost for connection in self._connections]
        if lost:
            # Their own timers abort them after flush_s; the second one is for the loop to get to it.
            await asyncio.wait(lost, timeout=self.limits.flush_s + 1)

    def set_peers(self, peers: Mapping[str, Address]) -> None:
        """Make these our peers. May be called at any time; our own id is left out.

        A removed peer's session ends. A peer we dial is redialed when its address changes; one that dials us keeps
        its session, because its address is not used.
        """
        wanted = {node: address for node, address in peers.items() if node != self.us.node}
        for node, address in wanted.items():
            check_id("node id", node)
            if self._open and not _is_loopback(address.host):
                raise ValueError(f"peer {node!a} at {address} needs a cluster secret or TLS: it is not on loopback")
        for node in [node for node in self._peers if node not in wanted]:
            self._leave(self._peers.pop(node), "it is no longer our peer")
            self._warned.pop(f"dial {node}", None)
        for node, address in wanted.items():
            peer = self._peers.get(node)
            if peer is None:
                peer = self._peers[node] = _Peer(node, address)
            elif peer.address != address:
                peer.address = address
                if self._we_dial(node):
                    self._leave(peer, f"its address is now {address}")
            if self._running:
                self._maybe_dial(peer)

    def send(self, peer: str, session: int, payload: bytes) -> bool:
        """Queue one frame. False: that session is not live any more, and the frame is dropped.

        Never waits. A session whose outbox would pass its bound is ended instead. An empty payload is a ping: the
        other side does not see it. ValueError for a payload above `frame_bytes_max`, which is the caller's bug.
        """
        if len(payload) > self.limits.frame_bytes_max:
            raise ValueError(f"a frame of {len(payload)} bytes is above the limit of {self.limits.frame_bytes_max}")
        known = self._peers.get(peer)
        if known is None or known.current is None or known.current.session != session:
            return False
        return known.current.send(payload)

    def refuse(self, peer: str, session: int, reason: str) -> None:
        """End a session because of what came through it. The next one is dialed with the usual backoff."""
        known = self._peers.get(peer)
        connection = known.current if known is not None else None
        if connection is not None and connection.session == session:
            self.warn("refused", reason)
            connection.end(reason, soon=True, flush=True)  # What was said before may still arrive.

    def status(self) -> dict[str, LinkStatus]:
        return {node: self._status_of(peer) for node, peer in self._peers.items()}

    def _status_of(self, peer: _Peer) -> LinkStatus:
        live = peer.current if peer.current is not None and not peer.current.closed else None
        return LinkStatus(
            address=peer.address,
            connected=live is not None,
            session=live.session if live else None,
            since=live.since if live else None,
            incarnation=live.incarnation if live else None,
            bytes_in=peer.bytes_in,
            bytes_out=peer.bytes_out,
            outbox_bytes=live.outbox_bytes() if live else 0,
            last_error=peer.last_error,
        )

    # What connections report.

    def admit(self, connection: _Connection, them: Identity) -> str | None:
        """The acceptor's question about a peer that has proved itself: None, or why not."""
        peer = self._peers.get(them.node)
        if not self._running:
            return "we are stopping"
        if peer is None:
            return f"node {them.node!a} is not among the peers of {self.us.node!a}"
        if self._we_dial(them.node):
            return f"the smaller id dials, so {self.us.node!a} dials {them.node!a}"
        if peer.current is not None and not peer.current.closed and peer.current.arrival > connection.arrival:
            # The dialer gave this one up before it dialed the other, but its proof was still on the way.
            return "a newer connection took its place"
        return None

    def connection_made(self, connection: _Connection) -> None:
        self._connections.add(connection)

    def connection_lost(self, connection: _Connection) -> None:
        self._connections.discard(connection)

    def session_begins(self, connection: _Connection, them: Identity) -> None:
        peer = self._peers.get(them.node)
        if peer is not None and (old := peer.current) is not None:
            old.end("a newer connection took its place")
            self.session_ended(old, "a newer connection took its place")
        # Asked after on_down, which may have changed the peers.
        if peer is None or self._peers.get(them.node) is not peer or not self._running:
            connection.end("it is no longer our peer")
            return
        session = next(_session_numbers)
        peer.current = connection
        connection.become_session(peer, session, them.incarnation)
        logger.info("session %d with %a at %s is up", session, them.node, connection.where)
        if not self.call(self._on_up, them.node, session, them.disk):
            connection.end("on_up raised")

    def session_ended(self, connection: _Connection, reason: str) -> None:
        """Report a session's end, once."""
        peer = connection.peer
        if peer is None or connection.reported:
            return
        connection.reported = True
        peer.last_error = reason
        if peer.current is connection:
            peer.current = None
        logger.info("session %d with %a is down: %s", connection.session, peer.node, reason)
        self.call(self._on_down, peer.node, connection.session)

    def call(self, callback: Callable[..., None], *args: object) -> bool:
        """Run a callback of the node above. False: it raised, and `on_fatal` knows."""
        try:
            callback(*args)
        except BaseException as error:
            self.fatal(error)
            if not isinstance(error, Exception):
                raise
            return False
        return True

    def fatal(self, error: BaseException) -> None:
        self.loop.call_exception_handler({"message": "a bug ended a peer session", "exception": error})
        if self._on_fatal is not None:
            self._on_fatal(error)

    def warn(self, kind: str, text: str) -> None:
        """A warning per kind and interval: a stranger who knocks all day must not fill the disk."""
        now_s = self.loop.time()
        last_s, hidden = self._warned.get(kind, (-_WARN_EVERY_S, 0))
        if now_s - last_s < _WARN_EVERY_S:
            self._warned[kind] = (last_s, hidden + 1)
            return
        self._warned[kind] = (now_s, 0)
        logger.warning("%s%s", text, f" ({hidden} more like this were not logged)" if hidden else "")

    # The acceptor.

    async def _accept_forever(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, name = await self.loop.sock_accept(listener)
            except OSError as error:
                # Out of file descriptors, most likely: the connection waits in the backlog meanwhile.
                self.warn("accept", f"cannot accept peer connections: {error}")
                await asyncio.sleep(0.1)
                continue
            where = str(Address(name[0], name[1]))
            if len(self._greeting) >= self.limits.handshakes_max:
                sock.close()
                self.warn("crowd", f"refused {where}: {len(self._greeting)} connections are not authenticated yet")
                continue
            task = asyncio.create_task(self._greet(sock, where))
            self._greeting.add(task)
            task.add_done_callback(self._greeting.discard)
            task.add_done_callback(self._task_done)

    async def _greet(self, sock: socket.socket, where: str) -> None:
        """Bring an accepted connection to a session, or close it."""
        _tune(sock, self.limits)
        connection = _Connection(self, where, dialed=None, arrival=next(self._arrivals))
        try:
            async with asyncio.timeout(self.limits.handshake_s):
                await self.loop.connect_accepted_socket(lambda: connection, sock, ssl=self._server_tls)
                refusal = await connection.opened
            if isinstance(refusal, HandshakeRefused):
                self.warn(refusal.fault.value, f"refused {where}: {refusal.reason}")
            elif refusal is not None:
                logger.debug("%s went away: %s", where, refusal)
        except TimeoutError:
            self.warn("slow", f"refused {where}: it did not finish the handshake in {self.limits.handshake_s} s")
        except ConnectionError as error:
            why = "it broke off the TLS handshake; does it use TLS, and trust the CA of our certificate?"
            self.warn("tls", f"refused {where}: {why if self._server_tls is not None else _explain(error)}")
        except OSError as error:
            self.warn("tls", f"refused {where}: {_explain(error)}")
        finally:
            if not connection.session:
                connection.end("the handshake was given up")

    # The dialer.

    def _we_dial(self, node: str) -> bool:
        return self.us.node < node

    def _maybe_dial(self, peer: _Peer) -> None:
        if peer.dialing is None and self._we_dial(peer.node):
            peer.dialing = self._spawn(self._dial_forever(peer, peer.address))

    def _leave(self, peer: _Peer, reason: str) -> None:
        if peer.dialing is not None:
            peer.dialing.cancel()
            peer.dialing = None
        if peer.current is not None:
            peer.current.end(reason, soon=True)

    async def _dial_forever(self, peer: _Peer, address: Address) -> None:
        backoff = Backoff(self.limits, self._jitter)
        while True:
            connection = _Connection(self, str(address), dialed=peer.node, arrival=0)
            try:
                error = await self._dial(connection, address)
                if error is None:
                    began_s = self.loop.time()
                    await connection.ended
                    wait_s = backoff.after_session(self.loop.time() - began_s)
                else:
                    self.warn(f"dial {peer.node}", f"no link to {peer.node!a} at {address}: {error}")
                    peer.last_error = error
                    wait_s = backoff.after_failure()
            finally:
                connection.end("the handshake was given up")
            await asyncio.sleep(wait_s)

    async def _dial(self, connection: _Connection, address: Address) -> str | None:
        """Bring a connection to a session. None: it is up; else why it is not."""
        reached = False
        try:
            async with asyncio.timeout(self.limits.dial_s):
                sock = await _connect(self.loop, address, self.limits)
                reached = True
                # An empty server name: it is node ids, not host names, that the certificate must carry.
                await self.loop.create_connection(
                    lambda: connection,
                    sock=sock,
                    ssl=self._client_tls,
                    server_hostname="" if self._client_tls else None,
                )
        except TimeoutError:
            return f"no {'TLS handshake' if reached else 'answer'} in {self.limits.dial_s} s"
        except ConnectionError as error:
            return (
                f"it broke off the TLS handshake (does it use TLS?): {_explain(error)}" if reached else _explain(error)
            )
        except (OSError, UnicodeError) as error:
            return _explain(error)
        try:
            async with asyncio.timeout(self.limits.handshake_s):
                refusal = await connection.opened
        except TimeoutError:
            return f"it did not finish the handshake in {self.limits.handshake_s} s"
        return None if refusal is None else str(refusal)

    # Time and tasks.

    def _tick(self) -> None:
        self._ticker = self.loop.call_later(self.tick_s, self._tick)
        for peer in list(self._peers.values()):
            if peer.current is not None:
                peer.current.tick()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fatal(error)


class _Seals:
    """The MACs of one direction of one session. The number of the frame is in each, so each place has its own."""

    __slots__ = ("_length", "_payload")

    def __init__(self, key: bytes) -> None:
        # Copied for every frame, which is cheaper than keying anew.
        self._payload = hashlib.blake2b(key=key, digest_size=_MAC_BYTES, person=b"payload")
        self._length = hashlib.blake2b(key=key, digest_size=_MAC_BYTES, person=b"length")

    def of_payload(self, number: int, payload: bytes) -> bytes:
        seal = self._payload.copy()
        seal.update(_COUNTER.pack(number))
        seal.update(payload)
        return seal.digest()

    def of_length(self, number: int, length: int) -> bytes:
        seal = self._length.copy()
        seal.update(_COUNTER.pack(number) + _LENGTH.pack(length))
        return seal.digest()


class _Connection(asyncio.BufferedProtocol):
    """One TCP connection: first a handshake, then, if that succeeds, a session."""

    def __init__(self, links: Links, where: str, *, dialed: str | None, arrival: int) -> None:
        self.where = where
        self.arrival = arrival
        self.session = 0
        self.peer: _Peer | None = None
        self.since = 0.0
        self.incarnation = 0
        self.closed = False
        self.reported = False
        # `opened` gives None for a session, else why there is none; `ended`: no more frames; `lost`: no more socket.
        self.opened: asyncio.Future[Exception | None] = links.loop.create_future()
        self.ended: asyncio.Future[None] = links.loop.create_future()
        self.lost: asyncio.Future[None] = links.loop.create_future()
        self._links = links
        self._dialed = dialed
        self._transport: asyncio.Transport | None = None
        self._handshake: Handshake | None = None
        self._aborting: asyncio.TimerHandle | None = None
        # Ticks, not seconds: when our own process was stopped for a while, a peer whose bytes wait in our socket
        # is not taken for silent. Only genuine frames, whole or large and on the way, break the silence.
        self._silent_ticks = 0
        self._unsent_ticks = 0
        self._idle_ticks = round(links.limits.idle_s / links.tick_s)
        self._ping_ticks = round(links.limits.ping_s / links.tick_s)
        self._send_seals: _Seals | None = None
        self._receive_seals: _Seals | None = None
        self._large_frame_comes = False
        self._sent = 0
        self._received = 0
        self._header_bytes = _LENGTH.size
        self._buffer = memoryview(bytearray(UNPROVED_BYTES_MAX))
        self._begin = 0  # of the bytes received and not yet handled
        self._end = 0

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._links.connection_made(self)
        if self.closed:
            self._transport.abort()
            return
        self._handshake = Handshake(
            role=Role.ACCEPTOR if self._dialed is None else Role.DIALER,
            us=self._links.us,
            secret=self._links.secret,
            peer=self._dialed,
            certified=_certified_names(transport),
            admit=lambda them: self._links.admit(self, them),
        )
        self._transport.write(self._handshake.take_output())

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.closed:
            # Nothing is handled any more, but a closing transport may still read.
            self._begin = self._end = 0
        return self._buffer[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self.closed:
            return
        if self._handshake is not None:
            self._greet(bytes(self._buffer[:nbytes]))
            return
        assert self.peer is not None
        self.peer.bytes_in += nbytes
        self._end += nbytes
        if self._large_frame_comes:
            self._silent_ticks = 0
        self._deliver()

    def eof_received(self) -> bool:
        # Not left to connection_lost, which comes a turn of the loop later: elections wait for this.
        self._gone(None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone(exc)
        if self._aborting is not None:
            self._aborting.cancel()
        self._links.connection_lost(self)
        if not self.lost.done():
            self.lost.set_result(None)

    def _gone(self, exc: Exception | None) -> None:
        if exc is not None:
            self.end(f"the connection broke: {_explain(exc)}")
        elif self._handshake is not None:
            self.end(f"it {self._handshake.explain_close()}")
        else:
            self.end("it closed the connection")

    # The handshake.

    def _greet(self, data: bytes) -> None:
        assert self._handshake is not None and self._transport is not None
        try:
            done = self._handshake.receive(data)
        except HandshakeRefused as refusal:
            if not self.opened.done():
                self.opened.set_result(refusal)
            last_word = self._handshake.take_output() if refusal.fault is Fault.NOT_ADMITTED else b""
            if last_word:
                self._transport.write(last_word)
            self.end(refusal.reason, flush=bool(last_word))
            return
        output = self._handshake.take_output()
        if output:
            self._transport.write(output)
        if done is not None:
            self._handshake = None
            self._begin_frames(done)

    def _begin_frames(self, done: Established) -> None:
        if done.send_key is not None and done.receive_key is not None:
            self._send_seals = _Seals(done.send_key)
            self._receive_seals = _Seals(done.receive_key)
            self._header_bytes += _MAC_BYTES
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self._buffer[: len(done.rest)] = done.rest
        self._end = len(done.rest)
        self._links.session_begins(self, done.peer)
        if not self.closed:
            self._deliver()

    def become_session(self, peer: _Peer, session: int, incarnation: int) -> None:
        assert not self.session and not self.closed
        self.peer = peer
        self.session = session
        self.incarnation = incarnation
        self.since = time.time()
        if not self.opened.done():
            self.opened.set_result(None)

    # Frames.

    def _deliver(self) -> None:
        """Hand over all whole frames in the buffer, then see that the rest of the next one will fit."""
        links, peer, session = self._links, self.peer, self.session
        assert peer is not None
        node, on_frame, header_bytes, seals = peer.node, links.on_frame, self._header_bytes, self._receive_seals
        buffer, begin, end = self._buffer, self._begin, self._end
        needed = header_bytes
        while end - begin >= header_bytes:
            (length,) = _LENGTH.unpack_from(buffer, begin)
            if length > links.limits.frame_bytes_max:
                self.end(f"it announced a frame of {length} bytes, above the limit of {links.limits.frame_bytes_max}")
                return
            body = begin + header_bytes
            if length > _LARGE_BYTES:
                if seals is not None:
                    if not self._large_frame_comes and not hmac.compare_digest(
                        seals.of_length(self._received, length), buffer[begin + _LENGTH.size : body]
                    ):
                        self._break_seal()
                        return
                    body += _MAC_BYTES
                self._large_frame_comes = True
            if end < body + length:
                needed = body - begin + length
                break
            payload = bytes(buffer[body : body + length])
            if seals is not None and not hmac.compare_digest(
                seals.of_payload(self._received, payload), buffer[body - _MAC_BYTES : body]
            ):
                self._break_seal()
                return
            self._large_frame_comes = False
            self._silent_ticks = 0
            self._received += 1
            begin = body + length
            if length:
                try:
                    on_frame(node, session, payload)
                except BaseException as error:
                    self.end("on_frame raised")
                    links.fatal(error)
                    if not isinstance(error, Exception):
                        raise
                if self.closed:
                    return
        self._begin, self._end = begin, end
        self._make_room(needed)

    def _break_seal(self) -> None:
        assert self.peer is not None
        self._links.warn(
            "seal", f"session {self.session} with {self.peer.node!a}: frame {self._received} is not genuine"
        )
        self.end("a frame was altered, lost, repeated or reordered on the way")

    def _make_room(self, needed: int) -> None:
        """See that the frame at `_begin`, of `needed` bytes, fits the buffer.

        What is there of it moves at most once, so receiving costs a constant per byte however it is cut. A buffer
        that grew for a large frame goes back to its usual size with the next small one.
        """
        size = max(needed, _RECEIVE_BYTES)
        kept = self._end - self._begin
        if len(self._buffer) != size:
            room = memoryview(bytearray(size))
        elif kept == 0:
            self._begin = self._end = 0
            return
        elif self._begin + needed > len(self._buffer):
            room = self._buffer
        else:
            return
        room[:kept] = self._buffer[self._begin : self._end]
        self._buffer = room
        self._begin, self._end = 0, kept

    def send(self, payload: bytes) -> bool:
        transport = self._transport
        if self.closed or transport is None or transport.is_closing():
            return False
        assert self.peer is not None
        limit = self._links.limits.outbox_bytes_max
        if transport.get_write_buffer_size() + len(payload) + _LENGTH.size + 2 * _MAC_BYTES > limit:
            self.end(f"it is too slow: more than {limit} bytes wait for it", soon=True)
            return False
        header = _LENGTH.pack(len(payload))
        if self._send_seals is not None:
            if len(payload) > _LARGE_BYTES:
                header += self._send_seals.of_length(self._sent, len(payload))
            header += self._send_seals.of_payload(self._sent, payload)
        self._sent += 1
        self._unsent_ticks = 0
        self.peer.bytes_out += len(header) + len(payload)
        if payload:
            transport.writelines((header, payload))
        else:
            transport.write(header)
        return True

    def tick(self) -> None:
        if self.closed:
            return
        self._silent_ticks += 1
        self._unsent_ticks += 1
        if self._silent_ticks > self._idle_ticks:
            self.end(f"nothing came from it for {self._links.limits.idle_s} s")
        elif self._unsent_ticks >= self._ping_ticks:
            self.send(b"")

    def outbox_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    # The end.

    def end(self, reason: str, *, soon: bool = False, flush: bool = False) -> None:
        """End this connection, once. `soon`: `on_down` comes from the loop, not from inside this call.

        `flush`: what was written may still leave, for a while.
        """
        if self.closed:
            return
        self.closed = True
        if self._transport is not None:
            if flush:
                self._transport.close()
                self._aborting = self._links.loop.call_later(self._links.limits.flush_s, self._transport.abort)
            else:
                self._transport.abort()
        if not self.opened.done():
            self.opened.set_result(ConnectionError(reason))
        if not self.ended.done():
            self.ended.set_result(None)
        if not self.session:
            return
        if soon:
            self._links.loop.call_soon(self._links.session_ended, self, reason)
        else:
            self._links.session_ended(self, reason)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _explain(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS failed: {error.verify_message or error.reason}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    if isinstance(error, ConnectionError | TimeoutError) and error.errno:
        # The loops word these each in their own way; the system's words are the ones people search for.
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def _tune(sock: socket.socket, limits: LinkLimits) -> None:
    # A socket whose peer has gone already may refuse options; reading from it will tell.
    with contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.idle_s * 1000))


async def _connect(loop: asyncio.AbstractEventLoop, address: Address, limits: LinkLimits) -> socket.socket:
    """A connected socket, by the first of the host's addresses that answers."""
    failure: OSError = ConnectionError(f"{address.host} has no address")
    for family, kind, protocol, _, where in await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        _tune(sock, limits)
        try:
            await loop.sock_connect(sock, where)
            # Dialing a free local port may by chance connect a socket to itself and keep the port from its owner.
            if sock.getsockname() == sock.getpeername():
                raise ConnectionRefusedError("nobody listens there")
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


def _tls_contexts(files: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For accepting and for dialing. Both demand a certificate of our CA; whose it is, the handshake checks."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    server.num_tickets = 0  # Sessions are never resumed.
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(files.cert, files.key)
        context.load_verify_locations(files.ca)
    return server, client


def _certified_names(transport: asyncio.BaseTransport) -> frozenset[str] | None:
    """The names in the peer's verified certificate (DNS names and common name); None without TLS."""
    if transport.get_extra_info("ssl_object") is None:
        return None
    certificate = transport.get_extra_info("peercert") or {}
    names = {value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"}
    for part in certificate.get("subject", ()):
        names.update(value for kind, value in part if kind == "commonName")
    return frozenset(names)
