"""Levels: how nodes of two releases apply one log to the same bytes.

During a rolling upgrade, replicas of a partition run different releases. A release that changes what apply does to the state
therefore has a new *level*, and behaves as before until the level of the state is raised. `RaiseLevel` is a command of the log
like any other, so every replica changes its behaviour at the same entry. It is proposed only when every node of the cluster
supports the level. From then on an older release refuses the state, whose schema is too new, and the log, which has an unknown
command.

    level 1   the release before levels existed
    level 2   failures carry metadata and traces; steps carry times; lost streams and failing steps are counted;
              journals keep hashes of payloads; a cancellation is noticed before the output; deadlocks are refused,
              and calls that are nested too deep; a deployment with an upgraded SDK registers again; a message that
              cannot be read stops the node; a used idempotency key refuses another body; an edit of state may expect
              values; the meta group has tokens, an audit trail, an identity and pauses; a deployment names its handler
              protocol; invocations have tags, and are found by them, by their failures and by their completion;
              handlers ask people for approvals

Rules for a change of apply: branch on `state.level`; put new fields of records and commands at the end, with a default. The
encoders leave trailing fields out while they have their default, so that what level 1 writes has the bytes it always had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

FIRST: Final = 1
#: The newest level that this release supports.
LEVEL: Final = 2


class TooNew(Exception):
    """The log or a record was written by a release that supports a level which this one does not."""

    def __init__(self, what: str, level: int) -> None:
        super().__init__(
            f"{what} needs level {level}, and this release of Holdfast supports levels up to {LEVEL}: "
            "start this node with the release that the other nodes of its cluster run"
        )


def schema_of(level: int) -> int:
    """The number that a state of this level has on disk. A release refuses a state whose number it does not know."""
    return level + 2


def trimmed(row: Sequence[Any], later: Sequence[Any]) -> Sequence[Any]:
    """`row` without the trailing fields that have their default. `later`: the defaults of the fields since level 2."""
    base = len(row) - len(later)
    if row[base:] == later:  # As a rule, and every command and record passes here.
        return row[:base]
    if row[base + 1 :] == later[1:]:  # A request with an idempotency key has a hash.
        return row[: base + 1]
    end = len(row)
    while end > base and row[end - 1] == later[end - 1 - base]:
        end -= 1
    return row if end == len(row) else row[:end]
