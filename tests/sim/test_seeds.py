"""Simulated clusters: nothing acknowledged is lost, all nodes agree, and after the repair every node continues."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.sim.batch import BATCH, Job
from tests.sim.driver import FAILPOINTS, OPENING
from tests.sim.regressions import REGRESSIONS, Regression

SEEDS: Final = 2000
#: Each must have happened in some seed, or the simulator no longer covers it.
FAULTS: Final = (
    "applies without space",
    "blackouts",
    "clock jumps",
    "corruptions refused",
    "cuts",
    "disks full",
    "disks hung",
    "disks wiped",
    "frames lost",
    "fsyncs failed",
    "fsyncs stalled",
    "groups forgotten",
    "groups that came back",
    "hollow groups filled",
    "states deleted",
    "kills",
    "late frames of dead sessions",
    "pauses",
    "power losses",
    "sessions broken",
    "snapshots installed",
    "transfers",
    "trims",
    "wiped disks refused",
    "change ok",
    "read ok",
    "write ok",
    "write unknown",
    *(f"crash at {name}" for name in (*FAILPOINTS, *OPENING)),
)


@pytest.mark.slow("two thousand seeds")
def test_two_thousand_clusters_keep_every_promise() -> None:
    totals: Counter[str] = Counter()
    failed = []
    for outcome in BATCH.run_all(BATCH.jobs(0, SEEDS, None), os.cpu_count() or 1):
        totals += outcome.counts
        if outcome.failure is not None:
            failed.append(outcome)

    assert not failed, BATCH.report(failed)
    assert [name for name in FAULTS if not totals[name]] == [], "never happened"


@pytest.mark.parametrize("known", REGRESSIONS, ids=lambda known: f"{known.profile}-{known.seed}")
def test_a_seed_that_once_failed_passes(known: Regression) -> None:
    outcome = BATCH.one(Job(known.seed, known.profile))

    assert outcome.failure is None, f"{known.found}\n{BATCH.report([outcome])}"


@pytest.mark.slow("54 seeds, each run twice")
def test_the_same_seed_is_the_same_run() -> None:
    work = BATCH.jobs(5000, 54, None)

    first = [BATCH.one(job) for job in work]
    second = list(BATCH.run_all(work, os.cpu_count() or 1))

    assert [outcome.trace for outcome in first] == [outcome.trace for outcome in second]
    assert [outcome.counts for outcome in first] == [outcome.counts for outcome in second]
    assert len({outcome.trace for outcome in first}) == len(work), "different seeds are different runs"


def test_a_run_does_not_depend_on_how_python_hashes() -> None:
    program = "from tests.sim.batch import BATCH\nfor job in BATCH.jobs(7000, 6, None): print(BATCH.one(job).trace)"
    root = Path(__file__).parents[2]

    traces = []
    for hash_seed in ("0", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
        found = subprocess.run(
            [sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True
        )
        assert found.returncode == 0, found.stderr
        traces.append(found.stdout)

    assert traces[0] == traces[1]
    assert len(set(traces[0].split())) == 6
