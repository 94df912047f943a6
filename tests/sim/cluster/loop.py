"""An event loop of one simulated process: the real tasks and futures of asyncio on the clock of the world.

There is no selector and there are no threads: what a thread would do happens at one moment, a while later. Callbacks run
in the order in which they were asked for, timers by (time, sequence), and a turn of the loop is an event of the world. A
process that is killed never runs again: its loop just stops.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.sim.cluster.world import Process

#: From one turn of a busy loop to the next, so that the world goes on meanwhile.
TURN_S: Final = 0.00002
TASKS_KEPT: Final = 1000


class SimThread:
    """What the code under test takes for a thread: `threading.Thread`."""

    def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._target = target

    def start(self) -> None:
        loop = events.get_running_loop()
        assert isinstance(loop, SimLoop)
        loop.process.begin_work(self._target)


class SimLoop(asyncio.AbstractEventLoop):
    def __init__(self, process: Process) -> None:
        self.process = process
        self.world = process.world
        self.alive = True
        self._ready: deque[asyncio.Handle] = deque()
        self._tasks: list[asyncio.Task[Any]] = []  # All there ever were: garbage would run code when nobody knows.
        self._scheduled = False

    # -- what asyncio needs ----------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.process.now()

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self.alive

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        self._make_ready(handle)
        return handle

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return self.call_at(self.time() + max(delay, 0.0), callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self.world.at(max(self.process.when(when), self.world.now), lambda: self._ring(timer))
        return timer

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        """What a thread tells the loop. The loop hears of it a little later."""
        handle = asyncio.Handle(callback, args, self, context)
        late_s, self.process.hears_late_s = self.process.hears_late_s, 0.0
        self.world.after(self.world.rng.uniform(0.0, 0.01) + late_s, lambda: self._make_ready(handle))
        return handle

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()

        def tell(result: Any, error: BaseException | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

        def run() -> None:
            try:
                result, error = func(*args), None
            except Exception as failure:
                result, error = None, failure
            self.call_soon_threadsafe(tell, result, error)

        self.process.begin_work(run)
        return future

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None: ...

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        if len(self._tasks) > TASKS_KEPT:
            self._tasks = [task for task in self._tasks if not task.done()]
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A callback that raises is a defect. What is found out when garbage is collected is not: nobody knows when."""
        if self.alive and "handle" in context:
            self.world.violate(f"{self.process.name}: {context['message']}: {context.get('exception')!r}")

    # -- turns -----------------------------------------------------------------------------------------------------------

    def _ring(self, timer: asyncio.TimerHandle) -> None:
        if not timer.cancelled():
            self._make_ready(timer)

    def _make_ready(self, handle: asyncio.Handle) -> None:
        if self.alive:
            self._ready.append(handle)
            if not self._scheduled:
                self._scheduled = True
                self.world.at(self.world.now + TURN_S, self._turn)

    def _turn(self) -> None:
        if not self.alive:
            return
        if self.process.paused_until > self.world.now:
            self.world.at(self.process.paused_until, self._turn)
            return
        self._scheduled = False
        self.world.running = self.process
        events._set_running_loop(self)
        try:
            for _ in range(len(self._ready)):
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
                if not self.is_running():
                    return
        finally:
            events._set_running_loop(None)
            self.world.running = None
        if self._ready and not self._scheduled:
            self._scheduled = True
            self.world.at(self.world.now + TURN_S, self._turn)

    def lend(self, work: Callable[[], None]) -> None:
        """Do what a thread of this process does."""
        self.world.running = self.process
        try:
            work()
        finally:
            self.world.running = None

    def kill(self) -> None:
        """From now on nothing runs. What there was is kept as it is until the end of the world (`bury`)."""
        self.alive = False

    def bury(self) -> None:
        """Close what never came to its end, here and now."""
        self.kill()
        self._ready.clear()
        for task in self._tasks:
            coroutine: Any = task.get_coro()
            if not task.done() and coroutine is not None:
                with suppress(BaseException):
                    coroutine.close()
        self._tasks = []
