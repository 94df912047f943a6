"""Batching: messages of many groups to one peer become one message (ADR 7).

A batch is exactly its parts, in the order in which they were said. There are two kinds, `Appends` and `AppendAcks` in
`messages.py`. The host decides when a batch may leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from holdfast.log.messages import (
    ACKS_WIDTH,
    APPENDS_WIDTH,
    Append,
    AppendAck,
    AppendAcks,
    Appends,
    Envelope,
    GroupId,
    NodeId,
    build,
)

if TYPE_CHECKING:
    from holdfast.log.group_log import GroupLog
    from holdfast.log.replica import Replica

BATCH_GROUPS_MAX = 4096  # Groups per message,
BATCH_BYTES_MAX = 1024 * 1024  # and bytes of their commands, exceeded by at most one command.
APP_GROUP = GroupId(0)  # For messages that belong to no group: those of the rooms above and batches.

_first = itemgetter(0)
#: Consecutive promises to one peer in one session.
Promises: TypeAlias = tuple[NodeId, int, list[Envelope]]


def without(group: GroupId, envelopes: list[Envelope]) -> list[Envelope]:
    """The messages about other groups. (We have no `Appends` about a group that we leave, because we do not lead it.)"""
    return filtered(envelopes, lambda of, _epoch, _term: of != group)


def filtered(envelopes: list[Envelope], is_kept: Callable[[GroupId, int, int], bool]) -> list[Envelope]:
    """The messages for which `is_kept(group, epoch, term)` is true. The term is 0 for messages without one."""
    kept = []
    for envelope in envelopes:
        message = envelope.message
        if type(message) is AppendAcks:
            flat = message.flat
            left = [field for at in range(0, len(flat), ACKS_WIDTH) if is_kept(GroupId(flat[at]), *flat[at + 1 : at + 3])
                    for field in flat[at : at + ACKS_WIDTH]]  # fmt: skip
            if left:
                kept.append(Envelope(APP_GROUP, 0, AppendAcks(left)))
        elif is_kept(envelope.group, envelope.epoch, getattr(message, "term", 0)):
            kept.append(envelope)
    return kept


def filtered_promises(promises: list[Promises], is_kept: Callable[[GroupId, int, int], bool]) -> list[Promises]:
    kept = [(peer, session, filtered(some, is_kept)) for peer, session, some in promises]
    return [run for run in kept if run[2]]


def promises_still_kept(promises: list[Promises], risen: Mapping[GroupId, GroupLog]) -> list[Promises]:
    """Drop promises of an earlier term or epoch of the groups in `risen`.

    Such a promise may refer to a vote or to entries that were never written. No peer needs it: candidates and leaders of an
    earlier term learn our term from our next answer, and members of an earlier epoch are answered with the later one.
    """

    def is_kept(group: GroupId, epoch: int, term: int) -> bool:
        log = risen.get(group)
        return log is None or (epoch, term) == (log.configuration.epoch, log.term)

    return filtered_promises(promises, is_kept)


def gather_out(speaking: list[Replica], sessions: Mapping[NodeId, int], outbox: dict[NodeId, list[Envelope]]) -> None:
    """Move messages from engines to `outbox`. Followers that keep up receive the same one entry per group, in one batch."""
    #: The last append of one entry to `listeners`; a list once it covers several groups.
    last: tuple[Any, ...] | list[Any] = ()
    listeners: tuple[NodeId, ...] | None = None
    size = 0
    for replica in speaking:
        group, engine = replica.group, replica.engine
        out, engine.out = engine.out, []
        said = out[0][1]
        is_shared = type(said) is Append and len(said[4]) == 1
        for _, message in out:
            if message is not said:
                is_shared = False
        if is_shared:
            term, prev_index, prev_term, commit, ((command, _, entry_term),) = said  # type: ignore[misc]
            fields = group, engine.epoch, term, prev_index, prev_term, commit, entry_term, command
            peers = tuple(map(_first, out))
            if peers == listeners and size < BATCH_BYTES_MAX and len(last) < APPENDS_WIDTH * BATCH_GROUPS_MAX:
                size += len(command)
                if type(last) is list:
                    last += fields
                    continue
                last = [*last, *fields]
                envelope = Envelope(APP_GROUP, 0, Appends(last))
                for peer in peers:
                    if peer in sessions:
                        outbox[peer][-1] = envelope
                continue
            last, listeners, size = fields, peers, len(command)
        else:
            listeners = None
        envelope = build(Envelope, (group, engine.epoch, said))
        for peer, message in out:
            if peer in sessions:
                if message is not said:
                    said, envelope = message, build(Envelope, (group, engine.epoch, message))
                outbox.setdefault(peer, []).append(envelope)


def gather_promises(promising: list[Replica], sessions: Mapping[NodeId, int], promised: list[Promises]) -> None:
    """Add promises to those that wait for the next commit: the current one may not contain what they refer to."""
    run: list[Envelope] = []
    run_peer: NodeId | None = None
    acks: list[int] | None = None  # The batch at the end of the run, if there is one.
    for replica in promising:
        group, engine = replica.group, replica.engine
        for peer, message in engine.promises:
            if peer != run_peer:
                session = sessions.get(peer)
                if session is None:
                    continue
                run, run_peer, acks = [], peer, None
                promised.append((peer, session, run))
            if type(message) is not AppendAck:
                acks = None
            elif acks is not None and len(acks) < ACKS_WIDTH * BATCH_GROUPS_MAX:
                acks += group, engine.epoch, *message
                continue
            elif run and type(run[-1].message) is AppendAck:
                # Acknowledgements of many groups usually follow one another, and share one message.
                first_group, first_epoch, first = run.pop()
                acks = [first_group, first_epoch, *first, group, engine.epoch, *message]
                run.append(Envelope(APP_GROUP, 0, AppendAcks(acks)))
                continue
            run.append(build(Envelope, (group, engine.epoch, message)))
        engine.promises = []
