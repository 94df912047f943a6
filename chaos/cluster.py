"""The processes of a chaos run: production nodes, handlers, and proxies on every link between nodes.

Each process is started here and ended by its process id. A process that ends by itself is recorded as evidence and
started again. An outage of a node (killed, stopped, told to end) is recorded from the signal until it answers again:
client errors are excused during an outage, and only then.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import aiohttp

from holdfast.chaos import store
from holdfast.chaos.faulty_node import Bends
from holdfast.chaos.outage import Outage
from holdfast.chaos.places import KnownLink, Places
from holdfast.chaos.proxy import Proxy
from holdfast.chaos.views import Views
from holdfast.sdk.ids import partition_key, partition_of

STORE: Final = "s3"
START_S: Final = 60.0
STOP_S: Final = 30.0
WATCH_EVERY_S: Final = 0.2
LOOK_S: Final = 1.0
RESTART_S: Final = 1.0
#: Enough space for the log and state of a long run; LMDB grows its files as needed.
SMALL_DISK_BYTES: Final = 768 << 20
NOTHING_BYTES: Final = 4 << 20  # A disk with less is as good as full.
EMPTIED_S: Final = 5.0

#: Snapshots are cut often and the log is short, so that a node that was away for seconds needs a snapshot.
SNAPSHOT_SETTINGS: Final = {
    "HOLDFAST_SNAPSHOT_ENTRIES": "400",
    "HOLDFAST_SNAPSHOT_INTERVAL": "5s",
    "HOLDFAST_LOG_TAIL": "50",
}

#: Two endpoints, so that calls cross from one to the other and one can die alone.
OFFERS: Final = {"h1": "flow,approval,sleeper", "h2": "counter,leaf,inbox,tree,register"}


class NoSmallDisk(Exception):
    """This machine does not let us mount a file system."""


class NodeCluster:
    """Use as `async with NodeCluster(root, nodes=3) as cluster`. Inside, nodes answer and handlers are registered."""

    def __init__(
        self,
        root: Path,
        *,
        nodes: int = 3,
        partitions: int = 8,
        replication: int | None = None,
        handlers: Mapping[str, Sequence[str]] | None = None,
        small_disk: bool = False,
        shared_store: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.names: Sequence[str] = [f"n{number}" for number in range(1, nodes + 1)]
        self.partitions = partitions
        self.replication = replication or nodes  # By default on all nodes, so that a minority of the nodes may die.
        self.oracle = root / "oracle.jsonl"
        self.deaths: list[str] = []  # Unexpected ends of processes,
        self.died_of_a_full_disk = 0  # except these, which cannot be prevented.
        self.emptied_at = -EMPTIED_S  # When a completely full disk was last emptied.
        self.found: dict[str, list[str]] = {}  # Promise -> violations that the faults themselves observed.
        self.outages: list[Outage] = []
        self.lives: dict[str, tuple[float, float | None]] = {}  # The time during which each node was a member.
        self.kills = 0
        self.aimed: dict[str, Counter[str]] = defaultdict(Counter)  # Fault -> how often it hit its moment, or missed.
        self.has_store = False
        self.no_store = "not asked for"
        self.store_failed_at = 0.0  # When the last fault of the store was repaired.
        self.small_disk: str | None = None  # the node whose disk can be filled
        self.no_small_disk: str = "not asked for"
        self._root = root
        self._want_small_disk = small_disk
        self._want_store = shared_store
        self._more_settings = dict(settings or {})
        self._store_link: KnownLink | None = None
        self._handlers = {
            name: list(words)
            for name, words in (
                handlers
                if handlers is not None
                else {
                    name: ["holdfast.chaos.handlers", "--oracle", str(self.oracle), "--offer", offer]
                    for name, offer in OFFERS.items()
                }
            ).items()
        }
        self._founders = list(self.names)
        self._newcomers = 0
        self._net = Places()
        self._places = {name: self._net.place() for name in [*self.names, *self._handlers]}
        self._stack = AsyncExitStack()
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._stopped: set[str] = set()
        self._doomed: set[int] = set()
        self._ending = False
        self._links: dict[tuple[str, str], KnownLink] = {}
        self._bends: dict[str, Bends] = {}
        self.views = Views()
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None
        self._root_token = f"hf_node_{secrets.token_hex(32)}"  # The admin token of all nodes.
        self.token = ""  # What clients send: it may start invocations and complete promises, and nothing else.

    # -- what faults need (nemesis.Cluster) --------------------------------------------------------------------------

    @property
    def proxies(self) -> Mapping[tuple[str, str], KnownLink]:
        return self._links

    @property
    def handlers(self) -> Sequence[str]:
        return list(self._handlers)

    def pid(self, name: str) -> int | None:
        child = self._children.get(name)
        return child.pid if child is not None and child.returncode is None else None

    def leader(self) -> str | None:
        """The node that leads the most partitions."""
        led = Counter(leader for leader in self.views.leaders().values() if leader in self.names)
        return max(sorted(led), key=lambda name: led[name]) if led else None

    async def start(self, name: str) -> None:
        """Start a process. It answers some time later, if the other nodes permit it."""
        if self._ending or self.pid(name) is not None:
            return
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")}
        command = self._command(name)
        if self._is_node(name):
            environment |= self._settings(name)
        with (self._root / f"{name}.log").open("ab") as log:
            child = self._children[name] = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal must reach only us; we then end the children one by one.
                preexec_fn=_die_with_parent,
            )
        self._stopped.discard(name)
        self._background(self._watch_child(name, child))
        if self._is_node(name):
            self._background(self._watch_return(name, child))

    async def kill(self, name: str, signum: signal.Signals) -> None:
        """Send a signal; after SIGKILL and SIGTERM, return when the process is gone."""
        child = self._children[name]
        if child.returncode is not None:
            return
        deadly = signum in (signal.SIGKILL, signal.SIGTERM)
        if self._is_node(name) and signum is not signal.SIGCONT:
            self._out(name, {signal.SIGSTOP: "stopped", signal.SIGTERM: "told to end"}.get(signum, "killed"))
        if deadly:
            self._doomed.add(child.pid)
            self.kills += signum is signal.SIGKILL
        child.send_signal(signum)
        if signum is signal.SIGSTOP:
            self._stopped.add(name)
        elif signum is signal.SIGCONT:
            self._stopped.discard(name)
            self._background(self._watch_return(name, child))
        elif deadly:
            try:
                await asyncio.wait_for(child.wait(), STOP_S if signum is signal.SIGTERM else None)
            except TimeoutError:
                self.deaths.append(f"{name} did not end within {STOP_S:g} s of SIGTERM: {self._last_words(name)}")
                child.kill()
                await child.wait()

    # -- members that come and go ------------------------------------------------------------------------------------

    async def newcomer(self) -> str:
        """Create an unknown node with links and an empty disk. It is not started, and no client knows it.

        Of two nodes, the one with the smaller name dials the address in its own settings. Only there can a proxy stand
        between each pair, so new nodes get smaller names than all others.
        """
        self._newcomers += 1
        name = f"m{100 - self._newcomers:02d}"
        assert self._newcomers < 100 and all(name < other for other in self.names)
        self._places[name] = self._net.place()
        for other in self.names:
            await self._link(name, other)
        self._bends[name] = Bends(self._root / f"{name}.bends")
        return name

    def welcome(self, name: str) -> None:
        """Clients and faults use the node from now on."""
        self.names = [*self.names, name]
        self.lives[name] = (time.monotonic(), None)

    def forget(self, name: str) -> None:
        """The node is gone permanently."""
        self.names = [other for other in self.names if other != name]
        self.views.by_node.pop(name, None)
        now = time.monotonic()
        self.lives[name] = (self.lives[name][0] if name in self.lives else now, now)
        self.outages.append(Outage(name, "removed", now))

    def wipe(self, name: str) -> None:
        """Empty its directory."""
        assert self.pid(name) is None, "wiping the files of a running process proves nothing"
        for path in self.data(name).iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    async def is_turned_away(self, name: str) -> str | None:
        """Start a node that must refuse to run. Returns None if it ended as expected, else what it did instead."""
        await self.start(name)
        child = self._children[name]
        self._doomed.add(child.pid)
        try:
            status = await asyncio.wait_for(child.wait(), START_S)
        except TimeoutError:
            child.kill()
            await child.wait()
            return f"it went on running for {START_S:g} s: {self._last_words(name)}"
        if not self.is_out(name):
            return f"it took requests before it ended: {self._last_words(name)}"
        return None if status > 0 else f"it ended with status {status}: {self._last_words(name)}"

    def address(self, name: str) -> str:
        """The address for its peers."""
        return self._at(name, "peer")

    def said(self, name: str, text: str) -> bool:
        """Whether the end of a node's log contains `text`."""
        return text in self._last_words(name)

    # -- what faults change and find ---------------------------------------------------------------------------------

    def broken(self, promise: str, sentence: str) -> None:
        self.found.setdefault(promise, []).append(sentence)

    def bends(self, name: str) -> Bends:
        """The clock and the disk of a node."""
        return self._bends[name]

    @property
    def store_link(self) -> KnownLink:
        """The link of all nodes to the shared store."""
        assert self._store_link is not None, "left out where there is none"
        return self._store_link

    def data(self, name: str) -> Path:
        return self._root / name

    def _at(self, name: str, door: str) -> str:
        host, port = self._places[name][door]
        return f"{host}:{port}"

    # -- what clients and the run need -------------------------------------------------------------------------------

    def url(self, name: str) -> str:
        return f"http://{self._at(name, 'handlers' if name in self._handlers else 'ingress')}"

    def admin(self, name: str) -> str:
        return f"http://{self._at(name, 'admin')}"

    def running(self, name: str) -> bool:
        """Whether a process exists and is not stopped."""
        return self.pid(name) is not None and name not in self._stopped

    def is_out(self, name: str) -> bool:
        return any(outage.node == name and outage.until is None for outage in self.outages)

    def without_majority(self) -> frozenset[str]:
        """Nodes that currently cannot reach a majority of some group."""
        groups = {tuple(self.names), *map(tuple, self.views.members().values())}
        lonely = set()
        for name in self.names:
            heard = {other for other in self.names if self.running(other) and self._hears(name, other)}
            if any(len(heard.intersection(group)) <= len(group) // 2 for group in groups):
                lonely.add(name)
        return frozenset(lonely)

    def _hears(self, name: str, other: str) -> bool:
        return name == other or self._links[min(name, other), max(name, other)].is_open

    def key_in(self, service: str, partition: int) -> str:
        """A key of a service that belongs to a partition."""
        number = 0
        while partition_of(partition_key(service, f"probe-{number}"), self.partitions) != partition:
            number += 1
        return f"probe-{number}"

    async def answers(self, name: str) -> None:
        """Wait until a node accepts requests."""
        deadline = time.monotonic() + START_S
        while not await self._healthy(name):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} does not answer: {self._last_words(name)}")
            await asyncio.sleep(0.05)

    async def handlers_answer(self) -> bool:
        """Whether every handler process accepts connections."""
        for name in self._handlers:
            host, port = self._places[name]["handlers"]
            try:
                async with asyncio.timeout(LOOK_S):
                    _, writer = await asyncio.open_connection(host, port)
            except (OSError, TimeoutError):
                return False
            writer.close()
        return True

    async def ask_admin(self, path: str, *, method: str = "GET", body: Any = None) -> Any:
        """Send a request to the admin API of any node that answers."""
        deadline = time.monotonic() + START_S
        while True:
            for name in self.names:
                if not self.running(name):
                    continue
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with self._http.request(
                        method, self.admin(name) + path, json=body, timeout=aiohttp.ClientTimeout(total=20)
                    ) as response:
                        text = await response.text()
                        if response.status < 400:
                            return json.loads(text)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no node answers {method} {path} successfully")
            await asyncio.sleep(0.1)

    async def create_snapshot(self, partition: int) -> None:
        """Ask for a snapshot, if any node can be asked right now."""
        name = next((name for name in self.names if self.running(name)), None)
        if name is not None:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with self._http.post(
                    f"{self.admin(name)}/cluster/partitions/{partition}/snapshot",
                    timeout=aiohttp.ClientTimeout(total=5),
                ) as response:
                    await response.read()

    # -- life --------------------------------------------------------------------------------------------------------

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
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers={"Authorization": f"Bearer {self._root_token}"}
        )
        self._stack.push_async_callback(self._session.close)
        for name, secret in (("secret", secrets.token_hex(32)), ("admin-token", self._root_token)):
            path = self._root / name
            path.touch(mode=0o600)
            path.write_text(secret)
        self.oracle.touch()
        for a, b in combinations(self.names, 2):  # Of two nodes the one with the smaller name dials.
            await self._link(a, b)
        for name in self.names:
            self._bends[name] = Bends(self._root / f"{name}.bends")
        if self._want_small_disk:
            try:
                self._mount(self.data(self.names[-1]))
                self.small_disk = self.names[-1]
            except NoSmallDisk as reason:
                self.no_small_disk = str(reason)
        if self._want_store:
            try:
                await self._make_store()
            except store.NoStore as reason:
                self.no_store = str(reason)
        await asyncio.gather(*(self.start(name) for name in [*self.names, *self._handlers]))
        await asyncio.gather(*(self.answers(name) for name in self.names))
        self.token = (await self._posted("/tokens", {"name": "clients", "roles": ["invoke"]}))["token"]
        for name in self._handlers:
            await self._register(name)
        self._background(self._watch())
        while len(self.views.leaders()) < self.partitions:
            await asyncio.sleep(0.02)
        self.lives = {name: (time.monotonic(), None) for name in self.names}

    async def _link(self, a: str, b: str) -> None:
        proxy = await self._stack.enter_async_context(Proxy(("127.0.0.1", 0), self._places[b]["peer"]))
        self._links[a, b] = KnownLink(proxy)

    async def _make_store(self) -> None:
        store.find_rclone()
        self._places[STORE] = self._net.place()
        (self.data(STORE) / store.BUCKET).mkdir(parents=True)
        proxy = await self._stack.enter_async_context(Proxy(("127.0.0.1", 0), self._places[STORE]["s3"]))
        self._store_link, self.has_store = KnownLink(proxy), True
        await self.start(STORE)

    async def _posted(self, path: str, value: Any) -> Any:
        """What the first node answers to a request of the operator. It is asked until it is ready."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                async with self._http.post(self.admin(self.names[0]) + path, json=value) as response:
                    text = await response.text()
                    if response.status < 300:
                        return json.loads(text)
            except (aiohttp.ClientError, OSError) as error:
                text = str(error)
            if time.monotonic() > deadline:
                raise TimeoutError(f"POST {path} failed: {text}")
            await asyncio.sleep(0.1)

    async def _register(self, name: str) -> None:
        deployment = (await self._posted("/deployments", {"uri": self.url(name)}))["id"]
        for node in self.names:  # Wait until all nodes know it, because later requests go to any of them.
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with self._http.get(f"{self.admin(node)}/deployments/{deployment}") as response:
                        if response.status == 200:
                            break
                await asyncio.sleep(0.05)

    async def end_processes(self) -> None:
        """SIGKILL all processes for good. Their disks can be inspected until the cluster is left."""
        self._ending = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for child in self._children.values():
            if child.returncode is None:
                child.kill()
                await child.wait()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _end(self) -> None:
        await self.end_processes()
        await self._stack.aclose()

    def _mount(self, path: Path) -> None:
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES},mode=0700", "holdfast-chaos", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise NoSmallDisk(f"mount cannot be run ({error})") from None
        if done.returncode != 0:
            raise NoSmallDisk(f"cannot mount a small file system ({done.stderr.strip()}): this requires root")
        self._stack.callback(subprocess.run, ["umount", "--lazy", str(path)], check=False, capture_output=True)

    def _is_node(self, name: str) -> bool:
        return name in self._bends

    def _command(self, name: str) -> list[str]:
        if self._is_node(name):
            return [sys.executable, "-m", "holdfast.chaos.faulty_node", str(self._root / f"{name}.bends")]
        if name == STORE:
            return store.command(store.find_rclone(), self._places[STORE]["s3"], self.data(STORE))
        host, port = self._places[name]["handlers"]
        return [sys.executable, "-m", *self._handlers[name], "--host", host, "--port", str(port)]

    def _settings(self, name: str) -> dict[str, str]:
        peers = []
        for other in self.names:
            if name < other:
                host, port = self._links[name, other].proxy.address
                peers.append(f"{other}={host}:{port}")
            elif other < name:
                peers.append(f"{other}={self._at(other, 'peer')}")
        return {
            "HOLDFAST_NODE": name,
            "HOLDFAST_CLUSTER": "chaos",
            "HOLDFAST_DATA": str(self.data(name)),
            "HOLDFAST_PARTITIONS": str(self.partitions),
            "HOLDFAST_REPLICATION": str(self.replication),
            "HOLDFAST_PEER": self._at(name, "peer"),
            "HOLDFAST_INGRESS": self._at(name, "ingress"),
            "HOLDFAST_ADMIN": self._at(name, "admin"),
            "HOLDFAST_PEERS": ",".join(peers),
            "HOLDFAST_FOUNDERS": ",".join(self._founders),
            "HOLDFAST_SECRET_FILE": str(self._root / "secret"),
            "HOLDFAST_AUTH": "tokens",
            "HOLDFAST_ADMIN_TOKEN_FILE": str(self._root / "admin-token"),
            **(store.settings(self.store_link.proxy.address) if self.has_store else {}),
            **self._more_settings,
        }

    # -- watching ----------------------------------------------------------------------------------------------------

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the cluster was entered"
        return self._session

    def _background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _out(self, name: str, why: str) -> None:
        open_ones = [outage.why for outage in self.outages if outage.node == name and outage.until is None]
        # If a node was told to end and is then killed, its excuse changes at that moment.
        if not open_ones or (why == "killed" and why not in open_ones):
            self.outages.append(Outage(name, why, time.monotonic()))

    async def _watch_child(self, name: str, child: asyncio.subprocess.Process) -> None:
        status = await child.wait()
        self.views.by_node.pop(name, None)
        if child.pid in self._doomed or self._ending:
            return
        if name == self.small_disk and "No space left" in self._last_words(name) and self._is_full(name):
            self.died_of_a_full_disk += 1
        else:
            self.deaths.append(f"{name} ended by itself with status {status}: {self._last_words(name)}")
        if self._is_node(name):
            self._out(name, "ended by itself")
        await asyncio.sleep(RESTART_S)
        await self.start(name)

    async def _watch_return(self, name: str, child: asyncio.subprocess.Process) -> None:
        """The node is out until it answers again."""
        while child.returncode is None and name not in self._stopped:
            if await self._healthy(name):
                for outage in self.outages:
                    if outage.node == name and outage.until is None:
                        outage.until = time.monotonic()
                return
            await asyncio.sleep(0.05)

    async def _healthy(self, name: str) -> bool:
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self._http.get(
                self.url(name) + "/holdfast/health", timeout=aiohttp.ClientTimeout(total=LOOK_S)
            ) as response:
                return response.status == 200
        return False

    def _is_full(self, name: str) -> bool:
        """Whether the disk is or was just full: a process may end after the disk was emptied."""
        disk = os.statvfs(self.data(name))
        return disk.f_bavail * disk.f_frsize < NOTHING_BYTES or time.monotonic() < self.emptied_at + EMPTIED_S

    def _last_words(self, name: str) -> str:
        return (self._root / f"{name}.log").read_text(errors="replace")[-1500:]

    async def _watch(self) -> None:
        while True:
            await asyncio.gather(*(self._look_at(name) for name in self.names))
            await asyncio.sleep(WATCH_EVERY_S)

    async def _look_at(self, name: str) -> None:
        if not self.running(name):
            self.views.by_node.pop(name, None)
            return
        try:
            async with self._http.get(
                self.admin(name) + "/cluster", timeout=aiohttp.ClientTimeout(total=LOOK_S)
            ) as response:
                response.raise_for_status()  # A starting node answers with what it waits for.
                self.views.by_node[name] = await response.json()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            self.views.by_node.pop(name, None)


def _die_with_parent() -> None:
    """In the child: die if the run itself is killed."""
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
