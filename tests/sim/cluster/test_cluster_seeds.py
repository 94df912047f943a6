"""Simulated clusters: accepted requests complete once, correctly, wherever and whenever nodes and links fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.sim.batch import Job
from tests.sim.cluster.batch import BATCH
from tests.sim.cluster.regressions import REGRESSIONS, Regression
from tests.sim.cluster.steps import STEPS

SEEDS: Final = 500
#: Each must have happened in some seed, or the simulator no longer covers it.
FAULTS: Final = (
    "attempts failed",
    "backups cancelled",
    "backups damaged",
    "backups in several rounds",
    "backups never finished",
    "backups succeeded",
    "backups verified",
    "backups whose maker died",
    "clients impatient",
    "clients told",
    "connections lost",
    "crashed at fsync",
    "crashed at rename",
    "crashed at renamed",
    "crashed at unlink",
    "deliveries doubled",
    "deployments while it is backed up",
    "died after an effect",
    "died before an effect",
    "fault: blackout",
    "fault: clock",
    "drains",
    "fault: cut",
    "fault: full",
    "fault: hosts",
    "fault: isolate",
    "fault: kill leader",
    "fault: operator",
    "fault: pause",
    "fault: session",
    "fault: slow disk",
    "fault: slow link",
    "fault: split",
    "fault: stop",
    "fault: stops",
    "fault: store",
    "fault: transfer",
    "fault: vault",
    "fault: wipe",
    "fsyncs stalled",
    "handlers hung",
    "handlers slow",
    "hollow groups",
    "hosts killed",
    "joins",
    "kills",
    "leaves",
    "messages delivered",
    "objects deleted",
    "operator acts",
    "power losses",
    "requests lost with the cluster",
    "restores",
    "restores failed: Corrupted",
    "restores failed: Unreachable",
    "sessions broken",
    "starts before a restore was finished, refused",
    "starts on a full disk",
    "states compared with the backup's",
    "store: broke off",
    "store: deleted, and said it was not",
    "store: down",
    "store: failed",
    "store: read",
    "store: slow to answer",
    "store: stale listing",
    "store: written",
    "store: written, and said it was not",
    "streams lost",
    "threads stalled",
    "trims",
    "undrains",
    "values kept in the store",
    "values staged",
)


@pytest.mark.slow("five hundred seeds")
def test_five_hundred_clusters_keep_every_promise() -> None:
    totals: Counter[str] = Counter()
    failed = []
    for outcome in BATCH.run_all(BATCH.jobs(0, SEEDS, None), os.cpu_count() or 1):
        totals += outcome.counts
        if outcome.failure is not None:
            failed.append(outcome)

    assert not failed, BATCH.report(failed)
    assert [name for name in FAULTS if not totals[name]] == [], "never happened"
    survived = [name for name, *_ in STEPS if not totals[f"crashed before {name}"] + totals[f"crashed after {name}"]]
    assert survived == [], "nobody died there"


@pytest.mark.parametrize("known", REGRESSIONS, ids=lambda known: f"{known.profile}-{known.seed}")
def test_a_cluster_that_once_failed_does_not_any_more(known: Regression) -> None:
    outcome = BATCH.one(Job(known.seed, known.profile))

    assert outcome.failure is None, f"{known.found}\n{BATCH.report([outcome])}"


@pytest.mark.slow("many seeds, each run twice")
def test_the_same_seed_is_the_same_cluster() -> None:
    """In another order and other processes, with other hashes: byte for byte."""
    # In these restores nodes stop while several tasks run: the order of cancellation must not depend on addresses.
    restores = [Job(seed, "restore") for seed in range(374, 379)]
    work = [*BATCH.jobs(5000, 14, None), *restores]
    program = (
        "from tests.sim.batch import Job\nfrom tests.sim.cluster.batch import BATCH\n"
        f"for job in {[tuple(job) for job in work]}: print(BATCH.one(Job(*job)).trace)"
    )
    root = Path(__file__).parents[3]

    first = [BATCH.one(job).trace for job in reversed(work)][::-1]
    environment = {**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": str(root)}
    found = subprocess.run([sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True)

    assert found.returncode == 0, found.stderr
    assert [int(line) for line in found.stdout.split()] == first
    assert len(set(first)) == len(work), "different seeds are different runs"
