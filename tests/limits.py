"""A time limit for every test, so that a hanging test fails instead of blocking the run.

At the limit the test fails where it is, with the stack of every thread and of every task of the event loop: its
`finally` blocks and fixtures still clean up. If these hang too, the limit strikes again. Processes that the test
started and did not end are killed; they are identified by variables that pytest and this module put into their
environment.

The limits are far above what tests take, even on a busy machine. `@pytest.mark.limit(seconds)` sets another one.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import traceback
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

LIMIT_S: Final = 120.0
SLOW_LIMIT_S: Final = 600.0  # For tests marked as slow.
#: The simulators only compute, on the processor time that the other tests leave.
SIMULATOR_LIMIT_S: Final = 2400.0
GRACE_S: Final = 60.0  # From one strike to the next.
RUN: Final = "PYTEST_RUN_ID"  # Distinguishes parallel runs of the same tests.


class OutOfTime(SystemExit):
    """pytest reports it as a failure of the test. An event loop of uvloop would swallow anything but an exit."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "limit(seconds, grace=60): fail the test after this time; see tests/limits.py")
    os.environ[RUN] = f"{os.getpid()}-{secrets.token_hex(8)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    limit_s, grace_s = limits(item)
    strikes = 0

    def strike(signum: int, frame: FrameType | None) -> None:
        nonlocal strikes
        strikes += 1
        print("\n".join(stacks()), file=sys.stderr)
        raise OutOfTime(f"{item.nodeid} did not end within {limit_s:g} s; its stacks are in the captured stderr")

    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, limit_s, grace_s)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if strikes:
            kill_processes_of(item.nodeid)


def limits(item: pytest.Item) -> tuple[float, float]:
    """The seconds until the limit strikes, and until it strikes again."""
    if (mark := item.get_closest_marker("limit")) is not None:
        return float(mark.args[0]), float(mark.kwargs.get("grace", GRACE_S))
    if item.nodeid.startswith("tests/sim/"):
        return SIMULATOR_LIMIT_S, GRACE_S
    return SLOW_LIMIT_S if item.get_closest_marker("slow") else LIMIT_S, GRACE_S


def stacks() -> Iterator[str]:
    """The stacks of every thread, and of every task of the loop in this one."""
    for thread, frame in sys._current_frames().items():
        yield f"---- thread {thread}"
        yield "".join(traceback.format_stack(frame)).rstrip()
    with suppress(RuntimeError):
        for task in asyncio.all_tasks(asyncio.get_running_loop()):
            yield f"---- {task.get_name()} waits at"
            yield from places(task.get_coro())


def places(coroutine: Any) -> Iterator[str]:
    """From the outermost frame of a suspended coroutine to what it waits for. `Task.get_stack` has the outermost alone."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            yield f"  {coroutine!r}"
        else:
            yield f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


def kill_processes_of(test: str) -> None:
    """What a test left running, wherever it now hangs in the tree of processes. Needs /proc."""
    ours, of_the_test = f"{RUN}={os.environ[RUN]}", f"PYTEST_CURRENT_TEST={test} "
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # It has ended, or is another user's.
            values = environment.read_bytes().decode(errors="replace").split("\0")
            pid = int(environment.parent.name)
            if ours in values and any(it.startswith(of_the_test) for it in values) and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
