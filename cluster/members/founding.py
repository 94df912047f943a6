"""How a cluster is formed, exactly once: its founders, and what a data directory records about it.

The *founders* form the cluster. They are part of its identity: nodes configured with different founders have different
cluster ids and refuse links to each other. The backup that a cluster was restored from is part of its identity too, so
clusters restored from different backups, or not restored, never connect. A founder with an empty directory takes part
only after it has connected to every other founder and none refused it. Each of them has then recorded our disk, and we
theirs. So a founder that loses its directory later is refused by those that remember it, and even several such founders
cannot form the cluster a second time while one remembers the first.

A node that is not a founder waits until the cluster invites it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from holdfast.cluster.config import BadConfig, Config, founders_of
from holdfast.cluster.peers.rpc import Refused, Rpc, Unanswered
from holdfast.cluster.private import make_private
from holdfast.log.errors import WrongDirectory
from holdfast.sdk.ids import NodeId
from holdfast.snapshots.files import open_private, sync_directory

logger = logging.getLogger(__name__)

_FILE: Final = "CLUSTER"
REMOVED_FILE: Final = "REMOVED"
_RETRY_S: Final = 0.05
_REMIND_S: Final = 10.0
JOIN_S: Final = 5.0


class NodeRemoved(Exception):
    """The cluster removed this node permanently. Its data is on other nodes."""

    def __init__(self, node: str) -> None:
        super().__init__(f"node {node} was removed from the cluster for ever")
        self.advice = (
            "to use this machine again, delete the data directory and start a node under a new name; "
            "a service manager should not restart this one"
        )


class Founding(NamedTuple):
    """The node and cluster that a directory belongs to. `partitions` is 0 until the cluster has told us."""

    cluster: str
    node: NodeId
    founders: tuple[NodeId, ...]
    partitions: int = 0
    #: The backup that the cluster was restored from, and a digest of the result; empty if it was not restored.
    restored: str = ""

    @property
    def cluster_id(self) -> str:
        """What nodes must agree on before they connect: the name, the founders, and the backup, if any."""
        formed = (*self.founders, f"restored from {self.restored}") if self.restored else self.founders
        digest = hashlib.sha256("\n".join(formed).encode()).hexdigest()
        return f"{self.cluster}/{digest[:8]}"


def open_founding(config: Config) -> Founding:
    """Read the directory's record; if there is none, write one from the settings.

    Raises WrongDirectory, BadConfig or NodeRemoved.
    """
    _check_directory(config.data)
    if config.data.is_dir():
        make_private(config.data)
    if (config.data / REMOVED_FILE).exists():
        raise NodeRemoved(config.node)
    wanted = Founding(config.cluster, NodeId(config.node), founders_of(config), restored=config.restored)
    known = read_founding(config.data)
    if known is None:
        if config.restored and config.node in wanted.founders:
            raise BadConfig(
                f"restored: {config.node} is a founder of a cluster restored from {config.restored}, but its directory is "
                "not restored: run holdfast restore first"
            )
        absent = sorted({*wanted.founders} - {config.node, *config.peers})
        if absent and config.node in wanted.founders:
            raise BadConfig(f"peers: must have the address of every founder, but lacks {', '.join(absent)}")
        write_founding(config.data, wanted)
        return wanted
    sync_directory(config.data)  # A writer killed before its fsync left a name that a power loss may remove.
    if (known.cluster, known.node) != (wanted.cluster, wanted.node):
        raise WrongDirectory(
            config.data,
            f"it belongs to node {known.node} of cluster {known.cluster}, but this is node {wanted.node} of {wanted.cluster}",
            "Give this node its own directory, or start it under the name and in the cluster the directory belongs to",
        )
    if config.founders and known.founders != wanted.founders:
        raise WrongDirectory(
            config.data,
            f"its cluster was formed by {', '.join(known.founders)}, but the setting founders says "
            f"{', '.join(wanted.founders)}",
            "Founders never change, even if nodes join or leave: set them as they were",
        )
    if config.restored and known.restored != config.restored:
        raise WrongDirectory(
            config.data,
            f"its cluster was restored from {known.restored or 'nothing'}, but the setting restored says {config.restored}",
            "Use the directory that belongs to this cluster, or restore into an empty one",
        )
    return known


def write_founding(data: Path, founding: Founding) -> None:
    """Write the record durably before anything depends on it: a log must not have a group that cannot be opened."""
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    make_private(data)
    write_record(data, _FILE, founding._asdict())


def write_record(data: Path, name: str, value: Any) -> None:
    """Write a small file durably: afterwards the directory has either the old one or the new one."""
    new = data / (name + ".new")
    with open(new, "w", opener=open_private) as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    new.rename(data / name)
    sync_directory(data)


def _check_directory(data: Path) -> None:
    """Prevents a typo from turning a project or home directory into a data directory."""
    if data.is_dir():
        held = sorted(path.name for path in data.iterdir())
        if "restored" in held and not {"log", _FILE} & {*held}:
            raise WrongDirectory(
                data,
                "a restore was started here but not finished",
                "Run holdfast restore again: it resumes where it stopped",
            )
        if held and not {"log", _FILE, _FILE + ".new"} & {*held}:
            raise WrongDirectory(
                data,
                f"not empty, and not a data directory of Holdfast (it holds {', '.join(held[:3])})",
                "Give this node an empty directory or one that does not exist yet",
            )
    elif data.exists():
        raise WrongDirectory(data, "not a directory", "Give this node a directory, or a path that does not exist yet")


def read_founding(data: Path) -> Founding | None:
    """The record of a directory, or None if it has none."""
    try:
        found: Any = json.loads((data / _FILE).read_bytes())
        known = Founding(
            cluster=found["cluster"],
            node=found["node"],
            founders=tuple(found["founders"]),
            partitions=found["partitions"],
            restored=found.get("restored", ""),
        )
    except FileNotFoundError:
        if (data / "log").exists():
            raise WrongDirectory(data, f"{_FILE} is missing", "Restore the file, or the directory") from None
        return None
    except (ValueError, KeyError, TypeError):
        known = None
    if (
        known is None
        or type(known.partitions) is not int
        or not all(isinstance(name, str) for name in (*known.founders, known.restored))
    ):
        raise WrongDirectory(data, f"{_FILE} cannot be read", "Restore the file, or the directory")
    return known


class FoundingRecord:
    """What a data directory says about the cluster that it belongs to. It learns the number of partitions once."""

    def __init__(self, config: Config) -> None:
        """Raises WrongDirectory, BadConfig or NodeRemoved."""
        self._data = config.data
        self.founding = open_founding(config)

    @property
    def partitions(self) -> int:
        """How many the cluster has; 0: it has not told us yet."""
        return self.founding.partitions

    def learn(self, partitions: int) -> None:
        """The cluster says how many partitions it has. Raises WrongDirectory if this directory has another number."""
        if self.partitions and self.partitions != partitions:
            raise WrongDirectory(
                self._data,
                f"it has the state of {self.partitions} partitions, but the cluster has {partitions}",
                "It belongs to another cluster: use its own directory",
            )
        if not self.partitions:
            founding = self.founding._replace(partitions=partitions)
            write_founding(self._data, founding)
            self.founding = founding


class Forming:
    """Coordinates with the other founders when the cluster may be formed. `refused_by` collects peers that refuse us."""

    def __init__(
        self,
        data: Path,
        founding: Founding,
        rpc: Rpc,
        *,
        formed: Callable[[], bool],
        connected: Callable[[], Collection[str]],
        introduction: Callable[[], Sequence[str]],
        refusals: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._refusals = refusals
        self._connected = connected
        self._introduction = introduction
        self._data = data
        self._founding = founding
        self._rpc = rpc
        self._formed = formed
        self._heard: set[str] = set()
        self.refused_by: dict[str, str] = {}
        self.waits_for = ""  # Why this node does not serve yet, for operators.
        rpc.serve("forming", self._serve)

    def refused(self, peer: str, reason: str) -> None:
        """A peer refuses this node for ever."""
        logger.error("%s refuses this node: %s", peer, reason)
        self.refused_by[peer] = reason

    async def _serve(self, peer: str, argument: Any) -> Any:
        return "formed" if self._formed() else "fresh"

    async def wait(self) -> None:
        """Wait until this node may create the first group, or was invited to it. Raises WrongDirectory."""
        others = [name for name in self._founding.founders if name != self._founding.node]
        founder = len(others) < len(self._founding.founders)
        loop = asyncio.get_running_loop()
        reminded = loop.time()
        while not self._formed():
            self._check_refused()
            if founder:
                await asyncio.gather(*(self._ask(name) for name in others if name not in self._heard))
                missing = [name for name in others if name not in self._heard]
                if not missing:
                    break
                self.waits_for = f"the cluster is not formed yet: {self._explain(missing)}"
            else:
                self.waits_for = f"{self._founding.node} is not a founder and waits to be added to the cluster"
                if refusals := self._refusals():
                    self.waits_for += f"; {self._explain(refusals)}"
                await self._ask_to_join()
            if loop.time() - reminded > _REMIND_S:
                reminded = loop.time()
                logger.warning("%s", self.waits_for)
            await asyncio.sleep(_RETRY_S)
        self._check_refused()
        self.waits_for = ""

    def _explain(self, missing: Collection[str]) -> str:
        """Why these founders are missing: some do not answer, others refuse the link."""
        refusals = self._refusals()
        silent = [name for name in missing if name not in refusals]
        parts = [f"{', '.join(silent)} did not answer"] if silent else []
        return "; ".join([*parts, *(f"no link to {name}: {refusals[name]}" for name in missing if name in refusals)])

    async def _ask(self, name: str) -> None:
        try:
            await self._rpc.ask(name, "forming", None)
        except (Unanswered, Refused):
            return
        self._heard.add(name)

    async def _ask_to_join(self) -> None:
        """Ask a node that has a link to us, and so expects us, to add us to the members. The rest follows by itself."""
        for name in sorted(self._connected()):
            try:
                async with asyncio.timeout(JOIN_S):
                    refusal = await self._rpc.ask(name, "join", self._introduction())
            except (Unanswered, Refused, TimeoutError):
                continue
            if refusal is not None:
                raise BadConfig(f"node: {refusal}; give this node a new name and an empty directory")
            self.waits_for = f"{self._founding.node} reached {name} and waits to become a member"
            await asyncio.sleep(JOIN_S / 5)
            return

    def _check_refused(self) -> None:
        for peer, reason in self.refused_by.items():
            raise WrongDirectory(
                self._data,
                f"the cluster knows a different directory of this node. {peer} says: {reason}",
                "If the old directory still exists, use it. If it is lost, remove this node from the cluster and add "
                "it under a new name: other nodes have what it acknowledged",
            )
