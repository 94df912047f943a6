"""The stock engine is found faulty: the faults that the hardened one closes are real, and a seeded world shows them."""

from __future__ import annotations

from tests.sim.oracle import Violation
from tests.sim.stock import run_stock


def test_the_stock_engine_loses_or_contradicts_acknowledged_writes_within_forty_seeds() -> None:
    found: dict[int, str] = {}

    for seed in range(40):
        try:
            run_stock(seed)
        except Violation as violation:
            found[seed] = str(violation)

    unsafe = {seed: what for seed, what in found.items() if "lost" in what or "differ" in what}
    assert unsafe, f"only {found}"


def test_a_run_of_the_stock_engine_repeats_exactly() -> None:
    def outcome(seed: int) -> str:
        try:
            run_stock(seed)
        except Violation as violation:
            return str(violation)
        return "clean"

    assert [outcome(seed) for seed in range(6)] == [outcome(seed) for seed in range(6)]
