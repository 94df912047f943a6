"""A leader's view of a follower: `match` never falls, `next` stays above it, and bytes in flight are counted exactly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.log.progress import Flow, Progress


def replicating(match: int = 10) -> Progress:
    progress = Progress(match + 1, now=0.0)
    progress.acknowledged(match, 0.0)
    assert progress.flow is Flow.REPLICATE
    return progress


def test_a_new_follower_is_probed_with_one_message_at_a_time() -> None:
    progress = Progress(11, now=0.0)
    progress.sent(20, 1000, 1.0)

    assert progress.flow is Flow.PROBE
    assert progress.next == 11, "nothing is assumed before the answer"
    assert progress.waiting_since == 1.0
    assert not progress.in_flight


def test_an_acknowledged_probe_starts_replication() -> None:
    progress = Progress(11, now=0.0)
    progress.sent(20, 1000, 1.0)

    assert progress.acknowledged(20, 2.0)
    assert (progress.flow, progress.match, progress.next, progress.waiting_since) == (Flow.REPLICATE, 20, 21, None)


def test_an_acknowledgement_of_less_than_was_probed_for_does_not_end_the_probe() -> None:
    progress = Progress(11, now=0.0)

    assert progress.acknowledged(5, 1.0)
    assert (progress.flow, progress.match, progress.next) == (Flow.PROBE, 5, 11)


def test_a_window_is_filled_ahead_of_acknowledgements_and_freed_by_them() -> None:
    progress = replicating()
    for last in (20, 30, 40):
        progress.sent(last, 100, 1.0)
    assert (progress.next, progress.in_flight_bytes, len(progress.in_flight)) == (41, 300, 3)

    assert progress.acknowledged(30, 2.0)
    assert (progress.match, progress.next, progress.in_flight_bytes) == (30, 41, 100)
    assert progress.waiting_since == 2.0, "for the rest"
    assert progress.acknowledged(40, 3.0)
    assert progress.waiting_since is None


def test_the_wait_is_measured_from_the_oldest_message_without_an_answer() -> None:
    progress = replicating()
    progress.sent(20, 1, 5.0)
    progress.sent(30, 1, 6.0)

    assert progress.waiting_since == 5.0


def test_an_older_acknowledgement_changes_nothing() -> None:
    progress = replicating(10)

    assert not progress.acknowledged(7, 1.0)
    assert (progress.match, progress.next) == (10, 11)


def test_a_rejection_of_an_index_acknowledged_since_is_ignored() -> None:
    """The defect that lost data in the stock engine: a late rejection moved `next` back below `match`."""
    progress = replicating(10)

    assert not progress.rejected(8, 3)
    assert not progress.rejected(10, 3)
    assert (progress.flow, progress.match, progress.next) == (Flow.REPLICATE, 10, 11)


def test_a_rejection_of_something_in_flight_starts_a_probe_at_the_hint() -> None:
    progress = replicating(10)
    progress.sent(20, 100, 1.0)
    progress.sent(30, 100, 1.0)

    assert progress.rejected(20, 15)
    assert (progress.flow, progress.next, progress.in_flight_bytes, len(progress.in_flight)) == (Flow.PROBE, 15, 0, 0)


def test_a_hint_below_match_or_above_the_rejected_entry_is_ignored() -> None:
    progress = replicating(10)
    progress.sent(20, 100, 1.0)
    assert progress.rejected(15, 2)
    assert progress.next == 11

    probing = Progress(50, now=0.0)
    assert probing.rejected(49, 1000)
    assert probing.next == 49


def test_only_the_answer_to_the_current_probe_moves_it() -> None:
    """Several rejections of pipelined messages arrive in a row: the first one decides."""
    progress = Progress(50, now=0.0)
    progress.sent(60, 1, 0.0)

    assert not progress.rejected(60, 61)
    assert progress.rejected(49, 20)
    assert not progress.rejected(55, 51), "a later answer of the same flight cannot raise `next` again"
    assert progress.next == 20


def test_a_follower_waiting_for_a_snapshot_gets_nothing_else_and_rejections_are_ignored() -> None:
    progress = replicating(10)
    progress.sent(20, 100, 1.0)
    progress.offer_snapshot()

    assert (progress.flow, progress.in_flight_bytes) == (Flow.SNAPSHOT, 0)
    assert not progress.rejected(20, 5)
    assert progress.flow is Flow.SNAPSHOT


def test_an_acknowledged_snapshot_starts_replication_after_it() -> None:
    progress = Progress(5, now=0.0)
    progress.offer_snapshot()

    assert progress.acknowledged(100, 1.0)
    assert (progress.flow, progress.match, progress.next) == (Flow.REPLICATE, 100, 101)


events = st.one_of(
    st.tuples(st.just("sent"), st.integers(0, 5), st.integers(0, 100)),
    st.tuples(st.just("ack"), st.integers(0, 60), st.just(0)),
    st.tuples(st.just("reject"), st.integers(0, 60), st.integers(0, 60)),
    st.tuples(st.just("restart"), st.just(0), st.just(0)),
    st.tuples(st.just("snapshot"), st.just(0), st.just(0)),
)


@given(st.lists(events, max_size=60))
def test_match_never_falls_next_stays_above_it_and_bytes_in_flight_are_those_of_its_messages(
    history: list[tuple[str, int, int]],
) -> None:
    progress = Progress(20, now=0.0)
    for now, (what, first, second) in enumerate(history):
        match = progress.match
        if what == "sent" and progress.flow is not Flow.SNAPSHOT:
            progress.sent(progress.next - 1 + first, second, now)
        elif what == "ack":
            progress.acknowledged(first, now)
        elif what == "reject":
            progress.rejected(first, second)
        elif what == "restart":
            progress.restart(progress.match + 1 if progress.match else progress.next)
        elif what == "snapshot":
            progress.offer_snapshot()

        assert progress.match >= match
        assert progress.next > progress.match
        assert progress.next >= 1
        assert progress.in_flight_bytes == sum(size for _, size in progress.in_flight)
        assert progress.flow is Flow.REPLICATE or not progress.in_flight
