"""Waiting for several operations at once: race, select, gather, any, settle and timeout.

Each decides by the order in which outcomes reached the code, which is log order. So a later attempt decides the same way.
"""

from __future__ import annotations

import asyncio
import typing
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar, overload

from holdfast.sdk.approvals import Approval
from holdfast.sdk.arguments import as_timedelta, duration_ms
from holdfast.sdk.attempt import Attempt, Operation
from holdfast.sdk.errors import BadArgument, TerminalError
from holdfast.sdk.journal import Op
from holdfast.sdk.promises import DurablePromise

T = TypeVar("T")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")


class Selected(NamedTuple):
    """What `ctx.select` returns: the name of the first operation to complete, and its value."""

    name: str
    value: Any


class Settled(NamedTuple, Generic[T]):
    """What `ctx.settle` returns for each operation: its value, or the error that it failed with."""

    value: T | None = None
    error: TerminalError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


class Combinators:
    """The part of a context that waits for several operations."""

    _attempt: Attempt

    async def race(self, *operations: Awaitable[T]) -> T:
        """The result of the first operation to complete, by log order: the same winner in every attempt.

        The other operations continue and may be awaited later. Coroutines among them are cancelled, and approvals are
        withdrawn, unless they have `keep=True`.
        """
        offset, sources = await self._first(operations)
        return typing.cast(T, sources[offset].result())

    async def select(self, **operations: Awaitable[Any]) -> Selected:
        """The name and the value of the first operation to complete::

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
        """The results of all operations, in the order given. Raises the first failure, by log order."""
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

    async def any(self, *operations: Awaitable[T]) -> T:
        """The result of the first operation to succeed, by log order. Raises the first failure if all fail::

            quote = await ctx.any(ctx.call(north.quote, trip), ctx.call(south.quote, trip))

        The other operations go on and may be awaited later. Coroutines among them are cancelled.
        """
        if not operations:
            raise BadArgument("any() needs at least one operation")
        sources = self._sources(operations)
        failures: dict[int, TerminalError] = {}
        try:
            while True:
                for source in sorted((each for each in sources if each.done()), key=lambda each: each.sequence()):
                    try:
                        result = typing.cast(T, source.result())
                        _withdraw(sources)
                        return result
                    except TerminalError as error:
                        failures.setdefault(id(source), error)
                if len(failures) == len(sources):
                    raise next(iter(failures.values()))
                await self._change(sources)
        finally:
            for source in sources:
                source.drop()

    async def settle(self, *operations: Awaitable[T]) -> tuple[Settled[T], ...]:
        """The outcomes of all operations, in the order given, with failures as values::

            for outcome in await ctx.settle(*(ctx.call(mailer.notify, who) for who in people)):
                print(outcome.value if outcome.ok else outcome.error)

        If a coroutine among them raises anything but a `TerminalError`, so does `settle`, and the attempt is retried.
        """
        sources = self._sources(operations)
        try:
            while not all(source.done() for source in sources):
                await self._change(sources)
            return tuple(_settled(source) for source in sources)
        finally:
            for source in sources:
                source.drop()

    async def timeout(self, operation: Awaitable[T], limit: float | timedelta) -> T:
        """The result of the operation. Raises `TimeoutError` after `limit` (seconds or a timedelta), by a durable
        timer.

        After a timeout the operation continues and may be awaited again. A coroutine is cancelled.
        """
        timer = self._sleep(as_timedelta(limit, "the limit of a timeout"))
        offset, sources = await self._first((operation, timer))
        if offset == 1:
            raise TimeoutError(f"the operation did not complete within {limit}")
        if not timer.done():
            timer.abandon()  # Otherwise it would wake the invocation.
        return typing.cast(T, sources[0].result())

    async def _first(self, operations: tuple[Awaitable[Any], ...]) -> tuple[int, list[_Source]]:
        if not operations:
            raise ValueError("pass at least one operation to wait for")
        sources = self._sources(operations)
        try:
            while True:
                done = [(source.sequence(), offset) for offset, source in enumerate(sources) if source.done()]
                if done:
                    offset = min(done)[1]
                    _withdraw(sources)
                    return offset, sources
                await self._change(sources)
        finally:
            for source in sources:
                source.drop()

    def _sources(self, operations: tuple[Awaitable[Any], ...]) -> list[_Source]:
        self._attempt.check_here()
        return [_Source(self._attempt, each) for each in operations]

    async def _change(self, sources: list[_Source]) -> None:
        """Wait until at least one more of them is done."""
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

    def _sleep(self, delay: timedelta) -> Operation[None]:
        attempt = self._attempt
        return attempt.awaited(Op.SLEEP, attempt.next_key("sleep"), [duration_ms(delay, "a sleep")], _ignore)


class _Source:
    """One item that a combinator waits for: an operation, or a task around any other awaitable."""

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
            if awaitable.listeners is None:
                awaitable.listeners = []  # The code did wait for it, although another one may be done already.
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
        """The combinator has ended: cancel the task that it made, because nothing else waits for it."""
        if self.own and self.task is not None and not self.task.done():
            self.task.cancel()


def _withdraw(sources: list[_Source]) -> None:
    """Nobody shall decide about an approval that the code no longer waits for."""
    for source in sources:
        operation = source.operation
        if isinstance(operation, Approval) and not (operation.keep or operation.done() or operation.is_awaited()):
            operation.abandon()


def _settled(source: _Source) -> Settled[Any]:
    try:
        return Settled(source.result())
    except TerminalError as error:
        return Settled(error=error)


def _ignore(payload: bytes) -> None:
    return None
