"""Large values in the shared store: when they are deleted, and when they go through the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.clock import Clock
from holdfast.cluster.values import janitor
from holdfast.cluster.values.janitor import Janitor
from holdfast.cluster.values.staging import Stager
from holdfast.sdk.ids import (
    InvocationId,
    PartitionNumber,
    parse_id,
)
from holdfast.statemachine import queries, refs, tables
from holdfast.statemachine.blobs import KEPT_MS
from holdfast.statemachine.commands import Complete, KeepBlob, Purge, PutBlob, TouchBlob
from holdfast.statemachine.effects import Code, Result
from tests.cluster.harness import echo, eventually
from tests.cluster.large_values import MovedClock, pass_time, rows, twice
from tests.cluster.stored_values import LARGE, OTHER, Place, check, gone, storing

pytestmark = pytest.mark.usefixtures("patient")


# -- deleting ---------------------------------------------------------------------------------------------------------


async def test_an_object_is_deleted_when_nothing_refers_to_the_value_for_a_while(tmp_path: Path, store: Place) -> None:
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/twice": twice})
        ids = [parse_id((await client.post("/echo/twice", LARGE))[2]["x-holdfast-id"]) for _ in range(2)]
        partition = it.node.partitions[0]
        await partition.propose(Purge(ids[0]))
        await pass_time(it)
        assert len(store.values()) == 1
        await partition.propose(Purge(ids[1]))
        await pass_time(it, KEPT_MS - 60_000)
        assert len(store.values()) == 1

        await pass_time(it, 120_000)

        await eventually(lambda: not store.values() and not gone(it), "no object, and nothing to remember of it")
        assert it.node.ground.objects.deleted == 1
        check(it)


async def test_the_next_leader_deletes_objects_that_could_not_be_deleted(
    tmp_path: Path, store: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "RETRY_S", 0.05)
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        id_ = parse_id((await client.post("/echo/say", LARGE))[2]["x-holdfast-id"])
        store.take_away()
        await it.node.partitions[0].propose(Purge(id_))
        await pass_time(it)
        await eventually(lambda: it.node.ground.objects.chores.failures, "a failure")
        assert gone(it) == 1
        ahead = it.clock
        await it.kill()
        store.bring_back()
        it.clock = ahead

        await it.start()

        await eventually(lambda: not store.values() and not gone(it), "no object")


async def test_a_late_delete_of_a_deposed_leader_is_harmless(tmp_path: Path, store: Place) -> None:
    """It deletes objects that were already unreferenced. The same value, uploaded again since, has another name."""
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        id_ = parse_id((await client.post("/echo/say", LARGE))[2]["x-holdfast-id"])
        old = store.value.name
        await it.node.partitions[0].propose(Purge(id_))
        await pass_time(it)
        await eventually(lambda: not store.values(), "no object")
        _, _, headers = await client.post("/echo/say", LARGE)

        await it.node.ground.objects.delete(PartitionNumber(0), [old])

        it.node.ground.objects.forget()
        path = f"/holdfast/invocation/{headers['x-holdfast-id']}/attach"
        assert (await client.get(path))[:2] == (200, LARGE) and store.value.name != old


async def test_only_uploaded_but_never_proposed_objects_are_swept(
    tmp_path: Path, store: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The uploading node died before it proposed the name."""
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        await client.post("/echo/say", LARGE)
        kept = store.value
        ref, stored = refs.make(OTHER)
        assert await it.node.ground.objects.put(PartitionNumber(0), ref.data, bytes(stored)) is not None
        sweeper = Janitor(it.node.partitions[0], it.node.ground.objects)
        foreign = kept.with_name("README")
        foreign.write_bytes(b"not ours")
        await sweeper._sweep()
        assert len(store.values()) == 3, "it may still be said"

        await pass_time(it, janitor.ORPHAN_MS + 60_000)
        await sweeper._sweep()

        assert store.values() == [kept, foreign] and it.node.ground.objects.swept == 1
        with it.node.partitions[0].state.read() as txn:
            assert queries.place(txn, refs.make(LARGE)[0].data) == kept.name


async def test_an_object_that_is_named_too_late_is_put_again(
    tmp_path: Path, store: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Clocks that differ by minutes: the value goes through the log, and a warning gives the reason."""
    async with storing(tmp_path, store.path) as client:
        it = client.it
        await it.register({"echo/say": echo})
        slow = Clock()
        it.node.ground.objects._clock = slow
        assert isinstance(it.node.environment.clock, MovedClock)
        it.node.environment.clock.ahead_ms += KEPT_MS

        assert (await client.post("/echo/say", LARGE))[:2] == (200, LARGE)

        assert rows(it.node.partitions[0], tables.CHUNK) == 4 and it.node.ground.objects.fallbacks == 1
        assert any("set the clocks" in record.getMessage() for record in caplog.records)
        assert (await client.post("/echo/say", OTHER))[:2] == (200, OTHER)
        assert len(store.values()) == 1, "not tried again at once"


# -- staging ----------------------------------------------------------------------------------------------------------


class Shelf:
    """The part of `Objects` that staging needs."""

    def __init__(self, *, takes: bool = True, is_usable: bool = True) -> None:
        self.takes, self.is_usable, self.times_apart = takes, is_usable, 0
        self.held: dict[str, bytes] = {}

    def usable(self, number: int) -> bool:
        return self.is_usable

    async def put(self, number: int, blob: bytes, data: bytes) -> str | None:
        if not self.takes:
            return None
        name = f"object {len(self.held)}"
        self.held[name] = data
        return name

    def apart(self, number: int) -> None:
        self.times_apart += 1


@pytest.mark.parametrize(
    ("shelf", "answer", "pieces", "held"),
    [
        (Shelf(), 0, 0, 1),
        (Shelf(), 200, 0, 1),
        (Shelf(), Code.OUTDATED, 4, 1),
        (Shelf(), 400, 4, 1),
        (Shelf(takes=False), 0, 4, 0),
        (Shelf(is_usable=False), 0, 4, 0),
        (None, 0, 4, 0),
    ],
)
async def test_a_value_goes_to_the_store_or_in_pieces(shelf: Shelf | None, answer: int, pieces: int, held: int) -> None:
    stager = Stager(objects=shelf)  # type: ignore[arg-type]
    said: list[Any] = []

    async def put(command: Any) -> Result:
        said.append(command)
        return Result({TouchBlob: 404, KeepBlob: answer, PutBlob: 0}[type(command)])

    light = await stager.detach(PartitionNumber(0), Complete(InvocationId(bytes(16)), 1, [0, LARGE], None), put)

    assert refs.in_command(light) == [refs.make(LARGE)[0]]
    assert sum(type(command) is PutBlob for command in said) == pieces
    assert len(shelf.held if shelf is not None else {}) == held
    if shelf is not None:
        assert all(data == LARGE for data in shelf.held.values()) and shelf.times_apart == (answer == Code.OUTDATED)
        names = [command.object for command in said if type(command) is KeepBlob]
        assert names == list(shelf.held)
