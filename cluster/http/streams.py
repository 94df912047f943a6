"""Answers that go on: chunks that are sent as they come, for as long as client, node and permission last.

A stream ends when its source has no more, and also when the node stops or its listener closes, when the client is gone or
reads too slowly, and when its sender would not be admitted any more. The first four are seen at once, the others within
`CHECK_S`. Nobody waits for a stream: a stopping node ends all of them first.

A source is asked for its next chunk only after the last one went to the connection, so what a slow reader holds is one chunk
and the buffer of its connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from holdfast.cluster.errors import Stopping, Unavailable

logger = logging.getLogger(__name__)

#: Of one listener, until the number of its connections is known.
STREAMS_MAX: Final = 64
STREAMS_MIN: Final = 4
#: How often a stream is checked for a client that is gone and a sender that is no longer admitted.
CHECK_S: Final = 1.0
#: How long a client may take to read what was written before it. A slower one is disconnected.
READ_S: Final = 20.0
#: Larger chunks are written in pieces of this size.
PIECE_BYTES: Final = 64 * 1024


class Stream:
    """The content of an answer that goes on. `refused` says whether its sender would be refused by now."""

    __slots__ = ("chunks", "is_writing", "refused")

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self.chunks = chunks
        self.refused: Callable[[], Awaitable[bool]] = _never
        self.is_writing = False  # The connection takes no more until its client reads.


async def _never() -> bool:
    return False


class Streams:
    """Of one listener."""

    def __init__(self) -> None:
        self.most = STREAMS_MAX
        self.open = 0
        self.refused = 0  # for want of room, since the start
        self.slow = 0  # ended because their clients did not read, since the start
        self._over = ""  # Why there are no more streams, if there are none.
        self._ending: asyncio.Future[None] | None = None

    def limit(self, connections: int) -> None:
        """Streams may have half of the connections, so that there is always one for a short request."""
        self.most = max(connections // 2, STREAMS_MIN)

    def enter(self) -> None:
        """Count one more. Raises Unavailable. Whoever was let in calls `leave` once."""
        if self._over:
            raise Stopping(self._over)
        if self.open >= self.most:
            self.refused += 1
            raise Unavailable(
                f"{self.open} streams are open on this node, which is the limit",
                "close one, use another node, or try again after the time in Retry-After",
            )
        self.open += 1

    def leave(self) -> None:
        self.open -= 1

    def end_all(self, why: str) -> None:
        """End all streams, and begin no more."""
        self._over = self._over or why
        if self._ending is not None and not self._ending.done():
            self._ending.set_result(None)

    async def run(self, stream: Stream, write: Callable[[bytes], Awaitable[None]], is_gone: Callable[[], bool]) -> bool:
        """Write a stream until it ends. Returns whether the connection is in order: its end can be written, too."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_future()
        copying = asyncio.ensure_future(self._copy(stream, write))
        try:
            while not (self._over or copying.done() or is_gone() or await stream.refused()):
                await asyncio.wait((copying, self._ending), timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
        whole = copying.cancelled() or copying.result()
        return whole and not stream.is_writing and not is_gone()

    async def _copy(self, stream: Stream, write: Callable[[bytes], Awaitable[None]]) -> bool:
        """Returns whether the source ended by itself."""
        try:
            async for chunk in stream.chunks:
                stream.is_writing = True
                async with asyncio.timeout(READ_S):
                    for first in range(0, len(chunk), PIECE_BYTES):
                        await write(chunk[first : first + PIECE_BYTES])
                stream.is_writing = False
        except ConnectionError:
            return False  # The client is gone.
        except Exception as error:
            if isinstance(error, TimeoutError) and stream.is_writing:
                self.slow += 1
                return False
            logger.exception("a stream ended early, because its source failed")
            return False
        finally:
            close = getattr(stream.chunks, "aclose", None)
            if close is not None:
                await close()
        return True
