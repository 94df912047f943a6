"""The named steps of a snapshot and of a backup, and a process that may die before or after each of them.

The real code runs, with each step wrapped. So a crash falls between a file and its name, between a snapshot and the log
that learns of it, between a new state and the log that continues from it, or between two parts of a backup.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from holdfast.cluster.backup import restoring
from holdfast.cluster.backup.copies import Copies
from holdfast.cluster.backup.job import Backups
from holdfast.cluster.backup.restoring import Plan
from holdfast.cluster.partition.machine import PartitionMachine
from holdfast.cluster.snapshotting import catchup, keeper
from holdfast.cluster.snapshotting import service as snapshots
from holdfast.cluster.snapshotting.catchup import CatchUp
from holdfast.cluster.snapshotting.keeper import Keeper
from holdfast.log.host import Host
from holdfast.log.node import Group
from holdfast.snapshots.restore import Staged

if TYPE_CHECKING:
    from tests.sim.cluster.world import World

#: A process that always dies makes no progress.
CRASHES_MAX: Final = 0.5
#: (name, place, name at that place, relative likelihood of a crash there: some steps are rare)
STEPS: Final = (
    ("cut", keeper, "cut_blocking", 1.0),
    ("verify", keeper, "verify", 1.0),
    ("accept", Keeper, "accept", 1.0),
    ("offer", Keeper, "offer", 1.0),
    ("trim", Group, "trim", 2.0),
    ("prune", Keeper, "_prune", 1.0),
    ("publish", Keeper, "_publish", 2.0),
    ("restore", snapshots, "restore_blocking", 1.0),
    ("fetch", CatchUp, "fetch", 6.0),
    ("stage", catchup, "stage", 8.0),
    ("install", Group, "install", 8.0),
    ("move", catchup, "move_into_place", 8.0),
    ("swap", PartitionMachine, "swap", 8.0),
    ("rename", Staged, "swap", 1.0),
    ("fill", Host, "fill", 100.0),
    ("hold", Copies, "hold", 6.0),
    ("copy", Copies, "begin", 6.0),
    ("release", Copies, "release", 8.0),
    ("send", Copies, "send", 8.0),
    ("upload", Copies, "_upload", 8.0),
    ("finish", Backups, "_finish", 40.0),
    ("fetch part", restoring, "fetch_part", 6.0),
    ("plan", restoring, "_write", 8.0),
    ("found", restoring, "write_founding", 10.0),
    ("check", Plan, "check", 8.0),
    ("formed", Plan, "done", 8.0),
)


@contextmanager
def watched(world: World) -> Iterator[None]:
    """During this block, processes die at the steps of snapshots with the probability of the profile."""
    with ExitStack() as stack:
        for name, owner, attribute, weight in STEPS:
            original = getattr(owner, attribute)
            stack.enter_context(patch.object(owner, attribute, _wrapped(world, name, original, weight)))
        yield


def _wrapped(world: World, name: str, original: Callable[..., Any], weight: float) -> Callable[..., Any]:
    def reach(moment: str) -> None:
        process = world.running
        if (
            process is not None
            and process.up
            and world.chance(f"crashed {moment} {name}", min(world.profile.crashes * weight, CRASHES_MAX))
        ):
            process.crash()

    if inspect.iscoroutinefunction(original):

        @wraps(original)
        async def step_later(*args: Any, **options: Any) -> Any:
            reach("before")
            result = await original(*args, **options)
            reach("after")
            return result

        return step_later

    @wraps(original)
    def step(*args: Any, **options: Any) -> Any:
        reach("before")
        world.counts[f"step: {name}"] += 1
        result = original(*args, **options)
        reach("after")
        return result

    return step
