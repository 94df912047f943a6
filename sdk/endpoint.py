"""The attempts of one process: its services, and the frames of every node connected to it.

`Endpoint` does not depend on a transport: it takes messages as bytes and returns messages. `asgi` and `server` connect
it to the network. All streams of a process share one table of attempts, so a newer attempt of an invocation ends an
older one, whichever stream it arrives on.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from holdfast import __version__, require_asserts
from holdfast.sdk.attempt import Attempt
from holdfast.sdk.context import Context
from holdfast.sdk.definition import (
    AnyHandler,
    AnyService,
    check_services,
    manifest_of,
)
from holdfast.sdk.errors import BadPayload, TerminalError
from holdfast.sdk.frames import (
    BATCH_BYTES_MAX,
    FRAMES_MAX,
    SUSPICION_S,
    TO_SDK,
    VERSION,
    Abort,
    Ack,
    Began,
    Blocked,
    Cancelled,
    Completion,
    Credit,
    Error,
    Frame,
    Goaway,
    Journal,
    Output,
    Piece,
    RetryRun,
    Start,
    Suspend,
    Waiting,
    choose_version,
    decode_batch,
    encode_batch,
    read_version,
)
from holdfast.sdk.identity import Identity
from holdfast.sdk.journal import PAYLOAD_BYTES_MAX, ProtocolError, unpack_outcome
from holdfast.sdk.keyed import ObjectContext, WorkflowContext
from holdfast.sdk.watchdog import Watchdog

logger = logging.getLogger("holdfast.sdk")

GRANT: Final = 32_768  # Frames that a node may have in transit to us; renewed when half of it is used up.
THREADS: Final = 64
ALONE: Final = 1  # A value of `suspects_max`: the attempt runs while no other recently started attempt does.
MEDIA_TYPE: Final = "application/x-msgpack"
_CONTEXTS: Final[dict[str, type[Context]]] = {
    "service": Context, "object": ObjectContext, "workflow": WorkflowContext,
}  # fmt: skip


#: A browser adds these to what a page sends, and pages cannot prevent it. Nodes never send them.
ORIGIN_HEADER: Final = "origin"
SITE_HEADER: Final = "sec-fetch-site"
PAGE_REFUSED: Final = "handlers take no requests from web pages: call them through the ingress of a node"


def is_from_page(origin: str | None, site: str | None) -> bool:
    """Whether a web page sent this request. A page that a developer visits must not run the handlers on their machine."""
    return origin is not None or site not in (None, "none")


class Endpoint:
    """The services of this process and their running attempts."""

    def __init__(
        self,
        services: Iterable[AnyService],
        *,
        suspend_after: float = 1.0,
        threads: int = THREADS,
        identity: Identity | None = None,
    ) -> None:
        require_asserts("A Holdfast endpoint")
        self.services = check_services(services)
        self.manifest = manifest_of(self.services.values(), __version__)
        self.suspend_after = suspend_after
        self.identity = identity  # The cluster whose requests it accepts; None: it accepts unsigned ones.
        self.executor = ThreadPoolExecutor(threads, thread_name_prefix="holdfast-step")
        self.attempts: dict[bytes, Attempt] = {}
        #: Attempts that may have ended processes, and how many of them may run at a time; 1: no other attempt may begin
        #: at all.
        self.suspects: dict[Attempt, int] = {}
        #: Attempts that wait for their turn. The attempts of all nodes meet here, so only this process can keep them
        #: apart.
        self.held: deque[Attempt] = deque()
        #: Other attempts wait this long for a suspect. A step may take hours, or hang.
        self.suspicion_s = SUSPICION_S
        self._begins_held = False
        self.streams: set[Stream] = set()
        self.watchdog = Watchdog(self._whose, self._was_blocked)
        self.stopping = False
        self._sweep: asyncio.TimerHandle | None = None
        self._idle: asyncio.Event | None = None

    # -- attempts

    def start(
        self,
        start: Start,
        send: Callable[[Frame], None],
        ended: Callable[[Attempt], None],
        *,
        eager: bool,
        version: int = VERSION,
    ) -> Attempt | None:
        """Start a new attempt, unless a newer one of its invocation is known. It begins when its journal is complete."""
        older = self.attempts.get(start.invocation)
        if older is not None:
            if older.epoch >= start.epoch:
                return None
            older.end()
        loop = asyncio.get_running_loop()
        attempt = Attempt(
            start, send=send, loop=loop, ended=lambda done: self._ended(done, ended), eager=eager, version=version
        )
        self.attempts[start.invocation] = attempt
        self._arm(loop)
        if not start.more:
            self.begin(attempt)
        return attempt

    def begin(self, attempt: Attempt) -> None:
        start = attempt.start
        service = self.services.get(start.service)
        handler = service.handlers.get(start.handler) if service is not None else None
        if handler is None:
            error = TerminalError(
                f"this endpoint has no handler {start.service}/{start.handler}", code=404, kind="UnknownHandler"
            )
            attempt.fail(error, pause=False)
            return
        if (start.suspects_max or self.suspects or self.held) and not self._may_begin(attempt):
            return
        attempt.began_at = attempt.loop.time()
        attempt.stays = not handler.suspend
        try:
            attempt.begin(self._code(handler), name=f"{start.service}/{start.handler}")
        except ProtocolError:
            attempt.end()
            raise

    def _whose(self, task: asyncio.Task[object] | None) -> str | None:
        """The handler that a task runs for. The watchdog calls this from its thread."""
        for attempt in list(self.attempts.values()):
            if task in attempt.tasks:
                return f"{attempt.start.service}/{attempt.start.handler}"
        return None

    def _was_blocked(self, seconds: float, handler: str, place: str) -> None:
        for stream in self.streams:
            if stream.version > 1:
                stream.send(Blocked(round(seconds * 1000), handler, place))

    def _may_begin(self, attempt: Attempt) -> bool:
        """Whether the attempt may run beside the running ones. If not, it is held until some of them end."""
        limit = attempt.start.suspects_max
        suspects = self.suspects
        if limit == ALONE:
            may = not suspects and not any(each.start.suspects_max == ALONE for each in self.held)
            if may and self._has_recent_attempt(attempt.loop.time()):
                attempt.loop.call_later(self.suspicion_s, self._begin_held)
                may = False
        else:
            waits = any(each.start.suspects_max == ALONE for each in self.held)  # Later attempts must not overtake it.
            least = min(suspects.values(), default=limit)
            may = not waits and least != ALONE and (not limit or len(suspects) < min(limit, least))
        if not may:
            self.held.append(attempt)
            return False
        if limit:
            suspects[attempt] = limit
            attempt.loop.call_later(self.suspicion_s, self._trust, attempt)
            if not attempt.eager:
                attempt.send(Began(attempt.id, attempt.epoch))
        return True

    def _has_recent_attempt(self, now: float) -> bool:
        """Whether an attempt that began recently is running, and so may be about to end the process."""
        return any(each.began_at and now - each.began_at < self.suspicion_s for each in self.attempts.values())

    def _trust(self, attempt: Attempt) -> None:
        """The suspect ran for a while without ending the process, so other suspects no longer wait for it."""
        if self.suspects.pop(attempt, None) is not None:
            self._begin_held()

    def _begin_held(self) -> None:
        self._begins_held = False
        waiting, self.held = self.held, deque()
        for attempt in waiting:
            if not attempt.ended:
                self.begin(attempt)

    def hand_back_held(self, attempt: Attempt) -> bool:
        """Hand back an attempt that has not begun, because another node can run it just as well. Returns whether it was
        held."""
        if attempt not in self.held:
            return False
        self.held.remove(attempt)
        attempt.send(Waiting(attempt.id, attempt.epoch, []))
        attempt.end()
        return True

    def _code(self, handler: AnyHandler[Any, Any]) -> Callable[[Attempt], Coroutine[Any, Any, bytes]]:
        async def code(attempt: Attempt) -> bytes:
            context = _CONTEXTS[handler.service.kind](attempt, handler, self.executor)
            attempt.context = weakref.ref(context)
            if handler.takes_input and not (handler.has_default and not attempt.input):
                try:
                    value = handler.input.load(attempt.input)
                except BadPayload as error:
                    raise TerminalError(
                        f"the input does not fit {handler.path}: {error}", code=400, kind="BadInput"
                    ) from None
                result = await handler.function(context, value)
            else:
                result = await handler.function(context)
            try:
                payload = handler.output.dump(result)
            except BadPayload as error:
                raise BadPayload(f"the result of {handler.path}: {error}") from None
            if len(payload) > PAYLOAD_BYTES_MAX:
                raise BadPayload(
                    f"the result of {handler.path} must have at most {PAYLOAD_BYTES_MAX} bytes, not {len(payload)}"
                )
            return payload

        return code

    def _ended(self, attempt: Attempt, ended: Callable[[Attempt], None]) -> None:
        if self.attempts.get(attempt.id) is attempt:
            del self.attempts[attempt.id]
        ended(attempt)
        self.suspects.pop(attempt, None)
        if self.held and not self._begins_held:
            self._begins_held = True
            asyncio.get_running_loop().call_soon(self._begin_held)
        if self._idle is not None and not self.attempts:
            self._idle.set()

    # -- suspension

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._sweep is None:
            self._sweep = loop.call_later(self.suspend_after / 2, self._look_around, loop)

    def _look_around(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand back attempts that did nothing since the last sweep and only wait for steps."""
        self._sweep = None
        for attempt in list(self.attempts.values()):
            if attempt.touched:
                attempt.touched = False
            elif attempt not in self.held:
                attempt.look()
        if self.attempts:
            self._arm(loop)

    # -- shutting down

    async def stop(self, grace: float = 10.0) -> None:
        """Accept no new attempts, let the running ones finish or wait, and drop the rest after `grace` seconds."""
        self.stopping = True
        for stream in list(self.streams):
            stream.send(Goaway("the endpoint is shutting down"))
        for attempt in list(self.attempts.values()):
            if not self.hand_back_held(attempt):
                attempt.hurry()
        if self.attempts:
            self._idle = asyncio.Event()
            try:
                async with asyncio.timeout(grace):
                    await self._idle.wait()
            except TimeoutError:
                logger.warning(
                    "%d attempts did not finish in time; their nodes will start them again", len(self.attempts)
                )
        for attempt in list(self.attempts.values()):
            attempt.end()
        for stream in list(self.streams):
            await stream.drain()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        self.executor.shutdown(wait=False, cancel_futures=True)

    # -- request/response

    async def invoke(self, service: str, handler: str, body: bytes, version: int = VERSION) -> bytes:
        """Run one attempt without a stream: `body` has its START, and the answer has all its frames, in the same
        version."""
        frames = decode_batch(body, TO_SDK, version)
        if len(frames) != 1 or not isinstance(frames[0], Start) or frames[0].more:
            raise ProtocolError("the body must be a batch of one START with the whole journal")
        start = frames[0]
        if (start.service, start.handler) != (service, handler):
            raise ProtocolError(f"the path says {service}/{handler}, the START {start.service}/{start.handler}")
        out: list[Frame] = []
        done = asyncio.get_running_loop().create_future()

        def ended(attempt: Attempt) -> None:
            if not done.done():
                done.set_result(None)

        attempt = self.start(start, out.append, ended, eager=True, version=version)
        if attempt is None:
            raise Superseded
        try:
            await done
        finally:
            attempt.end()
        if not out or not isinstance(out[-1], Waiting | Output | Error):
            raise Superseded
        return encode_batch(out, version)


