"""Record changes and their principals: a line in the log of this node for each act, and an entry in the audit trail of
the cluster.

An act is a request that changes something, or one that was refused because its sender lacks permission. Invocations are
not acts: they have journals. Requests do not wait for the trail. Its log is kept for ever, so each kind of act has an
allowance; further acts are only in the log of the node, and the next act in the trail says how many there were. Each token
has a small allowance of its own beside the common one, so nobody can hide what the owner of another token does. Acts of
strangers (signing out, for example) and refused acts have no part in the common one; beyond their allowances they are in
neither place: they are counted, and the log says once a minute how many there were.

Nothing here reads a body. Names come from clients, so they are cut, lose their control characters, and are written as
JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from holdfast.cluster.http.access import Principal
from holdfast.log.errors import ProposalError
from holdfast.statemachine.audit import Act, RecordActs

logger = logging.getLogger("holdfast.audit")
TEXT_LENGTH_MAX: Final = 200
TARGETS_MAX: Final = 16
BATCH_MAX: Final = 100  # Acts in one command.
PENDING_MAX: Final = 1000  # Waiting acts, for example while the meta group has no leader.
REST_S: Final = 0.1  # Between two commands,
AGAIN_S: Final = 1.0  # and after one that failed.
LAST_S: Final = 1.0  # For waiting acts when this node stops.
REFUSED: Final = frozenset({401, 403})
#: How many acts of a kind the trail takes at once, and how many per second in the long run. `own`: of one token, beside
#: those of the door; `refused`: of one token or of all strangers.
ALLOWANCES: Final = {"admin": (1000, 1 / 6), "ingress": (500, 1 / 60), "own": (60, 1 / 60), "refused": (60, 1 / 60)}
KNOWN_MAX: Final = 1000  # Tokens with allowances of their own. Further ones share one of each kind.
SUMMARY_S: Final = 60.0
#: A token in the wrong place. Its id is shown, its secret is not.
_TOKEN: Final = re.compile(r"(hf_[A-Za-z0-9]{1,64}_)[A-Za-z0-9_-]{8,}")


class Audit:
    """`propose` proposes a command to the meta group. `is_open` says whether all nodes support such commands."""

    def __init__(
        self,
        node: str,
        *,
        now_ms: Callable[[], int],
        propose: Callable[[RecordActs], Awaitable[Any]],
        is_open: Callable[[], bool],
    ) -> None:
        self._node = node
        self._now_ms = now_ms
        self._propose = propose
        self._is_open = is_open
        self._pending: deque[Act] = deque()
        self._came = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._task: asyncio.Task[None] | None = None
        self._allowances = {kind: _Allowance(*limits) for kind, limits in ALLOWANCES.items()}
        #: Allowances of tokens, by their ids. "": all further tokens.
        self._known: dict[str, dict[str, _Allowance]] = {"own": {}, "refused": {}}
        self._unlogged = {"strangers": 0, "known tokens": 0}  # Acts since the last summary.
        self._summary: asyncio.TimerHandle | None = None
        self._unrecorded = 0  # Since the last act that was recorded.
        self.acts = 0
        self.unrecorded = 0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Waiting acts get a moment. They are in the log of this node in any case."""
        if self._summary is not None:
            self._summary.cancel()
            self._summarize()
        if self._task is None:
            return
        await self.settle(LAST_S)
        self._task.cancel()
        await asyncio.wait({self._task})

    async def settle(self, patience_s: float) -> None:
        """Return when all acts noted before the call are in the trail, or when patience ends."""
        if self._task is None or not self._is_open():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._settled.wait()

    def note(
        self,
        principal: Principal,
        *,
        door: str,
        address: str,
        method: str,
        action: str,
        targets: Mapping[str, object],
        status: int,
        error: str,
    ) -> None:
        """`status` 0: the client disconnected before it was answered."""
        self.acts += 1
        act = Act(
            at_ms=self._now_ms(),
            node=self._node,
            principal=plain(principal.id),
            name=plain(principal.name),
            address=plain(address),
            door=door,
            method=plain(method),
            action=plain(action),
            targets={plain(name): plain(str(value)) for name, value in [*targets.items()][:TARGETS_MAX]},
            status=status,
            error=error,
        )
        is_limited = status in REFUSED or principal.is_stranger
        if is_limited:
            is_allowed = self._allowance("refused", principal.id).take()
        else:
            is_allowed = self._allowances[door].take() or (
                bool(principal.id) and self._allowance("own", principal.id).take()
            )
        if is_limited and not is_allowed:
            self._skip("known tokens" if principal.id else "strangers")
        else:
            logger.info("%s", _line(act))
        if not is_allowed or not self._is_open():
            self._lose(1)
            return
        self._pending.append(act)
        if len(self._pending) > PENDING_MAX:
            self._pending.popleft()
            self._lose(1)
        self._settled.clear()
        self._came.set()

    def _allowance(self, kind: str, token: str) -> _Allowance:
        """That of one token, or of all strangers."""
        if not token:
            return self._allowances[kind]
        known = self._known[kind]
        if token not in known and len(known) >= KNOWN_MAX:
            known = self._known[kind] = {each: left for each, left in known.items() if not left.is_full()}
            if len(known) >= KNOWN_MAX:
                token = ""
        return known.setdefault(token, _Allowance(*ALLOWANCES[kind]))

    def _skip(self, whose: str) -> None:
        """The act is not logged: a summary follows."""
        self._unlogged[whose] += 1
        if self._summary is None:
            self._summary = asyncio.get_running_loop().call_later(SUMMARY_S, self._summarize)

    def _summarize(self) -> None:
        self._summary = None
        for whose, count in self._unlogged.items():
            if count:
                logger.warning("%d more acts by %s were not recorded", count, whose)
                self._unlogged[whose] = 0

    def _lose(self, count: int) -> None:
        self.unrecorded += count
        self._unrecorded += count

    async def _run(self) -> None:
        while True:
            await self._came.wait()
            batch = [self._pending.popleft() for _ in range(min(BATCH_MAX, len(self._pending)))]
            unrecorded, self._unrecorded = self._unrecorded, 0
            batch[0] = batch[0]._replace(unrecorded=unrecorded)
            command = RecordActs(os.urandom(8), batch)
            await self._record(command)
            if not self._pending:
                self._came.clear()
                self._settled.set()
            await asyncio.sleep(REST_S)

    async def _record(self, command: RecordActs) -> None:
        while True:
            try:
                await self._propose(command)
                return
            except (ProposalError, TimeoutError) as error:
                count = len(command.acts) + len(self._pending)
                logger.warning("%d acts are not in the audit trail yet: %s", count, error)
            await asyncio.sleep(AGAIN_S)


