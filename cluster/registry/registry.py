"""Which services exist, where they run, and how a deployment becomes known.

`MetaMachine` applies the log of the meta group to `statemachine.meta` and keeps two indexes for the hot path: a dictionary
lookup tells ingress and invoker what a handler is (`resolve`) and what it was on the deployment an invocation is pinned to
(`target`). The state is small and lives in memory; a restart reads it from the log again.

`Registry` is the door: it asks an endpoint what it offers (`discover`), checks the answer word by word (`read_manifest`: an
error names the place inside the manifest), and proposes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from holdfast.cluster.errors import (
    BadManifest,
    BadRequest,
    Conflict,
    EndpointFailed,
    Full,
    NotFound,
    Unavailable,
    UnknownHandler,
    UnknownService,
)
from holdfast.cluster.registry.machine import MetaMachine, Target
from holdfast.cluster.registry.manifest import MANIFEST_BYTES_MAX, read_manifest
from holdfast.log.errors import ProposalError
from holdfast.statemachine.levels import FIRST
from holdfast.statemachine.meta import (
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
DISCOVER_TIMEOUT_S: Final = 10.0
_HOST: Final = re.compile(r"[a-z0-9_.\-]+|\[[0-9a-f:.]+\]")


class Registered(NamedTuple):
    deployment: Deployment
    created: bool


class MetaGroup(Protocol):
    """The log of the meta group: `MetaLog` finds its leader, and `log.node.Group` is one for whoever leads."""

    def propose(self, command: bytes, /) -> Awaitable[object]: ...


class Registry:
    """Deployments and services, as ingress, invoker and admin see them.

    `group` gives the meta group of this node; `in_flight` counts the invocations pinned to a deployment, over all
    partitions.
    """

    def __init__(self, machine: MetaMachine, group: Callable[[], MetaGroup]) -> None:
        self.machine = machine
        self.in_flight: Callable[[str], Awaitable[int]] | None = None
        #: Returns when this node knows every change that was acknowledged before the call; the node sets it.
        self.fresh: Callable[[], Awaitable[None]] | None = None
        self._group = group
        self._session: aiohttp.ClientSession | None = None

    @property
    def state(self) -> MetaState:
        return self.machine.state

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- lookups, on the hot path

    def resolve(self, service: str, handler: str) -> Target:
        """Where a new invocation goes. Raises UnknownService or UnknownHandler with what to do about it."""
        target = self.machine.targets.get((service, handler))
        if target is None:
            raise self.unknown(service, handler)
        return target

    def find(self, service: str, handler: str) -> Target | None:
        return self.machine.targets.get((service, handler))

    def target(self, deployment: str, service: str, handler: str) -> Target | None:
        """A handler as the deployment that an invocation is pinned to offers it; None: it is not there (any more)."""
        return self.machine.pinned.get(deployment, {}).get((service, handler))

    def deployment(self, id_: str) -> Deployment | None:
        return self.state.deployments.get(id_)

    def get_deployment(self, id_: str) -> Deployment:
        found = self.deployment(id_)
        if found is None:
            raise NotFound(f"there is no deployment {id_!r:.100}", "holdfast deployments list shows what there is")
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
                "register the deployment that offers it: holdfast deployments register <uri>",
            )
        names = ", ".join(sorted(each.name for each in known[0].handlers))
        return UnknownHandler(f"service {service} has no handler {handler!r:.150}", f"its handlers are: {names:.500}")

    async def certainly(self, look: Callable[[], T]) -> T:
        """What `look` finds in the state of this node. It raises NotFound only for what does not exist in the cluster.

        This node may be behind: what another node has just acknowledged is not here yet. So it asks the meta group and looks
        again. Raises Unavailable if nobody can answer that now.
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
        """Raises the log's ProposalErrors; a node that does not lead the meta group gets NotLeader."""
        raw, sequence, future = self.machine.expect(command)
        try:
            async with asyncio.timeout(timeout_s):
                await self._group().propose(raw)
                return await future
        finally:
            self.machine.forget(sequence)

    async def found(
        self, *, cluster: str, partitions: int, founders: Sequence[str] = (), replication: int = 3, level: int = FIRST
    ) -> MetaState:
        """Make the cluster's settings, unless they are made. The state says what holds."""
        await self.propose(FoundCluster(cluster, partitions, list(founders), replication, level))
        return self.state

    async def register(self, uri: str, *, force: bool = False, metadata: Mapping[str, str] | None = None) -> Registered:
        """Ask the endpoint what it offers, and make it a deployment (201), or find it unchanged (200)."""
        uri = normalize_uri(uri)
        command = RegisterDeployment(
            new_deployment_id(), uri, *await self.discover(uri), dict(metadata or {}), force
        )  # fmt: skip
        outcome = await self.propose(command)
        result = outcome.result
        if result.code == 409:
            hint = (
                "run new code at a new uri and register that one; force=true overwrites it in place, and what runs on it "
                "goes on with the changed code"
                if outcome.deployment is not None
                else "keep what callers use, or force=true to break them"
            )
            raise Conflict(result.message, hint, outcome.differences)
        if result.code == 507:
            raise Full(result.message)
        assert outcome.deployment is not None, "a registration that was not refused has a deployment"
        return Registered(self.state.deployments[outcome.deployment], created=result.code == 0)

    async def remove(self, id_: str, *, force: bool = False) -> None:
        """Refused while anything runs on it or new invocations go to it, unless forced."""
        await self.certainly(lambda: self.get_deployment(id_))
        if not force and self.in_flight is not None and (running := await self.in_flight(id_)):
            raise Conflict(
                f"{running} invocation{'s run' if running != 1 else ' runs'} on {id_}",
                "wait until they have completed, or force=true: they pause until they are resumed on another deployment",
            )
        outcome = await self.propose(RemoveDeployment(id_, force))
        if outcome.result.code == 404:
            raise NotFound(outcome.result.message)
        if outcome.result.code == 409:
            raise Conflict(
                outcome.result.message, "or force=true: the revision before becomes current again", outcome.differences
            )

    async def discover(self, uri: str) -> tuple[list[Service], str, list[str], list[int]]:
        """(services, sdk, modes, protocol) as the endpoint at `uri` says; each error says what to look at."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=DISCOVER_TIMEOUT_S), cookie_jar=aiohttp.DummyCookieJar()
            )
        where = f"{uri}/discover"
        hint = "is the handlers' process running, and can this node reach that address?"
        try:
            async with self._session.get(
                where, headers={"Accept": "application/json"}, allow_redirects=False
            ) as response:
                if 300 <= response.status < 400:
                    raise EndpointFailed(
                        f"GET {where} answered {response.status}: it redirects to "
                        f"{response.headers.get('Location', '')!r:.200}",
                        "redirects are not followed: register the address itself",
                    )
                if response.status != 200:
                    raise EndpointFailed(
                        f"GET {where} answered {response.status}",
                        "a Holdfast endpoint answers 200 with its manifest: check the uri and its path",
                    )
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > MANIFEST_BYTES_MAX:
                        raise BadManifest("$", f"it is larger than {MANIFEST_BYTES_MAX} bytes")
        except TimeoutError:
            raise EndpointFailed(f"GET {where}: no answer within {DISCOVER_TIMEOUT_S:.0f} seconds", hint) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # ValueError: a server that sends what is not HTTP, or a host name that cannot be encoded.
            raise EndpointFailed(f"GET {where} failed: {error or type(error).__name__}", hint) from None
        return read_manifest(bytes(body))


def new_deployment_id() -> str:
    return "dp_" + os.urandom(8).hex()


def normalize_uri(uri: str) -> str:
    """One spelling per place: scheme and host in lower case, no slash at the end, no query."""
    hint = "for example http://127.0.0.1:9080"
    if len(uri.encode(errors="replace")) > URI_BYTES_MAX or any(c <= " " or c == "\x7f" for c in uri):
        raise BadRequest(f"not a uri: at most {URI_BYTES_MAX} bytes without spaces", hint)
    try:
        parts = urlsplit(uri)
        port = parts.port
    except ValueError as error:
        raise BadRequest(f"not a uri: {error}", hint) from None
    if parts.scheme.lower() not in ("http", "https") or not parts.hostname:
        raise BadRequest(f"not a uri of an endpoint: {uri!r:.200}", f"it begins with http:// or https://, {hint}")
    if parts.username is not None or parts.query or parts.fragment:
        raise BadRequest("a uri of an endpoint has no user, query or fragment", hint)
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
