"""File descriptors: each connection takes one, and a node without a free one can neither reach its peers nor open a file.

So the doors for clients and operators have a bound each, and what they leave is for peers, handlers, stores and files.
"""

from __future__ import annotations

import logging
import os
import resource
from typing import Final

logger = logging.getLogger(__name__)

#: More would help nobody, and some systems call their limit infinite.
LIMIT_MAX: Final = 1 << 20
#: For peers, handlers, object storage and files, beside what is open when the doors open: at least so many, and a quarter.
RESERVED_MIN: Final = 64
ADMIN_MAX: Final = 256
DOOR_MIN: Final = 8


def raise_limit() -> int:
    """Have as many descriptors as the system lets this process have. Returns how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, LIMIT_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limit()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # A sandbox, or a kernel with a bound of its own.
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
    """Connections that the admin API takes at a time."""
    return max(DOOR_MIN, min(ADMIN_MAX, _free() // 8))


def for_ingress() -> int:
    """Connections that the ingress takes at a time, at most: `connections_max` may be lower."""
    free = _free()
    return max(DOOR_MIN, free - max(RESERVED_MIN, free // 4) - min(ADMIN_MAX, free // 8))


def _free() -> int:
    return max(0, limit() - in_use())
