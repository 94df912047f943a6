"""Which attempt created a lock, event, queue or stream: only that attempt may take it for its own.

A handler may share primitives with other invocations, for example a semaphore of its module that limits all of them. A
task that waits in such a primitive is moved by another attempt, so its own attempt must stay in memory (`waits`). What
the code of an attempt creates is almost always its own. Primitives do not say who created them, so their constructors
are wrapped, once per process. Outside of handlers the wrapper does nothing.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import weakref
from collections.abc import Collection
from typing import Any, Final

from holdfast.sdk import scopes

_creators: Final[weakref.WeakKeyDictionary[Any, weakref.ref[Any] | None]] = weakref.WeakKeyDictionary()
_wrapped: Final[set[type]] = set()
_kinds: tuple[type, ...] = ()


def install() -> None:
    """Wrap the constructors of asyncio, and of anyio if the process uses that. May be repeated."""
    for kind in (asyncio.Event, asyncio.Lock, asyncio.Semaphore, asyncio.Condition, asyncio.Queue):
        _wrap(kind)
    if "anyio" in sys.modules:
        _install_anyio()


def _install_anyio() -> None:
    try:
        import anyio
        from anyio._backends import _asyncio as backend
        from anyio.streams import memory
    except ImportError:
        return
    global _kinds
    if not _kinds:
        # The base classes, so that adapters count too: those are made outside of a loop, and never by an attempt.
        _kinds = (anyio.Event, anyio.Lock, anyio.Semaphore, anyio.Condition, anyio.CapacityLimiter)
    for module, name in (
        (backend, "Event"), (backend, "Lock"), (backend, "Semaphore"), (backend, "CapacityLimiter"),
        (anyio, "Condition"), (memory, "_MemoryObjectStreamState"), (memory, "MemoryObjectStreamState"),
    ):  # fmt: skip
        kind = getattr(module, name, None)
        if isinstance(kind, type):
            _wrap(kind)


def _wrap(kind: type) -> None:
    if kind in _wrapped:
        return
    _wrapped.add(kind)
    inner: Any = kind.__init__  # type: ignore[misc]

    @functools.wraps(inner)
    def create(self: Any, *args: Any, **options: Any) -> None:
        inner(self, *args, **options)
        scope = scopes.current_scope()
        if scope is not None:
            try:
                _creators[self] = weakref.ref(scope.owner)
            except TypeError:  # A subclass that cannot be hashed.
                return

    kind.__init__ = create  # type: ignore[misc]


def is_local(waited: object, owner: object, tasks: Collection[asyncio.Task[Any]]) -> bool:
    """Whether only this attempt moves those who wait in `waited`, as far as can be seen. True of other objects."""
    waited = getattr(waited, "_state", waited)  # of a stream
    kind = type(waited)
    if not _is_primitive(kind):
        return True
    # anyio's locks and limiters name their holders. Frameworks create them when they are needed, and share them then.
    holder, holders = getattr(waited, "_owner_task", None), getattr(waited, "_borrowers", None)
    if holder is not None or holders:
        return all(each in tasks for each in holders or (holder,))
    try:
        creator = _creators.get(waited, _UNKNOWN)
    except TypeError:
        return False
    if creator is not None and creator() is owner:
        return True
    if creator is not _UNKNOWN:
        _creators[waited] = None  # Two attempts use it, so from now on it is nobody's.
    return False


def _unknown() -> None:
    return None


_UNKNOWN: Final[Any] = _unknown


def _is_primitive(kind: type) -> bool:
    if not _wrapped.isdisjoint(kind.__mro__) or issubclass(kind, _kinds):
        return True
    if kind.__module__.startswith("anyio.") and "anyio" in sys.modules and not _kinds:
        install()  # anyio was imported after the first attempt began.
        return _is_primitive(kind)
    return False
