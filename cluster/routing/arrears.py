"""Partitions that advanced while this node was away, and whose replicas here have not caught up yet.

The next node of a rolling restart must wait for them: otherwise its partitions would have no up-to-date majority.
"""

from __future__ import annotations

import logging
from collections.abc import Container

from holdfast.cluster.routing.router import Router
from holdfast.log.errors import ProposalError
from holdfast.sdk.ids import PartitionNumber

logger = logging.getLogger(__name__)


class Arrears:
    """One per node."""

    def __init__(self, hosted: Container[int], router: Router) -> None:
        self._hosted = hosted
        self._router = router
        #: The partitions that are behind.
        self.numbers: set[PartitionNumber] = set()

    async def catch_up(self, number: PartitionNumber) -> None:
        """Return when this replica has all entries that were acknowledged before, or no longer exists."""
        while number in self._hosted:
            try:
                await self._router.fresh(number)
                break
            except ProposalError as error:
                logger.debug("partition %d: this replica is behind: %s", number, error)
        self.numbers.discard(number)
