"""Threads for long work: when a cancelled task waits for its thread, and when it leaves it."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress

import pytest

from holdfast.snapshots.work import FewThreads, Work, in_thread

PATIENCE_S = 30.0


class Silent:
    """A request that nobody answers until the test says so."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answer = threading.Event()
        self.ended = threading.Event()

    def __call__(self, work: Work) -> None:
        self.asked.set()
        self.answer.wait(PATIENCE_S)
        self.ended.set()


async def test_a_cancelled_task_waits_for_its_thread() -> None:
    silent = Silent()
    task = asyncio.ensure_future(in_thread(silent))
    await asyncio.to_thread(silent.asked.wait, PATIENCE_S)

    task.cancel()
    await asyncio.wait((task,), timeout=0.3)
    waited = not task.done()
    silent.answer.set()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert waited and silent.ended.is_set()


async def test_a_cancelled_task_leaves_a_thread_that_a_silent_store_holds_up() -> None:
    silent = Silent()
    task = asyncio.ensure_future(in_thread(silent, abandon_after_s=0.1))
    await asyncio.to_thread(silent.asked.wait, PATIENCE_S)

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(PATIENCE_S / 2):
            await task
    assert not silent.ended.is_set()
    silent.answer.set()


async def test_a_cancelled_task_waits_while_its_store_still_answers() -> None:
    cancelled, ended = threading.Event(), threading.Event()

    def request(work: Work) -> None:
        with suppress(Exception):
            work.pause(PATIENCE_S)
        cancelled.set()
        time.sleep(0.2)
        ended.set()

    task = asyncio.ensure_future(in_thread(request, abandon_after_s=PATIENCE_S))
    await asyncio.sleep(0)

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled.is_set() and ended.is_set()


def test_few_threads_do_all_work_and_end() -> None:
    pool = FewThreads(max_workers=3)
    together = threading.Barrier(3)

    def work(number: int) -> int:
        together.wait(PATIENCE_S)
        if number == 4:
            raise ValueError(number)
        return number

    futures = [pool.submit(work, number) for number in range(6)]
    names = {thread for thread in threading.enumerate() if thread.name == "holdfast-store" and thread.is_alive()}
    pool.shutdown()

    assert [future.result() for future in futures if future is not futures[4]] == [0, 1, 2, 3, 5]
    with pytest.raises(ValueError):
        futures[4].result()
    assert len(names) == 3 and all(thread.daemon for thread in names)
    assert not any(thread.is_alive() for thread in names)
    with pytest.raises(RuntimeError):
        pool.submit(work, 7)
