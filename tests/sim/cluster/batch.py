"""Runs hundreds of simulated clusters."""

from __future__ import annotations

from typing import Final

from tests.sim.batch import Batch
from tests.sim.cluster.mutants import MUTANTS, switched_off
from tests.sim.cluster.run import PROFILES, run

BATCH: Final = Batch("sim-cluster", "Simulate whole clusters.", PROFILES, run, tuple(MUTANTS), switched_off)
