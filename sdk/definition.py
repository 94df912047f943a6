"""Handlers and services of every kind: names, options, signatures, and the targets of calls."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar, overload

from holdfast.sdk.errors import BadDefinition, BadPayload
from holdfast.sdk.frames import VERSIONS
from holdfast.sdk.journal import KEY_BYTES_MAX, NAME_BYTES_MAX
from holdfast.sdk.policy import RetryPolicy, milliseconds
from holdfast.sdk.serde import NOTHING, Serde, serde_for

I = TypeVar("I")  # noqa: E741
In = TypeVar("In", contravariant=True)  # A handler that accepts more types of input can replace one that accepts fewer.
O = TypeVar("O")  # noqa: E741

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\Z")
_RESERVED: Final = frozenset({"holdfast"})  # paths of the ingress itself
_RESERVED_HANDLERS: Final = frozenset({"send", "attach", "output"})


class Nothing:
    """The input type of a handler without an input. A handler whose input has a default takes `I | Nothing`. Only type
    checkers use it."""


@dataclass(frozen=True)
class Options:
    """Options of a service or a handler. None means the option of the service, or the default of the node."""

    retry: RetryPolicy | None = None
    inactivity_timeout: float | timedelta | None = None
    abort_timeout: float | timedelta | None = None
    retention: float | timedelta | None = None
    private: bool | None = None
    run_ahead: bool | None = None  # Not in the manifest: it concerns this process only.

    def __post_init__(self) -> None:
        if self.run_ahead is not None and type(self.run_ahead) is not bool:
            raise TypeError(f"run_ahead must be True or False, not {self.run_ahead!r}")

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


class AnyHandler(Generic[In, O]):
    """A function that a node may call, made by `@service.handler`. Call it directly only in tests."""

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
        self.takes_input, input_hint, output_hint, self.default = _signature(self.path, function, service.kind)
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
    def has_default(self) -> bool:
        """Whether a request without a body uses the default of the input."""
        return self.default is not inspect.Parameter.empty

    def _input_schema(self) -> dict[str, Any] | None:
        schema = self.input.schema()
        if schema is None or not self.has_default or self.input.content_type != "application/json":
            return schema
        try:
            return {**schema, "default": json.loads(self.input.dump(self.default))}
        except (BadPayload, ValueError):
            return schema  # The type does not allow the default, such as None for "not given".

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

    @property
    def run_ahead(self) -> bool:
        """Whether the code may use steps before they are durable, unless a step has its own option."""
        own = self.options.run_ahead
        return bool(self.service.options.run_ahead if own is None else own)

    def __call__(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, O]:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<handler {self.path}>"

    def manifest(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "mode": self.mode,
            "doc": self.doc,
            "input": {"content_type": self.input.content_type, "schema": self._input_schema()},
            "output": {"content_type": self.output.content_type, "schema": self.output.schema()},
            "options": self.options.manifest(),
        }


class Handler(AnyHandler[In, O]):
    """A handler of a `Service`: called without a key."""


class KeyedHandler(AnyHandler[In, O]):
    """A handler of a `VirtualObject` or a `Workflow`: called with a key."""


def _signature(path: str, function: Callable[..., Any], kind: str) -> tuple[bool, Any, Any, Any]:
    """Whether the function takes an input, the hints of input and result, and the default of the input."""
    if not inspect.iscoroutinefunction(function):
        raise BadDefinition(
            f"{path}: a handler must be an async function: write `async def {function.__name__}(ctx, ...)`"
        )
    parameters = list(inspect.signature(function).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not 1 <= len(parameters) <= 2 or any(each.kind not in positional for each in parameters):
        raise BadDefinition(
            f"{path}: a handler must take the context and at most one input: "
            f"`async def {function.__name__}(ctx: Context, order: Order) -> Receipt`. "
            "For several values, use a dataclass or a TypedDict"
        )
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        raise BadDefinition(
            f"{path}: its type hints cannot be resolved ({error}). Import the types of handlers at run time, "
            "not only for type checkers, and define them at the top of a module"
        ) from error
    _check_context(path, function, hints.get(parameters[0].name), kind)
    takes_input = len(parameters) == 2
    input_hint = hints.get(parameters[1].name, Any) if takes_input else None
    default = parameters[1].default if takes_input else inspect.Parameter.empty
    return takes_input, input_hint, hints.get("return", Any), default


def _check_context(path: str, function: Callable[..., Any], hint: Any, kind: str) -> None:
    """The function must declare a context that fits this kind of service."""
    contexts = {"service": ("Context",), "object": ("ObjectContext", "Context")}
    fitting = contexts.get(kind, ("WorkflowContext", "ObjectContext", "Context"))
    given = getattr(hint, "__name__", None)
    ours = getattr(hint, "__module__", "") in ("holdfast.sdk.context", "holdfast.sdk.keyed")
    if ours and given not in fitting:
        raise BadDefinition(
            f"{path}: handlers of this kind of service ({kind}) get {fitting[0]} as their context, not {given}: "
            f"write `async def {function.__name__}(ctx: {fitting[0]}, ...)`, or define it in another kind of service"
        )


class AnyService:
    """The common part of the three kinds of services: a name, options and handlers by name."""

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
        run_ahead: bool | None = None,
    ) -> None:
        check_name(name, "the name of a service")
        if name in _RESERVED:
            raise BadDefinition(f"{name!r} is a path of the ingress: give the service another name")
        self.name = name
        self.doc = doc
        self.options = Options(
            retry=retry,
            inactivity_timeout=inactivity_timeout,
            abort_timeout=abort_timeout,
            retention=retention,
            private=private,
            run_ahead=run_ahead,
        )
        self.handlers: dict[str, AnyHandler[Any, Any]] = {}

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"

    def _add(self, kind: type[Any], function: Any, *, mode: str, name: str | None, **options: Any) -> Any:
        if isinstance(function, AnyHandler):
            raise BadDefinition(f"{function.path} is already a handler: a function can belong to one service only")
        name = name or function.__name__
        check_name(name, "the name of a handler")
        if name in _RESERVED_HANDLERS:
            raise BadDefinition(f"{self.name}/{name}: {name!r} is a path of the ingress: give the handler another name")
        if name in self.handlers:
            raise BadDefinition(f"{self.name} already has a handler named {name!r}")
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
    if not isinstance(name, str) or not _NAME.match(name) or len(name) > NAME_BYTES_MAX:
        raise BadDefinition(
            f"{what} must begin with a letter or `_` and consist of letters, digits and `_ . -`, "
            f"at most {NAME_BYTES_MAX} of them, not {name!r}"
        )


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
        """One of its handlers, with the types of its input and result."""
        return HandlerRef(self.name, name, main, input=serde_for(input), output=serde_for(output))


@dataclass(frozen=True)
class HandlerRef(Generic[I, O]):
    """A handler in another process. Made by `ServiceRef.handler`."""

    service_name: str
    name: str
    is_main: bool
    input: Serde[Any]
    output: Serde[Any]


class Target(typing.NamedTuple):
    """The target of a call, resolved from a handler, a reference or a name."""

    service: str
    handler: str
    is_main: bool
    input: Serde[Any]
    output: Serde[Any]


def resolve_target(handler: Any, key: str | None) -> Target:
    """The target of a call. Raises if the handler cannot be called, or not with this key."""
    if isinstance(handler, AnyHandler):
        if handler.is_keyed and key is None:
            raise ValueError(f"{handler.path} needs a key: call it with key=")
        if not handler.is_keyed and key is not None:
            raise ValueError(f"{handler.path} belongs to a service without keys: call it without key=")
        input_serde = handler.input if handler.takes_input else NOTHING
        target = Target(handler.service.name, handler.name, handler.is_main, input=input_serde, output=handler.output)
    elif isinstance(handler, HandlerRef):
        target = Target(handler.service_name, handler.name, handler.is_main, input=handler.input, output=handler.output)
    elif isinstance(handler, str):
        service, slash, name = handler.partition("/")
        if not slash or not service or not name or "/" in name:
            raise ValueError(f"the name of a handler must be 'service/handler', not {handler!r}")
        target = Target(service, name, is_main=False, input=serde_for(Any), output=serde_for(Any))
    else:
        raise TypeError(f"handler must be a handler, a HandlerRef or 'service/handler', not {handler!r:.80}")
    if not isinstance(handler, AnyHandler):
        _check_name(target.service, "a service")
        _check_name(target.handler, "a handler")
    if key is not None:
        check_key(key)
    return target


def _check_name(name: str, what: str) -> None:
    """Nodes refuse other names and close the stream that carries one."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"the name of {what} must be valid Unicode") from None
    if not 0 < size <= NAME_BYTES_MAX:
        raise ValueError(f"the name of {what} must have 1 to {NAME_BYTES_MAX} bytes, not {size}")


