"""One attempt of a handler, as an SDK plays it: it replays the journal by step keys, runs ahead of acknowledgements,
and starts an effect only when everything before it is acknowledged.

It knows only what frames could tell it, and reports only what frames could carry.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack

from holdfast.sdk.ids import NO_INVOCATION, SECRET_BYTES, DeploymentId, InvocationId, child_id, derive, workflow_id
from holdfast.sdk.journal import (
    CANCELLED,
    Op,
    Step,
    pack_outcome,
    unpack_decided,
    unpack_step,
    unsome,
)
from holdfast.statemachine.commands import (
    AbandonStep,
    Command,
    Complete,
    FailAttempt,
    Invoke,
    Mode,
    RecordIntent,
    RecordRunFailure,
    RecordRunOutcome,
    RecordStep,
    Retry,
    SuspendAttempt,
)
from holdfast.statemachine.records import Invocation
from tests.statemachine.programs import NEVER, Body, Failed, pack_int

DP_1 = DeploymentId("dp_1")

RETENTION_MS = 3_600_000
CANCELLATION: list[Any] = pack_outcome(CANCELLED)


class World(Protocol):
    now_ms: int

    def send(self, attempt: Attempt, command: Command) -> None: ...

    def carry_out(self, attempt: Attempt, key: str, *, once: bool = False) -> bool:
        """A run's effect takes place. False: the process died during it."""

    def promise_awakeable(self, ident: InvocationId, index: int, value: int, secret: bytes) -> None:
        """Report the awakeable to the outside, which may complete it from now on."""

    def ask_people(self, ident: InvocationId, index: int, value: int, secret: bytes) -> None:
        """Report an approval to the outside, where people may decide this value from now on."""


@dataclass
class Request:
    """An operation that a program requests from its attempt."""

    key: str
    op: int
    argument: list[Any]
    kind: str = ""
    child: Invoke | None = None
    value: Any = None


Code = Generator[Request | list["Code"], Any, int]


class Task:
    def __init__(self, code: Code, done: Callable[[int | Failed], None]) -> None:
        self.code = code
        self.done = done


