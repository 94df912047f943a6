"""Creating a cluster from a backup: what each founder fetches before its first start, and how it uses it.

    <data>/restored/<backup>/<group>/<snapshot>     the states of this founder's partitions
    <data>/restored/<backup>/plan.json              the placement of partitions; removed when the cluster is formed
    <data>/restored/<backup>/meta.msgpack           the old meta group's state; removed with the plan
    <data>/CLUSTER                                  written last: without it, this is not a data directory

The cluster then forms like any other. When all founders have connected to each other, the leader of the meta group
proposes the old deployments and finally the placement of the partitions. A partition starts from the fetched state as
if it had been installed from a leader: its log starts after it. So no node can take part without that state, and a node
that joins later gets a snapshot.

All founders compute the same placement from the same settings, and a digest of it and of the backup is part of the
cluster's id (`Founding.restored`). Nodes that were restored from another backup, with other founders or another
replication, or not at all, have a different id and are refused. So are the nodes of the old cluster.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from holdfast.cluster.config import BadConfig, Config, founders_of
from holdfast.cluster.groups import group_of
from holdfast.cluster.members.founding import Founding, read_founding, write_founding
from holdfast.log.errors import WrongDirectory
from holdfast.sdk.ids import NodeId, PartitionNumber, numbers_of
from holdfast.snapshots.backups import Manifest, fetch_part, read_meta
from holdfast.snapshots.errors import Cancelled, SnapshotError
from holdfast.snapshots.files import (
    make_directory,
    move_into_place,
    open_private,
    room_on_disk,
    sync_directory,
    sync_path,
)
from holdfast.snapshots.format import SUFFIX, Expected, verify
from holdfast.snapshots.stores import Store
from holdfast.snapshots.work import Work
from holdfast.statemachine.members import Membership
from holdfast.statemachine.meta import MetaCommand, decode_state, restored
from holdfast.statemachine.tables import SCHEMA

logger = logging.getLogger(__name__)

_DIRECTORY: Final = "restored"
_PLAN: Final = "plan.json"
_META: Final = "meta.msgpack"
#: Leftovers of an unfinished restore, or of the file system, in a directory that counts as empty.
_HARMLESS: Final = {_DIRECTORY, "CLUSTER.new", "lost+found"}


class Restored(NamedTuple):
    """What a founder's data directory was restored from."""

    founding: Founding
    partitions: tuple[PartitionNumber, ...]  # of this founder
    already: bool  # It was restored before, and not started since.


def places_of(partitions: int, founders: tuple[NodeId, ...], replication: int) -> list[list[NodeId]]:
    """The members of each partition. Zones are not known yet: nodes report them later, and replicas move then."""
    membership = Membership()
    membership.found(partitions=partitions, founders=founders, replication=replication)
    return [list(membership.first[number]) for number in numbers_of(partitions)]


def identify(config: Config, manifest: Manifest) -> str:
    """An id that is equal on founders that make the same cluster from the same backup, and on no others."""
    places = places_of(manifest.partitions, founders_of(config), config.replication)
    made = [config.cluster, manifest.digest, places, config.replication]
    digest = hashlib.sha256(json.dumps(made, separators=(",", ":")).encode()).hexdigest()
    return f"{manifest.id}.{digest[:16]}"


def restored_directory(data: Path, founding: Founding) -> Path | None:
    """The directory of the fetched states, which may be gone by now; None for a cluster without a backup."""
    return data / _DIRECTORY / founding.restored.partition(".")[0] if founding.restored else None


# -- before the first start --------------------------------------------------------------------------------------------


