"""The journal as an attempt sees it: the code claims steps that exist, and appends steps that do not.

A step is found by its key (`scopes`), so parallel branches may reach their steps in any order. Code that requests an
operation that differs from the journaled one ends the attempt with a `NonDeterminismError`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, Final

from holdfast.sdk import replay, scopes
from holdfast.sdk.attempt.tasks import Tasks
from holdfast.sdk.errors import AttemptEnded, BadArgument, NonDeterminismError, from_failure
from holdfast.sdk.frames import StepFrame
from holdfast.sdk.ids import format_id
from holdfast.sdk.journal import STEP_KEY_BYTES_MAX, Failure, Op, Outcome, ProtocolError, pack_outcome

logger = logging.getLogger("holdfast.sdk")

#: Prefix of the keys of steps that record for which operation the journal was too long. Keys of the code never have
#: this prefix: in them, a single number sign precedes a number.
REFUSED: Final = "#full "
TOO_LONG: Final = Failure(
    413, "the journal of this invocation reached its limit: split the work into several invocations", "JournalTooLong"
)


class Claims(Tasks):
    """The steps in the journal, which of them the code has claimed, and the length of the journal."""

    low: int  # The first step of START that the code has not claimed.
    length: int  # Steps journaled or sent.
    acked: int
    size: int  # Approximate size of the journal in bytes.
    steps: list[replay.Recorded]
    keys: dict[str, int]  # Steps of START that the code has not claimed yet.
    matched: bytearray
    explicit: set[str]  # Explicit step keys, and paths of named scopes, that the code has used.
    refused: set[str]  # The step that records that the journal is too long, if there is one.

    __slots__ = tuple(__annotations__)

    def add_journal(self, rows: Iterable[bytes]) -> None:
        """Add steps of the journal, in order, before the code begins."""
        for row in rows:
            try:
                step = replay.unpack(row)
            except Exception as error:
                raise ProtocolError(f"step {len(self.steps)} of a journal is malformed: {error}") from None
            self.keys[step.key] = len(self.steps)
            self.steps.append(step)
            self.size += len(row)

    def next_key(self, name: str) -> str:
        return self.check_here().key(name)

    def explicit_key(self, key: str) -> str:
        scope = self.check_here()
        found = scope.explicit_key(key)
        if len(found.encode()) > STEP_KEY_BYTES_MAX:
            found = scopes.shortened(found, STEP_KEY_BYTES_MAX)
        if found in self.explicit:
            where = f"scope {scope.name[1:]!r}" if scope.name else "this invocation"
            raise BadArgument(f"key {key!r} is already in use in {where}: an explicit key must name one step")
        self.explicit.add(found)
        return found

    def named_scope(self, name: str) -> scopes.Scope:
        """A scope of this name in the current one. Each name counts once: parallel tasks could not agree on ordinals."""
        scope = self.check_here()
        found = scope.named(name)
        if found.path in self.explicit:
            where = f"scope {scope.name[1:]!r}" if scope.name else "this invocation"
            raise BadArgument(
                f"scope {name!r} is already in use in {where}: give each scope a name of its own, such as "
                f"f'{name}/{{number}}'"
            )
        self.explicit.add(found.path)
        return found

    def find(self, key: str, code: int, argument: list[Any]) -> int:
        """The index of the step with this key, or -1. Ends the attempt if the step was made with other arguments."""
        self.activity += 1
        index = self.keys.pop(key, -1) if self.keys else -1
        if index < 0:
            return -1
        step = self.steps[index]
        different = replay.difference(step, code, argument)
        if different is not None:
            self.keys[key] = index
            self.fail_nondeterministic(index, replay.describe(code, argument, key), different)
            raise AttemptEnded
        self.matched[index] = 1
        if index == self.low:
            self._advance()
            self._walked()
        return index

    def _walked(self) -> None:
        """The code claimed its first unclaimed step. An outcome may have been held back until now."""

    def _advance(self) -> None:
        matched, low = self.matched, self.low
        while low < len(matched) and matched[low]:
            low += 1
        self.low = low

    def check_new(self, code: int, argument: list[Any], key: str, *, others: int) -> None:
        """Called for a step that is not in the journal. `others`: the number of other operations in progress.

        If no other task and no other operation could still claim the rest of the journal, different code wrote it.
        """
        if self.keys and others == 0 and len(self.tasks) == 1:
            self.fail_nondeterministic(min(self.keys.values()), replay.describe(code, argument, key))
            raise AttemptEnded

    def fail_nondeterministic(self, index: int, found: str, different: replay.Difference | None = None) -> None:
        step = self.steps[index]
        expected = replay.describe(step.op, step.argument, step.key) + f", step {index}"
        message = "the code took another path than in an earlier attempt: it must be deterministic"
        if different is not None:
            message += f". {different.what}"
            expected += f": {different.expected}"
            found += f": {different.found}"
        self.fail(NonDeterminismError(message, expected=expected, found=found), pause=True)

    def check_room(self, key: str) -> None:
        """Called before an operation that is not in the journal. Raises `JournalTooLong` if it is the first one beyond
        the limit. The journal records that, so the same operation fails in every attempt."""
        if self.is_full():
            marker = _refusal_of(key)
            self.refused.add(marker)
            self.journal(Op.RUN, marker, ["journal too long"], TOO_LONG)
        if self.refused and _refusal_of(key) in self.refused:
            raise from_failure(TOO_LONG)

    def is_full(self) -> bool:
        """Whether the journal has reached its limit and no operation has failed because of that yet."""
        steps_max, bytes_max = self.start.journal_steps_max, self.start.journal_bytes_max
        return not self.refused and (0 < steps_max <= self.length or 0 < bytes_max <= self.size)

    def refuse_run(self, key: str) -> Failure:
        """The outcome of the RUN that fails because the journal is full."""
        self.refused.add(key)
        return TOO_LONG

    def _grow(self, added: int) -> None:
        """Count bytes added to the journal. The attempt that passes four fifths of a limit warns once."""
        before, self.size = self.size, self.size + added
        steps, size = self.start.journal_steps_max * 4 // 5, self.start.journal_bytes_max * 4 // 5
        if (steps and self.length == steps) or before < size <= self.size:
            logger.warning(
                "%s %s/%s: the journal has %d steps and about %d bytes, 80 %% of its limit (%d steps, %d bytes). At the "
                "limit the handler gets a JournalTooLong: split the work into several invocations",
                format_id(self.id), self.start.service, self.start.handler, self.length, self.size,
                self.start.journal_steps_max, self.start.journal_bytes_max,
            )  # fmt: skip

    def journal(self, code: int, key: str, argument: list[Any], outcome: Outcome | None, *, began_ms: int = 0) -> int:
        """Append a step. Returns its index."""
        index = self.length
        self.length = index + 1
        self.touched = True
        grown = len(key) + 44 + bytes_in(argument)
        packed = None
        if outcome is not None:
            grown += bytes_in(outcome)
            packed = pack_outcome(outcome)
        self._grow(grown)
        self.send(StepFrame(self.id, self.epoch, index, code, key, argument, packed, began_ms))
        return index


_SIZED: Final = (bytes, str)


def _refusal_of(key: str) -> str:
    """The key of the step that records that the journal was too long for the operation `key`."""
    return REFUSED + blake2b(key.encode(), digest_size=16).hexdigest()


def bytes_in(parts: Iterable[Any]) -> int:
    """About how many bytes these take in a journal."""
    size = 0
    for part in parts:
        if isinstance(part, _SIZED):
            size += len(part)
    return size
