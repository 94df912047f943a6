"""The contexts of handlers that have a key: state for objects and workflows, promises for workflows."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any, TypeVar, overload

import msgpack

from holdfast.sdk.arguments import check_text, dumped, optional
from holdfast.sdk.attempt import Attempt, Operation
from holdfast.sdk.context import Context
from holdfast.sdk.definition import AnyHandler
from holdfast.sdk.errors import MisusedContext
from holdfast.sdk.journal import NOTHING, Op, Success, some
from holdfast.sdk.promises import DurablePromise
from holdfast.sdk.serde import ANY, Serde, serde_for

T = TypeVar("T")


class ObjectContext(Context):
    """The context of a handler with a key: a `Context` that also has the state of that key."""

    def __init__(self, attempt: Attempt, handler: AnyHandler[Any, Any], executor: Executor) -> None:
        super().__init__(attempt, handler, executor)
        start = attempt.start
        self._state: dict[str, bytes] = dict(start.state or {})
        self._state_complete = start.state is not None and start.state_complete
        self._removed: set[str] = set()  # Names that are known to be absent although the eager state is incomplete.

    @property
    def key(self) -> str:
        """The key of this invocation."""
        return self._attempt.start.key or ""

    @overload
    def get(self, name: str) -> Operation[Any]: ...
    @overload
    def get(self, name: str, result: type[T]) -> Operation[T | None]: ...
    @overload
    def get(self, name: str, result: Serde[T]) -> Operation[T | None]: ...
    def get(self, name: str, result: Any = Any) -> Operation[Any]:
        """Read a value of the state, or None: `count = await ctx.get("count", int) or 0`."""
        check_text(name, "the name of a state value")
        attempt = self._attempt
        key = attempt.next_key(f"get {name}")
        operation: Operation[Any] = Operation(attempt, Op.GET, key, optional(serde_for(result)))
        value = self._state.get(name)
        if value is not None:
            self._read(operation, [name], some(value))
        elif self._state_complete or name in self._removed:
            self._read(operation, [name], NOTHING)
        else:
            attempt.open_step(operation, [name])
        return operation

    def _read(self, operation: Operation[Any], argument: list[Any], known: bytes) -> None:
        """Answer from the eager state, unless an earlier attempt journaled an answer."""
        attempt = self._attempt
        index = attempt.find(operation.key, operation.code, argument)
        if index >= 0:
            attempt.replay_step(operation, index)
            return
        attempt.check_room(operation.key)
        attempt.check_new(operation.code, argument, operation.key, others=attempt.unsettled)
        outcome = Success(known)
        operation.index = attempt.journal(operation.code, operation.key, argument, outcome)
        attempt.delivered += 1
        operation.sequence = attempt.delivered
        operation.settle(outcome)

    def set(self, name: str, value: Any, *, serde: Serde[Any] | None = None) -> None:
        """Set a value of the state. There is nothing to await: it takes effect with the journal."""
        check_text(name, "the name of a state value")
        self._check_writable()
        payload = dumped(serde or (ANY if not isinstance(value, bytes) else serde_for(bytes)), value, f"state {name!r}")
        attempt = self._attempt
        _, new = attempt.note(Op.SET, attempt.next_key(f"set {name}"), [name, payload])
        if new:
            self._state[name] = payload

    def clear(self, name: str) -> None:
        """Remove a value of the state. There is nothing to await."""
        check_text(name, "the name of a state value")
        self._check_writable()
        attempt = self._attempt
        _, new = attempt.note(Op.CLEAR, attempt.next_key(f"clear {name}"), [name])
        if new:
            self._forget(name)

    def clear_all(self) -> None:
        """Remove all values of the state. There is nothing to await."""
        self._check_writable()
        attempt = self._attempt
        _, new = attempt.note(Op.CLEAR_ALL, attempt.next_key("clear all"), [])
        if new:
            self._state.clear()
            self._state_complete = True

    def keys(self) -> Operation[list[str]]:
        """The names of all values of the state, sorted."""
        attempt = self._attempt
        operation: Operation[list[str]] = Operation(attempt, Op.KEYS, attempt.next_key("keys"), _names)
        if self._state_complete:
            self._read(operation, [], msgpack.packb(sorted(self._state)))
        else:
            attempt.open_step(operation, [])
        return operation

    def _forget(self, name: str) -> None:
        self._state.pop(name, None)
        if not self._state_complete:
            self._removed.add(name)

    def _check_writable(self) -> None:
        if self._handler.mode == "shared":
            raise MisusedContext(
                f"{self._handler.path} is a shared handler, which can only read state: "
                "write state in an exclusive handler or in the main handler of a workflow"
            )


class WorkflowContext(ObjectContext):
    """The context of a workflow's handlers: an `ObjectContext` that also has the workflow's promises."""

    @overload
    def promise(self, name: str) -> DurablePromise[Any]: ...
    @overload
    def promise(self, name: str, result: type[T]) -> DurablePromise[T]: ...
    @overload
    def promise(self, name: str, result: Serde[T]) -> DurablePromise[T]: ...
    def promise(self, name: str, result: Any = Any) -> DurablePromise[Any]:
        """A named value that is set once: handlers of this workflow wait for each other and for clients with it."""
        check_text(name, "the name of a promise")
        return DurablePromise(self._attempt, name, serde_for(result))


def _names(payload: bytes) -> list[str]:
    names: list[str] = msgpack.unpackb(payload)
    return names