class Attempt:
    def __init__(
        self,
        world: World,
        record: Invocation,
        epoch: int,
        journal: list[bytes],
        *,
        cancelled: bool,
        partitions: int,
        secrets: bool = False,
    ) -> None:
        self.world = world
        self.id = record.id
        self.epoch = epoch
        self.key = record.key
        self.partitions = partitions
        self.steps = [unpack_step(raw) for raw in journal]
        self.indexes = {step.key: index for index, step in enumerate(self.steps)}
        self.length = self.acknowledged = len(journal)
        self.order = record.order
        self.cancelled = cancelled
        self.secrets = secrets  # Whether awakeables have some.
        self.is_over = False
        self.said_ms = self.heard_ms = 0
        self.blocked: dict[int, tuple[Task, Request]] = {}
        self.outcomes: dict[int, list[Any]] = {i: s.outcome for i, s in enumerate(self.steps) if s.outcome}
        self.failures = {i: s.argument[1] for i, s in enumerate(self.steps) if s.op == Op.RUN and len(s.argument) > 1}
        self.due = {i for i in self.failures if self.steps[i].argument[2] == 0}  # Runs that may be retried.
        self.idle: set[int] = set()  # Runs that wait for the order to retry. A repeated order counts once.
        self.intended: set[int] = set()  # Runs whose intent was journaled again.
        self.gated: list[tuple[int, Callable[[], None]]] = []

    def begin(self) -> None:
        _, payload = self.steps[0].outcome or [0, b""]
        body: Body = msgpack.unpackb(payload)
        self.resume(Task(self.program("", body), self.finish), None)

    def finish(self, result: int | Failed) -> None:
        outcome = result.outcome if isinstance(result, Failed) else [0, pack_int(result)]
        self.say(Complete(self.id, self.epoch, outcome, DP_1))
        self.is_over = True

    # -- the program ---------------------------------------------------------------------------------------------------

    def program(self, path: str, body: Body) -> Code:
        total = 0
        for number, op in enumerate(body):
            total += yield from self.operation(f"{path}/{number}", op)
        return total

    def operation(self, key: str, op: list[Any]) -> Code:
        match op:
            case ["run" | "once" | "flaky" as kind, *rest]:
                return int((yield Request(key, Op.RUN, [kind], kind, value=rest)) or b"0")
            case ["sleep", ms]:
                yield Request(key, Op.SLEEP, [ms])
            case ["abandon", ms]:
                yield Request(key, Op.SLEEP, [ms], "abandon")
            case ["awake", value]:
                return int((yield Request(key, Op.AWAKEABLE, [], value=value)))
            case ["approve", value]:
                asked = [f"{value}?", b"", [str(value), "never chosen"], None, 0, 300, False]
                payload = yield Request(key, Op.APPROVAL, asked, value=value)
                return int(unpack_decided(payload).choice or "0")
            case [name] if name == NEVER:
                yield Request(key, Op.AWAKEABLE, [])
            case ["call", child_key, mode, body]:
                return int((yield self.call(key, Op.CALL, "objects", child_key, mode, body)))
            case ["workflow", child_key, body]:
                return int((yield self.call(key, Op.CALL, "flows", child_key, Mode.WORKFLOW, body)))
            case ["send", child_key, body]:
                yield self.call(key, Op.SEND, "objects", child_key, Mode.EXCLUSIVE, body)
            case ["promise", name]:
                return int((yield Request(key, Op.PROMISE, [name])))
            case ["add", value]:
                before = unsome((yield Request(key + "get", Op.GET, ["sum"]))) or b"0"
                yield Request(key + "set", Op.SET, ["sum", pack_int(int(before) + value)])
            case ["log", sender, number]:
                seen = unsome((yield Request(key + "get", Op.GET, ["log"]))) or b""
                yield Request(key + "set", Op.SET, ["log", seen + f"{sender} {number}\n".encode()])
            case ["par", bodies]:
                results = yield [self.program(f"{key}.{branch}", body) for branch, body in enumerate(bodies)]
                for result in results:
                    if isinstance(result, Failed):
                        raise result
                return sum(results)
            case ["try", body]:
                try:
                    return (yield from self.program(key, body))
                except Failed as failed:
                    if failed.outcome == CANCELLATION:
                        raise
                    return 1000
            case ["fail", code]:
                raise Failed([1, code, "as it was told", "TerminalError"])
            case _:
                raise AssertionError(op)
        return 0

    def call(self, key: str, op: int, service: str, child_key: str | None, mode: int, body: Body) -> Request:
        argument: list[Any] = [service, "play", child_key, b"", {}, *([0] if op == Op.SEND else [])]
        child = Invoke(
            NO_INVOCATION, service, "play", child_key, mode, msgpack.packb(body), {}, 0, None, 0, RETENTION_MS
        )
        return Request(key, op, argument, child=child)

    # -- running it ----------------------------------------------------------------------------------------------------

    def resume(self, task: Task, outcome: list[Any] | None, results: list[Any] | None = None) -> None:
        """Continue with the result of the last wait, until the next wait."""
        while not self.is_over:
            try:
                if results is not None:
                    request = task.code.send(results)
                elif outcome is None or outcome[0] == 0:
                    request = task.code.send(None if outcome is None else outcome[1])
                else:
                    request = task.code.throw(Failed(outcome))
            except StopIteration as stop:
                task.done(stop.value)
                return
            except Failed as failed:
                task.done(failed)
                return
            results = None
            if isinstance(request, list):
                if request:
                    self.fork(task, request)
                    return
                results = []
                continue
            outcome = self.perform(task, request)
            if outcome is None:
                return

    def fork(self, parent: Task, codes: list[Code]) -> None:
        results: list[Any] = [None] * len(codes)

        def done(branch: int) -> Callable[[int | Failed], None]:
            def note(result: int | Failed) -> None:
                results[branch] = result
                if all(each is not None for each in results):
                    self.resume(parent, None, results)

            return note

        for branch, code in enumerate(codes):
            self.resume(Task(code, done(branch)), None)

    def perform(self, task: Task, request: Request) -> list[Any] | None:
        """The outcome, if it is known; otherwise the task resumes later."""
        index = self.indexes.get(request.key)
        if index is not None:
            return self.replay(task, request, index)
        if request.op == Op.RUN:
            self.when_acknowledged(self.length, lambda: self.begin_run(task, request))
            return None
        return self.record(task, request)

    def replay(self, task: Task, request: Request, index: int) -> list[Any] | None:
        step = self.steps[index]
        assert step.op == request.op, "the same code comes to the same steps"
        if request.kind == "abandon":
            if not step.abandoned:
                self.say(AbandonStep(self.id, self.epoch, index))
            return [0, b""]
        if request.op in (Op.SET, Op.SEND):
            return [0, b""]
        if index in self.outcomes:
            return self.outcomes[index]
        self.blocked[index] = (task, request)
        if request.op == Op.RUN:
            self.replay_run(index, request, step)
        elif request.op == Op.AWAKEABLE and request.value is not None:
            self.world.promise_awakeable(self.id, index, request.value, step.argument[0] if step.argument else b"")
        elif request.op == Op.APPROVAL:
            self.world.ask_people(self.id, index, request.value, step.argument[len(request.argument)])
        return None

    def replay_run(self, index: int, request: Request, step: Step) -> None:
        """A run with only an intent is in doubt. A failed run is retried as soon as it is due."""
        if len(step.argument) == 1:
            failure = [1, 500, "nobody knows", "InDoubt"]
            self.say(FailAttempt(self.id, self.epoch, failure, Retry(max_attempts=0), 0, 0, True))
            self.is_over = True
        elif index in self.due:
            self.run_again(index, request)
        else:
            self.idle.add(index)

    def record(self, task: Task, request: Request) -> list[Any] | None:
        index = self.take_index(request.key)
        row = None
        if request.child is not None:
            service, key, mode = request.child.service, request.child.key, request.child.mode
            if mode == Mode.WORKFLOW and key is not None:
                ident = workflow_id(service, key)
            else:
                ident = child_id(self.id, index, service, key, spread=request.op == Op.SEND)
            row = list(request.child._replace(id=ident))
        argument = request.argument
        if request.op == Op.AWAKEABLE and self.secrets:
            argument = [derive(SECRET_BYTES, b"secret", self.id, request.key.encode())]
        elif request.op == Op.APPROVAL:
            argument = [*argument, derive(SECRET_BYTES, b"secret", self.id, request.key.encode())]
        self.say(RecordStep(self.id, self.epoch, index, request.op, request.key, argument, None, DP_1, row))
        if request.kind == "abandon":
            self.say(AbandonStep(self.id, self.epoch, index))
            return [0, b""]
        if request.op in (Op.SET, Op.SEND):
            return [0, b""]
        self.blocked[index] = (task, request)
        if request.op == Op.APPROVAL:
            self.when_acknowledged(
                index + 1, lambda: self.world.ask_people(self.id, index, request.value, argument[-1])
            )
        if request.op == Op.AWAKEABLE and request.value is not None:
            secret = argument[0] if argument else b""
            self.when_acknowledged(
                index + 1, lambda: self.world.promise_awakeable(self.id, index, request.value, secret)
            )
        return None

    def take_index(self, key: str) -> int:
        index = self.length
        self.length += 1
        self.indexes[key] = index
        return index

    # -- runs ----------------------------------------------------------------------------------------------------------

    def begin_run(self, task: Task, request: Request) -> None:
        if self.cancelled:
            self.cancelled = False
            self.record_run(task, request, CANCELLATION)
        elif request.kind == "once":
            index = self.take_index(request.key)
            self.say(RecordIntent(self.id, self.epoch, index, request.key, "once", DP_1))
            self.blocked[index] = (task, request)
            self.when_acknowledged(index + 1, lambda: self.run_once(index, request))
        elif request.kind == "flaky" and request.value[0] > 0:
            index = self.take_index(request.key)
            self.blocked[index] = (task, request)
            self.fail_run(index, request)
        elif self.world.carry_out(self, request.key):
            self.record_run(task, request, [0, pack_int(request.value[-1])])

    def record_run(self, task: Task, request: Request, outcome: list[Any]) -> None:
        index = self.take_index(request.key)
        self.say(RecordStep(self.id, self.epoch, index, Op.RUN, request.key, request.argument, outcome, DP_1))
        self.resume(task, outcome)

    def run_once(self, index: int, request: Request) -> None:
        if self.world.carry_out(self, request.key, once=True):
            self.say(RecordRunOutcome(self.id, self.epoch, index, [0, pack_int(request.value[0])]))

    def run_again(self, index: int, request: Request) -> None:
        self.due.discard(index)
        self.idle.discard(index)
        if request.kind == "once" and index not in self.intended:
            # An operator decided that it had not happened. It may start once its new intent is journaled.
            self.intended.add(index)
            self.idle.add(index)
            self.say(RecordIntent(self.id, self.epoch, index, request.key, "once", DP_1))
        elif request.kind == "once":
            self.run_once(index, request)
        elif self.failures.get(index, 0) < request.value[0]:
            self.fail_run(index, request)
        elif self.world.carry_out(self, request.key):
            self.say(RecordRunOutcome(self.id, self.epoch, index, [0, pack_int(request.value[-1])]))

    def fail_run(self, index: int, request: Request) -> None:
        """The journal counts the failures; an attempt learns the count from there."""
        self.failures[index] = self.failures.get(index, 0) + 1
        self.idle.add(index)
        failure = [1, 500, "no luck", "RuntimeError"]
        retry = Retry(10, 2000, 100, request.value[1])
        self.say(RecordRunFailure(self.id, self.epoch, index, request.key, "flaky", failure, retry, 0, DP_1))

    # -- what frames say -----------------------------------------------------------------------------------------------

    def say(self, command: Command) -> None:
        if not self.is_over:
            self.world.send(self, command)

    def when_acknowledged(self, length: int, then: Callable[[], None]) -> None:
        self.gated.append((length, then))
        self.open_gates()

    def open_gates(self) -> None:
        while not self.is_over:
            offset = next((i for i, (length, _) in enumerate(self.gated) if length <= self.acknowledged), None)
            if offset is None:
                return
            self.gated.pop(offset)[1]()

    def on_acknowledge(self, length: int) -> None:
        self.acknowledged = max(self.acknowledged, length)
        self.open_gates()

    def on_completion(self, index: int, outcome: list[Any]) -> None:
        """A completion may arrive before the code reaches its step."""
        self.outcomes[index] = outcome
        if outcome == CANCELLATION:
            self.cancelled = False  # Noticed here, so no run notices it as well.
        waiting = self.blocked.pop(index, None)
        if waiting is not None and not self.is_over:
            self.resume(waiting[0], outcome)

    def on_retry(self, index: int) -> None:
        waiting = self.blocked.get(index)
        if waiting is None:
            self.due.add(index)
        elif not self.is_over and index in self.idle:
            self.run_again(index, waiting[1])

    def on_cancelled(self) -> None:
        self.cancelled = True

    def maybe_suspend(self) -> None:
        """Suspend if everything waits. A run whose intent is on its way does not count as waiting."""
        if self.intended & self.blocked.keys() or self.is_over or self.gated:
            return
        if self.blocked and self.acknowledged == self.length:
            self.say(SuspendAttempt(self.id, self.epoch, sorted(self.blocked)))
            self.is_over = True
