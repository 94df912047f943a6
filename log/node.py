"""The log of one node, as the rooms above use it: asyncio around the host.

    node = LogNode(NodeConfig(node="n1", cluster="demo", data=path, listen=Address("127.0.0.1", 7001), peers={...},
                              secret=secret), open_machine=lambda group: MyMachine(group))
    await node.start()
    group = node.create_group(1, members=("n1", "n2", "n3"))
    index = await group.propose(b"command")     # committed on a majority of disks and applied here, or a ProposalError
    index = await group.read_index()            # everything acknowledged before the call is applied here
    await node.stop()

This is where the log meets the clock, the writer thread and the links. The loop thread runs turns (`Host.turn`); the writer
thread only calls `Store.commit`, so an fsync never blocks the loop. A broken invariant or a failed disk ends the node:
`on_fatal` is called, which exits the process by default, because a node that continued could lose acknowledged entries.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.log.batches import APP_GROUP
from holdfast.log.environment import Environment, LinkEvents, NodeConfig
from holdfast.log.errors import NotHosted, Stopped
from holdfast.log.host import Host
from holdfast.log.journal import Journal
from holdfast.log.link import LinkStatus
from holdfast.log.messages import (
    REASON_BYTES_MAX,
    SLICED_BYTES,
    Envelope,
    Farewell,
    GroupId,
    Malformed,
    NodeId,
    alike,
    decode,
    encode,
    encode_frames,
    slices,
)
from holdfast.log.replica import Done, Machine, SnapshotWanted, Status
from holdfast.log.sockets import Address

logger = logging.getLogger(__name__)

FATAL_EXIT_CODE: Final = 70
# The writer thread needs the GIL before and after its fsync. By default Python lets a busy loop keep it for 5 ms, and every
# commit would wait that long.
SWITCH_INTERVAL_S: Final = 0.0001


@dataclass(frozen=True)
class Counters:
    """Totals since the node started."""

    turns: int
    commits: int
    proposals: int
    dropped: int
    commit_s: float = 0.0  # Spent on commits by the writer thread: writing and fsync.
    commit_s_max: float = 0.0  # The longest commit.


def exit_process(error: BaseException) -> None:
    """Stop a node that cannot trust itself, at once and visibly. Its log on disk is intact; a restart replays it."""
    logger.critical("the node stops: %s", error, exc_info=error)
    logging.shutdown()
    os._exit(FATAL_EXIT_CODE)


class Group:
    """One group as seen from this node."""

    def __init__(self, node: LogNode, group: GroupId) -> None:
        self.id = group
        self._node = node

    def propose(self, command: bytes) -> asyncio.Future[int]:
        """Return the index at which the command was committed and applied here. Raises `ProposalError`; see `definite`."""
        node = self._node
        future = node.loop.create_future()
        if node.is_awake or node.open_for(future):
            node.proposals += 1
            node.host.propose(self.id, command, future)
            if not node.is_awake:
                node.wake()
        return future

    def read_index(self) -> asyncio.Future[int]:
        """For linearizable reads: when this returns, everything acknowledged before the call is applied here."""
        node = self._node
        future = node.loop.create_future()
        if node.open_for(future):
            node.host.read(self.id, future)
            node.wake()
        return future

    def change_members(
        self, members: tuple[str, ...], timeout_s: float = 30.0, may_seal: Callable[[], bool] = lambda: True
    ) -> asyncio.Future[int]:
        """Add, remove or replace one member. Return the index of the seal that ended the previous epoch.

        For `may_seal`, see `Replica.change_members`; after `nudge` it is asked again.
        """
        node = self._node
        future = node.loop.create_future()
        if node.open_for(future):
            next_members = tuple(NodeId(name) for name in members)
            node.host.change_members(self.id, next_members, seconds=timeout_s, waiting=future, may_seal=may_seal)
            node.wake()
        return future

    def nudge(self) -> None:
        self._node.host.nudge(self.id)
        self._node.wake()

    def transfer(self, to: str) -> bool:
        """Ask another member to lead. True if the transfer began; watch `leader` for the result."""
        accepted = self._node.host.transfer(self.id, NodeId(to))
        self._node.wake()
        return accepted

    def install(self, index: int, term: int, swap: Callable[[], None]) -> bool:
        """Replace the state by a fetched snapshot; see `Replica.install`."""
        installed = self._node.host.install(self.id, index, term, swap)
        self._node.wake()
        return installed

    def trim(self, index: int) -> None:
        self._node.host.replicas[self.id].trim(index)
        self._node.wake()

    @property
    def is_transferring(self) -> bool:
        """Whether this node leads and waits for another node to take over."""
        return self._node.host.replicas[self.id].engine.transferee is not None

    @property
    def is_leader(self) -> bool:
        """Whether this node believes that it leads. A newer leader may exist, so do not rely on this for safety."""
        return self._node.host.replicas[self.id].engine.is_leader

    @property
    def leader(self) -> NodeId | None:
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
        environment: Environment | None = None,
        *,
        open_machine: Callable[[GroupId], Machine],
        may_join: Callable[[GroupId], bool] = lambda _: True,
        keep_hollow: bool = False,
        applied_at_once: frozenset[GroupId] = frozenset(),
        on_role_change: Callable[[Group], None] = lambda _: None,
        on_message: Callable[[str, bytes], None] = lambda *_: None,
        on_peer: Callable[[str, bool], None] = lambda *_: None,
        on_refused: Callable[[str, str], None] = lambda *_: None,
        on_removed: Callable[[str, str], None] = lambda *_: None,
        on_snapshot_wanted: Callable[[SnapshotWanted], Awaitable[None]] | None = None,
        on_forgotten: Callable[[GroupId], None] = lambda _: None,
        on_fatal: Callable[[BaseException], None] = exit_process,
    ) -> None:
        self.config = config
        self._environment = environment or Environment()
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
        self._on_removed = on_removed
        self._on_snapshot_wanted = on_snapshot_wanted
        self._on_forgotten = on_forgotten
        self._on_fatal = on_fatal
        self._turns = self._commits = 0
        self.is_awake = False  # Whether a turn is due. Always false once the node has ended.
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._encoded: tuple[list[Envelope], list[bytes]] = [], []
        self._fetching: dict[GroupId, asyncio.Task[None]] = {}

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the journal and the groups in it, listen, and dial the peers."""
        config, environment = self.config, self._environment
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.loop = asyncio.get_running_loop()
        self._store = environment.open_store(config)
        try:
            self.host = Host(
                node=NodeId(config.node),
                journal=Journal(self._store, config.rows),
                open_machine=self._open_machine,
                send=self._send,
                begin_commit=self._begin_commit,
                rng=environment.random(),
                now=self.loop.time(),
                timing=config.timing,
                limits=config.limits,
                may_join=self._may_join,
                keep_hollow=self._keep_hollow,
                applied_at_once=self._applied_at_once,
            )
            events = LinkEvents(
                up=self._on_up,
                down=self._on_down,
                frame=self._on_frame,
                fatal=self._fatal,
                removed=self._on_removed,
            )
            self._links = environment.open_links(config, self._store, events)
            for group in self.host.replicas:
                self.groups[group] = Group(self, group)
            await self._links.start()
        except BaseException:
            self._store.close()
            raise
        self._writer = environment.start_writer(
            self._store, on_committed=self._committed, on_fatal=self._fatal, on_no_space=self._no_space
        )
        self._links.set_peers(config.peers)
        self.wake()

    async def stop(self, handover_s: float = 2.0) -> None:
        """Hand leaderships over, then stop. Acknowledged entries are always on disk, so this only avoids elections."""
        deadline = self.loop.time() + handover_s
        terms: dict[GroupId, int] = {}
        # A node that has already ended runs no more turns, so it would ask no peer.
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
        """There will be no more turns: fail every caller that still waits."""
        for replica in self.host.replicas.values():
            replica.stop()
            self.host.results += replica.results
            replica.results = []
        self._answer_waiting()

    def open_for(self, future: asyncio.Future[int]) -> bool:
        """Whether a turn will answer `future`. If not, fail it now."""
        if self._stopping:
            future.set_exception(Stopped(f"node {self.config.node} has stopped"))
        return not self._stopping

    def _hand_over(self, terms: dict[GroupId, int]) -> bool:
        """Ask the most advanced follower of each group that we lead to take over. True while a handover is pending.

        `terms` has the term in which each group was handed over. A group that returns in a later term stays: its other leader
        is stopping too, and the two nodes would pass the group back and forth.
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
        """Host a group from its beginning. All founders must name the same members. Idempotent."""
        self.host.create(GroupId(group), tuple(NodeId(name) for name in sorted(members)))
        self.wake()
        return self.group(group)

    def group(self, group: int) -> Group:
        """A group on this node, including one that a leader invited us to."""
        found = self.groups.get(GroupId(group))
        if found is None:
            if GroupId(group) not in self.host.replicas:
                raise NotHosted(f"group {group} is not hosted on {self.config.node}")
            found = self.groups[GroupId(group)] = Group(self, GroupId(group))
        return found

    def forget_group(self, group: int) -> bool:
        """Delete the log of a group that continued without this node (`Host.forget`). `on_forgotten` reports the deletion.

        Until then, and until the group's state is removed, `may_join` must refuse the group.
        """
        forgotten = self.host.forget(GroupId(group))
        if forgotten:
            self.groups.pop(GroupId(group), None)
            fetching = self._fetching.pop(GroupId(group), None)
            if fetching is not None:
                fetching.cancel()
            self.wake()
        return forgotten

    def set_peers(self, peers: Mapping[str, Address], removed: Collection[str] = ()) -> None:
        self._links.set_peers(peers, removed)

    def use_tls(self, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        """New certificates for new connections to peers."""
        self._links.use_tls(server, client)

    def send(self, peer: str, payload: bytes) -> bool:
        """Send bytes to the same room on another node: in order, at most once. False without a session."""
        sent = self.host.send_app(NodeId(peer), payload)
        self.wake()
        return sent

    @property
    def no_space(self) -> str | None:
        """Why nothing can be written to the log now, not even a vote; None if writing works."""
        return self._writer.no_space

    def links(self) -> dict[str, LinkStatus]:
        return self._links.status()

    def connected(self) -> Collection[NodeId]:
        """The peers with a session."""
        return self.host.sessions.keys()

    def refusals(self) -> dict[str, str]:
        """Why there is no link to peers that run: other founders, certificates or secrets. A silent peer is not listed."""
        return {peer: link.refused for peer, link in sorted(self.links().items()) if link.refused is not None}

    def why_stalled(self) -> str | None:
        """Why committed entries cannot be applied here."""
        stalled = (replica.stalled for replica in self.host.replicas.values() if replica.stalled is not None)
        return self.no_space or next(stalled, None)

    def why_no_room(self) -> str | None:
        """Why nothing can be appended here, or not even what is committed can be applied."""
        refusal = self.host.no_room()
        return str(refusal) if refusal is not None else self.why_stalled()

    def counters(self) -> Counters:
        return Counters(
            turns=self._turns,
            commits=self._commits,
            proposals=self.proposals,
            dropped=self.host.dropped,
            commit_s=self._writer.commit_s,
            commit_s_max=self._writer.commit_s_max,
        )

    # -- turns -------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Schedule a turn after all other callbacks of this loop iteration, so that they share the turn."""
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
        """Schedule a turn for `when`. A timer that fires too early costs one turn and is set again."""
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
                if peer in host.sessions:  # Its disk id is on record, so from now on we may send to it.
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
        """Run one fetch per group at a time. Every heartbeat repeats the offer while it is needed."""
        running = self._fetching.get(want.group)
        if self._on_snapshot_wanted is None or (running is not None and not running.done()):
            return
        self._fetching[want.group] = self.loop.create_task(self._fetch_one(self._on_snapshot_wanted, want))

    async def _fetch_one(self, fetch: Callable[[SnapshotWanted], Awaitable[None]], want: SnapshotWanted) -> None:
        try:
            await fetch(want)
        except Exception:
            logger.exception("group %d: fetching a snapshot from %s failed; the node will retry", want.group, want.peer)

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
        # Followers that keep up receive the same messages, so they are encoded once.
        if not alike(envelopes, self._encoded[0]):
            self._encoded = envelopes, encode_frames(envelopes, self.config.link_limits.frame_bytes_max)
        for payload in self._encoded[1]:
            self._links.send(peer, session, payload)

    def _on_up(self, peer: str, session: int, disk: str) -> None:
        if not self.host.peer_up(NodeId(peer), session, disk, self.loop.time()):
            reason = (
                f"{peer} came back with a different disk, so it has lost entries that it acknowledged. "
                "Add it to the cluster again under a new name"
            )
            farewell = Envelope(APP_GROUP, 0, Farewell(reason.encode()[:REASON_BYTES_MAX]))
            self._links.send(
                peer, session, encode([farewell])
            )  # Otherwise it would redial for ever without knowing why.
            self._links.refuse(peer, session, reason)
        self.wake()

    def _on_down(self, peer: str, session: int) -> None:
        self.host.peer_down(NodeId(peer), session, self.loop.time())
        self._on_peer(peer, False)
        self.wake()

    def _on_frame(self, peer: str, session: int, frame: bytes) -> Iterator[None] | None:
        """Take a frame; of a large one, a slice with each step of the iterator."""
        if len(frame) > SLICED_BYTES:
            return self._take_slices(peer, session, frame)
        self._take(peer, session, frame)
        return None

    def _take_slices(self, peer: str, session: int, frame: bytes) -> Iterator[None]:
        try:
            for part in slices(frame):
                if not self._take(peer, session, part):
                    return
                yield
        except Malformed as error:
            self._refuse_malformed(peer, session, error)

    def _take(self, peer: str, session: int, frame: bytes) -> bool:
        """Returns whether the session goes on."""
        try:
            envelopes = decode(frame)
        except Malformed as error:
            self._refuse_malformed(peer, session, error)
            return False
        for envelope in envelopes:
            if type(envelope.message) is Farewell:
                self._on_refused(peer, envelope.message.reason.decode(errors="replace"))
                return False  # The peer does not stand by anything else in this frame.
        self.host.deliver(NodeId(peer), session, envelopes, self.loop.time())
        self.wake()
        return True

    def _refuse_malformed(self, peer: str, session: int, error: Malformed) -> None:
        self._links.refuse(peer, session, f"{peer} sent a malformed message: {error}")

    def _fatal(self, error: BaseException) -> None:
        if not self._stopping:
            self._stopping, self.is_awake = True, False
            self._on_fatal(error)
            self._abandon()  # Reached only if `on_fatal` keeps the process running.
