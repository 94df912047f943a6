"""When to cut, what to keep, how far the log may be trimmed. Pure: numbers in, decisions out.

The one rule that is safety and not taste: the log is trimmed only up to a snapshot that is durable. Everything else weighs
disk, work and how quickly a follower that was away comes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Policy:
    entries_max: int = 100_000
    """Cut when so many entries were applied since the last snapshot,"""
    bytes_max: int = 256 << 20
    """or so many bytes of log,"""
    age_max_s: float = 3600.0
    """or so much time passed and anything was applied at all."""
    interval_min_s: float = 30.0
    """But not more often than this, whatever the load,"""
    retry_s: float = 30.0
    """nor sooner than this after a cut or an upload failed; doubled with each failure,"""
    retry_max_s: float = 600.0
    """up to this."""
    keep: int = 3
    """So many snapshots are kept in a store; at least one."""
    tail_entries: int = 10_000
    """So many entries before the snapshot stay in the log for followers that were away for a moment."""
    lag_entries_max: int = 200_000
    """For a connected follower that is slower, the log waits up to this far behind the snapshot; then it gets a snapshot."""
    log_bytes_max: int = 4 << 30
    """Above this neither tail nor slow follower counts: the log is trimmed up to the snapshot."""

    def __post_init__(self) -> None:
        positive = (self.entries_max, self.bytes_max, self.age_max_s, self.keep, self.log_bytes_max, self.retry_s)
        if min(positive) <= 0 or min(self.interval_min_s, self.tail_entries, self.lag_entries_max) < 0:
            raise ValueError("bounds of a snapshot policy are positive")


class Progress(NamedTuple):
    """How one group stands. Times are of a monotonic clock, in seconds."""

    applied: int
    log_bytes: int
    """Of entries behind the last snapshot; an estimate will do."""
    snapshot_index: int
    """Of the newest durable one; 0 if there is none."""
    snapshot_at: float
    """When it was cut; without one, when the group began."""
    failures: int = 0
    """In a row, since the last success."""
    failed_at: float = 0.0


def reason_to_cut(policy: Policy, progress: Progress, now: float) -> str | None:
    """Why a snapshot is due, or None. Forced ones do not ask."""
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
    """After the first failure `retry_s`, then doubled."""
    assert failures >= 1
    doublings = min(failures - 1, 32)
    return float(min(policy.retry_s * 2**doublings, policy.retry_max_s))


class Kept(NamedTuple):
    name: str
    term: int
    index: int  # type: ignore[assignment]
    valid: bool = True
    """Whether its header and its size are sound."""


def names_to_delete(policy: Policy, snapshots: Sequence[Kept], *, pinned: Iterable[str] = ()) -> list[str]:
    """What lies behind the newest `keep` valid ones. `pinned` are being fetched, or belong to a backup.

    Only older ones than what is kept are named, so a deposed leader that looks at an old listing deletes nothing that is
    newer than what it knows. An invalid one does not count as kept, and goes when it is older than those that are.
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
    """Up to which index the log may be forgotten, or None if there is nothing to gain.

    `durable_index` is the newest snapshot that survives whatever this node survives; `connected_matches` is how far each
    connected follower holds the log, if this node leads.
    """
    bound = min(durable_index, applied)
    if log_bytes <= policy.log_bytes_max:
        slowest = min(connected_matches, default=bound)
        point = min(bound - policy.tail_entries, max(slowest, bound - policy.lag_entries_max))
    else:
        point = bound
    assert point <= durable_index, "the log is trimmed only behind a durable snapshot"
    return point if point > base else None
