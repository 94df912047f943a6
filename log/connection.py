"""One TCP connection to a peer: a handshake and then, if it succeeds, a session of frames.

A connection turns bytes into frames and frames into bytes, and detects silence. Its owner (`log/link.py`) decides which
connection becomes a peer's session. docs/peer-link.md has the bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, cast

from holdfast.log.handshake import UNPROVED_BYTES_MAX, Established, Handshake, HandshakeRefused, Identity, Role
from holdfast.log.sockets import Address, certified_names, explain

_LENGTH = struct.Struct(">I")
_COUNTER = struct.Struct(">Q")
_MAC_BYTES: Final = 16
# Large enough for hundreds of small frames per system call, small enough to keep one for every peer.
_RECEIVE_BYTES: Final = 256 * 1024
# Above this size a frame authenticates its length before its payload. Otherwise a damaged length could keep a session
# waiting, apparently alive, until pings add up to megabytes.
_LARGE_BYTES: Final = 64 * 1024
_OVER: Final = object()


@dataclass(frozen=True, slots=True)
class LinkLimits:
    frame_bytes_max: int = 32 * 1024 * 1024
    outbox_bytes_max: int = 64 * 1024 * 1024
    handshakes_max: int = 64
    handshakes_per_host_max: int = 16  # So that one stranger does not take all of them.
    handshake_s: float = 5.0
    dial_s: float = 2.0
    idle_s: float = 3.0
    ping_s: float = 0.5
    backoff_min_s: float = 0.02
    backoff_max_s: float = 0.25  # The longest wait before dialing a node that came back.
    steady_s: float = 5.0
    ask_min_s: float = 1.0  # How long to wait for a peer that should dial us before asking it why; doubles.
    ask_max_s: float = 8.0
    flush_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.frame_bytes_max < 1 << 32:
            raise ValueError(f"frame_bytes_max must fit the 32-bit length of a frame, not {self.frame_bytes_max}")
        if self.outbox_bytes_max < self.frame_bytes_max + _LENGTH.size + 2 * _MAC_BYTES:
            raise ValueError("outbox_bytes_max must have room for one frame of frame_bytes_max and its header")
        if not 0 < 2 * self.ping_s <= self.idle_s:
            raise ValueError("idle_s must be at least twice ping_s, or healthy sessions would count as idle")


DEFAULT_LIMITS: Final = LinkLimits()


class Peer:
    """What we know about one peer, across its sessions."""

    __slots__ = (
        "address",
        "bytes_in",
        "bytes_out",
        "came_from",
        "current",
        "dialed_host",
        "dialing",
        "last_error",
        "node",
        "refused",
    )

    def __init__(self, node: str, address: Address) -> None:
        self.node = node
        self.address = address
        self.current: Connection | None = None
        self.dialing: asyncio.Task[None] | None = None
        self.last_error: str | None = None
        self.refused: str | None = None
        self.came_from = ""  # The host of its last session with us, if it dialed,
        self.dialed_host = ""  # and the one that its address led to.
        self.bytes_in = 0
        self.bytes_out = 0


#: Takes a frame of a session: at once (None), or in as many turns of the loop as the iterator has steps. Until then the
#: connection reads nothing more.
OnFrame: TypeAlias = Callable[[str, int, bytes], Iterator[None] | None]


class ConnectionOwner(Protocol):
    """What a connection needs from its `Links`."""

    us: Identity
    secret: bytes | None
    limits: LinkLimits
    tick_s: float
    loop: asyncio.AbstractEventLoop
    on_frame: OnFrame

    def admit(self, connection: Connection, them: Identity) -> str | None: ...

    def connection_made(self, connection: Connection) -> None: ...

    def connection_lost(self, connection: Connection) -> None: ...

    def session_begins(self, connection: Connection, them: Identity) -> None: ...

    def session_ended(self, connection: Connection, reason: str) -> None: ...

    def fatal(self, error: BaseException) -> None: ...

    def warn(self, kind: str, text: str) -> None: ...


class Seals:
    """The MACs of one direction of one session. Each covers the frame number, so a frame is valid at one position only."""

    __slots__ = ("_length", "_payload")

    def __init__(self, key: bytes) -> None:
        # Copied for every frame, which is cheaper than setting the key again.
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


class Connection(asyncio.BufferedProtocol):
    """One TCP connection: a handshake, then a session."""

    def __init__(self, links: ConnectionOwner, where: str, *, dialed: str | None, arrival: int) -> None:
        self.where = where
        self.arrival = arrival
        self.session = 0
        self.proved: str | None = None  # The node, if it proved itself and was refused.
        self.peer: Peer | None = None
        self.since = 0.0
        self.incarnation = 0
        self.closed = False
        self.reported = False
        # `opened` is None for a session, else the reason; `ended`: no more frames; `lost`: the socket is closed.
        self.opened: asyncio.Future[Exception | None] = links.loop.create_future()
        self.ended: asyncio.Future[None] = links.loop.create_future()
        self.lost: asyncio.Future[None] = links.loop.create_future()
        self._links = links
        self.dialed = dialed
        self._transport: asyncio.Transport | None = None
        self._handshake: Handshake | None = None
        self._aborting: asyncio.TimerHandle | None = None
        # Ticks, not seconds: after a pause of our own process, a peer whose bytes wait in our socket does not count as
        # silent. Only authentic frames, complete or large and in transit, end the silence.
        self._silent_ticks = 0
        self._unsent_ticks = 0
        self._idle_ticks = round(links.limits.idle_s / links.tick_s)
        self._ping_ticks = round(links.limits.ping_s / links.tick_s)
        self._send_seals: Seals | None = None
        self._receive_seals: Seals | None = None
        self._large_frame_comes = False
        self._rest: Iterator[None] | None = None  # Of a frame that is being taken in several turns of the loop.
        self._sent = 0
        self._received = 0
        self._header_bytes = _LENGTH.size
        self._buffer = memoryview(bytearray(UNPROVED_BYTES_MAX))
        self._begin = 0  # Of the bytes received and not yet handled.
        self._end = 0

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._links.connection_made(self)
        if self.closed:
            self._transport.abort()
            return
        self._handshake = Handshake(
            role=Role.ACCEPTOR if self.dialed is None else Role.DIALER,
            us=self._links.us,
            secret=self._links.secret,
            peer=self.dialed,
            certified=certified_names(transport),
            admit=lambda them: self._links.admit(self, them),
        )
        self._transport.write(self._handshake.take_output())

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.closed:
            # A closing transport may still read, but the bytes are ignored.
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
        # Reported here, because connection_lost comes a loop iteration later and elections wait for this.
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
        if exc is not None and (self._handshake is None or isinstance(exc, ssl.SSLError)):
            self.end(f"the connection broke: {explain(exc)}")
        elif self._handshake is not None:
            # A reset means no more than a close: which of the two arrives depends on the other side's timing.
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
            self.proved = self._handshake.proved
            last_word = self._handshake.take_output() if self.dialed is None else b""
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
            self._send_seals = Seals(done.send_key)
            self._receive_seals = Seals(done.receive_key)
            self._header_bytes += _MAC_BYTES
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self._buffer[: len(done.rest)] = done.rest
        self._end = len(done.rest)
        self._links.session_begins(self, done.peer)
        if not self.closed:
            self._deliver()

    def become_session(self, peer: Peer, session: int, incarnation: int) -> None:
        assert not self.session and not self.closed
        self.peer = peer
        self.session = session
        self.incarnation = incarnation
        self.since = time.time()
        if not self.opened.done():
            self.opened.set_result(None)

    # Frames.

    def _deliver(self) -> None:
        """Hand over all complete frames in the buffer, then make room for the rest of the next one."""
        if self._rest is not None:
            return  # What follows waits until that frame is taken.
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
                    self._rest = on_frame(node, session, payload)
                except BaseException as error:
                    self._raised(error)
                if self.closed:
                    return
                if self._rest is not None:
                    self._begin, self._end = begin, end
                    self._make_room(header_bytes)
                    self._pause()
                    return
        self._begin, self._end = begin, end
        self._make_room(needed)

    def _pause(self) -> None:
        assert self._transport is not None
        self._transport.pause_reading()
        self._links.loop.call_soon(self._take_rest)

    def _take_rest(self) -> None:
        """Take another part of a large frame, in a turn of its own."""
        assert self._rest is not None
        self._silent_ticks = 0
        try:
            is_over = self.closed or next(self._rest, _OVER) is _OVER
        except BaseException as error:
            self._raised(error)
            return
        if not is_over:
            self._links.loop.call_soon(self._take_rest)
            return
        self._rest = None
        if not self.closed:
            assert self._transport is not None
            self._transport.resume_reading()
            self._deliver()

    def _raised(self, error: BaseException) -> None:
        self.end("on_frame raised")
        self._links.fatal(error)
        if not isinstance(error, Exception):
            raise error

    def _break_seal(self) -> None:
        assert self.peer is not None
        self._links.warn(
            "seal", f"session {self.session} with {self.peer.node!a}: frame {self._received} is not authentic"
        )
        self.end("a frame was altered, lost, repeated or reordered in transit")

    def _make_room(self, needed: int) -> None:
        """Make the frame at `_begin`, of `needed` bytes, fit the buffer.

        The bytes of a frame move at most once, so receiving costs a constant per byte, however the frame is split. A buffer
        that grew for a large frame returns to its usual size with the next small one.
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
            self.end(f"it is too slow: more than {limit} bytes wait to be sent", soon=True)
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
            self.end(f"it sent nothing for {self._links.limits.idle_s} s")
        elif self._unsent_ticks >= self._ping_ticks:
            self.send(b"")

    def outbox_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    # The end.

    def end(self, reason: str, *, soon: bool = False, flush: bool = False) -> None:
        """End this connection, once.

        `soon`: the loop calls `on_down`, not this call. `flush`: written bytes may still leave, up to `flush_s`.
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
