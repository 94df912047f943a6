"""One attempt: it runs the code on its journal and reports how the code ended.

It is driven by frames and by the user's code. It sends through a function that takes frames, and knows no socket.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from threading import get_ident
from typing import Any, Final, TypeAlias

from holdfast.sdk import scopes, timers, traces
from holdfast.sdk.attempt.claims import REFUSED, TOO_LONG
from holdfast.sdk.attempt.operation import Event
from holdfast.sdk.attempt.outcomes import is_delivered
from holdfast.sdk.attempt.steps import Steps
from holdfast.sdk.attempt.tasks import forget_frames, no_context
from holdfast.sdk.errors import (
    AttemptEnded,
    exit_raised,
    find_final,
    is_from_terminal,
    never_works,
    to_failure,
)
from holdfast.sdk.frames import VERSION, Frame, Output, Start, Waiting
from holdfast.sdk.ids import format_id
from holdfast.sdk.journal import CANCELLED, Failure, Op, ProtocolError, Success, pack_outcome, pack_success

logger = logging.getLogger("holdfast.sdk")

#: Prefix of the keys of steps that record where a cancellation was noticed. Keys of the code never have this prefix.
_NOTICE: Final = "#cancelled "
_NOTICED_AFTER: Final = "cancelled after step "

#: The code that an attempt runs: the handler with its context and input. Returns the payload of the output.
Code: TypeAlias = Callable[["Attempt"], Coroutine[Any, Any, bytes]]


class Attempt(Steps):
    """One run of a handler, from START to its end."""

    input: bytes
    headers: dict[str, str]
    began_at: float  # When the code began, by the clock of the loop; 0: not yet.

    __slots__ = tuple(__annotations__)

    def __init__(
        self,
        start: Start,
        *,
        send: Callable[[Frame], None],
        loop: asyncio.AbstractEventLoop,
        ended: Callable[[Attempt], None],
        eager: bool = False,
        version: int = VERSION,
    ) -> None:
        """`eager`: there is no live stream, so nothing is acknowledged, and the attempt is handed back when it waits.

        `version` is the protocol version that the node uses. One constructor sets the fields of all layers, because
        every attempt runs it.
        """
        self.ended = False
        self.time_floor = 0.0
        self.activity = 0
        self.touched = True
        self.id = start.invocation
        self.epoch = start.epoch
        self.start = start
        self.seed = start.seed
        self.name = f"{start.service}/{start.handler} {format_id(start.invocation)}"
        self.loop = loop
        self.thread = get_ident()
        self.send = send
        self.on_ended = ended
        self.eager = eager
        self.is_live = not eager
        self.version = version
        self.tasks = set()
        self.told = {}
        self.context = no_context
        self.low = 0
        self.length = 0
        self.acked = 0
        self.size = 0
        self.steps = []
        self.keys = {}
        self.matched = bytearray()
        self.explicit = set()
        self.refused = set()
        self.unsettled = 0
        self.delivered = 0
        self.settling = False
        self.quiet = 0
        self.seen = 0
        self.pumping = False
        self.last = -1
        self.open = {}
        self.events = deque()
        self.unacked = deque()
        self.cancelled = start.cancelled
        self.cancelled_after = {}
        self.noticed = None
        self.interruptible = {}
        self.check = None
        self.functions = 0
        self.stays = False
        self.starts_runs = True
        self.waits = set()
        self.ack_waits = deque()
        self.timers = set()
        self.parked = []
        self.input = b""
        self.headers = {}
        self.began_at = 0.0
        self.add_journal(start.journal)

    def begin(self, code: Code, *, name: str) -> None:
        """The journal is complete: run the code."""
        steps = self.steps
        given = steps[0].outcome if steps and steps[0].op == Op.INPUT else None
        if given is None:
            raise ProtocolError("a journal must begin with the input")
        self.length = self.acked = len(steps)
        self.matched = bytearray(len(steps))
        self.matched[0] = 1
        self.low = 1
        del self.keys[steps[0].key]
        self.headers = steps[0].argument[0] if steps[0].argument else {}
        self.input = given.payload if isinstance(given, Success) else b""
        self._read_notices()
        events = [
            Event(step.done, index, step.outcome)
            for index, step in enumerate(steps)
            if step.outcome is not None and not self.matched[index] and not step.abandoned and is_delivered(step)
        ]
        events.sort(key=lambda event: event.order or 0)
        self.events.extend(events)
        scopes.install_factory(self.loop)
        timers.install(self.loop)
        self.adopt(scopes.unscoped_task(self.loop, self._main(code), name=name))

    async def _main(self, code: Code) -> None:
        """The root task: run the code and report how it ended."""
        scopes.begin(scopes.Scope(self, ""))
        try:
            payload = await code(self)
        except AttemptEnded as ended:
            forget_frames(ended)
            return
        except (KeyboardInterrupt, SystemExit) as error:
            if is_from_terminal(error):
                raise
            if not self.ended:
                self._failed(exit_raised(error))
            return
        except BaseException as error:
            if not self.ended:
                self._failed(error)
            return
        if not self.ended and self._has_replayed("returns"):
            self._warn_of_sleeps()
            if self.cancelled:
                self._notice_at_last()
            else:
                self.send(Output(self.id, self.epoch, pack_success(payload)))
            self.end()

    def _warn_of_sleeps(self) -> None:
        """Most operations take effect without being awaited, but a sleep does not."""
        for operation in self.open.values():
            if operation.code == Op.SLEEP and operation.waits is None and operation.listeners is None:
                what = f"{self.start.service}/{self.start.handler} {operation.key}"
                timers.warn_once("%s: %r was never awaited, so the code did not wait", self.name, operation, at=what)

    def _failed(self, error: BaseException) -> None:
        terminal = find_final(error)
        if terminal is not None:
            if self._has_replayed(f"fails: {terminal}"):
                self.send(Output(self.id, self.epoch, pack_outcome(to_failure(terminal))))
                self.end()
            return
        invocation = format_id(self.id)
        logger.warning(
            "%s: attempt %d of %s/%s failed", invocation, self.start.attempt, self.start.service, self.start.handler,
            exc_info=traces.for_log(error), extra={"invocation_id": invocation},
        )  # fmt: skip
        self.fail(error, pause=never_works(error))

    def _has_replayed(self, found: str) -> bool:
        """Whether the code claimed all journaled steps of its root task. If not, the attempt fails."""
        for key, index in self.keys.items():
            if ":" not in key:
                self.fail_nondeterministic(index, f"the handler {found}")
                return False
        return True

    @property
    def replaying(self) -> bool:
        """Whether the code is still in the part that an earlier attempt ran."""
        return bool(self.keys) or bool(self.events and self.events[0].order is not None and self.low < len(self.steps))

    def _notice_at_last(self) -> None:
        """The code returned before any operation noticed the cancellation, so from now on the last operation notices
        it.

        The journal records which operation that is. In the next attempt it raises, and the code may compensate. Code
        without a durable step has nothing to compensate.
        """
        if self.last < 0:
            self.send(Output(self.id, self.epoch, pack_outcome(CANCELLED)))
            return
        key, name = f"{_NOTICE}{len(self.cancelled_after)}", f"{_NOTICED_AFTER}{self.last}"
        self.journal(Op.RUN, key, [name], CANCELLED)
        self.send(Waiting(self.id, self.epoch, []))

    def _read_notices(self) -> None:
        """Remove the steps of `_notice_at_last` and `check_room`, which the code does not claim."""
        for key, index in list(self.keys.items()):
            step = self.steps[index]
            outcome = step.outcome
            if step.op == Op.RUN and isinstance(outcome, Failure) and outcome[1:3] == TOO_LONG[1:3]:
                self.refused.add(key)
            if not key.startswith((_NOTICE, REFUSED)):
                continue
            if key.startswith(_NOTICE):
                self.cancelled_after[int(step.argument[0].removeprefix(_NOTICED_AFTER))] = step.made
            self.matched[index] = 1
            del self.keys[key]
        self._advance()
