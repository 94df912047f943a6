"""Rules of backups and restored directories, switched off by name: see `mutants`."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from holdfast.cluster.backup import copies, restoring
from holdfast.cluster.backup import job as backup
from holdfast.cluster.backup.copies import Copies
from holdfast.cluster.backup.job import Backups
from holdfast.cluster.members.founding import Founding, write_founding
from holdfast.cluster.snapshotting import keeper
from holdfast.cluster.snapshotting import service as snapshots
from holdfast.log.replica import Replica
from holdfast.sdk.ids import numbers_of
from holdfast.snapshots.backups import digest_of, part_name
from holdfast.snapshots.files import sync_directory
from holdfast.snapshots.stores import Stat
from holdfast.snapshots.work import Work
from holdfast.statemachine.meta import encode_state
from tests.sim.cluster import backups as simulated_backups

Patch = tuple[Any, str, Any]


class Instead:
    """Replaces another object, except for some of its attributes."""

    def __init__(self, other: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self._other = other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


def backed_up_one_by_one() -> list[Patch]:
    """Partitions are copied at different moments, and the copies are not checked for consistency."""

    async def hold(self: Any, token: str, by_node: Any) -> None: ...

    return [(Backups, "_hold", hold), (backup, "why_not_together", lambda marks: None)]


def deployments_backed_up_first() -> list[Patch]:
    """A backup copies the meta group before its partitions."""

    async def round_(self: Any, job: Any, token: str, by_node: Any) -> Any:
        await self._meta_fresh()
        meta = encode_state(self._meta())
        marks = await self._begin(job, token, by_node)
        why = self.why_not_together(marks)
        if why is not None:
            raise backup.TryAgain(why)
        await self._all(by_node, "backup-send", lambda _: [token, job.url, f"{job.id}/"])
        return await self._sent(job, token, by_node), meta

    return [(Backups, "_round", round_)]


def backed_up_from_the_past() -> list[Patch]:
    """A leader copies its state without checking that it has everything acknowledged."""

    async def at_once() -> int:
        return 0

    def led(self: Any, numbers: Any) -> Any:
        return [Instead(it, group=Instead(it.group, read_index=at_once)) for it in original(self, numbers)]

    original = Copies._led
    return [(Copies, "_led", led)]


def finished_too_early() -> list[Patch]:
    """The manifest is written when the parts are named, before they are in the store."""

    async def send(self: Any, round_: Any, url: str, prefix: str) -> None:
        for copy in round_.copies.values():
            copy.go.set()
            file = await copy.cutting
            meta = file.header.meta
            copy.stored = {
                "object": part_name(copy.partition.number, file.name), "bytes": file.header.file_bytes,
                "sha256": digest_of(file.path, Work()), "partition": copy.partition.number, "index": meta.index,
                "term": meta.term, "node": meta.node,
            }  # fmt: skip
            copy.doing = copies.DONE
        await sent(self, round_, url, prefix)

    def finish(self: Any, id_: str, store: Any, parts: Any, meta: bytes) -> Any:
        sizes = {f"{id_}/{part.object}": part.bytes for part in parts}
        return finished(self, id_, Instead(store, stat=lambda name: Stat(name, sizes[name], 0)), parts, meta)

    sent, finished = Copies._send, Backups._finish
    return [(Copies, "_send", send), (Backups, "_finish", finish)]


def restored_logs_begin_at_nothing() -> list[Patch]:
    """The log of a restored partition begins with entry 1, not after the restored state."""

    def match_machine(self: Any) -> None:
        if self.log.last_index == 0:
            self.applied = self.machine.applied[0]
        else:
            original(self)

    original = Replica._match_machine
    return [(Replica, "_match_machine", match_machine)]


def half_a_restore_believed() -> list[Patch]:
    """A directory counts as one of the cluster before it is complete."""

    def restored(config: Any, store: Any, manifest: Any, **options: Any) -> Any:
        places = restoring.places_of(manifest.partitions, config.founders, config.replication)
        mine = tuple(number for number in numbers_of(len(places)) if config.node in places[number])
        identity = restoring.identify(config, manifest)
        founding = Founding(config.cluster, config.node, config.founders, manifest.partitions, identity)
        if restoring._is_made(config.data, founding):
            return restoring.Restored(founding, mine, already=True)
        write_founding(config.data, founding)
        with patch.object(restoring, "_is_made", lambda data, founding: False):
            return original(config, store, manifest, **options)

    original = restoring.restore
    return [(simulated_backups, "restore", restored)]


def restored_names_trusted() -> list[Patch]:
    """The files of an interrupted restore count as durable, although it may have ended before they were."""
    return [(restoring, "sync_directory", lambda path: None), (restoring, "sync_path", lambda top, path: None)]


def directories_trusted() -> list[Patch]:
    """Directories of an earlier life count as durable, although that life may have ended before they were."""
    return [
        (module, "sync_path", lambda top, path: sync_directory(path) if path.is_dir() else None)
        for module in (keeper, snapshots)
    ]
