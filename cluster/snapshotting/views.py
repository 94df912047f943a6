"""Snapshots in the admin API."""

from __future__ import annotations

from typing import Any

from holdfast.cluster.snapshotting.keeper import Keeper
from holdfast.cluster.snapshotting.service import Snapshots


def show_keeper(keeper: Keeper) -> dict[str, Any]:
    """The snapshots of one partition on this node."""
    newest = keeper.newest
    shown: dict[str, Any] = {
        "index": newest.header.meta.index if newest is not None else None,
        "term": newest.header.meta.term if newest is not None else None,
        "bytes": newest.header.file_bytes if newest is not None else None,
        "name": newest.name if newest is not None else None,
        "age_s": round(keeper.age_s, 1) if newest is not None else None,
        "stored": newest is not None and newest.name == keeper.published,
        "log_begins_behind": keeper.group.status().base,
        "doing": keeper.doing,
        "error": keeper.cutting.error or keeper.publishing.error or keeper.fetching.error,
    }
    if keeper.doing is not None:
        shown["progress"] = {"bytes": keeper.done_bytes, "of_bytes": keeper.total_bytes}
    return shown


def show_snapshots(home: Snapshots) -> dict[str, Any]:
    """Where this node stores its snapshots, and what is wrong with that store."""
    failing = [keeper.publishing.error for keeper in home.keepers.values() if keeper.publishing.error is not None]
    return {
        "store": home.config.snapshots or None,
        "error": home.store_complaints.error or (failing[0] if failing else None),
        "directory": str(home.config.data / "snapshots"),
    }
