"""An event loop of one simulated process: the real tasks and futures of asyncio on the clock of the world.

There is no selector and there are no threads: the work of a thread happens at one moment, a while later. Callbacks run
in the order in which they were scheduled, timers by (time, sequence), and a turn of the loop is an event of the world.
A killed process never runs again: its loop just stops.

Only the copying of a backup waits in the middle of its work, with a transaction open. So in worlds with backups, the
work of a thread is a `Fiber`: a real thread, but one that runs only while the simulator waits for it.
"""

from __future__ import annotations

import asyncio
import threading
from asyncio import events
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from tests.sim.cluster.files import Crashed

if TYPE_CHECKING:
    from tests.sim.cluster.world import Process, World

#: From one turn of a busy loop to the next, so that the world continues in between.
TURN_S: Final = 0.00002
TASKS_KEPT: Final = 1000


class Fiber:
    """The work of a thread, in pieces: it runs from `resume` until it waits (`pause`) or ends; nothing else runs
    meanwhile."""

    def __init__(self, process: Process, work: Callable[[], None]) -> None:
        assert process.loop is not None
        self.process = process
        self._life = process.loop
        self._work = work
        self._thread = threading.Thread(target=self._run, name="holdfast-sim", daemon=True)
        # Whose turn it is: the fiber's or the simulator's.
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._pauses = 0
        self._over = self._doomed = False
        self._error: BaseException | None = None
        process.fibers.append(self)

    def resume(self) -> None:
        """Raises the fiber's exception, if it ended with one."""
        world = self.process.world
        before = world.running, world.fiber
        world.running, world.fiber = self.process, self
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._mine.release()
        self._theirs.acquire()
        world.running, world.fiber = before
        if self._over:
            self._thread.join()
            if self in self.process.fibers:
                self.process.fibers.remove(self)
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self._over = True
        self._theirs.release()

    def pause(self, seconds: float) -> None:
        """Called from inside the fiber. If its process died in the meantime, it does not continue."""
        world = self.process.world
        number = self._pauses = self._pauses + 1
        world.after(seconds, lambda: self.wake(number))
        self._theirs.release()
        self._mine.acquire()
        if self._doomed:
            raise Crashed

    def wake(self, number: int | None = None) -> None:
        world = self.process.world
        number = self._pauses if number is None else number
        if self._over or number != self._pauses or not self._life.alive:
            return
        if self.process.paused_until > world.now:
            world.at(self.process.paused_until, lambda: self.wake(number))
            return
        with suppress(Crashed):
            self.resume()

    def end(self) -> None:
        """Its process is dead."""
        self._doomed = True
        if not self._over:
            with suppress(Crashed):
                self.resume()


class SimEvent:
    """Replaces `threading.Event` in the code under test."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_set = False
        self._waiting: list[Fiber] = []

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for fiber in waiting:
            self._world.after(0.0, fiber.wake)

    def wait(self, seconds: float) -> bool:
        if not self._is_set:
            fiber = self._world.fiber
            assert fiber is not None, "only a thread may wait"
            self._waiting.append(fiber)
            fiber.pause(seconds)
        return self._is_set


class SimCondition:
    """Replaces `threading.Condition`: the loop waits until its threads have released something."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None: ...

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        process = self._world.running
        while not predicate():
            assert process is not None and process.fibers, "somebody holds it"
            for fiber in list(process.fibers):
                with suppress(Crashed):
                    fiber.resume()
            if not process.up:
                raise Crashed


class SimLoop(asyncio.AbstractEventLoop):
    def __init__(self, process: Process) -> None:
        self.process = process
        self.world = process.world
        self.alive = True
        self._ready: deque[asyncio.Handle] = deque()
        # All tasks ever created: garbage collection would run code at unknown times.
        self._tasks: list[asyncio.Task[Any]] = []
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
        """A call from a thread. The loop receives it a little later."""
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
        """An exception in a callback is a defect. One from garbage collection is not, because its time is arbitrary."""
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
        """Do the work of a thread of this process."""
        if self.world.profile.backups:
            Fiber(self.process, work).resume()
            return
        self.world.running = self.process
        try:
            work()
        finally:
            self.world.running = None

    def kill(self) -> None:
        """Nothing runs from now on. Everything is kept unchanged until the end of the world (`bury`)."""
        self.alive = False

    def bury(self) -> None:
        """Close everything unfinished, now."""
        self.kill()
        self._ready.clear()
        for task in self._tasks:
            coroutine: Any = task.get_coro()
            if not task.done() and coroutine is not None:
                with suppress(BaseException):
                    coroutine.close()
        self._tasks = []
