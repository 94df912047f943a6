"""Which attempts may run concurrently at an endpoint, and how the culprit of a process's end is found."""

from typing import cast

import pytest

from holdfast.cluster.handlers.attempts import Owner, Ticket
from holdfast.cluster.handlers.queue import FORGIVEN_S, PAUSE_S_MAX, Turns, suspects_max
from holdfast.sdk.ids import InvocationId

NOBODY = cast(Owner, None)


def ticket(name: str, losses: int = 0, handler: str = "work") -> Ticket:
    return Ticket(NOBODY, InvocationId(name.encode()), 1, None, ("Service", handler), losses)


class Process:
    """Turns with their process: it runs the attempts that it gets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.turns = Turns(lambda: self.now)
        self.running: dict[InvocationId, int] = {}

    def add(self, *tickets: Ticket) -> None:
        for each in tickets:
            self.turns.add(each)

    def start_all(self) -> list[str]:
        started = []
        while (each := self.turns.take()) is not None:
            beside = self.running[each.id] = self.turns.beside(each)
            self.turns.began(each.id, each.handler, beside)
            started.append(each.id.decode())
        return started

    def ended(self, name: str) -> None:
        del self.running[InvocationId(name.encode())]
        self.turns.ended(InvocationId(name.encode()))

    def crash(self) -> str | None:
        """The process ends silently. Returns the culprit, if found."""
        culprit = self.turns.crashed(self.running)
        for each in self.running:
            self.turns.ended(each)
        self.running.clear()
        return culprit.decode() if culprit is not None else None


@pytest.fixture
def it() -> Process:
    return Process()


@pytest.mark.parametrize(("losses", "beside"), [(0, 0), (1, 0), (2, 64), (3, 8), (4, 1), (5, 1), (50, 1)])
def test_the_more_streams_were_lost_the_fewer_suspects_run_at_a_time(losses: int, beside: int) -> None:
    assert suspects_max(losses) == beside


def test_a_suspect_that_was_hit_often_runs_alone(it: Process) -> None:
    it.add(ticket("culprit", 4), ticket("plain"), ticket("innocent", 4), ticket("other", 1))

    assert it.start_all() == ["culprit"]
    it.ended("culprit")
    assert it.start_all() == ["innocent"]
    it.ended("innocent")
    assert it.start_all() == ["plain", "other"]


def test_suspects_that_were_hit_less_often_run_beside_all_others(it: Process) -> None:
    it.add(ticket("suspect", 3), ticket("plain"))

    assert it.start_all() == ["suspect", "plain"]


def test_the_one_that_was_hit_least_often_goes_first(it: Process) -> None:
    it.add(ticket("often", 4), ticket("seldom", 2))

    assert it.start_all() == ["seldom"]
    it.ended("seldom")
    assert it.start_all() == ["often"]


def test_suspects_that_were_hit_together_do_not_run_one_by_one(it: Process) -> None:
    it.add(*(ticket(f"s{number}", 2) for number in range(100)))

    assert len(it.start_all()) == 64
    it.ended("s0")
    assert it.start_all() == ["s64"]


def test_a_newer_ticket_takes_the_place_of_the_older_one(it: Process) -> None:
    it.add(ticket("a", 1), ticket("a", 2)._replace(epoch=2))

    turns = it.turns
    assert [each.epoch for each in turns] == [2] and len(turns) == 1
    turns.remove(InvocationId(b"a"))
    assert not turns and turns.get(InvocationId(b"a")) is None


def test_no_attempt_waits_for_a_suspect_that_is_held(it: Process) -> None:
    it.add(*(ticket(f"s{number}", 3) for number in range(9)))
    assert len(it.start_all()) == 8

    turns = it.turns
    assert (
        turns.is_next(ticket("new")) and not turns.is_next(ticket("hit", 2)) and not turns.is_next(ticket("often", 4))
    )
    it.add(ticket("plain"))
    assert not turns.is_next(ticket("new"))


def test_a_process_that_ends_often_runs_fewer_attempts_until_a_crash_identifies_the_culprit(it: Process) -> None:
    began = []
    for crash in range(6):
        it.add(*(ticket(f"{crash}-{number}", handler="bad" if number == 0 else "good") for number in range(100)))
        began.append(len(it.start_all()))
        assert it.crash() == ("5-0" if crash == 5 else None)
        it.turns.clear()
    assert began == [100, 100, 100, 64, 8, 1]


def test_crashes_of_more_than_a_minute_ago_do_not_count(it: Process) -> None:
    for _ in range(20):
        it.add(ticket("a"), ticket("b"))
        assert it.start_all() == ["a", "b"] and it.crash() is None
        it.now += 30


def _convict(it: Process) -> None:
    """Convict the handler `bad`."""
    for number in range(2):
        it.add(ticket(f"evidence{number}", 4, "bad"))
        assert it.start_all() == [f"evidence{number}"] and it.crash() == f"evidence{number}"
        it.now += 0.1


def test_a_handler_that_ends_its_process_when_it_runs_alone_runs_alone_from_then_on(it: Process) -> None:
    it.add(ticket("waits", handler="bad"))  # It arrived before the conviction.
    _ = it.turns.take()
    _convict(it)
    it.add(ticket("waits", handler="bad"), ticket("good"))

    assert it.turns.convicted == {"Service/bad": 2}
    assert not it.turns.is_next(ticket("bad", handler="bad")) and it.turns.is_next(ticket("another", 2))
    assert it.start_all() == ["good"], "the handler pauses"
    it.now += it.turns.due_in() or 0
    assert it.start_all() == ["waits"], "those that are not watched need not end first: the endpoint sees to that"
    it.add(ticket("later"))
    assert it.start_all() == []
    it.ended("waits")
    assert it.start_all() == ["later"]


def test_the_pauses_of_a_convicted_handler_grow_and_its_crashes_slow_no_other_handler(it: Process) -> None:
    _convict(it)
    pauses = []
    for number in range(10):
        it.add(ticket(f"bad{number}", handler="bad"), ticket(f"good{number}"))
        assert it.start_all() == [f"good{number}"]
        it.ended(f"good{number}")
        pause = it.turns.due_in()
        assert pause is not None
        pauses.append(round(pause))
        it.now += pause
        assert it.start_all() == [f"bad{number}"] and it.crash() == f"bad{number}"
    assert pauses[:4] == [1, 2, 4, 8] and pauses[-1] == PAUSE_S_MAX
    it.add(*(ticket(f"g{number}") for number in range(100)))
    assert len(it.start_all()) == 100


def test_others_get_as_much_time_as_the_attempt_of_a_convicted_handler_took(it: Process) -> None:
    _convict(it)
    it.add(ticket("one", handler="bad"), ticket("two", handler="bad"))
    it.now += 5
    assert it.start_all() == ["one"]
    it.now += 20
    it.ended("one")

    assert it.start_all() == [] and it.turns.due_in() == 20


def test_a_handler_is_forgiven_when_it_behaved_for_a_while(it: Process) -> None:
    _convict(it)
    it.add(ticket("a", handler="bad"), ticket("b", handler="bad"))
    it.now += FORGIVEN_S + 1

    assert it.start_all() == ["a", "b"] and it.turns.convicted == {} and it.turns.due_in() is None


def test_a_single_crash_convicts_no_handler(it: Process) -> None:
    """An operator may have killed the process."""
    it.add(ticket("a", 4, "bad"))
    assert it.start_all() == ["a"] and it.crash() == "a"
    it.now += FORGIVEN_S + 1
    it.add(ticket("b", 4, "bad"))
    assert it.start_all() == ["b"] and it.crash() == "b"

    assert it.turns.convicted == {}


# -- why somebody waits ----------------------------------------------------------------------------------------------


def test_an_attempt_of_a_convicted_handler_is_told_why_it_waits_and_behind_how_many(it: Process) -> None:
    _convict(it)
    it.add(*(ticket(f"b{number}", handler="bad") for number in range(3)))

    last, first = it.turns.why_waits(InvocationId(b"b2")), it.turns.why_waits(InvocationId(b"b0"))

    assert last.startswith("its handler ended the process 2 times while nothing else ran in it")
    assert "attempts run one at a time" in last and last.endswith("2 are ahead of it")
    assert first.endswith("it is the next")


def test_a_suspect_is_told_behind_how_many_it_waits_in_the_order_in_which_they_go(it: Process) -> None:
    it.add(ticket("alone", 4))
    assert it.start_all() == ["alone"]
    it.add(ticket("often", 4), ticket("seldom", 2), ticket("also often", 4))

    said = it.turns.why_waits(InvocationId(b"also often"))

    assert said.startswith("its process ended during its last 4 attempts, so attempts run one at a time")
    assert said.endswith("2 are ahead of it")
    assert it.turns.why_waits(InvocationId(b"often")).endswith("1 is ahead of it")
    assert "at most 64 attempts run at a time" in it.turns.why_waits(InvocationId(b"seldom"))
    assert it.turns.why_waits(InvocationId(b"seldom")).endswith("it is the next")


def test_others_are_told_what_they_wait_for(it: Process) -> None:
    it.add(ticket("alone", 4))
    assert it.start_all() == ["alone"]
    it.add(ticket("plain"), ticket("second"))

    said = it.turns.why_waits(InvocationId(b"second"))

    assert said == "an attempt that may end the process runs alone, for 30 s at most; 1 is ahead of it"
    it.ended("alone")
    assert it.turns.why_waits(InvocationId(b"second")) == "", "it waits for room only"
    assert it.turns.why_waits(InvocationId(b"nobody")) == ""


def test_a_process_that_ends_often_is_named_as_the_reason(it: Process) -> None:
    for crash in range(3):
        it.add(*(ticket(f"{crash}-{number}") for number in range(100)))
        it.start_all()
        it.crash()
        it.turns.clear()
    it.add(*(ticket(f"s{number}") for number in range(70)))
    assert len(it.start_all()) == 64

    assert it.turns.why_waits(InvocationId(b"s69")) == (
        "its process ended 3 times or more within a minute, so at most 64 attempts run at a time there; 5 are ahead of it"
    )
