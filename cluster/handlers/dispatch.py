"""The interfaces between invoker, endpoints and carriers, and the bounds and timeouts that they share.

The invoker creates endpoints, and endpoints create carriers. Each calls its creator back through a protocol defined
here, so that imports point one way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import NamedTuple, Protocol

from holdfast.cluster.clock import Clock
from holdfast.cluster.handlers.attempts import Attempt, Attempts, Carrier, Opening, Owner, Ticket
from holdfast.cluster.handlers.large import Loads
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.values.shared_store import Objects
from holdfast.sdk.ids import DeploymentId, InvocationId
from holdfast.statemachine.commands import Command
from holdfast.statemachine.effects import StartAttempt


class Limits(NamedTuple):
    """Limits per deployment."""

    attempts: int = 10_000  # at a time; a protocol may allow fewer
    waiting: int = 50_000  # ids in its queue; the others are found in the state later


class Timing(NamedTuple):
    connect_s: float = 5.0
    backoff_s: float = 0.01
    backoff_max_s: float = 1.0  # A restarted handler process is found this soon; each try costs one connection.
    sweep_s: float = 1.0


class Dispatcher(Attempts, Protocol):
    """The invoker, as endpoints and carriers know it."""

    limits: Limits
    timing: Timing
    rng: Random
    clock: Clock
    registry: Registry
    objects: Objects
    stopping: bool

    @property
    def congested(self) -> bool: ...

    def start(self, owner: Owner, effect: StartAttempt, *, is_fresh: bool = False) -> None: ...

    def build(
        self, ticket: Ticket, carrier: Carrier, deployment: DeploymentId, *, beside: int
    ) -> tuple[Attempt, Opening] | None: ...

    def belongs_elsewhere(self, ticket: Ticket, deployment: DeploymentId) -> bool: ...

    def retire(self, deployment: DeploymentId, endpoint: object) -> None: ...

    def heard(self, carrier: Carrier, invocation: InvocationId, epoch: int) -> Attempt | None:
        """The attempt that a frame belongs to, if it runs on this carrier."""

    def submit(self, attempt: Attempt, wanted: Command, *, last: bool) -> None:
        """Submit what an attempt did, as a command. `last`: the attempt ends with it."""

    def ask_directory(self, attempt: Attempt, again: Callable[[bool], None], weight: int) -> None:
        """Ask the cluster about a call to a handler that this node does not know.

        `again` is called with whether this node now knows every handler registered before. What the attempt sends until
        then waits."""

    def blame(self, attempt: Attempt, why: str) -> None: ...

    def crashed(self, attempt: Attempt, why: str, *, kind: str = "ProcessLost") -> None: ...

    def unreadable(self, attempt: Attempt, error: Exception) -> None:
        """A large value that it needs cannot be had."""

    def break_off(
        self,
        attempts: Iterable[Attempt],
        why: str,
        *,
        blame: str | None = None,
        blamed: InvocationId | None = None,
        crashed: bool = False,
        culprit: InvocationId | None = None,
    ) -> None: ...


class Station(Protocol):
    """An endpoint, as the protocol that connects to it knows it."""

    invoker: Dispatcher
    deployment: DeploymentId
    loads: Loads

    @property
    def may_try(self) -> bool:
        """Whether the endpoint may be contacted now."""

    @property
    def has_waiting(self) -> bool: ...

    def pump(self) -> None: ...

    def back_off(self, why: str, after_s: float = 0.0) -> None: ...

    def is_well(self) -> None: ...

    def was_blocked(self, milliseconds: int, handler: str, place: str) -> None: ...

    def began(self, attempt: Attempt) -> None:
        """The attempt's handler may run from now on."""

    def expect_trust(self, attempt: Attempt) -> None:
        """If a watched attempt runs for long enough from now on, others stop waiting for it."""

    def let_go(self, attempt: Attempt) -> None: ...

    def drain(self, carrier: Carrier) -> None:
        """The carrier accepts no new attempts. The next ones get another carrier."""

    def gone(self, carrier: Carrier) -> None:
        """The carrier has drained."""

    def broken(
        self, carrier: Carrier, why: str, *, blame: str | None, blamed: InvocationId | None, crashed: bool
    ) -> None: ...
