"""The log without one rule, rule by rule: `mutants.py` patches these into the real code.

Production code has no switches. Where a rule is a whole method, the mutation is that method without the rule.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Everything after `prev` is removed, whether it conflicts or not: a late append undoes acknowledged entries."""

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
    """An append whose index follows is accepted, whatever precedes it in the leader's log."""

    def follow(self: Any, sender: Any, term: int, prev: int, prev_term: int, *rest: Any) -> bool:
        known = self.log.last_term if prev == self.log.last_index else prev_term
        return original(self, sender, term, prev, known, *rest)  # type: ignore[no-any-return]

    original = _original(Engine, "follow")
    return [(Engine, "follow", follow)]


def follow_anybody() -> list[Patch]:
    """An append that follows is accepted from a leader of an older term, as if it were of ours."""

    def follow(self: Any, sender: Any, term: int, *rest: Any) -> bool:
        return original(self, self.leader, self.term, *rest)  # type: ignore[no-any-return]

    original = _original(Engine, "follow")
    return [(Engine, "follow", follow)]


def commit_unverified() -> list[Patch]:
    """The leader's commit index is trusted before the logs were compared."""

    def on_append(self: Any, sender: Any, m: Append) -> None:
        if m.term >= self.term:
            self._follow(sender, m.term, min(m.commit, self.log.last_index))
        original(self, sender, m)

    original = _original(Engine, "_on_append")
    return [(Engine, "_on_append", on_append)]


def ack_unverified() -> list[Patch]:
    """An acknowledgement covers everything that the follower holds, compared or not."""

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
    """Appends of an older term are accepted."""

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
    """The leader counts entries that its own disk does not hold."""
    return [(Engine, "_own_durable", lambda self: self.log.last_index)]


def release_with_next_commit() -> list[Patch]:
    """Promises made during a commit leave when it ends, although it does not hold what they refer to."""

    def committed(self: Any, now: float) -> None:
        self._held, self._promised = self._held + self._promised, []
        original(self, now)

    original = _original(Host, "committed")
    return [(Host, "committed", committed)]


def overtaken_promises_leave() -> list[Patch]:
    """A promise of an earlier term or epoch leaves although what it refers to was never written, because the group
    moved on."""
    return [(Host, "_still_kept", lambda self, promises: promises)]


def apply_before_fsync() -> list[Patch]:
    """Entries are applied when a majority has them, although our own disk does not: a state ahead of its log."""
    return [(Replica, "_applicable", property(lambda self: self.log.commit))]


def work_on_after_failed_fsync() -> list[Patch]:
    """The node treats a failed fsync as a success."""

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
    """Votes go to any candidate, however much its log lacks (Raft §5.4.1)."""

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
    """A copy of a vote counts as a second vote (AUDIT 25)."""
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
    """A node that was cut off returns with a higher term and ends a healthy leadership."""

    def ask(self: Any) -> None:
        self._campaign(transfer=False)

    return [(Engine, "_ask_for_prevotes", ask), (Engine, "_hears_leader", lambda self: False)]


def no_check_quorum() -> list[Patch]:
    """A leader without answers continues to lead, and its clients wait."""
    return [(Engine, "_quorum_heard", lambda self: True)]


# -- reads ---------------------------------------------------------------------------------------------------------------


def read_without_round() -> list[Patch]:
    """A leader answers reads without checking that it still leads (AUDIT 18)."""

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
    """A state replaces ours although no leader of this epoch offered it, or although we lead."""
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
    """Rows count for a group for ever, including truncated entries and those of a deleted log."""
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
    """One entry too many of a trimmed group counts as gone."""
    original = _original(GroupLog, "first_row")

    def first_row(self: Any) -> int | None:
        base, self.base_index = self.base_index, self.base_index + 1
        found: int | None = original(self)
        self.base_index = base
        return found

    return [(GroupLog, "first_row", first_row)]


