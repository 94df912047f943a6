"""Partitions in the admin API: the state of a group, and the changes of invocations that events tell of."""

from __future__ import annotations

from typing import Any

from holdfast.cluster.partition.changes import Change
from holdfast.cluster.times import show_time
from holdfast.log.node import Group
from holdfast.sdk.ids import format_id
from holdfast.statemachine.effects import STATUS_NAMES, Status
from holdfast.statemachine.records import END_NAMES


def show_group(group: Group) -> dict[str, Any]:
    status = group.status()
    lags = {peer: max(status.last - match, 0) for peer, match in status.match.items()}
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


def show_change(change: Change) -> dict[str, Any]:
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
