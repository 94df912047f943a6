"""File descriptors: each connection uses one, and a node without a free one can neither reach its peers nor open a
file.

So the listeners for clients and operators have a limit each, and the remaining descriptors are for peers, handlers,
stores and files.
"""

from __future__ import annotations

import logging
import os
import resource
from typing import Final

logger = logging.getLogger(__name__)

#: More is useless, and some systems report an infinite limit.
LIMIT_MAX: Final = 1 << 20
#: Reserved for peers, handlers, object storage and files, in addition to those open at the start: at least this many,
#: and a quarter.
RESERVED_MIN: Final = 64
ADMIN_MAX: Final = 256
DOOR_MIN: Final = 8


def raise_limit() -> int:
    """Raise the number of descriptors to the system's limit for this process. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, LIMIT_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limit()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # A sandbox, or a kernel with a limit of its own.
        logger.warning("the limit of open files stays at %d: %s", soft, error)
    return limit()


def limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LIMIT_MAX if soft == resource.RLIM_INFINITY else min(soft, LIMIT_MAX)


def in_use() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0


def for_admin() -> int:
    """The maximum number of connections to the admin API."""
    return max(DOOR_MIN, min(ADMIN_MAX, _free() // 8))


def for_ingress() -> int:
    """The maximum number of connections to the ingress; `connections_max` may be lower."""
    free = _free()
    return max(DOOR_MIN, free - max(RESERVED_MIN, free // 4) - min(ADMIN_MAX, free // 8))


def for_one_address(door: int, setting: int) -> int:
    """The limit on connections of one client address, at a door with this limit on all connections."""
    return max(DOOR_MIN, min(setting, door * 3 // 4))


def for_strangers_of_one_address(door: int, setting: int) -> int:
    """The limit on connections of one client address without an authenticated request."""
    return max(DOOR_MIN, min(setting, door // 4))


def _free() -> int:
    return max(0, limit() - in_use())
