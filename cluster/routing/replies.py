"""Who waits at this node for the outcome of which invocation, and which other nodes want to hear of it.

Nothing of it is in the state: a client that waits is a connection of this process. It is told by the effect `Reply`, or by
the result of its own `Invoke` when the invocation had completed before. Register first, propose then: no outcome slips
through in between.

The effect is carried out by whoever leads the partition. So a node at which somebody waits has the leader *watch* the
invocation for it, and asks again when the leader or the link to it changes (`watches.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Replies:
    def __init__(self) -> None:
        self._waiting: dict[bytes, list[asyncio.Future[list[Any]]]] = {}
        #: Ids for which nobody is known to watch; `watches` empties it.
        self.unwatched: dict[bytes, None] = {}
        self.someone = asyncio.Event()  # Whether `unwatched` holds anything.
        self._watchers: dict[bytes, list[str]] = {}
        self._watched_by: dict[str, set[bytes]] = {}
        #: Carries an outcome to another node.
        self.forward: Callable[[str, bytes, list[Any]], object] = lambda *_: None

    @contextmanager
    def wait(self, invocation: bytes) -> Iterator[asyncio.Future[list[Any]]]:
        """A future of the packed outcome, forgotten at the end of the block whatever happened."""
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        waiting = self._waiting
        futures = waiting.get(invocation)
        if futures is None:
            waiting[invocation] = [future]
        else:
            futures.append(future)
        self.unwatched[invocation] = None
        self.someone.set()
        try:
            yield future
        finally:
            futures = waiting.get(invocation)
            if futures is not None and future in futures:
                futures.remove(future)
                if not futures:
                    del waiting[invocation]
            if invocation not in waiting:  # Who still waits may not be watched yet.
                self.unwatched.pop(invocation, None)
            future.cancel()

    def settle(self, invocation: bytes, outcome: list[Any]) -> None:
        for future in self._waiting.pop(invocation, ()):
            if not future.done():
                future.set_result(outcome)
        if self._watchers:
            for peer in self._watchers.pop(invocation, ()):
                self._watched_by[peer].discard(invocation)
                self.forward(peer, invocation, outcome)

    def refuse(self, invocation: bytes, error: Exception) -> None:
        """Whoever waits here is told why there is no outcome to wait for. Other nodes find out by themselves."""
        for future in self._waiting.pop(invocation, ()):
            if not future.done():
                future.set_exception(error)

    def is_waiting(self, invocation: bytes) -> bool:
        return invocation in self._waiting

    def waiting(self) -> list[bytes]:
        return list(self._waiting)

    # -- on behalf of other nodes ------------------------------------------------------------------------------------

    def watch(self, peer: str, invocation: bytes) -> None:
        """`peer` is told when this invocation completes while we lead it."""
        mine = self._watched_by.setdefault(peer, set())
        if invocation not in mine:
            mine.add(invocation)
            self._watchers.setdefault(invocation, []).append(peer)

    def forget_peer(self, peer: str) -> None:
        for invocation in self._watched_by.pop(peer, ()):
            self._unwatch(invocation, peer)

    def forget(self, concerns: Callable[[bytes], bool]) -> list[str]:
        """We no longer lead these: who wants to hear of them asks whoever does. Returns who does want to."""
        forgotten: dict[str, None] = {}  # In an order that hashes do not decide.
        for invocation in [known for known in self._watchers if concerns(known)]:
            for peer in self._watchers.pop(invocation):
                self._watched_by[peer].discard(invocation)
                forgotten[peer] = None
        return list(forgotten)

    def _unwatch(self, invocation: bytes, peer: str) -> None:
        peers = self._watchers.get(invocation)
        if peers is not None:
            peers.remove(peer)
            if not peers:
                del self._watchers[invocation]

    @property
    def watched(self) -> int:
        return len(self._watchers)

    def __len__(self) -> int:
        return len(self._waiting)
