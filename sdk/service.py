"""What a user defines: services, virtual objects and workflows, with their handlers and options.

A handler stays callable as the function it is, so a unit test may hand it a context of its own. Everything that can be
wrong with a definition is an error where it is defined, not when the first request comes.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, overload

from holdfast.sdk import protocol
from holdfast.sdk.errors import BadDefinition, BadPayload
from holdfast.sdk.serde import NOTHING, Serde, serde_for

if TYPE_CHECKING:
    from holdfast.sdk.context import Context, ObjectContext, WorkflowContext

I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741
C = TypeVar("C", bound="Context")

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\Z")
_RESERVED: Final = frozenset({"holdfast"})  # paths of the ingress itself
_RESERVED_HANDLERS: Final = frozenset({"send", "attach", "output"})


class Nothing:
    """The input type of a handler that takes none. Only type checkers see it."""


def milliseconds(value: float | timedelta, what: str) -> int:
    """A duration given in seconds or as a timedelta."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not 0 <= seconds < 1e11:
        raise ValueError(f"{what} is a duration of at least zero (in seconds, or a timedelta), not {value!r}")
    return round(seconds * 1000)


@dataclass(frozen=True)
class RetryPolicy:
    """How failed work is tried again: durations in seconds or as timedeltas; None means no limit.

    For a step (`ctx.run(..., retry=RetryPolicy(max_attempts=3))`) the step fails for good when a limit is reached; for
    a service or handler the invocation then pauses for an operator. Exceptions in `terminal` are never retried.
    """

    initial: float | timedelta = 0.1
    factor: float = 2.0
    max_interval: float | timedelta = 60.0
    max_attempts: int | None = None
    max_duration: float | timedelta | None = None
    jitter: float = 0.0  # up to this share of the interval is added
    terminal: tuple[type[Exception], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError("factor is at least 1: the interval does not shrink")
        if self.max_attempts is not None and self.max_attempts < 1:
            raise ValueError("max_attempts is at least 1, or None for no limit")
        if not 0 <= self.jitter <= 1:
            raise ValueError("jitter is a share of the interval, between 0 and 1")
        object.__setattr__(self, "_wire", self._to_wire())

    def _to_wire(self) -> list[int]:
        return [
            milliseconds(self.initial, "initial"),
            round(self.factor * 1000),
            milliseconds(self.max_interval, "max_interval"),
            self.max_attempts or 0,
            max(1, milliseconds(self.max_duration, "max_duration")) if self.max_duration is not None else 0,
            round(self.jitter * 1000),
        ]

    def wire(self) -> list[int]:
        """As a RUN_FAILED frame carries it."""
        found: list[int] = self._wire  # type: ignore[attr-defined]
        return found

    def manifest(self) -> dict[str, int]:
        names = (
            "initial_ms", "factor_permille", "max_interval_ms", "max_attempts", "max_duration_ms", "jitter_permille",
        )  # fmt: skip
        return dict(zip(names, self.wire(), strict=True))


@dataclass(frozen=True)
class Options:
    """Options of a service or a handler; None: as the service, or the node, has it."""

    retry: RetryPolicy | None = None
    inactivity_timeout: float | timedelta | None = None
    abort_timeout: float | timedelta | None = None
    retention: float | timedelta | None = None
    private: bool | None = None

    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.retry is not None:
            found["retry"] = self.retry.manifest()
        for name in ("inactivity_timeout", "abort_timeout", "retention"):
            value = getattr(self, name)
            if value is not None:
                found[f"{name}_ms"] = milliseconds(value, name)
        if self.private is not None:
            found["private"] = self.private
        return found


class AnyHandler(Generic[I, O]):
    """A function that a node may call, as `@service.handler` made it. Call it directly only in tests."""

    def __init__(
        self,
        service: AnyService,
        function: Callable[..., Coroutine[Any, Any, O]],
        *,
        name: str,
        mode: str,
        options: Options,
        input_serde: Serde[Any] | None,
        output_serde: Serde[Any] | None,
    ) -> None:
        self.service = service
        self.function = function
        self.name = name
        self.mode = mode
        self.options = options
        self.doc = inspect.getdoc(function)
        self.__name__ = name
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self.takes_input, input_hint, output_hint = _signature(self.path, function)
        self.input = self._serde("input", input_serde, input_hint)
        self.output = self._serde("result", output_serde, output_hint)

    def _serde(self, what: str, given: Serde[Any] | None, hint: Any) -> Serde[Any]:
        if given is not None:
            return given
        try:
            return serde_for(hint)
        except BadPayload as error:
            raise BadDefinition(f"{self.path}: its {what}: {error}") from None

    @property
    def path(self) -> str:
        """`service/handler`, as calls by name spell it."""
        return f"{self.service.name}/{self.name}"

    @property
    def is_keyed(self) -> bool:
        return self.service.kind != "service"

    @property
    def is_main(self) -> bool:
        return self.mode == "main"

    def __call__(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, O]:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<handler {self.path}>"

    def manifest(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "mode": self.mode,
            "doc": self.doc,
            "input": {"content_type": self.input.content_type, "schema": self.input.schema()},
            "output": {"content_type": self.output.content_type, "schema": self.output.schema()},
            "options": self.options.manifest(),
        }


class Handler(AnyHandler[I, O]):
    """A handler of a `Service`: called without a key."""


class KeyedHandler(AnyHandler[I, O]):
    """A handler of a `VirtualObject` or a `Workflow`: called with a key."""


def _signature(path: str, function: Callable[..., Any]) -> tuple[bool, Any, Any]:
    """Whether it takes an input, and the hints of input and result."""
    if not inspect.iscoroutinefunction(function):
        raise BadDefinition(f"{path}: a handler is an async function; write `async def {function.__name__}(ctx, ...)`")
    parameters = list(inspect.signature(function).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not 1 <= len(parameters) <= 2 or any(each.kind not in positional for each in parameters):
        raise BadDefinition(
            f"{path}: a handler takes the context and at most one input: "
            f"`async def {function.__name__}(ctx: Context, order: Order) -> Receipt`. "
            "For several values, use a dataclass or a TypedDict"
        )
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        raise BadDefinition(
            f"{path}: its type hints cannot be resolved ({error}); types of handlers are imported at run time, "
            "not only for type checkers, and defined at the top of a module"
        ) from error
    takes_input = len(parameters) == 2
    input_hint = hints.get(parameters[1].name, Any) if takes_input else None
    return takes_input, input_hint, hints.get("return", Any)


class AnyService:
    """What the three kinds of services share: a name, options and handlers by name."""

    kind = ""

    def __init__(
        self,
        name: str,
        *,
        doc: str | None = None,
        retry: RetryPolicy | None = None,
        inactivity_timeout: float | timedelta | None = None,
        abort_timeout: float | timedelta | None = None,
        retention: float | timedelta | None = None,
        private: bool | None = None,
    ) -> None:
        check_name(name, "the name of a service")
        if name in _RESERVED:
            raise BadDefinition(f"{name!r} is a path of the ingress itself; give the service another name")
        self.name = name
        self.doc = doc
        self.options = Options(retry, inactivity_timeout, abort_timeout, retention, private)
        self.handlers: dict[str, AnyHandler[Any, Any]] = {}

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"

    def _add(self, kind: type[Any], function: Any, *, mode: str, name: str | None, **options: Any) -> Any:
        if isinstance(function, AnyHandler):
            raise BadDefinition(f"{function.path} is a handler already; one function serves one service")
        name = name or function.__name__
        check_name(name, "the name of a handler")
        if name in _RESERVED_HANDLERS:
            raise BadDefinition(f"{self.name}/{name}: {name!r} is a path of the ingress; name the handler otherwise")
        if name in self.handlers:
            raise BadDefinition(f"{self.name} has a handler {name!r} already")
        input_serde, output_serde = options.pop("input"), options.pop("output")
        handler = kind(
            self,
            function,
            name=name,
            mode=mode,
            options=Options(**options),
            input_serde=input_serde,
            output_serde=output_serde,
        )
        self.handlers[name] = handler
        return handler

    def manifest(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "doc": self.doc,
            "options": self.options.manifest(),
            "handlers": [handler.manifest() for handler in self.handlers.values()],
        }


def check_name(name: str, what: str) -> None:
    if not isinstance(name, str) or not _NAME.match(name) or len(name) > protocol.NAME_BYTES_MAX:
        raise BadDefinition(
            f"{what} begins with a letter and has only letters, digits and `_ . -`, "
            f"at most {protocol.NAME_BYTES_MAX} of them; not {name!r}"
        )


class _Decorator(Generic[C]):
    """`@service.handler(...)` with options: typed by the context its handlers take."""

    def __init__(self, add: Callable[[Any], Any]) -> None:
        self._add = add


class _PlainDecorator(_Decorator["Context"]):
    @overload
    def __call__(self, function: Callable[[Context], Coroutine[Any, Any, O]]) -> Handler[Nothing, O]: ...
    @overload
    def __call__(self, function: Callable[[Context, I], Coroutine[Any, Any, O]]) -> Handler[I, O]: ...
    def __call__(self, function: Any) -> Any:
        return self._add(function)


class _ObjectDecorator(_Decorator["ObjectContext"]):
    @overload
    def __call__(self, function: Callable[[ObjectContext], Coroutine[Any, Any, O]]) -> KeyedHandler[Nothing, O]: ...
    @overload
    def __call__(self, function: Callable[[ObjectContext, I], Coroutine[Any, Any, O]]) -> KeyedHandler[I, O]: ...
    def __call__(self, function: Any) -> Any:
        return self._add(function)


class _WorkflowDecorator(_Decorator["WorkflowContext"]):
    @overload
    def __call__(self, function: Callable[[WorkflowContext], Coroutine[Any, Any, O]]) -> KeyedHandler[Nothing, O]: ...
    @overload
    def __call__(self, function: Callable[[WorkflowContext, I], Coroutine[Any, Any, O]]) -> KeyedHandler[I, O]: ...
    def __call__(self, function: Any) -> Any:
        return self._add(function)


class Service(AnyService):
    """Handlers without a key: any number run at once::

    trips = Service("trips", retry=RetryPolicy(max_attempts=10))

    @trips.handler
    async def book(ctx: Context, trip: Trip) -> Receipt: ...

    Options (also of each handler): `retry`, `inactivity_timeout`, `abort_timeout`, `retention` of completed
    invocations, and `private=True` for handlers that only other handlers may call.
    """

    kind = "service"

    @overload
    def handler(self, function: Callable[[Context], Coroutine[Any, Any, O]], /) -> Handler[Nothing, O]: ...
    @overload
    def handler(self, function: Callable[[Context, I], Coroutine[Any, Any, O]], /) -> Handler[I, O]: ...
    @overload
    def handler(
        self,
        *,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        inactivity_timeout: float | timedelta | None = None,
        abort_timeout: float | timedelta | None = None,
        retention: float | timedelta | None = None,
        private: bool | None = None,
        input: Serde[Any] | None = None,
        output: Serde[Any] | None = None,
    ) -> _PlainDecorator: ...
    def handler(self, *function: Any, **options: Any) -> Any:
        """Make an async function a handler. `name` is the function's name unless given; `input` and `output` are
        `Serde`s for payloads that are not JSON."""
        decorator = _PlainDecorator(_adder(self, Handler, "plain", options))
        return decorator(*function) if function else decorator


class VirtualObject(AnyService):
    """Handlers with a key and with state per key::

    counter = VirtualObject("counter")

    @counter.handler
    async def add(ctx: ObjectContext, amount: int) -> int:
        value = (await ctx.get("value", int) or 0) + amount
        ctx.set("value", value)
        return value

    One handler at a time runs per key, in order of arrival; `@counter.handler(shared=True)` runs beside it and only
    reads state.
    """

    kind = "object"

    @overload
    def handler(self, function: Callable[[ObjectContext], Coroutine[Any, Any, O]], /) -> KeyedHandler[Nothing, O]: ...
    @overload
    def handler(self, function: Callable[[ObjectContext, I], Coroutine[Any, Any, O]], /) -> KeyedHandler[I, O]: ...
    @overload
    def handler(
        self,
        *,
        shared: bool = False,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        inactivity_timeout: float | timedelta | None = None,
        abort_timeout: float | timedelta | None = None,
        retention: float | timedelta | None = None,
        private: bool | None = None,
        input: Serde[Any] | None = None,
        output: Serde[Any] | None = None,
    ) -> _ObjectDecorator: ...
    def handler(self, *function: Any, shared: bool = False, **options: Any) -> Any:
        """Make an async function a handler; `shared=True`: it runs beside others of its key and only reads state."""
        decorator = _ObjectDecorator(_adder(self, KeyedHandler, "shared" if shared else "exclusive", options))
        return decorator(*function) if function else decorator


class Workflow(AnyService):
    """One main handler that runs once per key, and shared handlers that talk to it while it runs and after::

    approval = Workflow("approval")

    @approval.main
    async def run(ctx: WorkflowContext, order: Order) -> str:
        return await ctx.promise("decision", str)

    @approval.handler
    async def decide(ctx: WorkflowContext, decision: str) -> None:
        await ctx.promise("decision", str).resolve(decision)
    """

    kind = "workflow"

    @overload
    def main(self, function: Callable[[WorkflowContext], Coroutine[Any, Any, O]], /) -> KeyedHandler[Nothing, O]: ...
    @overload
    def main(self, function: Callable[[WorkflowContext, I], Coroutine[Any, Any, O]], /) -> KeyedHandler[I, O]: ...
    @overload
    def main(
        self,
        *,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        inactivity_timeout: float | timedelta | None = None,
        abort_timeout: float | timedelta | None = None,
        retention: float | timedelta | None = None,
        private: bool | None = None,
        input: Serde[Any] | None = None,
        output: Serde[Any] | None = None,
    ) -> _WorkflowDecorator: ...
    def main(self, *function: Any, **options: Any) -> Any:
        """The handler that is the workflow: it runs once per key. There is exactly one."""

        def add(function: Any) -> Any:
            for handler in self.handlers.values():
                if handler.is_main:
                    raise BadDefinition(f"workflow {self.name} has a main handler already: {handler.name}")
            return _adder(self, KeyedHandler, "main", options)(function)

        decorator = _WorkflowDecorator(add)
        return decorator(*function) if function else decorator

    @overload
    def handler(self, function: Callable[[WorkflowContext], Coroutine[Any, Any, O]], /) -> KeyedHandler[Nothing, O]: ...
    @overload
    def handler(self, function: Callable[[WorkflowContext, I], Coroutine[Any, Any, O]], /) -> KeyedHandler[I, O]: ...
    @overload
    def handler(
        self,
        *,
        shared: bool = True,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        inactivity_timeout: float | timedelta | None = None,
        abort_timeout: float | timedelta | None = None,
        retention: float | timedelta | None = None,
        private: bool | None = None,
        input: Serde[Any] | None = None,
        output: Serde[Any] | None = None,
    ) -> _WorkflowDecorator: ...
    def handler(self, *function: Any, shared: bool = True, **options: Any) -> Any:
        """A handler beside the main one: it may read state, and await, peek, resolve or reject promises."""
        if not shared:
            raise BadDefinition("handlers of a workflow other than its main one are always shared")
        decorator = _WorkflowDecorator(_adder(self, KeyedHandler, "shared", options))
        return decorator(*function) if function else decorator


def _adder(service: AnyService, kind: type[Any], mode: str, options: dict[str, Any]) -> Callable[[Any], Any]:
    known = {"name", "retry", "inactivity_timeout", "abort_timeout", "retention", "private", "input", "output"}
    unknown = set(options) - known
    if unknown:
        raise BadDefinition(f"{service.name}: unknown option {min(unknown)!r}; known are {', '.join(sorted(known))}")
    given = {"input": None, "output": None, **options}

    def add(function: Any) -> Any:
        return service._add(kind, function, mode=mode, **{"name": None, **given})

    return add


@dataclass(frozen=True)
class ServiceRef:
    """A service in another process, by name, to call without importing its code::

    pricing = ServiceRef("pricing")
    fare = await ctx.call(pricing.handler("quote", Trip, Fare), trip)

    `kind` is needed for a workflow, whose main handler has an id of its own.
    """

    name: str
    kind: str = "service"

    @overload
    def handler(self, name: str, *, main: bool = False) -> HandlerRef[Any, Any]: ...
    @overload
    def handler(self, name: str, input: type[I], output: type[O], *, main: bool = False) -> HandlerRef[I, O]: ...
    def handler(self, name: str, input: Any = Any, output: Any = Any, *, main: bool = False) -> HandlerRef[Any, Any]:
        """One of its handlers, typed by what it takes and returns."""
        return HandlerRef(self.name, name, main, serde_for(input), serde_for(output))


@dataclass(frozen=True)
class HandlerRef(Generic[I, O]):
    """A handler in another process. Made by `ServiceRef.handler`."""

    service_name: str
    name: str
    is_main: bool
    input: Serde[Any]
    output: Serde[Any]


class Target(typing.NamedTuple):
    """What a call goes to, resolved from a handler, a reference or a name."""

    service: str
    handler: str
    is_main: bool
    input: Serde[Any]
    output: Serde[Any]


def resolve_target(handler: Any, key: str | None) -> Target:
    """The target of a call; says what is wrong with the handler or its key."""
    if isinstance(handler, AnyHandler):
        if handler.is_keyed and key is None:
            raise ValueError(f"{handler.path} belongs to a {handler.service.kind}: call it with key=")
        if not handler.is_keyed and key is not None:
            raise ValueError(f"{handler.path} belongs to a service without keys: call it without key=")
        input_serde = handler.input if handler.takes_input else NOTHING
        target = Target(handler.service.name, handler.name, handler.is_main, input_serde, handler.output)
    elif isinstance(handler, HandlerRef):
        target = Target(handler.service_name, handler.name, handler.is_main, handler.input, handler.output)
    elif isinstance(handler, str):
        service, slash, name = handler.partition("/")
        if not slash or not service or not name or "/" in name:
            raise ValueError(f"a handler by name is 'service/handler', not {handler!r}")
        target = Target(service, name, False, serde_for(Any), serde_for(Any))
    else:
        raise TypeError(f"a handler, a HandlerRef or 'service/handler' expected, not {handler!r:.80}")
    if not isinstance(handler, AnyHandler):
        _check_name(target.service, "a service")
        _check_name(target.handler, "a handler")
    if key is not None:
        check_key(key)
    return target


def _check_name(name: str, what: str) -> None:
    """A node takes no other, and ends the stream of whoever sends one."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"the name of {what} is valid Unicode") from None
    if not 0 < size <= protocol.NAME_BYTES_MAX:
        raise ValueError(f"the name of {what} has 1 to {protocol.NAME_BYTES_MAX} bytes, not {size}")


def check_key(key: str) -> None:
    if not isinstance(key, str):
        raise TypeError(f"a key is a str, not {type(key).__name__}")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise ValueError("a key is valid Unicode") from None
    if not 0 < size <= protocol.KEY_BYTES_MAX:
        raise ValueError(f"a key has 1 to {protocol.KEY_BYTES_MAX} bytes, not {size}")


def manifest_of(services: typing.Iterable[AnyService], version: str) -> dict[str, Any]:
    """What `GET /discover` answers."""
    return {
        "protocol": {"min": protocol.VERSION, "max": protocol.VERSION},
        "sdk": f"holdfast-python/{version}",
        "modes": ["stream", "request-response"],
        "services": [service.manifest() for service in services],
    }


def check_services(services: typing.Iterable[AnyService]) -> dict[str, AnyService]:
    """Services by name, or what is wrong with them as a whole."""
    found: dict[str, AnyService] = {}
    for service in services:
        if not isinstance(service, AnyService):
            raise BadDefinition(f"a Service, VirtualObject or Workflow expected, not {service!r:.80}")
        if service.name in found:
            raise BadDefinition(f"two services are named {service.name!r}")
        if not service.handlers:
            raise BadDefinition(f"{service.kind} {service.name} has no handlers")
        if service.kind == "workflow" and not any(handler.is_main for handler in service.handlers.values()):
            raise BadDefinition(f"workflow {service.name} has no main handler: mark one with @{service.name}.main")
        found[service.name] = service
    if not found:
        raise BadDefinition("no services: give at least one")
    return found
