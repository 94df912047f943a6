"""The outside world of a node: clock, entropy, disk, links, threads, shared store. A simulator passes in its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from holdfast.cluster.clock import Clock
from holdfast.cluster.entropy import Entropy
from holdfast.cluster.partition.machine import ORIGIN_BYTES, PartitionMachine
from holdfast.cluster.partition.state import State, boot_id
from holdfast.log import environment as log_environment
from holdfast.log.rows import Rows
from holdfast.sdk.ids import PartitionNumber
from holdfast.snapshots.opening import open_store
from holdfast.snapshots.stores import Store


class Event(Protocol):
    """The part of `threading.Event` that nodes use."""

    def set(self) -> None: ...

    def wait(self, seconds: float, /) -> bool: ...


class Environment:
    """The environment of a real machine."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
        boot: str | None = None,
        log: log_environment.Environment | None = None,
        rows: Rows | None = None,
    ) -> None:
        """`rows`: how the log writes commits of several groups together."""
        self.clock = clock or Clock()
        self.entropy = entropy or Entropy()
        self.boot = boot or boot_id()
        self.log = log or log_environment.Environment()
        self.rows = rows or Rows()

    def open_machine(
        self, number: PartitionNumber, path: Path, *, owner: str, restore: Callable[[Path], object], partitions: int
    ) -> PartitionMachine:
        """The state machine of a partition, on its state in the directory `path`; see `State.open`."""
        state = State.open(path, owner=owner, boot=self.boot, restore=restore)
        return PartitionMachine(number, state, partitions=partitions, origin=self.entropy.bytes(ORIGIN_BYTES))

    def open_store(self, url: str, *, hasty: bool = False) -> Store:
        """A shared store; `hasty` with short timeouts. Blocks while boto3 is loaded: call it in a thread."""
        return open_store(url, hasty=hasty)

    def event(self) -> Event:
        """An event with which a thread waits for the event loop."""
        return threading.Event()
