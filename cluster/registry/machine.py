"""The meta group on this node: its state, kept in memory, and what callers look up in it on the hot path."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from holdfast.log.engine import Snapshot
from holdfast.log.replica import Committed
from holdfast.statemachine import meta
from holdfast.statemachine.commands import Mode, Retry
from holdfast.statemachine.meta import (
    Deployment,
    Handler,
    MetaCommand,
    MetaState,
    Outcome,
    Service,
)

IDENTITY_DIGITS: Final = 8
DAY_MS: Final = 24 * 60 * 60 * 1000
RETENTION_MS: Final = DAY_MS
INACTIVITY_MS: Final = 60_000
ABORT_MS: Final = 600_000


MODES: Final = {
    "plain": Mode.PLAIN,
    "exclusive": Mode.EXCLUSIVE,
    "shared": Mode.SHARED,
    "main": Mode.WORKFLOW,
}


class Options(NamedTuple):
    """What holds for one handler: its own option, else its service's, else the default."""

    retry: Retry = Retry()
    inactivity_ms: int = INACTIVITY_MS
    abort_ms: int = ABORT_MS
    retention_ms: int = RETENTION_MS
    private: bool = False


class Target(NamedTuple):
    """A handler as one deployment offers it: all that a new invocation, or an attempt, needs to know."""

    service: str
    handler: str
    kind: str
    mode: int  # statemachine.commands.Mode
    deployment: str
    options: Options
    input_type: str = "application/json"
    output_type: str = "application/json"

    @property
    def keyed(self) -> bool:
        return self.mode != Mode.PLAIN


class MetaMachine:
    """The meta group's state on this node. Implements `log.replica.Machine`."""

    def __init__(self) -> None:
        self.state = MetaState()
        self.applied = (0, 0)
        self.identity = ""  # Of the founding: two clusters of one name differ, and all nodes of one agree.
        self.origin = os.urandom(8)
        self.version = 0
        self.targets: dict[tuple[str, str], Target] = {}
        self.pinned: dict[str, dict[tuple[str, str], Target]] = {}
        self.services: dict[str, tuple[Service, Deployment]] = {}  # as new invocations meet them
        self.on_change: list[Callable[[], None]] = []
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._sequence = 0

    def apply(self, entries: Sequence[Committed]) -> None:
        changed = False
        for entry in entries:
            for raw in entry.commands:
                proposal = meta.decode(raw)
                outcome = meta.apply(self.state, proposal.now_ms, proposal.command)
                if not self.identity and self.state.partitions:
                    self.identity = hashlib.sha256(raw).hexdigest()[:IDENTITY_DIGITS]
                changed = True
                if proposal.origin == self.origin:
                    future = self._waiting.pop(proposal.sequence, None)
                    if future is not None and not future.done():
                        future.set_result(outcome)
        self.applied = (entries[-1].index, entries[-1].term)
        if changed:
            self.index()
            for callback in self.on_change:
                callback()

    def snapshot(self) -> Snapshot | None:
        return None  # The log of the meta group is never trimmed: it grows by a few entries per deployment.

    def index(self) -> None:
        """Make the lookup tables anew. Deployments come rarely and lookups with every request."""
        state = self.state
        self.version += 1
        self.pinned = {
            deployment.id: {
                (service.name, handler.name): _target(deployment, service, handler)
                for service in deployment.services
                for handler in service.handlers
            }
            for deployment in state.deployments.values()
        }
        self.services = {}
        for name in state.offers:
            deployment = state.current(name)
            service = deployment.service(name) if deployment is not None else None
            assert deployment is not None and service is not None, "what is offered is there"
            self.services[name] = (service, deployment)
        self.targets = {
            where: target
            for name, offers in state.offers.items()
            for where, target in self.pinned[offers[-1]].items()
            if where[0] == name
        }

    def expect(self, command: MetaCommand) -> tuple[bytes, int, asyncio.Future[Outcome]]:
        """A proposal for the log, and the future that apply answers."""
        self._sequence += 1
        sequence = self._sequence
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[sequence] = future
        raw = meta.encode(meta.Proposal(self.origin, sequence, int(time.time() * 1000), command))
        return raw, sequence, future

    def forget(self, sequence: int) -> None:
        self._waiting.pop(sequence, None)


def _target(deployment: Deployment, service: Service, handler: Handler) -> Target:
    return Target(
        service.name,
        handler.name,
        service.kind,
        MODES[handler.mode],
        deployment.id,
        _options(service.options, handler.options),
        handler.input_type,
        handler.output_type,
    )


def _options(of_service: Mapping[str, Any], of_handler: Mapping[str, Any]) -> Options:
    both = {**of_service, **of_handler}
    retry = Retry(**both["retry"]) if "retry" in both else Retry()
    return Options(
        retry=retry,
        inactivity_ms=both.get("inactivity_timeout_ms", INACTIVITY_MS),
        abort_ms=both.get("abort_timeout_ms", ABORT_MS),
        retention_ms=both.get("retention_ms", RETENTION_MS),
        private=of_service.get("private") is True or of_handler.get("private") is True,
    )
