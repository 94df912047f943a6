"""What a handler is given: durable operations, and deterministic time, randomness and ids.

Everything here is a step of the journal: made once, found again in replay. An operation takes its key when it is
called and may be awaited, gathered or raced like any awaitable.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import random
import time
import typing
import uuid
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from concurrent.futures import Executor
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any, Final, Generic, NamedTuple, TypeVar, TypeVarTuple, overload

import msgpack

from holdfast.sdk import protocol
from holdfast.sdk.attempt import Attempt, Operation
from holdfast.sdk.errors import BadPayload, MisusedContext, TerminalError, to_failure
from holdfast.sdk.protocol import NOTHING, Op, format_awakeable, format_id, parse_awakeable, parse_id, some, unsome
from holdfast.sdk.run import RunOperation
from holdfast.sdk.serde import ANY, Serde, serde_for
from holdfast.sdk.service import (
    AnyHandler,
    Handler,
    HandlerRef,
    KeyedHandler,
    Nothing,
    RetryPolicy,
    Target,
    resolve_target,
)

T = TypeVar("T")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741
Ts = TypeVarTuple("Ts")

_MISSING: Final[Any] = object()
HEADERS_MAX: Final = 64
HEADER_BYTES_MAX: Final = 16 * 1024
DELAY_S_MAX: Final = 100 * 366 * 24 * 3600  # A timer further away than this is a mistake of units.


class Selected(NamedTuple):
    """What `ctx.select` returns: the name of the first to complete, and its value."""

    name: str
    value: Any


class CallOperation(Operation[T]):
    """A call under way. `invocation_id` names the called invocation, to attach to it or to cancel it."""

    __slots__ = ("invocation_id",)
    invocation_id: str


class Sent(NamedTuple):
    """What `ctx.send` returns: the id of the invocation that was sent."""

    invocation_id: str


class Awakeable(NamedTuple, Generic[T]):
    """A step that somebody outside completes: hand `id` out, await `future`."""

    id: str
    future: Operation[T]


class DurablePromise(Generic[T]):
    """A named value of a workflow that is set once. Await it, or `peek`, `resolve` or `reject` it."""

    __slots__ = ("_context", "_key", "_name", "_operation", "_serde")

    def __init__(self, context: WorkflowContext, name: str, serde: Serde[T]) -> None:
        self._context = context
        self._name = name
        self._serde = serde
        self._key = context._attempt.next_key(f"promise {name}")
        self._operation: Operation[T] | None = None

    def wait(self) -> Operation[T]:
        """The operation that completes when the promise is resolved or rejected."""
        if self._operation is None:
            attempt = self._context._attempt
            attempt.check_here()
            self._operation = attempt.awaited(Op.PROMISE, self._key, [self._name], self._serde.load)
        return self._operation

    def __await__(self) -> Generator[Any, Any, T]:
        return self.wait().__await__()

    def peek(self) -> Operation[T | None]:
        """Its value if it is resolved, else None; raises if it was rejected."""
        attempt = self._context._attempt
        load: Callable[[bytes], T | None] = _optional(self._serde)
        return attempt.awaited(Op.PEEK, attempt.next_key(f"peek {self._name}"), [self._name], load)

    def resolve(self, value: T) -> Operation[None]:
        """Give it its value. Fails with a `TerminalError` (409) if it has one."""
        return self._complete([0, self._context._dump(self._serde, value, f"promise {self._name!r}")])

    def reject(self, message: str, *, code: int = 500) -> Operation[None]:
        """Fail it: whoever awaits it gets a `TerminalError`."""
        return self._complete([1, *to_failure(TerminalError(message, code=code))])

    def _complete(self, outcome: list[Any]) -> Operation[None]:
        attempt = self._context._attempt
        key = attempt.next_key(f"resolve {self._name}")
        return attempt.awaited(Op.RESOLVE, key, [self._name, outcome], _ignore)


class _Log(logging.LoggerAdapter[logging.Logger]):
    """Silent while the code walks where an earlier attempt has been, so a line appears once."""

    def __init__(self, logger: logging.Logger, attempt: Attempt, fields: dict[str, object]) -> None:
        super().__init__(logger, fields)
        self._attempt = attempt

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802  (the name is the standard library's)
        return not self._attempt.replaying and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **kwargs.get("extra", {})}
        return msg, kwargs


class Context:
    """The context of a handler of a `Service`; the others have all of it too."""

    def __init__(self, attempt: Attempt, handler: AnyHandler[Any, Any], executor: Executor) -> None:
        self._attempt = attempt
        self._handler = handler
        self._executor = executor
        self._log: _Log | None = None

    # -- who and when

    @property
    def invocation_id(self) -> str:
        """The id of this invocation, `inv_...`: to attach to it, to cancel it, to find it in logs."""
        return format_id(self._attempt.id)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the request that began this invocation."""
        return dict(self._attempt.headers)

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1. Not deterministic: for logs only."""
        return self._attempt.start.attempt

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that is silent in replay; its records have `invocation_id`, `service`, `handler`, `key`, `attempt`."""
        if self._log is None:
            start = self._attempt.start
            fields: dict[str, object] = {
                "invocation_id": self.invocation_id,
                "service": start.service,
                "handler": start.handler,
                "key": start.key,
                "attempt": start.attempt,
            }
            self._log = _Log(logging.getLogger(f"holdfast.service.{start.service}"), self._attempt, fields)
        return self._log

    def now(self) -> datetime:
        """The time (UTC), the same in every attempt."""
        attempt = self._attempt
        outcome = attempt.given(Op.VALUE, attempt.next_key("now"), ["now"], _now)
        return datetime.fromtimestamp(int.from_bytes(outcome[1], "big") / 1000, UTC)

    @property
    def random(self) -> random.Random:
        """Random numbers, the same in every attempt: each task has a sequence of its own. Not for secrets."""
        return self._attempt.check_here().draw()

    def uuid(self) -> uuid.UUID:
        """A UUID (version 4), the same in every attempt."""
        attempt = self._attempt
        key = attempt.next_key("uuid")
        raw = blake2b(f"{attempt.seed}/{key}".encode(), digest_size=16, key=attempt.id).digest()
        return uuid.UUID(bytes=raw, version=4)

    # -- steps

    @overload
    def run(
        self,
        name: str,
        function: Callable[[*Ts], Coroutine[Any, Any, T]],
        *args: *Ts,
        retry: RetryPolicy | None = None,
        key: str | None = None,
        effect: typing.Literal["at_least_once", "at_most_once"] = "at_least_once",
        reconcile: Callable[[str], Awaitable[T] | T] | None = None,
        serde: Serde[T] | None = None,
    ) -> Operation[T]: ...
    @overload
    def run(
        self,
        name: str,
        function: Callable[[*Ts], T],
        *args: *Ts,
        retry: RetryPolicy | None = None,
        key: str | None = None,
        effect: typing.Literal["at_least_once", "at_most_once"] = "at_least_once",
        reconcile: Callable[[str], Awaitable[T] | T] | None = None,
        serde: Serde[T] | None = None,
    ) -> Operation[T]: ...
    def run(  # type: ignore[misc]
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        retry: RetryPolicy | None = None,
        key: str | None = None,
        effect: str = "at_least_once",
        reconcile: Callable[[str], Any] | None = None,
        serde: Serde[Any] | None = None,
    ) -> Operation[Any]:
        """Run a function as a step: its result is journaled, and never computed again once it is.

        A sync function runs in a thread. A `TerminalError` fails the step for good; any other exception is tried again
        as `retry` says (by default: for ever, 100 ms doubled up to a minute), also over crashes. `key` names the step
        explicitly, for loops whose order is not stable. The result is read back by the function's return annotation::

            receipt = await ctx.run("charge", charge, order, retry=RetryPolicy(max_attempts=5))

        `effect="at_most_once"`: the intent is journaled first, an exception fails the step, and if the process dies in
        between, `reconcile(effect_key)` says what happened (it returns the result, or raises `RunAgain`), or an
        operator does.
        """
        attempt = self._attempt
        _check_text(name, "the name of a step")
        if effect not in ("at_least_once", "at_most_once"):
            raise ValueError(f"effect is 'at_least_once' or 'at_most_once', not {effect!r}")
        if reconcile is not None and effect != "at_most_once":
            raise ValueError("reconcile is for effect='at_most_once': other steps simply run again")
        if key is not None:
            _check_text(key, "the key of a step", protocol.KEY_BYTES_MAX - 1)
            step_key = attempt.explicit_key(key)
        else:
            step_key = attempt.next_key(name)
        return RunOperation(
            attempt,
            step_key,
            name=name,
            function=function,
            arguments=args,
            serde=serde if serde is not None else _result_serde(function),
            policy=retry,
            at_most_once=effect == "at_most_once",
            reconcile=reconcile,
            executor=self._executor,
        )

    def sleep(
        self,
        delay: float | timedelta = 0,
        *,
        milliseconds: float = 0,
        seconds: float = 0,
        minutes: float = 0,
        hours: float = 0,
        days: float = 0,
    ) -> Operation[None]:
        """Wait, durably: over crashes and restarts, holding nothing in memory. `await ctx.sleep(days=2)`."""
        extra = timedelta(milliseconds=milliseconds, seconds=seconds, minutes=minutes, hours=hours, days=days)
        first = delay if isinstance(delay, timedelta) else timedelta(seconds=delay)
        attempt = self._attempt
        argument = [_milliseconds(first + extra, "a sleep")]
        return attempt.awaited(Op.SLEEP, attempt.next_key("sleep"), argument, _ignore, checked=0)

    # -- other invocations

    @overload
    def call(self, handler: Handler[Nothing, O], *, headers: dict[str, str] | None = None) -> CallOperation[O]: ...
    @overload
    def call(
        self, handler: Handler[I, O], argument: I, *, headers: dict[str, str] | None = None
    ) -> CallOperation[O]: ...
    @overload
    def call(
        self, handler: KeyedHandler[Nothing, O], *, key: str, headers: dict[str, str] | None = None
    ) -> CallOperation[O]: ...
    @overload
    def call(
        self, handler: KeyedHandler[I, O], argument: I, *, key: str, headers: dict[str, str] | None = None
    ) -> CallOperation[O]: ...
    @overload
    def call(
        self,
        handler: HandlerRef[I, O],
        argument: I = ...,
        *,
        key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> CallOperation[O]: ...
    @overload
    def call(
        self, handler: str, argument: Any = ..., *, key: str | None = None, headers: dict[str, str] | None = None
    ) -> CallOperation[Any]: ...
    def call(
        self,
        handler: Any,
        argument: Any = _MISSING,
        *,
        key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> CallOperation[Any]:
        """Call another handler, exactly once, and wait for its result::

        fare = await ctx.call(pricing.quote, trip)
        total = await ctx.call(counter.add, 5, key="visits")
        reply = await ctx.call("agent/ask", {"question": "why?"})     # in another process, by name

        Its failure is a `TerminalError`.
        """
        attempt = self._attempt
        target = resolve_target(handler, key)
        payload = self._argument(target, argument)
        path = f"{target.service}/{target.handler}"
        operation: CallOperation[Any] = CallOperation(attempt, Op.CALL, attempt.next_key(path), target.output.load)
        attempt.open_step(operation, [target.service, target.handler, key, payload, _headers(headers)], 3)
        operation.invocation_id = self._child(operation.index, target, key, spread=False)
        return operation

    @overload
    def send(
        self, handler: Handler[Nothing, O], *, delay: float | timedelta = 0, headers: dict[str, str] | None = None
    ) -> Sent: ...
    @overload
    def send(
        self,
        handler: Handler[I, O],
        argument: I,
        *,
        delay: float | timedelta = 0,
        headers: dict[str, str] | None = None,
    ) -> Sent: ...
    @overload
    def send(
        self,
        handler: KeyedHandler[Nothing, O],
        *,
        key: str,
        delay: float | timedelta = 0,
        headers: dict[str, str] | None = None,
    ) -> Sent: ...
    @overload
    def send(
        self,
        handler: KeyedHandler[I, O],
        argument: I,
        *,
        key: str,
        delay: float | timedelta = 0,
        headers: dict[str, str] | None = None,
    ) -> Sent: ...
    @overload
    def send(
        self,
        handler: HandlerRef[I, O] | str,
        argument: Any = ...,
        *,
        key: str | None = None,
        delay: float | timedelta = 0,
        headers: dict[str, str] | None = None,
    ) -> Sent: ...
    def send(
        self,
        handler: Any,
        argument: Any = _MISSING,
        *,
        key: str | None = None,
        delay: float | timedelta = 0,
        headers: dict[str, str] | None = None,
    ) -> Sent:
        """Begin another invocation, exactly once, now or after `delay`, and do not wait for it. Nothing to await."""
        attempt = self._attempt
        target = resolve_target(handler, key)
        payload = self._argument(target, argument)
        delay_ms = _milliseconds(delay, "delay")
        step_key = attempt.next_key(f"send {target.service}/{target.handler}"[: protocol.NAME_BYTES_MAX * 2])
        arguments = [target.service, target.handler, key, payload, _headers(headers), delay_ms]
        index, _ = attempt.note(Op.SEND, step_key, arguments, checked=3)
        return Sent(self._child(index, target, key, spread=True))

    def attach(self, invocation_id: str, result: type[T] | Serde[T] | Any = Any) -> Operation[Any]:
        """Wait for the result of another invocation, read as `result`."""
        attempt = self._attempt
        target = parse_id(invocation_id)
        serde = serde_for(result)
        return attempt.awaited(Op.ATTACH, attempt.next_key(f"attach {invocation_id}"), [bytes(target)], serde.load)

    def cancel(self, invocation_id: str) -> None:
        """Cancel another invocation: what it waits for fails as cancelled. Nothing to await."""
        attempt = self._attempt
        attempt.note(Op.CANCEL, attempt.next_key(f"cancel {invocation_id}"), [bytes(parse_id(invocation_id))])

    # -- awakeables

    @overload
    def awakeable(self) -> Awakeable[Any]: ...
    @overload
    def awakeable(self, result: type[T]) -> Awakeable[T]: ...
    @overload
    def awakeable(self, result: Serde[T]) -> Awakeable[T]: ...
    def awakeable(self, result: Any = Any) -> Awakeable[Any]:
        """Something that somebody outside completes: hand out the id, await the future::

        approval = ctx.awakeable(bool)
        await ctx.run("ask", mail_boss, approval.id)
        approved = await approval.future
        """
        attempt = self._attempt
        operation = attempt.awaited(Op.AWAKEABLE, attempt.next_key("awakeable"), [], serde_for(result).load)
        return Awakeable(format_awakeable(attempt.id, operation.index), operation)

    def resolve_awakeable(self, awakeable_id: str, value: Any = None, *, serde: Serde[Any] | None = None) -> None:
        """Complete an awakeable of any invocation with a value. Nothing to await."""
        self._complete_awakeable(awakeable_id, [0, self._dump(serde or ANY, value, "the value")])

    def reject_awakeable(self, awakeable_id: str, message: str, *, code: int = 500) -> None:
        """Fail an awakeable of any invocation: its `await` raises a `TerminalError`. Nothing to await."""
        self._complete_awakeable(awakeable_id, [1, *to_failure(TerminalError(message, code=code))])

    def _complete_awakeable(self, awakeable_id: str, outcome: list[Any]) -> None:
        attempt = self._attempt
        invocation, index = parse_awakeable(awakeable_id)
        key = attempt.next_key("resolve awakeable")
        attempt.note(Op.RESOLVE_AWAKEABLE, key, [bytes(invocation), index, outcome], checked=2)

    # -- combinators

    async def race(self, *operations: Awaitable[T]) -> T:
        """The result of the first to complete, by the order of the log: the same winner in every attempt.

        The others go on, and may be awaited afterwards; coroutines among them are cancelled.
        """
        offset, sources = await self._first(operations)
        return typing.cast(T, sources[offset].result())

    async def select(self, **operations: Awaitable[Any]) -> Selected:
        """Which was first, by name, and its value::

        match await ctx.select(answer=approval.future, late=ctx.sleep(days=2)):
            case ("answer", value): ...
            case ("late", _): ...
        """
        offset, sources = await self._first(tuple(operations.values()))
        return Selected(list(operations)[offset], sources[offset].result())

    @overload
    async def gather(self, first: Awaitable[T1], /) -> tuple[T1]: ...
    @overload
    async def gather(self, first: Awaitable[T1], second: Awaitable[T2], /) -> tuple[T1, T2]: ...
    @overload
    async def gather(
        self, first: Awaitable[T1], second: Awaitable[T2], third: Awaitable[T3], /
    ) -> tuple[T1, T2, T3]: ...
    @overload
    async def gather(self, *operations: Awaitable[T]) -> tuple[T, ...]: ...
    async def gather(self, *operations: Awaitable[Any]) -> tuple[Any, ...]:
        """The results of all, in the order given; raises the first failure by the order of the log."""
        sources = self._sources(operations)
        try:
            while True:
                for source in sorted((each for each in sources if each.done()), key=lambda each: each.sequence()):
                    source.result()
                if all(source.done() for source in sources):
                    return tuple(source.result() for source in sources)
                await self._change(sources)
        finally:
            for source in sources:
                source.drop()

    async def timeout(self, operation: Awaitable[T], limit: float | timedelta) -> T:
        """Its result, or `TimeoutError` after `limit` (seconds or a timedelta): a durable timer decides.

        The operation goes on and may be awaited again; a coroutine is cancelled.
        """
        timer = self.sleep(limit)
        offset, sources = await self._first((operation, timer))
        if offset == 1:
            raise TimeoutError(f"not within {limit}")
        if not timer.done():
            timer.abandon()  # So that it does not wake anybody.
        return typing.cast(T, sources[0].result())

    async def _first(self, operations: tuple[Awaitable[Any], ...]) -> tuple[int, list[_Source]]:
        if not operations:
            raise ValueError("nothing to wait for")
        sources = self._sources(operations)
        try:
            while True:
                done = [(source.sequence(), offset) for offset, source in enumerate(sources) if source.done()]
                if done:
                    return min(done)[1], sources
                await self._change(sources)
        finally:
            for source in sources:
                source.drop()

    def _sources(self, operations: tuple[Awaitable[Any], ...]) -> list[_Source]:
        self._attempt.check_here()
        return [_Source(self._attempt, each) for each in operations]

    async def _change(self, sources: list[_Source]) -> None:
        """Until one more of them is done."""
        attempt = self._attempt
        pending = [source for source in sources if not source.done()]
        for source in pending:
            if source.operation is not None:
                attempt.want(source.operation)
                if source.done():
                    return
        wait = attempt.wait(None)

        def wake() -> None:
            if not wait.done():
                wait.set_result(None)

        for source in pending:
            source.listen(wake)
        try:
            await wait
        finally:
            attempt.waits.discard(wait)
            for source in pending:
                source.unlisten(wake)

    # -- helpers

    def _argument(self, target: Target, argument: Any) -> bytes:
        if argument is _MISSING:
            return b""
        return self._dump(target.input, argument, f"the argument of {target.service}/{target.handler}")

    def _dump(self, serde: Serde[Any], value: Any, what: str) -> bytes:
        try:
            payload = serde.dump(value)
        except BadPayload as error:
            raise BadPayload(f"{what}: {error}") from None
        if len(payload) > protocol.PAYLOAD_BYTES_MAX:
            raise BadPayload(f"{what}: {len(payload)} bytes; at most {protocol.PAYLOAD_BYTES_MAX} are allowed")
        return payload

    def _child(self, index: int, target: Target, key: str | None, *, spread: bool) -> str:
        if target.is_main and key is not None:
            return format_id(protocol.workflow_id(target.service, key))
        return format_id(protocol.child_id(self._attempt.id, index, target.service, key, spread=spread))


class ObjectContext(Context):
    """The context of a handler with a key: everything of `Context`, and the key's state."""

    def __init__(self, attempt: Attempt, handler: AnyHandler[Any, Any], executor: Executor) -> None:
        super().__init__(attempt, handler, executor)
        start = attempt.start
        self._state: dict[str, bytes] = dict(start.state or {})
        self._state_complete = start.state is not None and start.state_complete
        self._removed: set[str] = set()  # Names known to be absent although eager state is not complete.

    @property
    def key(self) -> str:
        """The key this invocation works on."""
        return self._attempt.start.key or ""

    @overload
    def get(self, name: str) -> Operation[Any]: ...
    @overload
    def get(self, name: str, result: type[T]) -> Operation[T | None]: ...
    @overload
    def get(self, name: str, result: Serde[T]) -> Operation[T | None]: ...
    def get(self, name: str, result: Any = Any) -> Operation[Any]:
        """A value of the state, or None: `count = await ctx.get("count", int) or 0`."""
        _check_text(name, "the name of a state value")
        attempt = self._attempt
        key = attempt.next_key(f"get {name}")
        operation: Operation[Any] = Operation(attempt, Op.GET, key, _optional(serde_for(result)))
        value = self._state.get(name)
        if value is not None:
            self._read(operation, [name], some(value))
        elif self._state_complete or name in self._removed:
            self._read(operation, [name], NOTHING)
        else:
            attempt.open_step(operation, [name], 1)
        return operation

    def _read(self, operation: Operation[Any], argument: list[Any], known: bytes) -> None:
        """Eager state has the answer, unless the journal has another one from an earlier attempt."""
        attempt = self._attempt
        index = attempt.find(operation.key, operation.code, argument)
        if index >= 0:
            attempt.replay_step(operation, index)
            return
        attempt.check_new(operation.code, argument, operation.key, others=attempt.unsettled)
        operation.index = attempt.journal(operation.code, operation.key, argument, [0, known])
        attempt.delivered += 1
        operation.sequence = attempt.delivered
        operation.settle([0, known])

    def set(self, name: str, value: Any, *, serde: Serde[Any] | None = None) -> None:
        """Set a value of the state. Nothing to await: it takes effect with the journal."""
        _check_text(name, "the name of a state value")
        self._check_writable()
        payload = self._dump(
            serde or (ANY if not isinstance(value, bytes) else serde_for(bytes)), value, f"state {name!r}"
        )
        attempt = self._attempt
        _, new = attempt.note(Op.SET, attempt.next_key(f"set {name}"), [name, payload])
        if new:
            self._state[name] = payload

    def clear(self, name: str) -> None:
        """Remove a value of the state. Nothing to await."""
        _check_text(name, "the name of a state value")
        self._check_writable()
        attempt = self._attempt
        _, new = attempt.note(Op.CLEAR, attempt.next_key(f"clear {name}"), [name])
        if new:
            self._forget(name)

    def clear_all(self) -> None:
        """Remove all of the state. Nothing to await."""
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
            attempt.open_step(operation, [], 0)
        return operation

    def _forget(self, name: str) -> None:
        self._state.pop(name, None)
        if not self._state_complete:
            self._removed.add(name)

    def _check_writable(self) -> None:
        if self._handler.mode == "shared":
            raise MisusedContext(
                f"{self._handler.path} is shared, so it only reads state: "
                "state can be written only in exclusive handlers and the main handler of a workflow"
            )


class WorkflowContext(ObjectContext):
    """The context of a workflow's handlers: everything of `ObjectContext`, and the workflow's promises."""

    @overload
    def promise(self, name: str) -> DurablePromise[Any]: ...
    @overload
    def promise(self, name: str, result: type[T]) -> DurablePromise[T]: ...
    @overload
    def promise(self, name: str, result: Serde[T]) -> DurablePromise[T]: ...
    def promise(self, name: str, result: Any = Any) -> DurablePromise[Any]:
        """A named value that is set once, for this workflow's handlers to wait for each other and for clients."""
        _check_text(name, "the name of a promise")
        return DurablePromise(self, name, serde_for(result))


class _Source:
    """What a combinator waits for: an operation, or a task around any other awaitable."""

    __slots__ = ("attempt", "finished", "operation", "own", "task", "wakers")

    def __init__(self, attempt: Attempt, awaitable: Awaitable[Any]) -> None:
        self.attempt = attempt
        self.operation: Operation[Any] | None = None
        self.task: asyncio.Future[Any] | None = None
        self.own = False
        self.finished = 0
        self.wakers: list[Callable[[], None]] = []
        if isinstance(awaitable, DurablePromise):
            awaitable = awaitable.wait()
        if isinstance(awaitable, Operation):
            self.operation = awaitable
            awaitable.start()
            return
        self.own = not isinstance(awaitable, asyncio.Future)
        self.task = asyncio.ensure_future(awaitable)
        self.task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Future[Any]) -> None:
        self.attempt.delivered += 1
        self.finished = self.attempt.delivered
        for wake in self.wakers:
            wake()

    def done(self) -> bool:
        if self.operation is not None:
            return self.operation.done()
        return self.finished > 0

    def sequence(self) -> int:
        return self.operation.sequence if self.operation is not None else self.finished

    def result(self) -> Any:
        if self.operation is not None:
            return self.operation.result()
        assert self.task is not None
        return self.task.result()

    def listen(self, wake: Callable[[], None]) -> None:
        if self.operation is not None:
            self.operation.listen(wake)
        elif self.task is not None:
            self.wakers.append(wake)

    def unlisten(self, wake: Callable[[], None]) -> None:
        if self.operation is not None:
            self.operation.unlisten(wake)
        elif self.task is not None:
            self.wakers.remove(wake)

    def drop(self) -> None:
        """The combinator is over: a task that it made has nobody else."""
        if self.own and self.task is not None and not self.task.done():
            self.task.cancel()


def _now() -> bytes:
    return int(time.time() * 1000).to_bytes(8, "big")


def _ignore(payload: bytes) -> None:
    return None


def _names(payload: bytes) -> list[str]:
    names: list[str] = msgpack.unpackb(payload)
    return names


def _optional(serde: Serde[Any]) -> Callable[[bytes], Any]:
    def load(payload: bytes) -> Any:
        found = unsome(payload)
        return None if found is None else serde.load(found)

    return load


def _headers(headers: dict[str, str] | None) -> dict[str, str]:
    if not headers:
        return {}
    size = 0
    for name, value in headers.items():
        _check_text(name, "the name of a header")
        _check_text(value, f"header {name!r}", HEADER_BYTES_MAX, empty=True)
        size += len(name.encode()) + len(value.encode())
    if len(headers) > HEADERS_MAX or size > HEADER_BYTES_MAX:
        raise ValueError(f"a call has at most {HEADERS_MAX} headers of {HEADER_BYTES_MAX} bytes together")
    return dict(headers)


def _check_text(text: str, what: str, limit: int = protocol.NAME_BYTES_MAX, *, empty: bool = False) -> None:
    if type(text) is not str:
        raise TypeError(f"{what} is a str, not {type(text).__name__}")
    if not text.isascii():
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise ValueError(f"{what} is valid Unicode") from None
    else:
        size = len(text)
    if size > limit or (size == 0 and not empty):
        raise ValueError(f"{what} has 1 to {limit} bytes, not {size}")


def _milliseconds(value: float | timedelta, what: str) -> int:
    """Rounded up: a durable wait is never shorter than asked for."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not 0 <= seconds <= DELAY_S_MAX:
        raise ValueError(f"{what} is a duration between zero and 100 years, not {value!r}")
    return math.ceil(seconds * 1000)


_result_serdes: weakref.WeakKeyDictionary[Any, Serde[Any]] = weakref.WeakKeyDictionary()


def _result_serde(function: Any) -> Serde[Any]:
    """By the return annotation. Functions made anew for each call share their code, so that is what is remembered."""
    code = getattr(inspect.unwrap(function) if hasattr(function, "__wrapped__") else function, "__code__", None)
    if code is None:
        inner = getattr(function, "func", None) or vars(type(function)).get("__call__")
        if inner is None or not hasattr(inner, "__code__"):
            return ANY
        return _result_serde(inner)
    found = _result_serdes.get(code)
    if found is None:
        try:
            hint = typing.get_type_hints(function, include_extras=True).get("return", Any)
            found = serde_for(hint)
        except (BadPayload, NameError, TypeError, AttributeError):
            found = ANY
        _result_serdes[code] = found
    return found
