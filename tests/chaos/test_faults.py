"""The faults of whole clusters: a short run has some of each family, and a kill can be aimed."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path

from holdfast.chaos.cluster import NodeCluster
from holdfast.chaos.faults import Family, Turn, a_round, shuffled
from holdfast.chaos.faulty_node import Bends, Moment, held, holds
from holdfast.chaos.nemesis import Kill, Target, Together
from holdfast.chaos.snapshot_faults import OUTAGES, StoreOutage


def a_whole_round(tmp_path: Path, *, nodes: int = 3) -> list[Turn]:
    cluster = NodeCluster(tmp_path, nodes=nodes)
    cluster.has_store, cluster.small_disk = True, "n3"
    return a_round(cluster, random.Random(1))


def test_a_round_has_every_fault_and_half_of_one_has_half_of_each_family(tmp_path: Path) -> None:
    every = a_whole_round(tmp_path)
    sizes = Counter(turn.family for turn in every)
    assert set(sizes) == set(Family)

    for seed in range(50):
        order = shuffled(every, random.Random(seed))

        assert sorted(map(id, order)) == sorted(map(id, every))
        half = Counter(turn.family for turn in order[: len(order) // 2])
        assert all(abs(half[family] - size / 2) <= 1.5 for family, size in sizes.items()), half


def test_two_of_five_are_killed_where_there_are_five(tmp_path: Path) -> None:
    names = [[turn.fault.name for turn in a_whole_round(tmp_path, nodes=nodes)] for nodes in (3, 5)]

    assert "kill minority" not in names[0] and "kill minority" in names[1]


def test_where_there_is_no_store_its_faults_are_left_out(tmp_path: Path) -> None:
    names = {turn.fault.name for turn in a_round(NodeCluster(tmp_path), random.Random(1))}

    assert not any("S3" in name or "upload" in name for name in names)


def test_no_gap_is_measured_where_the_fault_takes_its_own_time(tmp_path: Path) -> None:
    slow = {turn.fault.name for turn in a_whole_round(tmp_path) if not turn.fault.instant}

    assert slow == {"rolling restart", "drain and restart", "kill in install"}


def test_an_outage_of_the_store_alone_excuses_nothing() -> None:
    chance = random.Random(1)

    assert not any(StoreOutage(manner, chance).excuses for manner in OUTAGES)
    assert Together(StoreOutage("silent", chance), Kill(Target.LEADER, chance)).excuses


def wait_until_held(bends: Bends) -> None:
    deadline = time.monotonic() + 30
    while not bends.is_held:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_process_is_held_at_the_moment_that_is_meant_and_at_no_other(tmp_path: Path) -> None:
    ours, theirs = Bends(tmp_path / "bends"), Bends(tmp_path / "bends")
    seen: list[str] = []
    work = held(lambda: seen.append("done"), theirs, before=Moment.UPLOAD_BEGINS, after=Moment.UPLOAD_DONE)
    work()
    ours.hold_at(Moment.CUT_NAMED)
    work()
    assert seen == ["done", "done"] and not ours.is_held

    ours.hold_at(Moment.UPLOAD_DONE)
    thread = threading.Thread(target=work)
    thread.start()
    wait_until_held(ours)
    assert seen == ["done"] * 3  # Only at its end.
    ours.hold_at(Moment.NONE)
    thread.join(30)
    assert not thread.is_alive() and not ours.is_held


def test_a_bent_clock_and_a_hold_do_not_touch_each_other(tmp_path: Path) -> None:
    bends = Bends(tmp_path / "bends")

    bends.bend(clock_s=-5.0, disk_s=0.25)
    bends.hold_at(Moment.STAGED)
    bends.bend(clock_s=7.0, disk_s=0.0)

    assert (bends.clock_s, bends.disk_s) == (7.0, 0.0)


def test_a_node_reaches_every_named_moment() -> None:
    """The held steps have the names of today's code, and no moment is missing."""
    assert all(callable(getattr(hold.owner, hold.name)) for hold in holds())
    assert {moment for hold in holds() for moment in (hold.before, hold.after)} == set(Moment)
