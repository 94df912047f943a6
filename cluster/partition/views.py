"""Partitions in the admin API: the state of a group, and the changes of invocations that events tell of."""

from __future__ import annotations

from typing import Annotated, TypedDict

from holdfast.cluster.partition.changes import Change
from holdfast.cluster.schemas import Time, one_of
from holdfast.cluster.times import show_time
from holdfast.log.engine import ROLE_NAMES
from holdfast.log.node import Group
from holdfast.sdk.ids import format_id
from holdfast.statemachine.effects import STATUS_NAMES, Status
from holdfast.statemachine.records import END_NAMES, End


class ShownGroup(TypedDict):
    """A Raft group as the node that answers sees it."""

    leader: str | None
    role: Annotated[str, one_of([*ROLE_NAMES.values(), "learner"])]
    term: int
    members: list[str]
    commit: Annotated[int, "the index of the newest committed entry"]
    applied: Annotated[int, "the index of the newest applied entry"]
    apply_lag: Annotated[int, "committed entries that are not applied yet"]
    follower_lag: Annotated[
        dict[str, int] | None, "entries that each follower does not have yet; only the leader knows"
    ]


class Event(TypedDict):
    """A change of an invocation."""

    id: str
    service: str
    handler: str
    key: str | None
    status: Annotated[str, one_of(STATUS_NAMES.values())]
    end: Annotated[str, one_of(name for end, name in END_NAMES.items() if end != End.NONE)] | None
    since: Annotated[Time | None, "when it came to this status"]
    attempts: int
    created_at: Time | None
    caller: Annotated[str | None, "the invocation that called or sent it"]


def show_group(group: Group) -> ShownGroup:
    status = group.status()
    lags: dict[str, int] = {peer: max(status.last - match, 0) for peer, match in status.match.items()}
    return {
        "leader": status.leader,
        "role": status.role,
        "term": status.term,
        "members": list(status.members),
        "commit": status.commit,
        "applied": status.applied,
        "apply_lag": max(status.commit - status.applied, 0),
        "follower_lag": lags if group.is_leader else None,
    }


def show_change(change: Change) -> Event:
    return {
        "id": format_id(change.id),
        "service": change.service,
        "handler": change.handler,
        "key": change.key,
        "status": STATUS_NAMES[change.shown_status],
        "end": END_NAMES[change.shown_end] if change.status == Status.COMPLETED else None,
        "since": show_time(change.since_ms),
        "attempts": change.epoch,
        "created_at": show_time(change.created_ms),
        "caller": format_id(change.caller) if change.caller else None,
    }
