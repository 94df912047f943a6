"""One deployment as this node reaches it: a queue of waiting attempts, and the carriers of the running ones.

The handler protocol creates the carriers. The endpoint connects a carrier while there is anything to send, with growing
pauses after failures. When a carrier breaks, all its attempts are dispatched again at once. A draining carrier keeps
its attempts, and the next carrier takes the new ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Final

from holdfast.cluster.backoff import backoff, with_jitter
from holdfast.cluster.handlers.attempts import Attempt, Carrier, Owner, Ticket
from holdfast.cluster.handlers.dispatch import Dispatcher
from holdfast.cluster.handlers.health import Health
from holdfast.cluster.handlers.large import Loads
from holdfast.cluster.handlers.protocols.interface import CannotConnect, Connector
from holdfast.cluster.handlers.protocols.table import Protocols
from holdfast.cluster.handlers.queue import SUSPICION_S, Queue
from holdfast.sdk.ids import DeploymentId, InvocationId
from holdfast.statemachine.effects import StartAttempt

logger = logging.getLogger(__name__)

#: Pause after an endpoint broke the rules of its protocol: doubled each time, reset after a while.
OFFENCE_S: Final = 1.0
OFFENCE_S_MAX: Final = 60.0
OFFENCE_FORGOTTEN_S: Final = 300.0
#: An endpoint may close streams cleanly, without announcing it, GOODBYES_MAX times in GOODBYES_S. After that an attempt
#: is assumed to have ended the process, as if the stream had broken.
GOODBYES_MAX: Final = 3
GOODBYES_S: Final = 60.0
#: Interval of checking whether the attempts that places were reserved for have arrived.
LOOK_S: Final = 0.5
#: Waiting attempts examined per turn of the event loop.
RECONSIDERED: Final = 512
#: Delay before an attempt that this node failed to start is dispatched again.
REBUILD_S: Final = 1.0


class Endpoint:
    def __init__(self, invoker: Dispatcher, deployment: DeploymentId, protocols: Protocols) -> None:
        self.invoker = invoker
        self.deployment = deployment
        self.queue: Queue[Ticket, Owner] = Queue(asyncio.get_running_loop().time, invoker.limits.waiting)
        self._look: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None  # For handlers that end their process.
        self.carrier: Carrier | None = None
        self.carriers: dict[Carrier, None] = {}  # Including draining ones.
        self._protocols = protocols
        self._connectors: dict[
            str, Connector
        ] = {}  # By protocol. A deployment that is overwritten may speak another one.
        self.loads = Loads(invoker.objects)
        self.failures = 0  # Consecutive.
        self.offences = 0  # Streams recently closed because the endpoint broke the protocol.
        self._offended_at = 0.0
        self._goodbyes: deque[float] = deque(
            maxlen=GOODBYES_MAX
        )  # When streams with attempts were last closed cleanly.
        self.last_error = ""
        self._down_since_ms = 0
        self.blocked = 0  # How often its event loop was blocked,
        self.blocked_ms = 0  # for how long in total,
        self.last_block = ""  # and by what, the last time.
        self._loop = asyncio.get_running_loop()
        self._connecting: asyncio.Task[None] | None = None
        self._not_before = 0.0
        self._closed = False
        self._pumping = False

    # -- the queue ---------------------------------------------------------------------------------------------------

    def enqueue(self, ticket: Ticket) -> None:
        queue = self.queue
        if not queue.takes(ticket.id):
            self.pass_over(ticket.owner, ticket.id)
        elif queue.is_next(ticket) and self._has_room():
            self._start(ticket)
        else:
            queue.add(ticket if ticket.first is None else ticket._replace(first=None))
            self._reach_out()

    def pass_over(self, owner: Owner, invocation: InvocationId) -> None:
        """Skip an attempt for now. It is not lost: a search finds it in the state when there are places again."""
        self.queue.pass_over(owner, invocation)
        if self.queue.places > 0 and self._look is None:
            # All places are reserved. If those attempts never arrive, nothing else would trigger a search.
            self._look = self._loop.call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self.pump()
        if self.queue.has_passed_over and self.queue.places > 0:
            self._look = self._loop.call_later(LOOK_S, self._look_again)

    def _resume(self, *, anywhere: bool = False) -> None:
        """Have the owners of skipped attempts look for them."""
        for owner, first in self.queue.take_passed_over():
            owner.scan(first, None if anywhere else self.deployment)

    def queued(self, invocation: InvocationId, epoch: int) -> bool:
        ticket = self.queue.get(invocation)
        return ticket is not None and ticket.epoch >= epoch and not ticket.owner.ended

    def forget(self, owner: Owner) -> None:
        self.queue.forget(owner)

    @property
    def may_try(self) -> bool:
        return self._loop.time() >= self._not_before

    @property
    def has_waiting(self) -> bool:
        return bool(self.queue)

    def _has_room(self) -> bool:
        carrier = self.carrier
        return (
            carrier is not None
            and self.queue.has_room(carrier.attempts_max)
            and not self.invoker.stopping
            and carrier.can_start
        )

    def pump(self) -> None:
        """Start waiting attempts while there is room."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._has_room() and (ticket := self.queue.take()) is not None:
                self._start(ticket)
        finally:
            self._pumping = False
        if self.queue.may_look_again:
            self._resume()
        if self.queue:
            self._reach_out()
            self._await_pause()

    def _await_pause(self) -> None:
        if self._pause is None and (delay := self.queue.due_in()) is not None:
            self._pause = self._loop.call_later(max(delay, LOOK_S), self._pause_is_over)

    def _pause_is_over(self) -> None:
        self._pause = None
        self.pump()

    def _start(self, ticket: Ticket) -> None:
        """Start an attempt that has its turn, unless it is no longer needed."""
        carrier = self.carrier
        assert carrier is not None, "there is room"
        try:
            beside = self.queue.beside(ticket)
            built = self.invoker.build(ticket, carrier, self.deployment, beside=beside)
        except Exception:
            logger.exception("deployment %s: starting an attempt failed; retrying", self.deployment)
            self._loop.call_later(REBUILD_S, ticket.owner.redispatch, ticket.id, ticket.epoch)
            return
        if built is not None:
            attempt, opening = built
            self.queue.began(attempt.id, ticket.handler, beside)
            carrier.begin(attempt, opening)

    def began(self, attempt: Attempt) -> None:
        """Its handler may run from here on."""
        attempt.begun = True
        if attempt.beside:
            self.expect_trust(attempt)

    def expect_trust(self, attempt: Attempt) -> None:
        """A watched attempt that runs for a while is not what ends the process."""
        self._loop.call_later(SUSPICION_S, self._trust, attempt)

    def _trust(self, attempt: Attempt) -> None:
        """The attempt ran for a while without ending the process, so others need not wait for it any longer."""
        if not attempt.over:
            attempt.trusted = True
            self.queue.trust(attempt.id)
            if self.queue:
                self.pump()

    def let_go(self, attempt: Attempt) -> None:
        """One of our attempts is over."""
        self.queue.ended(attempt.id)
        if (self.queue or self.queue.has_passed_over) and not self._pumping:
            self._loop.call_soon(self.pump)
        self._maybe_retire()

    # -- reaching it -------------------------------------------------------------------------------------------------

    def _reach_out(self) -> None:
        """Connect a carrier soon, if there is none."""
        if self._closed or self.invoker.stopping:
            return
        if self._connecting is not None:
            return
        if self.carrier is None:
            self._connecting = self._loop.create_task(self._connect())
        elif not self.may_try:
            delay = self._not_before - self._loop.time()
            self._connecting = self._loop.create_task(self._wait_and_pump(delay))

    async def _wait_and_pump(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        self._connecting = None
        self.pump()

    async def _connect(self) -> None:
        try:
            while self.queue and self.carrier is None and not self._closed:
                deployment = self.invoker.registry.deployment(self.deployment)
                if deployment is None:
                    self._give_back()
                    return
                await asyncio.sleep(self._not_before - self._loop.time())
                try:
                    carrier = self.carrier = await self._connector(deployment.protocol_name).connect(deployment)
                except CannotConnect as error:
                    self.back_off(str(error), error.after_s)
                else:
                    self.carriers[carrier] = None
        except Exception:
            logger.exception("deployment %s: connecting failed unexpectedly", self.deployment)
            self.back_off("internal error of this node; see its log")
        finally:
            self._connecting = None
        if not self._closed:
            self._loop.call_soon(self.pump)

    def _connector(self, protocol: str) -> Connector:
        """Raises CannotConnect."""
        if protocol not in self._connectors:
            self._connectors[protocol] = self._protocols.connector(protocol, self)
        return self._connectors[protocol]

    def _give_back(self) -> None:
        """The deployment is gone: reconsider every waiting attempt."""
        tickets = list(self.queue)
        self.queue.clear()
        for ticket in tickets:
            if not ticket.owner.ended:
                ticket.owner.redispatch(ticket.id, ticket.epoch)
        self._resume(anywhere=True)
        self._maybe_retire()

    def _maybe_retire(self) -> None:
        """Retire once the deployment is gone and nothing is left here."""
        gone = self.invoker.registry.deployment(self.deployment) is None
        if gone and self.queue.is_idle:
            self.invoker.retire(self.deployment, self)

    def deployments_changed(self) -> None:
        """Our deployment may be gone, or a newer one may offer the handlers that wait for an unreachable one here."""
        if self.invoker.registry.deployment(self.deployment) is None:
            self._give_back()
        elif self.failures and self.queue:
            self._reconsider([ticket.id for ticket in self.queue])
            self._resume(anywhere=True)

    def _reconsider(self, ids: list[InvocationId]) -> None:
        """Attempts that have not begun go where new ones go now."""
        for ident in ids[:RECONSIDERED]:
            ticket = self.queue.get(ident)
            if (
                ticket is not None
                and not ticket.owner.ended
                and self.invoker.belongs_elsewhere(ticket, self.deployment)
            ):
                self.queue.remove(ident)
                self.invoker.start(ticket.owner, StartAttempt(ident, ticket.epoch))
        if len(ids) > RECONSIDERED:
            self._loop.call_soon(self._reconsider, ids[RECONSIDERED:])

    def back_off(self, why: str, after_s: float = 0.0) -> None:
        """The endpoint is unreachable, or asked not to be contacted. This does not count against any attempt."""
        timing = self.invoker.timing
        pause = backoff(timing.backoff_s, self.failures, timing.backoff_max_s)
        pause = max(with_jitter(pause, self.invoker.rng), after_s)
        level = logging.WARNING if self.failures in (0, 10) else logging.DEBUG
        self.failures += 1
        self.last_error = why
        self._down_since_ms = self._down_since_ms or self.invoker.clock.now_ms()
        self._not_before = self._loop.time() + pause
        logger.log(level, "deployment %s cannot be reached: %s (retrying in %.2f s)", self.deployment, why, pause)

    def _penalty_s(self) -> float:
        """Extra pause for an endpoint that breaks the protocol, even if it works otherwise."""
        now = self._loop.time()
        if now - self._offended_at > OFFENCE_FORGOTTEN_S:
            self.offences = 0
        self._offended_at = now
        self.offences += 1
        return backoff(OFFENCE_S, self.offences - 1, OFFENCE_S_MAX)

    def is_well(self) -> None:
        """The endpoint made progress."""
        if self.failures:
            self.failures = 0
            self.last_error = ""
            self._down_since_ms = 0
            self._not_before = 0.0

    def health(self, node: str, invocation: InvocationId | None = None) -> Health:
        """The health of the endpoint, for operators. An open stream counts as healthy, whatever failed before it."""
        deployment = self.invoker.registry.deployment(self.deployment)
        is_down = self.failures > 0 and not (self.carrier is not None and self.carrier.connected)
        stall = next(filter(None, (carrier.stall for carrier in self.carriers)), None)
        next_try_ms = 0
        if is_down and self.queue:
            pause_s = max(self._not_before - self._loop.time(), 0.0)
            next_try_ms = self.invoker.clock.now_ms() + round(pause_s * 1000)
        return Health(
            node=node,
            deployment=self.deployment,
            uri=deployment.uri if deployment is not None else "",
            down_since_ms=self._down_since_ms if is_down else 0,
            failures=self.failures,
            last_error=self.last_error,
            next_try_ms=next_try_ms,
            in_flight=self.queue.running,
            waiting=len(self.queue),
            blocked=self.blocked,
            last_block=self.last_block,
            restraint=self.queue.restraint,
            stalled_since_ms=stall.since_ms if stall is not None else 0,
            stall=stall.why if stall is not None else "",
            wait=self._why_waits(invocation) if invocation is not None else "",
        )

    def _why_waits(self, invocation: InvocationId) -> str:
        """Why an attempt has not begun although the endpoint is up; empty if it has, or is not here."""
        if held_back := self.queue.why_waits(invocation):
            return held_back
        carrier = self.carrier
        if invocation in self.queue and carrier is not None and self.queue.running >= carrier.attempts_max:
            return f"{self.queue.running} attempts run at the endpoint, as many as it may have (attempts_max)"
        attempt = next(
            (each.attempts[invocation] for each in self.carriers if each.connected and invocation in each.attempts),
            None,
        )
        if attempt is not None and attempt.beside and not attempt.begun:
            return "its process ended before during its attempts, so the endpoint holds it back until others that run are over"
        return ""

    # -- carriers ----------------------------------------------------------------------------------------------------

    def was_blocked(self, milliseconds: int, handler: str, place: str) -> None:
        self.blocked += 1
        self.blocked_ms += min(milliseconds, 3_600_000)
        by = f"the handler `{handler[:256]}`" if handler else "something"
        self.last_block = f"{by} blocked the event loop for {milliseconds / 1000:.1f} s at {place[:512]}"
        logger.warning("deployment %s: %s", self.deployment, self.last_block)

    def drain(self, carrier: Carrier) -> None:
        if self.carrier is carrier:
            self.carrier = None
            self._not_before = max(self._not_before, self._loop.time() + self.invoker.timing.backoff_s)
        if self.queue:
            self._reach_out()

    def gone(self, carrier: Carrier) -> None:
        self.carriers.pop(carrier, None)

    def broken(
        self, carrier: Carrier, why: str, *, blame: str | None, blamed: InvocationId | None, crashed: bool
    ) -> None:
        self.carriers.pop(carrier, None)
        if self.carrier is carrier:
            self.carrier = None
        if not self._closed and not self.invoker.stopping and (blame is not None or not carrier.drains):
            self.back_off(why, self._penalty_s() if blame is not None else 0.0)
        attempts = list(carrier.attempts.values())
        carrier.attempts.clear()
        if attempts and not carrier.drains and not crashed and blame is None:
            crashed = self._closes_too_often()
        crashed = crashed and not carrier.drains
        culprit = self._find_culprit(attempts) if crashed and blame is None else None
        for attempt in attempts:
            self.queue.ended(attempt.id)
        if attempts and not self.invoker.stopping:
            logger.info("deployment %s: %d attempts lost their stream: %s", self.deployment, len(attempts), why)
        self.invoker.break_off(attempts, why, blame=blame, blamed=blamed, crashed=crashed, culprit=culprit)
        if self.queue:
            self._reach_out()
        self._maybe_retire()

    def _find_culprit(self, attempts: list[Attempt]) -> InvocationId | None:
        """The attempt that ended the process, if that is certain."""
        before = self.queue.convicted
        culprit = self.queue.crashed({each.id for each in attempts if each.begun})
        for handler in self.queue.convicted.keys() - before.keys():
            logger.warning(
                "deployment %s: the handler %s ended its process whenever it ran alone. Its attempts run one at a time, "
                "alone and after pauses, until it has not done so for ten minutes",
                self.deployment, handler,
            )  # fmt: skip
        return culprit

    def _closes_too_often(self) -> bool:
        """Whether streams are closed cleanly too often.

        A server that restarts closes its streams cleanly, and no attempt is to blame. A server that does so whenever it
        gets a certain attempt would restart all the others again and again, and nothing would count against that one."""
        now = self._loop.time()
        too_often = len(self._goodbyes) == GOODBYES_MAX and now - self._goodbyes[0] < GOODBYES_S
        self._goodbyes.append(now)
        return too_often

    async def close(self) -> None:
        self._closed = True
        for timer in (self._look, self._pause):
            if timer is not None:
                timer.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        await asyncio.gather(*(carrier.close() for carrier in list(self.carriers)))