class _Allowance:
    """A token bucket."""

    def __init__(self, most: int, per_second: float) -> None:
        self._most = float(most)
        self._per_second = per_second
        self._left = float(most)
        self._at: float | None = None

    def is_full(self) -> bool:
        self._refill()
        return self._left >= self._most

    def _refill(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._at is not None:
            self._left = min(self._most, self._left + (now - self._at) * self._per_second)
        self._at = now

    def take(self) -> bool:
        self._refill()
        if self._left < 1:
            return False
        self._left -= 1
        return True


def plain(text: str) -> str:
    """A short text that can be stored and shown: without control characters, broken Unicode and secrets of tokens."""
    if len(text) > TEXT_LENGTH_MAX:
        text = text[:TEXT_LENGTH_MAX] + "…"
    if not text.isprintable():
        text = "".join(each if each.isprintable() else "\ufffd" for each in text)
    return _TOKEN.sub(r"\1…", text) if "hf_" in text else text


def outcome_of(status: int) -> str:
    if status in REFUSED:
        return "refused"
    if not status:
        return "unknown"
    return "done" if status < 400 else "failed"


def _line(act: Act) -> str:
    """One line of JSON in ASCII, whatever names clients used."""
    line = {"outcome": outcome_of(act.status), **act._asdict()}
    del line["unrecorded"]
    return json.dumps(line)
