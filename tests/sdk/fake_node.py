"""A node in memory: journals, acknowledgements, completions, retries and restarts, as docs/protocol.md specifies.

It talks to a real endpoint, either directly (messages are passed as bytes) or over a WebSocket. A crash drops the link
and with it every frame in transit; then attempts start again with the journal so far. It runs nested calls itself, so a
test needs nothing else.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgpack

from holdfast.sdk.definition import AnyService
from holdfast.sdk.endpoint import Endpoint
from holdfast.sdk.errors import TerminalError, from_failure
from holdfast.sdk.frames import (
    TO_NODE,
    VERSION,
    Abandon,
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
    Intent,
    Output,
    Piece,
    RetryRun,
    RunDone,
    RunFailed,
    Start,
    StepFrame,
    Waiting,
    decode_batch,
    encode_batch,
)
from holdfast.sdk.ids import ID_BYTES, InvocationId, child_id, new_id, workflow_id
from holdfast.sdk.journal import (
    AWAITED,
    CANCELLED,
    DIGESTED,
    NOTHING,
    OP_NAMES,
    Decided,
    Failure,
    Op,
    Step,
    digest,
    pack_decided,
    pack_outcome,
    pack_step,
    some,
)
from tests.sdk.fake_links import Link, MemoryLink, SocketLink


@dataclass
class Invocation:
    id: InvocationId
    service: str
    handler: str
    key: str | None
    payload: bytes
    headers: dict[str, str]
    seed: int
    caller: tuple[InvocationId, int] | None = None
    steps: list[Step] = field(default_factory=list)
    order: int = 0
    epoch: int = 0
    status: str = "running"  # running, suspended, backing-off, paused, completed
    waiting: list[int] = field(default_factory=list)
    outcome: list[Any] | None = None
    errors: list[Failure] = field(default_factory=list)
    cancelled: bool = False
    suspects_max: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    suspended: asyncio.Event = field(default_factory=asyncio.Event)

    def journal(self) -> list[tuple[str, str]]:
        """(operation, key) of each step after the input."""
        return [(OP_NAMES[step.op], step.key) for step in self.steps[1:]]


class FakeNode:
    """See the module's docstring. `speed`: how much faster than real time sleeps and backoffs are.

    `version`: the highest version of the protocol that it supports. With 1 it behaves like nodes of version 1.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        speed: float = 100.0,
        latency: bool = False,
        eager_state: bool = True,
        version: int = VERSION,
        limits: tuple[int, int] = (0, 0),
        secrets: bool = True,
    ) -> None:
        self.limits = limits  # of journals: steps and bytes
        self.secrets = secrets  # of awakeables
        self.version = version
        self.random = random.Random(seed)
        self.speed = speed
        self.latency = latency
        self.eager_state = eager_state
        self.digests = True  # False: as nodes before level 2.
        self.invocations: dict[InvocationId, Invocation] = {}
        self.state: dict[tuple[str, str], dict[str, bytes]] = {}
        self.promises: dict[tuple[str, str, str], list[Any]] = {}
        self.promise_waits: dict[tuple[str, str, str], list[tuple[InvocationId, int]]] = {}
        self.link: Link | None = None
        self.out: list[Frame] = []
        self.frames: list[Frame] = []  # every frame of the SDK, applied or not
        self.applied = 0
        self.on_frame: Callable[[Frame], None] | None = None
        self.crash_at: Callable[[Frame], str | None] | None = None  # "before", "after" or None
        self.crashed: asyncio.Event = asyncio.Event()
        self.credit = 0
        self.goaway = False
        self._inbox: list[tuple[Link, list[Frame]]] = []
        self._busy = False
        self._tasks: set[asyncio.Future[None]] = set()

    # -- links

    def connect(self, services: Iterable[AnyService] | Endpoint, **options: Any) -> Endpoint:
        endpoint = services if isinstance(services, Endpoint) else Endpoint(services, **options)
        self.link = MemoryLink(self, endpoint)
        self._restart_all()
        return endpoint

    async def connect_uri(self, uri: str) -> None:
        self.link = await SocketLink.connect(self, uri)
        self._restart_all()

    async def crash(self) -> None:
        """The link breaks: everything in transit is lost."""
        link, self.link = self.link, None
        self.out.clear()
        self._inbox.clear()
        if link is not None:
            await link.drop()

    def lost(self, link: Link) -> None:
        if self.link is link:
            self.link = None
            self.out.clear()
            self.crashed.set()

    def _restart_all(self) -> None:
        self.crashed.clear()
        for invocation in self.invocations.values():
            if invocation.status == "running":
                self._begin(invocation)

    # -- invocations

    def invoke(
        self,
        service: str,
        handler: str,
        payload: bytes = b"",
        *,
        key: str | None = None,
        headers: dict[str, str] | None = None,
        id: InvocationId | None = None,
        caller: tuple[InvocationId, int] | None = None,
        suspects_max: int = 0,
    ) -> Invocation:
        raw = id or new_id(service, key, os.urandom(16))
        known = self.invocations.get(raw)
        if known is not None:
            return known
        invocation = Invocation(raw, service, handler, key, payload, headers or {}, self.random.getrandbits(48), caller)
        invocation.suspects_max = suspects_max
        invocation.order = 1
        invocation.steps.append(Step(Op.INPUT, "input", [invocation.headers], 1, 1, [0, payload]))
        self.invocations[raw] = invocation
        self._begin(invocation)
        return invocation

    async def result(self, invocation: Invocation, *, seconds: float = 60.0) -> bytes:
        async with asyncio.timeout(seconds):
            await invocation.done.wait()
        assert invocation.outcome is not None
        if invocation.outcome[0] == 0:
            payload: bytes = invocation.outcome[1]
            return payload
        raise from_failure(Failure(*invocation.outcome[1:]))

    async def call(self, service: str, handler: str, payload: bytes = b"", **options: Any) -> bytes:
        return await self.result(self.invoke(service, handler, payload, **options))

    def start_frame(self, invocation: Invocation) -> Start:
        state: dict[str, bytes] | None = None
        if invocation.key is not None:
            state = self.state.setdefault((invocation.service, invocation.key), {}) if self.eager_state else {}
        return Start(
            invocation.id, invocation.epoch, invocation.service, invocation.handler, invocation.key, invocation.epoch,
            self.now_ms(), invocation.seed, [pack_step(step) for step in invocation.steps], False,
            dict(state) if state is not None else None, self.eager_state, invocation.cancelled,
            invocation.suspects_max, *self.limits, self.secrets,
        )  # fmt: skip

    def now_ms(self) -> int:
        return int(time.time() * 1000)

    def _begin(self, invocation: Invocation) -> None:
        invocation.epoch += 1
        invocation.status = "running"
        invocation.suspended.clear()
        if self.link is not None:
            self.send(self.start_frame(invocation))

    def cancel(self, invocation: Invocation) -> None:
        if invocation.status == "completed":
            return
        noticed = False
        for index, step in enumerate(invocation.steps):
            waits = step.op in (Op.SLEEP, Op.CALL, Op.PROMISE, Op.AWAKEABLE, Op.ATTACH, Op.APPROVAL)
            retrying = step.op == Op.RUN and len(step.argument) == 4
            if step.outcome is None and not step.abandoned and (waits or retrying):
                noticed = True
                if step.op == Op.CALL:
                    child = self._child(invocation, index, step.argument, spread=False)
                    if child in self.invocations:
                        self.cancel(self.invocations[child])
                self.complete(invocation, index, pack_outcome(CANCELLED))
        if not noticed:
            invocation.cancelled = True
            if invocation.status == "running":
                self.send(Cancelled(invocation.id, invocation.epoch))
            else:
                self._begin(invocation)

    # -- frames to the SDK

    def send(self, frame: Frame) -> None:
        if self.link is None:
            return
        if not self.out:
            asyncio.get_running_loop().call_soon(self._flush)
        self.out.append(frame)

    def _flush(self) -> None:
        frames, self.out = self.out, []
        if self.link is not None and frames:
            self.link.deliver(encode_batch(frames, self.link.version))

    # -- frames from the SDK

    def receive(self, link: Link, message: bytes) -> None:
        if link is not self.link:
            return
        frames = decode_batch(message, TO_NODE, link.version)
        self.frames.extend(frames)
        if not self.latency:
            self._apply_all(link, frames)
            return
        self._inbox.append((link, frames))
        if not self._busy:
            self._busy = True
            asyncio.get_running_loop().call_later(self.random.random() * 0.003, self._take)

    def _take(self) -> None:
        self._busy = False
        inbox, self._inbox = self._inbox, []
        for link, frames in inbox:
            self._apply_all(link, frames)

    def _apply_all(self, link: Link, frames: list[Frame]) -> None:
        for frame in frames:
            if link is not self.link:
                return
            when = self.crash_at(frame) if self.crash_at is not None else None
            if when == "before":
                self._crash_now()
                return
            self._apply(frame)
            if when == "after":
                self._crash_now()
                return

    def _crash_now(self) -> None:
        """From now on nothing of this link counts; the test reconnects."""
        link, self.link = self.link, None
        self.out.clear()
        self._inbox.clear()
        if link is not None:
            link.open = False
            if isinstance(link, MemoryLink):
                link.stream.close()
                link.task.cancel()
        self.crashed.set()

    def _apply(self, frame: Frame) -> None:
        self.applied += 1
        if isinstance(frame, Credit):
            self.credit += frame.frames
            return
        if isinstance(frame, Goaway):
            self.goaway = True
            return
        if isinstance(frame, Blocked):
            return
        assert not isinstance(frame, Piece), "only nodes send pieces"
        invocation = self.invocations[frame.invocation]
        if invocation.epoch != frame.epoch or invocation.status != "running":
            self.send(Abort(invocation.id, frame.epoch, "superseded"))
            return
        if self.on_frame is not None:
            self.on_frame(frame)
        match frame:
            case Began():
                pass
            case StepFrame():
                self._step(invocation, frame)
            case RunFailed():
                self._run_failed(invocation, frame)
            case Intent() if frame.index < len(invocation.steps):
                step = invocation.steps[frame.index]
                invocation.steps[frame.index] = step._replace(argument=[frame.name])
                self.send(RetryRun(invocation.id, invocation.epoch, frame.index))
            case Intent():
                self._append(invocation, frame.index, Op.RUN, frame.key, [frame.name], None)
                self._ack(invocation)
            case RunDone():
                self._notices(invocation, frame.outcome)
                self.complete(invocation, frame.index, frame.outcome)
            case Abandon():
                invocation.steps[frame.index] = invocation.steps[frame.index]._replace(abandoned=True)
            case Waiting():
                self._suspend(invocation, frame.steps)
            case Output() if invocation.cancelled and frame.outcome[0] == 0 and self.version > 1:
                self._begin(invocation)
            case Output():
                self._complete_invocation(invocation, frame.outcome)
            case Error():
                self._failed(invocation, frame)

    def _append(
        self, invocation: Invocation, index: int, op: int, key: str, argument: list[Any], outcome: list[Any] | None
    ) -> None:
        assert index == len(invocation.steps), f"step {index} follows {len(invocation.steps) - 1}"
        assert all(step.key != key for step in invocation.steps), f"key {key!r} is in the journal already"
        invocation.order += 1
        done = invocation.order if outcome is not None else 0
        invocation.steps.append(Step(op, key, argument, invocation.order, done, outcome))

    def _kept(self, op: int, argument: list[Any]) -> list[Any]:
        """The stored form of an argument: a digest in place of a payload for others, and no headers."""
        kept = list(argument)
        if op in DIGESTED:
            at = DIGESTED[op]
            kept[at] = digest(kept[at]) if self.digests else None
        if op in (Op.CALL, Op.SEND):
            kept[4] = None
        return kept

    def _ack(self, invocation: Invocation) -> None:
        self.send(Ack(invocation.id, invocation.epoch, len(invocation.steps)))

    def _notices(self, invocation: Invocation, outcome: list[Any]) -> None:
        if outcome[0] == 1 and outcome[3] == CANCELLED.kind:
            invocation.cancelled = False

    def _step(self, invocation: Invocation, frame: StepFrame) -> None:
        index, argument, outcome = frame.index, frame.argument, frame.outcome
        given = outcome
        if outcome is None and frame.op not in AWAITED:
            outcome = [0, b""]
        self._append(invocation, index, frame.op, frame.key, self._kept(frame.op, argument), outcome)
        self._ack(invocation)
        where = (invocation.service, invocation.key or "")
        state = self.state.setdefault(where, {})
        if given is not None:
            if frame.op == Op.RUN:
                self._notices(invocation, given)
            return
        if invocation.cancelled and frame.op in (Op.SLEEP, Op.CALL, Op.PROMISE, Op.AWAKEABLE, Op.ATTACH, Op.APPROVAL):
            invocation.cancelled = False
            self.complete(invocation, index, pack_outcome(CANCELLED))
            return
        match frame.op:
            case Op.SLEEP:
                self._later(argument[0], lambda: self.complete(invocation, index, [0, b""]))
            case Op.CALL:
                service, handler, key, payload, headers = argument
                child = self._child(invocation, index, argument, spread=False)
                called = self.invoke(
                    service, handler, payload, key=key, headers=headers, id=child, caller=(invocation.id, index)
                )
                if called.outcome is not None:
                    self.complete(invocation, index, called.outcome)
            case Op.SEND:
                service, handler, key, payload, headers, delay = argument
                child = self._child(invocation, index, argument, spread=True)
                self._later(delay, lambda: self.invoke(service, handler, payload, key=key, headers=headers, id=child))
            case Op.GET:
                value = state.get(argument[0])
                self.complete(invocation, index, [0, NOTHING if value is None else some(value)])
            case Op.KEYS:
                self.complete(invocation, index, [0, msgpack.packb(sorted(state))])
            case Op.SET:
                state[argument[0]] = argument[1]
            case Op.CLEAR:
                state.pop(argument[0], None)
            case Op.CLEAR_ALL:
                state.clear()
            case Op.PROMISE:
                self.promise_waits.setdefault((*where, argument[0]), []).append((invocation.id, index))
                found = self.promises.get((*where, argument[0]))
                if found is not None:
                    self.complete(invocation, index, found)
            case Op.PEEK:
                found = self.promises.get((*where, argument[0]))
                outcome = [0, NOTHING] if found is None else found
                self.complete(invocation, index, [0, some(outcome[1])] if found and found[0] == 0 else outcome)
            case Op.RESOLVE:
                self.complete(invocation, index, self.resolve_promise(*where, argument[0], argument[1]))
            case Op.APPROVAL:
                if argument[4]:
                    self._later(argument[4], lambda: self.decide(invocation, index, Decided(None, at_ms=self.now_ms())))
            case Op.RESOLVE_AWAKEABLE:
                other = self.invocations.get(argument[0][:ID_BYTES])
                if other is None:
                    return
                assert [argument[0][ID_BYTES:]] == (other.steps[argument[1]].argument or [b""]), "its secret"
                self.complete(other, argument[1], argument[2])
            case Op.ATTACH:
                other = self.invocations[argument[0]]
                task = asyncio.ensure_future(self._attach(other, invocation, index))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Op.CANCEL:
                self.cancel(self.invocations[argument[0]])

    def decide(self, invocation: Invocation, index: int, decided: Decided) -> None:
        """Somebody decides about an approval, or its deadline has passed."""
        self.complete(invocation, index, [0, pack_decided(decided)])

    async def _attach(self, other: Invocation, invocation: Invocation, index: int) -> None:
        await other.done.wait()
        assert other.outcome is not None
        self.complete(invocation, index, other.outcome)

    def _child(self, invocation: Invocation, index: int, argument: list[Any], *, spread: bool) -> InvocationId:
        service, handler, key = argument[:3]
        if handler == "main" and key is not None:
            return workflow_id(service, key)
        return child_id(invocation.id, index, service, key, spread=spread)

    def resolve_promise(self, service: str, key: str, name: str, outcome: list[Any]) -> list[Any]:
        if (service, key, name) in self.promises:
            return pack_outcome(Failure(409, f"promise {name!r} is resolved already", "PromiseResolved"))
        self.promises[service, key, name] = outcome
        for waiting, index in self.promise_waits.get((service, key, name), []):
            self.complete(self.invocations[waiting], index, outcome)
        return [0, b""]

    def _later(self, ms: int, act: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_later(ms / 1000 / self.speed, act)

    def _run_failed(self, invocation: Invocation, frame: RunFailed) -> None:
        if frame.index == len(invocation.steps):
            self._append(invocation, frame.index, Op.RUN, frame.key, [frame.name, 0, 0, ""], None)
            self._ack(invocation)
        if invocation.cancelled:
            invocation.cancelled = False
            self.complete(invocation, frame.index, pack_outcome(CANCELLED))
            return
        step = invocation.steps[frame.index]
        failures = step.argument[1] + 1
        initial, factor, interval, attempts, *_ = frame.retry or [100, 2000, 60_000, 0, 0, 0]
        if attempts and failures >= attempts:
            text = f"step {frame.name!r} failed {failures} times; the last error: {frame.failure[2]}"
            self.complete(invocation, frame.index, [1, 500, text, "RetriesExhausted"])
            return
        delay = frame.retry_after_ms or min(interval, initial * (factor / 1000) ** (failures - 1))
        due = self.now_ms() + int(delay / self.speed)
        argument = [frame.name, failures, due, frame.failure[2]]
        invocation.steps[frame.index] = step._replace(argument=argument)
        epoch = invocation.epoch
        self._later(int(delay), lambda: self._retry(invocation, frame.index, epoch, argument))

    def _retry(self, invocation: Invocation, index: int, epoch: int, argument: list[Any]) -> None:
        step = invocation.steps[index]
        if step.argument != argument or step.outcome is not None:
            return
        invocation.steps[index] = step._replace(argument=[argument[0], argument[1], 0, argument[3]])
        if invocation.status == "running":
            self.send(RetryRun(invocation.id, invocation.epoch, index))
        elif invocation.status == "suspended":
            self._begin(invocation)

    def complete(self, invocation: Invocation, index: int, outcome: list[Any]) -> None:
        """A step has its outcome. A second completion is ignored."""
        step = invocation.steps[index]
        if step.outcome is not None or step.abandoned or invocation.status == "completed":
            return
        invocation.order += 1
        invocation.steps[index] = step._replace(done=invocation.order, outcome=outcome)
        if invocation.status == "running":
            self.send(Completion(invocation.id, invocation.epoch, index, invocation.order, outcome))
        elif invocation.status == "suspended":
            self._begin(invocation)

    def _suspend(self, invocation: Invocation, steps: list[int]) -> None:
        def pending(index: int) -> bool:
            step = invocation.steps[index]
            return step.outcome is None and not (step.op == Op.RUN and len(step.argument) == 4 and not step.argument[2])

        if steps and all(pending(index) for index in steps):
            invocation.status = "suspended"
            invocation.waiting = steps
            invocation.suspended.set()
        else:
            self._begin(invocation)

    def _failed(self, invocation: Invocation, frame: Error) -> None:
        invocation.errors.append(Failure(*frame.failure[1:]))
        if frame.pause:
            invocation.status = "paused"
            invocation.paused.set()
            return
        invocation.status = "backing-off"
        self._later(100, lambda: self._begin(invocation) if invocation.status == "backing-off" else None)

    def _complete_invocation(self, invocation: Invocation, outcome: list[Any]) -> None:
        invocation.status = "completed"
        invocation.outcome = outcome
        invocation.done.set()
        if invocation.caller is not None:
            caller, index = invocation.caller
            self.complete(self.invocations[caller], index, outcome)


async def run_with_crashes(
    node: FakeNode,
    services: list[AnyService],
    invocation: Invocation,
    *,
    crashes: int,
    frames: int,
    seconds: float = 60,
) -> bytes:
    """Crash at random frames (of about `frames`), `crashes` times, each time with a new endpoint; returns the result."""
    left = crashes
    countdown = node.random.randrange(frames) + 1

    def crash_at(frame: Frame) -> str | None:
        nonlocal left, countdown
        countdown -= 1
        if left == 0 or countdown > 0:
            return None
        left -= 1
        countdown = node.random.randrange(frames) + 1
        return node.random.choice(["before", "after"])

    node.crash_at = crash_at
    deadline = time.monotonic() + seconds
    while not invocation.done.is_set():
        assert time.monotonic() < deadline, f"no result after {seconds} s; journal {invocation.journal()}"
        if node.link is None:
            node.connect(services)
        waits = [asyncio.ensure_future(event.wait()) for event in (invocation.done, node.crashed)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=max(0.1, deadline - time.monotonic()))
        for wait in waits:
            wait.cancel()
    return await node.result(invocation)


__all__ = ["FakeNode", "Invocation", "TerminalError", "run_with_crashes"]
