"""The simulator of clusters can see: without any single rule, it finds a violation."""

from __future__ import annotations

from typing import Final

import pytest

from tests.sim.batch import Job
from tests.sim.cluster.batch import BATCH
from tests.sim.cluster.mutants import MUTANTS, SEEDS, WHERE
from tests.sim.cluster.regressions import REGRESSIONS

#: Most are found in the first few seeds; a change of the random choices must not hide the rarest.
SEEDS_MAX: Final = 300


@pytest.mark.parametrize("mutant", MUTANTS)
def test_without_a_rule_a_violation_is_found(mutant: str) -> None:
    seeds = [SEEDS.get(mutant, 0), *range(SEEDS_MAX)]
    found = (BATCH.one(Job(seed, WHERE[mutant], mutant)).failure for seed in seeds)

    assert any(failure is not None for failure in found), f"{mutant}: no violation in {SEEDS_MAX} seeds"


def test_every_mutant_has_its_world_and_every_regression_its_mutant() -> None:
    assert set(WHERE) == set(MUTANTS)
    assert {known.mutant for known in REGRESSIONS} - {None} <= set(MUTANTS)
