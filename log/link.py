"""The peer link: one authenticated connection per pair of nodes, carrying opaque frames.

Of two nodes the one with the smaller id dials and the other accepts, so a pair never has two connections that each
side would resolve differently. A node that waits in vain to be dialed asks the other node why: such a connection never
becomes a session, but its refusal carries the reason. Every other authenticated connection becomes a session with a
number of its own. Within a session frames arrive unaltered, once and in order, or the session ends. Across sessions
nothing is guaranteed: frames in flight when a session ends may be lost. The log needs no more than that, so the link
drops a session when in doubt and never retries a frame.

A session calls `on_up`, then `on_frame` for each frame, then `on_down`, and a peer's old session is down before its new
one is up. The callbacks run on the loop, never inside `send` or `set_peers` (but `stop` calls `on_down`). They must not
raise: an exception ends the session and is passed to `on_fatal`, because a half-handled frame is a bug.

docs/peer-link.md has the bytes and the limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import socket
import ssl
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

from holdfast.log.connection import DEFAULT_LIMITS, Connection, LinkLimits, OnFrame, Peer
from holdfast.log.greetings import Greetings
from holdfast.log.handshake import REMOVED, Fault, HandshakeRefused, Identity, check_id, check_secret
from holdfast.log.sockets import Address, TlsFiles, connect, explain, is_loopback, tls_contexts, tune

logger = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_WARN_EVERY_S: Final = 10.0
# The answer of the node that dials to a node that asks why. Part of the protocol.
_WRONG_WAY: Final = "the smaller id dials"

# One counter per process, so that a number never identifies two sessions.
_session_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """`since` is the wall-clock time (seconds) when the session came up. Byte counts cover all sessions with this peer."""

    address: Address
    connected: bool
    session: int | None
    since: float | None
    incarnation: int | None
    bytes_in: int
    bytes_out: int
    outbox_bytes: int
    last_error: str | None
    #: Why there is no link although both nodes run: one of them does not accept the other.
    refused: str | None = None


class Backoff:
    """How long a dialer waits before it redials."""

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
        """Redial at once after a lost session, but back off if sessions keep failing."""
        if lived_s > self._limits.steady_s:
            self._next_s = self._limits.backoff_min_s
            self._hurried = False
        if self._hurried:
            return self.after_failure()
        self._hurried = True
        return 0.0


class _Failure(NamedTuple):
    """Why dialing a peer gave no session. `refused`: the peer answered, but one side refused the other."""

    text: str
    refused: bool = False
    removed: bool = False

    def __str__(self) -> str:
        return self.text


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
        on_frame: OnFrame,
        on_fatal: Callable[[BaseException], None] | None = None,
        on_removed: Callable[[str, str], None] = lambda *_: None,
        limits: LinkLimits = DEFAULT_LIMITS,
        jitter: random.Random | None = None,
    ) -> None:
        if secret is not None:
            check_secret(secret)
        self._open = secret is None and tls is None
        if self._open and not is_loopback(listen.host):
            raise ValueError(
                f"listening on {listen} needs a cluster secret or TLS: without them, anyone who can reach the address "
                "could act as a peer. Only loopback addresses work without"
            )
        self.us = Identity(cluster, node, disk, incarnation)
        self.secret = secret
        self.on_frame = on_frame
        self.limits = limits
        # Half the ping interval: precise enough for both limits, with four wake-ups a second when idle.
        self.tick_s = limits.ping_s / 2
        self._listen = listen
        self._port = listen.port
        self._server_tls: ssl.SSLContext | None = None
        self._client_tls: ssl.SSLContext | None = None
        if tls is not None:
            self._server_tls, self._client_tls = tls_contexts(tls)
        self._on_up = on_up
        self._on_down = on_down
        self._on_fatal = on_fatal
        self._on_removed = on_removed
        self._removed: frozenset[str] = frozenset()
        self._jitter = random.Random() if jitter is None else jitter
        self._peers: dict[str, Peer] = {}
        self._connections: set[Connection] = set()
        self._greeting: Greetings[asyncio.Task[None]] = Greetings(limits.handshakes_max, limits.handshakes_per_host_max)
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrivals = itertools.count(1)
        self._listener: socket.socket | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._running = False
        self._warned: dict[str, tuple[float, int]] = {}

    @property
    def port(self) -> int:
        """The port that we listen on. After `start` it is known even if `listen.port` was 0."""
        return self._port

    async def start(self) -> None:
        """Listen and dial. Raises OSError if the address is not available."""
        assert not self._running, "links can be started once only"
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
        """Stop listening and dialing, and end all sessions (`on_down`). Queued frames get `flush_s` to leave."""
        if not self._running:
            return
        self._running = False
        if self._ticker is not None:
            self._ticker.cancel()
        leaving = [peer.current for peer in self._peers.values() if peer.current is not None]
        for connection in leaving:
            connection.end("this node is stopping", flush=True)
        tasks = self._tasks | {*self._greeting}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        lost = [connection.lost for connection in self._connections]
        if lost:
            # Their own timers abort them after flush_s; one more second lets the loop run those.
            await asyncio.wait(lost, timeout=self.limits.flush_s + 1)

    def set_peers(self, peers: Mapping[str, Address], removed: Collection[str] = ()) -> None:
        """Set the peers. May be called at any time; our own id is ignored.

        The session of a former peer ends. A peer that we dial is redialed when its address changes. A peer that dials us
        keeps its session, because its address is used only to ask why it does not dial. A node in `removed` that connects
        is told that it was removed for good.
        """
        self._removed = frozenset(removed)
        wanted = {node: address for node, address in peers.items() if node != self.us.node}
        for node, address in wanted.items():
            check_id("node id", node)
            if self._open and not is_loopback(address.host):
                raise ValueError(
                    f"peer {node!a} at {address} needs a cluster secret or TLS: the address is not loopback"
                )
        for node in [node for node in self._peers if node not in wanted]:
            self._leave(self._peers.pop(node), "it is no longer our peer")
            self._warned.pop(f"dial {node}", None)
        for node, address in wanted.items():
            peer = self._peers.get(node)
            if peer is None:
                peer = self._peers[node] = Peer(node, address)
            elif peer.address != address:
                peer.address = address
                if self._we_dial(node):
                    self._leave(peer, f"its address is now {address}")
            if self._running:
                self._maybe_dial(peer)

    def use_tls(self, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        """Use other contexts for new connections. Sessions keep the certificates they began with."""
        assert self._server_tls is not None, "TLS is never switched on or off while a node runs"
        self._server_tls, self._client_tls = server, client

    def send(self, peer: str, session: int, payload: bytes) -> bool:
        """Queue one frame. False if the session is no longer live; the frame is then dropped.

        Never waits. If the outbox would exceed its bound, the session ends instead. An empty payload is a ping, which the
        other side does not deliver. Raises ValueError for a payload above `frame_bytes_max`, which is a bug of the caller.
        """
        if len(payload) > self.limits.frame_bytes_max:
            raise ValueError(f"frame of {len(payload)} bytes exceeds the limit of {self.limits.frame_bytes_max}")
        known = self._peers.get(peer)
        if known is None or known.current is None or known.current.session != session:
            return False
        return known.current.send(payload)

    def refuse(self, peer: str, session: int, reason: str) -> None:
        """End a session because of what the peer sent. The usual backoff applies to the next one."""
        known = self._peers.get(peer)
        connection = known.current if known is not None else None
        if connection is not None and connection.session == session:
            self.warn("refused", reason)
            connection.end(reason, soon=True, flush=True)  # Frames sent before may still arrive.

    def status(self) -> dict[str, LinkStatus]:
        return {node: self._status_of(peer) for node, peer in self._peers.items()}

    def _status_of(self, peer: Peer) -> LinkStatus:
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
            refused=peer.refused if live is None else None,
        )

    # Called by connections.

    def admit(self, connection: Connection, them: Identity) -> str | None:
        """Why an authenticated peer is not admitted; None if it is."""
        peer = self._peers.get(them.node)
        if not self._running:
            return "this node is stopping"
        if peer is None and them.node in self._removed:
            return f"{REMOVED}: {them.node!a} was removed for good, and its name cannot be reused"
        if peer is None:
            return f"node {them.node!a} is not among the peers of {self.us.node!a}"
        if self._we_dial(them.node):
            return f"{_WRONG_WAY}, so {self.us.node!a} dials {them.node!a}"
        if peer.current is not None and not peer.current.closed and peer.current.arrival > connection.arrival:
            # The dialer abandoned this connection before it dialed the newer one, but its proof was still in transit.
            return "a newer connection took its place"
        return None

    def connection_made(self, connection: Connection) -> None:
        self._connections.add(connection)

    def connection_lost(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def session_begins(self, connection: Connection, them: Identity) -> None:
        peer = self._peers.get(them.node)
        if peer is not None and (old := peer.current) is not None:
            old.end("a newer connection took its place")
            self.session_ended(old, "a newer connection took its place")
        # Checked after on_down, which may have changed the peers.
        if peer is None or self._peers.get(them.node) is not peer or not self._running:
            connection.end("it is no longer our peer")
            return
        session = next(_session_numbers)
        peer.current = connection
        peer.refused = None
        connection.become_session(peer, session, them.incarnation)
        logger.info("session %d with %a at %s is up", session, them.node, connection.where)
        if not self.call(self._on_up, them.node, session, them.disk):
            connection.end("on_up raised")

    def session_ended(self, connection: Connection, reason: str) -> None:
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
        """Run a callback of the node. False if it raised; then `on_fatal` was called."""
        try:
            callback(*args)
        except BaseException as error:
            self.fatal(error)
            if not isinstance(error, Exception):
                raise
            return False
        return True

    def fatal(self, error: BaseException) -> None:
        self.loop.call_exception_handler({"message": "an error ended a peer session", "exception": error})
        if self._on_fatal is not None:
            self._on_fatal(error)

    def warn(self, kind: str, text: str) -> None:
        """Log at most one warning per kind and interval, so that a persistent stranger cannot fill the disk."""
        now_s = self.loop.time()
        last_s, hidden = self._warned.get(kind, (-_WARN_EVERY_S, 0))
        if now_s - last_s < _WARN_EVERY_S:
            self._warned[kind] = (last_s, hidden + 1)
            return
        self._warned[kind] = (now_s, 0)
        logger.warning("%s%s", text, f" ({hidden} similar warnings were suppressed)" if hidden else "")

    # The acceptor.

    async def _accept_forever(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, name = await self.loop.sock_accept(listener)
            except OSError as error:
                # Most likely out of file descriptors. The connection waits in the backlog.
                self.warn("accept", f"cannot accept peer connections: {error}")
                await asyncio.sleep(0.1)
                continue
            if (oldest := self._greeting.in_the_way(name[0], self._known_hosts())) is not None:
                self.warn(
                    "crowd",
                    f"{len(self._greeting)} connections are not authenticated yet, and another comes from {name[0]}: "
                    "the oldest one is closed",
                )
                self._greeting.leave(oldest)
                oldest.cancel()
            task = asyncio.create_task(self._greet(sock, name[0], name[1]))
            self._greeting.enter(task, name[0])
            task.add_done_callback(self._greeting.leave)
            task.add_done_callback(self._task_done)
            # However many come, each begins its handshake before it is the oldest, and the node does everything else.
            await asyncio.sleep(0)

    def _known_hosts(self) -> set[str]:
        """The hosts from which peers dial, as far as we know."""
        hosts: set[str] = set()
        for peer in self._peers.values():
            hosts.update((peer.address.host, peer.came_from, peer.dialed_host))
        return hosts

    async def _greet(self, sock: socket.socket, host: str, port: int) -> None:
        """Turn an accepted connection into a session, or close it."""
        tune(sock, self.limits.idle_s)
        where = str(Address(host, port))
        connection = Connection(self, where, dialed=None, arrival=next(self._arrivals))
        try:
            async with asyncio.timeout(self.limits.handshake_s):
                await self.loop.connect_accepted_socket(lambda: connection, sock, ssl=self._server_tls)
                refusal = await connection.opened
            if connection.peer is not None:
                connection.peer.came_from = host
            if isinstance(refusal, HandshakeRefused):
                self._note_refused(connection, refusal)
            elif refusal is not None:
                logger.debug("%s went away: %s", where, refusal)
        except TimeoutError:
            self.warn("slow", f"refused {where}: it did not finish the handshake in {self.limits.handshake_s} s")
        except ConnectionError as error:
            why = "it aborted the TLS handshake; does it use TLS and trust the CA of our certificate?"
            self.warn("tls", f"refused {where}: {why if self._server_tls is not None else explain(error)}")
        except OSError as error:
            self.warn("tls", f"refused {where}: {explain(error)}")
        finally:
            if not connection.session:
                connection.end("the handshake was abandoned")

    def _note_refused(self, connection: Connection, refusal: HandshakeRefused) -> None:
        if refusal.fault is Fault.NOT_ADMITTED and _WRONG_WAY in refusal.reason:
            return  # The peer only asked why we do not dial.
        self.warn(refusal.fault.value, f"refused {connection.where}: {refusal.reason}")
        # A node that has not proved itself may lie about its name, so it appears only in the log.
        peer = self._peers.get(connection.proved or "")
        if peer is not None and peer.current is None:
            peer.last_error = peer.refused = refusal.reason

    # The dialer.

    def _we_dial(self, node: str) -> bool:
        return self.us.node < node

    def _maybe_dial(self, peer: Peer) -> None:
        if peer.dialing is None:
            dial = self._dial_forever(peer, peer.address) if self._we_dial(peer.node) else self._ask_forever(peer)
            peer.dialing = self._spawn(dial)

    def _leave(self, peer: Peer, reason: str) -> None:
        if peer.dialing is not None:
            peer.dialing.cancel()
            peer.dialing = None
        if peer.current is not None:
            peer.current.end(reason, soon=True)

    async def _dial_forever(self, peer: Peer, address: Address) -> None:
        backoff = Backoff(self.limits, self._jitter)
        while True:
            connection = Connection(self, str(address), dialed=peer.node, arrival=0)
            try:
                error = await self._dial(connection, address)
                if error is None:
                    began_s = self.loop.time()
                    await connection.ended
                    wait_s = backoff.after_session(self.loop.time() - began_s)
                else:
                    self.warn(f"dial {peer.node}", f"no link to {peer.node!a} at {address}: {error}")
                    self._note_failure(peer, error)
                    wait_s = backoff.after_failure()
            finally:
                connection.end("the handshake was abandoned")
            await asyncio.sleep(wait_s)

    async def _ask_forever(self, peer: Peer) -> None:
        """Ask a peer that should dial us why it does not: it may have removed or refused us."""
        wait_s = self.limits.ask_min_s
        while True:
            await asyncio.sleep(wait_s * self._jitter.uniform(0.5, 1.0))
            if peer.current is not None:
                await asyncio.wait([peer.current.ended])
                wait_s = self.limits.ask_min_s
                continue
            wait_s = min(2 * wait_s, self.limits.ask_max_s)
            connection = Connection(self, str(peer.address), dialed=peer.node, arrival=0)
            try:
                error = await self._dial(connection, peer.address)
            finally:
                connection.end("this connection was only a question")
            if error is None or peer.current is not None:
                continue
            if error.refused and _WRONG_WAY in error.text:
                error = _Failure(f"it is up but has not dialed us: does it have our address? ({error.text})")
            elif error.refused:
                self.warn(f"dial {peer.node}", f"no link to {peer.node!a} at {peer.address}: {error}")
            self._note_failure(peer, error)

    def _note_failure(self, peer: Peer, error: _Failure) -> None:
        peer.last_error = error.text
        peer.refused = error.text if error.refused else None
        if error.removed:
            self._on_removed(peer.node, error.text)

    async def _dial(self, connection: Connection, address: Address) -> _Failure | None:
        """Turn a connection into a session. None if it is up, else why it is not."""
        reached = False
        try:
            async with asyncio.timeout(self.limits.dial_s):
                sock = await connect(self.loop, address, self.limits.idle_s)
                reached = True
                self._note_host(connection, sock)
                # No server name: the certificate must carry the node id, not the host name.
                await self.loop.create_connection(
                    lambda: connection,
                    sock=sock,
                    ssl=self._client_tls,
                    server_hostname="" if self._client_tls else None,
                )
        except TimeoutError:
            return _Failure(f"no {'TLS handshake' if reached else 'answer'} in {self.limits.dial_s} s")
        except ConnectionError as error:
            if reached:
                return _Failure(f"it aborted the TLS handshake (does it use TLS?): {explain(error)}", refused=True)
            return _Failure(explain(error))
        except (OSError, UnicodeError) as error:
            return _Failure(explain(error), refused=isinstance(error, ssl.SSLError))
        try:
            async with asyncio.timeout(self.limits.handshake_s):
                refusal = await connection.opened
        except TimeoutError:
            return _Failure(f"it did not finish the handshake in {self.limits.handshake_s} s")
        if refusal is None:
            return None
        removed = isinstance(refusal, HandshakeRefused) and refusal.fault is Fault.REMOVED
        return _Failure(str(refusal), refused=True, removed=removed)

    def _note_host(self, connection: Connection, sock: socket.socket) -> None:
        """A peer most likely dials from the host at which we reach it."""
        peer = self._peers.get(connection.dialed or "")
        if peer is not None:
            with contextlib.suppress(OSError):  # It is gone already.
                peer.dialed_host = sock.getpeername()[0]

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
