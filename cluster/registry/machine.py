"""The meta group on this node: its state, kept in memory, and what callers look up in it on the hot path."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from holdfast.cluster.clock import Clock
from holdfast.cluster.entropy import Entropy
from holdfast.log.engine import Snapshot
from holdfast.log.replica import Committed
from holdfast.sdk.ids import DeploymentId, NodeId, PartitionNumber
from holdfast.statemachine import meta
from holdfast.statemachine.access import NoteTokenUse
from holdfast.statemachine.audit import RecordActs
from holdfast.statemachine.commands import Mode, Retry
from holdfast.statemachine.members import REMOVED
from holdfast.statemachine.meta import (
    Deployment,
    Handler,
    MetaCommand,
    MetaState,
    Outcome,
    Service,
)

IDENTITY_DIGITS: Final = 8
#: They change nothing that is looked up.
_NOTES: Final = (NoteTokenUse, RecordActs)
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
    deployment: DeploymentId
    options: Options
    input_type: str = "application/json"
    output_type: str = "application/json"

    @property
    def keyed(self) -> bool:
        return self.mode != Mode.PLAIN


class MetaMachine:
    """The meta group's state on this node. Implements `log.replica.Machine`."""

    def __init__(self, clock: Clock | None = None, entropy: Entropy | None = None) -> None:
        self._clock = clock or Clock()
        self.state = MetaState()
        self.applied = (0, 0)
        self.identity = ""  # Drawn when the cluster was founded, so clusters of one name differ.
        self.origin = (entropy or Entropy()).bytes(8)
        self.version = 0
        self.targets: dict[tuple[str, str], Target] = {}
        self.pinned: dict[DeploymentId, dict[tuple[str, str], Target]] = {}
        self.services: dict[str, tuple[Service, Deployment]] = {}  # as new invocations see them
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
                changed |= type(proposal.command) not in _NOTES
                if proposal.origin == self.origin:
                    future = self._waiting.pop(proposal.sequence, None)
                    if future is not None and not future.done():
                        future.set_result(outcome)
        self.applied = (entries[-1].index, entries[-1].term)
        if changed:
            self.index()
            for callback in self.on_change:
                callback()

    def replicas(self, number: PartitionNumber) -> tuple[NodeId, ...]:
        """The nodes that have a partition, by the cluster's table."""
        replicas = self.state.membership.table.get(number)
        return replicas.members if replicas is not None else ()

    def others(self, node: str) -> set[str]:
        """All members of the cluster but this one, up or down."""
        nodes = self.state.membership.nodes
        return {name for name, member in nodes.items() if member.state != REMOVED and name != node}

    def snapshot(self) -> Snapshot | None:
        return None  # The log of the meta group is never trimmed: it grows by a few entries per deployment.

    def index(self) -> None:
        """Rebuild the lookup tables. Deployments change rarely; lookups come with every request."""
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
            assert deployment is not None and service is not None, "an offered handler must exist in its deployment"
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
        raw = meta.encode(meta.Proposal(self.origin, sequence, int(self._clock.wall_s() * 1000), command))
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[sequence] = future
        return raw, sequence, future

    def forget(self, sequence: int) -> None:
        self._waiting.pop(sequence, None)


def _target(deployment: Deployment, service: Service, handler: Handler) -> Target:
    return Target(
        service=service.name,
        handler=handler.name,
        kind=service.kind,
        mode=MODES[handler.mode],
        deployment=deployment.id,
        options=_options(service.options, handler.options),
        input_type=handler.input_type,
        output_type=handler.output_type,
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
