"""The machine of one attempt: it replays a journal, appends to it, and hands outcomes to the code in log order.

It is driven by frames and by the user's code, and talks through one function that takes frames; it knows no socket.
What makes replay land on the same path as the first run:

- A step is found by its key (`scopes`), so it does not matter in which order parallel branches reach their steps.
- Outcomes reach the code one at a time, in log order, and the code settles between two of them. So "which was first?"
  has the same answer in every attempt, also for plain `asyncio.wait`.
- An outcome is held back until the code has asked for every step that was journaled before it.
- A result that was made here (a RUN) takes its place in that order when its step is acknowledged. Only when nothing
  else can complete, the code goes on with it at once, and the acknowledgement is waited for by the next effect.

An attempt ends once: with an output, an error, or by being dropped (`end`). From then on it sends nothing, and whatever
its code still waits for raises `AttemptEnded`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from holdfast.sdk import protocol, scopes
from holdfast.sdk.errors import (
    AttemptEnded,
    BadPayload,
    MisusedContext,
    NonDeterminismError,
    TerminalError,
    from_failure,
    to_failure,
)
from holdfast.sdk.protocol import AWAITED, CANCELLED, Failure, Frame, Op, Step
from holdfast.sdk.waits import Wait, waits_only_for_steps

T = TypeVar("T")

logger = logging.getLogger("holdfast.sdk")

#: Turns of the loop without any sign of life of the code, after which it has reacted to an outcome. A level of gather,
#: TaskGroup or wait_for takes two turns, so this allows for nests of them between two steps.
QUIET_TURNS: Final = 6

#: For how long no function is started in an attempt that was asked back and cannot be handed back. Plain timeouts of the
#: code go on meanwhile.
PARKED_S: Final = 0.5

#: Those that the node completes as cancelled when a cancellation is waiting.
_NOTICES_CANCELLATION: Final = frozenset({Op.SLEEP, Op.CALL, Op.PROMISE, Op.AWAKEABLE, Op.ATTACH})

_PENDING: Final = 0
_DONE: Final = 1
_ABANDONED: Final = 2


class Event(NamedTuple):
    """An outcome on its way to the code. `order` is None for what was made here: it comes after all of the journal."""

    order: int | None
    index: int  # type: ignore[assignment]
    outcome: list[Any]
    operation: Operation[Any] | None = None  # whose it is, if it was made here


class Operation(Coroutine[Any, Any, T]):
    """A step that the code may wait for: `await` it, gather it, race it, or make it a task.

    It took its key and, except for `ctx.run`, entered the journal when it was made; awaiting it only waits. It may be
    awaited more than once. If a plain asyncio timeout or cancellation ends the waiting, the step is abandoned: it
    completes for nobody, now or in replay.
    """

    __slots__ = (
        "_iterator", "attempt", "code", "index", "key", "listeners", "load", "outcome", "sequence", "state", "waits",
    )  # fmt: skip

    def __init__(self, attempt: Attempt, code: int, key: str, load: Callable[[bytes], T]) -> None:
        self.attempt = attempt
        self.code = code
        self.key = key
        self.load = load
        self.index = -1
        self.state = _PENDING
        self.outcome: list[Any] | None = None
        self.sequence = 0  # Its place among everything delivered in this attempt: equal in every attempt.
        self.waits: list[Wait] | None = None
        self.listeners: list[Callable[[], None]] | None = None
        self._iterator: Generator[Any, Any, T] | None = None

    # -- waiting

    def __await__(self) -> Generator[Any, Any, T]:
        if self.state != _DONE:
            yield from self._wait()
        return self.result()

    def _wait(self) -> Generator[Any, Any, None]:
        attempt = self.attempt
        attempt.check_here()
        if self.state == _PENDING:
            attempt.want(self)
            if self.state == _DONE:
                return
        elif self.index < 0 or self.outcome is not None:
            raise MisusedContext(f"step {self.key!r} was abandoned: the code stopped waiting for it before")
        wait = attempt.wait(self)
        if self.waits is None:
            self.waits = [wait]
        else:
            self.waits.append(wait)
        try:
            yield from wait
        except asyncio.CancelledError:
            if not attempt.ended:
                if self.waits is not None:
                    self.waits.remove(wait)
                if not self.waits and not self.listeners:
                    self.abandon()
            raise
        finally:
            attempt.waits.discard(wait)

    def start(self) -> None:
        """Make it progress without being awaited, for combinators. All but a RUN do so by themselves."""

    def abandon(self) -> None:
        """The code stopped waiting: never deliver it, also in replay."""
        attempt = self.attempt
        if attempt.ended:
            return
        if self.state == _PENDING:
            attempt.unsettled -= 1
        elif self.state == _ABANDONED:
            self.outcome = []  # Marks a second wait as an error, in replay as it was live.
            return
        self.state = _ABANDONED
        self.outcome = []
        attempt.abandon(self)

    # -- outcome

    def done(self) -> bool:
        """Whether it has its outcome. Code that asks is deterministic only at the same place in every attempt."""
        return self.state == _DONE

    def settle(self, outcome: list[Any]) -> bool:
        """Take the outcome; whether somebody waited for it."""
        self.state = _DONE
        self.outcome = outcome
        woken = False
        if self.waits:
            for wait in self.waits:
                if not wait.done():
                    wait.set_result(None)
                    woken = True
            self.waits = None
        if self.listeners:
            for listener in self.listeners:
                listener()
            self.listeners = None
            woken = True
        return woken

    def result(self) -> T:
        """Its value; raises if it failed. Call it only when it is done."""
        outcome = self.outcome
        assert outcome, "an operation has a result when it is done"
        if outcome[0] == 0:
            return self.load(outcome[1])
        raise from_failure(Failure(*outcome[1:]))

    def listen(self, listener: Callable[[], None]) -> None:
        if self.listeners is None:
            self.listeners = [listener]
        else:
            self.listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        if self.listeners and listener in self.listeners:
            self.listeners.remove(listener)

    def is_awaited(self) -> bool:
        return bool(self.waits or self.listeners)

    def retry(self) -> None:
        """The node says that the backoff of a failed RUN is over."""

    # -- a coroutine for create_task and TaskGroup

    def send(self, value: Any) -> Any:
        if self._iterator is None:
            self._iterator = self.__await__()
        return self._iterator.send(value)

    def throw(self, *details: Any) -> Any:
        if self._iterator is None:
            self._iterator = self.__await__()
        return self._iterator.throw(*details)

    def close(self) -> None:
        if self._iterator is not None:
            self._iterator.close()

    def __repr__(self) -> str:
        state = ("pending", "done", "abandoned")[self.state]
        return f"<{protocol.OP_NAMES[self.code]} {self.key!r} {state}>"


#: What an attempt runs: the handler with its context and input. Returns the payload of the output.
Code: TypeAlias = Callable[["Attempt"], Coroutine[Any, Any, bytes]]


class Attempt:
    """One run of a handler, from START to its end."""

    def __init__(
        self,
        start: protocol.Start,
        *,
        send: Callable[[Frame], None],
        loop: asyncio.AbstractEventLoop,
        ended: Callable[[Attempt], None],
        eager: bool = False,
    ) -> None:
        """`eager`: there is no live stream, so nothing is acknowledged, and it is handed back as soon as it waits."""
        self.id = start.invocation
        self.epoch = start.epoch
        self.start = start
        self.seed = start.seed
        self.loop = loop
        self.send = send
        self.on_ended = ended
        self.eager = eager
        self.is_live = not eager
        self.ended = False
        self.cancelled = start.cancelled

        self.steps: list[Step] = []
        self.keys: dict[str, int] = {}  # Steps of START that the code has not asked for yet.
        self.matched = bytearray()
        self.low = 0  # The first step of START that the code has not asked for.
        self.length = 0  # Steps journaled or sent.
        self.acked = 0
        self.explicit: set[str] = set()

        self.open: dict[int, Operation[Any]] = {}  # Operations whose outcome is still to come, by index.
        self.unsettled = 0  # Operations made and not yet delivered; more than `open`: a RUN that has not begun.
        self.events: deque[Event] = deque()
        self.unacked: deque[Event] = deque()  # Results made here whose place the ack will tell.
        self.ack_waits: deque[tuple[int, Wait]] = deque()
        self.delivered = 0
        self.settling = False
        self.quiet = 0
        self.seen = 0
        self.pumping = False

        self.tasks: set[asyncio.Task[Any]] = set()
        self.waits: set[Wait] = set()
        self.activity = 0  # Counts signs of life of the code.
        self.touched = True  # For the sweep that looks for attempts that only wait.
        self.check: asyncio.Handle | None = None  # The next look whether it can be handed back.
        self.functions = 0  # Of runs, that run now.
        self.starts_runs = True  # False: it was asked back, so the next effect is for its next attempt,
        self.parked: list[Wait] = []  # and these runs wait for that.
        self.input = b""
        self.headers: dict[str, str] = {}
        self._load(start.journal)

    # -- beginning

    def _load(self, rows: Iterable[bytes]) -> None:
        """Steps of the journal, in order. Only before the code begins."""
        for row in rows:
            try:
                step = protocol.unpack_step(row)
                outcome = step.outcome
                if outcome is not None:
                    protocol.unpack_outcome(outcome)
            except Exception as error:
                raise protocol.ProtocolError(f"step {len(self.steps)} of a journal is malformed: {error}") from None
            self.keys[step.key] = len(self.steps)
            self.steps.append(step)

    def add_journal(self, rows: Iterable[bytes]) -> None:
        self._load(rows)

    def begin(self, code: Code, *, name: str) -> None:
        """The journal is complete: run the code."""
        steps = self.steps
        if not steps or steps[0].op != Op.INPUT or steps[0].outcome is None:
            raise protocol.ProtocolError("a journal begins with the input")
        self.length = self.acked = len(steps)
        self.matched = bytearray(len(steps))
        self.matched[0] = 1
        self.low = 1
        del self.keys[steps[0].key]
        self.headers = steps[0].argument[0] if steps[0].argument else {}
        self.input = steps[0].outcome[1] if steps[0].outcome[0] == 0 else b""
        events = [
            Event(step.done, index, step.outcome)
            for index, step in enumerate(steps)
            if step.outcome is not None and index and not step.abandoned and _is_delivered(step)
        ]
        events.sort(key=lambda event: event.order or 0)
        self.events.extend(events)
        scopes.install_factory(self.loop)
        self.adopt(scopes.unscoped_task(self.loop, self._main(code), name=name))

    async def _main(self, code: Code) -> None:
        """The root task: runs the code and says how it ended."""
        scopes.current.set(scopes.Scope(self, ""))
        try:
            payload = await code(self)
        except AttemptEnded as ended:
            _forget_frames(ended)
            return
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            if not self.ended:
                self._failed(error)
            return
        if not self.ended and self._has_replayed("returns"):
            self.send(protocol.Output(self.id, self.epoch, [0, payload]))
            self.end()

    def _failed(self, error: BaseException) -> None:
        terminal = find_terminal(error)
        if terminal is not None:
            if self._has_replayed(f"fails: {terminal}"):
                self.send(protocol.Output(self.id, self.epoch, [1, *to_failure(terminal)]))
                self.end()
            return
        logger.warning("%s: an attempt failed", protocol.format_id(self.id), exc_info=error)
        self.fail(error, pause=isinstance(error, BadPayload))

    def fail(self, error: BaseException, *, pause: bool) -> None:
        """This attempt cannot go on: say so and end it. The code is not asked, so it cannot catch this."""
        if self.ended:
            return
        retry_after = getattr(error, "retry_after", 0)
        seconds = retry_after.total_seconds() if hasattr(retry_after, "total_seconds") else retry_after
        after_ms = round(seconds * 1000) if isinstance(seconds, int | float) and 0 < seconds < 1e11 else 0
        self.send(protocol.Error(self.id, self.epoch, [1, *to_failure(error)], after_ms, pause))
        self.end()

    def _has_replayed(self, found: str) -> bool:
        """Whether the code asked for all that the journal has of its root task; if not, the attempt fails."""
        for key, index in self.keys.items():
            if ":" not in key:
                self.fail_nondeterministic(index, f"the handler {found}")
                return False
        return True

    # -- steps, from the code

    def check_here(self) -> scopes.Scope:
        """The scope of the code that uses the context now."""
        if self.ended:
            raise AttemptEnded
        scope = scopes.current_scope()
        if scope is None or scope.owner is not self:
            raise MisusedContext(_misuse(scope))
        return scope

    def next_key(self, name: str) -> str:
        return self.check_here().key(name)

    def explicit_key(self, key: str) -> str:
        self.check_here()
        if key in self.explicit:
            raise ValueError(f"key {key!r} was used before in this invocation: an explicit key names one step")
        self.explicit.add(key)
        return "=" + key

    def find(self, key: str, code: int, name: list[Any]) -> int:
        """The index of the journal's step under this key, or -1. `name` is how its argument begins."""
        self.activity += 1
        index = self.keys.pop(key, -1) if self.keys else -1
        if index < 0:
            return -1
        step = self.steps[index]
        if step.op != code or step.argument[: len(name)] != name:
            self.keys[key] = index
            self.fail_nondeterministic(index, describe(code, name, key))
            raise AttemptEnded
        self.matched[index] = 1
        if index == self.low:
            matched, low = self.matched, index + 1
            while low < len(matched) and matched[low]:
                low += 1
            self.low = low
            if self.events:
                self.pump_soon()
        return index

    def check_new(self, code: int, name: list[Any], key: str, *, others: int) -> None:
        """A step that the journal does not have. `others`: operations under way beside it.

        If no other task and no other operation is there that could have made what the journal still holds, then this
        code did not write that journal.
        """
        if self.keys and others == 0 and len(self.tasks) == 1:
            self.fail_nondeterministic(min(self.keys.values()), describe(code, name, key))
            raise AttemptEnded

    def fail_nondeterministic(self, index: int, found: str) -> None:
        step = self.steps[index]
        expected = describe(step.op, step.argument, step.key) + f", step {index}"
        message = "the code does not do what it did before: it must be the same in every attempt"
        self.fail(NonDeterminismError(message, expected=expected, found=found), pause=True)

    def journal(self, code: int, key: str, argument: list[Any], outcome: list[Any] | None) -> int:
        """Append a step; its index."""
        index = self.length
        self.length = index + 1
        self.touched = True
        self.send(protocol.StepFrame(self.id, self.epoch, index, code, key, argument, outcome))
        return index

    def note(self, code: int, key: str, argument: list[Any], checked: int = 1) -> tuple[int, bool]:
        """A step that nobody waits for (SET, SEND, ...): journaled unless it is there. Its index; whether it is new."""
        index = self.find(key, code, argument[:checked])
        if index >= 0:
            return index, False
        self.check_new(code, argument, key, others=self.unsettled)
        return self.journal(code, key, argument, None), True

    def awaited(
        self, code: int, key: str, argument: list[Any], load: Callable[[bytes], T], *, checked: int = 1
    ) -> Operation[T]:
        """A step whose outcome comes from the node, journaled now. The first `checked` arguments must replay equal."""
        operation: Operation[T] = Operation(self, code, key, load)
        self.open_step(operation, argument, checked)
        return operation

    def open_step(self, operation: Operation[Any], argument: list[Any], checked: int) -> None:
        code, key = operation.code, operation.key
        index = self.find(key, code, argument[:checked])
        if index >= 0:
            self.replay_step(operation, index)
            return
        self.check_new(code, argument, key, others=self.unsettled)
        operation.index = self.journal(code, key, argument, None)
        self.open[operation.index] = operation
        self.unsettled += 1
        if code in _NOTICES_CANCELLATION:
            self.cancelled = False

    def replay_step(self, operation: Operation[Any], index: int) -> None:
        """`operation` was journaled by an earlier attempt as step `index`, which was just found."""
        step = self.steps[index]
        operation.index = index
        if step.abandoned:
            operation.state = _ABANDONED
        elif step.outcome is not None and not _is_delivered(step):
            self.delivered += 1
            operation.sequence = self.delivered
            operation.settle(step.outcome)
        else:
            self.open[index] = operation
            self.unsettled += 1
            if self.events:
                self.pump_soon()

    def given(self, code: int, key: str, argument: list[Any], draw: Callable[[], bytes]) -> list[Any]:
        """A step whose outcome is drawn here when it is new (VALUE, GET from eager state); the outcome."""
        index = self.find(key, code, argument[:1])
        if index < 0:
            self.check_new(code, argument, key, others=self.unsettled)
            drawn: list[Any] = [0, draw()]
            self.journal(code, key, argument, drawn)
            return drawn
        outcome = self.steps[index].outcome
        if outcome is None:
            self.fail_nondeterministic(index, describe(code, argument, key))
            raise AttemptEnded
        return outcome

    def abandon(self, operation: Operation[Any]) -> None:
        """Nobody waits for this operation any more."""
        if operation.index >= 0:
            self.open.pop(operation.index, None)
            self.send(protocol.Abandon(self.id, self.epoch, operation.index))

    def take_cancellation(self) -> bool:
        """Whether the next RUN must fail instead of running; told once."""
        found, self.cancelled = self.cancelled, False
        return found

    # -- results made here

    def is_alone(self) -> bool:
        """Nothing else can complete and no other task can see the order: a result may be used before its ack."""
        return len(self.tasks) == 1 and not self.open and not self.events and not self.keys and not self.unacked

    def result_sent(self, operation: Operation[Any], outcome: list[Any]) -> None:
        """The outcome of a RUN was sent with its step: it is delivered in its place, which the ack tells."""
        event = Event(None, operation.index, outcome, operation)
        if self.is_live and (self.open or self.keys or self.unacked):
            self.unacked.append(event)
        else:
            self.events.append(event)
            self.pump_soon()

    def acknowledged(self) -> Wait | None:
        """What to wait for before an effect may start: all steps so far are durable. None: they are."""
        if self.acked >= self.length:
            return None
        wait = self.wait(None)
        self.ack_waits.append((self.length, wait))
        return wait

    async def park(self) -> None:
        """Wait for the end of this attempt, instead of beginning an effect in it; or until nobody expects that any more."""
        wait = self.wait(None)
        if not self.parked:
            self.loop.call_later(PARKED_S, self.unpark)
        self.parked.append(wait)
        try:
            await wait
        finally:
            self.waits.discard(wait)

    def unpark(self) -> None:
        self.starts_runs = True
        parked, self.parked = self.parked, []
        for wait in parked:
            if not wait.done():
                wait.set_result(None)

    # -- frames, from the node

    def on_ack(self, length: int) -> None:
        if length <= self.acked:
            return
        self.acked = min(length, self.length)
        self.touched = True
        while self.ack_waits and self.ack_waits[0][0] <= self.acked:
            wait = self.ack_waits.popleft()[1]
            if not wait.done():
                wait.set_result(None)
        if self.unacked:
            while self.unacked and self.unacked[0].index < self.acked:
                self.events.append(self.unacked.popleft())
            self.pump()

    def on_completion(self, index: int, order: int, outcome: list[Any]) -> None:
        if self.cancelled and outcome[0] == 1 and outcome[3] == CANCELLED.kind:
            # CANCELLED crossed a step of ours, and the node let that step notice it. Once is enough: what the code does
            # about it must not be cancelled too.
            self.cancelled = False
        self.events.append(Event(order, index, outcome))
        self.touched = True
        self.pump()

    def on_retry(self, index: int) -> None:
        operation = self.open.get(index)
        if operation is not None:
            self.touched = True
            operation.retry()

    def on_cancelled(self) -> None:
        self.cancelled = True

    def on_suspend(self) -> None:
        """It is wanted back: functions that run may end, and no other begins."""
        self.starts_runs = not self.is_live
        self.hurry()

    def hurry(self) -> None:
        """Hand it back as soon as it only waits."""
        self.eager = True
        self.check_soon()

    # -- outcomes, to the code

    def want(self, operation: Operation[Any]) -> None:
        """The code is about to wait for this operation; perhaps it need not."""
        self.activity += 1
        events = self.events
        if not events:
            return
        if self.settling or len(self.tasks) > 1:
            self.pump_soon()
            return
        # There is one task, and it is here: nobody else can tell in how many turns outcomes arrive.
        while events and self._may_deliver(events[0]):
            if self._deliver(events.popleft()) is operation:
                return

    def _may_deliver(self, event: Event) -> bool:
        """Not before the code asked for everything that was journaled earlier."""
        low = self.low
        if low >= len(self.steps):
            return True
        return event.order is not None and self.steps[low].made > event.order

    def _deliver(self, event: Event) -> Operation[Any] | None:
        operation = event.operation or self.open.pop(event.index, None)
        if operation is None or operation.state != _PENDING:  # Abandoned in the meantime.
            return None
        self.delivered += 1
        self.unsettled -= 1
        self.touched = True
        operation.sequence = self.delivered
        if operation.settle(event.outcome):
            self.settling = True
            self.quiet = 0
            self.seen = self.activity
            self.loop.call_soon(self._settle)
        return operation

    def pump_soon(self) -> None:
        if not self.pumping:
            self.pumping = True
            self.loop.call_soon(self.pump)

    def pump(self) -> None:
        """Deliver the next outcome, unless the code still reacts to the last one."""
        self.pumping = False
        while self.events and not self.settling and not self.ended and self._may_deliver(self.events[0]):
            self._deliver(self.events.popleft())

    def _settle(self) -> None:
        if self.activity != self.seen:
            self.seen = self.activity
            self.quiet = 0
        self.quiet += 1
        if len(self.tasks) <= 1 or self.quiet > QUIET_TURNS:
            self.settling = False
            self.pump()
        else:
            self.loop.call_soon(self._settle)

    # -- waiting

    def wait(self, operation: Operation[Any] | None) -> Wait:
        """A future that the end of the attempt ends; None: for something that is not a step (an ack, a combinator).

        Who waits for it takes it out of `waits` afterwards.
        """
        if self.ended:
            raise AttemptEnded
        self.activity += 1
        wait = Wait(loop=self.loop)
        wait.never = operation is not None and operation.state == _ABANDONED
        self.waits.add(wait)
        if self.eager:
            self.check_soon()
        return wait

    def check_soon(self) -> None:
        """Hand the attempt back as soon as it only waits."""
        if self.ended or (self.check is not None and not isinstance(self.check, asyncio.TimerHandle)):
            return
        if self.check is not None:
            self.check.cancel()
        self.check = self.loop.call_soon(self._check, self.activity, 0, 0.005)

    def _check(self, seen: int, quiet: int, pause: float) -> None:
        self.check = None
        if self.ended:
            return
        if self.activity != seen or self.settling:
            self.check = self.loop.call_soon(self._check, self.activity, 0, 0.005)
        elif quiet < QUIET_TURNS:
            self.check = self.loop.call_soon(self._check, seen, quiet + 1, pause)
        elif not self.maybe_suspend():
            if self.parked and not self.functions and self.acked >= self.length:
                self.unpark()  # It waits for something of its own that is not a step, so it is not to be had.
            # It waits for something of its own, such as a function or a plain timer. Nobody tells us when that ends.
            self.check = self.loop.call_later(pause, self._check, seen, QUIET_TURNS, min(pause * 2, 0.5))

    def maybe_suspend(self) -> bool:
        """Hand the attempt back if all of it only waits for steps; whether it did."""
        if self.ended or self.settling or not waits_only_for_steps(self.tasks):
            return False
        needs_ack = bool(self.unacked) or any(not wait.done() for _, wait in self.ack_waits)
        if needs_ack and self.is_live:
            return False
        if self.events and not self.parked and not self._may_deliver(self.events[0]):
            self.fail_nondeterministic(self.low, "nothing: it waits, and did not ask for this step")
            return True
        if self.events and self._may_deliver(self.events[0]):
            return False
        steps = sorted(index for index, operation in self.open.items() if operation.is_awaited())
        if needs_ack or self.parked:
            steps = []
        elif not steps:
            return False
        self.send(protocol.Waiting(self.id, self.epoch, steps))
        self.end()
        return True

    # -- tasks and the end

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """A task of the code: it is counted, and it ends with the attempt."""
        self.activity += 1
        self.tasks.add(task)
        task.add_done_callback(self._task_done)
        if self.ended:
            task.cancel()

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self.activity += 1
        self.tasks.discard(task)
        if self.ended and not task.cancelled():
            error = task.exception()  # Nobody else will look at it.
            if isinstance(error, AttemptEnded):
                _forget_frames(error)

    def end(self) -> None:
        """Drop everything: no frame leaves after this, and the code is led out by `AttemptEnded`."""
        if self.ended:
            return
        self.ended = True
        self.on_ended(self)
        for wait in list(self.waits):
            if not wait.done():
                wait.set_exception(AttemptEnded())
                wait.exception()
        for held in (self.open, self.events, self.unacked, self.ack_waits, self.parked):
            held.clear()  # Operations know their attempt: without this, only the collector would free them.
        if self.tasks:
            self.loop.call_soon(self._cancel_tasks, 0)

    def _cancel_tasks(self, turn: int) -> None:
        """What does not wait for steps is cancelled, after the others had a few turns to leave by themselves."""
        if not self.tasks:
            return
        if turn < QUIET_TURNS:
            self.loop.call_soon(self._cancel_tasks, turn + 1)
            return
        for task in list(self.tasks):
            task.cancel()
        if turn < QUIET_TURNS + 10:
            self.loop.call_later(1.0, self._cancel_tasks, turn + 1)
        else:
            logger.error(
                "%s: %d tasks of an ended attempt do not let themselves be cancelled: %r",
                protocol.format_id(self.id), len(self.tasks), next(iter(self.tasks)),
            )  # fmt: skip

    @property
    def replaying(self) -> bool:
        """Whether the code still walks where an earlier attempt has been."""
        return bool(self.keys) or bool(self.events and self.events[0].order is not None and self.low < len(self.steps))


