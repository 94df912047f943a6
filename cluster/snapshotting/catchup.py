"""Fetching a state from elsewhere, for a follower that fell behind the log, a new member, or a node that lost its
state.

The log (`log.engine`) repeatedly offers the leader's newest snapshot to a follower that needs one. The follower fetches
exactly that snapshot, from the shared store or else from the leader. It checks every byte, writes the data next to the
state that it will replace, and lets the log decide (`Group.install`), because the snapshot may be obsolete by then. If
the log accepts, one rename makes the snapshot ours and a second one makes it the state. A crash at any point leaves the
old state or the new one.

A *hollow* group has lost its state and its snapshots, and its log no longer reaches back to the beginning. Until it has
a state it does not take part; to its peers it looks like a node that is down. It accepts any snapshot whose entry its
own log holds, or one of its own epoch. It cannot use a snapshot of a later epoch before its peers have told it of that
epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from holdfast.cluster.backoff import backoff
from holdfast.cluster.partition.machine import PartitionMachine
from holdfast.cluster.peers.rpc import Refused, Unanswered
from holdfast.cluster.snapshotting.keeper import Keeper
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.log.messages import GroupId
from holdfast.log.node import LogNode
from holdfast.log.replica import SnapshotWanted
from holdfast.sdk.ids import PartitionNumber
from holdfast.snapshots.catalog import Catalog
from holdfast.snapshots.errors import NotFound, PeerRefused, SnapshotError
from holdfast.snapshots.files import make_directory, move_into_place, remove_quietly
from holdfast.snapshots.format import Header, SnapshotFile, parse_name
from holdfast.snapshots.restore import Staged, stage
from holdfast.snapshots.transfer import Offer, fetch, fetch_from_peer, remove_parts
from holdfast.snapshots.work import ABANDON_S, in_thread
from holdfast.statemachine.tables import SCHEMA

logger = logging.getLogger(__name__)

PROGRESS_EVERY_S: Final = 10.0
RETRY_S: Final = 1.0
RETRY_S_MAX: Final = 60.0


class CatchUp:
    """One per node; `wanted` is the log's `on_snapshot_wanted`."""

    def __init__(self, home: Snapshots) -> None:
        self._home = home
        home.rpc.serve("snapshot-newest", self._serve_newest)

    async def wanted(self, want: SnapshotWanted) -> None:
        """Fetch and install a snapshot. The log makes one offer per group at a time, and offers again afterwards."""
        keeper = self._home.keepers.get(want.group)
        if keeper is not None and not self._home.stopping:
            await asyncio.gather(self._home.run(self._try(keeper, want)), return_exceptions=True)

    async def _try(self, keeper: Keeper, want: SnapshotWanted) -> None:
        try:
            async with self._home.fetches:
                await self._catch_up(keeper, want)
        except (SnapshotError, OSError, Unanswered, Refused) as error:
            keeper.fetching.failed(error)
            await asyncio.sleep(_pause_s(keeper.fetching.failures))  # The next offer would come within milliseconds.
        else:
            keeper.fetching.went_well()

    async def _catch_up(self, keeper: Keeper, want: SnapshotWanted) -> None:
        number, machine = keeper.partition.number, keeper.partition.machine
        offer = Offer.decode(want.detail)
        if parse_name(offer.name) != (want.term, want.index):
            raise PeerRefused(
                want.peer, f"it offers {offer.name} as the state at entry {want.index} of term {want.term}"
            )
        logger.info(
            "partition %d: %s offers the snapshot at entry %d (%d bytes), we are at %d",
            number, want.peer, want.index, offer.size, machine.applied[0],
        )  # fmt: skip
        began = self._home.clock.monotonic_s()
        with keeper.progress(f"fetching from {want.peer}"):
            file = await self.fetch(want.group, offer, want.peer, _telling(keeper, number))
        keeper.fetched_bytes += file.header.file_bytes
        with keeper.progress("installing"):
            staged = await self._stage(want.group, file, machine)
        path = keeper.directory / file.name
        installed = False
        try:
            installed = keeper.group.install(want.index, want.term, swap(machine, staged, file, path))
        finally:
            if not installed:
                staged.discard()
                remove_quietly(file.path)
        if not installed:
            logger.info("partition %d: the snapshot at entry %d is obsolete", number, want.index)
            return
        keeper.installs += 1
        keeper.accept(SnapshotFile(path, file.header))
        logger.info(
            "partition %d: caught up to entry %d with a snapshot of %d bytes in %.1f s",
            number, want.index, file.header.file_bytes, self._home.clock.monotonic_s() - began,
        )  # fmt: skip

    async def fetch(
        self, group: GroupId, offer: Offer, peer: str, progress: Callable[[int, int], None] | None = None
    ) -> SnapshotFile:
        """Fetch a snapshot into the incoming directory, and verify it. An interrupted fetch of the same snapshot
        resumes.
        """
        home = self._home
        directory, expected = home.incoming(group), home.expected(group)
        await asyncio.to_thread(_tidy, directory, offer.name)
        if offer.stored and home.shared:
            name = f"{home.identity()}/{group:010d}/{offer.name}"
            try:
                store = await in_thread(lambda _: home.store())
                return await fetch(store, name, directory, expected=expected, progress=progress, throttle=home.throttle)
            except NotFound:
                logger.info("group %d: the store no longer has %s, fetching it from %s", group, offer.name, peer)
            except SnapshotError as error:
                home.store_complaints.failed(error)

        async def ask(peer: str, question: bytes) -> bytes:
            try:
                answer = await home.rpc.ask(peer, "snapshot", question)
            except (Refused, Unanswered) as error:
                raise PeerRefused(peer, str(error)) from None
            return answer if isinstance(answer, bytes) else b""

        return await fetch_from_peer(
            ask,
            peer,
            group,
            offer.name,
            directory=directory,
            expected=expected,
            progress=progress,
            throttle=home.throttle,
        )

    async def _stage(self, group: GroupId, file: SnapshotFile, machine: PartitionMachine) -> Staged:
        try:
            return await stage(
                file, machine.path, expected=self._home.expected(group), token=self._home.environment.entropy.token(8)
            )
        except BaseException:
            remove_quietly(file.path)
            raise

    # -- hollow groups -------------------------------------------------------------------------------------------------

    async def fill(
        self, log: LogNode, group: GroupId, machine: PartitionMachine, peers: Callable[[], Iterable[str]]
    ) -> None:
        """Run until the group has a state that its log continues from. Its peers work meanwhile as if this node were
        down.
        """
        failures = 0
        logger.warning(
            "group %d: its state and snapshots are gone; fetching a state before this node takes part", group
        )
        while group in log.host.hollow:
            for source in ("the shared store", *peers()):
                try:
                    if await self._fill_from(log, group, machine, source):
                        return
                except (SnapshotError, OSError, Refused, Unanswered) as error:
                    level = logging.WARNING if failures in (0, 5) or failures % 60 == 0 else logging.DEBUG
                    logger.log(level, "group %d: no state from %s yet: %s", group, source, error)
            failures += 1
            await asyncio.sleep(_pause_s(failures))

    async def _fill_from(self, log: LogNode, group: GroupId, machine: PartitionMachine, source: str) -> bool:
        home = self._home
        if source == "the shared store":
            if not home.shared:
                return False
            header = await in_thread(lambda _: self._newest_stored(group), abandon_after_s=ABANDON_S)
            offer = Offer(header.name, header.file_bytes, stored=True)
        else:
            detail = await home.rpc.ask(source, "snapshot-newest", group)
            offer = Offer.decode(detail if isinstance(detail, bytes) else b"")
        file = await self.fetch(group, offer, source)
        why_not = log.host.why_not_fill(group, file.header.meta.index, file.header.meta.term, file.header.meta.epoch)
        if why_not is not None:
            remove_quietly(file.path)
            raise PeerRefused(source, why_not)
        staged = await self._stage(group, file, machine)
        path = home.directory(group) / file.name
        log.host.fill(group, swap(machine, staged, file, path))
        log.wake()
        logger.info("group %d: starts from the snapshot at entry %d of %s", group, file.header.meta.index, source)
        return True

    def _newest_stored(self, group: GroupId) -> Header:
        found = Catalog(self._home.store(), cluster=self._home.identity(), group=group, schema_max=SCHEMA).newest()
        if found is None:
            raise PeerRefused("the shared store", f"it has no snapshot of group {group}")
        return found.header

    async def _serve_newest(self, peer: str, group: Any) -> bytes:
        """Cut a snapshot now for a hollow group, so that the group's log reaches it."""
        keeper = self._home.keepers.get(GroupId(group)) if isinstance(group, int) else None
        if keeper is None:
            raise Refused("NotHosted", f"group {group!r:.20} is not here")
        try:
            file = await keeper.create()
        except (SnapshotError, OSError) as error:
            raise Refused("SnapshotError", str(error)) from None
        return Offer(file.name, file.header.file_bytes, stored=False).encode()


