"""A node whose clock and disk can be made faulty from outside, and that can be halted at chosen moments of snapshotting.

    python -m holdfast.chaos.faulty_node BENDS-FILE

The file contains the error of the wall clock in seconds, the extra seconds of each commit, the moment at which the
process must halt, and the one at which it did. All are read at each use, so faults begin and end while the node runs.
The faults are below all our code (the clock of the C library, the wait for the disk). A halt is a pause between two
calls that is long enough to kill the process in. The node itself runs unmodified production code.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from collections.abc import Callable
from enum import IntEnum
from functools import wraps
from pathlib import Path
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

_BENT: Final = struct.Struct("<dd")
_NUMBER: Final = struct.Struct("<I")
_HELD_AT, _REACHED_AT = _BENT.size, _BENT.size + _NUMBER.size
BYTES: Final = _REACHED_AT + _NUMBER.size
#: A halted process that is not killed continues after this.
HELD_S_MAX: Final = 10.0
_LOOK_S: Final = 0.001

P = ParamSpec("P")
T = TypeVar("T")


class Moment(IntEnum):
    """The points between two calls where a process can be halted."""

    NONE = 0
    CUT_COPIED = 1
    CUT_NAMED = 2
    UPLOAD_BEGINS = 3
    UPLOAD_DONE = 4
    FETCHED = 5
    STAGED = 6
    INSTALL_NAMED = 7
    INSTALLED = 8

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS: Final = {
    Moment.NONE: "never",
    Moment.CUT_COPIED: "a snapshot was copied and had no header yet",
    Moment.CUT_NAMED: "a snapshot was cut and nobody knew it yet",
    Moment.UPLOAD_BEGINS: "a snapshot was about to be uploaded",
    Moment.UPLOAD_DONE: "a snapshot was uploaded and older ones were still there",
    Moment.FETCHED: "a snapshot was fetched and not laid beside the state yet",
    Moment.STAGED: "a snapshot lay beside the state that it was to replace",
    Moment.INSTALL_NAMED: "a snapshot was accepted and the state was still the old one",
    Moment.INSTALLED: "a snapshot had just replaced the state",
}


class Bends:
    """The settings, in a file that both the node and the fault injector have mapped."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(BYTES))
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), BYTES)

    @property
    def clock_s(self) -> float:
        return float(_BENT.unpack_from(self._bytes)[0])

    @property
    def disk_s(self) -> float:
        return float(_BENT.unpack_from(self._bytes)[1])

    def bend(self, *, clock_s: float, disk_s: float) -> None:
        _BENT.pack_into(self._bytes, 0, clock_s, disk_s)

    def hold_at(self, moment: Moment) -> None:
        """Halt the process when it next reaches this moment; NONE lets it continue."""
        _NUMBER.pack_into(self._bytes, _REACHED_AT, Moment.NONE)
        _NUMBER.pack_into(self._bytes, _HELD_AT, moment)

    @property
    def is_held(self) -> bool:
        return bool(_NUMBER.unpack_from(self._bytes, _REACHED_AT)[0])

    def maybe_hold(self, moment: Moment) -> None:
        """In the node: halt here, if requested."""
        if not moment or _NUMBER.unpack_from(self._bytes, _HELD_AT)[0] != moment:
            return
        _NUMBER.pack_into(self._bytes, _REACHED_AT, moment)
        deadline = time.monotonic() + HELD_S_MAX
        while _NUMBER.unpack_from(self._bytes, _HELD_AT)[0] == moment and time.monotonic() < deadline:
            time.sleep(_LOOK_S)


def install(bends: Bends) -> None:
    """From now on this process uses the faulty clock and disk, and can be halted."""
    from holdfast.log.store import LmdbStore

    true_time, true_commit = time.time, LmdbStore.commit

    def bent_time() -> float:
        return true_time() + bends.clock_s

    def bent_commit(self: LmdbStore) -> None:
        if bends.disk_s:
            time.sleep(bends.disk_s)  # In the writer's thread, where a slow fsync would wait.
        true_commit(self)

    time.time = bent_time
    LmdbStore.commit = bent_commit  # type: ignore[method-assign]
    for hold in holds():
        call = held(getattr(hold.owner, hold.name), bends, before=hold.before, after=hold.after)
        setattr(hold.owner, hold.name, call)


class Hold(NamedTuple):
    """A call before or after which the process can be halted."""

    owner: Any
    name: str
    before: Moment = Moment.NONE
    after: Moment = Moment.NONE


def holds() -> list[Hold]:
    from holdfast.cluster.partition.machine import PartitionMachine
    from holdfast.cluster.snapshotting import catchup, keeper
    from holdfast.snapshots import cut
    from holdfast.snapshots.catalog import Catalog

    return [
        Hold(cut, "_copy", after=Moment.CUT_COPIED),
        Hold(keeper, "cut_blocking", after=Moment.CUT_NAMED),
        Hold(Catalog, "publish", Moment.UPLOAD_BEGINS, Moment.UPLOAD_DONE),
        Hold(catchup, "stage", Moment.FETCHED),
        Hold(catchup, "move_into_place", Moment.STAGED, Moment.INSTALL_NAMED),
        Hold(PartitionMachine, "swap", after=Moment.INSTALLED),
    ]


def held(call: Callable[P, T], bends: Bends, *, before: Moment, after: Moment) -> Callable[P, T]:
    """Wrap a call so that the process may halt before or after it; for a coroutine, only before."""

    @wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        bends.maybe_hold(before)
        result = call(*args, **kwargs)
        bends.maybe_hold(after)
        return result

    return wrapped


def main() -> None:
    install(Bends(Path(sys.argv[1])))
    from holdfast.cli.main import main as command

    command(["serve"], prog_name="holdfast")


if __name__ == "__main__":
    main()
