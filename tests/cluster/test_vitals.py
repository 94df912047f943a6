"""How every node is doing, in GET /cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from holdfast.cluster.members.vitals import AllVitals, Vitals
from tests.cluster.harness import PATIENCE_S, echo
from tests.cluster.serving import Serving, run
from tests.cluster.test_health import net
from tests.cluster.test_three_nodes import three

HERE = Vitals(uptime_s=5, disk_free=10, disk_total=20, memory_bytes=30, loop_lag_ms=1)


def test_silent_and_older_nodes_are_left_out() -> None:
    async def scenario() -> None:
        rpcs = net("n1", "n2", "older")
        known = ["n2", "older", "gone"]
        first = AllVitals("n1", rpcs["n1"], connected=lambda: known, here=lambda: HERE)
        AllVitals("n2", rpcs["n2"], connected=lambda: known, here=lambda: HERE._replace(uptime_s=9))

        assert await first.everywhere() == {"n1": HERE, "n2": HERE._replace(uptime_s=9)}

    asyncio.run(scenario())


def test_a_node_that_knows_more_is_understood() -> None:
    async def scenario() -> None:
        rpcs = net("n1", "newer")

        async def serve(peer: str, argument: object) -> object:
            return (*HERE, "more")

        rpcs["newer"].serve("vitals", serve)
        first = AllVitals("n1", rpcs["n1"], connected=lambda: ["newer"], here=lambda: HERE)

        assert await first.everywhere() == {"n1": HERE, "newer": HERE}

    asyncio.run(scenario())


def test_an_older_node_and_a_histogram_that_knows_more_are_understood() -> None:
    plain = HERE[:5]
    latency = ["accept", [0.1], [3, 4], 1.5]

    assert Vitals.read(list(plain)) == HERE and HERE.show()["cpu_ms"] is None
    found = Vitals.read([*plain, 7, [[*latency, "more"]], "more"])
    assert found.show()["latency"] == {"accept": {"bounds_s": [0.1], "counts": [3, 4], "sum_s": 1.5}}
    assert found.cpu_ms == 7


def test_a_node_shows_its_time_disk_memory_and_lag(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        [node] = (await at.admin("GET", "/cluster"))[1]["nodes"]

        assert (node["condition"], node["state"], node["connected"]) == ("ok", "active", True)
        assert 0 <= node["uptime_s"] <= PATIENCE_S and node["loop_lag_ms"] >= 0
        assert 0 < node["disk"]["free"] <= node["disk"]["total"]
        assert node["memory_bytes"] > 10_000_000 and node["cpu_ms"] > 0
        for _ in range(3):
            await at.call("echo/say")
        [node] = (await at.admin("GET", "/cluster"))[1]["nodes"]
        assert {name: sum(each["counts"]) for name, each in node["latency"].items()} == {"accept": 3, "handler": 3}
        assert all(len(each["counts"]) == len(each["bounds_s"]) + 1 for each in node["latency"].values())

    run(tmp_path, scenario)


def test_any_node_tells_about_all_and_a_dead_one_is_unreachable(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with three(tmp_path, {"echo/say": echo}) as cluster, aiohttp.ClientSession() as http:

            async def nodes() -> dict[str, dict[str, object]]:
                async with http.get(f"{cluster.seats['n1'].node.doors.urls.admin}/cluster") as answer:
                    return {node["name"]: node for node in (await answer.json())["nodes"]}

            async with asyncio.timeout(PATIENCE_S):
                while any(node["uptime_s"] is None for node in (await nodes()).values()):
                    await asyncio.sleep(0.05)
                assert {node["condition"] for node in (await nodes()).values()} == {"ok"}
                await cluster.seats["n3"].kill()
                while (dead := (await nodes())["n3"])["condition"] == "ok":
                    await asyncio.sleep(0.05)

            assert (dead["condition"], dead["state"], dead["connected"]) == ("unreachable", "active", False)
            assert dead["disk"] is None and dead["memory_bytes"] is None and dead["loop_lag_ms"] is None

    asyncio.run(scenario())