def check_key(key: str) -> None:
    if not isinstance(key, str):
        raise TypeError(f"key must be a str, not {type(key).__name__}")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise ValueError("key must be valid Unicode") from None
    if not 0 < size <= KEY_BYTES_MAX:
        raise ValueError(f"key must have 1 to {KEY_BYTES_MAX} bytes, not {size}")


def manifest_of(services: typing.Iterable[AnyService], version: str) -> dict[str, Any]:
    """The answer of `GET /discover`."""
    return {
        "protocol": {"min": VERSIONS[0], "max": VERSIONS[-1]},
        "sdk": f"holdfast-python/{version}",
        "modes": ["stream", "request-response"],
        "services": [service.manifest() for service in services],
    }


def check_services(services: typing.Iterable[AnyService]) -> dict[str, AnyService]:
    """Services by name. Raises `BadDefinition` if they cannot be served together."""
    found: dict[str, AnyService] = {}
    for service in services:
        if not isinstance(service, AnyService):
            raise BadDefinition(f"services must be Service, VirtualObject or Workflow objects, not {service!r:.80}")
        if service.name in found:
            raise BadDefinition(f"two services are named {service.name!r}")
        if not service.handlers:
            raise BadDefinition(f"{service.kind} {service.name} has no handlers")
        if service.kind == "workflow" and not any(handler.is_main for handler in service.handlers.values()):
            raise BadDefinition(f"workflow {service.name} has no main handler: mark one with @{service.name}.main")
        found[service.name] = service
    if not found:
        raise BadDefinition("an endpoint needs at least one service")
    return found
