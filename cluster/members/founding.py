"""How a cluster comes to be, once: who forms it, and what a directory remembers of it.

The *founders* form the cluster. They are part of what its name means: nodes that were told of different founders have
different cluster ids, and links between them are refused. A backup that a cluster is made from is a part of it too: what is
restored from different backups, or not at all, never meets. A founder whose directory is empty takes part only after it has
spoken to every other founder and none refused it. Each of them has then written down our disk, and we theirs. So a founder
that loses its directory later is refused by those who remember it, and even several of them cannot form the cluster a
second time while one remembers the first.

Whoever is not a founder forms nothing: it waits until the cluster invites it.
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

from holdfast.cluster.config import BadConfig, Config, Endpoint, founders_of, read_endpoint, read_name
from holdfast.cluster.peers.rpc import Refused, Rpc, Unanswered
from holdfast.log.errors import WrongDirectory
from holdfast.snapshots.files import sync_directory

logger = logging.getLogger(__name__)

_FILE: Final = "CLUSTER"
_PLACES: Final = "PEERS"
_REMOVED: Final = "REMOVED"
_RETRY_S: Final = 0.05
_REMIND_S: Final = 10.0
JOIN_S: Final = 5.0


class NodeRemoved(Exception):
    """The cluster removed this node, for ever. What it held is on other nodes."""

    def __init__(self, node: str) -> None:
        super().__init__(f"node {node} was removed from the cluster for ever")
        self.advice = (
            "to use this machine again, delete the data directory and start a node under a new name; "
            "a service manager should not restart this one"
        )


class Founding(NamedTuple):
    """What a directory belongs to. `partitions` is 0 until the cluster has told us."""

    cluster: str
    node: str
    founders: tuple[str, ...]
    partitions: int = 0
    #: The backup that it was made from, and a digest of what was made of it; empty: it was made from nothing.
    restored: str = ""

    @property
    def cluster_id(self) -> str:
        """What nodes must agree on before they talk: the name, and who formed what it names, from what."""
        formed = (*self.founders, f"restored from {self.restored}") if self.restored else self.founders
        digest = hashlib.sha256("\n".join(formed).encode()).hexdigest()
        return f"{self.cluster}/{digest[:8]}"


def open_founding(config: Config) -> Founding:
    """What the directory says, if it says anything; else what the settings say, written down.

    Raises WrongDirectory, BadConfig or NodeRemoved.
    """
    _check_directory(config.data)
    if (config.data / _REMOVED).exists():
        raise NodeRemoved(config.node)
    wanted = Founding(config.cluster, config.node, founders_of(config), restored=config.restored)
    known = read_founding(config.data)
    if known is None:
        if config.restored and config.node in wanted.founders:
            raise BadConfig(
                f"restored: {config.node} is a founder of a cluster that is made from {config.restored}, and has nothing of "
                "it: run holdfast restore first"
            )
        absent = sorted({*wanted.founders} - {config.node, *config.peers})
        if absent and config.node in wanted.founders:
            raise BadConfig(f"peers: has no address of {', '.join(absent)}, and a cluster forms with all its founders")
        write_founding(config.data, wanted)
        return wanted
    sync_directory(config.data)  # Killed before that, who wrote it leaves a name that a power loss takes.
    if (known.cluster, known.node) != (wanted.cluster, wanted.node):
        raise WrongDirectory(
            config.data,
            f"it belongs to node {known.node} of cluster {known.cluster}, this is node {wanted.node} of {wanted.cluster}",
            "Give this node its own directory, or start it under the name and in the cluster the directory belongs to",
        )
    if config.founders and known.founders != wanted.founders:
        raise WrongDirectory(
            config.data,
            f"its cluster was formed by {', '.join(known.founders)}, but the setting founders says "
            f"{', '.join(wanted.founders)}",
            "Founders never change, whoever joins or leaves later: set them as they were",
        )
    if config.restored and known.restored != config.restored:
        raise WrongDirectory(
            config.data,
            f"its cluster was made from {known.restored or 'nothing'}, but the setting restored says {config.restored}",
            "It belongs to another life of the cluster: use its own directory, or restore into an empty one",
        )
    return known


def write_founding(data: Path, founding: Founding) -> None:
    """Durable before anything rests on it: a log must not have a group that cannot be opened."""
    data.mkdir(parents=True, exist_ok=True)
    _write(data, _FILE, founding._asdict())


def read_places(data: Path) -> dict[str, Endpoint]:
    """Where the other nodes were when this one last heard of them: the settings may name only such as are long gone."""
    try:
        found: Any = json.loads((data / _PLACES).read_bytes())
        return {read_name(name): read_endpoint(address) for name, address in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, OSError) as error:
        logger.warning("%s cannot be read, so only nodes in the setting peers are known: %s", data / _PLACES, error)
        return {}


def write_places(data: Path, places: Mapping[str, str]) -> None:
    _write(data, _PLACES, dict(places))


def write_removed(data: Path, how: str) -> None:
    """From now on a start on this directory is refused: nobody in the cluster talks to this node any more."""
    _write(data, _REMOVED, {"known by": how})


def _write(data: Path, name: str, value: Any) -> None:
    new = data / (name + ".new")
    with new.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    new.rename(data / name)
    sync_directory(data)


def _check_directory(data: Path) -> None:
    """Nobody's project or home directory becomes a data directory by a slip of the keyboard."""
    if data.is_dir():
        held = sorted(path.name for path in data.iterdir())
        if "restored" in held and not {"log", _FILE} & {*held}:
            raise WrongDirectory(
                data,
                "a restore was begun here, and not finished",
                "Run holdfast restore again: it goes on where it ended",
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
    """What a directory says; None: nothing."""
    try:
        found: Any = json.loads((data / _FILE).read_bytes())
        known = Founding(
            found["cluster"], found["node"], tuple(found["founders"]), found["partitions"], found.get("restored", "")
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


class Forming:
    """Asks and answers whether the cluster may be formed now. `refused_by` fills as peers turn us away."""

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
        self.waits_for = ""  # What is missing, for whoever asks why this node does not serve.
        rpc.serve("forming", self._serve)

    async def _serve(self, peer: str, argument: Any) -> Any:
        return "formed" if self._formed() else "fresh"

    async def wait(self) -> None:
        """Returns when this node may create the first group, or has it because it was invited. Raises WrongDirectory."""
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
                self.waits_for = f"{self._founding.node} is not a founder, and waits until it is added to the cluster"
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
        """Why these are not heard: some are not there, and with others there is no link although they are."""
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
        """Who has a link to us was told to expect us. Being put on the list is all we ask for: the rest comes by itself."""
        for name in sorted(self._connected()):
            try:
                async with asyncio.timeout(JOIN_S):
                    refusal = await self._rpc.ask(name, "join", self._introduction())
            except (Unanswered, Refused, TimeoutError):
                continue
            if refusal is not None:
                raise BadConfig(f"node: {refusal}; give this node a new name, and an empty directory")
            self.waits_for = f"{name} knows that {self._founding.node} is here; it waits to be made a member"
            await asyncio.sleep(JOIN_S / 5)
            return

    def _check_refused(self) -> None:
        for peer, reason in self.refused_by.items():
            raise WrongDirectory(
                self._data,
                f"it is not the directory that the cluster knows. {peer} says: {reason}",
                "If the old directory is there, start on it. If it is lost, remove this node from the cluster and add "
                "it under a new name: what it acknowledged is on the others",
            )
