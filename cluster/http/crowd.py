"""How many connections each client address has, so that one client cannot take all places of a door.

An address is one of IPv4, or a network of 64 bits of IPv6, which is what a single client gets. Connections without an
authenticated request are counted separately (`Strangers`): they have fewer places, and make room for others.
"""

from __future__ import annotations

import ipaddress
import socket
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final

SWEEP_MIN: Final = 1024
LOOKED_AT: Final = 16  # Connections checked for an idle one each time an address is at its limit.


class Place:
    """A counted connection. `owner` is what serves it, once there is something."""

    __slots__ = ("client", "owner", "since_s", "socket", "strangers")

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.owner: Any = None
        self.client = ""
        self.since_s = 0.0  # When it was accepted.
        self.strangers: Strangers | None = None

    def leave_strangers(self) -> None:
        """A request on it was authenticated, or it is closed."""
        if self.strangers is not None:
            self.strangers.remove(self)
            self.strangers = None


class Crowd:
    """Whether a connection is open is asked of its socket, so there is nothing to call when it closes."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._places: dict[str, deque[Place]] = {}
        self._count = 0  # Of all places here, also those whose connections closed since the last sweep.
        self._sweep_at = SWEEP_MIN

    def enter(self, address: Any, connected: socket.socket) -> Place | None:
        """Count one more connection of an address, as from `accept`. None: the address is at its limit."""
        place = Place(connected)
        if self._most is None:
            return place
        name = client_of(address)
        places = self._places.setdefault(name, deque())
        if len(places) >= self._most:
            self._forget_closed(name)
            places = self._places.setdefault(name, deque())
            if len(places) >= self._most:
                return None
        places.append(place)
        self._count += 1
        if self._count >= self._sweep_at:
            for each in list(self._places):
                self._forget_closed(each)
            self._sweep_at = 2 * self._count + SWEEP_MIN
        return place

    def make_room(self, address: Any, close: Callable[[Any], bool]) -> bool:
        """Close a connection of an address that is at its limit. `close` is asked with the owners of the older half, in turn,
        and says whether it closed one."""
        places = self._places[client_of(address)]
        for _ in range(min(LOOKED_AT, (len(places) + 1) // 2)):
            place = places.popleft()
            if place.owner is not None and close(place.owner):
                self._count -= 1
                return True
            places.append(place)
        return False

    def _forget_closed(self, name: str) -> None:
        before = self._places.pop(name)
        still = deque(each for each in before if each.socket.fileno() >= 0)
        self._count -= len(before) - len(still)
        if still:
            self._places[name] = still


class Strangers:
    """Connections without an authenticated request, the oldest first."""

    def __init__(self, per_address_max: int) -> None:
        self.per_address_max = per_address_max
        self._all: dict[Place, None] = {}
        self._of_client: dict[str, dict[Place, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, address: Any, place: Place) -> None:
        place.client, place.strangers = client_of(address), self
        self._all[place] = None
        self._of_client.setdefault(place.client, {})[place] = None

    def remove(self, place: Place) -> None:
        del self._all[place]
        of_client = self._of_client[place.client]
        del of_client[place]
        if not of_client:
            del self._of_client[place.client]

    def first_to_go(self, among: Iterable[Place] | None = None) -> Place | None:
        """Of the oldest few, the first one whose address has most of them: many connections of a few addresses do not drive
        out the only one of another."""
        oldest = islice(self._all if among is None else among, LOOKED_AT)
        return max(oldest, key=lambda place: len(self._of_client.get(place.client, ())), default=None)

    def oldest_beyond(self, address: Any) -> Place | None:
        """The oldest of this address, if one more would be too many."""
        places = self._of_client.get(client_of(address), {})
        return next(iter(places)) if len(places) >= self.per_address_max else None


def client_of(address: Any) -> str:
    """What counts as one client; empty where there are no addresses, as with a Unix socket."""
    host = address[0] if isinstance(address, tuple) and address else ""
    if ":" not in host:
        return str(host)
    try:
        found = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return str(host)
    return str(found.ipv4_mapped or ipaddress.IPv6Network((found.packed[:8] + bytes(8), 64)))
