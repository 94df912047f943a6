"""Seeds that once found a defect. They always run, and are never removed from the list.

When the random choices of the simulator change, a seed takes another course. So each entry also names the mutant that
restores its defect, where there is one: `test_cluster_mutants.py` keeps finding that defect in the seeds that show it
today.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Regression(NamedTuple):
    seed: int
    profile: str
    found: str
    mutant: str | None = None


REGRESSIONS: Final = (
    Regression(
        4,
        "calm",
        "a question that came while its sender's disk was being written down was lost, and its asker waited for ever",
        "early-messages-lost",
    ),
    Regression(
        2,
        "store",
        "a node killed between a snapshot's rename and its sync believed the name at its next start, and trimmed its log",
        "found-names-trusted",
    ),
    Regression(
        8,
        "store",
        "two nodes that had lost the state of one partition each served nothing, and waited for each other's for ever",
        "serves-nothing-while-hollow",
    ),
    Regression(
        2,
        "members",
        "after a power loss of all nodes, those that had joined later were in nobody's settings, and no majority was found",
    ),
    Regression(
        33,
        "members",
        "a node with a full disk was invited to a partition, could not open its state, and broke the link to who invited it",
    ),
    Regression(
        8,
        "restore",
        "a restore was killed, run again and finished, and a power loss took what the first try had left",
        "restored-names-trusted",
    ),
    Regression(
        35,
        "snapshots",
        "a node was killed when it had made the directory of its snapshots; later the log was trimmed, and a power loss took "
        "the directory",
        "directories-trusted",
    ),
    Regression(
        92,
        "restore",
        "a new leader that had not heard of a deployment yet paused the invocations that were pinned to it",
    ),
    Regression(
        442,
        "restore",
        "the simulator: a run in doubt was decided to run again before the backup, and ran after it in both clusters",
    ),
    Regression(
        63,
        "restore",
        "a restored cluster began at the first level, and refused ids that its invocations had given out at the second",
    ),
    Regression(
        531569019721,
        "members",
        "a node that a partition had just made a member was removed, shown with 0 replicas and stopped",
        "held-by-the-table-alone",
    ),
    Regression(
        653344861058,
        "members",
        "a removed node was shown with 0 replicas and stopped while it voted in the meta group, which lost its majority",
    ),
    Regression(
        301848169148, "members", "a newcomer that was removed kept the meta group from all other changes for a minute"
    ),
    Regression(44, "members", "a newcomer that was removed kept the meta group from all other changes for a minute"),
    Regression(90, "members", "a newcomer that was removed kept the meta group from all other changes for a minute"),
    Regression(927393481097, "five", "a node that woke from a pause was asked before it had heard what it had missed"),
    Regression(
        718586078428,
        "slow",
        "a partition applied commands before its level was raised, and its reference began at the newest",
    ),
    Regression(
        1058137791055, "members", "one read of a partition that had moved away held up all watches of its node for 15 s"
    ),
)
