"""Each fix of the log, switched off by name: the simulator must then find a violation, or it is blind there.

A mutant is the real code with one rule taken out, patched in from here: production code has no switches. Where a rule is
written as a whole method, the mutant is that method without it. `WHERE` says in which kind of world each of them shows;
`tests/sim/test_mutants.py` looks for it there. By hand: `make sim PROFILE=three MUTANT=ack-before-fsync`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import getattr_static
from typing import Any, Final
from unittest.mock import patch

from pysyncobj import syncobj as stock

from holdfast.log import messages
from holdfast.log.engine import CANDIDATE, LEADER, Engine
from holdfast.log.group_log import GroupLog
from holdfast.log.host import Host
from holdfast.log.journal import Journal
from holdfast.log.messages import Append, AppendAck, AppendReject, RequestVote, Vote
from holdfast.log.progress import Progress
from holdfast.log.replica import Replica
from holdfast.log.rows import RECENT, row_of
from tests.sim.world import World

Patch = tuple[type, str, Any]
_stock_message: Final = stock.SyncObj._SyncObj__onMessageReceived
_become_leader: Final = "_SyncObj__onBecomeLeader"


def _original(owner: type, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr_static(owner, name)  # Of the class, or of a layer below it.
    return found


# -- AUDIT 1, 2, 3, 8: what a follower takes, and what it says of it -----------------------------------------------------


def truncate_always() -> list[Patch]:
    """Everything behind `prev` goes, whether it conflicts or not: a late append undoes acknowledged entries."""

    def take_entries(self: Any, sender: Any, m: Append) -> None:
        last = m.entries[-1][1] if m.entries else m.prev_index
        fields = {"prevLogIdx": m.prev_index, "prevLogTerm": m.prev_term, "entries": list(m.entries)}
        message = {"type": "append_entries", "term": m.term, "commit_index": min(m.commit, last)}
        _stock_message(self, sender, message | fields)
        self._find_seal()

    def truncate(self: Any, low: int) -> None:
        commit, self.commit = self.commit, min(self.commit, low - 1)  # Past the journal's own guard.
        _original_truncate(self, low)
        self.commit = min(commit, self.last_index)

    _original_truncate = _original(GroupLog, "truncate")
    return [(Engine, "_take_entries", take_entries), (GroupLog, "truncate", truncate)]


def follow_unverified() -> list[Patch]:
    """An append whose number follows is taken, whatever stands before it in the leader's log."""

    def follow(self: Any, sender: Any, term: int, prev: int, prev_term: int, *rest: Any) -> bool:
        known = self.log.last_term if prev == self.log.last_index else prev_term
        return original(self, sender, term, prev, known, *rest)  # type: ignore[no-any-return]

    original = _original(Engine, "follow")
    return [(Engine, "follow", follow)]


def follow_anybody() -> list[Patch]:
    """An append that follows is taken from a leader of an older term, as if it were of ours."""

    def follow(self: Any, sender: Any, term: int, *rest: Any) -> bool:
        return original(self, self.leader, self.term, *rest)  # type: ignore[no-any-return]

    original = _original(Engine, "follow")
    return [(Engine, "follow", follow)]


def commit_unverified() -> list[Patch]:
    """The leader's commit index is believed before the logs were compared."""

    def on_append(self: Any, sender: Any, m: Append) -> None:
        if m.term >= self.term:
            self._follow(sender, m.term, min(m.commit, self.log.last_index))
        original(self, sender, m)

    original = _original(Engine, "_on_append")
    return [(Engine, "_on_append", on_append)]


def ack_unverified() -> list[Patch]:
    """An acknowledgement names all that the follower holds, compared or not."""

    def promise(self: Any, peer: Any, message: Any) -> None:
        if type(message) is AppendAck:
            message = AppendAck(message.term, self.log.last_index)
        original(self, peer, message)

    original = _original(Engine, "promise")
    return [(Engine, "promise", promise)]


def ack_of_any_term() -> list[Patch]:
    """Acknowledgements of an older leadership count in this one."""

    def acknowledge(self: Any, sender: Any, term: int, index: int) -> bool | None:
        if term < self.term:
            term, index = self.term, min(index, self.log.last_index)
        return original(self, sender, term, index)  # type: ignore[no-any-return]

    original = _original(Engine, "acknowledge")
    return [(Engine, "acknowledge", acknowledge)]


