"""The queue of a deployment: its bound, which attempts may run at a time, and how the culprit of a process's end is found."""

from typing import cast

import pytest

from holdfast.cluster.handlers.attempts import Owner, Ticket
from holdfast.cluster.handlers.queue import FORGIVEN_S, PAUSE_S_MAX, Queue, Search, suspects_max
from holdfast.sdk.ids import DeploymentId, InvocationId

DP_1 = DeploymentId("dp_1")
DP_2 = DeploymentId("dp_2")

NOBODY = cast(Owner, None)


def ticket(name: str, losses: int = 0, handler: str = "work") -> Ticket:
    return Ticket(NOBODY, InvocationId(name.encode()), 1, None, ("Service", handler), losses)


class Process:
    """A queue with its process, which runs the attempts that it gets."""

    def __init__(self, waiting_max: int = 1000) -> None:
        self.now = 1000.0
        self.queue: Queue[Ticket, Owner] = Queue(lambda: self.now, waiting_max)
        self.running: dict[InvocationId, int] = {}

    def add(self, *tickets: Ticket) -> None:
        for each in tickets:
            self.queue.add(each)

    def start_all(self) -> list[str]:
        started = []
        while (each := self.queue.take()) is not None:
            beside = self.running[each.id] = self.queue.beside(each)
            self.queue.began(each.id, each.handler, beside)
            started.append(each.id.decode())
        return started

    def ended(self, name: str) -> None:
        del self.running[InvocationId(name.encode())]
        self.queue.ended(InvocationId(name.encode()))

    def crash(self) -> str | None:
        """The process ends silently. Returns the culprit, if found."""
        culprit = self.queue.crashed(self.running)
        for each in self.running:
            self.queue.ended(each)
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

    queue = it.queue
    assert [each.epoch for each in queue] == [2] and len(queue) == 1
    queue.remove(InvocationId(b"a"))
    assert not queue and queue.get(InvocationId(b"a")) is None


def test_no_attempt_waits_for_a_suspect_that_is_held(it: Process) -> None:
    it.add(*(ticket(f"s{number}", 3) for number in range(9)))
    assert len(it.start_all()) == 8

    queue = it.queue
    assert (
        queue.is_next(ticket("new")) and not queue.is_next(ticket("hit", 2)) and not queue.is_next(ticket("often", 4))
    )
    it.add(ticket("plain"))
    assert not queue.is_next(ticket("new"))


def test_a_process_that_ends_often_runs_fewer_attempts_until_a_crash_identifies_the_culprit(it: Process) -> None:
    began = []
    for crash in range(6):
        it.add(*(ticket(f"{crash}-{number}", handler="bad" if number == 0 else "good") for number in range(100)))
        began.append(len(it.start_all()))
        assert it.crash() == ("5-0" if crash == 5 else None)
        it.queue.clear()
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
    _ = it.queue.take()
    _convict(it)
    it.add(ticket("waits", handler="bad"), ticket("good"))

    assert it.queue.convicted == {"Service/bad": 2}
    assert not it.queue.is_next(ticket("bad", handler="bad")) and it.queue.is_next(ticket("another", 2))
    assert it.start_all() == ["good"], "the handler pauses"
    it.now += it.queue.due_in() or 0
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
        pause = it.queue.due_in()
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

    assert it.start_all() == [] and it.queue.due_in() == 20


def test_a_handler_is_forgiven_when_it_behaved_for_a_while(it: Process) -> None:
    _convict(it)
    it.add(ticket("a", handler="bad"), ticket("b", handler="bad"))
    it.now += FORGIVEN_S + 1

    assert it.start_all() == ["a", "b"] and it.queue.convicted == {} and it.queue.due_in() is None


def test_a_single_crash_convicts_no_handler(it: Process) -> None:
    """An operator may have killed the process."""
    it.add(ticket("a", 4, "bad"))
    assert it.start_all() == ["a"] and it.crash() == "a"
    it.now += FORGIVEN_S + 1
    it.add(ticket("b", 4, "bad"))
    assert it.start_all() == ["b"] and it.crash() == "b"

    assert it.queue.convicted == {}


# -- why somebody waits ----------------------------------------------------------------------------------------------


def test_an_attempt_of_a_convicted_handler_is_told_why_it_waits_and_behind_how_many(it: Process) -> None:
    _convict(it)
    it.add(*(ticket(f"b{number}", handler="bad") for number in range(3)))

    last, first = it.queue.why_waits(InvocationId(b"b2")), it.queue.why_waits(InvocationId(b"b0"))

    assert last.startswith("its handler ended the process 2 times while nothing else ran in it")
    assert "attempts run one at a time" in last and last.endswith("2 are ahead of it")
    assert first.endswith("it is the next")


def test_a_suspect_is_told_behind_how_many_it_waits_in_the_order_in_which_they_go(it: Process) -> None:
    it.add(ticket("alone", 4))
    assert it.start_all() == ["alone"]
    it.add(ticket("often", 4), ticket("seldom", 2), ticket("also often", 4))

    said = it.queue.why_waits(InvocationId(b"also often"))

    assert said.startswith("its process ended during its last 4 attempts, so attempts run one at a time")
    assert said.endswith("2 are ahead of it")
    assert it.queue.why_waits(InvocationId(b"often")).endswith("1 is ahead of it")
    assert "at most 64 attempts run at a time" in it.queue.why_waits(InvocationId(b"seldom"))
    assert it.queue.why_waits(InvocationId(b"seldom")).endswith("it is the next")


