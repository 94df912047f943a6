"""A cluster that is made from a backup: what each founder fetches before its first start, and what it then does with it.

    <data>/restored/<backup>/<group>/<snapshot>     the states of the partitions that this founder has
    <data>/restored/<backup>/plan.json              who has which partition; goes when the cluster is formed
    <data>/restored/<backup>/meta.msgpack           what the old meta group knew; goes with the plan
    <data>/CLUSTER                                  last: without it, nothing of this is a data directory

The cluster then forms as any other: when all founders have spoken to each other, whoever leads the meta group proposes the old
deployments and, last, the places of the partitions. A partition begins with the state that was fetched, as if it had been
installed from a leader: its log begins behind it. So no node can take part in it with less, and a node that joins
later is given a snapshot.

All founders compute the same places from the same settings, and a digest of them and of the backup is part of the cluster's id
(`Founding.restored`). Founders that were restored from another backup, with other founders or another replication, or
not at all, have another id, and nobody talks to them; neither do the nodes of the old cluster.
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
from holdfast.cluster.groups import FIRST_PARTITION_GROUP
from holdfast.cluster.members.founding import Founding, read_founding, write_founding
from holdfast.log.errors import WrongDirectory
from holdfast.snapshots.backups import Manifest, fetch_part, read_meta
from holdfast.snapshots.errors import Cancelled, SnapshotError
from holdfast.snapshots.files import make_directory, move_into_place, room_on_disk, sync_directory, sync_path
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
#: What an unfinished restore, or the file system, may have left in a directory that counts as empty.
_HARMLESS: Final = {_DIRECTORY, "CLUSTER.new", "lost+found"}


class Restored(NamedTuple):
    """What a founder's directory was made from."""

    founding: Founding
    partitions: tuple[int, ...]  # that this founder has
    already: bool  # It was made before, and not started since.


def places_of(partitions: int, founders: tuple[str, ...], replication: int) -> list[list[str]]:
    """The members of each partition. Zones are not known yet: nodes tell them later, and replicas move then."""
    membership = Membership()
    membership.found(partitions=partitions, founders=founders, replication=replication)
    return [list(membership.first[number]) for number in range(partitions)]


def identify(config: Config, manifest: Manifest) -> str:
    """The same on every founder that makes the same cluster from the same backup, and on no other."""
    places = places_of(manifest.partitions, founders_of(config), config.replication)
    made = [config.cluster, manifest.digest, places, config.replication]
    digest = hashlib.sha256(json.dumps(made, separators=(",", ":")).encode()).hexdigest()
    return f"{manifest.id}.{digest[:16]}"


def restored_directory(data: Path, founding: Founding) -> Path | None:
    """Where what was fetched is, or was; None for a cluster that was made from nothing."""
    return data / _DIRECTORY / founding.restored.partition(".")[0] if founding.restored else None


# -- before the first start --------------------------------------------------------------------------------------------


def restore(
    config: Config, store: Store, manifest: Manifest, *, work: Callable[[int], Work] = lambda _: Work()
) -> Restored:
    """Make the data directory of one founder. Blocks. Interrupted, it can be run again and goes on where it ended.

    Raises WrongDirectory, BadConfig or a SnapshotError.
    """
    data, founders = config.data, founders_of(config)
    identity = identify(config, manifest)
    founding = Founding(config.cluster, config.node, founders, manifest.partitions, identity)
    if config.node not in founders:
        raise BadConfig(
            f"founders: {config.node} is not among them. Restore the founders and start them; then {config.node} joins with an "
            f'empty directory and restored = "{identity}"'
        )
    if config.restored not in ("", identity):
        raise BadConfig(
            f"restored: says {config.restored}, but this backup with these settings makes {identity}: "
            "use the same backup, founders and replication on every node"
        )
    places = places_of(manifest.partitions, founders, config.replication)
    mine = tuple(number for number, members in enumerate(places) if config.node in members)
    if _is_made(data, founding):
        with room_on_disk(data):
            sync_directory(data)  # Killed before that, an earlier try leaves a name that a power loss takes.
        return Restored(founding, mine, already=True)
    with room_on_disk(data):
        make_directory(data)
        directory = restored_directory(data, founding)
        assert directory is not None
        _remove_others(directory)
        for number in mine:
            group = FIRST_PARTITION_GROUP + number
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
        decode_state(meta)  # Now, and not when the cluster forms.
        make_directory(directory)
        _write(directory / _META, meta)
        plan = {"places": places, "replication": config.replication}
        _write(directory / _PLAN, json.dumps(plan).encode())
        # What an earlier try left is there, but it may have been killed before that was durable.
        for path in (directory, *(directory / f"{FIRST_PARTITION_GROUP + number:010d}" for number in mine)):
            sync_path(data, path)
        write_founding(data, founding)  # Last: from here on it is a data directory.
    return Restored(founding, mine, already=False)


def _is_made(data: Path, founding: Founding) -> bool:
    """Whether it is there already. Raises WrongDirectory for what must not be overwritten."""
    if data.exists() and not data.is_dir():
        raise WrongDirectory(data, "not a directory", "Give this node a directory, or a path that does not exist yet")
    held = sorted(path.name for path in data.iterdir()) if data.is_dir() else []
    if {*held} <= _HARMLESS:
        return False
    if {*held} <= {*_HARMLESS, "CLUSTER"} and read_founding(data) == founding:
        return True
    raise WrongDirectory(
        data,
        f"not empty (it holds {', '.join(held[:4])}), and a restore overwrites nothing",
        "Move it away, or set `data` to a directory that does not exist yet",
    )


def _remove_others(directory: Path) -> None:
    """Of tries with another backup."""
    if directory.parent.is_dir():
        for other in directory.parent.iterdir():
            if other != directory:
                shutil.rmtree(other, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    draft = path.with_name(path.name + ".new")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    move_into_place(draft, path)


# -- the first start ---------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How the cluster is founded, until it is."""

    directory: Path
    commands: list[MetaCommand]
    partitions: tuple[int, ...]  # that this founder has

    def check(self, work: Work | None = None) -> None:
        """Every state is there, to its last byte; or WrongDirectory. Blocks.

        Done before this node meets anybody: with nothing in the place of a state it would help to outvote those who have it.
        """
        for number in self.partitions:
            group = FIRST_PARTITION_GROUP + number
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

    def _damaged(self, number: int, why: str) -> WrongDirectory:
        return WrongDirectory(
            self.directory,
            f"the state of partition {number} is not there that was restored ({why})",
            "Empty the data directory, and restore again",
        )

    def done(self) -> None:
        """The cluster is formed, and its own log has it all."""
        (self.directory / _PLAN).unlink(missing_ok=True)
        (self.directory / _META).unlink(missing_ok=True)
        sync_directory(self.directory)


def read_plan(data: Path, founding: Founding) -> Plan | None:
    """None when there is nothing to do: the cluster was made from nothing, or is formed."""
    directory = restored_directory(data, founding)
    if directory is None or not (directory / _PLAN).exists():
        return None
    try:
        plan: dict[str, Any] = json.loads((directory / _PLAN).read_bytes())
        old = decode_state((directory / _META).read_bytes())
        commands = restored(old, cluster=founding.cluster, placement=plan["places"], replication=plan["replication"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WrongDirectory(
            directory, f"what was restored cannot be read ({error})", "Empty the data directory, and restore again"
        ) from None
    mine = tuple(number for number, members in enumerate(plan["places"]) if founding.node in members)
    return Plan(directory, commands, mine)
