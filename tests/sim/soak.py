"""Random seeds of both simulators for hours: `make sim-soak HOURS=n`.

The tests always run the same seeds, so they find nothing new. This draws seeds that have never run, at the lowest
priority, and adds its findings to a file, where the next run continues. Profiles that change members are drawn more
often, because most findings of random seeds came from there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, Final

from tests.sim.batch import BATCH as LOG
from tests.sim.batch import Batch, Job, Outcome
from tests.sim.cluster.batch import BATCH as CLUSTERS

BATCHES: Final[dict[str, Batch]] = {batch.target: batch for batch in (LOG, CLUSTERS)}
#: A simulated cluster takes ten times as long as a simulated log.
SHARES: Final = {LOG.target: 5, CLUSTERS.target: 1}
#: The weight of a profile, if it is not 1.
WEIGHTS: Final = {
    LOG.target: {"sealing": 4, "leavers": 4, "movers": 3, "hermits": 3, "hollow": 3, "slow-disk": 2, "wipes": 2},
    CLUSTERS.target: {"members": 5, "five": 2, "stormy": 2, "restore": 2},
}
SEEDS_BITS: Final = 40
SAVED_S: Final = 10.0
SEEDS_PER_PROCESS: Final = 200  # Then it is replaced, so that leaks do not add up for hours.


@dataclass
class Tally:
    """The runs of one profile."""

    seeds: int = 0
    virtual_seconds: float = 0.0
    violations: int = 0


@dataclass
class Record:
    """The findings of all runs so far, kept in a file."""

    seconds: float = 0.0
    tallies: dict[str, Tally] = field(default_factory=dict)  # By "target profile".
    failures: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Record:
        try:
            value: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            return cls()
        return cls(value["seconds"], {k: Tally(**v) for k, v in value["tallies"].items()}, value["failures"])

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        beside.write_text(json.dumps(asdict(self), indent=1))
        beside.replace(path)

    def note(self, batch: Batch, outcome: Outcome, revision: str) -> None:
        job = outcome.job
        tally = self.tallies.setdefault(f"{batch.target} {job.profile}", Tally())
        tally.seeds += 1
        tally.virtual_seconds += outcome.virtual_seconds
        if outcome.failure is not None:
            tally.violations += 1
            repeat = batch.repeat_command(job)
            self.failures.append({"repeat": repeat, "revision": revision, "failure": outcome.failure})

    def summary(self) -> str:
        lines = [f"{'simulator and profile':36} {'seeds':>8} {'virtual hours':>14} {'violations':>11}"]
        for target in BATCHES:
            mine = {name: tally for name, tally in self.tallies.items() if name.split()[0] == target}
            rows = [*sorted(mine.items()), (f"{target}, all profiles", _total(list(mine.values())))]
            lines += [f"{name:36} {t.seeds:8} {t.virtual_seconds / 3600:14.1f} {t.violations:11}" for name, t in rows]
        lines.append(f"{self.seconds / 3600:.2f} hours of running")
        for failure in self.failures:
            lines.append(f"{failure['repeat']}   # at {failure['revision']}: {failure['failure'].strip()[-300:]}")
        return "\n".join(lines)


def _total(tallies: list[Tally]) -> Tally:
    return Tally(
        sum(tally.seeds for tally in tallies),
        sum(tally.virtual_seconds for tally in tallies),
        sum(tally.violations for tally in tallies),
    )


def draw(random: Random) -> tuple[str, Job]:
    """A simulator, a profile, and a seed that has never run."""
    (target,) = random.choices(list(SHARES), list(SHARES.values()))
    profiles = list(BATCHES[target].profiles)
    (profile,) = random.choices(profiles, [WEIGHTS[target].get(name, 1) for name in profiles])
    return target, Job(random.getrandbits(SEEDS_BITS), profile)


def one(target: str, job: Job) -> Outcome:
    """Runs in a worker process."""
    return BATCHES[target].one(job)


def soak(
    record: Record,
    pool: Executor,
    *,
    jobs: int,
    is_over: Callable[[int], bool],
    save: Callable[[], None],
    random: Random,
    revision: str,
) -> int:
    """Run seeds until `is_over`, called with the number of seeds begun, is true. Running seeds are awaited."""
    running: dict[Future[Outcome], str] = {}
    begun, saved, last = 0, time.monotonic(), time.monotonic()
    while running or not is_over(begun):
        while len(running) < jobs and not is_over(begun):
            target, job = draw(random)
            running[pool.submit(one, target, job)] = target
            begun += 1
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            target = running.pop(future)
            outcome = future.result()
            record.note(BATCHES[target], outcome, revision)
            if outcome.failure is not None:
                print(BATCHES[target].report([outcome]), flush=True)
                saved = 0.0
        now = time.monotonic()
        record.seconds += now - last
        last = now
        if now - saved > SAVED_S:
            saved = now
            save()
    return begun


def _ignore_interrupts() -> None:
    """Ctrl-C reaches all processes of the terminal; the parent decides what to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _revision() -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make sim-soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=float, default=1.0, help="how long to run (default: 1)")
    parser.add_argument("--seeds", type=int, help="end after this many seeds, if that is sooner")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--state", type=Path, default=Path("out/soak.json"), help="where the figures are kept")
    options = parser.parse_args(arguments)
    os.nice(19)
    record = Record.read(options.state)
    before = len(record.failures)
    deadline = time.monotonic() + options.hours * 3600

    pool: Executor | None = None
    begun = 0
    try:
        while time.monotonic() < deadline and (options.seeds is None or begun < options.seeds):
            left = SEEDS_PER_PROCESS * options.jobs
            left = left if options.seeds is None else min(left, options.seeds - begun)
            # Not max_tasks_per_child: a pool that replaces its processes can come to a standstill (CPython issue 115634).
            pool = ProcessPoolExecutor(options.jobs, get_context("spawn"), _ignore_interrupts)
            begun += soak(
                record,
                pool,
                jobs=options.jobs,
                is_over=lambda count, left=left: count >= left or time.monotonic() >= deadline,  # type: ignore[misc]
                save=lambda: record.write(options.state),
                random=SystemRandom(),
                revision=_revision(),
            )
            pool.shutdown()
    except KeyboardInterrupt:
        print("interrupted: the seeds under way are dropped", flush=True)
    finally:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        record.write(options.state)
        print(record.summary(), flush=True)
    return 1 if len(record.failures) > before else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    sys.exit(main())
