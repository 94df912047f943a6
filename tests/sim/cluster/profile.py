"""The profiles of simulated clusters."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.cluster.values.staging import THRESHOLD_BYTES


@dataclass(frozen=True)
class Profile:
    """The kind of world of a seed."""

    name: str
    nodes: int = 3
    replication: int = 3
    partitions: int = 3
    faulty_s: float = 6.0  # Duration of the faults.
    heat: float = 1.0  # Faults per second.
    delay_max: float = 0.005
    fsync_max: float = 0.004
    stall: float = 0.002  # Probability that an fsync takes long,
    thread_stall: float = 0.03  # or the work of a thread.
    skew: float = 0.001  # Of the rates of clocks.
    wall_ms: float = 20.0  # Error of wall clocks.
    handler_faults: float = 1.0
    attempts_max: int = 1000
    programs: int = 0  # Additional programs.
    large: int = THRESHOLD_BYTES  # Larger values are staged, and referenced.
    crashes: float = 0.0  # Probability of a crash at a step of a snapshot.
    snapshot_entries: int = 100_000  # A snapshot is cut after this many entries of a partition,
    log_tail: int = 10_000  # and this many stay in the log before it.
    wipes: int = 2  # The weight of removed or damaged files among the faults.
    joiners: int = 0  # This many of the nodes join later, and nodes leave permanently.
    store: bool = False  # Whether there is a shared store.
    stored: bool = False  # Whether large values are stored there; unreferenced ones are then deleted quickly.
    deaf: bool = False  # Followers do not report outcomes: watches must do it.
    people: bool = False  # People decide where otherwise clients complete awakeables.
    backups: bool = False  # Whether it is backed up, lost completely, and restored from a backup.
