"""Who may run beside whom at an endpoint."""

from typing import cast

import pytest

from holdfast.cluster.handlers.attempts import Owner, Ticket
from holdfast.cluster.handlers.queue import Turns, suspects_max

NOBODY = cast(Owner, None)


def ticket(name: str, losses: int = 0) -> Ticket:
    return Ticket(NOBODY, name.encode(), 1, None, losses)


def start_all(turns: Turns) -> list[str]:
    started = []
    while (each := turns.take()) is not None:
        turns.began(each.id, each.losses)
        started.append(each.id.decode())
    return started


@pytest.mark.parametrize(("losses", "beside"), [(0, 0), (1, 0), (2, 64), (3, 8), (4, 1), (5, 1), (50, 1)])
def test_the_more_streams_were_lost_the_fewer_suspects_run_at_a_time(losses: int, beside: int) -> None:
    assert suspects_max(losses) == beside


def test_one_that_was_hit_often_runs_without_other_suspects_and_beside_everybody_else() -> None:
    turns = Turns()
    for each in (ticket("culprit", 4), ticket("plain"), ticket("innocent", 4), ticket("other", 1)):
        turns.add(each)

    assert start_all(turns) == ["culprit", "plain", "other"]
    assert len(turns) == 1 and b"innocent" in turns
    turns.ended(b"culprit")
    assert start_all(turns) == ["innocent"]


def test_the_one_that_was_hit_least_often_goes_first() -> None:
    turns = Turns()
    turns.add(ticket("often", 4))
    turns.add(ticket("seldom", 2))

    assert start_all(turns) == ["seldom"]
    turns.ended(b"seldom")
    assert start_all(turns) == ["often"]


def test_many_that_were_hit_together_do_not_wait_for_one_another_one_by_one() -> None:
    turns = Turns()
    for number in range(100):
        turns.add(ticket(f"s{number}", 2))

    assert len(start_all(turns)) == 64
    turns.ended(b"s0")
    assert start_all(turns) == ["s64"]


def test_a_newer_ticket_takes_the_place_of_the_older_one() -> None:
    turns = Turns()
    turns.add(ticket("a", 1))
    turns.add(ticket("a", 2)._replace(epoch=2))

    assert [each.epoch for each in turns] == [2] and len(turns) == 1
    turns.remove(b"a")
    assert not turns and turns.get(b"a") is None


def test_nobody_waits_for_a_suspect_that_has_to_wait() -> None:
    turns = Turns()
    turns.add(ticket("culprit", 4))
    assert start_all(turns) == ["culprit"]
    turns.add(ticket("innocent", 4))

    assert turns.is_next(0) and not turns.is_next(2) and not turns.is_next(4)
    turns.add(ticket("plain"))
    assert not turns.is_next(0)
