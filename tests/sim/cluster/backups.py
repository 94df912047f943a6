"""Backups of a simulated cluster, its loss, and the cluster that is restored from one of them.

An operator requests backups during work and faults; the real code makes them. Then all machines are lost at once, and
only the vault remains. Each backup in it is checked against the logs of the lost cluster: it must hold one state of
each partition, none older than the request for the backup, and no message between them may be lost or invented. On new
machines, with other names and possibly another number of them, the real `restore` runs as a program of its own. It may
be killed at any step and is then run again. After that, the oracle expects exactly the consequences of the restored
states.

Clients cannot know what the backup holds, so they repeat everything with the same idempotency keys. In the end every
program must have run exactly once, as in the model, wherever the backup cut it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from holdfast.cluster.backup.job import Backup
from holdfast.cluster.backup.restoring import (
    identify,
    places_of,
    read_plan,
    restore,
)
from holdfast.cluster.config import BadConfig, Config, founders_of
from holdfast.cluster.errors import Circumstance, Conflict
from holdfast.cluster.groups import FIRST_PARTITION_GROUP
from holdfast.cluster.members.founding import open_founding
from holdfast.cluster.node import Node
from holdfast.log.errors import WrongDirectory
from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import Op
from holdfast.snapshots.backups import MANIFEST, Manifest, decode_manifest, find_backup, read_meta, verify_backup
from holdfast.snapshots.errors import NotFound, SnapshotError
from holdfast.snapshots.work import in_thread
from holdfast.statemachine.meta import decode_state
from holdfast.statemachine.tables import SCHEMA
from tests.sim.cluster.clients import Clients
from tests.sim.cluster.files import damaged
from tests.sim.cluster.handlers import HANDLERS
from tests.sim.cluster.node import config_of
from tests.sim.cluster.oracle import Oracle
from tests.sim.cluster.world import Process, World

#: Clients repeat all their requests within this time after the loss.
AGAIN_S: Final = 1.5
LOOK_S: Final = 0.1


@dataclass(frozen=True)
class Asked:
    """Data acknowledged before a request for a backup, which the backup must contain."""

    indexes: tuple[int, ...]  # of the partitions
    uris: frozenset[str]  # of deployments


class Backups:
    """Requests backups, and checks them when the cluster is lost."""

    def __init__(self, world: World, clients: Clients) -> None:
        self.world = world
        self.clients = clients
        self.asked: dict[str, Asked] = {}
        self.seen: dict[str, Backup] = {}  # The last report of a node.
        self._versions = 0

    def begin(self) -> None:
        world = self.world
        world.after(world.rng.uniform(0.0, 0.5) * world.profile.faulty_s, self._again)

    def _again(self) -> None:
        if self.world.era == 0:
            self._ask()
            self.world.after(self.world.rng.uniform(0.3, 1.5), self._again)

    def _ask(self) -> None:
        world, serving = self.world, self.world.serving()
        if not serving:
            return
        process = world.rng.choice(serving)
        process.run(partial(self._ask_at, process))
        while world.chance("deployments while it is backed up", 0.6):
            self._versions += 1
            self.clients.register(f"{HANDLERS}{9080 + self._versions}", delay=world.rng.uniform(0.0, 0.2))

    def _ask_at(self, process: Process) -> None:
        world, node = self.world, process.node
        if node is None or not process.serving:
            return
        indexes = tuple(reference.index for reference in world.oracle.references)
        try:
            id_ = node.serving.backups.begin(world.vault.url)["id"]
        except Conflict:
            world.counts["backups refused: one is being made"] += 1
            return
        self.asked[id_] = Asked(indexes, frozenset(self.clients.registered))
        world.counts["backups begun"] += 1
        self._look(process, node, id_)
        if world.chance("backups cancelled", 0.05):
            world.after(world.rng.uniform(0.0, 0.5), partial(self._cancel, id_))

    def _look(self, process: Process, node: Node, id_: str) -> None:
        if process.node is not node or self.world.era:
            self.world.counts["backups whose maker died"] += self.seen[id_]["status"] == "running"
            return
        job = self.seen[id_] = next(job for job in node.serving.backups.recent() if job["id"] == id_)
        if job["status"] == "running":
            self.world.after(LOOK_S, partial(self._look, process, node, id_))
        else:
            self.world.counts[f"backups {job['status']}"] += 1
            self.world.counts["backups in several rounds"] += job["rounds"] > 1

    def _cancel(self, id_: str) -> None:
        """At any node, which forwards it to the node that makes the backup."""

        async def cancel(node: Node) -> None:
            try:
                await node.serving.backups.cancel(id_)
            except Circumstance:
                return

        if serving := self.world.serving():
            process = self.world.rng.choice(serving)
            node = process.node
            assert node is not None
            process.run(lambda: asyncio.get_running_loop().create_task(cancel(node)))

    # -- what there is in the vault --------------------------------------------------------------------------------------

    def finished(self) -> list[Manifest]:
        objects = self.world.vault.objects
        names = [name for name in sorted(objects) if name.endswith(f"/{MANIFEST}")]
        return [decode_manifest(objects[name][0], name) for name in names]

    def why(self) -> str:
        return str(list(self.seen.values())[-3:])

    def judge(self) -> tuple[Manifest, Oracle]:
        """One of the backups, and the expected result of restoring it."""
        world = self.world
        world.is_faulty = False  # Faults of the store concern its users, not this check.
        world.vault.down_until = 0.0
        judged = [(manifest, self._judge(manifest)) for manifest in self.finished()]
        if world.rng.random() < 0.3:
            self._verify(judged[-1][0])
        world.is_faulty = True
        ids = {manifest.id for manifest, _ in judged}
        for id_, job in self.seen.items():
            if job["status"] == "succeeded" and id_ not in ids:
                world.violate(f"{id_} succeeded, and is not there")
            if id_ not in ids:
                self._is_none(id_)
        world.counts["backups judged"] += len(judged)
        return world.rng.choice(judged)

    def _judge(self, manifest: Manifest) -> Oracle:
        world, asked = self.world, self.asked[manifest.id]
        for part in manifest.parts:
            if part.index < asked.indexes[part.partition]:
                world.violate(
                    f"{manifest.id} has partition {part.partition} up to entry {part.index}, but entry "
                    f"{asked.indexes[part.partition]} was applied before it was asked for"
                )
        for stored in (*manifest.parts, manifest.meta):
            content, _ = world.vault.objects.get(f"{manifest.id}/{stored.object}", (b"", 0))
            if hashlib.sha256(content).hexdigest() != stored.sha256:
                world.violate(f"{manifest.id} is finished, and {stored.object} is not what its manifest says")
        deployments = decode_state(read_meta(world.vault, manifest)).deployments
        uris = {each.uri for each in deployments.values()}
        if not asked.uris <= uris:
            world.violate(f"{manifest.id} lacks the deployments {asked.uris - uris}")
        oracle = world.oracle.rewind([part.index for part in manifest.parts])
        for record in (record for reference in oracle.references for record in reference.active()):
            if record.deployment is not None and record.deployment not in deployments:
                world.violate(f"{manifest.id} lacks the deployment of {record.id.hex()}")
        why = oracle.why_not_together()
        if why is not None:
            world.violate(f"{manifest.id} is finished, and does not fit together: {why}")
        return oracle

    def _verify(self, manifest: Manifest) -> None:
        """`holdfast backup verify` must find it intact too."""
        world, scratch = self.world, self.world.disks.root / "verifying"
        try:
            verify_backup(world.vault, manifest, scratch, first_group=FIRST_PARTITION_GROUP, schema_max=SCHEMA)
        except SnapshotError as error:
            world.violate(f"{manifest.id} is finished, and not sound: {error}")
        world.counts["backups verified"] += 1

    def _is_none(self, id_: str) -> None:
        self.world.counts["backups never finished"] += 1
        while True:
            try:
                find_backup(self.world.vault, id_)
            except NotFound:
                return
            except SnapshotError as error:
                assert error.retryable, error
            else:
                self.world.violate(f"{id_} was never finished, and is taken for a backup")
                return


class Restoration:
    """All machines are lost and replaced. On each new one the same backup is restored, and the node started."""

    def __init__(self, world: World, clients: Clients, judged: tuple[Manifest, Oracle]) -> None:
        self.world = world
        self.manifest, oracle = judged
        names = [f"m{number}" for number in range(1, world.rng.choice([1, 2, 3, 3, 4]) + 1)]
        world.replace_machines(names)
        clients.give_up()
        world.oracle = oracle
        world.handlers.rewind(self._has_step, self._has_intent, self._awaits)
        machines = [world.processes[name] for name in names]
        self.identity = identify(config_of(machines[0]), self.manifest)
        self.damaged: tuple[str, tuple[bytes, int]] | None = None  # An object of the backup before the damage.
        if world.chance("backups damaged", 0.2):
            self._damage()
        for process in machines:
            process.tool = partial(self._run, process)
            world.after(world.rng.uniform(0.02, 0.5), process.boot_if_down)
        clients.begin_again(AGAIN_S)

    def is_over(self) -> bool:
        return all(process.serving for process in self.world.members())

    # -- what the restored states know of the world outside ---------------------------------------------------------------

    def _has_step(self, ident: InvocationId, key: str) -> bool:
        return key in self.world.oracle.reference(ident).steps(ident)

    def _has_intent(self, ident: InvocationId, key: str) -> bool:
        """Of a run that happens at most once. If somebody decided that it had not happened, the lost cluster may have run
        it since, and the restored one runs it once more: the decision is in the backup, and the new intent is not."""
        step = self.world.oracle.reference(ident).steps(ident).get(key)
        return step is not None and not (step.outcome is None and len(step.argument) > 1)

    def _awaits(self, ident: InvocationId, index: int) -> bool:
        step = self.world.oracle.reference(ident).step(ident, index)
        return step is not None and step.op == Op.AWAKEABLE

    # -- the program -----------------------------------------------------------------------------------------------------

    async def _run(self, process: Process) -> None:
        """`holdfast restore` on one machine, and then `holdfast serve`."""
        world, config = self.world, config_of(process)
        again = partial(world.after, world.rng.uniform(0.02, 0.3), process.boot_if_down)
        try:
            if world.chance("starts before a restore", 0.3):
                await in_thread(lambda _: self._start_early(config))
            await in_thread(lambda _: self._restore(config))
        except SnapshotError as error:
            world.counts[f"restores failed: {type(error).__name__}"] += 1
            process.kill(power=False)
        except Exception as error:
            if not (process.full and isinstance(error, OSError)):
                world.violate(f"{process.name} cannot be restored: {error!r}")
            process.kill(power=False)
        else:
            world.counts["restores"] += 1
            process.tool = None
            process.kill(power=world.rng.random() < 0.3)
        again()

    def _restore(self, config: Config) -> None:
        vault = self.world.vault
        try:
            manifest = find_backup(vault, self.manifest.id, schema_max=SCHEMA)
            made = restore(config, vault, manifest)
        except SnapshotError as error:
            if not error.retryable and self.damaged is None:
                self.world.violate(f"{config.node} cannot be restored: {error}")
            elif not error.retryable:
                self._repair()
            raise
        if made.founding.restored != self.identity:
            self.world.violate(f"{config.node} is restored as {made.founding.restored}, and not as {self.identity}")
        if self.damaged is not None and self.damaged[0] in self._needed(config):
            self.world.violate(f"{config.node} was restored although {self.damaged[0]} is damaged")

    def _start_early(self, config: Config) -> None:
        """The node is started although the restore is not finished. It must detect that itself."""
        try:
            founding = open_founding(replace(config, restored=self.identity))
        except (WrongDirectory, BadConfig):
            self.world.counts["starts before a restore was finished, refused"] += 1
            return
        try:
            plan = read_plan(config.data, founding)
            if plan is None:
                self.world.violate(f"{config.node} believes to be restored, and has no plan")
            else:
                plan.check()
        except WrongDirectory as error:
            self.world.violate(f"{config.node} believes to be restored: {error}")

    # -- damage ----------------------------------------------------------------------------------------------------------

    def _names(self, numbers: Callable[[int], bool]) -> list[str]:
        manifest = self.manifest
        parts = [part.object for part in manifest.parts if numbers(part.partition)]
        return [f"{manifest.id}/{name}" for name in (*parts, manifest.meta.object, MANIFEST)]

    def _needed(self, config: Config) -> list[str]:
        """Needed by one of the founders."""
        places = places_of(self.manifest.partitions, founders_of(config), config.replication)
        return self._names(lambda number: config.node in places[number])

    def _damage(self) -> None:
        world, objects = self.world, self.world.vault.objects
        name = world.rng.choice(self._names(lambda number: True))
        self.damaged = name, objects[name]
        content, at = objects.pop(name)
        if world.rng.random() < 0.8:
            found = content
            while found == content:
                found = damaged(world.rng, content, world.disks.root / "damaging")
            objects[name] = (found, at)

    def _repair(self) -> None:
        """Replace it by another copy."""
        assert self.damaged is not None
        name, content = self.damaged
        self.world.vault.objects[name] = content
        self.damaged = None
