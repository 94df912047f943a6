"""The log of one node as the rooms above see it: asyncio around the host.

    node = LogNode(NodeConfig(node="n1", cluster="demo", data=path, listen=Address("127.0.0.1", 7001), peers={...},
                              secret=secret), open_machine=lambda group: MyMachine(group))
    await node.start()
    group = node.create_group(1, members=("n1", "n2", "n3"))
    index = await group.propose(b"command")     # committed on a majority of disks, applied here; or a ProposalError
    index = await group.read_index()            # what is applied now includes all acknowledged before the call
    await node.stop()

This is the only place where the log meets a clock, a thread and sockets. The loop thread runs turns (`Host.turn`); the writer
thread does nothing but `Store.commit`, so that an fsync never blocks the loop. Whatever breaks an invariant or the disk ends
the node: `on_fatal` is called (by default the process exits), because a node that goes on after that could lose what it
acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Final

from holdfast.log.engine import Limits, Timing
from holdfast.log.errors import NoSpace, NotHosted, Stopped
from holdfast.log.host import APP_GROUP, Host
from holdfast.log.journal import Journal
from holdfast.log.link import Address, LinkLimits, Links, LinkStatus, TlsFiles
from holdfast.log.messages import (
    REASON_BYTES_MAX,
    Envelope,
    Farewell,
    GroupId,
    Malformed,
    NodeId,
    alike,
    decode,
    encode,
)
from holdfast.log.replica import Done, Machine, SnapshotWanted, Status
from holdfast.log.rows import Rows
from holdfast.log.store import LmdbStore

logger = logging.getLogger(__name__)

FATAL_EXIT_CODE: Final = 70
NO_SPACE_RETRY_S: Final = 0.2
# The writer thread asks for the GIL before its fsync and after it. Python's default lets a busy loop keep it for 5 ms,
# and every commit waits for that.
SWITCH_INTERVAL_S: Final = 0.0001


@dataclass(frozen=True)
class NodeConfig:
    """Names, places and bounds of one node."""

    node: str
    cluster: str
    data: Path
    listen: Address
    peers: Mapping[str, Address] = field(default_factory=dict)
    secret: bytes | None = None
    tls: TlsFiles | None = None
    timing: Timing = field(default_factory=Timing)
    limits: Limits = field(default_factory=Limits)
    link_limits: LinkLimits = field(default_factory=LinkLimits)
    rows: Rows = field(default_factory=Rows)
    log_bytes_max: int = 16 << 30
    free_bytes_min: int = 64 << 20


@dataclass(frozen=True)
class Counters:
    """What the node has done since it started."""

    turns: int
    commits: int
    proposals: int
    dropped: int
    commit_s: float = 0.0  # spent on commits by the writer thread: writing and fsync
    commit_s_max: float = 0.0  # the longest of them


def exit_process(error: BaseException) -> None:
    """A node that cannot trust itself stops, at once and visibly. Its log on disk is intact; a restart replays it."""
    logger.critical("the node stops: %s", error, exc_info=error)
    logging.shutdown()
    os._exit(FATAL_EXIT_CODE)


class Group:
    """One group as seen from this node."""

    def __init__(self, node: LogNode, group: GroupId) -> None:
        self.id = group
        self._node = node

    def propose(self, command: bytes) -> asyncio.Future[int]:
        """The index at which the command is committed and applied here. Raises a ProposalError; see `definite`."""
        node = self._node
        future = node.loop.create_future()
        if node.is_awake or node.open_for(future):
            node.proposals += 1
            node.host.propose(self.id, command, future)
            if not node.is_awake:
                node.wake()
        return future

    def read_index(self) -> asyncio.Future[int]:
        """Linearizable reads: when this returns, the machine has applied all that was acknowledged before the call."""
        node = self._node
        future = node.loop.create_future()
        if node.open_for(future):
            node.host.read(self.id, future)
            node.wake()
        return future

    def change_members(
        self, members: tuple[str, ...], timeout_s: float = 30.0, may_seal: Callable[[], bool] = lambda: True
    ) -> asyncio.Future[int]:
        """Add, remove or replace one member. The index of the seal that ended the epoch before. For `may_seal`, see
        `Replica.change_members`; `nudge` has it asked again."""
        node = self._node
        future = node.loop.create_future()
        if node.open_for(future):
            next_members = tuple(NodeId(name) for name in members)
            node.host.change_members(self.id, next_members, timeout_s, future, may_seal)
            node.wake()
        return future

    def nudge(self) -> None:
        self._node.host.nudge(self.id)
        self._node.wake()

    def transfer(self, to: str) -> bool:
        """Ask another member to lead. True if the wish was accepted; watch `leader` for the result."""
        accepted = self._node.host.transfer(self.id, NodeId(to))
        self._node.wake()
        return accepted

    def install(self, index: int, term: int, swap: Callable[[], None]) -> bool:
        """A fetched snapshot takes the place of the state; see `Replica.install`."""
        installed = self._node.host.install(self.id, index, term, swap)
        self._node.wake()
        return installed

    def trim(self, index: int) -> None:
        self._node.host.replicas[self.id].trim(index)
        self._node.wake()

    @property
    def is_transferring(self) -> bool:
        """Whether this node leads, and waits for another one to take over."""
        return self._node.host.replicas[self.id].engine.transferee is not None

    @property
    def is_leader(self) -> bool:
        """Whether this node believes to lead. Somebody newer may: nothing is safe that rests on this alone."""
        return self._node.host.replicas[self.id].engine.is_leader

    @property
    def leader(self) -> str | None:
        return self._node.host.replicas[self.id].engine.leader

    @property
    def term(self) -> int:
        return self._node.host.replicas[self.id].engine.term

    def status(self) -> Status:
        return self._node.host.replicas[self.id].status()


class LogNode:
    def __init__(
        self,
        config: NodeConfig,
        *,
        open_machine: Callable[[GroupId], Machine],
        may_join: Callable[[GroupId], bool] = lambda _: True,
        keep_hollow: bool = False,
        applied_at_once: frozenset[GroupId] = frozenset(),
        on_role_change: Callable[[Group], None] = lambda _: None,
        on_message: Callable[[str, bytes], None] = lambda *_: None,
        on_peer: Callable[[str, bool], None] = lambda *_: None,
        on_refused: Callable[[str, str], None] = lambda *_: None,
        on_snapshot_wanted: Callable[[SnapshotWanted], Awaitable[None]] | None = None,
        on_forgotten: Callable[[GroupId], None] = lambda _: None,
        on_fatal: Callable[[BaseException], None] = exit_process,
    ) -> None:
        self.config = config
        self.groups: dict[GroupId, Group] = {}
        self.proposals = 0
        self._open_machine = open_machine
        self._may_join = may_join
        self._keep_hollow = keep_hollow
        self._applied_at_once = applied_at_once
        self._on_role_change = on_role_change
        self._on_message = on_message
        self._on_peer = on_peer
        self._on_refused = on_refused
        self._on_snapshot_wanted = on_snapshot_wanted
        self._on_forgotten = on_forgotten
        self._on_fatal = on_fatal
        self._turns = self._commits = 0
        self.is_awake = False  # Whether a turn is due. Not any more when the node has ended.
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._encoded: tuple[list[Envelope], bytes] = [], b""
        self._fetching: dict[GroupId, asyncio.Task[None]] = {}

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the journal and the groups in it, listen, and dial the peers."""
        config = self.config
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.loop = asyncio.get_running_loop()
        self._store = self._open_store()
        try:
            self.host = Host(
                node=NodeId(config.node),
                journal=Journal(self._store, config.rows),
                open_machine=self._open_machine,
                send=self._send,
                begin_commit=self._begin_commit,
                rng=self._rng(),
                now=self.loop.time(),
                timing=config.timing,
                limits=config.limits,
                may_join=self._may_join,
                keep_hollow=self._keep_hollow,
                applied_at_once=self._applied_at_once,
            )
            self._links = self._open_links()
            for group in self.host.replicas:
                self.groups[group] = Group(self, group)
            await self._links.start()
        except BaseException:
            self._store.close()
            raise
        self._writer = self._start_writer()
        self._links.set_peers(config.peers)
        self.wake()

    # The disk, the network, the thread and the dice. A simulated node overrides these, and nothing else.

    def _open_store(self) -> LmdbStore:
        config = self.config
        return LmdbStore.open(
            config.data,
            node=config.node,
            cluster=config.cluster,
            bytes_max=config.log_bytes_max,
            free_bytes_min=config.free_bytes_min,
        )

    def _open_links(self) -> Links:
        config = self.config
        return Links(
            cluster=config.cluster,
            node=config.node,
            disk=self._store.disk,
            incarnation=self._store.incarnation,
            listen=config.listen,
            secret=config.secret,
            tls=config.tls,
            on_up=self._on_up,
            on_down=self._on_down,
            on_frame=self._on_frame,
            on_fatal=self._fatal,
            limits=config.link_limits,
        )

    def _start_writer(self) -> Writer:
        return Writer(self._store, self.loop, self._committed, self._fatal, self._no_space)

    def _rng(self) -> random.Random:
        return random.Random()

    async def stop(self, handover_s: float = 2.0) -> None:
        """Hand leaderships over, then stop. What is acknowledged is on disk at any moment, so this is courtesy."""
        deadline = self.loop.time() + handover_s
        terms: dict[GroupId, int] = {}
        # A node that has ended already has no turns any more, so nobody would be asked.
        while not self._stopping and self.loop.time() < deadline and self._hand_over(terms):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        self._stopping, self.is_awake = True, False
        for task in self._fetching.values():
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        await self._links.stop()
        await self._writer.stop()
        self._abandon()
        self._store.close()

    def _abandon(self) -> None:
        """There will be no more turns. Nobody waits for one for ever."""
        for replica in self.host.replicas.values():
            replica.stop()
            self.host.results += replica.results
            replica.results = []
        self._answer_waiting()

    def open_for(self, future: asyncio.Future[int]) -> bool:
        """Whether somebody who asks now will be answered by a turn. If not, this is the answer."""
        if self._stopping:
            future.set_exception(Stopped(f"{self.config.node} has stopped"))
        return not self._stopping

    def _hand_over(self, terms: dict[GroupId, int]) -> bool:
        """Ask the most advanced follower of each group we lead to take over. True if there is still one to wait for.

        `terms` remembers in which term each group was handed over. One that comes back in a later term stays: whoever had
        it stops too, and the two would hand it back and forth.
        """
        waiting = False
        for replica in self.host.replicas.values():
            engine = replica.engine
            reachable = [peer for peer in engine.peers if peer in engine.connected]
            if engine.is_leader and reachable and terms.setdefault(replica.group, engine.term) == engine.term:
                waiting = True
                if engine.transferee is None:
                    self.host.transfer(replica.group, max(reachable, key=lambda peer: engine.progress[peer].match))
        self.wake()
        return waiting

    @property
    def port(self) -> int:
        return self._links.port

    @property
    def disk(self) -> str:
        return self._store.disk

    def create_group(self, group: int, members: tuple[str, ...]) -> Group:
        """Host a group from its beginning; every first member must be given the same members. Idempotent."""
        self.host.create(GroupId(group), tuple(NodeId(name) for name in sorted(members)))
        self.wake()
        return self.group(group)

    def group(self, group: int) -> Group:
        """A group on this node; also one that a leader invited us to."""
        found = self.groups.get(GroupId(group))
        if found is None:
            if GroupId(group) not in self.host.replicas:
                raise NotHosted(f"group {group} is not on {self.config.node}")
            found = self.groups[GroupId(group)] = Group(self, GroupId(group))
        return found

    def forget_group(self, group: int) -> bool:
        """Delete the log of a group that went on without this node (`Host.forget`); `on_forgotten` tells when it is gone.

        Until then and until its state is removed, `may_join` must keep the group away.
        """
        forgotten = self.host.forget(GroupId(group))
        if forgotten:
            self.groups.pop(GroupId(group), None)
            fetching = self._fetching.pop(GroupId(group), None)
            if fetching is not None:
                fetching.cancel()
            self.wake()
        return forgotten

    def set_peers(self, peers: Mapping[str, Address]) -> None:
        self._links.set_peers(peers)

    def send(self, peer: str, payload: bytes) -> bool:
        """Bytes to the same room on another node: in order, at most once. False if there is no session."""
        sent = self.host.send_app(NodeId(peer), payload)
        self.wake()
        return sent

    @property
    def no_space(self) -> str | None:
        """Why nothing at all can be written to the log now, not even a vote."""
        return self._writer.no_space

    def links(self) -> dict[str, LinkStatus]:
        return self._links.status()

    def counters(self) -> Counters:
        return Counters(
            self._turns,
            self._commits,
            self.proposals,
            self.host.dropped,
            self._writer.commit_s,
            self._writer.commit_s_max,
        )

    # -- turns -------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have a turn soon: after whatever else this iteration of the loop brings, so that it shares the turn."""
        if not self.is_awake and not self._stopping:
            self.is_awake = True
            self.loop.call_soon(self._turn)

    def _turn(self) -> None:
        self.is_awake = False
        if self._stopping:
            return
        try:
            self._turns += 1
            host, now = self.host, self.loop.time()
            if now >= host.wake_at:
                host.tick(now)
            host.turn(now)
            self._answer()
            if host.busy:
                self.wake()
            self._arm(min(host.wake_at, host.turn_at))
        except BaseException as error:
            self._fatal(error)

    def _arm(self, when: float) -> None:
        """See that there is a turn when something is due. A timer that rings too early costs a turn and is set anew."""
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer = self.loop.call_at(when, self._turn_by_timer)
        self._timer_at = when

    def _turn_by_timer(self) -> None:
        self._timer = None
        self._turn()

    def _answer_waiting(self) -> None:
        host = self.host
        if host.results:
            results, host.results = host.results, []
            for result in results:
                if isinstance(result, Done):
                    index = result.index
                    for future in result.waiting:
                        if not future.done():  # type: ignore[attr-defined]
                            future.set_result(index)  # type: ignore[attr-defined]
                else:
                    for future in result.waiting:
                        if not future.done():  # type: ignore[attr-defined]
                            future.set_exception(result.error)  # type: ignore[attr-defined]

    def _answer(self) -> None:
        self._answer_waiting()
        host = self.host
        if host.begun:
            begun, host.begun = host.begun, []
            for peer in begun:
                if peer in host.sessions:  # From now on it can be sent something: not before its disk is on record.
                    self._on_peer(peer, True)
        if host.role_changes:
            changes, host.role_changes = host.role_changes, []
            for group in changes:
                self._on_role_change(self.group(group))
        if host.forgotten:
            forgotten, host.forgotten = host.forgotten, []
            for group in forgotten:
                self._on_forgotten(group)
        if host.received:
            received, host.received = host.received, []
            for peer, payload in received:
                self._on_message(peer, payload)
        if host.wanted:
            wanted, host.wanted = host.wanted, []
            for want in wanted:
                self._fetch(want)

    def _fetch(self, want: SnapshotWanted) -> None:
        """One fetch at a time and group; the offer comes again with every heartbeat while it is needed."""
        running = self._fetching.get(want.group)
        if self._on_snapshot_wanted is None or (running is not None and not running.done()):
            return
        self._fetching[want.group] = self.loop.create_task(self._fetch_one(self._on_snapshot_wanted, want))

    async def _fetch_one(self, fetch: Callable[[SnapshotWanted], Awaitable[None]], want: SnapshotWanted) -> None:
        try:
            await fetch(want)
        except Exception:
            logger.exception("group %d: fetching a snapshot from %s failed; it is tried again", want.group, want.peer)

    # -- the writer thread -------------------------------------------------------------------------------------------

    def _begin_commit(self) -> None:
        self._commits += 1
        self._writer.commit()

    def _committed(self) -> None:
        if not self._stopping:
            try:
                self.host.committed(self.loop.time())
            except BaseException as error:
                self._fatal(error)
            self.wake()

    def _no_space(self) -> None:
        if not self._stopping:
            self.host.no_space()
            self._answer_waiting()

    # -- links -------------------------------------------------------------------------------------------------------

    def _send(self, peer: NodeId, session: int, envelopes: list[Envelope]) -> None:
        # Followers that keep up are sent the same, so it is encoded once.
        if not alike(envelopes, self._encoded[0]):
            self._encoded = envelopes, encode(envelopes)
        payload = self._encoded[1]
        if len(payload) > self.config.link_limits.frame_bytes_max and len(envelopes) > 1:
            # A peer that comes back is sent a window of every group that we lead, in one turn.
            middle = len(envelopes) // 2
            self._send(peer, session, envelopes[:middle])
            self._send(peer, session, envelopes[middle:])
            return
        self._links.send(peer, session, payload)

    def _on_up(self, peer: str, session: int, disk: str) -> None:
        if not self.host.peer_up(NodeId(peer), session, disk, self.loop.time()):
            reason = (
                f"{peer} came back with another disk than it had: it has forgotten what it acknowledged. "
                "Add it to the cluster again under a new name"
            )
            farewell = Envelope(APP_GROUP, 0, Farewell(reason.encode()[:REASON_BYTES_MAX]))
            self._links.send(peer, session, encode([farewell]))  # Or it would dial for ever, and never know why.
            self._links.refuse(peer, session, reason)
        self.wake()

    def _on_down(self, peer: str, session: int) -> None:
        self.host.peer_down(NodeId(peer), session, self.loop.time())
        self._on_peer(peer, False)
        self.wake()

    def _on_frame(self, peer: str, session: int, frame: bytes) -> None:
        try:
            envelopes = decode(frame)
        except Malformed as error:
            self._links.refuse(peer, session, f"{peer} sent a malformed message: {error}")
            return
        for envelope in envelopes:
            if type(envelope.message) is Farewell:
                self._on_refused(peer, envelope.message.reason.decode(errors="replace"))
                return  # Whatever came with it, the peer will not stand by it.
        self.host.deliver(NodeId(peer), session, envelopes, self.loop.time())
        self.wake()

    def _fatal(self, error: BaseException) -> None:
        if not self._stopping:
            self._stopping, self.is_awake = True, False
            self._on_fatal(error)
            self._abandon()  # Reached only if whoever was told keeps the process.


