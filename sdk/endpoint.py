"""Where attempts live: the services of one process, and the frames of every node that talks to them.

`Endpoint` is transport-free: it takes messages as bytes and hands messages out. `asgi` and `server` connect it to the
world. All streams of a process share one table of attempts, so a newer attempt of an invocation ends an older one, over
whichever stream it came.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from holdfast.sdk import protocol
from holdfast.sdk.attempt import Attempt
from holdfast.sdk.context import Context, ObjectContext, WorkflowContext
from holdfast.sdk.errors import BadPayload, TerminalError
from holdfast.sdk.protocol import Frame, ProtocolError
from holdfast.sdk.service import AnyHandler, AnyService, check_services, manifest_of

logger = logging.getLogger("holdfast.sdk")

SDK_VERSION: Final = "0.1.0"
GRANT: Final = 32_768  # Frames a node may have on the way to us; renewed when half of it is used up.
THREADS: Final = 64
VERSION_HEADER: Final = "x-holdfast-protocol"
MEDIA_TYPE: Final = "application/x-msgpack"
_CONTEXTS: Final[dict[str, type[Context]]] = {
    "service": Context, "object": ObjectContext, "workflow": WorkflowContext,
}  # fmt: skip


class Endpoint:
    """The services of this process and their running attempts."""

    def __init__(self, services: Iterable[AnyService], *, suspend_after: float = 1.0, threads: int = THREADS) -> None:
        self.services = check_services(services)
        self.manifest = manifest_of(self.services.values(), SDK_VERSION)
        self.suspend_after = suspend_after
        self.executor = ThreadPoolExecutor(threads, thread_name_prefix="holdfast-step")
        self.attempts: dict[bytes, Attempt] = {}
        self.streams: set[Stream] = set()
        self.stopping = False
        self._sweep: asyncio.TimerHandle | None = None
        self._idle: asyncio.Event | None = None

    # -- attempts

    def start(
        self, start: protocol.Start, send: Callable[[Frame], None], ended: Callable[[Attempt], None], *, eager: bool
    ) -> Attempt | None:
        """A new attempt, unless a newer one of its invocation is known. It begins when its journal is complete."""
        older = self.attempts.get(start.invocation)
        if older is not None:
            if older.epoch >= start.epoch:
                return None
            older.end()
        loop = asyncio.get_running_loop()
        attempt = Attempt(start, send=send, loop=loop, ended=lambda done: self._ended(done, ended), eager=eager)
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
        try:
            attempt.begin(self._code(handler), name=f"{start.service}/{start.handler}")
        except ProtocolError:
            attempt.end()
            raise

    def _code(self, handler: AnyHandler[Any, Any]) -> Callable[[Attempt], Coroutine[Any, Any, bytes]]:
        async def code(attempt: Attempt) -> bytes:
            context = _CONTEXTS[handler.service.kind](attempt, handler, self.executor)
            if handler.takes_input:
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
            if len(payload) > protocol.PAYLOAD_BYTES_MAX:
                raise BadPayload(f"the result of {handler.path} has {len(payload)} bytes, which is too much")
            return payload

        return code

    def _ended(self, attempt: Attempt, ended: Callable[[Attempt], None]) -> None:
        if self.attempts.get(attempt.id) is attempt:
            del self.attempts[attempt.id]
        ended(attempt)
        if self._idle is not None and not self.attempts:
            self._idle.set()

    # -- suspension

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._sweep is None:
            self._sweep = loop.call_later(self.suspend_after / 2, self._look_around, loop)

    def _look_around(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand back attempts that did nothing since the last look and only wait for steps."""
        self._sweep = None
        for attempt in list(self.attempts.values()):
            if attempt.touched:
                attempt.touched = False
            else:
                attempt.maybe_suspend()
        if self.attempts:
            self._arm(loop)

    # -- shutting down

    async def stop(self, grace: float = 10.0) -> None:
        """Take no new attempts, let the running ones finish or wait, and drop what is left after `grace` seconds."""
        self.stopping = True
        for stream in list(self.streams):
            stream.send(protocol.Goaway("the endpoint is shutting down"))
        for attempt in list(self.attempts.values()):
            attempt.hurry()
        if self.attempts:
            self._idle = asyncio.Event()
            try:
                async with asyncio.timeout(grace):
                    await self._idle.wait()
            except TimeoutError:
                logger.warning("%d attempts did not finish in time; their nodes start them again", len(self.attempts))
        for attempt in list(self.attempts.values()):
            attempt.end()
        for stream in list(self.streams):
            await stream.drain()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        self.executor.shutdown(wait=False, cancel_futures=True)

    # -- request/response

    async def invoke(self, service: str, handler: str, body: bytes) -> bytes:
        """One attempt without a stream: its START in, all frames it makes out."""
        frames = protocol.decode_batch(body, protocol.TO_SDK)
        if len(frames) != 1 or not isinstance(frames[0], protocol.Start) or frames[0].more:
            raise ProtocolError("the body is a batch of one START with the whole journal")
        start = frames[0]
        if (start.service, start.handler) != (service, handler):
            raise ProtocolError(f"the path says {service}/{handler}, the START {start.service}/{start.handler}")
        out: list[Frame] = []
        done = asyncio.get_running_loop().create_future()

        def ended(attempt: Attempt) -> None:
            if not done.done():
                done.set_result(None)

        attempt = self.start(start, out.append, ended, eager=True)
        if attempt is None:
            raise Superseded
        try:
            await done
        finally:
            attempt.end()
        if not out or not isinstance(out[-1], protocol.Waiting | protocol.Output | protocol.Error):
            raise Superseded
        return protocol.encode_batch(out)


