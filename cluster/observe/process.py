"""What the process of a node uses, as the operating system sees it."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Final

_STATM: Final = Path("/proc/self/statm")
_RESIDENT_AT: Final = 1


def memory_bytes() -> int:
    """Resident memory; 0 where the system does not tell."""
    try:
        return int(_STATM.read_text().split()[_RESIDENT_AT]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def cpu_ms() -> int:
    """The time that all threads of this process had a processor, since it began."""
    return round(time.process_time() * 1000)


def disk_bytes(path: Path) -> tuple[int, int]:
    """Free and total bytes of the file system; zeros if it cannot be read."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return 0, 0
    return usage.free, usage.total
