"""A cluster forms once: which nodes take part, which are refused, and what a refused node reports."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from holdfast.cluster.config import BadConfig, Config, HostPort
from holdfast.cluster.members.founding import Founding, open_founding, write_founding
from holdfast.cluster.node import Node
from holdfast.log.errors import WrongDirectory
from holdfast.sdk.ids import NodeId
from tests.cluster.harness import FAST, PATIENCE_S, World, eventually
from tests.ports import free_ports
from tests.promises.processes import Node as Process

NAMES = ("n1", "n2", "n3")


class Places:
    """The addresses of the nodes of a test, as the test wants the nodes to know them."""

    def __init__(self, path: Path, *names: str) -> None:
        self.path = path
        self.at = {name: HostPort("127.0.0.1", port) for name, port in zip(names, free_ports(len(names)), strict=True)}

    def node(self, name: str, **settings: Any) -> Node:
        free = HostPort("127.0.0.1", 0)
        settings.setdefault("peers", {other: place for other, place in self.at.items() if other != name})
        config = Config(
            node=name, data=self.path / name, ingress=free, admin=free, peer=self.at[name], partitions=1,
            secret=b"the secret of the tests", **settings,
        )  # fmt: skip
        return Node(config, timing=FAST)


async def stop(*nodes: Node) -> None:
    await asyncio.gather(*(node.stop() for node in nodes))


def waits_for(node: Node) -> str:
    return node.ground.joining.forming.waits_for if node.is_open else ""


async def give_up(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_cluster_forms_only_with_all_its_founders(tmp_path: Path) -> None:
    """Two of three are a majority, but wait: the third may remember a cluster that these two forgot."""
    places = Places(tmp_path, *NAMES)
    nodes = {name: places.node(name) for name in NAMES}
    first = [asyncio.ensure_future(nodes[name].start()) for name in ("n1", "n2")]
    await eventually(lambda: all(waits_for(nodes[name]).endswith("yet: n3 did not answer") for name in ("n1", "n2")))

    async with asyncio.timeout(PATIENCE_S):
        await nodes["n3"].start()
        await asyncio.gather(*first)

    assert {node.ground.meta.state.partitions for node in nodes.values()} == {1}
    await stop(*nodes.values())


async def test_a_formed_cluster_starts_again_without_one_of_its_founders(tmp_path: Path) -> None:
    places = Places(tmp_path, *NAMES)
    nodes = [places.node(name) for name in NAMES]
    await asyncio.gather(*(node.start() for node in nodes))
    await stop(*nodes)

    again = [places.node(name) for name in NAMES[:2]]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(node.start() for node in again))

    await eventually(lambda: again[0].unhealthy() is None)
    await stop(*again)


@pytest.mark.parametrize("wiped", [("n1",), ("n3",), ("n1", "n2")])
async def test_nodes_that_lost_their_directory_are_refused_with_the_reason(
    tmp_path: Path, wiped: tuple[str, ...]
) -> None:
    """Even a majority of them: together they would form a second cluster, without the acknowledged data of the first."""
    places = Places(tmp_path, *NAMES)
    nodes = [places.node(name) for name in NAMES]
    await asyncio.gather(*(node.start() for node in nodes))
    await stop(*nodes)
    for name in wiped:
        shutil.rmtree(tmp_path / name)

    again = {name: places.node(name) for name in NAMES}
    starts = {name: asyncio.ensure_future(node.start()) for name, node in again.items()}
    for name in wiped:
        with pytest.raises(WrongDirectory, match=r"a different disk.*under a new name"):
            async with asyncio.timeout(PATIENCE_S):
                await starts[name]

    kept = [name for name in NAMES if name not in wiped]
    if len(kept) == 2:
        await asyncio.gather(*(starts[name] for name in kept))
        await stop(*(again[name] for name in kept))
    else:
        assert not starts["n3"].done(), "one of three does not serve"
        await give_up(starts["n3"])


async def test_halves_with_different_founders_never_form_a_cluster(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    places = Places(tmp_path, *NAMES)
    left = places.node("n1", founders=("n1", "n2", "n3"))
    right = places.node("n2", founders=("n1", "n2"))
    starts = [asyncio.ensure_future(node.start()) for node in (left, right)]
    why = "different founders or backup; every node needs the same ones"

    await eventually(lambda: f"no link to n2: it refused us: same cluster name, but {why}" in waits_for(left))
    await eventually(lambda: f"no link to n1: same cluster name, but {why}" in waits_for(right))

    assert why in caplog.text
    assert not any(start.done() for start in starts)
    for start in starts:
        await give_up(start)


async def test_a_node_that_is_no_founder_forms_nothing_and_reports_what_it_waits_for(tmp_path: Path) -> None:
    places = Places(tmp_path, "n1", "n4")
    founder = places.node("n1", founders=("n1",), peers={})
    await founder.start()
    joiner = places.node("n4", founders=("n1",))
    start = asyncio.ensure_future(joiner.start())
    await eventually(lambda: waits_for(joiner) and joiner.not_serving.ports)

    async with aiohttp.ClientSession() as http:
        for port in joiner.not_serving.ports:
            async with http.get(f"http://127.0.0.1:{port}/health") as response:
                body = await response.json()

                assert response.status == 503
                assert "n4 is not a founder and waits to be added" in body["message"]
    assert not start.done() and not joiner.ground.log.host.replicas
    await give_up(start)
    await founder.stop()


def test_a_directory_remembers_its_founders(tmp_path: Path) -> None:
    peers = {name: HostPort("127.0.0.1", 1) for name in ("n2", "n3")}
    first = open_founding(Config(node="n1", data=tmp_path, peers=peers))
    assert first.founders == NAMES

    grown = open_founding(Config(node="n1", data=tmp_path, peers={**peers, "n4": HostPort("127.0.0.1", 1)}))

    assert grown.cluster_id == first.cluster_id, "who joins later changes nothing"
    with pytest.raises(WrongDirectory, match="formed by n1, n2, n3, but the setting founders says n1, n2"):
        open_founding(Config(node="n1", data=tmp_path, founders=("n1", "n2"), peers=peers))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"node": "n2"}, "it belongs to node n1 of cluster holdfast, but this is node n2"),
        ({"node": "n1", "cluster": "other"}, "it belongs to node n1 of cluster holdfast, but this is node n1 of other"),
    ],
)
def test_a_foreign_directory_is_refused(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    write_founding(tmp_path, Founding("holdfast", NodeId("n1"), (NodeId("n1"),)))

    with pytest.raises(WrongDirectory, match=sentence):
        open_founding(Config(data=tmp_path, **settings))


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"cluster": "c"}', b"{"])
def test_a_damaged_record_of_the_cluster_is_not_guessed(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "CLUSTER").write_bytes(damage)

    with pytest.raises(WrongDirectory, match="CLUSTER cannot be read"):
        open_founding(Config(data=tmp_path))


def test_a_log_without_the_record_of_its_cluster_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()

    with pytest.raises(WrongDirectory, match="CLUSTER is missing"):
        open_founding(Config(data=tmp_path))


def test_founders_without_an_address_are_missed_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="lacks n3"):
        open_founding(Config(data=tmp_path, founders=NAMES, peers={"n2": HostPort("127.0.0.1", 1)}))


async def test_a_node_that_waits_for_its_founders_stops_on_request(tmp_path: Path) -> None:
    ports = free_ports(4)
    waiting = Process("n1", tmp_path, (ports[0], ports[1], ports[2]), {"n1": ports[0], "n2": ports[3]}, 1)
    waiting.start()
    try:
        async with aiohttp.ClientSession() as http:
            status = 0
            async with asyncio.timeout(PATIENCE_S):
                while status != 503:
                    with suppress(aiohttp.ClientError):
                        async with http.get(f"{waiting.admin}/health") as response:
                            status = response.status
                    await asyncio.sleep(0.02)

        assert await waiting.terminate() == 0, waiting.tail()
    finally:
        waiting.kill()


async def test_the_data_directory_is_for_the_user_of_the_node_alone(tmp_path: Path) -> None:
    """Even one that an earlier release made readable for all users."""
    world = World(tmp_path)
    node = await world.start()
    assert node.config.data.stat().st_mode & 0o777 == 0o700
    node.config.data.chmod(0o755)

    node = await world.restart()

    assert node.config.data.stat().st_mode & 0o777 == 0o700
    await world.stop()
