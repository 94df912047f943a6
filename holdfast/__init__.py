"""Holdfast: a durable orchestrator. One import name over the rooms at the top of the tree."""

__version__ = "0.2.0"


class AssertsDisabled(RuntimeError):
    """Python runs with -O or PYTHONOPTIMIZE, which removes asserts."""


def require_asserts(part: str) -> None:
    """Refuse to run this part without asserts: they stop a process before it breaks a promise.

    The rooms of the node call it when they are imported, and the SDK when an endpoint is made. `holdfast.sdk.Client` works
    without asserts: it sends requests and decides nothing.
    """
    if not __debug__:
        raise AssertsDisabled(
            f"{part} does not run under python -O: its asserts protect your data. Start Python without -O and without PYTHONOPTIMIZE"
        )