def deposed_leader_followed() -> list[Patch]:
    """Appends of an older term are taken."""

    def on_append(self: Any, sender: Any, m: Append) -> None:
        if m.term < self.term and not self.is_leader:
            m = m._replace(term=self.term)
        original(self, sender, m)

    original = _original(Engine, "_on_append")
    return [(Engine, "_on_append", on_append)]


def next_below_match() -> list[Patch]:
    """A late rejection resets a follower below what it acknowledged."""

    def rejected(self: Progress, index: int, hint: int) -> bool:
        self.restart(max(1, min(hint, index)))
        return True

    return [(Progress, "rejected", rejected)]


# -- AUDIT 7: nothing is promised before it is on disk -------------------------------------------------------------------


def _at_once(kinds: tuple[type, ...]) -> list[Patch]:
    def promise(self: Any, peer: Any, message: Any) -> None:
        (self.out if isinstance(message, kinds) else self.promises).append((peer, message))

    return [(Engine, "promise", promise)]


def ack_before_fsync() -> list[Patch]:
    return _at_once((AppendAck, AppendReject))


def vote_before_fsync() -> list[Patch]:
    return _at_once((Vote,))


def campaign_before_fsync() -> list[Patch]:
    """A candidate asks for votes before its own is on disk."""
    return _at_once((RequestVote,))


def own_log_before_fsync() -> list[Patch]:
    """The leader counts itself for what its disk does not hold."""
    return [(Engine, "_own_durable", lambda self: self.log.last_index)]


def release_with_next_commit() -> list[Patch]:
    """Promises made while a commit is under way leave when it ends, though it does not hold what they speak of."""

    def committed(self: Any, now: float) -> None:
        self._held, self._promised = self._held + self._promised, []
        original(self, now)

    original = _original(Host, "committed")
    return [(Host, "committed", committed)]


def overtaken_promises_leave() -> list[Patch]:
    """A promise of an earlier term or epoch leaves although what it speaks of was never written: the group went on first."""
    return [(Host, "_still_kept", lambda self, promises: promises)]


def apply_before_fsync() -> list[Patch]:
    """Entries are applied when a majority has them, though our own disk does not: a state ahead of its log."""
    return [(Replica, "_applicable", property(lambda self: self.log.commit))]


def work_on_after_failed_fsync() -> list[Patch]:
    """The node takes a failed fsync for a success."""

    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        self.stop_on_failed_fsync = False

    original = _original(World, "__init__")
    return [(World, "__init__", init)]


def alone_before_fsync() -> list[Patch]:
    """A group of one leads before its term is on disk, and after a crash leads it again."""

    def campaign(self: Any, *, transfer: bool) -> None:
        original(self, transfer=transfer)
        if not self.peers:
            getattr(self, _become_leader)()

    original = _original(Engine, "_campaign")
    return [(Engine, "_campaign", campaign)]


# -- elections -----------------------------------------------------------------------------------------------------------


def vote_for_shorter_log() -> list[Patch]:
    """Votes go to whoever asks, however much its log lacks (Raft §5.4.1)."""

    def on_request_vote(self: Any, sender: Any, m: RequestVote) -> None:
        original(self, sender, m._replace(last_term=messages.INT_MAX))

    original = _original(Engine, "_on_request_vote")
    anybody = lambda self, last_term, last_index: True  # noqa: E731
    return [(Engine, "_on_request_vote", on_request_vote), (Engine, "_log_is_current", anybody)]


def vote_twice() -> list[Patch]:
    """A second candidate of a term gets a vote too."""

    def on_request_vote(self: Any, sender: Any, m: RequestVote) -> None:
        if sender in self.peers and m.term == self.term and self.log.vote not in (None, sender) and self.role != LEADER:
            self.log.vote = sender
            self.log._mark_hard()
            self.promise(sender, Vote(self.term, True))
        else:
            original(self, sender, m)

    original = _original(Engine, "_on_request_vote")
    return [(Engine, "_on_request_vote", on_request_vote)]


def votes_counted_twice() -> list[Patch]:
    """A copy of a vote is a second vote (AUDIT 25)."""
    return [(Engine, "_unheard", property(lambda self: set(self.peers)))]


