"""Which groups of the log are what: group 1 is the meta group, and the partitions follow it."""

from __future__ import annotations

from typing import Final

from holdfast.log.messages import GroupId
from holdfast.sdk.ids import PartitionNumber

META_GROUP: Final = GroupId(1)
FIRST_PARTITION_GROUP: Final = 2


def group_of(partition: PartitionNumber) -> GroupId:
    return GroupId(FIRST_PARTITION_GROUP + partition)


def partition_in(group: GroupId) -> PartitionNumber:
    return PartitionNumber(group - FIRST_PARTITION_GROUP)
