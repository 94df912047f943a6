"""Core dumps hold the memory of a node: tokens of its clients, keys, and payloads. So a node leaves none, unless told to."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import sys
from typing import Final

logger = logging.getLogger(__name__)

#: <linux/prctl.h>
_PR_SET_DUMPABLE: Final = 4


def forbid_core_dumps() -> None:
    """For this process. The limit is inherited by the programs that it starts, the rest is not.

    A system may pipe core dumps to a program, and then the limit does not count. So Linux is told that this process is not
    to be dumped. Other processes of its user cannot read its memory or its environment, either.
    """
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (OSError, ValueError) as error:  # A sandbox.
        logger.warning("the limit of core dumps stays as it is: %s", error)
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(0)) != 0:
        logger.warning("core dumps are not forbidden: %s", os.strerror(ctypes.get_errno()))
