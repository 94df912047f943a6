"""One seed: a random run of a small cluster, or a script with random timing, then repair, then the final checks."""

from __future__ import annotations

from tests.sim.driver import PROFILES, Driver, heal
from tests.sim.oracle import Violation
from tests.sim.scripts import SCRIPTS
from tests.sim.world import Profile, World

__all__ = ["PROFILES", "run"]


def run(seed: int, profile: Profile) -> World:
    """The whole run of one seed. Raises Violation."""
    world = World(seed, profile)
    driver = Driver(world)
    script = SCRIPTS.get(profile.name)
    if script is None:
        driver.drive()
    else:
        script(driver)
    heal(world)
    # A last write through the leader: the group not only agrees, but works.
    for group in world.founders:
        for _ in range(20):
            leader = world.leader(group)
            operation = driver.operation(group, "write")
            if leader is not None:
                world.submit(leader, operation)
            world.run_until(world.now + 1.0)
            if operation.outcome == "ok":
                break
        else:
            raise Violation(f"group {group} accepts no writes after healing")
    heal(world)
    world.run_until(world.now + 4.0)
    heal(world)
    world.oracle.conclude()
    return world
