"""Pauses: what the leaders of a cluster may not start. Part of the meta group's state, and pure like all of it.

A pause covers a key, a service, or everything. It stops no attempt that runs and loses nothing: what it covers waits in the
state of its partition, as work that should run. Pauses of different scopes hold beside each other, and each is ended by itself.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from holdfast.statemachine.effects import Code, Result
from holdfast.statemachine.texts import utc

#: Pauses in force at a time. Each start of an attempt looks up three of them, however many there are.
PAUSES_MAX: Final = 1000

#: A service and a key. No key: the whole service; no service either: everything.
Scope: TypeAlias = tuple[str, str | None]
EVERYTHING: Final[Scope] = ("", None)


class Halt(NamedTuple):
    """Start no attempts of this service and key. `recall`: also ask running attempts to suspend."""

    service: str
    key: str | None
    by: str
    reason: str
    recall: bool = False


class Release(NamedTuple):
    """End the pause of exactly this scope."""

    service: str
    key: str | None


class Standing(NamedTuple):
    """A pause in force."""

    scope: Scope
    by: str
    reason: str
    since_ms: int
    recall: bool


class Pauses:
    def __init__(self) -> None:
        self.by_scope: dict[Scope, Standing] = {}  # The oldest first.

    def halt(self, command: Halt, now_ms: int) -> Result:
        scope = (command.service, command.key)
        if not command.service and command.key is not None:
            return Result(Code.CONFLICT, "the pause of a key names its service")
        there = self.by_scope.get(scope)
        if there is None and len(self.by_scope) >= PAUSES_MAX:
            return Result(Code.FULL, f"there are {PAUSES_MAX} pauses already: resume some, or pause whole services")
        since_ms = there.since_ms if there is not None else now_ms
        self.by_scope[scope] = Standing(
            scope, by=command.by, reason=command.reason, since_ms=since_ms, recall=command.recall
        )
        return Result() if there is None else Result(Code.UNCHANGED, "it was paused before")

    def release(self, command: Release) -> Result:
        if self.by_scope.pop((command.service, command.key), None) is None:
            return Result(Code.NOT_FOUND, f"{name_scope((command.service, command.key))} is not paused")
        return Result()

    def covering(self, service: str, key: str | None) -> Standing | None:
        """The widest pause that covers an invocation. Every start of an attempt passes here."""
        found = self.by_scope
        if not found:
            return None
        return found.get(EVERYTHING) or found.get((service, None)) or found.get((service, key))


def name_scope(scope: Scope) -> str:
    service, key = scope
    if not service:
        return "everything"
    return f"service {service}" if key is None else f"key {key!r} of {service}"


def describe(standing: Standing) -> str:
    """For operators: a pause in force, in a sentence without its end."""
    reason = f": {standing.reason}" if standing.reason else ""
    return f"{name_scope(standing.scope)} is paused by {standing.by} since {utc(standing.since_ms)}{reason}"


def why_paused(standing: Standing) -> str:
    """Why a paused invocation does not run, and what to do."""
    reason = f": {standing.reason}" if standing.reason else ""
    return (
        f"Paused by {standing.by} since {utc(standing.since_ms)} ({name_scope(standing.scope)}){reason}; "
        f"resume with `{resume_command(standing.scope)}`."
    )


def resume_command(scope: Scope) -> str:
    service, key = scope
    if not service:
        return "holdfast resume --all"
    return f"holdfast resume --service {_quoted(service)}" + (f" --key {_quoted(key)}" if key is not None else "")


def _quoted(text: str) -> str:
    """For a shell."""
    if text and all(character.isalnum() or character in "._-" for character in text):
        return text
    return "'" + text.replace("'", "'\"'\"'") + "'"
