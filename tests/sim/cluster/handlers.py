"""The handlers of a deployment: processes that run random programs, die, hang, are slow, and survive being presumed
dead.

Nodes reach them with the real invoker over a simulated WebSocket, in real frames. `tests/statemachine/attempt.py` plays
the SDK: it issues commands, and this module turns them into the frames for which a node would issue those commands.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from holdfast.sdk.frames import (
    TO_SDK,
    VERSION,
    VERSION_HEADER,
    Abandon,
    Abort,
    Ack,
    Began,
    Cancelled,
    Completion,
    Credit,
    Error,
    Frame,
    Intent,
    Output,
    RetryRun,
    RunDone,
    RunFailed,
    Start,
    StepFrame,
    Suspend,
    Waiting,
    decode_batch,
    encode_batch,
)
from holdfast.sdk.ids import InvocationId, format_approval, format_awakeable
from holdfast.sdk.journal import Op
from holdfast.statemachine.commands import (
    AbandonStep,
    Command,
    Complete,
    FailAttempt,
    Mode,
    RecordIntent,
    RecordRunFailure,
    RecordRunOutcome,
    RecordStep,
    Retry,
    SuspendAttempt,
)
from tests.sim.cluster.node import SERVICES
from tests.statemachine.attempt import Attempt, Request
from tests.statemachine.programs import Body

if TYPE_CHECKING:
    from tests.sim.cluster.world import Process, World

HANDLERS: Final = "http://handlers:"
URI: Final = f"{HANDLERS}9080"  # Later versions of the same code have other ports.
HOSTS: Final = 2
CREDIT: Final = 5000
OPTIONS: Final = {
    "retry": {"initial_ms": 20, "factor_permille": 2000, "max_interval_ms": 200, "max_attempts": 0},
    "inactivity_timeout_ms": 1500,
    "abort_timeout_ms": 1000,
    "retention_ms": 3_600_000,
}


class Player(Attempt):
    """An attempt whose calls go to the handlers that the manifest names."""

    heard_at: float
    stream: Stream
    era: int

    def call(self, key: str, op: int, service: str, child_key: str | None, mode: int, body: Body) -> Request:
        request = super().call(key, op, service, child_key, mode, body)
        assert request.child is not None
        service = "tasks" if child_key is None else service
        handler = "look" if mode == Mode.SHARED else "play"
        request.argument[:4] = [service, handler, child_key, request.child.payload]
        return request


def to_frame(command: Command) -> Frame:
    match command:
        case RecordStep():
            argument = command.argument
            if command.op == Op.RUN and command.outcome is not None:
                argument = ["run"]
            return StepFrame(
                command.id, command.epoch, command.step, command.op, command.key, argument, command.outcome
            )
        case RecordRunFailure():
            return RunFailed(
                command.id, command.epoch, command.step, command.key, command.name, command.failure,
                list(command.retry),
            )  # fmt: skip
        case RecordIntent():
            return Intent(command.id, command.epoch, command.step, command.key, command.name)
        case RecordRunOutcome():
            return RunDone(command.id, command.epoch, command.step, command.outcome)
        case AbandonStep():
            return Abandon(command.id, command.epoch, command.step)
        case SuspendAttempt():
            return Waiting(command.id, command.epoch, command.steps)
        case Complete():
            return Output(command.id, command.epoch, command.outcome)
        case FailAttempt():
            return Error(command.id, command.epoch, command.failure, 0, command.pause)
        case _:
            raise AssertionError(command)


class Host:
    """One process of handlers."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.down_until = 0.0
        self.streams: list[Stream] = []


