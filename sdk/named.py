"""Named scopes: a part of a handler whose steps have keys under a name, whatever tasks lie between.

Positional keys contain the numbers of the tasks around a step. A framework that changes how many helper tasks it makes
changes them. Under a name they start afresh.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from holdfast.sdk import scopes
from holdfast.sdk.attempt import Attempt
from holdfast.sdk.errors import MisusedContext


class NamedScope:
    """`with ctx.scope("agent/1/call_7"):`, or `async with`. The running task is in the scope until the block ends."""

    __slots__ = ("_attempt", "_before", "_outer", "_scope", "_task", "name")

    def __init__(self, attempt: Attempt, name: str) -> None:
        self._attempt = attempt
        self._scope: scopes.Scope | None = None
        self._outer: scopes.Scope | None = None
        self._before: scopes.Scope | None = None
        self._task: asyncio.Task[Any] | None = None
        self.name = name

    @property
    def path(self) -> str:
        """The beginning of the keys of its steps. Only inside the block."""
        assert self._scope is not None, "the scope has been entered"
        return self._scope.path

    def __enter__(self) -> NamedScope:
        if self._scope is not None:
            raise MisusedContext(f"scope {self.name!r} was entered before: make one with ctx.scope for each block")
        self._outer = self._attempt.check_here()
        self._scope = self._attempt.named_scope(self.name)
        self._task = scopes.running_task()
        self._before = scopes.enter(self._task, self._scope)
        if not self._scope.shared:
            scopes.current.set(self._scope)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # An abandoned generator is closed by another task, whenever the garbage collector finds it. Keys must not depend on
        # that, so its scope stays open.
        if (
            self._task is not None
            and self._task is scopes.running_task()
            and scopes.scope_of(self._task) is self._scope
        ):
            scopes.leave(self._task, self._before)
        if scopes.current.get() is self._scope:
            scopes.current.set(self._outer)
        self._outer = self._before = self._task = None

    async def __aenter__(self) -> NamedScope:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, at)
