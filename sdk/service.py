"""The definitions of a user: services, virtual objects and workflows, with their handlers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar, overload

from holdfast.sdk.context import Context
from holdfast.sdk.definition import AnyService, Handler, KeyedHandler, Nothing
from holdfast.sdk.errors import BadDefinition
from holdfast.sdk.keyed import ObjectContext, WorkflowContext
from holdfast.sdk.policy import RetryPolicy
from holdfast.sdk.serde import Serde

I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741
C = TypeVar("C", bound=Context)
C_contra = TypeVar("C_contra", bound=Context, contravariant=True)
I_contra = TypeVar("I_contra", contravariant=True)
O_co = TypeVar("O_co", covariant=True)


class _WithDefault(Protocol[C_contra, I_contra, O_co]):
    """A function whose input has a default: it is called with or without an input."""

    def __call__(self, ctx: C_contra, value: I_contra = ..., /) -> Coroutine[Any, Any, O_co]: ...


class _Decorator(Generic[C]):
    """`@service.handler(...)` with options, typed by the context that its handlers take."""

    def __init__(self, add: Callable[[Any], Any]) -> None:
        self._add = add


class _PlainDecorator(_Decorator["Context"]):
    @overload
    def __call__(self, function: _WithDefault[Context, I, O]) -> Handler[I | Nothing, O]: ...
    @overload
    def __call__(self, function: Callable[[Context], Coroutine[Any, Any, O]]) -> Handler[Nothing, O]: ...
    @overload
    def __call__(self, function: Callable[[Context, I], Coroutine[Any, Any, O]]) -> Handler[I, O]: ...
    def __call__(self, function: Any) -> Any:
        return self._add(function)


class _ObjectDecorator(_Decorator["ObjectContext"]):
    @overload
    def __call__(self, function: _WithDefault[ObjectContext, I, O]) -> KeyedHandler[I | Nothing, O]: ...
    @overload
    def __call__(self, function: Callable[[ObjectContext], Coroutine[Any, Any, O]]) -> KeyedHandler[Nothing, O]: ...
    @overload
    def __call__(self, function: Callable[[ObjectContext, I], Coroutine[Any, Any, O]]) -> KeyedHandler[I, O]: ...
    def __call__(self, function: Any) -> Any:
        return self._add(function)


class _WorkflowDecorator(_Decorator["WorkflowContext"]):
    @overload
    def __call__(self, function: _WithDefault[WorkflowContext, I, O]) -> KeyedHandler[I | Nothing, O]: ...
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
    invocations, `private=True` for handlers that only other handlers may call, `run_ahead=True` for handlers whose code
    may go on before a step is durable (see `Context.run`), and `suspend=False` for handlers that stay in memory while
    they wait, because something outside of the handler moves them, such as a thread that sets an event.
    """

    kind = "service"

    @overload
    def handler(self, function: _WithDefault[Context, I, O], /) -> Handler[I | Nothing, O]: ...
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
        run_ahead: bool | None = None,
        suspend: bool | None = None,
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
    def handler(self, function: _WithDefault[ObjectContext, I, O], /) -> KeyedHandler[I | Nothing, O]: ...
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
        run_ahead: bool | None = None,
        suspend: bool | None = None,
        input: Serde[Any] | None = None,
        output: Serde[Any] | None = None,
    ) -> _ObjectDecorator: ...
    def handler(self, *function: Any, shared: bool = False, **options: Any) -> Any:
        """Make an async function a handler. With `shared=True`, it runs beside other handlers of its key and only reads
        state."""
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
    def main(self, function: _WithDefault[WorkflowContext, I, O], /) -> KeyedHandler[I | Nothing, O]: ...
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
        run_ahead: bool | None = None,
        suspend: bool | None = None,
        input: Serde[Any] | None = None,
        output: Serde[Any] | None = None,
    ) -> _WorkflowDecorator: ...
    def main(self, *function: Any, **options: Any) -> Any:
        """The main handler of the workflow: it runs once per key. There is exactly one."""

        def add(function: Any) -> Any:
            for handler in self.handlers.values():
                if handler.is_main:
                    raise BadDefinition(f"workflow {self.name} already has a main handler: {handler.name}")
            return _adder(self, KeyedHandler, "main", options)(function)

        decorator = _WorkflowDecorator(add)
        return decorator(*function) if function else decorator

    @overload
    def handler(self, function: _WithDefault[WorkflowContext, I, O], /) -> KeyedHandler[I | Nothing, O]: ...
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
        run_ahead: bool | None = None,
        suspend: bool | None = None,
        input: Serde[Any] | None = None,
        output: Serde[Any] | None = None,
    ) -> _WorkflowDecorator: ...
    def handler(self, *function: Any, shared: bool = True, **options: Any) -> Any:
        """A handler beside the main one: it may read state, and await, peek, resolve or reject promises."""
        if not shared:
            raise BadDefinition("a workflow has one exclusive handler, its main one: all others must be shared")
        decorator = _WorkflowDecorator(_adder(self, KeyedHandler, "shared", options))
        return decorator(*function) if function else decorator


def _adder(service: AnyService, kind: type[Any], mode: str, options: dict[str, Any]) -> Callable[[Any], Any]:
    known = {
        "name", "retry", "inactivity_timeout", "abort_timeout", "retention", "private", "run_ahead", "suspend", "input",
        "output",
    }  # fmt: skip
    unknown = set(options) - known
    if unknown:
        raise BadDefinition(
            f"{service.name}: unknown option {min(unknown)!r}; the options are {', '.join(sorted(known))}"
        )
    given = {"input": None, "output": None, **options}

    def add(function: Any) -> Any:
        return service._add(kind, function, mode=mode, **{"name": None, **given})

    return add