def swap(machine: PartitionMachine, staged: Staged, file: SnapshotFile, path: Path) -> Callable[[], None]:
    """Returns what the log calls when it accepts a snapshot.

    The file becomes our snapshot first and the state second, because after a power loss the state is restored from it.
    """

    def make_it_so() -> None:
        move_into_place(file.path, path)
        machine.swap(staged)

    return make_it_so


def _tidy(directory: Path, name: str) -> None:
    """Remove what earlier fetches left, except the partial file of this snapshot."""
    make_directory(directory)
    remove_parts(directory, but=name)
    for path in directory.glob("*.snapshot"):
        remove_quietly(path)


def _pause_s(failures: int) -> float:
    return backoff(RETRY_S, max(failures - 1, 0), RETRY_S_MAX)


def _telling(keeper: Keeper, number: PartitionNumber) -> Callable[[int, int], None]:
    """Shows progress in the admin API at once, and in the log every few seconds."""
    said_at = keeper.home.clock.monotonic_s()

    def tell(done: int, total: int) -> None:
        nonlocal said_at
        keeper.show(done, total)
        if keeper.home.clock.monotonic_s() >= said_at + PROGRESS_EVERY_S:
            said_at = keeper.home.clock.monotonic_s()
            logger.info("partition %d: fetched %d of %d bytes", number, done, total)

    return tell