class Writer:
    """A thread that commits. It touches nothing but the store."""

    def __init__(
        self,
        store: LmdbStore,
        loop: asyncio.AbstractEventLoop,
        on_done: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
        on_no_space: Callable[[], None] = lambda: None,
    ) -> None:
        self.no_space: str | None = None  # Why the commit under way waits.
        self._on_no_space = on_no_space
        self._store = store
        self._loop = loop
        self._on_done = on_done
        self._on_fatal = on_fatal
        self._work: SimpleQueue[None] = SimpleQueue()  # In C: waking the thread costs the loop next to nothing.
        self.commit_s = self.commit_s_max = 0.0  # Written by the thread alone.
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def commit(self) -> None:
        self._work.put(None)

    async def stop(self) -> None:
        self._stop.set()
        self._work.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while True:
            self._work.get()
            if self._stop.is_set():
                return
            try:
                began = perf_counter()
                self._commit()
                took = perf_counter() - began
                self.commit_s += took
                self.commit_s_max = max(self.commit_s_max, took)
            except BaseException as error:
                self._loop.call_soon_threadsafe(self._on_fatal, error)
                return
            if self._stop.is_set():
                return
            self._loop.call_soon_threadsafe(self._on_done)

    def _commit(self) -> None:
        """What is staged stays staged while the disk is full: nothing was promised, so waiting loses nothing."""
        while True:
            try:
                self._store.commit()
                self.no_space = None
                return
            except NoSpace as error:
                if self.no_space is None:
                    logger.error("%s", error)
                self.no_space = str(error)
                self._loop.call_soon_threadsafe(self._on_no_space)
                if self._stop.wait(NO_SPACE_RETRY_S):
                    return