def test_others_are_told_what_they_wait_for(it: Process) -> None:
    it.add(ticket("alone", 4))
    assert it.start_all() == ["alone"]
    it.add(ticket("plain"), ticket("second"))

    said = it.queue.why_waits(InvocationId(b"second"))

    assert said == "an attempt that may end the process runs alone, for 30 s at most; 1 is ahead of it"
    it.ended("alone")
    assert it.queue.why_waits(InvocationId(b"second")) == "", "it waits for room only"
    assert it.queue.why_waits(InvocationId(b"nobody")) == ""


def test_a_process_that_ends_often_is_named_as_the_reason(it: Process) -> None:
    for crash in range(3):
        it.add(*(ticket(f"{crash}-{number}") for number in range(100)))
        it.start_all()
        it.crash()
        it.queue.clear()
    it.add(*(ticket(f"s{number}") for number in range(70)))
    assert len(it.start_all()) == 64

    assert it.queue.why_waits(InvocationId(b"s69")) == (
        "its process ended 3 times or more within a minute, so at most 64 attempts run at a time there; 5 are ahead of it"
    )


# -- its bound ---------------------------------------------------------------------------------------------------------

LEADER, OTHER = cast(Owner, "leader"), cast(Owner, "other")


def ident(name: str) -> InvocationId:
    return InvocationId(name.encode())


def test_a_full_queue_takes_only_newer_attempts_of_what_waits_there() -> None:
    it = Process(waiting_max=2)
    it.add(ticket("a"), ticket("b", 2))

    assert it.queue.places == 0
    assert it.queue.takes(ident("a")) and it.queue.takes(ident("b")) and not it.queue.takes(ident("c"))


def test_every_waiting_attempt_of_a_convicted_handler_counts_against_the_bound() -> None:
    it = Process(waiting_max=10)
    for name in ("bad1", "bad2"):
        it.add(ticket(name, 4, "bad"))
        assert it.start_all() == [name]
        it.crash()

    it.add(*(ticket(f"b{number}", handler="bad") for number in range(10)))

    assert (len(it.queue), it.queue.places) == (10, 0)
    it.queue.clear()
    assert not it.queue and it.queue.is_idle


def test_a_search_begins_at_the_smallest_attempt_that_was_passed_over() -> None:
    queue = Process().queue
    for owner, name in ((LEADER, "m"), (LEADER, "f"), (OTHER, "x"), (LEADER, "z")):
        queue.pass_over(owner, ident(name))

    assert queue.has_passed_over and not queue.is_idle
    assert dict(queue.take_passed_over()) == {LEADER: b"f", OTHER: b"x"}
    assert queue.is_idle


def test_a_search_is_worth_its_price_when_half_of_the_places_are_free() -> None:
    it = Process(waiting_max=4)
    it.add(*(ticket(f"t{number}") for number in range(4)))
    assert not it.queue.may_look_again, "nothing was passed over"
    it.queue.pass_over(LEADER, ident("u"))

    assert not it.queue.may_look_again
    it.queue.remove(ident("t0"))
    assert not it.queue.may_look_again
    it.queue.remove(ident("t1"))
    assert it.queue.may_look_again


def test_what_a_leadership_leaves_behind_is_forgotten() -> None:
    it = Process()
    it.add(ticket("mine")._replace(owner=LEADER), ticket("theirs")._replace(owner=OTHER))
    it.queue.pass_over(LEADER, ident("m2"))
    it.queue.pass_over(OTHER, ident("t2"))

    it.queue.forget(LEADER)

    assert [each.id for each in it.queue] == [b"theirs"]
    assert dict(it.queue.take_passed_over()) == {OTHER: b"t2"}


def test_attempts_run_up_to_what_the_endpoint_takes() -> None:
    it = Process()
    it.add(ticket("a"), ticket("b"))
    it.start_all()

    assert it.queue.has_room(3) and not it.queue.has_room(2)
    it.queue.trust(ident("a"))  # It still runs.
    assert not it.queue.has_room(2)
    it.ended("a")
    assert it.queue.has_room(2)


# -- searches ----------------------------------------------------------------------------------------------------------


def test_wishes_that_come_during_a_search_are_granted_together_by_the_next() -> None:
    search = Search()
    search.want(ident("k"), DP_1)
    assert search.begin() == b"k"

    search.want(ident("s"), DP_1)
    search.want(ident("p"), DP_2)
    search.want(ident("q"), DP_2)

    assert search.covers(DP_1) and not search.covers(DP_2)
    assert search.is_wanted
    assert search.begin() == b"p"
    assert (
        search.covers(DP_1)
        and search.covers(DP_2)
        and not search.covers(DeploymentId("dp_3"))
        and not search.covers(None)
    )


def test_a_search_for_everything_covers_attempts_without_a_deployment() -> None:
    search = Search()
    search.want(ident("k"), DP_1)
    search.want(ident("a"), None)

    assert search.begin() == b"a"
    assert search.covers(None) and search.covers(DP_1) and search.covers(DP_2)
    assert not search.is_in_vain, "lost attempts need no place"


def test_a_search_gives_each_place_away_once_and_ends_when_none_is_left() -> None:
    it = Process(waiting_max=2)
    search = Search()
    search.want(ident("a"), DP_1)
    search.begin()

    assert [search.take_place(DP_1, it.queue) for _ in range(3)] == [True, True, False]
    assert search.is_in_vain, "what it offered has not arrived, and may still fill the queue"
    search.want(ident("a"), DP_1)
    search.begin()
    assert search.take_place(DP_1, it.queue)
