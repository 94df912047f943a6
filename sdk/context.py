"""The context of a handler: durable operations, and deterministic time, randomness and ids.

Every operation is a step of the journal: executed once, and found again in replay. An operation takes its key when it
is called, and may be awaited, gathered or raced like any awaitable.
"""

from __future__ import annotations

import functools
import logging
import random
import time
import typing
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from concurrent.futures import Executor
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, ParamSpec, TypeVar, TypeVarTuple, overload

from holdfast.sdk.approvals import Approvals
from holdfast.sdk.arguments import as_timedelta, check_clash, check_text, dumped, duration_ms, result_serde
from holdfast.sdk.attempt import NEVER, Attempt, Operation
from holdfast.sdk.combinators import Combinators
from holdfast.sdk.definition import (
    AnyHandler,
    Handler,
    HandlerRef,
    KeyedHandler,
    Nothing,
    Target,
    resolve_target,
)
from holdfast.sdk.errors import BadArgument, MissingOperation, MisusedContext, TerminalError, to_failure
from holdfast.sdk.ids import (
    child_id,
    format_awakeable,
    format_id,
    idempotent_id,
    parse_awakeable,
    parse_id,
    workflow_id,
)
from holdfast.sdk.journal import (
    KEY_BYTES_MAX,
    NAME_BYTES_MAX,
    Op,
    Outcome,
    Success,
    pack_outcome,
)
from holdfast.sdk.named import NamedScope
from holdfast.sdk.passing import headers_for
from holdfast.sdk.policy import RetryPolicy
from holdfast.sdk.run import RunOperation
from holdfast.sdk.serde import ANY, Serde, serde_for
from holdfast.sdk.tags import BadTags, tags_in
from holdfast.sdk.trace_context import trace_id_of

T = TypeVar("T")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741
Ts = TypeVarTuple("Ts")
P = ParamSpec("P")

_MISSING: Final[Any] = object()
SCOPE_BYTES_MAX: Final = 64 * 1024  # A longer name of a scope is most likely a mistake.

_STATE: Final = "state belongs to a key; define the service as a VirtualObject or a Workflow"
#: Operations that only some kinds of services have, with the error text for the others.
_KEYED_ONLY: Final = {
    "get": _STATE, "set": _STATE, "clear": _STATE, "clear_all": _STATE, "keys": _STATE, "key": _STATE,
    "promise": "promises belong to a workflow; define the service as a Workflow",
}  # fmt: skip


class CallOperation(Operation[T]):
    """A call under way. `invocation_id` names the called invocation, to attach to it or to cancel it."""

    __slots__ = ("invocation_id",)
    invocation_id: str


class Sent(NamedTuple):
    """What `ctx.send` returns: the id of the invocation that was sent."""

    invocation_id: str


class Awakeable(NamedTuple, Generic[T]):
    """A step that a client or another handler completes: hand out `id`, await `future`."""

    id: str
    future: Operation[T]


class _Log(logging.LoggerAdapter[logging.Logger]):
    """A logger that is silent in replay, so each line appears once."""

    def __init__(self, logger: logging.Logger, attempt: Attempt, fields: dict[str, object]) -> None:
        super().__init__(logger, fields)
        self._attempt = attempt

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802  (the name is the standard library's)
        return not self._attempt.replaying and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **kwargs.get("extra", {})}
        return msg, kwargs


