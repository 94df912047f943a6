"""Exponential backoff: how long to pause before the next try. It knows no clock, and never waits itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from random import Random

DOUBLINGS_MAX: Final = 60  # Many more would overflow; far fewer reach any sensible maximum.


def backoff(first: float, doublings: int, longest: float) -> float:
    """The pause `first`, doubled so often, and never more than `longest`. All pauses are in the caller's unit."""
    assert doublings >= 0, "the first pause is not doubled"
    return min(first * 2.0 ** min(doublings, DOUBLINGS_MAX), longest)


def with_jitter(pause: float, rng: Random) -> float:
    """Between half the pause and all of it, so that those who failed together do not retry together."""
    return pause * (0.5 + rng.random() / 2)
