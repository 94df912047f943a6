"""Which clients at this node wait for the outcome of an invocation, and which other nodes do.

None of this is in the state: a waiting client is a connection of this process. The effect `Reply` answers it, or the
result of its own `Invoke` if the invocation had completed before. Register first, then propose, so that no outcome is
missed in between.

The partition's leader carries out the effect. So a node with waiting clients asks the leader to *watch* the invocation,
and asks again when the leader or the link to it changes (`watches.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from holdfast.cluster.routing.channel import Channel, Progress
from holdfast.sdk.ids import InvocationId


class Replies:
    def __init__(self) -> None:
        self._waiting: dict[InvocationId, list[Channel]] = {}
        self._followers: dict[InvocationId, int] = {}  # The number of channels that follow, by invocation.
        #: Ids that no leader is known to watch; `watches` empties it.
        self.unwatched: dict[InvocationId, None] = {}
        self.someone = asyncio.Event()  # Set when `unwatched` is not empty.
        self._watchers: dict[InvocationId, list[str]] = {}
        self._watched_by: dict[str, set[InvocationId]] = {}
        #: Sends an outcome to another node.
        self.forward: Callable[[str, InvocationId, list[Any]], object] = lambda *_: None

    def wait(self, invocation: InvocationId, *, follow: bool = False) -> _Waiting:
        """A channel for a block, dropped at its end in any case. With `follow`, it also gets progress."""
        return _Waiting(self, invocation, follow)

    def _enter(self, invocation: InvocationId, *, follow: bool) -> Channel:
        channel = Channel(follows=follow)
        waiting = self._waiting
        channels = waiting.get(invocation)
        if channels is None:
            waiting[invocation] = [channel]
        else:
            channels.append(channel)
        if follow:
            self._followers[invocation] = self._followers.get(invocation, 0) + 1
        self.unwatched[invocation] = None
        self.someone.set()
        return channel

    def _leave(self, invocation: InvocationId, channel: Channel) -> None:
        waiting = self._waiting
        channels = waiting.get(invocation)
        if channels is not None and channel in channels:
            channels.remove(channel)
            if not channels:
                del waiting[invocation]
        if invocation not in waiting:  # Other clients may still wait for it.
            self.unwatched.pop(invocation, None)
        if channel.follows:
            self._followers[invocation] -= 1
            if not self._followers[invocation]:
                del self._followers[invocation]
        channel.close()

    def settle(self, invocation: InvocationId, outcome: list[Any]) -> None:
        for channel in self._waiting.pop(invocation, ()):
            channel.settle(outcome)
        if self._watchers:
            for peer in self._watchers.pop(invocation, ()):
                self._watched_by[peer].discard(invocation)
                self.forward(peer, invocation, outcome)

    def tell(self, invocation: InvocationId, progress: Progress) -> None:
        """Followers here are told. Other nodes find out by themselves."""
        for channel in self._waiting.get(invocation, ()):
            if channel.follows:
                channel.tell(progress)

    def refuse(self, invocation: InvocationId, error: Exception) -> None:
        """Tell the clients here that wait for the outcome alone why there is none to wait for. Followers see it."""
        channels = self._waiting.pop(invocation, [])
        following = [channel for channel in channels if channel.follows]
        if following:
            self._waiting[invocation] = following
        for channel in channels:
            if not channel.follows:
                channel.refuse(error)

    def followed(self) -> list[InvocationId]:
        return list(self._followers)

    def is_waiting(self, invocation: InvocationId) -> bool:
        return invocation in self._waiting

    def waiting(self) -> list[InvocationId]:
        return list(self._waiting)

    # -- on behalf of other nodes ------------------------------------------------------------------------------------

    def watch(self, peer: str, invocation: InvocationId) -> None:
        """Notify `peer` when this invocation completes while we lead it."""
        mine = self._watched_by.setdefault(peer, set())
        if invocation not in mine:
            mine.add(invocation)
            self._watchers.setdefault(invocation, []).append(peer)

    def forget_peer(self, peer: str) -> None:
        for invocation in self._watched_by.pop(peer, ()):
            self._unwatch(invocation, peer)

    def forget(self, concerns: Callable[[InvocationId], bool]) -> list[str]:
        """Drop the watches of invocations that we no longer lead. Returns the peers that must ask the new leader."""
        forgotten: dict[str, None] = {}  # A dict, because its order does not depend on hashes.
        for invocation in [known for known in self._watchers if concerns(known)]:
            for peer in self._watchers.pop(invocation):
                self._watched_by[peer].discard(invocation)
                forgotten[peer] = None
        return list(forgotten)

    def _unwatch(self, invocation: InvocationId, peer: str) -> None:
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


class _Waiting:
    """The block of one caller that waits. A class, because every request passes here and a generator costs more."""

    __slots__ = ("_channel", "_follow", "_invocation", "_replies")

    def __init__(self, replies: Replies, invocation: InvocationId, follow: bool) -> None:
        self._replies = replies
        self._invocation = invocation
        self._follow = follow

    def __enter__(self) -> Channel:
        self._channel = self._replies._enter(self._invocation, follow=self._follow)
        return self._channel

    def __exit__(self, *_: object) -> None:
        self._replies._leave(self._invocation, self._channel)