def _forget_frames(ended: AttemptEnded) -> None:
    """The future that raised it is held by the frames of its traceback: a circle that would wait for the collector."""
    ended.__traceback__ = None


def _is_delivered(step: Step) -> bool:
    """Whether the outcome of a step reaches the code in its turn, rather than with the call that made it."""
    if step.op in (Op.GET, Op.KEYS):
        return step.done != step.made  # From eager state, it was there when it was asked for.
    return step.op == Op.RUN or step.op in AWAITED


def find_terminal(error: BaseException) -> TerminalError | None:
    """The error that fails an invocation for good; a group counts if nothing in it could be tried again."""
    if isinstance(error, TerminalError):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [find_terminal(each) for each in error.exceptions]
        if all(found):
            return found[0]
    return None


def describe(code: int, argument: list[Any], key: str) -> str:
    """A step for people: what it does, of which name, under which key."""
    shown = [part for part in argument[:3] if isinstance(part, str)]
    return f"{protocol.OP_NAMES.get(code, code)} {'/'.join(shown)!r} (key {key!r})"


def _misuse(scope: scopes.Scope | None) -> str:
    if scope is not None:
        return "this context belongs to another invocation"
    return (
        "a context works only in its handler and the tasks of it: not inside a function given to ctx.run, "
        "not in another thread, and not after the handler returned"
    )
