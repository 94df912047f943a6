"""A RUN: the step that executes a function of the user and journals its result.

The function runs in the task that awaits the operation, so a step costs no task of its own. It starts only when every
earlier step is acknowledged, so a further effect never overtakes the record of an earlier one. The `await` returns when
the step itself is acknowledged, so the code never overtakes the record either, unless the step may run ahead. A failure
goes to the node, which counts it, and decides when to run the step again or to give up; so no crash resets the count.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Executor
from types import FunctionType
from typing import Any, Final, TypeVar

from holdfast.sdk import ids as wire_ids
from holdfast.sdk import scopes, timers, traces, tracing
from holdfast.sdk.attempt import Attempt, Operation
from holdfast.sdk.attempt.operation import DONE, PENDING
from holdfast.sdk.errors import (
    AttemptEnded,
    BadPayload,
    MisusedContext,
    RunAgain,
    TerminalError,
    exit_raised,
    find_terminal,
    from_failure,
    is_from_terminal,
    never_works,
    retry_after_ms,
    to_failure,
)
from holdfast.sdk.frames import Intent, RunDone, RunFailed
from holdfast.sdk.ids import InvocationId, format_id
from holdfast.sdk.journal import CANCELLED, PAYLOAD_BYTES_MAX, Op, Outcome, Success, pack_outcome
from holdfast.sdk.policy import RetryPolicy
from holdfast.sdk.serde import UNTYPED, JsonSerde, Serde

T = TypeVar("T")

logger = logging.getLogger("holdfast.sdk")

_RUN: Final = Op.RUN
_COROUTINE: Final = inspect.CO_COROUTINE
_SCALARS: Final = frozenset({str, int, float, bool, type(None)})  # equal after a round trip through JSON


class CurrentStep:
    """The step whose function is running, as `current_step()` gives it."""

    __slots__ = ("_attempt", "_invocation", "key", "name", "number")

    def __init__(
        self, invocation: InvocationId, name: str, key: str, number: int, attempt: Attempt | None = None
    ) -> None:
        self._attempt = attempt
        self._invocation = invocation
        self.name = name
        self.key = key
        self.number = number
        """The number of this try of the function in this attempt, from 1."""

    @property
    def effect_key(self) -> str:
        """The same for every try of this step, across crashes and restarts: pass it to the provider as the idempotency
        key."""
        return wire_ids.effect_key(self._invocation, self.key)

    @property
    def invocation_id(self) -> str:
        return format_id(self._invocation)

    @property
    def traceparent(self) -> str | None:
        """The header with which a request of this step belongs to its span. None: the invocation is not traced. Libraries that
        OpenTelemetry instruments send it by themselves."""
        return tracing.traceparent_of(self._attempt, self.key) if self._attempt is not None else None


_step: contextvars.ContextVar[CurrentStep | None] = contextvars.ContextVar("holdfast_step", default=None)


def running_step() -> tuple[CurrentStep | None, Attempt | None]:
    """The step whose function is running, and its attempt."""
    step = _step.get()
    return step, step._attempt if step is not None else None


def current_step() -> CurrentStep:
    """The step that is running, for use inside a function given to `ctx.run`::

    def charge(order: Order) -> Receipt:
        return stripe.charge(order.amount, idempotency_key=current_step().effect_key)
    """
    step = _step.get()
    if step is None:
        raise MisusedContext("current_step() works only inside a function given to ctx.run")
    return step


class RunOperation(Operation[T]):
    """`ctx.run(...)`: begins when it is awaited, gathered or raced."""

    attempt: Attempt

    __slots__ = (
        "arguments", "at_most_once", "began_ms", "driven", "due", "executor", "function", "interrupted", "made_at", "name",
        "policy", "reconcile", "retrying", "run_ahead", "running", "serde", "tries",
    )  # fmt: skip

    def __init__(
        self,
        attempt: Attempt,
        key: str,
        *,
        name: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        serde: Serde[T],
        policy: RetryPolicy | None,
        at_most_once: bool,
        reconcile: Callable[[str], Any] | None,
        executor: Executor,
        run_ahead: bool,
    ) -> None:
        super().__init__(attempt, _RUN, key, serde.load)
        self.name = name
        self.function = function
        self.arguments = arguments
        self.serde = serde
        self.policy = policy
        self.at_most_once = at_most_once
        self.reconcile = reconcile
        self.executor = executor
        self.run_ahead = run_ahead
        self.driven = False
        self.retrying = False
        self.due: asyncio.Future[None] | None = None
        self.running: asyncio.Task[Any] | None = None  # The task of its function, if it can be interrupted,
        self.interrupted = False  # and whether it was interrupted.
        self.tries = 0
        self.began_ms = 0  # When the last try of its function began, for people; 0: not in this attempt.
        caller = sys._getframe(2)  # the caller of ctx.run
        self.made_at = (caller.f_code.co_filename, caller.f_lineno)
        index = attempt.find(key, _RUN, [name])
        if index >= 0:
            attempt.replay_step(self, index)
        else:
            attempt.unsettled += 1

    def __del__(self) -> None:
        if self.state == PENDING and not self.driven and self.index < 0 and not self.attempt.ended:
            self.attempt.unsettled -= 1
            at = "{}:{}".format(*self.made_at)
            timers.warn_once(
                "%s: ctx.run(%r, ...) at %s was never awaited, so its function did not run",
                self.attempt.name, self.name, at, at=at,
            )  # fmt: skip

    def __await__(self) -> Generator[Any, Any, T]:
        if self.state != DONE:
            if self.state == PENDING and not self.driven and not self._has_outcome():
                self.driven = True
                yield from self._drive().__await__()
            else:
                yield from self._wait()
        return self.result()

    def _has_outcome(self) -> bool:
        """Whether the journal has its outcome, which has not been delivered yet."""
        return 0 <= self.index < len(self.attempt.steps) and self.attempt.steps[self.index].outcome is not None

    def start(self) -> None:
        if self.state == PENDING and not self.driven and not self._has_outcome():
            self.driven = True
            attempt = self.attempt
            attempt.adopt(scopes.unscoped_task(attempt.loop, self._drive_alone(), name=f"step {self.name}"))

    async def _drive_alone(self) -> None:
        # The combinator that started it looks at the operation, not at this task.
        scopes.begin(scopes.Scope(self.attempt, ""))
        await self._drive()

    def retry(self) -> None:
        self.retrying = True
        if self.due is not None and not self.due.done():
            self.due.set_result(None)

    async def _drive(self) -> None:
        """Drive the step to its outcome. It is settled afterwards."""
        attempt = self.attempt
        attempt.check_here()
        try:
            outcome = await self._first_outcome()
            if outcome is None:
                return  # It came from the node.
            if self.index >= 0:
                attempt.send(RunDone(attempt.id, attempt.epoch, self.index, pack_outcome(outcome), self.began_ms))
                await self._settled()
                return
            at_once = self.run_ahead and attempt.is_alone()
            self.index = attempt.journal(_RUN, self.key, [self.name], outcome, began_ms=self.began_ms)
            if at_once:
                attempt.delivered += 1
                attempt.unsettled -= 1
                self.sequence = attempt.delivered
                self.settle(outcome)
            else:
                attempt.result_sent(self, outcome, ahead=self.run_ahead)
                await self._settled()
        except asyncio.CancelledError:
            if not attempt.ended:
                self._abandon_run()
            raise

    async def _first_outcome(self) -> Outcome | None:
        """The outcome of the function or of its `reconcile` hook. None: the node settled the step."""
        attempt = self.attempt
        if self.index >= 0:
            argument = attempt.steps[self.index].argument
            if len(argument) < 4:
                # Without at_most_once this step was about to be abandoned when its attempt was lost: it runs.
                decided = await self._decide() if self.at_most_once else None
                if decided is not None:
                    return decided
            else:
                if argument[2] > attempt.start.now_ms and not self.retrying:
                    await self._backoff()
                if self.at_most_once and self.state == PENDING:
                    await self._intend_again()
                if self.state != PENDING:
                    return None
        else:
            attempt.check_new(_RUN, [self.name], self.key, others=attempt.unsettled - 1)
        while True:
            wait = attempt.acknowledged()
            if wait is not None:
                await self._hold(wait)
            if not attempt.starts_runs:
                await attempt.park()
                continue
            if self.state != PENDING:
                return None  # Cancelled by the node while it was about to run again.
            if self.index < 0 and attempt.is_full():
                return attempt.refuse_run(self.key)
            if attempt.take_cancellation() or (attempt.noticed is not None and attempt.was_swallowed()):
                return CANCELLED
            if self.at_most_once and self.index < 0:
                await self._intend()
            outcome = await self._execute()
            if outcome is not None:
                return outcome
            await self._backoff()
            if self.state != PENDING:
                return None

    async def _intend(self) -> None:
        attempt = self.attempt
        if not attempt.is_live:
            attempt.fail(
                TerminalError(
                    f"step {self.name!r} has effect='at_most_once', which needs a stream to the endpoint",
                    code=501,
                ),
                pause=True,
            )
        attempt.check_here()
        self.index = attempt.length
        attempt.length += 1
        attempt.open[self.index] = self
        attempt.send(Intent(attempt.id, attempt.epoch, self.index, key=self.key, name=self.name))
        wait = attempt.acknowledged()
        if wait is not None:
            await self._hold(wait)

    async def _intend_again(self) -> None:
        """An operator decided that the effect had not happened. Before the function runs, journal that the effect may
        happen."""
        attempt = self.attempt
        attempt.check_here()
        self.retrying = False
        attempt.send(Intent(attempt.id, attempt.epoch, self.index, key=self.key, name=self.name))
        await self._backoff()

    async def _decide(self) -> Outcome | None:
        """Ask whether the effect happened before the last attempt was lost. None: it did not, so run the step."""
        attempt = self.attempt
        if self.reconcile is None:
            attempt.fail(
                TerminalError(
                    f"step {self.name!r} (effect key {wire_ids.effect_key(attempt.id, self.key)}) is in doubt: it may "
                    "or may not have happened. Decide for it, or give ctx.run a reconcile hook",
                    kind="InDoubt",
                ),
                pause=True,
            )
        attempt.check_here()
        assert self.reconcile is not None
        try:
            value = await self._call(self.reconcile, (wire_ids.effect_key(attempt.id, self.key),))
        except RunAgain:
            return None
        except TerminalError as error:
            return to_failure(error)
        except Exception as error:
            # The hook could not find out, which says nothing about the effect: ask again in another attempt. The code
            # must not see this as the step's failure, which is in no journal.
            if not attempt.ended:
                logger.warning("%s: reconcile of %r failed", format_id(attempt.id), self.name, exc_info=error)
            attempt.fail(error, pause=False)
            raise AttemptEnded from None
        return self._dump(value)

    async def _execute(self) -> Outcome | None:
        """Run the function once. None: it failed, and the node was informed."""
        attempt = self.attempt
        self.tries += 1
        self.began_ms = time.time_ns() // 1_000_000
        try:
            if scopes.shares_context():
                value = await self._call(self.function, self.arguments)
            else:  # Straight away: each coroutine in between costs every step a microsecond.
                value = await self._call_here(self.function, self.arguments)
        except TerminalError as error:
            return to_failure(error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if attempt.ended or (task is not None and task.cancelling()):
                raise
            return self._failed(error)  # The function cancelled something of its own.
        except (KeyboardInterrupt, SystemExit) as error:
            if is_from_terminal(error):
                raise
            return self._failed(exit_raised(error))
        except Exception as error:
            if never_works(error):
                # For example a context used inside a step, which would fail the same way in every attempt.
                attempt.fail(error, pause=True)
                raise AttemptEnded from None
            terminal = find_terminal(error)  # A task group wraps the errors of its tasks.
            return self._failed(error) if terminal is None else to_failure(terminal)
        return self._dump(value)

    def _failed(self, error: BaseException) -> Outcome | None:
        attempt = self.attempt
        attempt.check_here()
        invocation = format_id(attempt.id)
        logger.warning(
            "%s: step %r of %s/%s failed (attempt %d, try %d)",
            invocation, self.name, attempt.start.service, attempt.start.handler, attempt.start.attempt, self.tries,
            exc_info=traces.for_log(error), extra={"invocation_id": invocation, "step": self.name},
        )  # fmt: skip
        failure = to_failure(error)
        policy = self.policy
        if self.at_most_once or (policy is not None and isinstance(error, policy.terminal)):
            return failure
        if self.index < 0:
            self.index = attempt.length
            attempt.length += 1
            attempt.open[self.index] = self
        retry = policy.wire() if policy is not None else None
        attempt.send(
            RunFailed(
                attempt.id,
                attempt.epoch,
                self.index,
                key=self.key,
                name=self.name,
                failure=pack_outcome(failure),
                retry=retry,
                retry_after_ms=retry_after_ms(error),
                began_ms=self.began_ms,
            )
        )
        self.retrying = False
        return None

    async def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Call the function as the step: sync functions in a thread."""
        if scopes.shares_context():
            return await scopes.unscoped_task(self.attempt.loop, self._call_here(function, arguments))
        return await self._call_here(function, arguments)

    async def _call_here(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Call the function outside all scopes, with its step as `current_step()`."""
        attempt = self.attempt
        scope = scopes.current.set(None)
        task = scopes.running_task()
        before = scopes.enter(task, None)
        step = _step.set(CurrentStep(attempt.id, self.name, self.key, self.tries, attempt))
        span = tracing.enter(attempt, self.key)
        attempt.functions += 1
        try:
            # The first half is quick, and enough for a plain async function.
            is_plain = type(function) is FunctionType and function.__code__.co_flags & _COROUTINE
            if is_plain or inspect.iscoroutinefunction(function):
                return await self._interruptible(function(*arguments), task)
            context = contextvars.copy_context()
            value = await attempt.loop.run_in_executor(self.executor, context.run, _in_thread, function, arguments)
            return await self._interruptible(value, task) if isinstance(value, Awaitable) else value
        finally:
            attempt.functions -= 1
            tracing.leave(span)
            _step.reset(step)
            scopes.leave(task, before)
            scopes.current.reset(scope)

    async def _interruptible(self, awaitable: Awaitable[Any], task: asyncio.Task[Any] | None) -> Any:
        """Await it. If the invocation is cancelled in the meantime, it gets a CancelledError, as from asyncio.

        A function that swallows the CancelledError decides how its step ends, and the next step notices the
        cancellation.
        """
        attempt = self.attempt
        assert task is not None, "steps are driven by tasks"
        if self.at_most_once:
            return await awaitable  # Its outcome must be known.
        before = task.cancelling()
        self.running, self.interrupted = task, False
        attempt.interruptible[self] = None
        try:
            return await awaitable
        except asyncio.CancelledError:
            if self.interrupted and task.cancelling() - 1 <= before and not attempt.ended:
                attempt.take_cancellation()
                raise from_failure(CANCELLED) from None
            raise
        finally:
            attempt.interruptible.pop(self, None)
            if self.interrupted:
                task.uncancel()  # As asyncio.timeout does: the task itself goes on.
            self.running = None

    def interrupt(self) -> None:
        if self.running is not None and not self.interrupted:
            self.interrupted = True
            self.running.cancel()

    def _dump(self, value: Any) -> Success:
        attempt = self.attempt
        if attempt.ended:
            raise AttemptEnded
        serde = self.serde
        try:
            if serde is UNTYPED and type(value) not in _SCALARS:
                payload, lost = UNTYPED.dump_noting(value)
                if lost is not None:
                    self._warn_of_loss(lost)
            else:
                payload = serde.dump(value)
            if len(payload) > PAYLOAD_BYTES_MAX:
                raise BadPayload(f"it must have at most {PAYLOAD_BYTES_MAX} bytes, not {len(payload)}")
        except Exception as error:  # A user's serde may raise anything.
            # The effect has happened and its result cannot be stored: running it again would not help.
            attempt.fail(BadPayload(f"the result of step {self.name!r}: {error}"), pause=True)
            attempt.check_here()
            raise
        if isinstance(serde, JsonSerde) and type(value) in _SCALARS and serde.hint in (type(value), Any):
            self.load = lambda _: value
        return Success(payload)

    def _warn_of_loss(self, lost: str) -> None:
        at = "{}:{}".format(*self.made_at)
        text = (
            f"the function of ctx.run({self.name!r}, ...) at {at} returned a {lost}, which comes back as plain JSON: annotate "
            f"what the function returns, as in `-> {lost}`, or pass serde=TypeSerde(...)"
        )
        timers.warn_once("%s: %s", self.attempt.name, text, at=f"{at} {lost}")

    async def _backoff(self) -> None:
        """Wait until the node requests another run, or settles the step."""
        attempt = self.attempt
        if self.retrying:
            return
        wait = attempt.wait(self)
        self.due = wait
        self.listen(self._woken)
        try:
            await wait
        finally:
            attempt.waits.discard(wait)
            self.unlisten(self._woken)
            self.due = None

    def _woken(self) -> None:
        if self.due is not None and not self.due.done():
            self.due.set_result(None)

    async def _settled(self) -> None:
        """Wait until the outcome is delivered in its place."""
        if self.state == PENDING:
            wait = self.attempt.wait(self)
            self.due = wait
            self.listen(self._woken)
            try:
                await wait
            finally:
                self.attempt.waits.discard(wait)
                self.unlisten(self._woken)
                self.due = None

    async def _hold(self, wait: asyncio.Future[None]) -> None:
        try:
            await wait
        finally:
            self.attempt.waits.discard(wait)

    def _abandon_run(self) -> None:
        """A plain cancellation reached the step. Journal that, so that replay does not run it."""
        attempt = self.attempt
        if self.index < 0:
            self.index = attempt.length
            attempt.length += 1
            attempt.send(Intent(attempt.id, attempt.epoch, self.index, key=self.key, name=self.name))
        self.abandon()


def _in_thread(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call it. A future cannot carry a StopIteration: asyncio would drop it, and the step would wait for ever."""
    try:
        return function(*arguments)
    except StopIteration as error:
        failure = RuntimeError("the function raised StopIteration: give next() a default, or catch it in the function")
        raise failure.with_traceback(error.__traceback__) from error
