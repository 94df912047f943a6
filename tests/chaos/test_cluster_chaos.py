"""A whole cluster under load and faults for three minutes, and proof that a broken promise would be noticed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import cast

import pytest

from holdfast.chaos.__main__ import free_folder
from holdfast.chaos.cluster import NodeCluster
from holdfast.chaos.soak import Plan, Result, Soak

#: `make test` runs three minutes. CHAOS_SECONDS=20 shortens it during other work.
SECONDS = float(os.environ.get("CHAOS_SECONDS", "180"))


@pytest.mark.slow("three nodes and their handlers under load and faults")
def test_a_cluster_keeps_its_promises_while_everything_around_it_breaks(tmp_path: Path) -> None:
    soak = Soak(Plan(seconds=SECONDS, nodes=3, seed=4), tmp_path / "run")

    result = asyncio.run(soak.run())

    assert result.ok, str(result)
    assert sum(result.operations.values()) > 5 * SECONDS, str(result)
    assert sum(result.faults.values()) >= max(1, SECONDS / 20), str(result)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["ok"] and report["faults"] == result.faults
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<svg" in page and "0 violations" in page


class Tampered(Soak):
    """A run whose evidence is falsified before the check, as if the cluster had done it."""

    def _judge(self, result: Result, deaths: list[str]) -> None:
        lines = (self.out / "oracle.jsonl").read_bytes().splitlines(keepends=True)
        doubled = next(line for line in lines if json.loads(line)[2] == "flow")
        (self.out / "oracle.jsonl").write_bytes(b"".join([*lines, doubled]))
        key = next(iter(self.counts))
        self.counts[key] -= 1
        super()._judge(result, deaths)


@pytest.mark.slow("a cluster starts, works under faults and is judged")
def test_a_doubled_effect_and_a_lost_count_are_found(tmp_path: Path) -> None:
    result = asyncio.run(Tampered(Plan(seconds=3, seed=5, only="kill handlers"), tmp_path / "run").run())

    assert not result.ok
    assert set(result.violations) == {"no journaled step runs again", "counters are exact"}, str(result)
    assert "VIOLATION" in str(result) and result.command in str(result)
    count = sum(len(sentences) for sentences in result.violations.values())
    assert f"{count} violations" in (tmp_path / "run" / "report.html").read_text()


def test_a_node_that_ends_by_itself_is_evidence_and_nothing_outlives_a_run(tmp_path: Path) -> None:
    async def scenario() -> tuple[list[str], list[int]]:
        async with NodeCluster(tmp_path, nodes=3, partitions=2) as cluster:
            pids = [cast(int, cluster.pid(name)) for name in [*cluster.names, *cluster.handlers]]
            os.kill(cast(int, cluster.pid("n1")), signal.SIGKILL)  # Not by the run, so it is unexpected.
            async with asyncio.timeout(60):
                while not cluster.deaths or cluster.is_out("n1"):
                    await asyncio.sleep(0.01)
            pids.append(cast(int, cluster.pid("n1")))  # Started again.
            await cluster.kill("n2", signal.SIGSTOP)
            assert cluster.is_out("n2") and not cluster.running("n2")
            return cluster.deaths, pids

    (death,), pids = asyncio.run(scenario())

    assert death.startswith("n1 ended by itself with status -9")
    assert len(set(pids)) == 6
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_run_never_writes_over_an_older_one(tmp_path: Path) -> None:
    assert free_folder(tmp_path, 7) == tmp_path / "chaos-7"
    (tmp_path / "chaos-7").mkdir()
    assert free_folder(tmp_path, 7) == tmp_path / "chaos-7.2"
