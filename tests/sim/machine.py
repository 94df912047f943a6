"""A trivial replicated state: a list of commands and a hash chain over everything applied."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.log.engine import Snapshot
from holdfast.log.errors import NoSpace
from holdfast.log.replica import Committed


@dataclass
class Saved:
    """A state at an index."""

    index: int = 0
    term: int = 0
    chain: int = 0
    commands: list[bytes] = field(default_factory=list)
    epoch: int = 0  # The epoch in which it was cut, for snapshots.

    def copy(self) -> Saved:
        return Saved(self.index, self.term, self.chain, list(self.commands), self.epoch)


def chained(chain: int, entry: Committed) -> int:
    chain = zlib.crc32(b"%d %d" % (entry.index, entry.term), chain)
    for command in entry.commands:
        chain = zlib.crc32(command, chain)
    return chain


class SimState:
    """The state environment of a node. It survives a killed process unchanged; after a power loss only the durable
    snapshot remains."""

    def __init__(self) -> None:
        self.live = Saved()
        self.durable = Saved()

    def lose_power(self) -> None:
        self.live = self.durable.copy()


class SimMachine:
    def __init__(
        self,
        state: SimState,
        on_apply: Callable[[Saved, Committed], None],
        failpoint: Callable[[str], None],
        no_space: Callable[[], bool] = lambda: False,
    ) -> None:
        self.state = state
        self._no_space = no_space
        self._on_apply = on_apply
        self._failpoint = failpoint

    @property
    def applied(self) -> tuple[int, int]:
        return self.state.live.index, self.state.live.term

    def apply(self, entries: Sequence[Committed]) -> None:
        self._failpoint("apply.before")
        if self._no_space():
            raise NoSpace(Path("simulated state"), "the disk is full to the last byte")
        live = self.state.live
        for entry in entries:
            assert entry.index == live.index + 1, f"entry {entry.index} applied after {live.index}"
            live.chain = chained(live.chain, entry)
            live.index, live.term = entry.index, entry.term
            live.commands += entry.commands
            self._on_apply(live, entry)
            self._failpoint("apply.between")
        self._failpoint("apply.after")

    def cut_snapshot(self, epoch: int = 0) -> None:
        self._failpoint("snapshot.before")
        if self.state.live.index > self.state.durable.index:
            self.state.durable = self.state.live.copy()
            self.state.durable.epoch = epoch
        self._failpoint("snapshot.after")

    def snapshot(self) -> Snapshot | None:
        durable = self.state.durable
        if durable.index == 0:
            return None
        return Snapshot(durable.index, durable.term, b"%d" % durable.index)

    def swap(self, saved: Saved) -> None:
        """Install: the snapshot first becomes durable, then it is the state. A crash in between leaves either."""
        self._failpoint("install.before")
        self.state.durable = saved.copy()
        self._failpoint("install.between")
        self.state.live = saved.copy()
        self._failpoint("install.after")