class Superseded(Exception):
    """A newer attempt of this invocation is known here."""


class Stream:
    """One stream of a node: its attempts, its credit, and the frames of the next message."""

    def __init__(
        self,
        endpoint: Endpoint,
        write: Callable[[bytes], Coroutine[Any, Any, None]],
        *,
        version: int = VERSION,
    ) -> None:
        self.endpoint = endpoint
        self.write = write
        self.version = version  # The protocol version agreed when the stream was opened.
        self.attempts: dict[bytes, Attempt] = {}
        self.outbox: list[Frame] = []
        self.credit = 0  # Frames that we may send.
        self.taken = 0  # Frames received since our last grant.
        self.closed = False
        self.loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] | None = None
        self._drained: asyncio.Event = asyncio.Event()
        self._grants = GRANT
        self._pieces: list[bytes] = []  # Of a batch that is larger than one message.
        self._piece_bytes = 0

    def send(self, frame: Frame) -> None:
        """Frames of one turn of the loop leave in one message."""
        self.outbox.append(frame)
        wake = self._wake
        if wake is not None and not wake.done():
            wake.set_result(None)

    async def run(self) -> None:
        """Write messages until the stream is closed. There is one such task per stream."""
        self.endpoint.streams.add(self)
        try:
            while not self.closed:
                if self._grants:
                    grant, self._grants = self._grants, 0
                    await self.write(encode_batch([Credit(grant)], self.version))
                frames = self._take()
                if frames:
                    for message in encode_messages(frames, self.version):
                        await self.write(message)
                    continue
                if not self.outbox:
                    self._drained.set()
                if self._grants:
                    continue
                self._wake = self.loop.create_future()
                await self._wake
                self._drained.clear()
        finally:
            self.close()

    def _take(self) -> list[Frame]:
        count = min(len(self.outbox), self.credit)
        if count == len(self.outbox):
            frames, self.outbox = self.outbox, []
        else:
            frames, self.outbox = self.outbox[:count], self.outbox[count:]
        self.credit -= count
        return frames

    async def drain(self) -> None:
        """Wait until everything that may be sent has been sent, for at most a second."""
        try:
            async with asyncio.timeout(1.0):
                await self._drained.wait()
        except TimeoutError:
            pass

    def close(self) -> None:
        """The connection has ended: end its attempts."""
        if self.closed:
            return
        self.closed = True
        self.endpoint.streams.discard(self)
        self._drained.set()
        for attempt in list(self.attempts.values()):
            attempt.end()
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # -- receiving

    def receive(self, message: bytes) -> None:
        """Take a message of the node. Raises `ProtocolError`; then the stream must end."""
        if self.closed:
            return  # The node would not receive the frames of an attempt that begins now.
        frames = decode_batch(message, TO_SDK, self.version)
        if self._pieces or (frames and type(frames[0]) is Piece):
            whole = self._put_together(frames)
            if whole is None:
                return
            frames = decode_batch(whole, TO_SDK - {Piece}, self.version)
        attempts = self.attempts
        for frame in frames:
            if type(frame) is Credit:
                self.credit += frame.frames
                if self.outbox and self._wake is not None and not self._wake.done():
                    self._wake.set_result(None)
                continue
            self.taken += 1
            if type(frame) is Start:
                self._start(frame)
                continue
            attempt = attempts.get(frame.invocation)  # type: ignore[union-attr]
            if attempt is None or attempt.epoch != frame.epoch:  # type: ignore[union-attr]
                continue  # The attempt ended here, and the node will learn of it.
            self._dispatch(attempt, frame)
        if self.taken >= GRANT // 2:
            self._grants += self.taken
            self.taken = 0
            if self._wake is not None and not self._wake.done():
                self._wake.set_result(None)

    def _put_together(self, frames: list[Frame]) -> bytes | None:
        """Join the pieces of a batch. Returns the batch when its last piece has arrived."""
        piece = frames[0] if len(frames) == 1 else None
        if type(piece) is not Piece:
            raise ProtocolError("another message came between the pieces of a batch")
        self._pieces.append(piece.data)
        self._piece_bytes += len(piece.data)
        if self._piece_bytes > BATCH_BYTES_MAX or not piece.data:
            raise ProtocolError(f"the pieces of a batch must have 1 to {BATCH_BYTES_MAX} bytes")
        if piece.more:
            return None
        whole = b"".join(self._pieces)
        self._pieces.clear()
        self._piece_bytes = 0
        return whole

    def _dispatch(self, attempt: Attempt, frame: Frame) -> None:
        match frame:
            case Ack():
                attempt.on_ack(frame.length)
            case Completion():
                attempt.on_completion(frame.index, frame.order, unpack_outcome(frame.outcome))
            case RetryRun():
                attempt.on_retry(frame.index)
            case Cancelled():
                attempt.on_cancelled()
            case Suspend():
                if not self.endpoint.hand_back_held(attempt):
                    attempt.on_suspend()
            case Abort():
                attempt.end()
            case Journal():
                attempt.add_journal(frame.journal)
                if not frame.more:
                    self.endpoint.begin(attempt)
            case _:
                raise ProtocolError(f"a node must not send {type(frame).__name__}")

    def _start(self, start: Start) -> None:
        attempt = self.endpoint.start(start, self.send, self._ended, eager=False, version=self.version)
        if attempt is not None and not attempt.ended:
            self.attempts[start.invocation] = attempt

    def _ended(self, attempt: Attempt) -> None:
        if self.attempts.get(attempt.id) is attempt:
            del self.attempts[attempt.id]


def stream_version(written: str | None, highest: str | None) -> int:
    """The version of a stream, from the headers of the opening request: the highest that both sides support.

    Nodes older than version 2 name only the version that they use; no header means version 1. Raises ProtocolError.
    """
    low = read_version(written, 1)
    return choose_version(low, max(read_version(highest, low), low))


def body_version(written: str | None) -> int:
    """The version of a request's body and of its answer. Raises ProtocolError."""
    version = read_version(written, 1)
    return choose_version(version, version)


def encode_messages(frames: list[Frame], version: int = VERSION) -> list[bytes]:
    """One message, or several if it would be too large."""
    message = encode_batch(frames, version) if len(frames) <= FRAMES_MAX else b""
    if (message and len(message) <= BATCH_BYTES_MAX) or len(frames) == 1:
        return [message]
    half = len(frames) // 2
    return encode_messages(frames[:half], version) + encode_messages(frames[half:], version)