class Superseded(Exception):
    """A newer attempt of this invocation is known here."""


class Stream:
    """One stream of a node: its attempts, its credit, and what is to be sent in the next message."""

    def __init__(self, endpoint: Endpoint, write: Callable[[bytes], Coroutine[Any, Any, None]]) -> None:
        self.endpoint = endpoint
        self.write = write
        self.attempts: dict[bytes, Attempt] = {}
        self.outbox: list[Frame] = []
        self.credit = 0  # Frames that we may send.
        self.taken = 0  # Frames we took since our last grant.
        self.closed = False
        self.loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] | None = None
        self._drained: asyncio.Event = asyncio.Event()
        self._grants = GRANT

    def send(self, frame: Frame) -> None:
        """Frames of one turn of the loop leave in one message."""
        self.outbox.append(frame)
        wake = self._wake
        if wake is not None and not wake.done():
            wake.set_result(None)

    async def run(self) -> None:
        """Write messages until the stream is closed. One task per stream; it never runs beside itself."""
        self.endpoint.streams.add(self)
        try:
            while not self.closed:
                if self._grants:
                    grant, self._grants = self._grants, 0
                    await self.write(protocol.encode_batch([protocol.Credit(grant)]))
                frames = self._take()
                if frames:
                    for message in encode_messages(frames):
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
        """Until everything that may be sent has been sent; at most a second."""
        try:
            async with asyncio.timeout(1.0):
                await self._drained.wait()
        except TimeoutError:
            pass

    def close(self) -> None:
        """The connection is gone: so are its attempts."""
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
        """A message of the node. Raises `ProtocolError`; then the stream must end."""
        if self.closed:
            return  # Nobody would hear of an attempt that begins here now.
        frames = protocol.decode_batch(message, protocol.TO_SDK)
        attempts = self.attempts
        for frame in frames:
            if type(frame) is protocol.Credit:
                self.credit += frame.frames
                if self.outbox and self._wake is not None and not self._wake.done():
                    self._wake.set_result(None)
                continue
            self.taken += 1
            if type(frame) is protocol.Start:
                self._start(frame)
                continue
            attempt = attempts.get(frame.invocation)  # type: ignore[union-attr]
            if attempt is None or attempt.epoch != frame.epoch:  # type: ignore[union-attr]
                continue  # It ended here; the node will see that.
            self._dispatch(attempt, frame)
        if self.taken >= GRANT // 2:
            self._grants += self.taken
            self.taken = 0
            if self._wake is not None and not self._wake.done():
                self._wake.set_result(None)

    def _dispatch(self, attempt: Attempt, frame: Frame) -> None:
        match frame:
            case protocol.Ack():
                attempt.on_ack(frame.length)
            case protocol.Completion():
                attempt.on_completion(frame.index, frame.order, frame.outcome)
            case protocol.RetryRun():
                attempt.on_retry(frame.index)
            case protocol.Cancelled():
                attempt.on_cancelled()
            case protocol.Suspend():
                attempt.on_suspend()
            case protocol.Abort():
                attempt.end()
            case protocol.Journal():
                attempt.add_journal(frame.journal)
                if not frame.more:
                    self.endpoint.begin(attempt)
            case _:
                raise ProtocolError(f"{type(frame).__name__} is not for an SDK")

    def _start(self, start: protocol.Start) -> None:
        attempt = self.endpoint.start(start, self.send, self._ended, eager=False)
        if attempt is not None and not attempt.ended:
            self.attempts[start.invocation] = attempt

    def _ended(self, attempt: Attempt) -> None:
        if self.attempts.get(attempt.id) is attempt:
            del self.attempts[attempt.id]


def check_version(text: str | None) -> None:
    """A node says which version it speaks; nothing said means the first."""
    if text is not None and text != str(protocol.VERSION):
        raise ProtocolError(f"this endpoint speaks version {protocol.VERSION} of the protocol, not {text!r:.20}")


def encode_messages(frames: list[Frame]) -> list[bytes]:
    """One message, or several if it would be too large."""
    message = protocol.encode_batch(frames) if len(frames) <= protocol.FRAMES_MAX else b""
    if (message and len(message) <= protocol.BATCH_BYTES_MAX) or len(frames) == 1:
        return [message]
    half = len(frames) // 2
    return encode_messages(frames[:half]) + encode_messages(frames[half:])
