"""A terminal that a command draws on: a screen of its own, keys without Enter, and everything as it was at the end."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Final

_ENTER: Final = "\x1b[?1049h\x1b[?25l"  # The alternate screen, without a cursor.
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HOME: Final = "\x1b[H"
_CLEAR_LINE: Final = "\x1b[K"
_CLEAR_BELOW: Final = "\x1b[J"


class Terminal:
    """`with Terminal() as terminal`. It is restored also after an exception, SIGTERM, SIGHUP, and around Ctrl-Z."""

    def __init__(self) -> None:
        self._stdin = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._settings: list[Any] | None = None
        self._before: dict[int, Any] = {}
        self.entered = 0  # How often the screen was empty, and has to be drawn again.

    def __enter__(self) -> Terminal:
        for number, handler in ((signal.SIGTERM, _end), (signal.SIGHUP, _end), (signal.SIGTSTP, self._suspend)):
            self._before[number] = signal.signal(number, handler)
        self._enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _enter(self) -> None:
        if self._stdin >= 0:
            self._settings = termios.tcgetattr(self._stdin)
            tty.setcbreak(self._stdin)
        _write(_ENTER)
        self.entered += 1

    def _leave(self) -> None:
        with suppress(OSError):  # The terminal is gone.
            _write(_LEAVE)
        if self._settings is not None:
            with suppress(termios.error):
                termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._settings)
            self._settings = None

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: the shell gets its screen, and we get ours when it goes on."""
        self._leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._enter()

    @property
    def size(self) -> os.terminal_size:
        try:
            found = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            found = os.terminal_size((0, 0))
        # Serial lines, and terminals that nobody told their size, say 0.
        return os.terminal_size((found.columns or 80, found.lines or 24))

    def show(self, lines: Sequence[str]) -> None:
        """Overwrite the screen from its first line, in one write. Nothing is cleared first, so nothing flickers."""
        _write(_HOME + "\r\n".join(line + _CLEAR_LINE for line in lines) + _CLEAR_BELOW)

    def key(self, wait_s: float) -> str:
        """The next key, or nothing after a while."""
        if self._stdin < 0:
            select.select([], [], [], wait_s)
            return ""
        readable, _, _ = select.select([self._stdin], [], [], wait_s)
        return os.read(self._stdin, 1).decode(errors="replace") if readable else ""


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
