"""The metrics that Prometheus scrapes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.cluster.histogram import Histogram
from holdfast.cluster.node import Node
from holdfast.cluster.observe.node_metrics import STATES
from holdfast.sdk.ids import PartitionNumber
from holdfast.statemachine import queries
from tests.cluster.harness import PATIENCE_S, Handled, eventually
from tests.cluster.serving import Serving, run
from tests.cluster.test_founding import Places, give_up
from tests.cluster.test_three_nodes import echo, three


class Scrape:
    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}

    def value(self, name: str, **labels: str) -> float:
        return sum(
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


async def scrape(at: Serving) -> Scrape:
    status, body = await at.admin("GET", "/metrics")
    assert status == 200
    return Scrape(body.decode())


def test_a_scrape_is_well_formed_and_counts_what_happened(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        for _ in range(3):
            await at.call("trips/book")
        await at.reaches(await at.send("agent/wait"), "suspended")
        status, body = await at.admin("GET", "/metrics")

        families = {family.name: family for family in text_string_to_metric_families(body.decode())}

        def value(name: str, **labels: str) -> float:
            family = families[name.removesuffix("_total").removesuffix("_count")]
            return sum(
                sample.value
                for sample in family.samples
                if sample.name == name and labels.items() <= sample.labels.items()
            )

        assert status == 200
        assert value("holdfast_invocations", service="trips", status="completed") == 3
        assert value("holdfast_invocations", status="suspended") == 1
        assert value("holdfast_invocations_ended_total", service="trips", end="succeeded") == 3
        assert value("holdfast_steps_total", service="trips") >= 9
        assert value("holdfast_partition_leader") == 2
        assert value("holdfast_partition_apply_lag_entries") == 0
        assert value("holdfast_ingress_accepted_total") == 4
        assert value("holdfast_ingress_seconds_count") == 4
        assert value("holdfast_deployment_in_flight") == 1
        assert value("holdfast_handovers_hurried_total") == 0
        assert value("holdfast_log_commits_total") > 0
        assert value("holdfast_disk_free_bytes") > 0 and value("holdfast_disk_full") == 0
        assert value("holdfast_loop_lag_seconds_max") >= value("holdfast_loop_lag_seconds") >= 0
        assert "holdfast_loop_blocked" in families
        assert value("holdfast_log_commit_seconds_total") > 0
        assert value("holdfast_partition_commit_seconds_count") == value("holdfast_partition_batches_total") > 0
        assert "process_resident_memory_bytes" in families

    run(tmp_path, scenario)


def test_a_histogram_counts_each_value_once_at_its_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 99.0):
        histogram.observe(value)

    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert (histogram.count, histogram.sum) == (4, 102.0)


def test_answers_are_counted_by_door_and_class(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        for _ in range(3):
            await at.call("trips/book")
        await at.call("nobody/there")
        await at.admin("GET", "/nowhere")
        await at.admin("GET", "/deployments")

        found = await scrape(at)

        def answered(door: str, status: str) -> float:
            return found.value("holdfast_http_responses_total", **{"door": door, "class": status})

        assert (answered("ingress", "2xx"), answered("ingress", "4xx"), answered("ingress", "5xx")) == (3, 1, 0)
        assert (answered("admin", "2xx"), answered("admin", "4xx")) == (2, 1)

    run(tmp_path, scenario)


def test_a_client_that_leaves_before_its_answer_is_counted(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await at.call("agent/wait")

        await eventually(lambda: at.exchange.statuses[0] == 1)

    run(tmp_path, scenario)


def test_our_latency_is_measured_apart_from_that_of_handlers(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        async def slow(handled: Handled) -> None:
            handled.run("flight", b"1")
            await handled.acks(2)
            await asyncio.sleep(0.3)
            handled.output(b"1")

        at.endpoint.handlers["trips", "book"] = slow
        await at.call("trips/book")
        found = await scrape(at)
        ours = found.value("holdfast_attempt_ours_seconds_sum")
        theirs = found.value("holdfast_attempt_handler_seconds_sum")

        assert theirs >= 0.3 and ours > 0
        assert ours + theirs < found.value("holdfast_ingress_seconds_sum")
        for name in ("ingress_accept", "attempt_start", "attempt_ours", "attempt_handler"):
            assert found.value(f"holdfast_{name}_seconds_count") == 1, name

    run(tmp_path, scenario)


def test_disk_clock_and_state_of_the_node_are_reported(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        found = await scrape(at)
        free, used, size = (found.value(f"holdfast_disk_{each}_bytes") for each in ("free", "used", "size"))

        assert 0 < free < size and 0 < used < size
        assert abs(found.value("holdfast_clock_timestamp_seconds") - at.node.environment.clock.wall_s()) < PATIENCE_S
        assert [each for each in STATES if found.value("holdfast_node_state", state=each)] == ["serving"]
        assert found.value("holdfast_member_state", node=at.node.config.node, state="active") == 1
        at.node.serving.health.stopping()
        assert (await scrape(at)).value("holdfast_node_state", state="unhealthy") == 1

    run(tmp_path, scenario)


def test_elections_leaders_and_due_timers_are_reported(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        found = await scrape(at)

        for partition in ("meta", "0", "1"):
            assert found.value("holdfast_partition_elections_total", partition=partition) == 1
            assert found.value("holdfast_partition_role_changes_total", partition=partition) >= 1
            assert found.value("holdfast_partition_without_leader", partition=partition) == 0
        assert found.value("holdfast_timers_due") == found.value("holdfast_timers_behind_seconds") == 0
        assert found.value("holdfast_partition_outbox_messages") == 0

        def due(number: int) -> int:
            with at.node.ground.replicas.hosted[PartitionNumber(number)].state.read() as txn:
                return queries.due_timers(txn, at.node.environment.clock.now_ms() + 7_200_000, 10)[0]

        await at.send("flaky/fail")
        await eventually(lambda: any(due(partition.number) for partition in at.node.partitions))
        # The leader's clock seems to stand at the time of the retry, an hour ahead, and its alarm has not rung.
        for each in at.node.partitions:
            each.keep_up_with(at.node.environment.clock.now_ms() + 7_200_000)
        found = await scrape(at)
        assert found.value("holdfast_timers_due") == 1
        assert 3000 < found.value("holdfast_timers_behind_seconds") < 4000

    run(tmp_path, scenario)


def test_the_time_of_the_newest_backup_outlives_the_node(tmp_path: Path) -> None:
    async def back_up(at: Serving) -> None:
        assert (await scrape(at)).value("holdfast_backup_newest_timestamp_seconds") == 0
        (tmp_path / "place").mkdir()
        for name in ("place", "nowhere"):
            status, job = await at.admin("POST", "/cluster/backups", json={"to": str(tmp_path / name)})
            assert status == 202, job
            while (await at.node.serving.backups.show(job["id"]))["status"] == "running":
                await asyncio.sleep(0.01)
        found = await scrape(at)
        assert (
            abs(found.value("holdfast_backup_newest_timestamp_seconds") - at.node.environment.clock.wall_s())
            < PATIENCE_S
        )
        assert found.value("holdfast_backups_total", outcome="succeeded") == 1
        assert found.value("holdfast_backups_total", outcome="failed") == 1

    async def look(at: Serving) -> None:
        found = await scrape(at)
        assert (
            abs(found.value("holdfast_backup_newest_timestamp_seconds") - at.node.environment.clock.wall_s())
            < PATIENCE_S
        )
        assert found.value("holdfast_backups_total", outcome="succeeded") == 0

    run(tmp_path, back_up)
    run(tmp_path, look)


async def ask(node: Node, token: str = "") -> Scrape:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"http://127.0.0.1:{node.not_serving.ports[0]}/metrics"
    async with aiohttp.ClientSession() as http, http.get(url, headers=headers) as response:
        assert response.status == 200, await response.text()
        return Scrape(await response.text())


async def test_a_node_that_starts_serves_the_metrics_that_exist(tmp_path: Path) -> None:
    places = Places(tmp_path, "n1", "n2", "n3")
    node = places.node("n1")
    start = asyncio.ensure_future(node.start())
    await eventually(lambda: len(node.not_serving.ports) == 2)

    found = await ask(node)

    assert found.value("holdfast_node_state", state="starting") == 1
    assert found.value("holdfast_disk_size_bytes") > 0 and "holdfast_log_turns" in found.families
    assert found.value("process_resident_memory_bytes") > 0
    ingress = f"http://127.0.0.1:{node.not_serving.ports[1]}/metrics"
    async with aiohttp.ClientSession() as http, http.get(ingress) as response:
        assert response.status == 503, "the ingress is for clients"
    await give_up(start)


async def test_a_node_that_starts_tells_strangers_its_state_alone(tmp_path: Path) -> None:
    places = Places(tmp_path, "n1", "n2", "n3")
    root = "hf_node_" + "0123456789abcdef" * 4
    file = tmp_path / "token"
    file.write_text(root)
    file.chmod(0o600)
    node = places.node("n1", auth="tokens", admin_token_file=file)
    start = asyncio.ensure_future(node.start())
    await eventually(lambda: len(node.not_serving.ports) == 2)

    for token in ("", "hf_abcdefgh_" + "x" * 40, root + "x"):
        assert [*(await ask(node, token)).families] == ["holdfast_node_state"]
    assert "holdfast_disk_size_bytes" in (await ask(node, root)).families
    await give_up(start)


async def test_the_leader_of_a_partition_reports_how_far_its_followers_are(tmp_path: Path) -> None:
    async with three(tmp_path, {"echo/say": echo}) as cluster:

        async def lags() -> dict[tuple[str, ...], float]:
            rows: dict[tuple[str, ...], float] = {}
            for seat in cluster.up():
                for family in await seat.node.doors.metrics.families():
                    if family.name == "holdfast_partition_follower_lag_entries":
                        rows |= {(seat.name, *each.labels.values()): each.value for each in family.samples}
            return rows

        # Two followers of each of three partitions and of the meta group. A group may still elect its leader, and the last
        # entries may be on their way.
        async with asyncio.timeout(PATIENCE_S):
            while len(found := await lags()) != 2 * 4 or any(found.values()):
                await asyncio.sleep(0.01)
