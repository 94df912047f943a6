"""The check that the installed pysyncobj is the audited one, and the removal of its pickle from the process.

The engine overrides some methods of pysyncobj and relies on others (docs/raft-hardening.md). A silent upgrade could undo a fix
or open a path that was never reviewed, so the source of each of these methods is compared with the audited source before the
first engine is created.
"""

from __future__ import annotations

import hashlib
import inspect
from functools import cache
from typing import Any, Final

import pysyncobj.pickle
from pysyncobj import syncobj as _parent

from holdfast.log.errors import EngineFault, EngineNotAudited


def _refuse_pickle(*_: object, **__: object) -> Any:
    raise EngineFault("pickle is disabled: bytes from a peer or a disk are never unpickled")


pysyncobj.pickle.loads = pysyncobj.pickle.load = _refuse_pickle


# The methods we override and those we rely on, as audited. A change in any of them needs a new audit, not a new hash.
_OVERRIDDEN: Final = (
    "_SyncObj__sendNextNodeIdx",
    "_SyncObj__sendAppendEntries",
    "_SyncObj__setState",
    "_SyncObj__onBecomeLeader",
    "_SyncObj__generateRaftTimeout",
    "_SyncObj__applyLogEntries",
    "_SyncObj__doApplyCommand",
    "_SyncObj__loadDumpFile",
    "_SyncObj__tryLogCompaction",
    "_SyncObj__parseChangeClusterRequest",
    "_SyncObj__doChangeCluster",
    "_SyncObj__changeCluster",
    "_SyncObj__updateClusterConfiguration",
    "_SyncObj__deleteEntriesTo",
    "_onTick",
    "_checkCommandsToApply",
    "_applyCommand",
)
_RELIED_ON: Final = (
    "__init__",
    "_SyncObj__onMessageReceived",
    "_SyncObj__setCurrentTerm",
    "_SyncObj__getEntries",
    "_SyncObj__getCurrentLogIndex",
    "_SyncObj__getCurrentLogTerm",
    "_SyncObj__deleteEntriesFrom",
    "_SyncObj__onLeaderChanged",
)
AUDITED: Final[dict[str, str]] = {
    "_SyncObj__sendNextNodeIdx": "68aaeefc267b8896",
    "_SyncObj__sendAppendEntries": "9cb9073128c392fa",
    "_SyncObj__setState": "2c1f239f7bd79b39",
    "_SyncObj__onBecomeLeader": "5a3fd97bc17dc1cf",
    "_SyncObj__generateRaftTimeout": "92ed37d3620e781a",
    "_SyncObj__applyLogEntries": "073db677773b5a2d",
    "_SyncObj__doApplyCommand": "1ea7aa506e950d0a",
    "_SyncObj__loadDumpFile": "ec66e83905de703b",
    "_SyncObj__tryLogCompaction": "c2f8a0ec14cc7312",
    "_SyncObj__parseChangeClusterRequest": "b2d5d695b12e592f",
    "_SyncObj__doChangeCluster": "247d4d4101b8cd3c",
    "_SyncObj__changeCluster": "66b42884f9d2dbd1",
    "_SyncObj__updateClusterConfiguration": "e2de42f3d1a46c96",
    "_SyncObj__deleteEntriesTo": "b7b29988856a66b3",
    "_onTick": "cc9eb08232d005ba",
    "_checkCommandsToApply": "a386a8079361d204",
    "_applyCommand": "827f207d515b2d64",
    "__init__": "09df12cd7fd7d727",
    "_SyncObj__onMessageReceived": "ddfe34b6c0282179",
    "_SyncObj__setCurrentTerm": "0ad5bf456ac06bd3",
    "_SyncObj__getEntries": "e29c4b33293b2101",
    "_SyncObj__getCurrentLogIndex": "e5af22ca246686bd",
    "_SyncObj__getCurrentLogTerm": "1cb8867e6a13d397",
    "_SyncObj__deleteEntriesFrom": "3b23c411bb903d36",
    "_SyncObj__onLeaderChanged": "53b7685e1d897887",
}


def source_hashes(parent: type = _parent.SyncObj) -> dict[str, str]:
    return {
        name: hashlib.sha256(inspect.getsource(getattr(parent, name)).encode()).hexdigest()[:16]
        for name in (*_OVERRIDDEN, *_RELIED_ON)
    }


@cache
def check_parent() -> None:
    """Raise `EngineNotAudited` unless every method has its audited source."""
    try:
        found = source_hashes()
    except (AttributeError, OSError) as error:
        raise EngineNotAudited(f"pysyncobj cannot be compared with the audited version 0.3.17: {error}") from None
    changed = sorted(name for name, digest in AUDITED.items() if found[name] != digest)
    if changed:
        raise EngineNotAudited(
            f"pysyncobj is not the audited version 0.3.17: {', '.join(changed)} differ. Install pysyncobj==0.3.17."
        )
