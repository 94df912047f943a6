"""Finds the context of the running handler from anywhere below it, for code that is not handed one."""

from __future__ import annotations

from threading import get_ident
from typing import cast

from holdfast.sdk.attempt.machine import Attempt
from holdfast.sdk.context import Context
from holdfast.sdk.errors import AttemptEnded
from holdfast.sdk.scopes import current_scope


def current_context() -> Context | None:
    """The context of the handler that this code runs in. None where a context cannot be used: outside of handlers, inside a
    function given to `ctx.run`, and in another thread::

        async def charge(order: Order) -> Receipt:
            ctx = current_context()
            return await (ctx.run("charge", send, order) if ctx is not None else send(order))

    Like any operation it raises `AttemptEnded` if the attempt of the handler has ended, so that code which goes on does
    not take itself for code outside of handlers.
    """
    scope = current_scope()
    if scope is None or not isinstance(scope.owner, Attempt) or get_ident() != scope.owner.thread:
        return None
    attempt = scope.owner
    attempt.check_here()
    context = attempt.context()
    if context is None:
        raise AttemptEnded
    return cast(Context, context)


def is_in_handler() -> bool:
    """Whether this code runs below a handler, where it may use the context. Unlike `current_context` it never raises, so that
    code which cleans up may ask although its attempt has ended."""
    scope = current_scope()
    return scope is not None and isinstance(scope.owner, Attempt) and get_ident() == scope.owner.thread
