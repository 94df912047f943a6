"""Random seeds for hours: the drawing, the record, and the report."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from tests.sim import soak
from tests.sim.batch import BATCH, Job, Outcome
from tests.sim.cluster.batch import BATCH as CLUSTERS
from tests.sim.soak import BATCHES, WEIGHTS, Record, Tally, draw


def test_all_profiles_of_both_simulators_are_drawn_and_those_that_change_members_more_often() -> None:
    random = Random(1)

    drawn = [draw(random) for _ in range(20_000)]

    counts = Counter((target, job.profile) for target, job in drawn)
    assert set(counts) == {(target, profile) for target, batch in BATCHES.items() for profile in batch.profiles}
    assert counts["sim", "sealing"] > 2 * counts["sim", "plain"]
    assert counts["sim-cluster", "members"] > 2 * counts["sim-cluster", "calm"]
    assert len({job.seed for _, job in drawn}) == len(drawn)


def test_a_profile_with_a_weight_exists() -> None:
    for target, weights in WEIGHTS.items():
        assert set(weights) <= set(BATCHES[target].profiles)


def test_a_second_run_adds_to_the_first(tmp_path: Path) -> None:
    path = tmp_path / "out" / "soak.json"
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            record = Record.read(path)
            soak.soak(
                record,
                pool,
                jobs=1,
                is_over=lambda begun: begun >= 1,
                save=lambda record=record: record.write(path),  # type: ignore[misc]
                random=Random(4),
                revision="abc",
            )
            record.write(path)

    found = Record.read(path)
    ((name, tally),) = found.tallies.items()
    assert tally.seeds == 2 and tally.virtual_seconds > 0 and tally.violations == 0
    assert found.seconds > 0 and name in found.summary()


def test_the_summary_has_the_command_that_repeats_each_failing_seed() -> None:
    record = Record()
    record.note(BATCH, Outcome(Job(7, "sealing"), None, virtual_seconds=7200.0), "abc")
    record.note(BATCH, Outcome(Job(8, "sealing"), "b counts d"), "abc")
    record.note(CLUSTERS, Outcome(Job(9, "members"), "nobody serves"), "def")

    summary = record.summary()

    assert record.tallies["sim sealing"] == Tally(2, 7200.0, 1)
    assert "make sim SEEDS=1 START=8 PROFILE=sealing   # at abc: b counts d" in summary
    assert "make sim-cluster SEEDS=1 START=9 PROFILE=members   # at def: nobody serves" in summary
    assert f"{'sim, all profiles':36} {2:8} {2.0:14.1f} {1:11}" in summary