class Context(Combinators, Approvals):
    """The context of a handler of a `Service`. Contexts of objects and workflows have all of its operations too."""

    def __init__(self, attempt: Attempt, handler: AnyHandler[Any, Any], executor: Executor) -> None:
        self._attempt = attempt
        self._handler = handler
        self._executor = executor
        self._log: _Log | None = None

    if not TYPE_CHECKING:  # Type checkers know which attributes exist.

        def __getattr__(self, name: str) -> Any:
            if name in _KEYED_ONLY:
                raise MissingOperation(
                    f"ctx.{name} does not exist in {self._handler.path} ({self._handler.service.kind}): "
                    f"{_KEYED_ONLY[name]}"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _shut(self) -> None:
        """The attempt has ended but its code is still running. Stop it at its next `await`."""
        self.__class__ = _Shut

    # -- identity and time

    @property
    def invocation_id(self) -> str:
        """The id of this invocation, `inv_...`: to attach to it, to cancel it, to find it in logs."""
        return format_id(self._attempt.id)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the request that began this invocation."""
        return dict(self._attempt.headers)

    @property
    def tags(self) -> dict[str, str]:
        """The tags of this invocation."""
        try:
            return tags_in(self._attempt.headers)
        except BadTags:
            return {}  # A node of an older release passed them on as they came.

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1. Not deterministic: for logs only."""
        return self._attempt.start.attempt

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that is silent in replay; its records have `invocation_id`, `service`, `handler`, `key`, `attempt` and
        `trace_id`."""
        if self._log is None:
            start = self._attempt.start
            fields: dict[str, object] = {
                "invocation_id": self.invocation_id,
                "service": start.service,
                "handler": start.handler,
                "key": start.key,
                "attempt": start.attempt,
                "trace_id": trace_id_of(self._attempt.headers),
            }
            self._log = _Log(logging.getLogger(f"holdfast.service.{start.service}"), self._attempt, fields)
        return self._log

    def now(self) -> datetime:
        """The current time (UTC), the same in every attempt."""
        attempt = self._attempt
        drawn = attempt.given(Op.VALUE, attempt.next_key("now"), ["now"], _now)
        return datetime.fromtimestamp(int.from_bytes(drawn, "big") / 1000, UTC)

    @property
    def random(self) -> random.Random:
        """Random numbers, the same in every attempt. Each task has its own sequence. Not for secrets."""
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
        /,
        *args: *Ts,
        retry: RetryPolicy | None = None,
        key: str | None = None,
        effect: typing.Literal["at_least_once", "at_most_once"] = "at_least_once",
        reconcile: Callable[[str], Awaitable[T] | T] | None = None,
        serde: Serde[T] | None = None,
        run_ahead: bool | None = None,
    ) -> Operation[T]: ...
    @overload
    def run(
        self,
        name: str,
        function: Callable[[*Ts], T],
        /,
        *args: *Ts,
        retry: RetryPolicy | None = None,
        key: str | None = None,
        effect: typing.Literal["at_least_once", "at_most_once"] = "at_least_once",
        reconcile: Callable[[str], Awaitable[T] | T] | None = None,
        serde: Serde[T] | None = None,
        run_ahead: bool | None = None,
    ) -> Operation[T]: ...
    @overload
    def run(
        self, name: str, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Operation[T]: ...
    @overload
    def run(self, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Operation[T]: ...
    def run(  # type: ignore[misc]
        self,
        name: str,
        function: Callable[..., Any],
        /,
        *args: Any,
        retry: RetryPolicy | None = None,
        key: str | None = None,
        effect: str = "at_least_once",
        reconcile: Callable[[str], Any] | None = None,
        serde: Serde[Any] | None = None,
        run_ahead: bool | None = None,
        **kwargs: Any,
    ) -> Operation[Any]:
        """Run a function as a step. Once its result is journaled, the function never runs again.

        A sync function runs in a thread. A `TerminalError` fails the step for good. After any other exception the step is
        retried as `retry` says, also over crashes; the default is for ever, after 100 ms, doubled up to a minute. `key`
        names the step explicitly, for loops whose order is not stable. The return annotation of the function decides how
        the result is read back::

            receipt = await ctx.run("charge", charge, order, currency="EUR", retry=RetryPolicy(max_attempts=5))

        Keyword arguments go to the function, but for the options above. A function that has a parameter of the name of
        an option gets it by position, or through `functools.partial` or a lambda.

        `effect="at_most_once"`: the intent is journaled first, an exception fails the step, and if the process dies in
        between, `reconcile(effect_key)` says what happened (it returns the result, or raises `RunAgain`), or an
        operator does.

        The `await` returns after the step is durable: code that runs behind it proves that the step is not repeated.
        `run_ahead=True` lets the code go on while the step is being replicated. That hides one commit behind the code
        up to the next step, or behind the end of the handler. The price: after a crash the step may run again although
        code behind it has run. Without it, the handler's `run_ahead` counts, then the service's, then False.
        """
        attempt = self._attempt
        check_text(name, "the name of a step")
        if not (retry is None and key is None and reconcile is None and serde is None and run_ahead is None):
            given = {"retry": retry, "key": key, "reconcile": reconcile, "serde": serde, "run_ahead": run_ahead}
            check_clash(function, args, kwargs, [option for option, value in given.items() if value is not None])
        if kwargs:
            function = functools.partial(function, **kwargs)
        if effect not in ("at_least_once", "at_most_once"):
            raise BadArgument(f"effect must be 'at_least_once' or 'at_most_once', not {effect!r}")
        if reconcile is not None and effect != "at_most_once":
            raise BadArgument("reconcile needs effect='at_most_once': other steps simply run again")
        if key is not None:
            check_text(key, "the key of a step", KEY_BYTES_MAX - 1)
            step_key = attempt.explicit_key(key)
        else:
            step_key = attempt.next_key(name)
        return RunOperation(
            attempt,
            step_key,
            name=name,
            function=function,
            arguments=args,
            serde=serde if serde is not None else result_serde(function),
            policy=retry,
            at_most_once=effect == "at_most_once",
            reconcile=reconcile,
            executor=self._executor,
            run_ahead=self._handler.run_ahead if run_ahead is None else run_ahead,
        )

    def scope(self, name: str) -> NamedScope:
        """Name a part of the handler: the steps in it have keys under the name, whatever tasks lie between::

            with ctx.scope(f"agent/{turn}/{call.id}"):
                await framework.run_tool(call)      # each step in here has a key that begins with the name

        Use it around code whose helper tasks are not yours to count, such as an agent framework. Scopes nest. `key=` of
        `ctx.run` is relative to the scope. A name may be used once in its enclosing scope, otherwise `BadArgument` is
        raised. A long name is cut and gets a hash of all of it.
        """
        check_text(name, "the name of a scope", SCOPE_BYTES_MAX)
        return NamedScope(self._attempt, name)

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
        """Wait durably, across crashes and restarts, without using memory: `await ctx.sleep(days=2)`."""
        parts = {"milliseconds": milliseconds, "seconds": seconds, "minutes": minutes, "hours": hours, "days": days}
        return self._sleep(as_timedelta(delay, "a sleep", parts))

    # -- other invocations

    @overload
    def call(
        self,
        handler: Handler[Nothing, O],
        *,
        headers: dict[str, str] | None = None,
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> CallOperation[O]: ...
    @overload
    def call(
        self,
        handler: Handler[I, O],
        argument: I,
        *,
        headers: dict[str, str] | None = None,
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> CallOperation[O]: ...
    @overload
    def call(
        self,
        handler: KeyedHandler[Nothing, O],
        *,
        key: str,
        headers: dict[str, str] | None = None,
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> CallOperation[O]: ...
    @overload
    def call(
        self,
        handler: KeyedHandler[I, O],
        argument: I,
        *,
        key: str,
        headers: dict[str, str] | None = None,
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> CallOperation[O]: ...
    @overload
    def call(
        self,
        handler: HandlerRef[I, O],
        argument: I = ...,
        *,
        key: str | None = None,
        headers: dict[str, str] | None = None,
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> CallOperation[O]: ...
    @overload
    def call(
        self,
        handler: str,
        argument: Any = ...,
        *,
        key: str | None = None,
        headers: dict[str, str] | None = None,
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> CallOperation[Any]: ...
    def call(
        self,
        handler: Any,
        argument: Any = _MISSING,
        *,
        key: str | None = None,
        headers: dict[str, str] | None = None,
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> CallOperation[Any]:
        """Call another handler, exactly once, and wait for its result::

        fare = await ctx.call(pricing.quote, trip)
        total = await ctx.call(counter.add, 5, key="visits")
        reply = await ctx.call("agent/ask", {"question": "why?"})     # in another process, by name

        Its failure is a `TerminalError`. A call that waits for a key which this invocation, or one that waits for it,
        holds fails with 409 (kind `Deadlock`), even if it is never awaited: use `send` if you do not need the result. So
        does the 101st of calls that wait for each other (kind `CallTooDeep`; the node's setting `call_depth_max`).

        `idempotency_key`: calls of the same handler and key with it, by handlers or clients, are one invocation.

        `tags`: short texts by which people find the invocation, `tags={"tenant": "acme"}`. A call does not inherit those
        of its caller: pass on what you need, `tags=ctx.tags`.
        """
        attempt = self._attempt
        target = resolve_target(handler, key)
        payload = _argument(target, argument)
        path = f"{target.service}/{target.handler}"
        step_key = attempt.next_key(path)
        operation: CallOperation[Any] = CallOperation(attempt, Op.CALL, step_key, target.output.load)
        arguments = [target.service, target.handler, key, payload, headers_for(attempt, headers, tags, step_key)]
        attempt.open_step(operation, [*arguments, *self._idempotency(idempotency_key)])
        operation.invocation_id = self._child(operation.index, target, key, idempotency_key, spread=False)
        return operation

    @overload
    def send(
        self,
        handler: Handler[Nothing, O],
        *,
        delay: float | timedelta = 0,
        headers: dict[str, str] | None = None,
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Sent: ...
    @overload
    def send(
        self,
        handler: Handler[I, O],
        argument: I,
        *,
        delay: float | timedelta = 0,
        headers: dict[str, str] | None = None,
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Sent: ...
    @overload
    def send(
        self,
        handler: KeyedHandler[Nothing, O],
        *,
        key: str,
        delay: float | timedelta = 0,
        headers: dict[str, str] | None = None,
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
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
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
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
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Sent: ...
    def send(
        self,
        handler: Any,
        argument: Any = _MISSING,
        *,
        key: str | None = None,
        delay: float | timedelta = 0,
        headers: dict[str, str] | None = None,
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Sent:
        """Start another invocation, exactly once, now or after `delay`, without waiting for it. There is nothing to await.

        `idempotency_key` and `tags` work as in `call`.
        """
        attempt = self._attempt
        target = resolve_target(handler, key)
        payload = _argument(target, argument)
        delay_ms = duration_ms(delay, "delay")
        step_key = attempt.next_key(f"send {target.service}/{target.handler}"[: NAME_BYTES_MAX * 2])
        arguments = [
            target.service,
            target.handler,
            key,
            payload,
            headers_for(attempt, headers, tags, step_key),
            delay_ms,
        ]
        arguments += self._idempotency(idempotency_key)
        index, _ = attempt.note(Op.SEND, step_key, arguments)
        return Sent(self._child(index, target, key, idempotency_key, spread=True))

    def attach(self, invocation_id: str, result: type[T] | Serde[T] | Any = Any) -> Operation[Any]:
        """Wait for the result of another invocation, read as `result`."""
        attempt = self._attempt
        target = parse_id(invocation_id)
        serde = serde_for(result)
        return attempt.awaited(Op.ATTACH, attempt.next_key(f"attach {invocation_id}"), [bytes(target)], serde.load)

    def cancel(self, invocation_id: str) -> None:
        """Cancel another invocation: what it waits for fails as cancelled. There is nothing to await."""
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
        """A step that a client or another handler completes: hand out the id, await the future::

        approval = ctx.awakeable(bool)
        await ctx.run("ask", mail_boss, approval.id)
        approved = await approval.future
        """
        attempt = self._attempt
        operation, secret = attempt.awakeable(attempt.next_key("awakeable"), serde_for(result).load)
        return Awakeable(format_awakeable(attempt.id, operation.index, secret), operation)

    def resolve_awakeable(self, awakeable_id: str, value: Any = None, *, serde: Serde[Any] | None = None) -> None:
        """Complete an awakeable of any invocation with a value. There is nothing to await."""
        self._complete_awakeable(awakeable_id, Success(dumped(serde or ANY, value, "the value")))

    def reject_awakeable(self, awakeable_id: str, message: str, *, code: int = 500) -> None:
        """Reject an awakeable of any invocation: its `await` raises a `TerminalError`. There is nothing to await."""
        self._complete_awakeable(awakeable_id, to_failure(TerminalError(message, code=code)))

    def _complete_awakeable(self, awakeable_id: str, outcome: Outcome) -> None:
        attempt = self._attempt
        id_ = parse_awakeable(awakeable_id)
        key = attempt.next_key("resolve awakeable")
        attempt.note(Op.RESOLVE_AWAKEABLE, key, [id_.invocation + id_.secret, id_.step, pack_outcome(outcome)])

    # -- helpers

    def _idempotency(self, key: str | None) -> list[str]:
        if key is None:
            return []
        check_text(key, "an idempotency key", KEY_BYTES_MAX)
        if self._attempt.version < 2:
            raise MisusedContext(
                "idempotency_key= needs nodes of a later release: upgrade the cluster, or leave it out"
            )
        return [key]

    def _child(self, index: int, target: Target, key: str | None, idempotency_key: str | None, *, spread: bool) -> str:
        if target.is_main and key is not None:
            return format_id(workflow_id(target.service, key))
        if idempotency_key is not None:
            return format_id(idempotent_id(target.service, key, target.handler, idempotency_key))
        return format_id(child_id(self._attempt.id, index, target.service, key, spread=spread))


class _Shut(Context):
    """The context of code that goes on although its attempt has ended."""

    if not TYPE_CHECKING:

        def __getattribute__(self, name: str) -> Any:
            known = name.startswith("_") or name in ("attempt", "headers", "invocation_id", "key", "log", "tags")
            return object.__getattribute__(self, name) if known else NEVER


def _now() -> bytes:
    return int(time.time() * 1000).to_bytes(8, "big")


def _argument(target: Target, argument: Any) -> bytes:
    if argument is _MISSING:
        return b""
    return dumped(target.input, argument, f"the argument of {target.service}/{target.handler}")