def restore(
    config: Config, store: Store, manifest: Manifest, *, work: Callable[[int], Work] = lambda _: Work()
) -> Restored:
    """Make the data directory of one founder. Blocks. After an interruption, run it again and it resumes.

    Raises WrongDirectory, BadConfig or a SnapshotError.
    """
    data, founders = config.data, founders_of(config)
    identity = identify(config, manifest)
    founding = Founding(
        cluster=config.cluster,
        node=NodeId(config.node),
        founders=founders,
        partitions=manifest.partitions,
        restored=identity,
    )
    if config.node not in founders:
        raise BadConfig(
            f"founders: {config.node} is not listed. Restore and start the founders; then start {config.node} with an "
            f'empty directory and restored = "{identity}", and it joins'
        )
    if config.restored not in ("", identity):
        raise BadConfig(
            f"restored: is {config.restored}, but this backup with these settings gives {identity}: "
            "use the same backup, founders and replication on every node"
        )
    places = places_of(manifest.partitions, founders, config.replication)
    mine = tuple(number for number in numbers_of(len(places)) if config.node in places[number])
    if _is_made(data, founding):
        with room_on_disk(data):
            sync_directory(data)  # An earlier run, killed before this, left a name that a power loss may remove.
        return Restored(founding, mine, already=True)
    with room_on_disk(data):
        make_directory(data)
        directory = restored_directory(data, founding)
        assert directory is not None
        _remove_others(directory)
        for number in mine:
            group = group_of(number)
            fetch_part(
                store,
                manifest,
                manifest.parts[number],
                directory / f"{group:010d}",
                group=group,
                schema_max=SCHEMA,
                work=work(number),
            )
        meta = read_meta(store, manifest)
        decode_state(meta)  # Fail now, not when the cluster forms.
        make_directory(directory)
        _write(directory / _META, meta)
        plan = {"places": places, "replication": config.replication}
        _write(directory / _PLAN, json.dumps(plan).encode())
        # An earlier run may have been killed before its files were durable.
        for path in (directory, *(directory / f"{group_of(number):010d}" for number in mine)):
            sync_path(data, path)
        write_founding(data, founding)  # Last: this makes it a data directory.
    return Restored(founding, mine, already=False)


def _is_made(data: Path, founding: Founding) -> bool:
    """Whether the directory was already restored. Raises WrongDirectory if it must not be overwritten."""
    if data.exists() and not data.is_dir():
        raise WrongDirectory(data, "not a directory", "Give this node a directory, or a path that does not exist yet")
    held = sorted(path.name for path in data.iterdir()) if data.is_dir() else []
    if {*held} <= _HARMLESS:
        return False
    if {*held} <= {*_HARMLESS, "CLUSTER"} and read_founding(data) == founding:
        return True
    raise WrongDirectory(
        data,
        f"not empty (it holds {', '.join(held[:4])}), and a restore does not overwrite anything",
        "Move it away, or set `data` to a directory that does not exist yet",
    )


def _remove_others(directory: Path) -> None:
    """Remove what was fetched from other backups."""
    if directory.parent.is_dir():
        for other in directory.parent.iterdir():
            if other != directory:
                shutil.rmtree(other, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    draft = path.with_name(path.name + ".new")
    with open(draft, "wb", opener=open_private) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    move_into_place(draft, path)


# -- the first start ---------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How to form the cluster. It exists until the cluster is formed."""

    directory: Path
    commands: list[MetaCommand]
    partitions: tuple[PartitionNumber, ...]  # of this founder

    def check(self, work: Work | None = None) -> None:
        """Verify every byte of every state. Raises WrongDirectory. Blocks.

        Runs before this node connects to any peer: without its states it would help to outvote the nodes that have
        them.
        """
        for number in self.partitions:
            group = group_of(number)
            found = sorted((self.directory / f"{group:010d}").glob(f"*{SUFFIX}"))
            try:
                for path in found:
                    verify(path, Expected(group=group, schema_max=SCHEMA), work)
            except Cancelled:
                raise
            except SnapshotError as error:
                raise self._damaged(number, str(error)) from None
            if not found:
                raise self._damaged(number, "its file is gone")

    def _damaged(self, number: PartitionNumber, why: str) -> WrongDirectory:
        return WrongDirectory(
            self.directory,
            f"the restored state of partition {number} is missing or damaged ({why})",
            "Empty the data directory, and restore again",
        )

    def done(self) -> None:
        """Remove the plan: the cluster is formed, and its own log has everything."""
        (self.directory / _PLAN).unlink(missing_ok=True)
        (self.directory / _META).unlink(missing_ok=True)
        sync_directory(self.directory)


def read_plan(data: Path, founding: Founding) -> Plan | None:
    """None if there is nothing to do: the cluster was not restored, or it is formed."""
    directory = restored_directory(data, founding)
    if directory is None or not (directory / _PLAN).exists():
        return None
    try:
        plan: dict[str, Any] = json.loads((directory / _PLAN).read_bytes())
        old = decode_state((directory / _META).read_bytes())
        commands = restored(old, cluster=founding.cluster, placement=plan["places"], replication=plan["replication"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WrongDirectory(
            directory, f"the restored files cannot be read ({error})", "Empty the data directory, and restore again"
        ) from None
    places = plan["places"]
    mine = tuple(number for number in numbers_of(len(places)) if founding.node in places[number])
    return Plan(directory, commands, mine)