def votes_of_older_terms() -> list[Patch]:
    """Votes of an older candidacy count in this one."""

    def on_vote(self: Any, sender: Any, m: Vote) -> None:
        original(self, sender, Vote(self.term, m.granted) if m.term < self.term and self.role == CANDIDATE else m)

    original = _original(Engine, "_on_vote")
    return [(Engine, "_on_vote", on_vote)]


def commit_older_terms() -> list[Patch]:
    """An older leader's entry is committed by counting alone (Raft §5.4.2)."""

    def maybe_commit(self: Any) -> None:
        index = self._majority(self.members)
        if (
            self.commit < index < self.log.last_index
            and self.log.term_of(index) < self.term
            and self.seal_index is None
        ):
            self.log.set_commit(index)
            self._SyncObj__raftCommitIndex = index
        original(self)

    original = _original(Engine, "_maybe_commit")
    return [(Engine, "_maybe_commit", maybe_commit)]


def no_prevote() -> list[Patch]:
    """A node that was cut off comes back with a higher term and ends a healthy leadership."""

    def ask(self: Any) -> None:
        self._campaign(transfer=False)

    return [(Engine, "_ask_for_prevotes", ask), (Engine, "_hears_leader", lambda self: False)]


def no_check_quorum() -> list[Patch]:
    """A leader that nobody answers goes on believing in itself, and its clients wait."""
    return [(Engine, "_quorum_heard", lambda self: True)]


# -- reads ---------------------------------------------------------------------------------------------------------------


def read_without_round() -> list[Patch]:
    """A leader answers reads from what it knows, without asking whether it still leads (AUDIT 18)."""

    def read_index(self: Any, ctx: object) -> None:
        if self.is_leader and self.term_committed and not self.sealed:
            self.reads_ready.append((self.commit, ctx))
        else:
            self.reads_failed.append(ctx)

    return [(Engine, "read_index", read_index)]


def read_before_own_commit() -> list[Patch]:
    """A new leader answers reads at a commit index that may be behind."""
    return [
        (Engine, "term_committed", property(lambda self: self.is_leader)),
        (Engine, "_read_floor", property(lambda self: 0)),
    ]


def read_after_seal() -> list[Patch]:
    """A leader whose epoch is over answers reads; its successor may have acknowledged writes."""
    return [(Engine, "sealed", property(lambda self: False))]


def reads_lost_at_seal() -> list[Patch]:
    """Reads that were confirmed in the turn of a seal are forgotten."""

    def enter(self: Any, *args: Any) -> None:
        self.engine.reads_ready, self.engine.reads_failed = [], []
        original(self, *args)

    original = _original(Replica, "_enter")
    return [(Replica, "_enter", enter)]


# -- snapshots and the state ---------------------------------------------------------------------------------------------


def install_anything() -> list[Patch]:
    """A state replaces ours although nobody in this epoch offered it, or we lead."""
    return [(Engine, "may_install", lambda self, index, term: index > self.commit)]


def install_before_epoch_is_durable() -> list[Patch]:
    """A state of a new epoch is installed before the epoch is on disk: a crash leaves it with the old one."""
    return [(GroupLog, "settled", property(lambda self: True))]


def install_older() -> list[Patch]:
    """A state older than our commit replaces ours (AUDIT 9)."""

    def installed(self: Any, index: int, term: int) -> None:
        self.log.commit = min(self.log.commit, index - 1)  # Past the journal's own guard.
        self._SyncObj__raftCommitIndex = self.log.commit
        original(self, index, term)

    original = _original(Engine, "installed")
    anything = lambda self, index, term: index != self.commit and not self.is_leader  # noqa: E731
    return [(Engine, "may_install", anything), (Engine, "installed", installed)]


def apply_twice() -> list[Patch]:
    """A restarted node applies its newest entry again (AUDIT 13)."""

    def match_machine(self: Any) -> None:
        original(self)
        self.applied = max(self.applied - 1, self.log.base_index)

    original = _original(Replica, "_match_machine")
    return [(Replica, "_match_machine", match_machine)]


def trust_damaged_entries() -> list[Patch]:
    """Checksums are not compared."""

    def decode(self: Any, index: int, key: bytes, value: bytes) -> Any:
        return value[12:], index, int.from_bytes(value[:8], "big")

    return [(GroupLog, "_decode", decode)]


# -- sessions and disks --------------------------------------------------------------------------------------------------


