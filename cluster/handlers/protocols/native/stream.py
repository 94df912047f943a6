"""The stream: one WebSocket per node and deployment, with many attempts on it and one message per turn of the event loop.

Each side tells the other how many frames it can accept. When the stream breaks, all its attempts are dispatched again
at once. An endpoint that announces that it is going away keeps its attempts, and the next stream takes the new ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import aiohttp

from holdfast.cluster.handlers.attempts import Attempt, Opening, Stall
from holdfast.cluster.handlers.dispatch import Station
from holdfast.cluster.handlers.large import Fetches, LargeOutcome
from holdfast.cluster.handlers.protocols.native.deferred import Deferred, PendingAck, encode
from holdfast.cluster.handlers.protocols.native.hearing import Hearing
from holdfast.cluster.handlers.protocols.native.liveness import Liveness
from holdfast.cluster.handlers.protocols.native.opening import frames_of
from holdfast.cluster.handlers.protocols.native.session import Session
from holdfast.sdk.frames import (
    TO_NODE,
    Abort,
    Ack,
    Began,
    Blocked,
    Cancelled,
    Completion,
    Credit,
    Frame,
    Goaway,
    Journal,
    RetryRun,
    Start,
    Suspend,
    Wrong,
    decode_slices,
    encode_batch,
    encode_pieces,
)
from holdfast.sdk.ids import NO_INVOCATION, InvocationId
from holdfast.sdk.journal import ProtocolError
from holdfast.statemachine.outcomes import failed

logger = logging.getLogger(__name__)

#: Frames of an endpoint that we accept before they are in a log.
WINDOW_FRAMES: Final = 16_384
#: Bounds on frames for attempts that do not run here: a burst, as many as may be in flight when attempts end, and a
#: rate per second. If an endpoint sends more, its stream is closed.
STRAYS_MAX: Final = WINDOW_FRAMES
STRAYS_PER_S: Final = 1000
#: One message of the stream is about this large, unless a single frame is larger.
MESSAGE_BYTES: Final = 1024 * 1024
MESSAGE_FRAMES: Final = 4096
#: No new attempt starts on a stream while this much waits to be sent,
START_BYTES: Final = 4 * 1024 * 1024
#: and an endpoint with this much waiting is considered not to read at all.
OUTBOX_BYTES_MAX: Final = 128 * 1024 * 1024
GOODBYE_S: Final = 1.0  # How long an endpoint has to close a stream cleanly.
#: Close codes of stopping servers and of proxies: normal, going away, service restart, try again later.
_ORDERLY: Final = frozenset({1000, 1001, 1012, 1013})
_CLOSE_CODES: Final = {
    1000: ", normal",
    1001: ", going away",
    1002: ", protocol error",
    1006: ", the connection broke",
    1008: ", policy violation",
    1009: ", message too big",
    1011: ", internal error",
    1012: ", service restart",
    1013: ", try again later",
}
#: Frames of the stream itself, not of an attempt that waits for them.
_OF_THE_STREAM: Final = frozenset({Credit, Goaway, Began, Blocked})


class Stream:
    """One WebSocket, and the attempts on it."""

    def __init__(
        self,
        endpoint: Station,
        socket: aiohttp.ClientWebSocketResponse,
        version: int,
        *,
        message_bytes_max: int,
        liveness: Liveness,
        refused: Callable[[int], None],
    ) -> None:
        self.attempts: dict[InvocationId, Attempt] = {}
        self._message_bytes_max = message_bytes_max
        #: Size of the largest message sent, and the attempts it was for.
        self._largest: tuple[int, list[tuple[InvocationId, int]]] = (0, [])
        self.version = version  # The protocol version, which the endpoint chose when the stream was opened.
        self.drains = False
        self.crashed = False  # It ended abruptly, as if the process had been killed.
        self._endpoint = endpoint
        self._invoker = endpoint.invoker
        self._hearing = Hearing(endpoint.invoker)
        self._refused = refused  # Called with the size of a message that the endpoint's server refused.
        self._socket = socket
        self._liveness = liveness
        self._frames: list[Frame | PendingAck | Deferred] = []
        self._bytes = 0
        #: By attempt, in order: a frame whose value is still being fetched, and the frames after it. Other attempts
        #: continue.
        self._behind: dict[tuple[InvocationId, int], list[Frame | PendingAck | Deferred]] = {}
        self._fetches = Fetches(endpoint.invoker.objects)
        self._credit = 0
        self._owed = WINDOW_FRAMES  # Frames that we can accept but have not granted yet.
        self._granted = 0  # Frames that the endpoint may send.
        self._strays = 0.0  # Recent frames for attempts that do not run here.
        self._strays_at = 0.0
        self._over = False  # Only the closing handshake is left, which need not be cancelled.
        self._blame: str | None = None
        self._blamed: InvocationId | None = None  # The invocation that violated the protocol, if known.
        self._why = "the endpoint closed the stream"
        self._wake = asyncio.Event()
        self._wake.set()
        self._tasks: list[asyncio.Task[None]] = []

    def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._read()), loop.create_task(self._write())]

    # -- out -----------------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return True

    @property
    def stall(self) -> Stall | None:
        return self._liveness.stall if not self._over else None

    @property
    def attempts_max(self) -> int:
        return self._invoker.limits.attempts

    @property
    def can_start(self) -> bool:
        return not self.drains and self._credit > len(self._frames) and self._bytes < START_BYTES

    def begin(self, attempt: Attempt, opening: Opening) -> None:
        self.attempts[attempt.id] = attempt
        attempt.session = Session(self.version)
        for frame in frames_of(attempt, opening):
            self._push(frame)

    def acknowledge(self, attempt: Attempt) -> None:
        """Sent with the next message; until then, later acknowledgements join it."""
        session = attempt.session
        if session.pending_ack is None:
            session.pending_ack = ack = PendingAck(attempt, attempt.length)
            self._push(ack)
        else:
            session.pending_ack.length = attempt.length

    def complete(self, attempt: Attempt, step: int, order: int, outcome: list[Any] | LargeOutcome) -> None:
        attempt.session.pending_ack = None  # It stays in place; later acknowledgements come after this frame.
        large = outcome if isinstance(outcome, LargeOutcome) else None
        plain = [0, b""] if isinstance(outcome, LargeOutcome) else outcome  # Filled in when the frame is sent.
        frame = Completion(invocation=attempt.id, epoch=attempt.epoch, index=step, order=order, outcome=plain)
        self._push(frame if large is None else Deferred(attempt, frame, large))

    def retry(self, attempt: Attempt, step: int) -> None:
        self._push(RetryRun(attempt.id, attempt.epoch, step))

    def cancelled(self, attempt: Attempt) -> None:
        self._push(Cancelled(attempt.id, attempt.epoch))

    def suspend(self, attempt: Attempt) -> None:
        self._push(Suspend(attempt.id, attempt.epoch))

    def abort(self, attempt: Attempt, reason: str) -> None:
        self._push(Abort(attempt.id, attempt.epoch, reason))

    def owes(self, attempt: Attempt) -> bool:
        return bool(attempt.session.unsent)

    def let_go(self, attempt: Attempt) -> None:
        if self.attempts.get(attempt.id) is attempt:
            del self.attempts[attempt.id]
            for frame in self._behind.pop((attempt.id, attempt.epoch), ()):
                self._release(frame)
            self._endpoint.let_go(attempt)

    def _push(self, frame: Frame | PendingAck | Deferred) -> None:
        if isinstance(frame, Deferred):
            frame.attempt.session.unsent += 1
        if self._behind and type(frame) is not Abort:
            behind = self._behind.get(_whose(frame))
            if behind is not None:
                behind.append(frame)
                return
        self._queue(frame)

    def _queue(self, frame: Frame | PendingAck | Deferred) -> None:
        """Queue a frame. One whose value must be fetched first is set aside, with all later frames of its attempt after it."""
        if isinstance(frame, Deferred) and frame.large.to_fetch():
            self._behind[_whose(frame)] = [frame]
            self._fetches.want(frame.large, lambda: not frame.attempt.over, partial(self._fetched, frame))
            return
        self._frames.append(frame)
        self._bytes += _held(frame)
        if self._bytes > OUTBOX_BYTES_MAX and self._blame is None:
            self._end("the endpoint does not read from the stream", crashed=True)
        self._wake.set()

    def _fetched(self, frame: Deferred, error: Exception | None) -> None:
        """Its values are here, or cannot be had."""
        if error is not None:
            self._invoker.unreadable(frame.attempt, error)
        behind = self._behind.pop(_whose(frame), [])
        if frame.attempt.over or not behind:
            self._release(frame)
            return
        assert behind[0] is frame, "each attempt fetches one value at a time"
        while behind:
            self._queue(behind.pop(0))
            if (again := self._behind.get(_whose(frame))) is not None:
                again += behind  # After the next frame that must be fetched.
                return

    def _release(self, frame: Frame | PendingAck | Deferred) -> None:
        """The frame was sent, or never will be."""
        if isinstance(frame, Deferred):
            self._fetches.release(frame.large)

    async def _write(self) -> None:
        socket, wake = self._socket, self._wake
        try:
            while True:
                await wake.wait()
                wake.clear()
                while True:
                    waiting = len(self._frames)
                    if frames := self._take():
                        message = await self._encoded(frames)
                        if message is not None:
                            self._mark_begun(frames)
                            for part in self._parts(message, frames):
                                await socket.send_bytes(part)
                        self._sent(frames)
                    elif len(self._frames) == waiting:
                        break  # All of these frames may be for attempts that are over.
                if self._endpoint.has_waiting:
                    self._endpoint.pump()
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            # The endpoint's close frame, which may still be in transit, gives a better reason.
            await asyncio.wait([self._tasks[0]], timeout=GOODBYE_S)
            self._end(f"sending failed: {error or type(error).__name__}", crashed=True)
        except Exception:  # A stream without a writer looks alive, and its attempts would wait forever.
            logger.exception("deployment %s: internal error, closing the stream", self._endpoint.deployment)
            self._end("internal error of this node; see its log")

    def _parts(self, message: bytes, frames: list[Frame | Deferred]) -> Iterable[bytes]:
        """The messages that carry it. Empty if it is larger than the endpoint accepts and cannot be sent in pieces."""
        limit = self._message_bytes_max
        size = min(len(message), limit)
        if size > self._largest[0]:
            self._largest = size, [_whose(frame) for frame in frames]
        if len(message) <= limit:
            return (message,)
        if self.version > 1:
            return encode_pieces(message, limit)
        self._refuse([_whose(frame) for frame in frames], f"a message of {len(message)} bytes")
        return ()

    def _refuse(self, whose: list[tuple[InvocationId, int]], what: str) -> None:
        text = (
            f"{what} exceeds the limit of the endpoint's server, and its SDK is too old to accept pieces: upgrade the "
            "SDK, raise the server's limit (uvicorn --ws-max-size 41943040), or keep large values elsewhere"
        )
        for invocation, epoch in whose:
            attempt = self.attempts.get(invocation)
            if attempt is not None and attempt.epoch == epoch:
                self._invoker.fail(attempt, failed(413, text, "TooLarge"), pause=True)

    def _message_refused(self) -> None:
        """Only the attempts in the largest message are to blame. Pieces may be smaller next time."""
        size, whose = self._largest
        self.crashed = False
        self._refused(size)
        if self.version == 1:
            self._refuse(whose, f"a message of {size} bytes")
            return
        for invocation, epoch in whose:
            attempt = self.attempts.get(invocation)
            if attempt is not None and attempt.epoch == epoch:
                self._invoker.crashed(attempt, f"{self._why}; its largest message had {size} bytes")

    def _mark_begun(self, frames: list[Frame | Deferred]) -> None:
        """Their handlers may run from now on. Suspects report when they do, if the endpoint supports it."""
        for each in frames:
            frame = each.frame if isinstance(each, Deferred) else each
            if type(frame) is Start and not (frame.suspects_max and self.version > 1):
                attempt = self.attempts.get(frame.invocation)
                if attempt is not None and attempt.epoch == frame.epoch:
                    self._endpoint.began(attempt)

    async def _encoded(self, frames: list[Frame | Deferred]) -> bytes | None:
        if any(isinstance(frame, Deferred) for frame in frames):
            return await encode(frames, self._invoker.unreadable, self.version)
        return encode_batch(frames, self.version)  # type: ignore[arg-type]

    def _sent(self, frames: list[Frame | Deferred]) -> None:
        for frame in frames:
            if isinstance(frame, Deferred):
                self._release(frame)
                frame.attempt.session.unsent -= 1
                frame.attempt.last_frame_at = asyncio.get_running_loop().time()

    def _take(self) -> list[Frame | Deferred]:
        """The frames of the next message, in order, as far as credit and size permit."""
        taken: list[Frame | Deferred] = []
        if self._owed >= WINDOW_FRAMES // 2:
            taken.append(Credit(self._owed))
            self._granted += self._owed
            self._owed = 0
        credit = min(self._credit, MESSAGE_FRAMES)
        if self._frames and credit:
            size = count = held = 0
            for frame in self._frames:
                if count == credit:
                    break
                own = _size(frame)
                if count and size + own > MESSAGE_BYTES:
                    break
                count += 1
                size += own
                held += own if type(frame) is not Deferred else _held(frame)
            before = len(taken)
            for frame in self._frames[:count]:
                if not isinstance(frame, PendingAck):
                    if not isinstance(frame, Deferred) or not frame.attempt.over:
                        taken.append(frame)
                    else:
                        self._release(frame)
                    continue
                attempt = frame.attempt
                if attempt.session.pending_ack is frame:
                    attempt.session.pending_ack = None
                if not attempt.over:
                    taken.append(Ack(attempt.id, attempt.epoch, frame.length))
            del self._frames[:count]
            self._credit -= len(taken) - before
            self._bytes -= held
        return taken

    # -- in ------------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        socket, invoker = self._socket, self._invoker
        try:
            while True:
                message = await socket.receive()
                if message.type is aiohttp.WSMsgType.BINARY:
                    self._liveness.runs()
                    await self._receive(message.data)
                    while invoker.congested:  # noqa: ASYNC110 - there is no event, and it is rare
                        await asyncio.sleep(0.005)  # Not reading slows the other side down.
                elif message.type is aiohttp.WSMsgType.PONG:
                    self._liveness.take_pong(message.data)
                elif message.type is aiohttp.WSMsgType.PING:
                    await socket.pong(message.data)
                elif message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED):
                    self._closed_by(message)
                    break
                elif message.type is aiohttp.WSMsgType.ERROR:
                    self._why = f"the stream broke: {message.data}"
                    self.crashed = True
                    break
                else:
                    raise ProtocolError("a message must be binary")
        except ProtocolError as error:
            self._blame = f"the endpoint violates the protocol: {error}"
            self._blamed = error.invocation
            logger.error("deployment %s: closing the stream: %s", self._endpoint.deployment, self._blame)
        except (aiohttp.ClientError, OSError) as error:
            self._why = f"the stream broke: {error or type(error).__name__}"
            self.crashed = True
        except asyncio.CancelledError:
            pass  # `_end` says why.
        except Exception:
            logger.exception("deployment %s: internal error, closing the stream", self._endpoint.deployment)
            self._why = "internal error of this node; see its log"
        self._over = True
        self._tasks[1].cancel()
        self._fetches.close()
        self._endpoint.broken(
            self, self._blame or self._why, blame=self._blame, blamed=self._blamed, crashed=self.crashed
        )
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._socket.close()
        except (aiohttp.ClientError, OSError, TimeoutError, RuntimeError) as error:
            logger.debug("deployment %s: closing a stream: %s", self._endpoint.deployment, error)

    def _closed_by(self, message: aiohttp.WSMessage) -> None:
        """A killed process sends no close frame (1006). One that announces its stop was not ended by an attempt."""
        code = message.data if message.type is aiohttp.WSMsgType.CLOSE else self._socket.close_code
        code = code or aiohttp.WSCloseCode.ABNORMAL_CLOSURE
        said = f": {message.extra}" if message.type is aiohttp.WSMsgType.CLOSE and message.extra else ""
        self._why = f"the endpoint closed the stream (WebSocket close code {code}{_CLOSE_CODES.get(code, '')}{said})"
        self.crashed = code not in _ORDERLY
        if code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
            self._message_refused()

    async def _receive(self, raw: bytes) -> None:
        """Process a message in slices, so that many frames do not block the event loop."""
        for number, frames in enumerate(decode_slices(raw, TO_NODE, self.version)):
            if number:
                await asyncio.sleep(0)
            self._take_in(frames)

    def _take_in(self, frames: list[Frame | Wrong]) -> None:
        plain = frames
        if any(type(frame) in _OF_THE_STREAM for frame in frames):
            plain = []
            for frame in frames:
                if type(frame) is Credit:
                    self._credit = min(self._credit + frame.frames, 1 << 40)
                elif type(frame) is Goaway:
                    logger.info("deployment %s is going away: %s", self._endpoint.deployment, frame.reason)
                    self.drains = True
                    self._count_in(1)
                    self._endpoint.drain(self)
                elif type(frame) is Blocked:
                    self._count_in(1)
                    self._endpoint.was_blocked(frame.milliseconds, frame.handler, frame.place)
                elif type(frame) is Began:
                    self._count_in(1)
                    attempt = self.attempts.get(frame.invocation)
                    if attempt is not None and attempt.epoch == frame.epoch:
                        self._endpoint.began(attempt)
                        attempt.last_frame_at = asyncio.get_running_loop().time()
                else:
                    plain.append(frame)
            self._wake.set()
            if self._endpoint.has_waiting:
                self._endpoint.pump()
        if plain:
            self._count_in(len(plain))
            if self._owed >= WINDOW_FRAMES // 2:
                self._wake.set()
            strays = self._hearing.take(self, plain)
            if strays:
                self._count_strays(strays)
            if strays < len(plain):
                self._endpoint.is_well()

    def _count_in(self, count: int) -> None:
        """An endpoint that sends more than it was granted ignores flow control."""
        self._granted -= count
        self._owed += count
        if self._granted < 0:
            raise ProtocolError("it sent more frames than were granted")

    def _count_strays(self, count: int) -> None:
        """Frames of ended attempts are normal until the endpoint learns of the end. If they do not stop, they are a flood."""
        now = asyncio.get_running_loop().time()
        self._strays = max(0.0, self._strays - (now - self._strays_at) * STRAYS_PER_S) + count
        self._strays_at = now
        if self._strays > STRAYS_MAX:
            raise ProtocolError(f"it sent {STRAYS_MAX} frames in a row for attempts that do not run here")

    def _end(self, why: str, *, crashed: bool = False) -> None:
        if not self._over:
            self._why = why
            self.crashed = crashed
            self._tasks[0].cancel()

    async def close(self) -> None:
        self._end("this node is stopping")
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _whose(frame: Frame | PendingAck | Deferred) -> tuple[InvocationId, int]:
    """The attempt that a frame is for. Frames of the stream itself are for none."""
    if isinstance(frame, PendingAck | Deferred):
        return frame.attempt.id, frame.attempt.epoch
    return getattr(frame, "invocation", NO_INVOCATION), getattr(frame, "epoch", 0)


def _held(frame: Frame | PendingAck | Deferred) -> int:
    """Approximate number of bytes a frame takes while it waits."""
    return _size(frame.frame if isinstance(frame, Deferred) else frame)


def _size(frame: Frame | PendingAck | Deferred) -> int:
    """Approximate number of bytes a frame takes in a message. Only fields that can be large count."""
    if type(frame) is PendingAck:
        return 64
    if type(frame) is Start:
        state = sum(map(len, frame.state.values())) if frame.state else 0
        return 256 + sum(map(len, frame.journal)) + state
    if isinstance(frame, Deferred):
        return frame.size
    if type(frame) is Journal:
        return 64 + sum(map(len, frame.journal))
    if type(frame) is Completion:
        return 64 + len(frame.outcome[1] if frame.outcome[0] == 0 else frame.outcome[2])
    return 64