def move_too_much() -> list[Patch]:
    """A group counts as moved out of rows when its first entry has moved."""
    original = _original(GroupLog, "move")

    def move(self: Any, ops: Any, count_max: int) -> bool:
        moved: bool = original(self, ops, count_max)
        if moved:
            self._spans.clear()
        return moved

    return [(GroupLog, "move", move)]


def row_numbers_used_again() -> list[Patch]:
    """When no row is left, row numbers start again, below the marks of groups."""

    def begin_rows(self: Any) -> None:
        waiting = sorted((row_of(log.places[0]), group) for group, log in self.groups.items() if log.places)
        self._unfiled = {group: row for row, group in waiting}
        if self.store.first(RECENT) is None:
            self.first_row = self.next_row = 1

    return [(Journal, "_begin_rows", begin_rows)]


def dead_sessions_heard() -> list[Patch]:
    """Frames of an ended session are accepted (AUDIT 32)."""

    def deliver(self: Any, peer: Any, session: int, envelopes: Any, now: float) -> None:
        original(self, peer, self.sessions.get(peer, session), envelopes, now)

    original = _original(Host, "deliver")
    return [(Host, "deliver", deliver)]


def disks_not_pinned() -> list[Patch]:
    """A node whose disk was replaced is trusted to remember (AUDIT 12)."""

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
    """The old epoch commits entries after its seal."""

    def maybe_commit(self: Any) -> None:
        with patch.object(self, "seal_index", None):
            original(self)

    original = _original(Engine, "_maybe_commit")
    return [(Engine, "_maybe_commit", maybe_commit)]


def forget_without_tombstone() -> list[Patch]:
    """A group is forgotten without a tombstone: a member of an older epoch rejoins it with an empty log and a new vote."""
    return [(Journal, "_bury", lambda self, group, tombstone: None)]


def forget_what_may_count() -> list[Patch]:
    """A learner deletes a seal that it acknowledged: its successor begins without the log."""
    return [(Replica, "is_left_over", property(lambda self: not self.engine.is_member))]


def learners_counted_for_ever() -> list[Patch]:
    """A leader continues to count entries that a learner held before it forgot the group, and sends it nothing."""
    return [(Engine, "learner_began", lambda self, peer: None)]


def hollow_and_deaf() -> list[Patch]:
    """A group without its state learns of no later epoch, and every offered state is of a later one."""
    return [(Host, "_learn_while_hollow", lambda *_: None)]


def fill_from_any_epoch() -> list[Patch]:
    """A group without its state accepts one from after a seal that it does not know."""

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
    """A node that learns of a later epoch keeps entries of the old one that it does not know to be committed."""

    def learn_epoch(self: Any, *args: Any) -> None:
        with patch.object(GroupLog, "truncate", lambda self, low: None):
            original(self, *args)

    original = _original(Replica, "learn_epoch")
    return [(Replica, "learn_epoch", learn_epoch)]


def told_once() -> list[Patch]:
    """A node that answered a heartbeat once is not told of the epoch again, although it may have died before that was
    on its disk."""

    def peer_up(self: Any, peer: Any) -> None:
        known = self.progress.get(peer)
        sequence = 0 if known is None else known.sequence
        original(self, peer)
        if known is not None:
            known.sequence = sequence

    original = _original(Engine, "peer_up")
    return [(Engine, "peer_up", peer_up)]


def only_leaders_tell() -> list[Patch]:
    """Without a leader, a member is not told of its epoch, and without that member there may be no majority to elect
    one."""

    def ask(self: Any) -> None:
        with patch.object(type(self), "_tell_epoch", lambda self, peer: None):
            original(self)

    original = _original(Engine, "_ask_for_prevotes")
    return [(Engine, "_ask_for_prevotes", ask)]


def nobody_asks() -> list[Patch]:
    """A node that is left behind in an old epoch waits to be told."""
    return [(Engine, "_ask_around", lambda self: None)]
