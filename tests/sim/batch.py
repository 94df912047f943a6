"""Runs hundreds of seeds on all cores: of the simulated log, and of simulated clusters (`tests/sim/cluster`)."""

from __future__ import annotations

import argparse
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Final, NamedTuple, Protocol

from tests.sim.mutants import MUTANTS, switched_off
from tests.sim.oracle import Violation
from tests.sim.run import PROFILES, run

#: The counts of a failed run: none.
EMPTY: Final[Counter[str]] = Counter()


class Job(NamedTuple):
    seed: int
    profile: str
    mutant: str | None = None  # The rule to switch off.


class Outcome(NamedTuple):
    job: Job
    failure: str | None = None
    counts: Counter[str] = EMPTY
    virtual_seconds: float = 0.0
    trace: int = 0


class World(Protocol):
    """The world at the end of a seed."""

    counts: Counter[str]
    now: float
    trace: int


@dataclass(frozen=True)
class Batch:
    """One kind of simulator."""

    target: str  # of make
    what: str
    profiles: Mapping[str, Any]
    run: Callable[[int, Any], World]
    mutants: tuple[str, ...]
    switched_off: Callable[[str], AbstractContextManager[None]]

    def one(self, job: Job) -> Outcome:
        """Runs in a worker process."""
        try:
            with self.switched_off(job.mutant) if job.mutant else nullcontext():
                world = self.run(job.seed, self.profiles[job.profile])
        except Violation as violation:
            return Outcome(job, str(violation))
        except Exception:
            return Outcome(job, traceback.format_exc())
        return Outcome(job, None, world.counts, world.now, world.trace)

    def jobs(self, start: int, seeds: int, profile: str | None, mutant: str | None = None) -> list[Job]:
        names = [profile] if profile else list(self.profiles)
        return [Job(seed, names[seed % len(names)], mutant) for seed in range(start, start + seeds)]

    def repeat_command(self, job: Job) -> str:
        mutant = f" MUTANT={job.mutant}" if job.mutant else ""
        return f"make {self.target} SEEDS=1 START={job.seed} PROFILE={job.profile}{mutant}"

    def run_all(self, work: Iterable[Job], workers: int) -> Iterator[Outcome]:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            yield from pool.map(self.one, work, chunksize=4)

    def report(self, failed: Iterable[Outcome]) -> str:
        return "\n".join(
            f"seed {outcome.job.seed} ({outcome.job.profile}): {outcome.failure}\n"
            f"  repeat: {self.repeat_command(outcome.job)}"
            for outcome in failed
        )

    def main(self, arguments: list[str] | None = None) -> int:
        """Run seeds, and print what happened and how to repeat failures."""
        parser = argparse.ArgumentParser(prog=f"make {self.target}", description=self.what)
        parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run (default: 200)")
        parser.add_argument("--start", type=int, default=0, help="the first seed (default: 0)")
        parser.add_argument("--profile", choices=sorted(self.profiles), help="one kind of world; default: all in turn")
        parser.add_argument(
            "--mutant", choices=sorted(self.mutants), help="switch a rule off, to see that it is missed"
        )
        parser.add_argument(
            "--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)"
        )
        options = parser.parse_args(arguments)
        begun = time.monotonic()
        totals: Counter[str] = Counter()
        virtual, failures = 0.0, 0
        work = self.jobs(options.start, options.seeds, options.profile, options.mutant)
        for outcome in self.run_all(work, options.workers):
            totals += outcome.counts
            virtual += outcome.virtual_seconds
            if outcome.failure is not None:
                failures += 1
                print(self.report([outcome]), flush=True)
        print(f"{options.seeds} seeds, {failures} violations, {virtual / 3600:.1f} virtual hours,", end=" ")
        print(f"{time.monotonic() - begun:.0f} s")
        print(", ".join(f"{name}: {count}" for name, count in sorted(totals.items())))
        return 1 if failures else 0


BATCH: Final = Batch("sim", "Simulate clusters of the replicated log.", PROFILES, run, tuple(MUTANTS), switched_off)
