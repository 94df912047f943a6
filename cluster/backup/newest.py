"""The newest complete backup that this node knows of: for its metrics, so that somebody notices when backups stop.

The node that made a backup tells all connected nodes, and each keeps the time in a file. A node that was away may know an
older backup, so look at the newest of all nodes. The backup itself is what its manifest says; this is only a note.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

from holdfast.cluster.members.founding import write_record
from holdfast.cluster.peers.rpc import Rpc

logger = logging.getLogger(__name__)

_FILE: Final = "newest-backup.json"
_METHOD: Final = "backup-made"


class NewestBackup:
    def __init__(self, data: Path, rpc: Rpc, connected: Callable[[], Collection[str]]) -> None:
        self._data = data
        self._rpc = rpc
        self._connected = connected
        #: When it was finished; 0: none is known.
        self.made_ms = _read(data)
        #: Backups that this node made or tried to make since its start.
        self.succeeded = 0
        self.failed = 0
        rpc.listen(_METHOD, lambda peer, made_ms: self._note(made_ms))

    def made(self, made_ms: int) -> None:
        """This node finished a backup."""
        self.succeeded += 1
        self._note(made_ms)
        for peer in self._connected():
            self._rpc.tell(peer, _METHOD, made_ms)

    def _note(self, made_ms: Any) -> None:
        if type(made_ms) is not int or made_ms <= self.made_ms:
            return
        self.made_ms = made_ms
        try:
            write_record(self._data, _FILE, {"made_ms": made_ms})
        except OSError as error:  # A full disk, for example. The backup is complete without the note.
            logger.warning("the time of the newest backup could not be written down: %s", error)


def _read(data: Path) -> int:
    try:
        return int(json.loads((data / _FILE).read_bytes())["made_ms"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError, OSError) as error:
        logger.warning("%s cannot be read, so no backup is known yet: %s", data / _FILE, error)
        return 0
