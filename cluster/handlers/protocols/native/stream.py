"""The stream: one WebSocket per node and deployment, many attempts on it, all frames of one turn of the loop in one message.

Each side tells the other how many frames it can take. When the stream breaks, all its attempts are dispatched again at once. An
endpoint that says it is going away keeps what it has, and the next stream takes what is new.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import aiohttp

from holdfast.cluster.handlers.attempts import Attempt, Opening
from holdfast.cluster.handlers.dispatch import Station
from holdfast.cluster.handlers.protocols.native.deferred import Deferred, PendingAck, encode
from holdfast.cluster.handlers.protocols.native.hearing import Hearing
from holdfast.cluster.handlers.protocols.native.opening import frames_of
from holdfast.cluster.tasks import Tasks
from holdfast.cluster.values.shared_store import StoreDown, ValueLost
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
from holdfast.sdk.journal import ProtocolError
from holdfast.statemachine import refs

logger = logging.getLogger(__name__)

#: What we can take of an endpoint's frames before they are in a log.
WINDOW_FRAMES: Final = 16_384
#: Frames for attempts that do not run here: so many at once, as many as may be under way when attempts end, and so many a
#: second. An endpoint that sends more has its stream ended.
STRAYS_MAX: Final = WINDOW_FRAMES
STRAYS_PER_S: Final = 1000
#: One message of the stream is about this large, unless a single frame is larger.
MESSAGE_BYTES: Final = 1024 * 1024
MESSAGE_FRAMES: Final = 4096
#: No new attempt is put on a stream while this much waits to be sent,
START_BYTES: Final = 4 * 1024 * 1024
#: no large value is fetched for it while so many bytes of fetched ones do,
FETCHED_BYTES_MAX: Final = 32 * 1024 * 1024
#: and an endpoint that lets this much pile up does not read at all.
OUTBOX_BYTES_MAX: Final = 128 * 1024 * 1024
GOODBYE_S: Final = 1.0  # How long an endpoint gets to close a stream in good order.
#: What servers say when they are stopped, and what proxies say: normal, going away, service restart, try again later.
_ORDERLY: Final = frozenset({1000, 1001, 1012, 1013})
_CLOSE_CODES: Final = {
    1000: ", normal",
    1001: ", going away",
    1002: ", protocol error",
    1006: ", the connection broke without a word",
    1008: ", policy violation",
    1009: ", message too big",
    1011: ", internal error",
    1012: ", service restart",
    1013: ", try again later",
}
#: Frames that no attempt sends, or that none waits for.
_OF_THE_STREAM: Final = frozenset({Credit, Goaway, Began, Blocked})


class Stream:
    """One WebSocket, and the attempts on it."""

    def __init__(
        self,
        endpoint: Station,
        socket: aiohttp.ClientWebSocketResponse,
        version: int,
        message_bytes_max: int,
        *,
        refused: Callable[[int], None],
    ) -> None:
        self.attempts: dict[bytes, Attempt] = {}
        self._message_bytes_max = message_bytes_max
        #: Of the largest message that was sent: its size, and whom it was for.
        self._largest: tuple[int, list[tuple[bytes, int]]] = (0, [])
        self.version = version  # Of the protocol: the endpoint said it when the stream was opened.
        self.drains = False
        self.crashed = False  # It ended without a word, as a stream does whose process was killed.
        self._endpoint = endpoint
        self._invoker = endpoint.invoker
        self._hearing = Hearing(endpoint.invoker)
        self._refused = refused  # Told the size of a message that the endpoint's server did not take.
        self._socket = socket
        self._frames: list[Frame | PendingAck | Deferred] = []
        self._bytes = 0
        #: What is behind a value that is still to be fetched, by attempt: in order, that frame first. The others go on.
        self._behind: dict[tuple[bytes, int], list[Frame | PendingAck | Deferred]] = {}
        self._to_fetch: deque[Deferred] = deque()
        self._fetched_bytes = 0
        self._fetching = Tasks()
        self._credit = 0
        self._owed = WINDOW_FRAMES  # Frames that we can take and have not told yet.
        self._granted = 0  # Frames that it may send.
        self._strays = 0.0  # Frames for attempts that do not run here, of late.
        self._strays_at = 0.0
        self._over = False  # The rest is saying goodbye, which nobody needs to cancel.
        self._blame: str | None = None
        self._blamed: bytes | None = None  # The invocation in whose name nonsense was said, if it can be told.
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
    def attempts_max(self) -> int:
        return self._invoker.limits.streamed

    @property
    def can_start(self) -> bool:
        return not self.drains and self._credit > len(self._frames) and self._bytes < START_BYTES

    def begin(self, attempt: Attempt, opening: Opening) -> None:
        self.attempts[attempt.id] = attempt
        for frame in frames_of(attempt, opening):
            self._push(frame)

    def acknowledge(self, attempt: Attempt) -> None:
        """Told with the next message; until then later acknowledgements join it."""
        if attempt.ack_waits is None:
            attempt.ack_waits = ack = PendingAck(attempt, attempt.length)
            self._push(ack)
        else:
            attempt.ack_waits.length = attempt.length

    def complete(self, attempt: Attempt, step: int, order: int, outcome: list[Any]) -> None:
        attempt.ack_waits = None  # It stays where it is; what is acknowledged from now on comes behind this.
        frame = Completion(attempt.id, attempt.epoch, step, order, outcome)
        ref = refs.in_outcome(outcome)
        self._push(frame if ref is None else Deferred(attempt, frame, 64 + refs.size_of(ref)))

    def retry(self, attempt: Attempt, step: int) -> None:
        self._push(RetryRun(attempt.id, attempt.epoch, step))

    def cancelled(self, attempt: Attempt) -> None:
        self._push(Cancelled(attempt.id, attempt.epoch))

    def suspend(self, attempt: Attempt) -> None:
        self._push(Suspend(attempt.id, attempt.epoch))

    def abort(self, attempt: Attempt, reason: str) -> None:
        self._push(Abort(attempt.id, attempt.epoch, reason))

    def let_go(self, attempt: Attempt) -> None:
        if self.attempts.get(attempt.id) is attempt:
            del self.attempts[attempt.id]
            for frame in self._behind.pop((attempt.id, attempt.epoch), ()):
                self._let_fetched_go(frame)
            self._endpoint.let_go(attempt)

    def _push(self, frame: Frame | PendingAck | Deferred) -> None:
        if isinstance(frame, Deferred):
            frame.attempt.unsent += 1
        if self._behind and type(frame) is not Abort:
            behind = self._behind.get(_whose(frame))
            if behind is not None:
                behind.append(frame)
                return
        self._queue(frame)

    def _queue(self, frame: Frame | PendingAck | Deferred) -> None:
        """In its turn; or, if it has to be fetched first, aside, and all of its attempt that comes later behind it."""
        if isinstance(frame, Deferred) and frame.values.to_fetch():
            self._behind[_whose(frame)] = [frame]
            self._to_fetch.append(frame)
            self._fetch_more()
            return
        self._frames.append(frame)
        self._bytes += _held(frame)
        if self._bytes > OUTBOX_BYTES_MAX and self._blame is None:
            self._end("the endpoint does not read what it is sent", crashed=True)
        self._wake.set()

    # Values in the shared store

    def _fetch_more(self) -> None:
        while self._to_fetch and not self._over:
            frame = self._to_fetch[0]
            if self._fetched_bytes and self._fetched_bytes + frame.size > FETCHED_BYTES_MAX:
                return
            self._to_fetch.popleft()
            if frame.attempt.over:
                continue
            frame.held = frame.size
            self._fetched_bytes += frame.held
            task = asyncio.get_running_loop().create_task(self._fetch(frame))
            self._fetching.keep(task)

    async def _fetch(self, frame: Deferred) -> None:
        try:
            await frame.fetch(self._invoker.objects)
        except (StoreDown, ValueLost) as error:
            self._invoker.unreadable(frame.attempt, error)
        except Exception:
            logger.exception("deployment %s: a large value could not be fetched", self._endpoint.deployment)
            self._invoker.lost(frame.attempt, "an error of this node")
        behind = self._behind.pop(_whose(frame), [])
        if frame.attempt.over or not behind:
            self._let_fetched_go(frame)
            return
        assert behind[0] is frame, "one at a time of each attempt"
        while behind:
            self._queue(behind.pop(0))
            if (again := self._behind.get(_whose(frame))) is not None:
                again += behind  # Behind the next one that has to be fetched.
                return

    def _let_fetched_go(self, frame: Frame | PendingAck | Deferred) -> None:
        """It is sent, or will not be."""
        if isinstance(frame, Deferred) and frame.held:
            frame.values.fetched.clear()
            self._fetched_bytes -= frame.held
            frame.held = 0
            self._fetch_more()

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
                        break  # What was taken may all have been for attempts that are over.
                if self._endpoint.has_waiting:
                    self._endpoint.pump()
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            # What the endpoint said before it closed the connection tells more. It may still be on its way to us.
            await asyncio.wait([self._tasks[0]], timeout=GOODBYE_S)
            self._end(f"sending failed: {error or type(error).__name__}", crashed=True)
        except Exception:  # A stream that nobody writes to looks alive, and its attempts would wait for ever.
            logger.exception("deployment %s: the stream is ended by an error of this node", self._endpoint.deployment)
            self._end("an error of this node; see its log")

    def _parts(self, message: bytes, frames: list[Frame | Deferred]) -> Iterable[bytes]:
        """The messages that carry it. None, if it is larger than the endpoint takes and cannot be sent in pieces."""
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

    def _refuse(self, whose: list[tuple[bytes, int]], what: str) -> None:
        text = (
            f"{what} is larger than the server of the endpoint takes, and its SDK is too old to take it in pieces: upgrade the "
            "SDK, raise the server's limit (uvicorn --ws-max-size 41943040), or keep large values elsewhere"
        )
        for invocation, epoch in whose:
            attempt = self.attempts.get(invocation)
            if attempt is not None and attempt.epoch == epoch:
                self._invoker.fail(attempt, [1, 413, text, "TooLarge"], pause=True)

    def _message_refused(self) -> None:
        """Whoever needed the largest message is to blame, and nobody else. Pieces may be smaller next time."""
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
        """From here on their handlers may run. Suspects tell when they do, if the endpoint knows how."""
        for each in frames:
            frame = each.frame if isinstance(each, Deferred) else each
            if type(frame) is Start and not (frame.suspects_max and self.version > 1):
                attempt = self.attempts.get(frame.invocation)
                if attempt is not None and attempt.epoch == frame.epoch:
                    self._endpoint.began(attempt)

    async def _encoded(self, frames: list[Frame | Deferred]) -> bytes | None:
        if any(isinstance(frame, Deferred) for frame in frames):
            return await encode(frames, self._gone, self.version)
        return encode_batch(frames, self.version)  # type: ignore[arg-type]

    def _sent(self, frames: list[Frame | Deferred]) -> None:
        for frame in frames:
            if isinstance(frame, Deferred):
                self._let_fetched_go(frame)
                frame.attempt.unsent -= 1
                frame.attempt.last_frame_at = asyncio.get_running_loop().time()

    def _gone(self, attempt: Attempt, error: Exception) -> None:
        """What refers to a value should have kept it: wait, and let somebody look."""
        logger.error("deployment %s: %s", self._endpoint.deployment, error)
        self._invoker.fail(attempt, [1, 500, str(error), "ValueGone"])

    def _take(self) -> list[Frame | Deferred]:
        """The frames of the next message: in order, what credit and size allow."""
        taken: list[Frame | Deferred] = []
        if self._owed >= WINDOW_FRAMES // 2:
            taken.append(Credit(self._owed))
            self._granted += self._owed
            self._owed = 0
        credit = min(self._credit, MESSAGE_FRAMES)
        if self._frames and credit:
            size = count = held = 0
            for frame in self._frames:
                if count == credit or (count and size + _size(frame) > MESSAGE_BYTES):
                    break
                count += 1
                size += _size(frame)
                held += _held(frame)
            before = len(taken)
            for frame in self._frames[:count]:
                if not isinstance(frame, PendingAck):
                    if not isinstance(frame, Deferred) or not frame.attempt.over:
                        taken.append(frame)
                    else:
                        self._let_fetched_go(frame)
                    continue
                attempt = frame.attempt
                if attempt.ack_waits is frame:
                    attempt.ack_waits = None
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
                    await self._receive(message.data)
                    while invoker.congested:  # noqa: ASYNC110 - nobody tells us, and it is rare
                        await asyncio.sleep(0.005)  # Not reading on is what slows the other side down.
                elif message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED):
                    self._closed_by(message)
                    break
                elif message.type is aiohttp.WSMsgType.ERROR:
                    self._why = f"the stream broke: {message.data}"
                    self.crashed = True
                    break
                else:
                    raise ProtocolError("a message that is not binary")
        except ProtocolError as error:
            self._blame = f"the endpoint does not speak the protocol: {error}"
            self._blamed = error.invocation
            logger.error("deployment %s: the stream is ended: %s", self._endpoint.deployment, self._blame)
        except (aiohttp.ClientError, OSError) as error:
            self._why = f"the stream broke: {error or type(error).__name__}"
            self.crashed = True
        except asyncio.CancelledError:
            pass  # `_end` says why.
        except Exception:
            logger.exception("deployment %s: the stream is ended by an error of this node", self._endpoint.deployment)
            self._why = "an error of this node; see its log"
        self._over = True
        for task in (self._tasks[1], *self._fetching):
            task.cancel()
        self._endpoint.broken(
            self, self._blame or self._why, blame=self._blame, blamed=self._blamed, crashed=self.crashed
        )
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._socket.close()
        except (aiohttp.ClientError, OSError, TimeoutError, RuntimeError) as error:
            logger.debug("deployment %s: closing a stream: %s", self._endpoint.deployment, error)

    def _closed_by(self, message: aiohttp.WSMessage) -> None:
        """A process that is killed says nothing (1006). One that says that it stops was not ended by an attempt."""
        code = message.data if message.type is aiohttp.WSMsgType.CLOSE else self._socket.close_code
        code = code or aiohttp.WSCloseCode.ABNORMAL_CLOSURE
        said = f": {message.extra}" if message.type is aiohttp.WSMsgType.CLOSE and message.extra else ""
        self._why = f"the endpoint closed the stream (WebSocket close code {code}{_CLOSE_CODES.get(code, '')}{said})"
        self.crashed = code not in _ORDERLY
        if code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
            self._message_refused()

    async def _receive(self, raw: bytes) -> None:
        """Slice by slice: a message of many frames must not keep the loop from everything else."""
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
        """Whoever sends more than it was granted takes no notice of how much we can take."""
        self._granted -= count
        self._owed += count
        if self._granted < 0:
            raise ProtocolError("it sent more frames than it was granted")

    def _count_strays(self, count: int) -> None:
        """Frames of attempts that are over are normal while the endpoint has not heard of it, and nothing but a flood when
        they do not end."""
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
        self._end("this node stops")
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _whose(frame: Frame | PendingAck | Deferred) -> tuple[bytes, int]:
    """The attempt that a frame is for. Those of a stream itself are for none."""
    if isinstance(frame, PendingAck | Deferred):
        return frame.attempt.id, frame.attempt.epoch
    return getattr(frame, "invocation", b""), getattr(frame, "epoch", 0)


def _held(frame: Frame | PendingAck | Deferred) -> int:
    """About how many bytes it takes while it waits."""
    return _size(frame.frame if isinstance(frame, Deferred) else frame)


def _size(frame: Frame | PendingAck | Deferred) -> int:
    """About how many bytes it takes in a message. Only what can be large is looked at."""
    if isinstance(frame, Deferred):
        return frame.size
    if type(frame) is Start:
        state = sum(map(len, frame.state.values())) if frame.state else 0
        return 256 + sum(map(len, frame.journal)) + state
    if type(frame) is Journal:
        return 64 + sum(map(len, frame.journal))
    if type(frame) is Completion:
        return 64 + len(frame.outcome[1] if frame.outcome[0] == 0 else frame.outcome[2])
    return 64
