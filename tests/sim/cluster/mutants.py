"""Rules of the cluster, switched off by name: the simulator must then find a violation, or it cannot see that rule.

A mutant is the real code without one rule, patched from here: production code has no switches. `WHERE` names the
profile in which each of them shows. By hand: `make sim-cluster PROFILE=stormy MUTANT=stale-attempts-heard`.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from holdfast.cluster import ground
from holdfast.cluster.backup import restoring
from holdfast.cluster.clock import Clock
from holdfast.cluster.groups import FIRST_PARTITION_GROUP
from holdfast.cluster.handlers.invoker import Invoker
from holdfast.cluster.leading.leadership import Leadership
from holdfast.cluster.leading.outbox import Outbox
from holdfast.cluster.members import controller
from holdfast.cluster.members.joining import Joining
from holdfast.cluster.members.operations import Operations
from holdfast.cluster.partition import state
from holdfast.cluster.peers.rpc import Refused, Unanswered
from holdfast.cluster.registry.metalog import SharedRead
from holdfast.cluster.routing.router import Router
from holdfast.cluster.routing.watches import SLICE, Watches
from holdfast.cluster.snapshotting import catchup, keeper
from holdfast.cluster.snapshotting import service as snapshots
from holdfast.cluster.values import janitor
from holdfast.cluster.values import shared_store as objects
from holdfast.cluster.values.janitor import Janitor
from holdfast.log.errors import ProposalError
from holdfast.log.host import Host
from holdfast.sdk.ids import InvocationId, PartitionNumber, partition_of
from holdfast.snapshots import cut, restore, transfer
from holdfast.snapshots.errors import SnapshotError
from holdfast.snapshots.format import ANY, BLOCK_BYTES, SnapshotFile, read_header
from holdfast.statemachine import attempts, blobs, machine, queries
from holdfast.statemachine.commands import Announce, Deliver, Invoke, Ref, TrimOutbox, decode_command
from holdfast.statemachine.effects import OK, DeleteObjects
from tests.sim.cluster.backup_mutants import (
    Patch,
    backed_up_from_the_past,
    backed_up_one_by_one,
    deployments_backed_up_first,
    directories_trusted,
    finished_too_early,
    half_a_restore_believed,
    restored_logs_begin_at_nothing,
    restored_names_trusted,
)
from tests.sim.cluster.loop import SimLoop


def stale_attempts_heard() -> list[Patch]:
    """Frames of any attempt count, not only those of the newest."""

    def current(state: Any, ident: InvocationId, epoch: int) -> Any:
        return state.load(ident)

    return [(attempts, "current", current)]


def messages_taken_again() -> list[Patch]:
    """The receiver does not count messages: it takes every one that it gets."""

    def deliver(state: Any, command: Deliver) -> Any:
        state.set_taken(command.source, command.first + len(command.messages) - 1)
        state.todo.extend(decode_command(raw) for raw in command.messages)
        return OK

    return [(machine, "_HANDLERS", {**machine._HANDLERS, Deliver: deliver})]


def derived_before_announced() -> list[Patch]:
    """A leader derives its work from a state that lacks entries committed by its predecessors."""

    def begin(self: Any) -> None:
        if not self.ended:
            self._on_announced(OK)
            self.partition.submit(Announce(self.term, self._node))

    return [(Leadership, "begin", begin)]


def resubmitted_as_another() -> list[Patch]:
    """After an unknown outcome, the invocation is submitted again with a new id."""

    async def submit_again(self: Any, number: PartitionNumber, command: Any, error: Any, deadline: float) -> Any:
        if type(command) is Invoke:
            command = command._replace(id=InvocationId(command.id[:4] + os.urandom(12)))
        return await original(self, number, command, error, deadline)

    original = Router._submit_again
    return [(Router, "_submit_again", submit_again)]


def watched_once() -> list[Patch]:
    """A waiting client is registered with one leader, and never with the next."""

    async def put_under_watch(self: Any) -> None:
        by_partition: dict[int, list[InvocationId]] = defaultdict(list)
        for invocation in self._replies.unwatched:
            by_partition[partition_of(invocation, self._partitions)].append(invocation)
        for number, ids in by_partition.items():
            leader = self._leader(number)
            if leader is not None:
                self._watcher[number] = (leader, self._life(number, leader))
                await self._watch(number, leader, ids[:SLICE])

    return [(Watches, "_put_under_watch", put_under_watch)]


def early_messages_lost() -> list[Patch]:
    """Messages of a peer are dropped while its disk is being recorded."""

    def deliver(self: Any, peer: Any, session: int, envelopes: list[Any], now: float) -> None:
        if self.sessions.get(peer) == session:
            original(self, peer, session, envelopes, now)

    original = Host.deliver
    return [(Host, "deliver", deliver)]


def timers_by_the_wall() -> list[Patch]:
    """The time of a node is its wall clock, which may be changed."""
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
    """A node leads before it knows the deployments, and does not ask before it gives up on one.

    Each of the two rules covers for the other in a simulated cluster, so both are off.
    """

    async def catch_up(self: Any) -> None: ...

    async def ask_nobody(self: SharedRead) -> None: ...

    return [(Joining, "_catch_up", catch_up), (SharedRead, "__call__", ask_nobody)]


def trimmed_before_durable() -> list[Patch]:
    """The log is trimmed up to a snapshot whose name is not durable yet."""
    return [(cut, "move_into_place", os.rename)]


def found_names_trusted() -> list[Patch]:
    """A snapshot of an earlier life counts as durable, although that life may have ended before it was."""
    return [(module, "sync_path", lambda top, path: None) for module in (keeper, snapshots)]


def state_believed() -> list[Patch]:
    """A state that was not closed is used, even after a power loss."""

    def doubt(path: Any, *, owner: str, boot: str) -> str | None:
        why = original(path, owner=owner, boot=boot)
        return None if why == "the machine went down without closing it" else why

    original = state._doubt
    return [(state, "_doubt", doubt)]


def checksums_ignored() -> list[Patch]:
    """A fetched snapshot is installed without verification."""

    def verified(path: Path, expected: Any = ANY, work: Any = None) -> SnapshotFile:
        return SnapshotFile(path, read_header(path, expected))

    def copied(file: Path, header: Any, path: Path, work: Any) -> None:
        path.write_bytes(file.read_bytes()[BLOCK_BYTES:])

    return [(transfer, "verify", verified), (keeper, "verify", verified), (restore, "_copy_data", copied)]


def installed_without_snapshot() -> list[Patch]:
    """A fetched snapshot becomes the state, which a power loss destroys, and is not kept as a snapshot."""

    def swap(machine: Any, staged: Any, file: Any, path: Any) -> Any:
        return lambda: machine.swap(staged)

    return [(catchup, "swap", swap)]


def serves_nothing_while_hollow() -> list[Patch]:
    """A node that lost the state of one partition serves none until it has fetched it."""

    async def catch_up(self: Any) -> None:
        await original(self)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop) and loop.process.node is not None
        node = loop.process.node
        for group in list(node.ground.log.host.hollow):
            machine = node.ground.replicas.machines[PartitionNumber(group - FIRST_PARTITION_GROUP)]
            await node.ground.catch_up.fill(node.ground.log, group, machine, lambda: sorted(node.config.peers))

    original = Joining._catch_up
    return [(Joining, "_catch_up", catch_up)]


def messages_before_their_values() -> list[Patch]:
    """Large values are left to the deliverer of the message."""

    async def stage(self: Any, number: PartitionNumber, ref: Any, chunk: Any) -> None: ...

    return [(Router, "stage", stage)]


def large_values_overtaken() -> list[Patch]:
    """Frames after a large value do not wait until it is staged."""

    def stage(self: Any, attempt: Any, wanted: Any, *, last: bool) -> None:
        async def go() -> None:
            light = await self._detached(attempt, wanted)
            if light is not None:
                self._submit(attempt, light, last=last)

        self._loop.create_task(go())

    return [(Invoker, "_stage", stage)]


def values_go_while_referred_to() -> list[Patch]:
    """A staged value is removed when its time comes, even if it is referenced."""

    def acquire(state: Any, payload: Any) -> None: ...

    def release(state: Any, payload: Any) -> None: ...

    return [(blobs, "acquire", acquire), (blobs, "release", release), (blobs, "KEPT_MS", 1000)]


def plan_forgotten_early() -> list[Patch]:
    """The plan for founding the cluster is removed when it is read, not when the cluster is formed."""

    def read_plan(data: Path, founding: Any) -> Any:
        plan = original(data, founding)
        if plan is not None:
            plan.check()
            plan.done()
        return plan

    original = restoring.read_plan
    return [(ground, "read_plan", read_plan)]


def names_used_again() -> list[Patch]:
    """An object of the store is named after its content and the minute. A deletion may hit a newer object."""

    def object_name(blob: bytes, created_ms: int, nonce: bytes) -> str:
        return original(blob, created_ms // 60_000 * 60_000, bytes(8))

    original = blobs.object_name
    return [(objects, "object_name", object_name), (blobs, "KEEP_MS", 600_000)]


def swept_while_under_way() -> list[Patch]:
    """An object unknown to the state is deleted, although its writer is about to propose it."""
    return [(janitor, "ORPHAN_MS", -600_000)]


def names_taken_late() -> list[Patch]:
    """An object counts whenever it is proposed."""
    return [(blobs, "KEEP_MS", 10**15), (janitor, "ORPHAN_MS", 300)]


def deleted_while_kept() -> list[Patch]:
    """An object is deleted with the last reference to its value, although the value can still be found and referenced."""

    def release(state: Any, payload: Any) -> None:
        original(state, payload)
        found = blobs.find(state, payload.data) if type(payload) is Ref else None
        if found is not None and not found.refs and found.object:
            blobs._delete_object(state, found.object)

    original = blobs.release
    return [(blobs, "release", release)]


def deletions_not_derived() -> list[Patch]:
    """A new leader deletes objects that become superfluous under it, but not those of its predecessors."""

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
    """A node that loses its leader for a moment refuses its clients, although there is a majority."""
    return [(Router.submit, "__kwdefaults__", {"wait_s": 0.0})]


def removed_looks_free() -> list[Patch]:
    """A removed node is shown without replicas while it votes in the meta group, so an operator stops it too early."""
    return [(Operations, "_votes_still", lambda self, node: False)]


def held_by_the_table_alone() -> list[Patch]:
    """A removed node is shown without replicas until the table says that a partition has made it a member."""

    def holds(self: Any, name: str) -> int:
        return sum(name in replicas.members for replicas in self._membership.table.values())

    return [(Operations, "_holds", holds)]


def newcomers_waited_for() -> list[Patch]:
    """While a new node catches up with the meta group, all other changes of members wait, however long it takes."""
    return [(controller, "META_S", 600.0)]


def one_read_holds_up_all_watches() -> list[Patch]:
    """A read that fails in one partition ends the round of all watches of its node."""

    async def watch(self: Any, number: PartitionNumber, leader: str, ids: list[InvocationId]) -> None:
        if leader == self._node:
            completed = await self._completed_here(number, ids)
        else:
            try:
                completed = await self._rpc.ask(leader, "watch", (number, ids), about=number)
            except (Unanswered, Refused):
                return
        for invocation in ids:
            self._replies.unwatched.pop(invocation, None)
        for invocation, outcome in completed:
            self._replies.settle(invocation, outcome)

    # Reads give up sooner than in the product: alone, that does no harm.
    return [(Watches, "_watch", watch), (Router.fresh, "__kwdefaults__", {"wait_s": 0.3})]


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
    "removed-looks-free": removed_looks_free,
    "held-by-the-table-alone": held_by_the_table_alone,
    "newcomers-waited-for": newcomers_waited_for,
    "one-read-holds-up-all-watches": one_read_holds_up_all_watches,
}

#: The profile in which each of them shows.
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
    "removed-looks-free": "members",
    "held-by-the-table-alone": "members",
    "newcomers-waited-for": "members",
    "one-read-holds-up-all-watches": "watched",
}

#: The seed that last found it, unless it is among the first. It is tried before all others.
SEEDS: Final = {
    "backed-up-from-the-past": 82,
    "backed-up-one-by-one": 10,
    "deleted-while-kept": 6,
    "deletions-not-derived": 1,
    "deployments-backed-up-first": 318,
    "derived-before-announced": 2,
    "directories-trusted": 477,
    "early-messages-lost": 37,
    "finished-too-early": 9,
    "found-names-trusted": 4,
    "held-by-the-table-alone": 531569019721,
    "installed-without-snapshot": 20,
    "led-without-deployments": 12,
    "messages-taken-again": 10,
    "names-taken-late": 9,
    "names-used-again": 9,
    "newcomers-waited-for": 119,
    "plan-forgotten-early": 1,
    "refused-without-need": 19,
    "removed-looks-free": 57,
    "restored-logs-begin-at-nothing": 3,
    "restored-names-trusted": 3,
    "serves-nothing-while-hollow": 31,
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
