"""Connections of the peer port that are not authenticated yet. The oldest makes room for the next, so strangers that connect
and say nothing, again and again, do not keep peers out.

Those from the hosts of known peers make room last, and those of hosts with many of them first. There is no limit on how many
hosts a stranger has, but it cannot connect from the address of another machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Greetings(Generic[T]):
    def __init__(self, most: int, per_host_max: int) -> None:
        self._most = most
        self._per_host_max = per_host_max
        self._hosts: dict[T, str] = {}  # The oldest first.

    def __len__(self) -> int:
        return len(self._hosts)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._hosts))

    def enter(self, greeting: T, host: str) -> None:
        self._hosts[greeting] = host

    def leave(self, greeting: T) -> None:
        self._hosts.pop(greeting, None)

    def in_the_way(self, host: str, known: Collection[str]) -> T | None:
        """The one that must end before another from this host may begin. `known`: hosts of peers."""
        of_host = [each for each, other in self._hosts.items() if other == host]
        if len(of_host) >= self._per_host_max:
            return of_host[0]
        if len(self._hosts) < self._most:
            return None
        crowds = Counter(self._hosts.values())
        strangers = [each for each, other in self._hosts.items() if other not in known]
        return max(strangers or self._hosts, key=lambda each: crowds[self._hosts[each]])  # The first, if several.
