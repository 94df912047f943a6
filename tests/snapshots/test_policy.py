"""Tables: when to cut, what to keep and how far to trim."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.snapshots.policy import Kept, Policy, Progress, names_to_delete, reason_to_cut, retry_delay_s, trim_point

POLICY = Policy(
    entries_max=1000, bytes_max=5000, age_max_s=100, interval_min_s=10, retry_s=5, retry_max_s=60, keep=2,
    tail_entries=50, lag_entries_max=200, log_bytes_max=10_000,
)  # fmt: skip
START = Progress(applied=100, log_bytes=0, snapshot_index=100, snapshot_at=0.0)


@pytest.mark.parametrize(
    ("progress", "now", "due"),
    [
        (START, 1e6, None),  # Nothing was applied, so the old snapshot is up to date.
        (START._replace(applied=101), 99, None),
        (START._replace(applied=101), 100, "100 s"),
        (START._replace(applied=1099), 50, None),
        (START._replace(applied=1100), 50, "1000 entries"),
        (START._replace(applied=1100), 9, None),  # Not so soon after the last one,
        (START._replace(applied=1100, snapshot_index=0), 9, "1100 entries"),  # unless there is none.
        (START._replace(applied=200, log_bytes=4999), 50, None),
        (START._replace(applied=200, log_bytes=5000), 50, "5000 bytes"),
        (START._replace(applied=1100, failures=1, failed_at=50), 54, None),
        (START._replace(applied=1100, failures=1, failed_at=50), 55, "1000 entries"),
        (START._replace(applied=1100, failures=3, failed_at=50), 69, None),
        (START._replace(applied=1100, failures=3, failed_at=50), 70, "1000 entries"),
        (
            START._replace(applied=1100, failures=99, failed_at=50),
            110,
            "1000 entries",
        ),  # Hours later, still once a minute.
    ],
)
def test_a_cut_is_due_by_entries_bytes_or_age(progress: Progress, now: float, due: str | None) -> None:
    reason = reason_to_cut(POLICY, progress, now)

    assert reason is None if due is None else reason is not None and due in reason


def test_the_delay_between_failures_doubles_up_to_its_bound() -> None:
    assert [retry_delay_s(POLICY, failures) for failures in (1, 2, 3, 4, 5, 1000)] == [5, 10, 20, 40, 60, 60]


def named(*numbers: tuple[int, int], bad: tuple[tuple[int, int], ...] = ()) -> list[Kept]:
    return [Kept(f"{term}-{index}", term, index, (term, index) not in bad) for term, index in numbers]


@pytest.mark.parametrize(
    ("snapshots", "pinned", "deleted"),
    [
        ([], (), []),
        (named((1, 10)), (), []),
        (named((1, 10), (1, 20)), (), []),
        (named((1, 10), (2, 30), (1, 20)), (), ["1-10"]),
        (named((1, 10), (1, 20), (2, 30)), ("1-10",), []),
        # A later term counts as newer, whatever the index.
        (named((1, 900), (2, 30), (3, 40)), (), ["1-900"]),
        # Torn ones do not count as kept, and stay while they are newer than the kept ones.
        (named((1, 10), (1, 20), (1, 30), (1, 40), bad=((1, 40),)), (), ["1-10"]),
        (named((1, 10), (1, 20), (1, 30), (1, 40), bad=((1, 20),)), (), ["1-20", "1-10"]),
        (named((1, 10), (1, 20), (1, 30), bad=((1, 10), (1, 20), (1, 30))), (), []),
    ],
)
def test_snapshots_older_than_the_newest_intact_ones_are_deleted(
    snapshots: list[Kept], pinned: tuple[str, ...], deleted: list[str]
) -> None:
    assert names_to_delete(POLICY, snapshots, pinned=pinned) == deleted


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 99)), unique=True), st.data())
def test_a_deposed_leader_with_an_old_listing_never_deletes_the_newest(
    numbers: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Whatever part of the snapshots it sees, the newest `keep` of all remain."""
    seen = data.draw(st.lists(st.sampled_from(numbers), unique=True)) if numbers else []

    deleted = names_to_delete(POLICY, named(*seen))

    newest = {f"{term}-{index}" for term, index in sorted(numbers)[-POLICY.keep :]}
    assert newest.isdisjoint(deleted)


@pytest.mark.parametrize(
    ("durable", "applied", "base", "log_bytes", "matches", "point"),
    [
        (0, 500, 0, 0, (), None),  # No snapshot, no trimming.
        (500, 600, 0, 0, (), 450),  # The tail stays.
        (500, 600, 450, 0, (), None),
        (500, 400, 0, 0, (), 350),  # A snapshot that came from elsewhere is ahead of what we applied.
        (40, 600, 0, 0, (), None),
        (500, 600, 0, 0, (600, 600), 450),
        (500, 600, 0, 0, (600, 420), 420),  # The trim waits for a slow follower,
        (500, 600, 0, 0, (600, 10), 300),  # up to a point.
        (500, 600, 0, 10_001, (600, 10), 500),  # If the log is too large, it waits for none,
        (0, 600, 0, 10_001, (600, 10), None),  # but it never trims without a snapshot.
    ],
)
def test_the_log_is_trimmed_up_to_a_durable_snapshot_and_leaves_a_tail(
    durable: int, applied: int, base: int, log_bytes: int, matches: tuple[int, ...], point: int | None
) -> None:
    found = trim_point(
        POLICY, durable_index=durable, applied=applied, base=base, log_bytes=log_bytes, connected_matches=matches
    )

    assert found == point


@given(*(st.integers(0, 10**6) for _ in range(4)), st.lists(st.integers(0, 10**6), max_size=4))
def test_the_log_is_never_trimmed_beyond_a_durable_snapshot(
    durable: int, applied: int, base: int, log_bytes: int, matches: list[int]
) -> None:
    point = trim_point(
        POLICY, durable_index=durable, applied=applied, base=base, log_bytes=log_bytes, connected_matches=matches
    )

    assert point is None or base < point <= min(durable, applied)


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"entries_max": 0}, {"tail_entries": -1}, {"retry_s": 0}])
def test_bounds_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        replace(POLICY, **wrong)
