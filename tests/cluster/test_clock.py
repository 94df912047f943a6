"""The node's clock while the wall clock is changed."""

from __future__ import annotations

from holdfast.cluster.clock import Clock


class World:
    def __init__(self) -> None:
        self.steady = 5_000.0
        self.wall = 1_700_000_000_000.0

    def pass_ms(self, ms: float) -> None:
        self.steady += ms
        self.wall += ms

    def clock(self) -> Clock:
        return Clock(steady=lambda: self.steady, wall=lambda: self.wall)


def test_it_shows_the_wall_clock_s_time() -> None:
    world = World()
    clock = world.clock()

    world.pass_ms(90_000)

    assert clock.now_ms() == 1_700_000_090_000


def test_a_wall_clock_set_ahead_fires_nothing_early() -> None:
    world = World()
    clock = world.clock()
    start = clock.now_ms()

    world.wall += 3_600_000
    passed = 0
    for _ in range(100):
        world.pass_ms(100)
        passed += 100
        assert clock.now_ms() - start <= passed * 1.001

    assert clock.now_ms() - start >= passed


def test_a_wall_clock_set_back_stalls_nothing() -> None:
    world = World()
    clock = world.clock()
    start = before = clock.now_ms()

    world.wall -= 3_600_000
    for _ in range(100):
        world.pass_ms(100)
        now = clock.now_ms()
        assert now > before
        before = now

    assert before - start >= 9_990


def test_it_follows_a_corrected_wall_clock_slowly() -> None:
    world = World()
    clock = world.clock()

    world.wall += 40
    for _ in range(200):
        world.pass_ms(1000)
        clock.now_ms()

    assert clock.now_ms() == int(world.wall)
