"""`python -m holdfast.chaos`: injects faults into a cluster of real processes under load, and gives a verdict.

    python -m holdfast.chaos --seconds 180 [--nodes 3|5] [--replication n] [--seed n] [--out DIR] [--only WORDS]

Exits with status 0 if no violation was found, else with 1 and an explanation. docs/chaos.md explains the report.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from pathlib import Path

from holdfast.chaos.soak import Plan, Soak


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.chaos", description="Faults on a cluster of real processes under load, and a verdict."
    )
    parser.add_argument("--seconds", type=float, default=180.0, help="how long faults happen (default 180)")
    parser.add_argument("--nodes", type=int, choices=(3, 5), default=3, help="nodes of the cluster (default 3)")
    parser.add_argument(
        "--replication", type=int, choices=(3, 5), help="replicas of each partition (default: one on each node)"
    )
    parser.add_argument("--seed", type=int, help="seed of all choices; timing still varies (default: random)")
    parser.add_argument("--out", type=Path, help="a new folder for everything recorded (default out/chaos-SEED)")
    parser.add_argument(
        "--only", metavar="WORDS", help="only faults whose name contains these words, such as 'kill leader'"
    )
    parser.add_argument("--no-s3", action="store_true", help="run without a shared snapshot store")
    options = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    plan = Plan(options.seconds, options.nodes, seed, options.only, options.replication, not options.no_s3)
    out = options.out or free_folder(Path("out"), seed)
    print(
        f"{plan.seconds:g} s of faults on {plan.nodes} nodes under load, seed {seed}; everything goes to {out}",
        flush=True,
    )
    try:
        result = asyncio.run(Soak(plan, out, show=lambda line: print(line, flush=True)).run())
    except KeyboardInterrupt:
        sys.exit(130)
    print(result)
    print(f"report: {out / 'report.html'}")
    sys.exit(0 if result.ok else 1)


def free_folder(parent: Path, seed: int) -> Path:
    """A new folder `chaos-SEED`. A run with the same seed never overwrites an older one."""
    number = 1
    while (folder := parent / (f"chaos-{seed}" if number == 1 else f"chaos-{seed}.{number}")).exists():
        number += 1
    return folder


if __name__ == "__main__":
    main()