class Stream:
    """A connection of a node to a host. Either end may be gone before the other notices."""

    def __init__(self, handlers: Handlers, process: Process, host: Host) -> None:
        self.handlers = handlers
        self.world = handlers.world
        self.process = process
        self.host = host
        self.queue: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue()
        self._response = SimpleNamespace(headers={})  # Of the upgrade: it names no version, so version 1 is used.
        self.broken = False  # Nothing is delivered any more.
        self.attempts: dict[InvocationId, Player] = {}
        self.close_code = aiohttp.WSCloseCode.ABNORMAL_CLOSURE
        self._heartbeat, self._heartbeat_when = 5.0, math.inf  # Connections break here, but are never silent.
        self._response = SimpleNamespace(
            headers={VERSION_HEADER: str(VERSION)}
        )  # What the handshake was answered with.
        self._to_host_at = self._to_node_at = 0.0
        self._out: list[Frame] = []
        self._owed = 0

    # -- the node's end --------------------------------------------------------------------------------------------------

    async def send_bytes(self, raw: bytes) -> None:
        if self.broken:
            raise ConnectionResetError("the stream is gone")
        world = self.world
        self._to_host_at = max(self._to_host_at + 1e-7, world.now + world.rng.uniform(0.0002, 0.004))
        world.at(self._to_host_at, lambda: self._arrive(raw))

    async def receive(self) -> aiohttp.WSMessage:
        return await self.queue.get()

    async def close(self) -> None:
        self.break_off(dies=False)

    # -- the host's end ----------------------------------------------------------------------------------------------------

    def _arrive(self, raw: bytes) -> None:
        if self.broken:
            return
        frames = decode_batch(raw, TO_SDK)
        self._owed += len(frames)
        for frame in frames:
            if type(frame) is Start:
                self.handlers.start(self, frame)
            elif type(frame) is not Credit:
                self._tell(frame)
        if self._owed > CREDIT // 2:
            self.say(Credit(self._owed))
            self._owed = 0

    def _tell(self, frame: Any) -> None:
        attempt = self.attempts.get(frame.invocation)
        if attempt is None or attempt.epoch != frame.epoch:
            return
        self.handlers.tell(attempt, _reaction(frame))

    def say(self, frame: Frame) -> None:
        if self.broken:
            return
        if not self._out:
            self.world.after(self.world.rng.uniform(0.0, 0.002), self._flush)
        self._out.append(frame)

    def _flush(self) -> None:
        frames, self._out = self._out, []
        if self.broken:
            return
        world = self.world
        raw = encode_batch(frames)
        self._to_node_at = max(self._to_node_at + 1e-7, world.now + world.rng.uniform(0.0002, 0.004))
        world.at(self._to_node_at, lambda: self._deliver(raw))

    def _deliver(self, raw: bytes) -> None:
        if not self.broken:
            self.process.run(lambda: self.queue.put_nowait(aiohttp.WSMessage(aiohttp.WSMsgType.BINARY, raw, None)))

    def break_off(self, *, dies: bool) -> None:
        """The connection breaks. Its attempts die, or notice it a little later."""
        if self.broken:
            return
        self.broken = True
        self.host.streams.remove(self)
        closed = aiohttp.WSMessage(aiohttp.WSMsgType.CLOSED, None, None)
        self.process.run(lambda: self.queue.put_nowait(closed))
        attempts = list(self.attempts.values())
        if dies:
            _stop(attempts)
        else:
            self.world.after(self.world.rng.uniform(0.0, 0.3), lambda: _stop(attempts))


def _stop(attempts: list[Player]) -> None:
    for attempt in attempts:
        attempt.is_over = True


def _reaction(frame: Frame) -> Callable[[Player], None]:
    match frame:
        case Ack():
            return lambda attempt: attempt.on_acknowledge(frame.length)
        case Completion():
            return lambda attempt: attempt.on_completion(frame.index, frame.outcome)
        case RetryRun():
            return lambda attempt: attempt.on_retry(frame.index)
        case Cancelled():
            return lambda attempt: attempt.on_cancelled()
        case Suspend():
            return lambda attempt: attempt.maybe_suspend()
        case Abort():
            return lambda attempt: _stop([attempt])
        case _:
            raise AssertionError(frame)


