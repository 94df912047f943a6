"""Reports to the meta group when tokens were last used, so that operators can find unused ones.

The log of the meta group is kept for ever, so this is approximate: a token is reported at most once in ten minutes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from holdfast.cluster.http.access import Access
from holdfast.log.errors import ProposalError
from holdfast.statemachine.access import NoteTokenUse, Tokens

logger = logging.getLogger(__name__)
REPORT_S: Final = 60.0
RESOLUTION_MS: Final = 10 * 60 * 1000


class TokenUse:
    def __init__(
        self, access: Access, tokens: Callable[[], Tokens], propose: Callable[[NoteTokenUse], Awaitable[Any]]
    ) -> None:
        self._access = access
        self._tokens = tokens
        self._propose = propose
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            await self.report()

    async def report(self) -> None:
        known = self._tokens().by_id
        used = {
            id_: used_ms
            for id_, used_ms in self._access.take_used().items()
            if id_ in known and used_ms - known[id_].used_ms >= RESOLUTION_MS
        }
        if not used:
            return
        try:
            await self._propose(NoteTokenUse(used))
        except (ProposalError, TimeoutError) as error:
            logger.info("the last use of %d tokens could not be recorded: %s", len(used), error)
