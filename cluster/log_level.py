"""The level of a node's log, which operators can change while it runs."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

logger = logging.getLogger(__name__)

LEVELS: Final = ("debug", "info", "warning", "error")
#: A change for a while ends by itself after at most this long.
FOR_MS_MAX: Final = 7 * 24 * 3600 * 1000

_ours: Final = logging.getLogger("holdfast")


def read_log_format(value: Any) -> str:
    if value not in ("text", "json"):
        raise ValueError(f"{value!r:.80} is neither text nor json")
    return str(value)


def read_log_level(value: Any) -> str:
    if not isinstance(value, str) or value.lower() not in LEVELS:
        raise ValueError(f"{value!r:.80} is none of {', '.join(LEVELS)}")
    return value.lower()


class LogLevel:
    """One per node. It concerns our own loggers; those of libraries keep the level of the setting."""

    def __init__(self, configured: str) -> None:
        self.configured = configured
        self.level = configured
        self.until_ms = 0  # When the level of the setting returns; 0: never by itself.
        self._timer: asyncio.TimerHandle | None = None
        self._before: int | None = None  # What the logger was set to before we changed it.

    def change(self, level: str, *, for_ms: int, now_ms: int) -> None:
        """Until the node ends, or for a while if `for_ms` is not 0."""
        assert level in LEVELS and 0 <= for_ms <= FOR_MS_MAX
        self._cancel()
        if self._before is None:
            self._before = _ours.level
        # Announced at the louder of both levels, so that the log says why it grows silent or loud.
        logger.warning("the level of the log changes from %s to %s%s", self.level, level, _how_long(for_ms))
        _ours.setLevel(level.upper())
        self.level = level
        if for_ms:
            self.until_ms = now_ms + for_ms
            self._timer = asyncio.get_running_loop().call_later(for_ms / 1000, self.revert)

    def revert(self) -> None:
        """Return to the level of the setting."""
        self._cancel()
        if self._before is not None:
            _ours.setLevel(self._before)
            self._before = None
            logger.warning("the level of the log is %s again", self.configured)
        self.level = self.configured

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.until_ms = None, 0


def _how_long(for_ms: int) -> str:
    return f" for {for_ms / 1000:g} s" if for_ms else ""
