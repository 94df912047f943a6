"""Where an exception came from, short enough for a journal: the last frames of the user's code."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from traceback import walk_tb
from types import CodeType, TracebackType
from typing import Final

FRAMES_MAX: Final = 8
FRAME_CHARACTERS_MAX: Final = 200

#: Infrastructure between the user's frames, which is irrelevant to the failure.
_MACHINERY: Final = ("holdfast.sdk", "asyncio", "concurrent.futures", "threading", "contextvars")


def frames(error: BaseException) -> list[str]:
    """The last frames of its traceback, the innermost last: "orders.py:41 in charge"."""
    while isinstance(error, BaseExceptionGroup):  # A task group wraps the errors of its tasks.
        error = error.exceptions[0]
    found = [(frame.f_code, line, frame.f_globals.get("__name__", "")) for frame, line in walk_tb(error.__traceback__)]
    own = [(code, line) for code, line, module in found if not _is_machinery(module)]
    shown = own or [(code, line) for code, line, _ in found]
    return [_frame(code, line) for code, line in shown[-FRAMES_MAX:]]


def for_log(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """The exception as `exc_info`, with its traceback from the first frame of the user's code on."""
    trace = error.__traceback__
    while trace is not None and _is_machinery(trace.tb_frame.f_globals.get("__name__", "")):
        trace = trace.tb_next
    return type(error), error, trace or error.__traceback__


def _is_machinery(module: object) -> bool:
    return isinstance(module, str) and any(module == name or module.startswith(f"{name}.") for name in _MACHINERY)


def _frame(code: CodeType, line: int) -> str:
    text = f"{short_path(code.co_filename)}:{line} in {code.co_qualname}"
    return text.encode(errors="replace").decode()[:FRAME_CHARACTERS_MAX]


def short_path(path: str) -> str:
    """Relative to the working directory or to the root of the module: no absolute path of the machine."""
    for root in _roots():
        if path.startswith(root):
            return path[len(root) :]
    return os.path.basename(path)


def _roots() -> list[str]:
    """Longest first, so that site-packages below the working directory are recognized."""
    known = [root for root in sys.path if os.path.isabs(root)]
    with suppress(OSError):  # The directory may have been removed while the process runs.
        known.append(os.getcwd())
    roots = {os.path.join(root, "") for root in known}
    return sorted(roots, key=lambda root: (-len(root), root))
