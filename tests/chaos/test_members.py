"""What a run knows of a cluster whose members change, from the nodes' views."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast.chaos import member_faults
from holdfast.chaos.cluster import NodeCluster
from holdfast.chaos.faulty_node import Bends
from holdfast.chaos.member_faults import Drain, Replace
from holdfast.chaos.nemesis import Target
from holdfast.chaos.workloads import Asker, Seen


def view(*partitions: dict[str, Any]) -> dict[str, Any]:
    return {"partitions": list(partitions), "meta": {"term": 1, "leader": "n1", "members": ["n1", "n2", "n3"]}}


def hosted(number: int, leader: str, term: int, members: str = "n1 n2 n3", epoch: int = 1) -> dict[str, Any]:
    return {"partition": number, "leader": leader, "term": term, "members": members.split(), "epoch": epoch}


def heard_of(number: int, leader: str, members: str = "n1 n2 n3", epoch: int = 1) -> dict[str, Any]:
    """A node without a replica does not know the term."""
    return {"partition": number, "leader": leader, "members": members.split(), "epoch": epoch}


def test_a_replica_knows_the_leader_better_than_other_nodes(tmp_path: Path) -> None:
    cluster = NodeCluster(tmp_path, nodes=5, replication=3)
    cluster.views.by_node = {
        "n1": view(hosted(0, "n1", 3)),
        "n2": view(hosted(0, "n2", 4)),
        "n5": view(heard_of(0, "n3")),
    }

    assert cluster.views.leaders() == {0: "n2"}
    assert cluster.views.led_by("n2") == [0] and cluster.views.led_by("n3") == []


def test_the_newest_epoch_determines_the_members(tmp_path: Path) -> None:
    cluster = NodeCluster(tmp_path, nodes=5)
    cluster.views.by_node = {"n1": view(hosted(0, "n1", 3)), "n5": view(heard_of(0, "n1", "m99 n1 n3", epoch=2))}

    assert cluster.views.members() == {0: ["m99", "n1", "n3"]}


async def test_a_client_of_a_node_that_is_gone_for_ever_asks_another(tmp_path: Path) -> None:
    cluster = NodeCluster(tmp_path, nodes=3)
    asker = Asker(cluster, Seen())
    try:
        assert [asker._next(name) for name in ("n1", "n2", "n3")] == ["n2", "n3", "n1"]

        cluster.welcome("m99")
        cluster.forget("n2")

        assert [asker._next(name) for name in ("n1", "n2", "n3", "m99")] == ["n3", "n1", "m99", "n1"]
    finally:
        await asker.close()


class Careless(NodeCluster):
    """Agrees to every operator, and does nothing."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, nodes=3)
        self._bends = {name: Bends(root / f"{name}.bends") for name in self.names}
        self.asked: list[str] = []

    async def ask_admin(self, path: str, *, method: str = "GET", body: Any = None) -> Any:
        self.asked.append(f"{method} {path}")
        return {**view(hosted(0, "n1", 1)), "changing": "nothing yet"}

    async def start(self, name: str) -> None: ...

    async def kill(self, name: str, signum: signal.Signals) -> None: ...

    async def answers(self, name: str) -> None: ...

    async def newcomer(self) -> str:
        self._places["m99"] = self._net.place()
        return "m99"

    def wipe(self, name: str) -> None: ...

    async def is_turned_away(self, name: str) -> str | None:
        return "it took requests before it ended"


async def test_a_drained_node_that_leads_on_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_faults, "MOVED_S", 0.0)
    cluster = Careless(tmp_path)
    cluster.views.by_node = {"n1": view(hosted(0, "n1", 3))}
    fault = Drain(Target.LEADER, random.Random(1))

    await fault.begin(cluster)
    await fault.end(cluster)

    assert cluster.asked == ["POST /cluster/nodes/n1/drain", "POST /cluster/nodes/n1/undrain"]
    assert list(cluster.found) == [member_faults.DRAINED]


async def test_a_node_that_forgot_and_is_let_in_and_one_that_is_not_replaced_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_faults, "REPLACED_S", 0.0)
    cluster = Careless(tmp_path)
    fault = Replace(random.Random(1), started_empty=True)

    await fault.begin(cluster)
    await fault.end(cluster)

    assert cluster.asked[0] == "POST /cluster/nodes" and "remove" in cluster.asked[1]
    assert list(cluster.found) == [member_faults.FORGETFUL, member_faults.REPLACED]
    assert "m99" in cluster.names and len(cluster.names) == 3


async def test_a_store_that_is_not_used_again_and_a_replica_that_stays_behind_are_found(tmp_path: Path) -> None:
    cluster = Careless(tmp_path)
    here = {"here": True, "applied": 7, "snapshot": {}}
    cluster.views.by_node = {
        name: {
            **view(hosted(0, "n1", 1) | here | ({"applied": 5} if name == "n3" else {})),
            "snapshots": {"error": None},
        }
        for name in cluster.names
    }
    assert cluster.views.behind(cluster.names) == ["partition 0 on n3 is at entry 5, and another replica at 7"]
    assert cluster.views.store_errors() == {}

    cluster.views.by_node["n2"]["snapshots"]["error"] = "no route"

    assert cluster.views.store_errors() == {"n2": "no route"}
