"""Which services exist, where they run, and how a deployment becomes known.

`MetaMachine` applies the log of the meta group to `statemachine.meta` and keeps two indexes for the hot path: a dictionary
lookup tells ingress and invoker what a handler is (`resolve`) and what it was on the deployment an invocation is pinned to
(`target`). The state is small and lives in memory; a restart reads it from the log again.

`Registry` is the door: it has the handler protocol ask an endpoint what it offers (`Discover`), and proposes it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit, urlunsplit

from holdfast.cluster.entropy import Entropy
from holdfast.cluster.errors import (
    BadRequest,
    Conflict,
    Full,
    NotFound,
    Unavailable,
    UnknownHandler,
    UnknownService,
)
from holdfast.cluster.origins import NO_CREDENTIALS, host_behind_credentials
from holdfast.cluster.registry.machine import MetaMachine, Target
from holdfast.cluster.registry.offer import Discover
from holdfast.cluster.registry.preview import Preview, preview
from holdfast.log.errors import ProposalError
from holdfast.sdk.ids import DeploymentId, NodeId
from holdfast.statemachine.effects import Code
from holdfast.statemachine.levels import FIRST
from holdfast.statemachine.meta import (
    NATIVE,
    Deployment,
    FoundCluster,
    MetaCommand,
    MetaState,
    Outcome,
    RegisterDeployment,
    RemoveDeployment,
    Service,
)

T = TypeVar("T")
URI_BYTES_MAX: Final = 2048
METADATA_BYTES_MAX: Final = 16 * 1024
_HOST: Final = re.compile(r"[a-z0-9_.\-]+|\[[0-9a-f:.]+\]")


class Registered(NamedTuple):
    deployment: Deployment
    created: bool


class MetaGroup(Protocol):
    """The log of the meta group: `MetaLog` finds its leader, and on the leader `log.node.Group` serves as well."""

    def propose(self, command: bytes, /) -> Awaitable[object]: ...


class Registry:
    """Deployments and services, as ingress, invoker and admin see them.

    `group` is the meta group as this node sees it. `fresh` returns when this node knows every change that was acknowledged
    before the call; without it, this node's own state counts.
    """

    def __init__(
        self,
        machine: MetaMachine,
        group: MetaGroup,
        discover: Discover,
        *,
        fresh: Callable[[], Awaitable[None]] | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        self.machine = machine
        self.fresh = fresh
        self._entropy = entropy or Entropy()
        self._group = group
        self._discover = discover

    @property
    def state(self) -> MetaState:
        return self.machine.state

    # -- lookups, on the hot path

    def resolve(self, service: str, handler: str) -> Target:
        """Where a new invocation goes. Raises UnknownService or UnknownHandler with what to do about it."""
        target = self.machine.targets.get((service, handler))
        if target is None:
            raise self.unknown(service, handler)
        return target

    def find(self, service: str, handler: str) -> Target | None:
        return self.machine.targets.get((service, handler))

    def target(self, deployment: DeploymentId, service: str, handler: str) -> Target | None:
        """A handler as the deployment that an invocation is pinned to offers it; None if it no longer exists."""
        return self.machine.pinned.get(deployment, {}).get((service, handler))

    def deployment(self, id_: DeploymentId) -> Deployment | None:
        return self.state.deployments.get(id_)

    def get_deployment(self, id_: DeploymentId) -> Deployment:
        found = self.deployment(id_)
        if found is None:
            raise NotFound(f"there is no deployment {id_!r:.100}", "`holdfast deployments list` lists all deployments")
        return found

    def get_service(self, name: str) -> tuple[Service, Deployment]:
        found = self.service(name)
        if found is None:
            raise self.unknown(name, "")
        return found

    def service(self, name: str) -> tuple[Service, Deployment] | None:
        """The current revision of a service."""
        return self.machine.services.get(name)

    def unknown(self, service: str, handler: str) -> NotFound:
        known = self.service(service)
        if known is None:
            return UnknownService(
                f"there is no service {service!r:.150}",
                "register the deployment that offers it: `holdfast deployments register URI`",
            )
        names = ", ".join(sorted(each.name for each in known[0].handlers))
        return UnknownHandler(f"service {service} has no handler {handler!r:.150}", f"its handlers are: {names:.500}")

    async def certainly(self, look: Callable[[], T]) -> T:
        """What `look` finds in the state of this node. Raises NotFound only if the whole cluster does not know it.

        This node may be behind another one that has just acknowledged a change. So it asks the meta group and looks again.
        Raises Unavailable if the meta group does not answer.
        """
        try:
            return look()
        except NotFound as missing:
            if self.fresh is None:
                raise
            try:
                await self.fresh()
            except ProposalError:
                raise Unavailable(
                    f"this node cannot ask whether the rest of the cluster knows better, but here {missing.message}"
                ) from None
        return look()

    # -- changes, through the log of the meta group

    async def propose(self, command: MetaCommand, timeout_s: float = 30.0) -> Outcome:
        """Raises the log's ProposalErrors; NotLeader if the group has another leader."""
        raw, sequence, future = self.machine.expect(command)
        try:
            async with asyncio.timeout(timeout_s):
                await self._group.propose(raw)
                return await future
        finally:
            self.machine.forget(sequence)

    async def found(
        self,
        *,
        cluster: str,
        partitions: int,
        founders: Sequence[NodeId] = (),
        replication: int = 3,
        level: int = FIRST,
    ) -> MetaState:
        """Record the settings of a new cluster, unless they are recorded. The state has the result."""
        await self.propose(
            FoundCluster(
                cluster=cluster, partitions=partitions, founders=list(founders), replication=replication, level=level
            )
        )
        return self.state

    async def register(self, uri: str, *, force: bool = False, metadata: Mapping[str, str] | None = None) -> Registered:
        """Ask the endpoint what it offers, and make it a deployment (201), or find it unchanged (200)."""
        uri = normalize_uri(uri)
        offer = await self._discover(uri)
        if offer.protocol_name != NATIVE and self.state.level < 2:
            raise Unavailable(
                f"a deployment that speaks {offer.protocol_name} requires that every node of the cluster runs this release"
            )
        command = RegisterDeployment(
            id=DeploymentId("dp_" + self._entropy.bytes(8).hex()),
            uri=uri,
            services=offer.services,
            sdk=offer.sdk,
            modes=offer.modes,
            protocol=offer.protocol,
            metadata=dict(metadata or {}),
            force=force,
            protocol_name=offer.protocol_name,
        )
        outcome = await self.propose(command)
        result = outcome.result
        if result.code == Code.CONFLICT:
            hint = (
                "run new code at a new uri and register that one; force=true overwrites it in place, and what runs on it "
                "goes on with the changed code"
                if outcome.deployment is not None
                else "keep what callers use, or force=true to break them"
            )
            raise Conflict(result.message, hint, outcome.differences)
        if result.code == Code.FULL:
            raise Full(result.message)
        assert outcome.deployment is not None, "an accepted registration must have a deployment"
        return Registered(self.state.deployments[outcome.deployment], created=result.code == Code.DONE)

    async def preview(self, uri: str) -> Preview:
        """What `register` would change. It changes nothing."""
        uri = normalize_uri(uri)
        offer = await self._discover(uri)
        if self.fresh is not None:
            await self.fresh()
        return preview(self.state, uri, offer)

    async def remove(
        self,
        id_: DeploymentId,
        *,
        force: bool = False,
        in_flight: Callable[[DeploymentId], Awaitable[int]] | None = None,
    ) -> None:
        """Refused while anything runs on it or new invocations go to it, unless forced. `in_flight` counts what runs on it,
        over all partitions.
        """
        await self.certainly(lambda: self.get_deployment(id_))
        if not force and in_flight is not None and (running := await in_flight(id_)):
            raise Conflict(
                f"{running} invocation{'s run' if running != 1 else ' runs'} on {id_}",
                "wait until they have completed, or force=true: they pause until they are resumed on another deployment",
            )
        outcome = await self.propose(RemoveDeployment(id_, force))
        if outcome.result.code == Code.NOT_FOUND:
            raise NotFound(outcome.result.message)
        if outcome.result.code == Code.CONFLICT:
            raise Conflict(
                outcome.result.message, "or force=true: the revision before becomes current again", outcome.differences
            )


