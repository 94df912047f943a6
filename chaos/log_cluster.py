"""The processes of a chaos run on the replicated log, as faults and clients use them.

Nodes dial each other through proxies, or run in network namespaces of their own. Every process is ended by its process
id. A node that ends by itself is recorded as evidence against the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from enum import StrEnum
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast.chaos.log_node import SECRET_VARIABLE
from holdfast.chaos.nemesis import Link
from holdfast.chaos.netns import Network
from holdfast.chaos.proxy import Proxy

PORT = 7000
START_S = 60.0
STATUS_S = 0.5
WATCH_EVERY_S = 0.2
LINE_BYTES_MAX = 16 << 20


class Net(StrEnum):
    PROXY = "proxy"
    NETNS = "netns"


class Unreachable(Exception):
    """The request was never sent: nothing listens there."""


class Lost(Exception):
    """The request was sent but not answered: it may have been carried out."""


class Connection:
    """One client's connection to one node. After a failure, the next request dials again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        if self._streams is not None and self._streams[0].at_eof():
            self.close()  # The node went away meanwhile: on a new connection the request is lost only if it truly left.
        try:
            if self._streams is None:
                async with asyncio.timeout(timeout_s):
                    self._streams = await asyncio.open_unix_connection(self._path, limit=LINE_BYTES_MAX)
        except (OSError, TimeoutError) as error:
            raise Unreachable(str(error)) from error
        reader, writer = self._streams
        try:
            async with asyncio.timeout(timeout_s):
                writer.write(json.dumps(request).encode() + b"\n")
                line = await reader.readline()
            if not line.endswith(b"\n"):
                raise ConnectionError("the node is gone")
        except (OSError, TimeoutError) as error:
            self.close()
            raise Lost(str(error)) from error
        except BaseException:
            self.close()  # Else the next request would read this one's answer.
            raise
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class LogCluster:
    """Use as `async with LogCluster(...) as cluster`. The last of its nodes begins as a spare, outside all groups."""

    def __init__(self, root: Path, *, members: int, groups: int, net: Net, forgetful: bool = False) -> None:
        self.names: Sequence[str] = [f"n{number}" for number in range(1, members + 2)]
        self.first_members = tuple(self.names[:members])
        self.groups = range(1, groups + 1)
        self.deaths: list[str] = []  # Unexpected ends of processes.
        self.restarts = 0
        self._root = root
        self._net = net
        self._forgetful = forgetful
        self._secret = secrets.token_hex(32)
        self._stack = AsyncExitStack()
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._doomed: set[int] = set()
        self._links: Mapping[tuple[str, str], Link] = {}
        self._network: Network | None = None
        self._listen: dict[str, str] = {}
        self._peers: dict[str, dict[str, tuple[str, int]]] = {name: {} for name in self.names}
        self._views: dict[str, list[dict[str, Any]]] = {}

    # -- what faults need (nemesis.Cluster) ----------------------------------------------------------------------------

    @property
    def proxies(self) -> Mapping[tuple[str, str], Link]:
        return self._links

    def pid(self, name: str) -> int | None:
        child = self._children.get(name)
        return child.pid if child is not None and child.returncode is None else None

    def leader(self) -> str | None:
        return self.leader_of(1)

    async def start(self, name: str) -> None:
        """Returns when the node answers."""
        arguments = [
            *("--name", name, "--listen", f"{self._listen[name]}:{PORT}", "--data", str(self._root / name)),
            *("--socket", str(self.socket(name)), "--peers", json.dumps(self._peers[name])),
            *("--members", ",".join(self.first_members), "--groups", str(len(self.groups))),
            *(["--forgetful"] if self._forgetful else []),
        ]
        command = [sys.executable, "-m", "holdfast.chaos.log_node", *arguments]
        if self._network is not None:
            command = self._network.command(name, command)
        with (self._root / f"{name}.log").open("ab") as log:
            child = self._children[name] = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, SECRET_VARIABLE: self._secret},
            )
        self.restarts += 1
        self._stack.callback(asyncio.create_task(self._watch_child(name, child)).cancel)
        connection = Connection(self.socket(name))
        try:
            async with asyncio.timeout(START_S):
                while child.returncode is None:
                    with contextlib.suppress(Unreachable, Lost):
                        await connection.ask({"do": "status"}, STATUS_S)
                        return
                    await asyncio.sleep(0.02)
        except TimeoutError:
            self.deaths.append(f"{name} did not answer within {START_S:g} s of its start: {self._last_words(name)}")
        finally:
            connection.close()

    async def kill(self, name: str, signum: signal.Signals) -> None:
        child = self._children[name]
        if child.returncode is None:
            if signum is signal.SIGKILL:
                self._doomed.add(child.pid)
            child.send_signal(signum)
            if signum is signal.SIGKILL:
                await child.wait()

    # -- what clients and the run need ---------------------------------------------------------------------------------

    def socket(self, name: str) -> Path:
        return self._sockets / name

    def leader_of(self, group: int) -> str | None:
        """The leader in the newest term that any node reported."""
        claims = [(view["term"], name) for name, view in self._reports(group) if view["role"] == "leader"]
        return max(claims)[1] if claims else None

    def members_of(self, group: int) -> tuple[str, ...]:
        """The members in the newest epoch that any node reported."""
        views = [view for _, view in self._reports(group)]
        return tuple(max(views, key=lambda view: view["epoch"])["members"]) if views else self.first_members

    def _reports(self, group: int) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, views in self._views.items():
            for view in views:
                if view["group"] == group:
                    yield name, view

    async def statuses(self, group: int) -> dict[str, dict[str, Any]]:
        """The current status of a group from each node that answers."""
        await asyncio.gather(*(self._look_at(name) for name in self.names))
        return dict(self._reports(group))

    # -- life ----------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await self._make()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _make(self) -> None:
        # The path of a socket has at most 107 characters, so sockets get a short directory of their own.
        self._sockets = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="hf-")))
        if self._net is Net.NETNS:
            self._network = self._stack.enter_context(Network(self.names))
            self._links = self._network.proxies
            self._listen = dict(self._network.address)
            for a, b in combinations(self.names, 2):
                self._introduce(a, b, (self._listen[b], PORT), (self._listen[a], PORT))
        else:
            # A private network within loopback: no other process takes the port while a node is down.
            second, third = secrets.randbelow(200) + 20, secrets.randbelow(250) + 1
            self._listen = {name: f"127.{second}.{third}.{number}" for number, name in enumerate(self.names, start=1)}
            proxies = {}
            for a, b in combinations(self.names, 2):  # Of two nodes the one with the smaller name dials.
                proxy = Proxy(("127.0.0.1", 0), (self._listen[b], PORT))
                proxies[a, b] = await self._stack.enter_async_context(proxy)
                self._introduce(a, b, proxy.address, (self._listen[a], PORT))
            self._links = proxies
        await asyncio.gather(*(self.start(name) for name in self.names))
        self.restarts = 0
        self._stack.callback(asyncio.create_task(self._watch()).cancel)

    def _introduce(self, a: str, b: str, b_seen_by_a: tuple[str, int], a_seen_by_b: tuple[str, int]) -> None:
        self._peers[a][b] = b_seen_by_a
        self._peers[b][a] = a_seen_by_b

    async def _end(self) -> None:
        await asyncio.gather(*(self.kill(name, signal.SIGKILL) for name in self._children))
        await self._stack.aclose()

    async def _watch_child(self, name: str, child: asyncio.subprocess.Process) -> None:
        status = await child.wait()
        if child.pid not in self._doomed:
            self.deaths.append(f"{name} ended by itself with status {status}: {self._last_words(name)}")

    def _last_words(self, name: str) -> str:
        return (self._root / f"{name}.log").read_text(errors="replace")[-2000:]

    async def _watch(self) -> None:
        while True:
            await asyncio.gather(*(self._look_at(name) for name in self.names))
            await asyncio.sleep(WATCH_EVERY_S)

    async def _look_at(self, name: str) -> None:
        connection = Connection(self.socket(name))
        try:
            self._views[name] = (await connection.ask({"do": "status"}, STATUS_S))["result"]
        except (Unreachable, Lost):
            self._views.pop(name, None)
        finally:
            connection.close()
