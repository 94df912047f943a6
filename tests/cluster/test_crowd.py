"""Connections are counted by client address, and forgotten when they close."""

from __future__ import annotations

import socket

import pytest

from holdfast.cluster.http.crowd import SWEEP_MIN, Crowd, Place, Strangers, client_of


class Socket(socket.socket):
    """One that takes no descriptor."""

    def __init__(self) -> None:
        self.is_open = True

    def fileno(self) -> int:
        return 5 if self.is_open else -1

    def __del__(self) -> None: ...


def test_an_address_has_so_many_connections_and_no_more() -> None:
    crowd = Crowd(2)
    first = Socket()

    assert crowd.enter(("10.0.0.1", 1), first) and crowd.enter(("10.0.0.1", 2), Socket())
    assert not crowd.enter(("10.0.0.1", 3), Socket())
    assert crowd.enter(("10.0.0.2", 1), Socket())

    first.is_open = False
    assert crowd.enter(("10.0.0.1", 4), Socket())
    assert not crowd.enter(("10.0.0.1", 5), Socket())


def test_at_the_limit_the_oldest_connection_that_can_be_closed_makes_room() -> None:
    crowd = Crowd(6)
    for port in range(6):
        place = crowd.enter(("10.0.0.1", port), Socket())
        assert place is not None
        place.owner = port if port != 1 else None
    asked: list[int] = []

    def close(owner: int) -> bool:
        asked.append(owner)
        return owner == 2

    assert crowd.make_room(("10.0.0.1", 7), close) and asked == [0, 2]
    assert crowd.enter(("10.0.0.1", 7), Socket()) is not None
    assert crowd.enter(("10.0.0.1", 8), Socket()) is None
    assert not crowd.make_room(("10.0.0.1", 8), lambda owner: False)
    assert crowd._count == 6


def test_the_only_connection_of_an_address_makes_room_after_those_of_a_crowd() -> None:
    strangers = Strangers(per_address_max=3)
    places = [Place(Socket()) for _ in range(4)]
    for place, host in zip(places, ["10.0.0.1", "10.9.9.1", "10.9.9.1", "10.9.9.1"], strict=True):
        strangers.enter((host, 1), place)

    assert strangers.first_to_go() is places[1]
    assert strangers.oldest_beyond(("10.9.9.1", 2)) is places[1]
    assert strangers.oldest_beyond(("10.0.0.1", 2)) is None

    for place in places[1:3]:
        place.leave_strangers()
    assert strangers.first_to_go() is places[0], "the oldest, if none has more"
    assert len(strangers) == 2 and strangers.oldest_beyond(("10.9.9.1", 2)) is None
    for place in places:
        place.leave_strangers()
    assert strangers.first_to_go() is None and not strangers._of_client


def test_without_a_bound_nothing_is_kept() -> None:
    crowd = Crowd(None)

    assert all(crowd.enter(("10.0.0.1", port), Socket()) for port in range(100))
    assert not crowd._places


def test_addresses_that_left_are_forgotten() -> None:
    crowd = Crowd(2)

    for number in range(20 * SWEEP_MIN):
        gone = Socket()
        assert crowd.enter((f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 1), gone)
        gone.is_open = False

    assert len(crowd._places) <= SWEEP_MIN and crowd._count == sum(map(len, crowd._places.values()))


@pytest.mark.parametrize(
    ("address", "client"),
    [
        (("192.0.2.1", 80), "192.0.2.1"),
        (("2001:db8:1:2:3:4:5:6", 80, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2:ffff::9", 80, 0, 0), "2001:db8:1:2::/64"),
        (("::ffff:192.0.2.1", 80, 0, 0), "192.0.2.1"),
        (("::1", 80, 0, 0), "::/64"),
        (("fe80::1%eth0", 80, 0, 2), "fe80::/64"),
        ("", ""),
        (None, ""),
    ],
)
def test_a_client_of_ipv6_is_its_network(address: object, client: str) -> None:
    assert client_of(address) == client
