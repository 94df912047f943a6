"""When to cut a snapshot, which ones to keep, how far to trim the log. Pure: numbers in, decisions out.

One rule is for safety: the log is trimmed only up to a durable snapshot. The others balance disk space, work, and how
fast a follower catches up after an absence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Policy:
    entries_max: int = 100_000
    """Cut after this many entries since the last snapshot,"""
    bytes_max: int = 256 << 20
    """or this many bytes of log,"""
    age_max_s: float = 3600.0
    """or this much time, if any entry was applied."""
    interval_min_s: float = 30.0
    """Minimum time between cuts, whatever the load."""
    retry_s: float = 30.0
    """Delay after a failed cut or upload. It doubles with each failure,"""
    retry_max_s: float = 600.0
    """up to this."""
    keep: int = 3
    """Number of snapshots kept in a store; at least one."""
    tail_entries: int = 10_000
    """Entries before the snapshot that stay in the log for followers that were away briefly."""
    lag_entries_max: int = 200_000
    """A slow but connected follower keeps up to this many entries before the snapshot in the log. Beyond that it gets
    the snapshot.
    """
    log_bytes_max: int = 4 << 30
    """Above this size the log is trimmed up to the snapshot, regardless of the tail and of slow followers."""

    def __post_init__(self) -> None:
        positive = (self.entries_max, self.bytes_max, self.age_max_s, self.keep, self.log_bytes_max, self.retry_s)
        if min(positive) <= 0 or min(self.interval_min_s, self.tail_entries, self.lag_entries_max) < 0:
            raise ValueError("bounds of a snapshot policy must be positive")


class Progress(NamedTuple):
    """Progress of one group. Times are in seconds of a monotonic clock."""

    applied: int
    log_bytes: int
    """Size of the entries after the last snapshot; an estimate is enough."""
    snapshot_index: int
    """Index of the newest durable snapshot; 0 if there is none."""
    snapshot_at: float
    """When that snapshot was cut; without one, when the group started."""
    failures: int = 0
    """Consecutive failures since the last success."""
    failed_at: float = 0.0


def reason_to_cut(policy: Policy, progress: Progress, now: float) -> str | None:
    """Why a snapshot is due, or None. Forced snapshots bypass this."""
    entries = progress.applied - progress.snapshot_index
    age_s = now - progress.snapshot_at
    if entries <= 0:
        return None
    if progress.failures and now < progress.failed_at + retry_delay_s(policy, progress.failures):
        return None
    if progress.snapshot_index and age_s < policy.interval_min_s:
        return None
    if entries >= policy.entries_max:
        return f"{entries} entries since the last snapshot"
    if progress.log_bytes >= policy.bytes_max:
        return f"{progress.log_bytes} bytes of log since the last snapshot"
    if age_s >= policy.age_max_s:
        return f"{age_s:.0f} s since the last snapshot"
    return None


def retry_delay_s(policy: Policy, failures: int) -> float:
    """`retry_s` after the first failure, then doubled with each further one."""
    assert failures >= 1
    doublings = min(failures - 1, 32)
    return float(min(policy.retry_s * 2**doublings, policy.retry_max_s))


class Kept(NamedTuple):
    name: str
    term: int
    index: int  # type: ignore[assignment]
    valid: bool = True
    """Whether header and size are valid."""


def names_to_delete(policy: Policy, snapshots: Sequence[Kept], *, pinned: Iterable[str] = ()) -> list[str]:
    """Names of the snapshots beyond the newest `keep` valid ones.

    `pinned` snapshots are being fetched or belong to a backup. Only snapshots older than all kept ones are named, so a
    deposed leader with a stale listing deletes nothing newer than it knows. An invalid snapshot does not count as kept,
    and is named once it is older than those that are.
    """
    order = sorted(snapshots, key=lambda found: (found.term, found.index), reverse=True)
    kept = [found for found in order if found.valid][: policy.keep]
    if not kept:
        return []
    oldest = (kept[-1].term, kept[-1].index)
    stay = {*pinned, *(found.name for found in kept)}
    return [found.name for found in order if (found.term, found.index) < oldest and found.name not in stay]


def trim_point(
    policy: Policy,
    *,
    durable_index: int,
    applied: int,
    base: int,
    log_bytes: int,
    connected_matches: Iterable[int] = (),
) -> int | None:
    """The index up to which the log may be trimmed, or None if nothing can be trimmed.

    `durable_index` is the index of the newest snapshot that is at least as durable as this node. `connected_matches`
    says how far each connected follower holds the log, if this node leads.
    """
    bound = min(durable_index, applied)
    if log_bytes <= policy.log_bytes_max:
        slowest = min(connected_matches, default=bound)
        point = min(bound - policy.tail_entries, max(slowest, bound - policy.lag_entries_max))
    else:
        point = bound
    assert point <= durable_index, "the log is trimmed only up to a durable snapshot"
    return point if point > base else None