def old_rows_count() -> list[Patch]:
    """What rows say of a group counts for ever, also what was cut off meanwhile, or of a log that was deleted."""
    original = _original(GroupLog, "_load_recent")

    def load_recent(self: Any, recent: Any) -> None:
        mark, self.recent_from = self.recent_from, 0
        original(self, recent)
        self.recent_from = mark

    return [(GroupLog, "_load_recent", load_recent)]


def rows_go_too_soon() -> list[Patch]:
    """Rows are deleted although they hold entries that are not filed."""
    original = _original(Journal, "_pass_filed")

    def pass_filed(self: Any) -> int:
        original(self)
        return self.next_row  # type: ignore[no-any-return]

    return [(Journal, "_pass_filed", pass_filed)]


def rows_go_when_filed() -> list[Patch]:
    """Rows are deleted although tables point to them."""
    return [(GroupLog, "first_row", lambda self: None)]


def spans_trimmed_too_far() -> list[Patch]:
    """Of a group that is trimmed, one entry too many is thought to be gone."""
    original = _original(GroupLog, "first_row")

    def first_row(self: Any) -> int | None:
        base, self.base_index = self.base_index, self.base_index + 1
        found: int | None = original(self)
        self.base_index = base
        return found

    return [(GroupLog, "first_row", first_row)]


def move_too_much() -> list[Patch]:
    """A group is thought to have moved out of rows when the first of its entries has."""
    original = _original(GroupLog, "move")

    def move(self: Any, ops: Any, count_max: int) -> bool:
        moved: bool = original(self, ops, count_max)
        if moved:
            self._spans.clear()
        return moved

    return [(GroupLog, "move", move)]


def row_numbers_used_again() -> list[Patch]:
    """When no row is left, their numbers begin anew, below what groups remember of older ones."""

    def begin_rows(self: Any) -> None:
        waiting = sorted((row_of(log.places[0]), group) for group, log in self.groups.items() if log.places)
        self._unfiled = {group: row for row, group in waiting}
        if self.store.first(RECENT) is None:
            self.first_row = self.next_row = 1

    return [(Journal, "_begin_rows", begin_rows)]


def dead_sessions_heard() -> list[Patch]:
    """Frames of a session that is over are believed (AUDIT 32)."""

    def deliver(self: Any, peer: Any, session: int, envelopes: Any, now: float) -> None:
        original(self, peer, self.sessions.get(peer, session), envelopes, now)

    original = _original(Host, "deliver")
    return [(Host, "deliver", deliver)]


def disks_not_pinned() -> list[Patch]:
    """A node whose disk was replaced is believed to remember (AUDIT 12)."""

    def peer_up(self: Any, peer: Any, session: int, disk: str, now: float) -> bool:
        return original(self, peer, session, self.journal.pin(peer) or disk, now)  # type: ignore[no-any-return]

    original = _original(Host, "peer_up")
    return [(Host, "peer_up", peer_up)]


def pins_before_fsync() -> list[Patch]:
    """A session begins before its peer's disk is pinned durably."""

    def peer_up(self: Any, peer: Any, session: int, disk: str, now: float) -> bool:
        held: bool = original(self, peer, session, disk, now)
        self._new_pins.discard(peer)
        if (peer, session) in self._unpinned:
            self._unpinned.remove((peer, session))
            self._begin_session(peer, session)
        return held

    original = _original(Host, "peer_up")
    return [(Host, "peer_up", peer_up)]


# -- epochs (AUDIT 4, 14; ADR 2) -----------------------------------------------------------------------------------------


def seal_by_old_majority() -> list[Patch]:
    """A seal takes effect before its successor's majority holds it."""

    def maybe_commit(self: Any) -> None:
        with patch.object(self, "next_members", None if self.next_members is None else self.members):
            original(self)

    original = _original(Engine, "_maybe_commit")
    return [(Engine, "_maybe_commit", maybe_commit)]


def commit_behind_seal() -> list[Patch]:
    """The old epoch commits entries behind its seal."""

    def maybe_commit(self: Any) -> None:
        with patch.object(self, "seal_index", None):
            original(self)

    original = _original(Engine, "_maybe_commit")
    return [(Engine, "_maybe_commit", maybe_commit)]


def forget_without_tombstone() -> list[Patch]:
    """A group is forgotten altogether: a member of an older epoch comes back to it with an empty log and a new vote."""
    return [(Journal, "_bury", lambda self, group, tombstone: None)]


