"""A framework for tests: it does with errors of tools what agent frameworks do."""

from collections.abc import Awaitable, Callable
from typing import Any

from holdfast.sdk.errors import see_through

see_through(__name__)


class FrameworkError(Exception):
    pass


async def with_text(tool: Callable[[], Awaitable[Any]]) -> Any:
    """The error becomes text for the model."""
    try:
        return await tool()
    except Exception as error:
        return f"An error occurred: {error}"


async def with_cause(tool: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await tool()
    except Exception as error:
        raise FrameworkError("the tool failed") from error


async def with_context(tool: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await tool()
    except Exception:
        raise FrameworkError("the tool failed")  # noqa: B904


async def unchanged(tool: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await tool()
    finally:
        pass
