"""Rules of the cluster, switched off by name: the simulator must then find a violation, or it is blind there.

A mutant is the real code with one rule taken out, patched in from here: production code has no switches. `WHERE` says in
which kind of world each of them shows. By hand: `make sim-cluster PROFILE=stormy MUTANT=stale-attempts-heard`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from holdfast.cluster import node
from holdfast.cluster.backup import copies, restoring
from holdfast.cluster.backup import job as backup
from holdfast.cluster.backup.copies import Copies
from holdfast.cluster.backup.job import Backups
from holdfast.cluster.clock import Clock
from holdfast.cluster.groups import FIRST_PARTITION_GROUP
from holdfast.cluster.handlers.invoker import Invoker
from holdfast.cluster.leading.leadership import Leadership, Outbox
from holdfast.cluster.members.founding import Founding, write_founding
from holdfast.cluster.node import Node
from holdfast.cluster.partition import state
from holdfast.cluster.registry.metalog import SharedRead
from holdfast.cluster.routing.router import Router
from holdfast.cluster.routing.watches import SLICE, Watches
from holdfast.cluster.snapshotting import catchup
from holdfast.cluster.snapshotting import service as snapshots
from holdfast.cluster.values import janitor
from holdfast.cluster.values import shared_store as objects
from holdfast.cluster.values.janitor import Janitor
from holdfast.log.errors import ProposalError
from holdfast.log.host import Host
from holdfast.log.replica import Replica
from holdfast.sdk.ids import partition_of
from holdfast.snapshots import cut, restore, transfer
from holdfast.snapshots.backups import digest_of, part_name
from holdfast.snapshots.errors import SnapshotError
from holdfast.snapshots.files import sync_directory
from holdfast.snapshots.format import ANY, BLOCK_BYTES, SnapshotFile, read_header
from holdfast.snapshots.stores import Stat
from holdfast.snapshots.work import Work
from holdfast.statemachine import attempts, blobs, machine, queries
from holdfast.statemachine.commands import Announce, Deliver, Invoke, Ref, TrimOutbox, decode_command
from holdfast.statemachine.effects import OK, DeleteObjects
from holdfast.statemachine.meta import encode_state
from tests.sim.cluster import backups as simulated_backups

Patch = tuple[Any, str, Any]


class Instead:
    """Another thing, but for some of its attributes."""

    def __init__(self, other: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self._other = other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


def stale_attempts_heard() -> list[Patch]:
    """What an attempt says counts, whether it is the newest or not."""

    def current(state: Any, ident: bytes, epoch: int) -> Any:
        return state.load(ident)

    return [(attempts, "current", current)]


def messages_taken_again() -> list[Patch]:
    """The receiver does not count: it takes whatever it is sent."""

    def deliver(state: Any, command: Deliver) -> Any:
        state.set_taken(command.source, command.first + len(command.messages) - 1)
        state.todo.extend(decode_command(raw) for raw in command.messages)
        return OK

    return [(machine, "_HANDLERS", {**machine._HANDLERS, Deliver: deliver})]


def derived_before_announced() -> list[Patch]:
    """A leader derives what there is to do from a state that lacks what its predecessors committed."""

    def begin(self: Any) -> None:
        if not self.ended:
            self._on_announced(OK)
            self.partition.submit(Announce(self.term, self._node))

    return [(Leadership, "begin", begin)]


def resubmitted_as_another() -> list[Patch]:
    """What may have been invoked is invoked again under a new id."""

    async def submit_again(self: Any, number: int, command: Any, error: Any, deadline: float) -> Any:
        if type(command) is Invoke:
            command = command._replace(id=command.id[:4] + os.urandom(12))
        return await original(self, number, command, error, deadline)

    original = Router._submit_again
    return [(Router, "_submit_again", submit_again)]


def watched_once() -> list[Patch]:
    """Whoever waits is put under the watch of one leader, and never of the next."""

    async def put_under_watch(self: Any) -> None:
        by_partition: dict[int, list[bytes]] = defaultdict(list)
        for invocation in self._replies.unwatched:
            by_partition[partition_of(invocation, self._partitions)].append(invocation)
        for number, ids in by_partition.items():
            leader = self._leader(number)
            if leader is not None:
                self._watcher[number] = (leader, self._life(number, leader))
                await self._watch(number, leader, ids[:SLICE])

    return [(Watches, "_put_under_watch", put_under_watch)]


def early_messages_lost() -> list[Patch]:
    """What a peer says while its disk is being written down is dropped."""

    def deliver(self: Any, peer: Any, session: int, envelopes: list[Any], now: float) -> None:
        if self.sessions.get(peer) == session:
            original(self, peer, session, envelopes, now)

    original = Host.deliver
    return [(Host, "deliver", deliver)]


def timers_by_the_wall() -> list[Patch]:
    """The time of a node is whatever somebody set its wall clock to."""
    return [(Clock, "now_ms", lambda self: int(self._wall()))]


def trimmed_before_taken() -> list[Patch]:
    """The sender forgets a message when it has sent it."""

    async def deliver(self: Any) -> Any:
        with self._partition.state.read() as txn:
            first, messages = queries.outbox(txn, self._target, self._taken, 512)
        if messages:
            self._partition.submit(TrimOutbox(self._target, first + len(messages) - 1))
        return await original(self)

    original = Outbox._deliver
    return [(Outbox, "_deliver", deliver)]


def led_without_deployments() -> list[Patch]:
    """A node leads before it knows which deployments there are, and does not ask before it gives up on one.

    Each of the two rules covers for the other in a simulated cluster, so both are off.
    """

    async def catch_up(self: Any) -> None: ...

    async def ask_nobody(self: SharedRead) -> None: ...

    return [(Node, "_catch_up", catch_up), (SharedRead, "__call__", ask_nobody)]


def trimmed_before_durable() -> list[Patch]:
    """The log is trimmed behind a snapshot whose name the disk does not know yet."""
    return [(cut, "move_into_place", os.rename)]


def found_names_trusted() -> list[Patch]:
    """A snapshot that an earlier life left counts as durable, although that life may have ended before it was."""
    return [(snapshots, "sync_path", lambda top, path: None)]


def state_believed() -> list[Patch]:
    """A state that nobody closed is gone on with, also after a power loss."""

    def doubt(path: Any, *, owner: str, boot: str) -> str | None:
        why = original(path, owner=owner, boot=boot)
        return None if why == "the machine ended without closing it" else why

    original = state._doubt
    return [(state, "_doubt", doubt)]


def checksums_ignored() -> list[Patch]:
    """What was fetched is taken for what was cut."""

    def verified(path: Path, expected: Any = ANY, work: Any = None) -> SnapshotFile:
        return SnapshotFile(path, read_header(path, expected))

    def copied(file: Path, header: Any, path: Path, work: Any) -> None:
        path.write_bytes(file.read_bytes()[BLOCK_BYTES:])

    return [(transfer, "verify", verified), (snapshots, "verify", verified), (restore, "_copy_data", copied)]


def installed_without_snapshot() -> list[Patch]:
    """A fetched snapshot becomes the state, which a power loss takes, and is not kept as a snapshot."""

    def swap(machine: Any, staged: Any, file: Any, path: Any) -> Any:
        return lambda: machine.swap(staged)

    return [(catchup, "swap", swap)]


def serves_nothing_while_hollow() -> list[Patch]:
    """A node that has lost the state of one partition serves none until it has fetched it."""

    async def catch_up(self: Any) -> None:
        await original(self)
        for group in list(self.log.host.hollow):
            machine = self.machines[group - FIRST_PARTITION_GROUP]
            await self.catch_up.fill(self.log, group, machine, sorted(self.config.peers))

    original = Node._catch_up
    return [(Node, "_catch_up", catch_up)]


def messages_before_their_values() -> list[Patch]:
    """Large values are left to whoever delivers the message."""

    async def stage(self: Any, number: int, ref: Any, chunk: Any) -> None: ...

    return [(Router, "stage", stage)]


def large_values_overtaken() -> list[Patch]:
    """What an attempt says behind a large value does not wait until that is staged."""

    def stage(self: Any, attempt: Any, wanted: Any, *, last: bool) -> None:
        async def go() -> None:
            light = await self._detached(attempt, wanted)
            if light is not None:
                self._submit(attempt, light, last=last)

        self._loop.create_task(go())

    return [(Invoker, "_stage", stage)]


def values_go_while_referred_to() -> list[Patch]:
    """What was staged goes when its time comes, whoever refers to it."""

    def acquire(state: Any, payload: Any) -> None: ...

    def release(state: Any, payload: Any) -> None: ...

    return [(blobs, "acquire", acquire), (blobs, "release", release), (blobs, "KEPT_MS", 1000)]


def backed_up_one_by_one() -> list[Patch]:
    """Partitions are copied at moments of their own, and nobody looks whether the copies fit together."""

    async def hold(self: Any, token: str, by_node: Any) -> None: ...

    return [(Backups, "_hold", hold), (backup, "why_not_together", lambda marks: None)]


def deployments_backed_up_first() -> list[Patch]:
    """What a backup has of the meta group is from before its partitions."""

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
    """Who leads copies what it has, and does not ask whether that is all that was acknowledged."""

    async def at_once() -> int:
        return 0

    def led(self: Any, numbers: Any) -> Any:
        return [Instead(it, group=Instead(it.group, read_index=at_once)) for it in original(self, numbers)]

    original = Copies._led
    return [(Copies, "_led", led)]


def finished_too_early() -> list[Patch]:
    """The manifest is written when the parts are named, and not when they are in the store."""

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
    """The log of a restored partition begins with its first entry, and not behind the restored state."""

    def match_machine(self: Any) -> None:
        if self.log.last_index == 0:
            self.applied = self.machine.applied[0]
        else:
            original(self)

    original = Replica._match_machine
    return [(Replica, "_match_machine", match_machine)]


def half_a_restore_believed() -> list[Patch]:
    """A directory is one of the cluster before everything is in it."""

    def restored(config: Any, store: Any, manifest: Any, **options: Any) -> Any:
        places = restoring.places_of(manifest.partitions, config.founders, config.replication)
        mine = tuple(number for number, members in enumerate(places) if config.node in members)
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
    """What an interrupted restore left counts as durable, although it may have ended before it was."""
    return [(restoring, "sync_directory", lambda path: None), (restoring, "sync_path", lambda top, path: None)]


def directories_trusted() -> list[Patch]:
    """Directories that an earlier life made count as durable, although that life may have ended before they were."""
    return [(snapshots, "sync_path", lambda top, path: sync_directory(path) if path.is_dir() else None)]


def plan_forgotten_early() -> list[Patch]:
    """How the cluster is founded is removed when it was read, and not when the cluster is formed."""

    def read_plan(data: Path, founding: Any) -> Any:
        plan = original(data, founding)
        if plan is not None:
            plan.check()
            plan.done()
        return plan

    original = restoring.read_plan
    return [(node, "read_plan", read_plan)]


def names_used_again() -> list[Patch]:
    """An object of the store is named by what it holds, and by the minute. Whoever deletes one may hit a newer one."""

    def object_name(blob: bytes, created_ms: int, nonce: bytes) -> str:
        return original(blob, created_ms // 60_000 * 60_000, bytes(8))

    original = blobs.object_name
    return [(objects, "object_name", object_name), (blobs, "KEEP_MS", 600_000)]


def swept_while_under_way() -> list[Patch]:
    """An object that the state does not know is deleted, although whoever put it is about to say so."""
    return [(janitor, "ORPHAN_MS", -600_000)]


def names_taken_late() -> list[Patch]:
    """An object counts whenever somebody says that it is there."""
    return [(blobs, "KEEP_MS", 10**15), (janitor, "ORPHAN_MS", 300)]


def deleted_while_kept() -> list[Patch]:
    """An object is deleted with the last reference to its value, although the value can still be found and referred to."""

    def release(state: Any, payload: Any) -> None:
        original(state, payload)
        found = blobs.find(state, payload.data) if type(payload) is Ref else None
        if found is not None and not found.refs and found.object:
            blobs._delete_object(state, found.object)

    original = blobs.release
    return [(blobs, "release", release)]


def deletions_not_derived() -> list[Patch]:
    """A new leader deletes what becomes superfluous under it, and not what its predecessors left."""

    async def run(self: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            with suppress(SnapshotError, TimeoutError, ProposalError):
                while await self._delete():
                    pass

    standing = queries.standing_effects

    def others(txn: Any) -> list[Any]:
        return [effect for effect in standing(txn) if not isinstance(effect, DeleteObjects)]

    return [(Janitor, "_run", run), (queries, "standing_effects", others)]


def refused_without_need() -> list[Patch]:
    """Who loses a leader for a moment refuses its clients, although there is a majority."""
    return [(Router.submit, "__kwdefaults__", {"wait_s": 0.0})]


MUTANTS: Final[dict[str, Callable[[], list[Patch]]]] = {
    "stale-attempts-heard": stale_attempts_heard,
    "messages-taken-again": messages_taken_again,
    "derived-before-announced": derived_before_announced,
    "resubmitted-as-another": resubmitted_as_another,
    "watched-once": watched_once,
    "early-messages-lost": early_messages_lost,
    "timers-by-the-wall": timers_by_the_wall,
    "trimmed-before-taken": trimmed_before_taken,
    "led-without-deployments": led_without_deployments,
    "trimmed-before-durable": trimmed_before_durable,
    "found-names-trusted": found_names_trusted,
    "state-believed": state_believed,
    "checksums-ignored": checksums_ignored,
    "installed-without-snapshot": installed_without_snapshot,
    "serves-nothing-while-hollow": serves_nothing_while_hollow,
    "messages-before-their-values": messages_before_their_values,
    "large-values-overtaken": large_values_overtaken,
    "values-go-while-referred-to": values_go_while_referred_to,
    "names-used-again": names_used_again,
    "swept-while-under-way": swept_while_under_way,
    "names-taken-late": names_taken_late,
    "deleted-while-kept": deleted_while_kept,
    "deletions-not-derived": deletions_not_derived,
    "refused-without-need": refused_without_need,
    "backed-up-one-by-one": backed_up_one_by_one,
    "deployments-backed-up-first": deployments_backed_up_first,
    "backed-up-from-the-past": backed_up_from_the_past,
    "finished-too-early": finished_too_early,
    "restored-logs-begin-at-nothing": restored_logs_begin_at_nothing,
    "half-a-restore-believed": half_a_restore_believed,
    "restored-names-trusted": restored_names_trusted,
    "directories-trusted": directories_trusted,
    "plan-forgotten-early": plan_forgotten_early,
}

#: In which kind of world each of them shows.
WHERE: Final = {
    "stale-attempts-heard": "stormy",
    "messages-taken-again": "stormy",
    "derived-before-announced": "stormy",
    "resubmitted-as-another": "stormy",
    "watched-once": "watched",
    "early-messages-lost": "calm",
    "timers-by-the-wall": "stormy",
    "trimmed-before-taken": "stormy",
    "led-without-deployments": "stormy",
    "trimmed-before-durable": "snapshots",
    "found-names-trusted": "snapshots",
    "state-believed": "snapshots",
    "checksums-ignored": "store",
    "installed-without-snapshot": "snapshots",
    "serves-nothing-while-hollow": "store",
    "messages-before-their-values": "large",
    "large-values-overtaken": "large",
    "values-go-while-referred-to": "large",
    "names-used-again": "stored",
    "swept-while-under-way": "stored",
    "names-taken-late": "stored",
    "deleted-while-kept": "stored",
    "deletions-not-derived": "stored",
    "refused-without-need": "stormy",
    "backed-up-one-by-one": "restore",
    "deployments-backed-up-first": "restore",
    "backed-up-from-the-past": "restore",
    "finished-too-early": "restore",
    "restored-logs-begin-at-nothing": "restore",
    "half-a-restore-believed": "restore",
    "restored-names-trusted": "restore",
    "directories-trusted": "restore",
    "plan-forgotten-early": "restore",
}

#: The seed that found it when it was last looked for, where that is not one of the first. Looked at before all others.
SEEDS: Final = {
    "backed-up-from-the-past": 82,
    "backed-up-one-by-one": 10,
    "deleted-while-kept": 6,
    "deployments-backed-up-first": 83,
    "directories-trusted": 477,
    "early-messages-lost": 37,
    "finished-too-early": 9,
    "found-names-trusted": 4,
    "installed-without-snapshot": 20,
    "led-without-deployments": 12,
    "messages-taken-again": 10,
    "names-taken-late": 9,
    "names-used-again": 9,
    "refused-without-need": 19,
    "restored-logs-begin-at-nothing": 3,
    "restored-names-trusted": 3,
    "stale-attempts-heard": 31,
    "swept-while-under-way": 9,
    "timers-by-the-wall": 5,
}


@contextmanager
def switched_off(name: str) -> Iterator[None]:
    """The cluster without the rule of that name."""
    with ExitStack() as stack:
        for owner, attribute, replacement in MUTANTS[name]():
            stack.enter_context(patch.object(owner, attribute, replacement))
        yield