def forget_what_may_count() -> list[Patch]:
    """A learner deletes a seal that it acknowledged: its successor begins without the log."""
    return [(Replica, "is_left_over", property(lambda self: not self.engine.is_member))]


def learners_counted_for_ever() -> list[Patch]:
    """A leader goes on counting what a learner held before it forgot the group, and sends it nothing."""
    return [(Engine, "learner_began", lambda self, peer: None)]


def hollow_and_deaf() -> list[Patch]:
    """A group without its state hears of no later epoch, and every state that it is given is of a later one."""
    return [(Host, "_learn_while_hollow", lambda *_: None)]


def fill_from_any_epoch() -> list[Patch]:
    """A group without its state takes one from behind a seal that it has not heard of."""

    def why_not_fill(self: Any, group: Any, index: int, term: int, epoch: int) -> str | None:
        return original(self, group, index, term, self.journal.groups[group].configuration.epoch)  # type: ignore[no-any-return]

    original = _original(Host, "why_not_fill")
    return [(Host, "why_not_fill", why_not_fill), (Host, "_learn_while_hollow", lambda *_: None)]


def forget_seal() -> list[Patch]:
    """A new leader does not notice that the log it inherited is sealed."""

    def find_seal(self: Any) -> None:
        self.seal_index = self.next_members = None

    return [(Engine, "_find_seal", find_seal)]


def epoch_keeps_tail() -> list[Patch]:
    """Whoever is told of a later epoch keeps the entries of the old one that it does not know to be committed."""

    def learn_epoch(self: Any, *args: Any) -> None:
        with patch.object(GroupLog, "truncate", lambda self, low: None):
            original(self, *args)

    original = _original(Replica, "learn_epoch")
    return [(Replica, "learn_epoch", learn_epoch)]


def told_once() -> list[Patch]:
    """Whoever answered a heartbeat once is not told of the epoch again, though it may have died before that was on its disk."""

    def peer_up(self: Any, peer: Any) -> None:
        known = self.progress.get(peer)
        sequence = 0 if known is None else known.sequence
        original(self, peer)
        if known is not None:
            known.sequence = sequence

    original = _original(Engine, "peer_up")
    return [(Engine, "peer_up", peer_up)]


def only_leaders_tell() -> list[Patch]:
    """Without a leader nobody tells a member of its epoch, and without that member there may be no majority to elect one."""

    def ask(self: Any) -> None:
        with patch.object(type(self), "_tell_epoch", lambda self, peer: None):
            original(self)

    original = _original(Engine, "_ask_for_prevotes")
    return [(Engine, "_ask_for_prevotes", ask)]


def nobody_asks() -> list[Patch]:
    """Who is left behind in an old epoch waits to be told."""
    return [(Engine, "_ask_around", lambda self: None)]


MUTANTS: Final[dict[str, Callable[[], list[Patch]]]] = {
    mutant.__name__.replace("_", "-"): mutant
    for mutant in (
        truncate_always,
        follow_unverified,
        follow_anybody,
        commit_unverified,
        ack_unverified,
        ack_of_any_term,
        deposed_leader_followed,
        next_below_match,
        ack_before_fsync,
        vote_before_fsync,
        campaign_before_fsync,
        own_log_before_fsync,
        release_with_next_commit,
        overtaken_promises_leave,
        apply_before_fsync,
        work_on_after_failed_fsync,
        alone_before_fsync,
        vote_for_shorter_log,
        vote_twice,
        votes_counted_twice,
        votes_of_older_terms,
        commit_older_terms,
        no_prevote,
        no_check_quorum,
        read_without_round,
        read_before_own_commit,
        read_after_seal,
        reads_lost_at_seal,
        install_anything,
        install_before_epoch_is_durable,
        install_older,
        apply_twice,
        trust_damaged_entries,
        old_rows_count,
        rows_go_too_soon,
        rows_go_when_filed,
        spans_trimmed_too_far,
        move_too_much,
        row_numbers_used_again,
        dead_sessions_heard,
        disks_not_pinned,
        pins_before_fsync,
        seal_by_old_majority,
        commit_behind_seal,
        forget_seal,
        epoch_keeps_tail,
        nobody_asks,
        told_once,
        only_leaders_tell,
        forget_without_tombstone,
        forget_what_may_count,
        learners_counted_for_ever,
        hollow_and_deaf,
        fill_from_any_epoch,
    )
}

#: The kind of world in which each is found soonest.
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
