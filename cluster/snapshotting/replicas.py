"""The replicas of partitions on this node: their states on disk, and the partitions that stand on them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from holdfast.cluster.groups import group_of
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.partition.machine import PartitionMachine
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.log.node import LogNode
from holdfast.sdk.ids import PartitionNumber


class OpenMachine(Protocol):
    """See `Environment.open_machine`."""

    def __call__(
        self, number: PartitionNumber, path: Path, *, owner: str, restore: Callable[[Path], object], partitions: int
    ) -> PartitionMachine: ...


class Replicas:
    """One per node."""

    def __init__(
        self,
        data: Path,
        log: LogNode,
        snapshots: Snapshots,
        *,
        open_machine: OpenMachine,
        partitions: Callable[[], int],
    ) -> None:
        self._states = data / "state"
        self._log = log
        self._snapshots = snapshots
        self._open_machine = open_machine
        self._partitions = partitions
        #: By partition: every state that is open here.
        self.machines: dict[PartitionNumber, PartitionMachine] = {}
        #: The partitions of which this node is a member,
        self.hosted: dict[PartitionNumber, Partition] = {}
        #: and also those of which it was one: their logs are still here.
        self.every: dict[PartitionNumber, Partition] = {}

    def open(self, number: PartitionNumber) -> PartitionMachine:
        """Open the state of a partition, from disk or from its newest snapshot. Raises OSError."""
        partitions = self._partitions()
        assert partitions, "partitions are made after their number is known"
        machine = self.machines[number] = self._open_machine(
            number,
            self._directory(number),
            owner=self._log.disk,
            restore=self._snapshots.restorer(group_of(number)),
            partitions=partitions,
        )
        return machine

    def is_forgotten(self, number: PartitionNumber) -> bool:
        """Whether the log has forgotten the partition, because it moved to other nodes."""
        return group_of(number) in self._log.host.journal.tombstones

    def on_disk(self) -> list[PartitionNumber]:
        """Also those that the log has forgotten: the state is deleted last."""
        return [PartitionNumber(int(path.name)) for path in self._states.glob("*") if path.name.isdigit()]

    def close(self, number: PartitionNumber) -> None:
        """Close a partition whose log is about to be deleted, and discard its state, which is worthless without the log."""
        self.hosted.pop(number, None)
        self.machines.pop(number).state.discard()

    def close_all(self) -> None:
        for machine in self.machines.values():
            machine.state.close()

    async def delete(self, number: PartitionNumber) -> None:
        """Delete the files of a partition that is closed. Raises OSError."""
        group = group_of(number)
        for path in (self._snapshots.restored(group), self._snapshots.directory(group), self._directory(number)):
            if path is not None and path.exists():
                await asyncio.to_thread(shutil.rmtree, path)

    def _directory(self, number: PartitionNumber) -> Path:
        return self._states / f"{number:04d}"
