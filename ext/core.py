"""What the integrations have in common: one call as a step, under a key that the framework gives."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any, Final

from holdfast.sdk import RAW_JSON, Context, RetryPolicy, Serde, current_context, timers
from holdfast.sdk.here import is_in_handler
from holdfast.sdk.scopes import current_scope, shortened

logger = logging.getLogger("holdfast.ext")

#: Tools fail for good after three tries, and the model is told: with the default of steps a broken tool would be tried for
#: ever.
TOOL_RETRY: Final = RetryPolicy(max_attempts=3)
NAME_BYTES: Final = 128
#: Frames that say nothing about where the user's code runs an agent.
_LIBRARIES: Final = (
    "asyncio", "anyio", "holdfast", "contextlib", "threading", "concurrent", "pydantic_ai", "pydantic_graph",
)  # fmt: skip
#: Generated keys leave room for the scope that they are relative to.
KEY_BYTES: Final = 250


async def durable_call(
    name: str,
    function: Callable[..., Any],
    *args: Any,
    key: str,
    serde: Serde[Any] = RAW_JSON,
    retry: RetryPolicy | None = None,
) -> Any:
    """Call a function as the step `key` of the running handler. Outside of handlers, just call it.

    Names and keys that a framework generates may be long: they are cut, and get a hash of all of them.
    """
    context = current_context()
    if context is None:
        logger.debug("%s runs without a step: there is no handler here", name)
        found = function(*args)
        return await found if inspect.isawaitable(found) else found
    return await context.run(
        shortened(name, NAME_BYTES), function, *args, key=shortened(key, KEY_BYTES), serde=serde, retry=retry
    )


def warn_of_thread(what: str) -> None:
    """Say that this runs without steps, if it runs in a thread that a handler started: most likely that is a mistake."""
    scope = current_scope()
    if scope is not None and not is_in_handler():
        at = timers.place(_LIBRARIES)
        timers.warn_once(
            "%s runs in a thread of a handler at %s, where it has no steps: every attempt repeats it. Await it in the handler",
            what, at, at=at,
        )  # fmt: skip


class Keys:
    """The keys that one attempt has given to a framework: the same in every attempt."""

    def __init__(self) -> None:
        self._uses: dict[str, int] = {}
        self._runs: dict[str, str] = {}
        self.tools: set[str] = set()  # Paths of the scopes of tools.

    def unique(self, key: str) -> str:
        """The key, with an ordinal if it was used before in the named scope of the running code. The order of its uses must be
        the same in each attempt."""
        scope = current_scope()
        of_scope = f"{scope.name}:{key}" if scope is not None else key
        count = self._uses[of_scope] = self._uses.get(of_scope, 0) + 1
        return key if count == 1 else f"{key}#{count}"

    def new_run(self, context: Context, name: str) -> str:
        """The id of a new run of an agent: the invocation, and the place of the run in the code that starts it."""
        scope = context._attempt.check_here()
        place = scope.place(name)
        run_id = ":".join(filter(None, [context.invocation_id, scope.name, place]))
        self._runs[run_id] = place
        return run_id

    def of_run(self, run_id: str) -> str:
        """The place of a run, relative to the named scope that it began in; or the id that the user gave it."""
        return self._runs.get(run_id, run_id)


_keys: weakref.WeakKeyDictionary[Context, Keys] = weakref.WeakKeyDictionary()


def keys_of(context: Context) -> Keys:
    found = _keys.get(context)
    if found is None:
        found = _keys[context] = Keys()
    return found
