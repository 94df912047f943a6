"""Which unauthenticated connection makes room for the next."""

from __future__ import annotations

from holdfast.log.greetings import Greetings


def test_the_oldest_stranger_makes_room_and_peers_do_so_last() -> None:
    greetings: Greetings[int] = Greetings(most=4, per_host_max=3)
    for number, host in enumerate(["10.0.0.1", "10.9.9.1", "10.9.9.2", "10.0.0.2"]):
        assert greetings.in_the_way(host, known=()) is None
        greetings.enter(number, host)

    assert greetings.in_the_way("10.9.9.3", known=()) == 0
    assert greetings.in_the_way("10.9.9.3", known={"10.0.0.1", "10.0.0.2"}) == 1
    assert greetings.in_the_way("10.9.9.3", known={"10.0.0.1", "10.0.0.2", "10.9.9.1", "10.9.9.2"}) == 0

    greetings.leave(1)
    assert len(greetings) == 3 and greetings.in_the_way("10.9.9.3", known=()) is None


def test_hosts_with_many_of_them_make_room_first() -> None:
    greetings: Greetings[int] = Greetings(most=4, per_host_max=3)
    for number, host in enumerate(["10.0.0.1", "10.9.9.1", "10.9.9.1", "10.0.0.2"]):
        greetings.enter(number, host)

    assert greetings.in_the_way("10.0.0.3", known=()) == 1
    assert greetings.in_the_way("10.0.0.3", known={"10.9.9.1"}) == 0


def test_the_oldest_of_a_host_makes_room_for_its_next() -> None:
    greetings: Greetings[int] = Greetings(most=100, per_host_max=2)
    for number, host in enumerate(["10.0.0.1", "10.9.9.1", "10.9.9.1"]):
        greetings.enter(number, host)

    assert greetings.in_the_way("10.9.9.1", known={"10.9.9.1"}) == 1
    assert greetings.in_the_way("10.0.0.1", known=()) is None
