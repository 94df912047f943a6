"""Each fix of the log, switched off by name: the simulator must then find a violation, or it cannot see that rule.

A mutant is the real code without one rule (`mutations.py`). `WHERE` names the profile in which each of them shows;
`tests/sim/test_mutants.py` looks for it there. By hand: `make sim PROFILE=three MUTANT=ack-before-fsync`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import getattr_static
from typing import Final
from unittest.mock import patch

from holdfast.log.engine import Engine
from tests.sim import mutations
from tests.sim.mutations import Patch

MUTANTS: Final[dict[str, Callable[[], list[Patch]]]] = {
    mutant.__name__.replace("_", "-"): mutant
    for mutant in (
        mutations.truncate_always,
        mutations.follow_unverified,
        mutations.follow_anybody,
        mutations.commit_unverified,
        mutations.ack_unverified,
        mutations.ack_of_any_term,
        mutations.deposed_leader_followed,
        mutations.next_below_match,
        mutations.ack_before_fsync,
        mutations.vote_before_fsync,
        mutations.campaign_before_fsync,
        mutations.own_log_before_fsync,
        mutations.release_with_next_commit,
        mutations.overtaken_promises_leave,
        mutations.apply_before_fsync,
        mutations.work_on_after_failed_fsync,
        mutations.alone_before_fsync,
        mutations.vote_for_shorter_log,
        mutations.vote_twice,
        mutations.votes_counted_twice,
        mutations.votes_of_older_terms,
        mutations.commit_older_terms,
        mutations.no_prevote,
        mutations.no_check_quorum,
        mutations.read_without_round,
        mutations.read_before_own_commit,
        mutations.read_after_seal,
        mutations.reads_lost_at_seal,
        mutations.install_anything,
        mutations.install_before_epoch_is_durable,
        mutations.install_older,
        mutations.apply_twice,
        mutations.trust_damaged_entries,
        mutations.old_rows_count,
        mutations.rows_go_too_soon,
        mutations.rows_go_when_filed,
        mutations.spans_trimmed_too_far,
        mutations.move_too_much,
        mutations.row_numbers_used_again,
        mutations.dead_sessions_heard,
        mutations.disks_not_pinned,
        mutations.pins_before_fsync,
        mutations.seal_by_old_majority,
        mutations.commit_behind_seal,
        mutations.forget_seal,
        mutations.epoch_keeps_tail,
        mutations.nobody_asks,
        mutations.told_once,
        mutations.only_leaders_tell,
        mutations.forget_without_tombstone,
        mutations.forget_what_may_count,
        mutations.learners_counted_for_ever,
        mutations.hollow_and_deaf,
        mutations.fill_from_any_epoch,
    )
}

#: The profile in which each is found soonest.
WHERE: Final = {
    "truncate-always": "three",
    "follow-unverified": "usurpers",
    "follow-anybody": "four-groups",
    "commit-unverified": "plain",
    "ack-unverified": "hostile",
    "ack-of-any-term": "late-acks",
    "deposed-leader-followed": "usurpers",
    "next-below-match": "hostile",
    "ack-before-fsync": "three",
    "vote-before-fsync": "three",
    "campaign-before-fsync": "three",
    "own-log-before-fsync": "three",
    "release-with-next-commit": "three",
    "overtaken-promises-leave": "sealing",
    "apply-before-fsync": "sealing",
    "work-on-after-failed-fsync": "slow-disk",
    "alone-before-fsync": "hermits",
    "vote-for-shorter-log": "usurpers",
    "vote-twice": "five",
    "votes-counted-twice": "storm",
    "votes-of-older-terms": "slow-disk",
    "commit-older-terms": "older-terms",
    "no-prevote": "steady",
    "no-check-quorum": "steady",
    "read-without-round": "usurpers",
    "read-before-own-commit": "slow-disk",
    "read-after-seal": "stale-reads",
    "reads-lost-at-seal": "reads-at-the-seal",
    "install-anything": "stray-snapshots",
    "install-before-epoch-is-durable": "hasty-installs",
    "install-older": "calm",
    "apply-twice": "three",
    "trust-damaged-entries": "corruption",
    "old-rows-count": "leavers",
    "rows-go-too-soon": "three",
    "rows-go-when-filed": "three",
    "spans-trimmed-too-far": "three",
    "move-too-much": "three",
    "row-numbers-used-again": "snapshots",
    "dead-sessions-heard": "three",
    "disks-not-pinned": "wipes",
    "pins-before-fsync": "slow-disk",
    "seal-by-old-majority": "sealing",
    "commit-behind-seal": "sealing",
    "forget-seal": "two-epochs",
    "epoch-keeps-tail": "two-epochs",
    "nobody-asks": "last-witness",
    "told-once": "lost-member",
    "only-leaders-tell": "lost-member",
    "forget-without-tombstone": "leavers",
    "forget-what-may-count": "hermits",
    "learners-counted-for-ever": "hermits",
    "hollow-and-deaf": "hollow",
    "fill-from-any-epoch": "hollow",
}

#: The seed that finds a mutant there, unless it is among the first.
SEEDS: Final = {
    "ack-unverified": 5,
    "alone-before-fsync": 4,
    "apply-before-fsync": 25,
    "commit-older-terms": 10,
    "commit-unverified": 3,
    "disks-not-pinned": 5,
    "follow-anybody": 9,
    "follow-unverified": 3,
    "forget-what-may-count": 4,
    "forget-without-tombstone": 11,
    "hollow-and-deaf": 8,
    "install-anything": 2,
    "install-before-epoch-is-durable": 6,
    "install-older": 6,
    "learners-counted-for-ever": 1,
    "move-too-much": 2,
    "next-below-match": 4,
    "old-rows-count": 2,
    "only-leaders-tell": 2,
    "read-before-own-commit": 6,
    "reads-lost-at-seal": 1,
    "row-numbers-used-again": 29,
    "rows-go-too-soon": 2,
    "rows-go-when-filed": 2,
    "seal-by-old-majority": 1,
    "spans-trimmed-too-far": 2,
    "votes-counted-twice": 5,
}


@contextmanager
def switched_off(name: str) -> Iterator[None]:
    """The log without the fix of that name."""
    steps = dict(Engine.STEPS)
    with ExitStack() as stack:
        for owner, attribute, replacement in MUTANTS[name]():
            for kind, step in Engine.STEPS.items():
                if step is getattr_static(owner, attribute, None):
                    steps[kind] = replacement
            stack.enter_context(patch.object(owner, attribute, replacement))
        stack.enter_context(patch.object(Engine, "STEPS", steps))
        yield
