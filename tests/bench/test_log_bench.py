"""The measurements run and report what they claim: short runs, whose figures mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def measure(*options: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "log.py", "--json", *options],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.slow("three processes per measurement, for one and for many groups")
def test_throughput_is_measured_for_one_and_many_groups() -> None:
    report = measure("--only", "throughput", "--rounds", "1", "--seconds", "0.2")

    rows = report["throughput"]
    assert [(row["groups"], row["in_flight"]) for row in rows] == [
        (groups, in_flight) for groups in (1, 24) for in_flight in (1, 16, 128, 512)
    ]
    for row in rows:
        assert row["commits_per_s"] > 0 and row["fsyncs_per_s"] > 0
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert len(row["cpu_percent"]) == 3
    crowded = rows[3]
    assert crowded["commits_per_s"] > crowded["entries_per_s"], "commands share entries"


def test_failover_is_measured_for_a_killed_and_a_silent_leader() -> None:
    report = measure("--only", "failover", "--times", "1")

    assert [row["manner"] for row in report["failover"]] == ["broken", "silent"]
    assert all(0 < row["p50_ms"] <= row["worst_ms"] for row in report["failover"])
