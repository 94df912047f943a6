"""Seeds that once found a defect. They always run, and are never removed from the list.

When the random choices of the simulator change, a seed takes another course. So each entry also names the mutant that
restores its defect, where there is one: `test_mutants.py` keeps finding that defect in the seeds that show it today.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Regression(NamedTuple):
    seed: int
    profile: str
    found: str
    mutant: str | None = None


REGRESSIONS: Final = (
    Regression(20, "movers", "the last to know that an epoch is over were outside its successor", "nobody-asks"),
    Regression(48, "slow-disk", "an fsync that failed after the healing left a node down"),
    Regression(110, "wipes", "a peer that never met a disk trusted its replacement"),
    Regression(1084, "slow-disk", "a leader died between telling of a seal and being looked at"),
    Regression(2095, "sealing", "a cut that was planned before the healing came after it"),
    Regression(245, "sealing", "an acknowledgement of the old epoch left when the node was in the new one"),
    Regression(
        0, "stale-reads", "a leader with a slow disk answered reads after its epoch was over", "read-after-seal"
    ),
    Regression(
        16, "stray-snapshots", "a state from behind the end of an epoch was installed in it", "install-anything"
    ),
    Regression(2, "hasty-installs", "a state outlived the record of its epoch", "install-before-epoch-is-durable"),
    Regression(12, "hermits", "a group of one led the same term in two lives", "alone-before-fsync"),
    Regression(1, "reads-at-the-seal", "reads of the turn of a seal were forgotten", "reads-lost-at-seal"),
    Regression(5, "hostile", "a session began before its peer's disk was pinned", "pins-before-fsync"),
    Regression(13, "corruption", "a flipped bit in the record of a peer's disk was believed"),
    Regression(
        1295, "hermits", "a learner that had forgotten the group ended when the leader still counted its old log"
    ),
    Regression(885466291062, "sealing", "a leader counted what a follower had cut when it entered a later epoch"),
    Regression(
        25316963456,
        "sealing",
        "an acknowledgement left although the entry was cut off before it was written",
        "overtaken-promises-leave",
    ),
    Regression(
        989970610011, "leavers", "a member died before its group was on disk, and was never told again", "told-once"
    ),
    Regression(
        25316963334, "leavers", "a member died before its group was on disk, and was never told again", "told-once"
    ),
    Regression(
        2, "lost-member", "two of three members elected nobody: one did not know of the group", "only-leaders-tell"
    ),
)
