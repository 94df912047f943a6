"""Operations: the steps that the code can wait for.

An operation knows its key, its place in the journal and, in the end, its outcome. It does not decide when the outcome
arrives: the attempt delivers outcomes, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from holdfast.sdk import scopes
from holdfast.sdk.attempt.never import NEVER
from holdfast.sdk.attempt.tasks import TOLD_MAX
from holdfast.sdk.errors import BadPayload, MisusedContext, TerminalError, from_failure
from holdfast.sdk.journal import CANCELLED, OP_NAMES, SIGNATURES, By, Failure, Op, Outcome, Success
from holdfast.sdk.waits import Wait

T = TypeVar("T")

#: Operations whose values come from clients and other handlers.
_FROM_OUTSIDE: Final = frozenset(op for op, signature in SIGNATURES.items() if signature.foreign)

#: Operations that fail as cancelled only if this invocation was cancelled. A call may fail because its callee was.
ONLY_OURS: Final = frozenset(
    op for op, signature in SIGNATURES.items() if signature.cancellable and signature.by is not By.INVOCATION
)

#: States of an operation.
PENDING: Final = 0
DONE: Final = 1
ABANDONED: Final = 2  # An earlier attempt abandoned it: it never completes, and the code will stop waiting for it.
LEFT: Final = 3  # Abandoned, and the code stopped waiting for it: waiting again is an error.


class Owner(Protocol):
    """The attempt, as far as an operation knows it."""

    ended: bool
    cancelled: bool
    unsettled: int
    waits: set[Wait]
    told: dict[asyncio.Task[Any] | None, int]

    def check_here(self) -> scopes.Scope: ...

    def want(self, operation: Operation[Any]) -> None: ...

    def wait(self, operation: Operation[Any] | None) -> Wait: ...

    def passes(self, index: int) -> None: ...

    def cancellation(self, failure: Failure = CANCELLED) -> TerminalError: ...

    def abandon(self, operation: Operation[Any]) -> None: ...


class Operation(Coroutine[Any, Any, T]):
    """A step that the code may wait for: `await` it, gather it, race it, or make it a task.

    It takes its key when it is made and, except for `ctx.run`, is journaled then; `await` only waits. It may be awaited
    more than once. If a plain asyncio timeout or cancellation ends the wait, the step is abandoned: its outcome is
    never delivered, neither now nor in replay.
    """

    __slots__ = (
        "_iterator", "attempt", "code", "index", "key", "listeners", "load", "outcome", "sequence", "state", "waits",
    )  # fmt: skip

    def __init__(self, attempt: Owner, code: int, key: str, load: Callable[[bytes], T]) -> None:
        self.attempt = attempt
        self.code = code
        self.key = key
        self.load = load
        self.index = -1
        self.state = PENDING
        self.outcome: Outcome | None = None
        self.sequence = 0  # Its rank among all outcomes delivered in this attempt, the same in every attempt.
        self.waits: list[Wait] | None = None
        self.listeners: list[Callable[[], None]] | None = None
        self._iterator: Generator[Any, Any, T] | None = None

    # -- waiting

    def __await__(self) -> Generator[Any, Any, T]:
        if self.state != DONE:
            yield from self._wait()
        return self.result()

    def _wait(self) -> Generator[Any, Any, None]:
        attempt = self.attempt
        if attempt.told and max(attempt.told.values()) >= TOLD_MAX:
            yield from NEVER
        attempt.check_here()
        if self.state == PENDING:
            attempt.want(self)
            if self.state == DONE:
                return
        elif self.state == LEFT:
            raise MisusedContext(
                f"step {self.key!r} was abandoned because the code stopped waiting for it: it cannot be awaited again"
            )
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
        """Make progress without being awaited, for combinators. Only a RUN needs this."""

    def abandon(self) -> None:
        """The code stopped waiting: never deliver the outcome, not in replay either."""
        attempt = self.attempt
        if attempt.ended:
            return
        if self.state == PENDING:
            attempt.unsettled -= 1
        elif self.state != DONE:
            self.state = LEFT  # The journal already has this.
            return
        self.state = LEFT
        attempt.abandon(self)

    # -- outcome

    def done(self) -> bool:
        """Whether the outcome has arrived. Check at the same point in every attempt, or the code is not deterministic."""
        return self.state == DONE

    def settle(self, outcome: Outcome) -> bool:
        """Take the outcome. Returns whether any task waited for it."""
        self.state = DONE
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
        """The value. Raises if the step failed. Call it only when the operation is done."""
        outcome = self.outcome
        assert outcome is not None, "an operation has a result when it is done"
        self.attempt.passes(self.index)
        if isinstance(outcome, Success):
            if self.code in _FROM_OUTSIDE:
                return self._load_from_outside(outcome.payload)
            return self.load(outcome.payload)
        if is_cancellation(outcome):
            self.attempt.cancelled = False
            if self.code in ONLY_OURS or self.code == Op.RUN:
                raise self.attempt.cancellation(outcome)
        raise from_failure(outcome)

    def _load_from_outside(self, payload: bytes) -> T:
        """The client or handler that set this value did not know its type. The code handles that: it is no reason to
        pause."""
        try:
            return self.load(payload)
        except BadPayload as error:
            what = OP_NAMES[self.code]
            message = f"the value of {what} {self.key!r} does not have the declared type: {error}"
            raise TerminalError(message, code=400, kind="BadValue") from None

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
        """The backoff of a failed RUN has ended."""

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
        state = ("pending", "done", "abandoned", "abandoned")[self.state]
        return f"<{OP_NAMES[self.code]} {self.key!r} {state}>"


class Event(NamedTuple):
    """An outcome on its way to the code. `order` is None for a result made here, which comes after all of the journal."""

    order: int | None
    index: int  # type: ignore[assignment]
    outcome: Outcome
    operation: Operation[Any] | None = None  # the operation whose result was made here


def is_cancellation(outcome: Outcome) -> bool:
    return isinstance(outcome, Failure) and outcome.kind == CANCELLED.kind
