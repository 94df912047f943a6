"""A removed node reports it: over HTTP at once, after a restart, and to the process that started it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from holdfast.cli.main import main
from holdfast.cli.run import REMOVED_EXIT_CODE
from holdfast.cluster.members.founding import Founding, NodeRemoved, write_founding
from holdfast.cluster.members.removal import write_removed
from holdfast.sdk.ids import NodeId
from tests.cluster.harness import PATIENCE_S, Handled, eventually
from tests.cluster.test_growing import Growing, growing

WHY = "was removed from the cluster for ever"


async def never(handled: Handled) -> None:
    await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.cluster.members.removal.REMOVED_S", 1.0)
    monkeypatch.setattr("holdfast.cluster.members.controller.IDLE_S", 0.2)


async def ask(method: str, url: str) -> tuple[int, Any, Any]:
    async with aiohttp.ClientSession() as http, http.request(method, url) as response:
        return response.status, response.headers, await response.json()


async def remove(cluster: Growing, name: str, at: str) -> None:
    await cluster.admin("POST", f"/cluster/nodes/{name}/remove?force=true", at=at)


@pytest.mark.parametrize(("leaving", "at"), [("n1", "n2"), ("n3", "n1")], ids=["dials", "is-dialed"])
async def test_a_removed_node_reports_it_over_http_and_after_a_restart(tmp_path: Path, leaving: str, at: str) -> None:
    """In either direction of dialing: the others drop their links, and requests that need them would get no answer."""
    async with growing(tmp_path, ("n1", "n2", "n3"), partitions=2, replication=1) as cluster:
        cluster.endpoint.add("waiter/wait", never)
        await cluster.seats[at].node.ground.registry.register(cluster.endpoint.uri, force=True)
        seat = cluster.seats[leaving]
        node = seat.node
        await eventually(lambda: "waiter" in node.ground.registry.state.offers, "the service")
        ingress, admin = node.doors.urls.ingress, node.doors.urls.admin
        waiting = asyncio.ensure_future(ask("POST", f"{ingress}/waiter/wait"))
        await eventually(lambda: node.is_serving and node.ground.replies.waiting(), "a client that waits")

        await remove(cluster, leaving, at)
        async with asyncio.timeout(PATIENCE_S):
            status, headers, body = await waiting

        assert status == 503 and headers["Retry-After"] and headers["Connection"] == "close"
        assert WHY in body["message"] and headers["x-holdfast-id"], "the invocation goes on, and can be asked for"
        for method, url in (
            ("POST", f"{ingress}/counter/key/add"),
            ("GET", f"{ingress}/holdfast/health"),
            ("GET", f"{admin}/health"),
            ("GET", f"{admin}/cluster"),
        ):
            status, headers, body = await ask(method, url)
            assert status == 503 and WHY in body["message"] and headers["Retry-After"], url

        async with asyncio.timeout(PATIENCE_S):
            await node.until_removed()
        seat.up = False
        await node.stop()
        with pytest.raises(NodeRemoved, match=f"node {leaving} {WHY}"):
            await seat.start()


@pytest.mark.parametrize(("leaving", "at"), [("n1", "n2"), ("n3", "n1")], ids=["dials", "is-dialed"])
async def test_a_node_that_was_removed_while_it_was_down_learns_it_when_it_starts(
    tmp_path: Path, leaving: str, at: str
) -> None:
    async with growing(tmp_path, ("n1", "n2", "n3"), partitions=1) as cluster:
        seat = cluster.seats[leaving]
        await seat.kill()
        await remove(cluster, leaving, at)
        await eventually(
            lambda: all(leaving not in each.node.ground.meta_group().status().members for each in cluster.up()),
            "its end",
        )

        start = asyncio.ensure_future(seat.start())
        await eventually(lambda: seat.node.ground.removal.why, "somebody tells it")
        status, _, body = await ask("GET", f"http://127.0.0.1:{seat.node.not_serving.ports[0]}/health")

        assert status == 503 and WHY in body["message"]
        with pytest.raises(NodeRemoved):
            async with asyncio.timeout(PATIENCE_S):
                await start
        assert "n" in json.loads((seat.path / "REMOVED").read_bytes())["known by"]


def test_the_command_refuses_to_start_a_removed_node_with_an_exit_code_of_its_own(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_founding(data, Founding("holdfast", NodeId("n1"), (NodeId("n1"), NodeId("n2"))))
    write_removed(data, "n2")
    file = tmp_path / "node.toml"
    file.write_text(f'node = "n1"\ndata = "{data}"\n')

    result = CliRunner().invoke(main, ["serve", "--config", str(file)])

    assert result.exit_code == REMOVED_EXIT_CODE == 78
    assert f"node n1 {WHY}" in result.stderr and "under a new name" in result.stderr
