"""Snapshots in the admin API."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from holdfast.cluster.snapshotting.keeper import Keeper
from holdfast.cluster.snapshotting.service import Snapshots


class SnapshotProgress(TypedDict):
    bytes: int
    of_bytes: int


class KeptSnapshots(TypedDict):
    """The snapshots of one partition on this node. What concerns the newest is null if there is none."""

    index: Annotated[int | None, "of the last entry in the newest snapshot"]
    term: Annotated[int | None, "of that entry"]
    bytes: int | None
    name: str | None
    age_s: float | None
    stored: Annotated[bool, "the newest is in the shared store"]
    log_begins_behind: Annotated[int, "the log has the entries after this index"]
    doing: Annotated[str | None, "what is in progress, in words"]
    error: str | None
    progress: NotRequired[SnapshotProgress]


class SnapshotStore(TypedDict):
    """Where this node stores its snapshots."""

    store: Annotated[str | None, "the address of the shared store; null: there is none"]
    error: Annotated[str | None, "what is wrong with that store"]
    directory: Annotated[str, "of this node's own snapshots"]


def show_keeper(keeper: Keeper) -> KeptSnapshots:
    """The snapshots of one partition on this node."""
    newest = keeper.newest
    shown: KeptSnapshots = {
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


def show_snapshots(home: Snapshots) -> SnapshotStore:
    """Where this node stores its snapshots, and what is wrong with that store."""
    failing = [keeper.publishing.error for keeper in home.keepers.values() if keeper.publishing.error is not None]
    return {
        "store": home.config.snapshots or None,
        "error": home.store_complaints.error or (failing[0] if failing else None),
        "directory": str(home.config.data / "snapshots"),
    }
