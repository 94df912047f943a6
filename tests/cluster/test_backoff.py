"""The pauses between tries double up to a bound."""

from __future__ import annotations

from random import Random

from holdfast.cluster.backoff import backoff, with_jitter


def test_pauses_double_up_to_their_bound() -> None:
    assert [backoff(0.5, doublings, 3.0) for doublings in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_any_number_of_failures_gives_a_pause() -> None:
    assert backoff(0.01, 10**9, 60.0) == 60.0


def test_jitter_takes_at_most_half_of_a_pause() -> None:
    rng = Random(7)

    pauses = [with_jitter(10.0, rng) for _ in range(1000)]

    assert 5.0 <= min(pauses) < 5.5
    assert 9.5 < max(pauses) <= 10.0