class Handlers:
    """All hosts of the deployment. The load balancer chooses the host of a node's stream."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.hosts = [Host(number) for number in range(HOSTS)]
        self.carried_out: Counter[tuple[InvocationId, str]] = Counter()
        self.once: Counter[tuple[InvocationId, str]] = Counter()
        #: The values that awakeables will be given, and their secrets.
        self.promised: dict[tuple[InvocationId, int], tuple[int, bytes]] = {}
        self.resolve: Callable[[str, int], None] = lambda *_: None  # The client who resolves an awakeable.
        self.decide: Callable[[str, int, str], None] = lambda *_: None  # Somebody who decides about an approval.
        self.asked: set[tuple[InvocationId, int]] = set()

    @property
    def now_ms(self) -> int:
        return int(self.world.now * 1000)

    @now_ms.setter
    def now_ms(self, value: int) -> None:
        raise AssertionError("time is the world's")

    def manifest(self, uri: str) -> bytes:
        services = [{**service, "options": OPTIONS} for service in SERVICES]
        if not uri.startswith(HANDLERS):  # Another deployment, which is never called.
            services = [{**SERVICES[0], "name": f"other-{uri.rsplit(':', 1)[1]}"}]
        manifest = {"protocol": {"min": 1, "max": VERSION}, "sdk": "sim", "modes": ["stream"], "services": services}
        return json.dumps(manifest).encode()

    def session(self, process: Process) -> Session:
        return Session(self, process)

    def chance(self, name: str, probability: float) -> bool:
        world = self.world
        happens = world.is_faulty and world.rng.random() < probability * world.profile.handler_faults
        if happens:
            world.counts[name] += 1
        return happens

    # -- attempts ------------------------------------------------------------------------------------------------------

    def start(self, stream: Stream, start: Start) -> None:
        assert not start.more, "programs are small"
        known = stream.attempts.get(start.invocation)
        if known is not None:
            known.is_over = True
        record: Any = SimpleNamespace(id=start.invocation, key=start.key, order=0)
        partitions = self.world.profile.partitions
        attempt = Player(
            self,
            record,
            start.epoch,
            start.journal,
            cancelled=start.cancelled,
            partitions=partitions,
            secrets=start.secrets,
        )
        attempt.heard_at = 0.0
        attempt.stream = stream
        attempt.era = self.world.era
        stream.attempts[start.invocation] = attempt
        if start.suspects_max:
            stream.say(Began(start.invocation, start.epoch))
        self.world.counts["attempts"] += 1
        self.tell(attempt, lambda attempt: attempt.begin())

    def tell(self, attempt: Player, what: Callable[[Player], None]) -> None:
        """A frame reaches the code: in order, and a while later."""
        world = self.world
        delay = world.rng.uniform(0.0002, 0.01)
        if self.chance("handlers slow", 0.003):
            delay = world.rng.uniform(0.2, 2.0)
        attempt.heard_at = max(attempt.heard_at + 1e-7, world.now + delay)
        world.at(attempt.heard_at, lambda: self._reach(attempt, what))

    def _reach(self, attempt: Player, what: Callable[[Player], None]) -> None:
        world = self.world
        if attempt.is_over or attempt.era != world.era:
            return
        if self.chance("handlers hung", 0.002):
            attempt.is_over = True  # It sends nothing any more, but its stream lives.
        elif self.chance("attempts failed", 0.01):
            failure = [1, 500, "it crashed", "RuntimeError"]
            self.send(attempt, FailAttempt(attempt.id, attempt.epoch, failure, Retry(), 0, 0, False))
            attempt.is_over = True
        elif self.chance("streams lost", 0.003):
            attempt.stream.break_off(dies=world.rng.random() < 0.5)
        elif self.chance("hosts killed", 0.002):
            self.kill(attempt.stream.host)
        else:
            what(attempt)
            world.after(world.rng.choice([0.005, 0.03, 0.1]), lambda: attempt.maybe_suspend())

    def kill(self, host: Host) -> None:
        host.down_until = self.world.now + self.world.rng.uniform(0.05, 1.0)
        for stream in list(host.streams):
            stream.break_off(dies=True)

    def send(self, attempt: Attempt, command: Command) -> None:
        assert isinstance(attempt, Player)
        attempt.stream.say(to_frame(command))

    def carry_out(self, attempt: Attempt, key: str, *, once: bool = False) -> bool:
        assert isinstance(attempt, Player)
        self.world.oracle.about_to_run(attempt.id, attempt.epoch, key)
        if self.chance("died before an effect", 0.02):
            self.kill(attempt.stream.host)
            return False
        self.carried_out[attempt.id, key] += 1
        self.once[attempt.id, key] += once
        if self.once[attempt.id, key] > 1:
            self.world.violate(f"{key} of {attempt.id.hex()} ran twice, and was to run at most once")
        if self.chance("died after an effect", 0.03):
            self.kill(attempt.stream.host)
            return False
        return True

    def promise_awakeable(self, ident: InvocationId, index: int, value: int, secret: bytes) -> None:
        if (ident, index) not in self.promised:
            self.promised[ident, index] = value, secret
            self.resolve_later(ident, index)

    def ask_people(self, ident: InvocationId, index: int, value: int, secret: bytes) -> None:
        if (ident, index) in self.asked:
            return
        self.asked.add((ident, index))
        self.world.counts["approvals"] += 1
        text = format_approval(ident, index, secret)
        for comment in ("first", "second"):
            self.world.after(self.world.rng.uniform(0.0, 0.5), partial(self.decide, text, value, comment))

    def resolve_later(self, ident: InvocationId, index: int) -> None:
        """Unless the cluster is lost by then: in the one that is made from its backup, the step may be another."""
        value, secret = self.promised[ident, index]
        text, era = format_awakeable(ident, index, secret), self.world.era

        def resolve() -> None:
            if self.world.era == era:
                self.resolve(text, value)

        self.world.after(self.world.rng.uniform(0.0, 0.5), resolve)

    def rewind(
        self,
        has_step: Callable[[InvocationId, str], bool],
        has_intent: Callable[[InvocationId, str], bool],
        awaits: Callable[[InvocationId, int], bool],
    ) -> None:
        """A restored cluster knows only a part of the work. The rest may be done again."""
        for host in self.hosts:
            self.kill(host)
        for done, is_known in ((self.carried_out, has_step), (self.once, has_intent)):
            for known in [known for known in done if not is_known(*known)]:
                del done[known]
        self.promised = {known: value for known, value in self.promised.items() if awaits(*known)}
        for ident, index in self.promised:
            self.resolve_later(ident, index)


class Session:
    """Plays the HTTP client of the invoker."""

    def __init__(self, handlers: Handlers, process: Process) -> None:
        self._handlers = handlers
        self._process = process

    async def ws_connect(self, uri: str, **options: Any) -> Stream:
        world = self._handlers.world
        await asyncio.sleep(world.rng.uniform(0.001, 0.01))
        host = world.rng.choice(self._handlers.hosts)
        if host.down_until > world.now:
            raise aiohttp.ClientConnectionError("connection refused")
        stream = Stream(self._handlers, self._process, host)
        host.streams.append(stream)
        self._process.on_death.append(lambda: stream.break_off(dies=False))
        stream.say(Credit(CREDIT))
        return stream

    async def close(self) -> None: ...
