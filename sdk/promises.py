"""Durable promises: named values with which the handlers of a workflow wait for each other and for clients."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from holdfast.sdk.arguments import dumped, optional
from holdfast.sdk.attempt import Attempt, Operation
from holdfast.sdk.errors import TerminalError, to_failure
from holdfast.sdk.journal import Op, Outcome, Success, pack_outcome
from holdfast.sdk.serde import Serde

T = TypeVar("T")


class DurablePromise(Generic[T]):
    """A named value of a workflow that is set once. Await, `peek`, `resolve` or `reject` it."""

    __slots__ = ("_attempt", "_key", "_name", "_operation", "_serde")

    def __init__(self, attempt: Attempt, name: str, serde: Serde[T]) -> None:
        self._attempt = attempt
        self._name = name
        self._serde = serde
        self._key = attempt.next_key(f"promise {name}")
        self._operation: Operation[T] | None = None

    def wait(self) -> Operation[T]:
        """The operation that completes when the promise is resolved or rejected."""
        if self._operation is None:
            self._attempt.check_here()
            self._operation = self._attempt.awaited(Op.PROMISE, self._key, [self._name], self._serde.load)
        return self._operation

    def __await__(self) -> Generator[Any, Any, T]:
        return self.wait().__await__()

    def peek(self) -> Operation[T | None]:
        """The value, or None if the promise is not resolved yet. Raises if it was rejected."""
        attempt = self._attempt
        load: Callable[[bytes], T | None] = optional(self._serde)
        return attempt.awaited(Op.PEEK, attempt.next_key(f"peek {self._name}"), [self._name], load)

    def resolve(self, value: T) -> Operation[None]:
        """Set the value. Fails with a `TerminalError` (409) if the promise is already resolved or rejected."""
        return self._complete(Success(dumped(self._serde, value, f"promise {self._name!r}")))

    def reject(self, message: str, *, code: int = 500) -> Operation[None]:
        """Set a failure: whatever awaits the promise gets a `TerminalError`."""
        return self._complete(to_failure(TerminalError(message, code=code)))

    def _complete(self, outcome: Outcome) -> Operation[None]:
        attempt = self._attempt
        key = attempt.next_key(f"resolve {self._name}")
        return attempt.awaited(Op.RESOLVE, key, [self._name, pack_outcome(outcome)], _ignore)


def _ignore(payload: bytes) -> None:
    return None