def normalize_uri(uri: str) -> str:
    """The one spelling of a URI: scheme and host in lower case, no trailing slash, no query."""
    hint = "for example http://127.0.0.1:9080"
    if (host := host_behind_credentials(uri)) is not None:
        raise BadRequest(
            f"the uri of {host:.200} has credentials in it, which everybody who reads would see", NO_CREDENTIALS
        )
    if len(uri.encode(errors="replace")) > URI_BYTES_MAX or " " in uri or not uri.isprintable():
        raise BadRequest(f"not a uri: at most {URI_BYTES_MAX} bytes without spaces and control characters", hint)
    try:
        parts = urlsplit(uri)
        port = parts.port
    except ValueError as error:
        raise BadRequest(f"not a uri: {error}", hint) from None
    if parts.scheme.lower() not in ("http", "https") or not parts.hostname:
        raise BadRequest(f"not a uri of an endpoint: {uri!r:.200}", f"it begins with http:// or https://, {hint}")
    if parts.query or parts.fragment:
        raise BadRequest("a uri of an endpoint has no query or fragment", hint)
    host = parts.hostname
    try:
        host = host if host.isascii() else host.encode("idna").decode()
        host = f"[{ipaddress.IPv6Address(host)}]" if ":" in host else host
    except ValueError:
        raise BadRequest(f"not a host: {parts.hostname!r:.200}", hint) from None
    if _HOST.fullmatch(host) is None:
        raise BadRequest(f"not a host: {parts.hostname!r:.200}", hint)
    netloc = host if port is None else f"{host}:{port}"
    return urlunsplit((parts.scheme.lower(), netloc, parts.path.rstrip("/"), "", ""))
