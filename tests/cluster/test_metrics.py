"""The metrics that Prometheus scrapes."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from holdfast.cluster.histogram import Histogram
from tests.cluster.serving import Serving, run


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
