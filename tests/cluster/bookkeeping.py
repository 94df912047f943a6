"""A cluster of nodes in this process whose partitions constantly send messages to each other, and an audit of the
result.

An order books itself on three ledgers, by calls, and each ledger has the booking noted, by a one-way message. The
ledgers are in different partitions. A lost message leaves an order without an end or a booking without its note. A
message taken twice, or by a partition whose sender forgot it, leaves an extra booking. The audit reads only the states.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from holdfast.cluster.backup.job import Backup
from holdfast.cluster.config import Config, HostPort
from holdfast.cluster.node import Node
from holdfast.cluster.partition.door import Partition
from holdfast.sdk import Context, ObjectContext, Server, Service, VirtualObject
from holdfast.sdk.ids import InvocationId, PartitionNumber, format_id, partition_of
from holdfast.statemachine import queries, survey
from holdfast.statemachine.effects import STATUS_NAMES, Status
from holdfast.statemachine.queries import Filter
from tests.cluster.harness import PATIENCE_S, eventually
from tests.cluster.test_three_nodes import Seat
from tests.ports import free_ports

BOOKINGS = 3
LEDGERS = 8

orders = Service("orders")
ledgers = VirtualObject("ledgers")
notes = VirtualObject("notes")


@orders.handler
async def place(ctx: Context) -> int:
    bookings = [f"{ctx.invocation_id} {number}" for number in range(BOOKINGS)]
    await asyncio.gather(*(ctx.call(book, booking, key=key_of(booking)) for booking in bookings))
    return len(bookings)


@ledgers.handler
async def book(ctx: ObjectContext, booking: str) -> None:
    ctx.set("entries", [*(await ctx.get("entries", list[str]) or []), booking])
    ctx.send(note, booking, key=key_of(booking[::-1]))


@notes.handler
async def note(ctx: ObjectContext, booking: str) -> None:
    ctx.set("entries", [*(await ctx.get("entries", list[str]) or []), booking])


def key_of(booking: str) -> str:
    return f"key {sum(booking.encode()) % LEDGERS}"


class Books:
    """Some nodes, and an endpoint for the handlers, which outlives the nodes: a restored cluster finds it again."""

    def __init__(self, path: Path, names: tuple[str, ...], **settings: Any) -> None:
        self.path = path
        self.places = {
            name: HostPort("127.0.0.1", port) for name, port in zip(names, free_ports(len(names)), strict=True)
        }
        self.seats = {name: Seat(path, name, self.places, 4, **settings) for name in names}
        self.placed = 0
        self._over = False
        self._clients: list[asyncio.Task[None]] = []

    def config(self, name: str, **settings: Any) -> Config:
        """The settings of a node."""
        seat = self.seats[name]
        peers = {other: place for other, place in self.places.items() if other != name}
        return Config(node=name, data=seat.path, peer=self.places[name], peers=peers, **{**seat._settings, **settings})

    async def start(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(seat.start() for seat in self.seats.values()))
        await eventually(lambda: all(node.unhealthy() is None for node in self.nodes), "leaders")

    async def stop(self) -> None:
        await self.rest()
        await asyncio.gather(*(seat.node.stop() for seat in self.seats.values() if seat.up))
        for seat in self.seats.values():
            seat.up = False
            assert not seat.failures, (seat.name, seat.failures)

    @property
    def nodes(self) -> list[Node]:
        return [seat.node for seat in self.seats.values() if seat.up]

    async def leader(self, number: int) -> Seat:
        def leading() -> Seat | None:
            return next(
                (
                    seat
                    for seat in self.seats.values()
                    if seat.up and seat.node.serving.router.leads(PartitionNumber(number))
                ),
                None,
            )

        found: Seat = await eventually(leading, f"a leader of partition {number}")
        return found

    def freshest(self, number: int) -> Partition:
        """The replica that applied the most. It holds the leader's entries, and exists even without a leader."""
        replicas = [
            node.ground.replicas.hosted[PartitionNumber(number)]
            for node in self.nodes
            if number in node.ground.replicas.hosted
        ]
        return max(replicas, key=lambda replica: replica.machine.applied)

    # -- clients

    def work(self, clients: int = 6) -> None:
        """Place orders without a pause, until `rest`."""
        self._over = False
        self._clients = [asyncio.ensure_future(self._client(number)) for number in range(clients)]

    async def rest(self) -> None:
        self._over = True
        clients, self._clients = self._clients, []
        await asyncio.gather(*clients)

    async def _client(self, number: int) -> None:
        while not self._over:
            seats = [seat for seat in self.seats.values() if seat.up]
            outcome = await seats[(number + self.placed) % len(seats)].call("orders/place")
            assert outcome[0] == 0, outcome
            self.placed += 1

    async def more(self, count: int) -> None:
        goal = self.placed + count
        await eventually(
            lambda: self.placed >= goal or any(client.done() for client in self._clients), f"{count} more orders"
        )

    # -- the audit

    def states(self) -> Iterator[Any]:
        """A transaction on the state of every partition."""
        for number in range(4):
            with self.freshest(number).state.read() as txn:
                yield txn

    def active(self) -> list[str]:
        everything = Filter(statuses=tuple(status for status in STATUS_NAMES if status != Status.COMPLETED))
        return [
            f"{record.service} {format_id(record.id)}"
            for txn in self.states()
            for record in queries.list_invocations(txn, everything, b"", 10_000)[0]
        ]

    def completed(self) -> list[InvocationId]:
        """The completed orders."""
        done = Filter(statuses=(Status.COMPLETED,), service="orders")
        return [record.id for txn in self.states() for record in queries.list_invocations(txn, done, b"", 10_000)[0]]

    def outcome(self, order: InvocationId) -> Any:
        with self.freshest(partition_of(order, 4)).state.read() as txn:
            return queries.outcome(txn, order)

    def undelivered(self) -> int:
        return sum(len(queries.outbox_targets(txn)) for txn in self.states())

    async def settle(self) -> None:
        """Wait until nothing changes: everything has ended, or waits for something that does not come."""
        before: list[Any] = []
        quiet = 0

        def settled() -> bool:
            nonlocal before, quiet
            if any(node.unhealthy() is not None for node in self.nodes):
                return False
            now = [
                [node.ground.replicas.hosted[number].machine.applied for number in node.ground.replicas.hosted]
                for node in self.nodes
            ]
            quiet = quiet + 1 if now == before else 0
            before = now
            return quiet > 200 or (not self.active() and not self.undelivered())

        await eventually(settled, "an end of everything")

    def audit(self) -> list[str]:
        """All inconsistencies, as sentences. Nothing may change during the audit."""
        placed = [
            format_id(record.id)
            for txn in self.states()
            for record in queries.list_invocations(txn, Filter(service="orders"), b"", 10_000)[0]
        ]
        expected = {f"{order} {number}" for order in placed for number in range(BOOKINGS)}
        found = [f"it has no end: {one}" for one in self.active()]
        for service in ("ledgers", "notes"):
            entries = Counter(self._entries(service))
            found += [f"{service}: lost {booking}" for booking in sorted(expected - set(entries))]
            found += [f"{service}: of nobody {booking}" for booking in sorted(set(entries) - expected)]
            found += [f"{service}: {count} times {booking}" for booking, count in sorted(entries.items()) if count > 1]
        return found

    def _entries(self, service: str) -> Iterator[str]:
        for txn in self.states():
            after: bytes | None = b""
            while after is not None:
                rows, after = survey.keys(txn, service, "", after, 1000)
                for _, record in rows:
                    state, complete = queries.eager_state(txn, record.id, 1 << 30)
                    assert complete
                    entries = state.get("entries", b"[]")
                    assert isinstance(entries, bytes)
                    yield from json.loads(entries)

    # -- backups

    async def backup(self, place: Path | str, at: str | None = None) -> Backup:
        """Make a backup at a node, and wait for it."""
        node = self.nodes[0] if at is None else self.seats[at].node
        job = node.serving.backups.begin(str(place))
        return await ended(node, job["id"])


def files_in(path: Path) -> list[Path]:
    """The files below it, which others may be deleting."""
    return sorted(Path(at) / name for at, _, names in os.walk(path) for name in names)


async def ended(node: Node, id_: str) -> Backup:
    async with asyncio.timeout(PATIENCE_S):
        while (job := await node.serving.backups.show(id_))["status"] == "running":
            await asyncio.sleep(0.01)
    return job


@asynccontextmanager
async def handlers() -> AsyncIterator[Server]:
    server = Server([orders, ledgers, notes], suspend_after=0.05)
    await server.start(port=0)
    try:
        yield server
    finally:
        await server.stop(0.5)


@asynccontextmanager
async def books(path: Path, names: tuple[str, ...], server: Server | None, **settings: Any) -> AsyncIterator[Books]:
    """With a `server`, a new cluster that uses it; without one, a cluster that already does."""
    made = Books(path, names, **settings)
    await made.start()
    if server is not None:
        await made.nodes[0].ground.registry.register(server.uri)
        await eventually(lambda: all(node.ground.registry.state.deployments for node in made.nodes), "the deployment")
    try:
        yield made
    finally:
        await made.stop()
