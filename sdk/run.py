"""A RUN: the step that executes a function of the user and journals its result.

The function runs in the task that awaits the operation, so a step costs no task of its own. It starts only when every
earlier step is acknowledged, so a further effect never overtakes the record of an earlier one. A failure goes to the
node, which counts, and says when to run again or that it is over; so no crash resets the count.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

from holdfast.sdk import protocol, scopes
from holdfast.sdk.attempt import Attempt, Operation, find_terminal
from holdfast.sdk.errors import AttemptEnded, BadPayload, MisusedContext, RunAgain, TerminalError, to_failure
from holdfast.sdk.protocol import CANCELLED, Op
from holdfast.sdk.serde import JsonSerde, Serde
from holdfast.sdk.service import RetryPolicy

T = TypeVar("T")

logger = logging.getLogger("holdfast.sdk")

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})  # equal after a round trip through JSON


class CurrentStep:
    """The step whose function is running, as `current_step()` gives it."""

    __slots__ = ("_invocation", "key", "name", "number")

    def __init__(self, invocation: bytes, name: str, key: str, number: int) -> None:
        self._invocation = invocation
        self.name = name
        self.key = key
        self.number = number
        """The number of this try of the function in this attempt, from 1."""

    @property
    def effect_key(self) -> str:
        """The same for every try of this step, over crashes and restarts: hand it to the provider as idempotency key."""
        return protocol.effect_key(self._invocation, self.key)

    @property
    def invocation_id(self) -> str:
        return protocol.format_id(self._invocation)


_step: contextvars.ContextVar[CurrentStep | None] = contextvars.ContextVar("holdfast_step", default=None)


def current_step() -> CurrentStep:
    """The step that runs now: for the body of a function given to `ctx.run`::

    def charge(order: Order) -> Receipt:
        return stripe.charge(order.amount, idempotency_key=current_step().effect_key)
    """
    step = _step.get()
    if step is None:
        raise MisusedContext("there is no step here: current_step() works inside a function given to ctx.run")
    return step


class RunOperation(Operation[T]):
    """`ctx.run(...)`: begins when it is awaited, gathered or raced."""

    __slots__ = (
        "arguments", "at_most_once", "driven", "due", "executor", "function", "name", "policy", "reconcile", "retrying",
        "serde", "tries",
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
    ) -> None:
        super().__init__(attempt, Op.RUN, key, serde.load)
        self.name = name
        self.function = function
        self.arguments = arguments
        self.serde = serde
        self.policy = policy
        self.at_most_once = at_most_once
        self.reconcile = reconcile
        self.executor = executor
        self.driven = False
        self.retrying = False
        self.due: asyncio.Future[None] | None = None
        self.tries = 0
        index = attempt.find(key, Op.RUN, [name])
        if index >= 0:
            attempt.replay_step(self, index)
        else:
            attempt.unsettled += 1

    def __await__(self) -> Generator[Any, Any, T]:
        if self.state != 1:
            if self.state == 0 and not self.driven and not self._has_outcome():
                self.driven = True
                yield from self._drive().__await__()
            else:
                yield from self._wait()
        return self.result()

    def _has_outcome(self) -> bool:
        """Whether the journal has its outcome, which is on its way."""
        return 0 <= self.index < len(self.attempt.steps) and self.attempt.steps[self.index].outcome is not None

    def start(self) -> None:
        if self.state == 0 and not self.driven and not self._has_outcome():
            self.driven = True
            attempt = self.attempt
            attempt.adopt(scopes.unscoped_task(attempt.loop, self._drive_alone(), name=f"step {self.name}"))

    async def _drive_alone(self) -> None:
        # The combinator that started it looks at the operation, not at this task.
        scopes.current.set(scopes.Scope(self.attempt, ""))
        await self._drive()

    def retry(self) -> None:
        self.retrying = True
        if self.due is not None and not self.due.done():
            self.due.set_result(None)

    async def _drive(self) -> None:
        """Bring the step to its outcome; it is settled afterwards."""
        attempt = self.attempt
        attempt.check_here()
        try:
            outcome = await self._first_outcome()
            if outcome is None:
                return  # It came from the node.
            if self.index >= 0:
                attempt.send(protocol.RunDone(attempt.id, attempt.epoch, self.index, outcome))
                await self._settled()
                return
            alone = attempt.is_alone()
            self.index = attempt.journal(Op.RUN, self.key, [self.name], outcome)
            if alone:
                attempt.delivered += 1
                attempt.unsettled -= 1
                self.sequence = attempt.delivered
                self.settle(outcome)
            else:
                attempt.result_sent(self, outcome)
                await self._settled()
        except asyncio.CancelledError:
            if not attempt.ended:
                self._abandon_run()
            raise

    async def _first_outcome(self) -> list[Any] | None:
        """The outcome that the function, or whoever decides instead of it, gives; None: the node settled the step."""
        attempt = self.attempt
        if self.index >= 0:
            argument = attempt.steps[self.index].argument
            if len(argument) < 4:
                # Without at_most_once it is a step that was about to be abandoned when its attempt was lost: it runs.
                decided = await self._decide() if self.at_most_once else None
                if decided is not None:
                    return decided
            else:
                if argument[2] > attempt.start.now_ms and not self.retrying:
                    await self._backoff()
                if self.at_most_once and self.state == 0:
                    await self._intend_again()
                if self.state != 0:
                    return None
        else:
            attempt.check_new(Op.RUN, [self.name], self.key, others=attempt.unsettled - 1)
        while True:
            wait = attempt.acknowledged()
            if wait is not None:
                await self._hold(wait)
            if not attempt.starts_runs:
                await attempt.park()
                continue
            if self.state != 0:
                return None  # Cancelled by the node while it was about to run again.
            if self.index < 0 and attempt.take_cancellation():
                return [1, *CANCELLED]
            if self.at_most_once and self.index < 0:
                await self._intend()
            outcome = await self._execute()
            if outcome is not None:
                return outcome
            await self._backoff()
            if self.state != 0:
                return None

    async def _intend(self) -> None:
        attempt = self.attempt
        if not attempt.is_live:
            attempt.fail(
                TerminalError(f"step {self.name!r} is at_most_once, which needs a stream to the endpoint", code=501),
                pause=True,
            )
        attempt.check_here()
        self.index = attempt.length
        attempt.length += 1
        attempt.open[self.index] = self
        attempt.send(protocol.Intent(attempt.id, attempt.epoch, self.index, self.key, self.name))
        wait = attempt.acknowledged()
        if wait is not None:
            await self._hold(wait)

    async def _intend_again(self) -> None:
        """Somebody decided that it had not happened. From now on it may have: the journal has to say so first."""
        attempt = self.attempt
        attempt.check_here()
        self.retrying = False
        attempt.send(protocol.Intent(attempt.id, attempt.epoch, self.index, self.key, self.name))
        await self._backoff()

    async def _decide(self) -> list[Any] | None:
        """The step was about to run when its attempt was lost: did the effect happen? None: it did not, run it."""
        attempt = self.attempt
        if self.reconcile is None:
            attempt.fail(
                TerminalError(
                    f"step {self.name!r} (effect key {protocol.effect_key(attempt.id, self.key)}) is in doubt: it may "
                    "or may not have happened. Decide for it, or give ctx.run a reconcile hook",
                    kind="InDoubt",
                ),
                pause=True,
            )
        attempt.check_here()
        assert self.reconcile is not None
        try:
            value = await self._call(self.reconcile, (protocol.effect_key(attempt.id, self.key),))
        except RunAgain:
            return None
        except TerminalError as error:
            return [1, *to_failure(error)]
        except Exception as error:
            # The hook could not find out, which says nothing about the effect: ask again in another attempt. The code
            # must not see this as the step's failure, which is in no journal.
            if not attempt.ended:
                logger.warning("%s: reconcile of %r failed", protocol.format_id(attempt.id), self.name, exc_info=error)
            attempt.fail(error, pause=False)
            raise AttemptEnded from None
        return self._dump(value)

    async def _execute(self) -> list[Any] | None:
        """Run the function once. None: it failed, and the node was told."""
        attempt = self.attempt
        self.tries += 1
        try:
            value = await self._call(self.function, self.arguments)
        except TerminalError as error:
            return [1, *to_failure(error)]
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if attempt.ended or (task is not None and task.cancelling()):
                raise
            return self._failed(error)  # The function cancelled something of its own.
        except Exception as error:
            terminal = find_terminal(error)  # A task group wraps what its tasks raise.
            return self._failed(error) if terminal is None else [1, *to_failure(terminal)]
        return self._dump(value)

    def _failed(self, error: BaseException) -> list[Any] | None:
        attempt = self.attempt
        attempt.check_here()
        failure = [1, *to_failure(error)]
        policy = self.policy
        if self.at_most_once or (policy is not None and isinstance(error, policy.terminal)):
            return failure
        if self.index < 0:
            self.index = attempt.length
            attempt.length += 1
            attempt.open[self.index] = self
        retry = policy.wire() if policy is not None else None
        attempt.send(protocol.RunFailed(attempt.id, attempt.epoch, self.index, self.key, self.name, failure, retry))
        self.retrying = False
        return None

    async def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Call it as the step: sync functions in a thread."""
        if scopes.shares_context():
            return await scopes.unscoped_task(self.attempt.loop, self._call_here(function, arguments))
        return await self._call_here(function, arguments)

    async def _call_here(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """The code in it is outside of all scopes, and knows its step."""
        attempt = self.attempt
        scope = scopes.current.set(None)
        step = _step.set(CurrentStep(attempt.id, self.name, self.key, self.tries))
        attempt.functions += 1
        try:
            if inspect.iscoroutinefunction(function):
                return await function(*arguments)
            context = contextvars.copy_context()
            value = await attempt.loop.run_in_executor(self.executor, lambda: context.run(function, *arguments))
            return await value if isinstance(value, Awaitable) else value
        finally:
            attempt.functions -= 1
            _step.reset(step)
            scopes.current.reset(scope)

    def _dump(self, value: Any) -> list[Any]:
        attempt = self.attempt
        if attempt.ended:
            raise AttemptEnded
        try:
            payload = self.serde.dump(value)
            if len(payload) > protocol.PAYLOAD_BYTES_MAX:
                raise BadPayload(f"{len(payload)} bytes; at most {protocol.PAYLOAD_BYTES_MAX} are allowed")
        except Exception as error:  # A serde of the user's may raise anything.
            # The effect has happened and its result cannot be kept: running it again would not help.
            attempt.fail(BadPayload(f"the result of step {self.name!r}: {error}"), pause=True)
            attempt.check_here()
            raise
        serde = self.serde
        if isinstance(serde, JsonSerde) and type(value) in _SCALARS and serde.hint in (type(value), Any):
            self.load = lambda _: value
        return [0, payload]

    async def _backoff(self) -> None:
        """Until the node says to run again, or that it is over."""
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
        """Until the outcome is delivered in its place."""
        if self.state == 0:
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
        """A plain cancellation hit the step. Replay must not run it, so the journal has to know."""
        attempt = self.attempt
        if self.index < 0:
            self.index = attempt.length
            attempt.length += 1
            attempt.send(protocol.Intent(attempt.id, attempt.epoch, self.index, self.key, self.name))
        self.abandon()
