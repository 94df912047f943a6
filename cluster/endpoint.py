"""One deployment as this node reaches it: a queue of attempts that wait for their turn, and the stream that carries the others.

The stream is a WebSocket that we open: one per deployment, many attempts on it, all frames of one turn of the loop in one
message. Each side tells the other how many frames it can take. When it breaks, all its attempts are dispatched again at once;
it is opened again with growing pauses, while there is anything to send. An endpoint that says it is going away keeps what it
has, and the next stream takes what is new.

An endpoint that does not speak WebSocket gets one request per attempt instead (`cluster/requests.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, NamedTuple

import aiohttp

from holdfast.cluster.attempts import Attempt, Deferred, Owner, PendingAck, Ticket, encode
from holdfast.cluster.objects import StoreDown, ValueLost
from holdfast.cluster.requests import Requests, retry_after_s
from holdfast.cluster.tasks import Tasks
from holdfast.sdk.protocol import (
    BATCH_BYTES_MAX,
    TO_NODE,
    VERSION,
    Abort,
    Ack,
    Completion,
    Credit,
    Frame,
    Goaway,
    Journal,
    ProtocolError,
    Start,
    decode_batch,
    encode_batch,
)
from holdfast.statemachine.effects import StartAttempt

if TYPE_CHECKING:
    from holdfast.cluster.invoker import Invoker

logger = logging.getLogger(__name__)

#: What we can take of an endpoint's frames before they are in a log.
WINDOW_FRAMES: Final = 16_384
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
#: Between two looks at whether those that places were kept for have come.
LOOK_S: Final = 0.5
#: Of those that wait, looked at in one turn of the loop.
RECONSIDERED: Final = 512
#: Before an attempt that this node failed to start is dispatched again.
REBUILD_S: Final = 1.0


class Timing(NamedTuple):
    connect_s: float = 5.0
    backoff_s: float = 0.01
    backoff_max_s: float = 1.0  # A process of handlers that was restarted is found so soon; a try costs one connection.
    heartbeat_s: float = 30.0  # A stream that does not answer for half of it is broken.
    sweep_s: float = 1.0
    fallback_s: float = 60.0  # After this long with requests, the stream is tried again.


class Endpoint:
    def __init__(self, invoker: Invoker, deployment: str) -> None:
        self.invoker = invoker
        self.deployment = deployment
        self.waiting: OrderedDict[bytes, Ticket] = OrderedDict()
        #: Who has more than fits the queue, and the smallest of the ids that did not. The state knows them all.
        self._passed_over: dict[Owner, bytes] = {}
        self._look: asyncio.TimerHandle | None = None
        self.running = 0
        self.stream: Stream | None = None
        self.streams: set[Stream] = set()  # With those that drain.
        self.requests: Requests | None = None
        self._retired: list[Requests] = []  # With attempts that still run as requests.
        self.failures = 0  # In a row.
        self.last_error = ""
        self._loop = asyncio.get_running_loop()
        self._connecting: asyncio.Task[None] | None = None
        self._not_before = 0.0
        self._closed = False
        self._pumping = False

    # -- the queue ---------------------------------------------------------------------------------------------------

    def enqueue(self, ticket: Ticket) -> None:
        if len(self.waiting) >= self.invoker.limits.waiting and ticket.id not in self.waiting:
            self.pass_over(ticket.owner, ticket.id)
            return
        if not self.waiting and self._has_room() and self._start(ticket):
            return
        self.waiting[ticket.id] = ticket if ticket.first is None else ticket._replace(first=None)
        self._reach_out()

    @property
    def places(self) -> int:
        """How many more may wait here."""
        return self.invoker.limits.waiting - len(self.waiting)

    def pass_over(self, owner: Owner, invocation: bytes) -> None:
        """Nothing is lost: the state knows that it should run, and it is looked for there when there are places again."""
        self._passed_over[owner] = min(invocation, self._passed_over.get(owner, invocation))
        if self.places > 0 and self._look is None:
            # It was promised away. If those never come, nothing else would remind us.
            self._look = self._loop.call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self.pump()
        if self._passed_over and self.places > 0:
            self._look = self._loop.call_later(LOOK_S, self._look_again)

    def _resume(self, *, anywhere: bool = False) -> None:
        """Have those looked for that were passed over."""
        owners, self._passed_over = self._passed_over, {}
        for owner, first in owners.items():
            owner.scan(first, None if anywhere else self.deployment)

    def queued(self, invocation: bytes, epoch: int) -> bool:
        ticket = self.waiting.get(invocation)
        return ticket is not None and ticket.epoch >= epoch and not ticket.owner.ended

    def forget(self, owner: Owner) -> None:
        """Nobody starts anything in this one's name any more."""
        self._passed_over.pop(owner, None)
        for invocation in [ticket.id for ticket in self.waiting.values() if ticket.owner is owner]:
            del self.waiting[invocation]

    @property
    def limit(self) -> int:
        limits = self.invoker.limits
        return limits.streamed if self.requests is None else min(limits.requested, limits.streamed)

    def _has_room(self) -> bool:
        if self.running >= self.limit or self.invoker.stopping:
            return False
        if self.requests is not None:
            return self._loop.time() >= self._not_before
        stream = self.stream
        return stream is not None and stream.can_start

    def pump(self) -> None:
        """Start whoever waits, as far as there is room."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self.waiting and self._has_room():
                _, ticket = self.waiting.popitem(last=False)
                self._start(ticket)
        finally:
            self._pumping = False
        if self._passed_over and len(self.waiting) <= self.invoker.limits.waiting // 2:
            self._resume()
        if self.waiting:
            self._reach_out()

    def _start(self, ticket: Ticket) -> bool:
        """True: it was dealt with, started or not wanted any more."""
        carrier = self.requests or self.stream
        assert carrier is not None
        try:
            built = self.invoker.build(ticket, carrier, self.deployment)
        except Exception:
            logger.exception("deployment %s: an attempt could not be started; it is tried again", self.deployment)
            self._loop.call_later(REBUILD_S, ticket.owner.redispatch, ticket.id, ticket.epoch)
            return True
        if built is not None:
            attempt, frames = built
            self.running += 1
            carrier.begin(attempt, frames)
        return True

    def let_go(self, count: int = 1) -> None:
        """Attempts of ours are over."""
        self.running -= count
        if (self.waiting or self._passed_over) and not self._pumping:
            self._loop.call_soon(self.pump)
        self._maybe_retire()

    # -- reaching it -------------------------------------------------------------------------------------------------

    def _reach_out(self) -> None:
        """Have a carrier soon, if there is none."""
        if self._closed or self.invoker.stopping:
            return
        if self.requests is not None:
            delay = self._not_before - self._loop.time()
            if delay > 0 and self._connecting is None:
                self._connecting = self._loop.create_task(self._wait_and_pump(delay))
        elif self.stream is None and self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())

    async def _wait_and_pump(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        self._connecting = None
        self.pump()

    async def _connect(self) -> None:
        try:
            while self.waiting and self.stream is None and not self._closed:
                deployment = self.invoker.registry.deployment(self.deployment)
                if deployment is None:
                    self._give_back()
                    return
                if "stream" not in deployment.modes:
                    self.requests = Requests(self, deployment.uri)
                    break
                await asyncio.sleep(self._not_before - self._loop.time())
                await self._open(deployment.uri, can_request="request-response" in deployment.modes)
                if self.requests is not None:
                    break
        except Exception:
            logger.exception("deployment %s: connecting failed in an unforeseen way", self.deployment)
            self.back_off("an error of this node; see its log")
        finally:
            self._connecting = None
        if not self._closed:
            self._loop.call_soon(self.pump)

    async def _open(self, uri: str, *, can_request: bool) -> None:
        timing = self.invoker.timing
        try:
            async with asyncio.timeout(timing.connect_s):
                socket = await self.invoker.session.ws_connect(
                    f"{uri}/stream",
                    headers={"x-holdfast-protocol": str(VERSION)},
                    heartbeat=timing.heartbeat_s,
                    max_msg_size=BATCH_BYTES_MAX,
                    compress=0,
                    autoclose=False,
                )
        except aiohttp.WSServerHandshakeError as error:
            after = retry_after_s(error.headers.get("Retry-After") if error.headers else None)
            if can_request and error.status not in (429, 502, 503, 504):
                logger.warning(
                    "deployment %s: %s/stream answered %d; using one request per attempt",
                    self.deployment,
                    uri,
                    error.status,
                )
                self.requests = Requests(self, uri)
                self._not_before = 0.0
                self._loop.call_later(timing.fallback_s, self._try_stream_again)
            else:
                self.back_off(f"{uri}/stream answered {error.status}", after)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self.back_off(f"{uri}/stream: {error or type(error).__name__}")
        else:
            stream = self.stream = Stream(self, socket)
            self.streams.add(stream)
            stream.run()

    def _try_stream_again(self) -> None:
        """Attempts that run as requests end as requests; the next ones may be streamed."""
        if self.requests is not None and not self._closed:
            self._retired = [each for each in (*self._retired, self.requests) if each.attempts]
            self.requests = None
            self.pump()

    def _give_back(self) -> None:
        """The deployment is gone: each of those that wait is looked at again."""
        tickets = list(self.waiting.values())
        self.waiting.clear()
        for ticket in tickets:
            if not ticket.owner.ended:
                ticket.owner.redispatch(ticket.id, ticket.epoch)
        self._resume(anywhere=True)
        self._maybe_retire()

    def _maybe_retire(self) -> None:
        """The deployment is gone, and nothing is left here: so are we."""
        gone = self.invoker.registry.deployment(self.deployment) is None
        if gone and not (self.running or self.waiting or self._passed_over):
            self.invoker.retire(self)

    def deployments_changed(self) -> None:
        """Ours may be gone, or a newer one may offer what waits here for one that cannot be reached."""
        if self.invoker.registry.deployment(self.deployment) is None:
            self._give_back()
        elif self.failures and self.waiting:
            self._reconsider(list(self.waiting))
            self._resume(anywhere=True)

    def _reconsider(self, ids: list[bytes]) -> None:
        """Those that have not begun go where new ones go now."""
        for ident in ids[:RECONSIDERED]:
            ticket = self.waiting.get(ident)
            if (
                ticket is not None
                and not ticket.owner.ended
                and self.invoker.belongs_elsewhere(ticket, self.deployment)
            ):
                del self.waiting[ident]
                self.invoker.start(ticket.owner, StartAttempt(ident, ticket.epoch))
        if len(ids) > RECONSIDERED:
            self._loop.call_soon(self._reconsider, ids[RECONSIDERED:])

    def back_off(self, why: str, after_s: float = 0.0) -> None:
        """It could not be reached, or wants to be left alone. Nothing is counted against any attempt."""
        timing = self.invoker.timing
        pause = min(timing.backoff_s * 2 ** min(self.failures, 20), timing.backoff_max_s)
        pause = max(pause * (0.5 + self.invoker.rng.random() / 2), after_s)
        level = logging.WARNING if self.failures in (0, 10) else logging.DEBUG
        self.failures += 1
        self.last_error = why
        self._not_before = self._loop.time() + pause
        logger.log(level, "deployment %s cannot be reached: %s (try again in %.2f s)", self.deployment, why, pause)

    def is_well(self) -> None:
        """It did something useful."""
        if self.failures:
            self.failures = 0
            self.last_error = ""
            self._not_before = 0.0

    # -- streams -----------------------------------------------------------------------------------------------------

    def drain(self, stream: Stream) -> None:
        """It takes no new attempts."""
        if self.stream is stream:
            self.stream = None
            self._not_before = max(self._not_before, self._loop.time() + self.invoker.timing.backoff_s)
        if self.waiting:
            self._reach_out()

    def broken(self, stream: Stream, why: str, blame: str | None) -> None:
        self.streams.discard(stream)
        if self.stream is stream:
            self.stream = None
        if not self._closed and not self.invoker.stopping and not stream.drains:
            self.back_off(why)
        attempts = list(stream.attempts.values())
        stream.attempts.clear()
        self.running -= len(attempts)
        if attempts and not self.invoker.stopping:
            logger.info("deployment %s: %d attempts lost their stream: %s", self.deployment, len(attempts), why)
        self.invoker.break_off(attempts, why, blame=blame)
        if self.waiting:
            self._reach_out()
        self._maybe_retire()

    async def close(self) -> None:
        self._closed = True
        if self._look is not None:
            self._look.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        await asyncio.gather(*(each.close() for each in (self.requests, *self._retired) if each is not None))
        await asyncio.gather(*(stream.close() for stream in list(self.streams)))


class Stream:
    """One WebSocket, and the attempts on it."""

    def __init__(self, endpoint: Endpoint, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.attempts: dict[bytes, Attempt] = {}
        self.drains = False
        self._endpoint = endpoint
        self._invoker = endpoint.invoker
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
        self._over = False  # The rest is saying goodbye, which nobody needs to cancel.
        self._blame: str | None = None
        self._why = "the endpoint closed the stream"
        self._wake = asyncio.Event()
        self._wake.set()
        self._tasks: list[asyncio.Task[None]] = []

    def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._read()), loop.create_task(self._write())]

    # -- out -----------------------------------------------------------------------------------------------------------

    @property
    def can_start(self) -> bool:
        return not self.drains and self._credit > len(self._frames) and self._bytes < START_BYTES

    def begin(self, attempt: Attempt, frames: list[Frame | Deferred]) -> None:
        self.attempts[attempt.id] = attempt
        for frame in frames:
            self._push(frame)

    def send(self, frame: Frame | Deferred) -> None:
        self._push(frame)

    def acknowledge(self, attempt: Attempt) -> None:
        """Told with the next message; until then later acknowledgements join it."""
        attempt.ack_waits = ack = PendingAck(attempt, attempt.length)
        self._push(ack)

    def let_go(self, attempt: Attempt) -> None:
        if self.attempts.get(attempt.id) is attempt:
            del self.attempts[attempt.id]
            for frame in self._behind.pop((attempt.id, attempt.epoch), ()):
                self._let_fetched_go(frame)
            self._endpoint.let_go()

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
        if isinstance(frame, Deferred) and frame.to_fetch():
            self._behind[_whose(frame)] = [frame]
            self._to_fetch.append(frame)
            self._fetch_more()
            return
        self._frames.append(frame)
        self._bytes += _held(frame)
        if self._bytes > OUTBOX_BYTES_MAX and self._blame is None:
            self._end("the endpoint does not read what it is sent")
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
            frame.fetched.clear()
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
                            await socket.send_bytes(message)
                        self._sent(frames)
                    elif len(self._frames) == waiting:
                        break  # What was taken may all have been for attempts that are over.
                if self._endpoint.waiting:
                    self._endpoint.pump()
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            self._end(f"sending failed: {error or type(error).__name__}")
        except Exception:  # A stream that nobody writes to looks alive, and its attempts would wait for ever.
            logger.exception("deployment %s: the stream is ended by an error of this node", self._endpoint.deployment)
            self._end("an error of this node; see its log")

    async def _encoded(self, frames: list[Frame | Deferred]) -> bytes | None:
        if any(isinstance(frame, Deferred) for frame in frames):
            return await encode(frames, self._gone)
        return encode_batch(frames)  # type: ignore[arg-type]

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
                    self._receive(message.data)
                    while invoker.congested:  # noqa: ASYNC110 - nobody tells us, and it is rare
                        await asyncio.sleep(0.005)  # Not reading on is what slows the other side down.
                elif message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED):
                    break
                elif message.type is aiohttp.WSMsgType.ERROR:
                    self._why = f"the stream broke: {message.data}"
                    break
                else:
                    raise ProtocolError("a message that is not binary")
        except ProtocolError as error:
            self._blame = f"the endpoint does not speak the protocol: {error}"
            logger.error("deployment %s: the stream is ended: %s", self._endpoint.deployment, self._blame)
        except (aiohttp.ClientError, OSError) as error:
            self._why = f"the stream broke: {error or type(error).__name__}"
        except asyncio.CancelledError:
            pass  # `_end` says why.
        except Exception:
            logger.exception("deployment %s: the stream is ended by an error of this node", self._endpoint.deployment)
            self._why = "an error of this node; see its log"
        self._over = True
        for task in (self._tasks[1], *self._fetching):
            task.cancel()
        self._endpoint.broken(self, self._blame or self._why, self._blame)
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._socket.close()
        except (aiohttp.ClientError, OSError, TimeoutError, RuntimeError) as error:
            logger.debug("deployment %s: closing a stream: %s", self._endpoint.deployment, error)

    def _receive(self, raw: bytes) -> None:
        frames = decode_batch(raw, TO_NODE)
        plain = frames
        if any(type(frame) is Credit or type(frame) is Goaway for frame in frames):
            plain = []
            for frame in frames:
                if type(frame) is Credit:
                    self._credit = min(self._credit + frame.frames, 1 << 40)
                elif type(frame) is Goaway:
                    logger.info("deployment %s is going away: %s", self._endpoint.deployment, frame.reason)
                    self.drains = True
                    self._owed += 1
                    self._endpoint.drain(self)
                else:
                    plain.append(frame)
            self._wake.set()
            if self._endpoint.waiting:
                self._endpoint.pump()
        if plain:
            self._endpoint.is_well()
            self._owed += len(plain)
            if self._owed >= WINDOW_FRAMES // 2:
                self._wake.set()
            self._invoker.receive(self, plain)

    def _end(self, why: str) -> None:
        if not self._over:
            self._why = why
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
