"""Withholds attempts of paused invocations, and starts them when their pause ends.

Every start passes `Invoker.start`, and every attempt that waited for its endpoint passes `Invoker.build`. Both ask here. A
withheld attempt is an id and an epoch, in a bounded table; those beyond the bound, and those that a new leader finds in the
state, are found there by a scan when a pause ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol

from holdfast.cluster.handlers.attempts import Attempt, Owner
from holdfast.sdk.ids import InvocationId
from holdfast.statemachine import queries
from holdfast.statemachine.effects import RecoverAttempt, StartAttempt
from holdfast.statemachine.pauses import Pauses, Scope, Standing, name_scope

logger = logging.getLogger(__name__)

WITHHELD_MAX: Final = 100_000
SLICE: Final = 256  # Attempts started or asked to suspend per turn of the event loop.


class Starter(Protocol):
    """The invoker, as this module knows it."""

    @property
    def attempts(self) -> Mapping[InvocationId, Attempt]: ...

    def start(self, owner: Owner, effect: StartAttempt, *, is_fresh: bool = False) -> None: ...


class _Withheld(NamedTuple):
    owner: Owner
    epoch: int
    service: str
    key: str | None


class Withholding:
    """One per node. `changed` is called whenever the meta group changes."""

    def __init__(self, starter: Starter, pauses: Callable[[], Pauses]) -> None:
        self._starter = starter
        self._pauses = pauses
        self._withheld: dict[InvocationId, _Withheld] = {}  # In the order in which they are started again.
        self._skipped: dict[Owner, None] = {}  # Owners with more, which a scan finds in the state.
        self._known: dict[Scope, Standing] = {}
        self._lifting = False
        self._lift_again = False  # Another pause ended meanwhile.
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._withheld)

    # -- what may not start

    def withholds(self, owner: Owner, effect: StartAttempt, service: str, key: str | None) -> bool:
        """Whether this attempt is paused. If so, it is started when the pause ends."""
        if self._pauses().covering(service, key) is None:
            return False
        if len(self._withheld) < WITHHELD_MAX or effect.id in self._withheld:
            self._withheld[effect.id] = _Withheld(owner, effect.epoch, service, key)
        else:
            self._skipped[owner] = None
        return True

    def skips(self, owner: Owner, effect: RecoverAttempt) -> bool:
        """Whether an attempt that was found in the state is paused. If so, a scan finds it again when the pause ends."""
        if self._pauses().covering(effect.service, effect.key) is None:
            return False
        if not self.has(effect.id, effect.epoch):
            self._skipped[owner] = None
        return True

    def has(self, invocation: InvocationId, epoch: int) -> bool:
        withheld = self._withheld.get(invocation)
        return withheld is not None and withheld.epoch >= epoch and not withheld.owner.ended

    def forget(self, owner: Owner) -> None:
        """A leadership has ended: its successor finds everything in the state."""
        self._skipped.pop(owner, None)
        for ident in [ident for ident, withheld in self._withheld.items() if withheld.owner is owner]:
            del self._withheld[ident]

    # -- changes

    def changed(self) -> None:
        """Pauses may have begun or ended."""
        known, self._known = self._known, dict(self._pauses().by_scope)
        for scope, standing in self._known.items():
            before = known.get(scope)
            if before is None:
                logger.warning(
                    "%s is paused by %s: %s",
                    name_scope(standing.scope),
                    standing.by,
                    standing.reason or "no reason given",
                )
            if standing.recall and not (before is not None and before.recall):
                self._recall(standing, list(self._starter.attempts.values()))
        ended = [standing for scope, standing in known.items() if scope not in self._known]
        for standing in ended:
            logger.warning("%s is resumed", name_scope(standing.scope))
        if ended:
            self._lift_again = True
            if not self._lifting:
                self._lift_all()

    def _recall(self, standing: Standing, attempts: list[Attempt], first: int = 0) -> None:
        """Ask the running attempts that this pause covers to suspend, in slices."""
        service, key = standing.scope
        if self._pauses().by_scope.get(standing.scope) != standing:
            return  # It ended meanwhile.
        for attempt in attempts[first : first + SLICE]:
            if attempt.over or (service and attempt.target.service != service):
                continue
            if key is not None:
                with attempt.partition.state.read() as txn:
                    record = queries.load(txn, attempt.id)
                if record is None or record.key != key:
                    continue
            attempt.ask_back()
        if first + SLICE < len(attempts):
            self._loop.call_soon(self._recall, standing, attempts, first + SLICE)

    def _lift_all(self) -> None:
        self._lifting, self._lift_again = True, False
        self._lift(list(self._withheld))

    def _lift(self, idents: list[InvocationId], first: int = 0) -> None:
        """Start what is not paused any more, in slices, in the order in which it came."""
        for ident in idents[first : first + SLICE]:
            withheld = self._withheld.get(ident)
            if withheld is None or self._pauses().covering(withheld.service, withheld.key) is not None:
                continue
            del self._withheld[ident]
            if not withheld.owner.ended:
                self._starter.start(withheld.owner, StartAttempt(ident, withheld.epoch))
        if first + SLICE < len(idents):
            self._loop.call_soon(self._lift, idents, first + SLICE)
            return
        self._lifting = False
        if self._lift_again:
            self._loop.call_soon(self._lift_all)
        skipped, self._skipped = self._skipped, {}
        for owner in skipped:
            if not owner.ended:
                owner.scan()
