"""What an endpoint and its carriers need of the invoker, and the bounds and times that they share.

The invoker makes endpoints, and endpoints make carriers. Each of them talks back to its maker through the protocol here, so
that imports point one way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import NamedTuple, Protocol

import aiohttp

from holdfast.cluster.clock import Clock
from holdfast.cluster.handlers.attempts import Attempt, Attempts, Carrier, Opening, Owner, Ticket
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.values.shared_store import Objects, StoreDown, ValueLost
from holdfast.statemachine.commands import Command
from holdfast.statemachine.effects import StartAttempt
from holdfast.statemachine.meta import Deployment


class Limits(NamedTuple):
    """Per deployment."""

    streamed: int = 10_000  # attempts at a time
    requested: int = 200  # the same, where each is a request of its own
    waiting: int = 50_000  # ids in its queue; the rest is found in the state again


class Timing(NamedTuple):
    connect_s: float = 5.0
    backoff_s: float = 0.01
    backoff_max_s: float = (
        1.0  # A process of handlers that was restarted is found this soon; a try costs one connection.
    )
    #: A stream that is silent for this long is asked, and broken if it does not answer for half of it.
    heartbeat_s: float = 30.0
    prompt_s: float = 5.0  # The same, where a thread of the endpoint answers even if its event loop is blocked.
    sweep_s: float = 1.0
    fallback_s: float = 60.0  # After this long with requests, the stream is tried again.


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
    def session(self) -> aiohttp.ClientSession: ...

    @property
    def congested(self) -> bool: ...

    def start(self, owner: Owner, effect: StartAttempt, *, is_fresh: bool = False) -> None: ...

    def build(self, ticket: Ticket, carrier: Carrier, deployment: str) -> tuple[Attempt, Opening] | None: ...

    def belongs_elsewhere(self, ticket: Ticket, deployment: str) -> bool: ...

    def retire(self, deployment: str, endpoint: object) -> None: ...

    def heard(self, carrier: Carrier, invocation: bytes, epoch: int) -> Attempt | None:
        """The attempt that something was said in the name of, if it runs on this carrier."""

    def submit(self, attempt: Attempt, wanted: Command, *, last: bool) -> None:
        """What an attempt did, as a command. `last`: the attempt ends with it."""

    def ask_directory(self, attempt: Attempt, again: Callable[[bool], None], weight: int) -> None:
        """A call goes to a handler that this node does not know: it asks the cluster before it says so. `again` is called with
        whether every handler is known now that was registered before; what the attempt says until then waits behind it."""

    def blame(self, attempt: Attempt, why: str) -> None: ...

    def crashed(self, attempt: Attempt, why: str, *, kind: str = "ProcessLost") -> None: ...

    def unreadable(self, attempt: Attempt, error: StoreDown | ValueLost) -> None: ...

    def break_off(
        self,
        attempts: Iterable[Attempt],
        why: str,
        *,
        blame: str | None = None,
        blamed: bytes | None = None,
        crashed: bool = False,
    ) -> None: ...


class Station(Protocol):
    """An endpoint, as the protocol that connects to it knows it."""

    invoker: Dispatcher
    deployment: str

    @property
    def may_try(self) -> bool:
        """Whether it is time to ask the endpoint for anything."""

    @property
    def has_waiting(self) -> bool: ...

    def pump(self) -> None: ...

    def back_off(self, why: str, after_s: float = 0.0) -> None: ...

    def is_well(self) -> None: ...

    def was_blocked(self, milliseconds: int, handler: str, place: str) -> None: ...

    def began(self, attempt: Attempt) -> None:
        """Its handler may run from here on."""

    def expect_trust(self, attempt: Attempt) -> None:
        """A suspect that runs for long enough from now on is not waited for any more."""

    def let_go(self, attempt: Attempt) -> None: ...

    def drain(self, carrier: Carrier) -> None:
        """It takes no new attempts. The next ones get another carrier."""

    def gone(self, carrier: Carrier) -> None:
        """It has drained."""

    def broken(self, carrier: Carrier, why: str, *, blame: str | None, blamed: bytes | None, crashed: bool) -> None: ...


class CannotConnect(Exception):
    """The endpoint cannot be reached now, or wants to be left alone for `after_s`."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


class Connector(Protocol):
    """One endpoint's protocol: it makes the carriers of its attempts."""

    async def connect(self, deployment: Deployment) -> Carrier:
        """Raises CannotConnect."""
