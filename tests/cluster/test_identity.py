"""The identity of a cluster: one key that all nodes know, its rotation, and that the private part is shown nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cluster.errors import Conflict
from holdfast.sdk.signatures import key_id, parse_key
from tests.cluster.harness import eventually, world
from tests.cluster.test_three_nodes import Three, three
from tests.cluster.test_tokens import HANDLERS, one


def keys_of(cluster: Three) -> set[tuple[str, ...]]:
    return {tuple(key.id for key in seat.node.ground.meta.state.identity.keys) for seat in cluster.up()}


async def agreed(cluster: Three, count: int) -> tuple[str, ...]:
    await eventually(
        lambda: len(found := keys_of(cluster)) == 1 and all(len(ids) == count for ids in found), "the keys"
    )
    return keys_of(cluster).pop()


async def test_a_cluster_makes_one_key_that_every_node_knows_and_rotates_it(tmp_path: Path) -> None:
    async with three(tmp_path, HANDLERS) as cluster:
        (first,) = await agreed(cluster, 1)

        await cluster.seats["n2"].node.serving.identity.begin_rotation()
        both = await agreed(cluster, 2)
        with pytest.raises(Conflict, match="a rotation is under way"):
            await cluster.seats["n1"].node.serving.identity.begin_rotation()
        await cluster.seats["n3"].node.serving.identity.finish_rotation()
        with pytest.raises(Conflict, match="no rotation is under way"):
            await cluster.seats["n3"].node.serving.identity.finish_rotation()

        assert both[0] == first
        assert await agreed(cluster, 1) == both[1:]


async def test_the_key_survives_a_restart(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        keys = await eventually(lambda: it.node.ground.meta.state.identity.keys)

        await it.restart()

        assert it.node.ground.meta.state.identity.keys == keys
        assert keys[0].id == key_id(keys[0].public)


async def test_two_clusters_have_two_keys(tmp_path: Path) -> None:
    async with world(tmp_path / "a") as one_cluster, world(tmp_path / "b") as other:
        mine = await eventually(lambda: one_cluster.node.ground.meta.state.identity.keys)
        theirs = await eventually(lambda: other.node.ground.meta.state.identity.keys)

        assert mine[0].public != theirs[0].public and mine[0].private != theirs[0].private


async def test_the_api_shows_public_keys_to_readers_and_lets_administrators_rotate(tmp_path: Path) -> None:
    async with one(tmp_path) as (it, doors):
        reader = (await doors.create("read"))["token"]
        operator = (await doors.create("operate"))["token"]
        await eventually(lambda: it.node.ground.meta.state.identity.keys)

        status, shown = await doors.ask("GET", "/identity", reader)
        refused, _ = await doors.ask("POST", "/identity/rotate", operator, value={})
        wrong, said = await doors.ask("POST", "/identity/rotate", doors.root, value={"finish": "yes"})
        rotated, during = await doors.ask("POST", "/identity/rotate", doors.root, value={})
        finished, after = await doors.ask("POST", "/identity/rotate", doors.root, value={"finish": True})
        again, _ = await doors.ask("POST", "/identity/rotate", doors.root, value={"finish": True})

        assert (status, refused, wrong, rotated, finished, again) == (200, 403, 400, 200, 200, 409)
        assert '"finish" must be true or false' in said["message"]
        assert shown["rotating"] is False and during["rotating"] is True
        assert during["keys"][0] == shown["keys"][0] and after["keys"] == during["keys"][1:]
        for key in during["keys"]:
            assert set(key) == {"id", "public_key", "created_at"}
            assert key_id(parse_key(key["public_key"])) == key["id"]
