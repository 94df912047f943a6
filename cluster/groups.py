"""Which groups of the log are what: group 1 is the meta group, and the partitions follow it."""

from __future__ import annotations

from typing import Final

META_GROUP: Final = 1
FIRST_PARTITION_GROUP: Final = 2
