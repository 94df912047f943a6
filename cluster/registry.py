"""Which services exist, where they run, and how a deployment becomes known.

`MetaMachine` applies the log of the meta group to `statemachine.meta` and keeps two indexes for the hot path: a dictionary
lookup tells ingress and invoker what a handler is (`resolve`) and what it was on the deployment an invocation is pinned to
(`target`). The state is small and lives in memory; a restart reads it from the log again.

`Registry` is the door: it asks an endpoint what it offers (`discover`), checks the answer word by word (`read_manifest`: an
error names the place inside the manifest), and proposes.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from holdfast.cluster.errors import (
    BadManifest,
    BadRequest,
    Conflict,
    EndpointFailed,
    Full,
    NotFound,
    UnknownHandler,
    UnknownService,
)
from holdfast.log.engine import Snapshot
from holdfast.log.replica import Committed
from holdfast.sdk import protocol
from holdfast.statemachine import meta
from holdfast.statemachine.commands import Mode, Retry
from holdfast.statemachine.meta import (
    Deployment,
    FoundCluster,
    Handler,
    MetaCommand,
    MetaState,
    Outcome,
    RegisterDeployment,
    RemoveDeployment,
    Service,
)

META_GROUP: Final = 1  # among the groups of the log
MANIFEST_BYTES_MAX: Final = 512 * 1024
SERVICES_MAX: Final = 256  # of one deployment
HANDLERS_MAX: Final = 256  # of one service
URI_BYTES_MAX: Final = 2048
METADATA_BYTES_MAX: Final = 16 * 1024
DISCOVER_TIMEOUT_S: Final = 10.0
IDENTITY_DIGITS: Final = 8

DAY_MS: Final = 24 * 60 * 60 * 1000
RETENTION_MS: Final = DAY_MS
RETENTION_MS_MAX: Final = 10 * 365 * DAY_MS
INACTIVITY_MS: Final = 60_000
ABORT_MS: Final = 600_000
INTERVAL_MS_MAX: Final = 365 * DAY_MS

_MODES: Final = {
    "plain": Mode.PLAIN,
    "exclusive": Mode.EXCLUSIVE,
    "shared": Mode.SHARED,
    "main": Mode.WORKFLOW,
}
_MODES_BY_KIND: Final = {
    "service": ("plain",),
    "object": ("exclusive", "shared"),
    "workflow": ("main", "shared"),
}
#: The first segment of the ingress paths that are not services.
RESERVED: Final = frozenset({"holdfast"})
_HOST: Final = re.compile(r"[a-z0-9_.\-]+|\[[0-9a-f:.]+\]")
#: A name is one segment of a path, readable without quoting.
NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")


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


# -- the machine of the meta group -------------------------------------------------------------------------------------


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
        _MODES[handler.mode],
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


# -- the registry ------------------------------------------------------------------------------------------------------


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
        self, *, cluster: str, partitions: int, founders: Sequence[str] = (), replication: int = 3
    ) -> MetaState:
        """Make the cluster's settings, unless they are made. The state says what holds."""
        await self.propose(FoundCluster(cluster, partitions, list(founders), replication))
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
        if id_ not in self.state.deployments:
            raise NotFound(f"there is no deployment {id_!r:.100}", "holdfast deployments list shows what there is")
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
                if response.status != 200:
                    raise EndpointFailed(
                        f"GET {where} answered {response.status}",
                        "a Holdfast endpoint answers 200 with its manifest: check the uri and its path",
                    )
                body = b""
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > MANIFEST_BYTES_MAX:
                        raise BadManifest("$", f"it is larger than {MANIFEST_BYTES_MAX} bytes")
        except TimeoutError:
            raise EndpointFailed(f"GET {where}: no answer within {DISCOVER_TIMEOUT_S:.0f} seconds", hint) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # ValueError: a server that sends what is not HTTP, or a host name that cannot be encoded.
            raise EndpointFailed(f"GET {where} failed: {error or type(error).__name__}", hint) from None
        return read_manifest(body)


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


# -- manifests -----------------------------------------------------------------------------------------------------------


def read_manifest(raw: bytes) -> tuple[list[Service], str, list[str], list[int]]:
    """(services, sdk, modes, protocol). Total: any bytes give this or a BadManifest that names the place."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadManifest("$", f"it is not JSON ({error})", "does the uri point at a Holdfast endpoint?") from None
    manifest = _Reader("$", value).object()
    spoken = manifest.field("protocol").object()
    low = spoken.field("min").integer(1, 2**31)
    high = spoken.field("max").integer(low, 2**31)
    if not low <= protocol.VERSION <= high:
        raise BadManifest(
            "$.protocol",
            f"the endpoint speaks versions {low} to {high}, this node speaks {protocol.VERSION}",
            "use a release of the SDK that fits the node",
        )
    modes = manifest.field("modes").items(16)
    known = [mode.choice(("stream", "request-response")) for mode in modes]
    if not known:
        raise BadManifest("$.modes", "it is empty: nodes could not reach the endpoint")
    sdk = manifest.optional("sdk")
    services = [_read_service(item) for item in manifest.field("services").items(SERVICES_MAX)]
    if not services:
        raise BadManifest("$.services", "it is empty: there is nothing to register", "add a service to the endpoint")
    _check_unique("$.services", [service.name for service in services])
    return services, sdk.text(200) if sdk is not None else "", sorted(set(known)), [low, high]


def _read_service(reader: _Reader) -> Service:
    service = reader.object()
    name = service.field("name").name()
    if name in RESERVED:
        raise BadManifest(f"{reader.path}.name", f"{name} is reserved: its paths belong to the ingress")
    kind = service.field("kind").choice(meta.KINDS_OF_SERVICE)
    handlers = [_read_handler(item, kind) for item in service.field("handlers").items(HANDLERS_MAX)]
    if not handlers:
        raise BadManifest(f"{reader.path}.handlers", f"service {name} has no handlers")
    _check_unique(f"{reader.path}.handlers", [handler.name for handler in handlers])
    mains = [handler.name for handler in handlers if handler.mode == "main"]
    if kind == "workflow" and len(mains) != 1:
        raise BadManifest(f"{reader.path}.handlers", f"a workflow has one main handler, {name} has {len(mains)}")
    return Service(name, kind, handlers, _read_doc(service), _read_options(service))


def _read_handler(reader: _Reader, kind: str) -> Handler:
    handler = reader.object()
    name = handler.field("name").name()
    mode = handler.field("mode").choice(_MODES_BY_KIND[kind])
    input_type, input_schema = _read_payload(handler, "input")
    output_type, output_schema = _read_payload(handler, "output")
    return Handler(
        name, mode, _read_doc(handler), input_type, input_schema, output_type, output_schema, _read_options(handler)
    )


def _read_payload(handler: _Reader, which: str) -> tuple[str, str | None]:
    found = handler.optional(which)
    if found is None:
        return "application/json", None
    payload = found.object()
    content_type = payload.optional("content_type")
    schema = payload.optional("schema")
    text = None
    if schema is not None:
        if not isinstance(schema.value, dict | bool):
            raise schema.wrong("a JSON schema")
        text = json.dumps(schema.value, separators=(",", ":"))
    return (content_type.content_type() if content_type is not None else "application/json"), text


def _read_doc(reader: _Reader) -> str | None:
    doc = reader.optional("doc")
    return doc.text(10_000) if doc is not None else None


def _read_options(reader: _Reader) -> dict[str, Any]:
    found = reader.optional("options")
    if found is None:
        return {}
    given = found.object()
    options: dict[str, Any] = {}
    for name, low, high in (
        ("inactivity_timeout_ms", 1, INTERVAL_MS_MAX),
        ("abort_timeout_ms", 1, INTERVAL_MS_MAX),
        ("retention_ms", 0, RETENTION_MS_MAX),
    ):
        option = given.optional(name)
        if option is not None:
            options[name] = option.integer(low, high)
    private = given.optional("private")
    if private is not None:
        options["private"] = private.boolean()
    retry = given.optional("retry")
    if retry is not None:
        options["retry"] = _read_retry(retry.object())
    unknown = sorted(set(given.value) - {*options, "inactivity_timeout_ms", "abort_timeout_ms", "retention_ms",
                                         "private", "retry"})  # fmt: skip
    if unknown:
        raise BadManifest(
            f"{given.path}.{unknown[0]:.100}", "there is no such option", "is the SDK newer than the node?"
        )
    return options


def _read_retry(retry: _Reader) -> dict[str, int]:
    bounds = {
        "initial_ms": (1, INTERVAL_MS_MAX),
        "factor_permille": (1000, 1_000_000),
        "max_interval_ms": (1, INTERVAL_MS_MAX),
        "max_attempts": (0, 2**31),
        "max_duration_ms": (0, RETENTION_MS_MAX),
        "jitter_permille": (0, 1000),
    }
    unknown = sorted(set(retry.value) - set(bounds))
    if unknown:
        raise BadManifest(f"{retry.path}.{unknown[0]:.100}", f"there is no such field; known are {', '.join(bounds)}")
    found = {}
    for name, (low, high) in bounds.items():
        field = retry.optional(name)
        if field is not None:
            found[name] = field.integer(low, high)
    return found


def _check_unique(path: str, names: list[str]) -> None:
    for offset, name in enumerate(names):
        if name in names[:offset]:
            raise BadManifest(f"{path}[{offset}].name", f"{name} is there twice")


class _Reader:
    """A value and its place in the manifest."""

    def __init__(self, path: str, value: Any) -> None:
        self.path = path
        self.value = value

    def wrong(self, expected: str) -> BadManifest:
        found = "nothing" if self.value is None else f"{json.dumps(self.value):.60}"
        return BadManifest(self.path, f"{expected} expected, {found} found")

    def object(self) -> _Reader:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return self

    def field(self, name: str) -> _Reader:
        if name not in self.value:
            raise BadManifest(f"{self.path}.{name}", "it is missing")
        return _Reader(f"{self.path}.{name}", self.value[name])

    def optional(self, name: str) -> _Reader | None:
        return None if self.value.get(name) is None else self.field(name)

    def items(self, most: int) -> list[_Reader]:
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        if len(self.value) > most:
            raise BadManifest(self.path, f"at most {most} items are allowed, {len(self.value)} found")
        return [_Reader(f"{self.path}[{offset}]", item) for offset, item in enumerate(self.value)]

    def text(self, bytes_max: int) -> str:
        if not isinstance(self.value, str) or not _encodable(self.value):
            raise self.wrong("a text")
        if len(self.value.encode()) > bytes_max:
            raise BadManifest(self.path, f"at most {bytes_max} bytes are allowed")
        return self.value

    def name(self) -> str:
        name = self.text(protocol.NAME_BYTES_MAX)
        if NAME.fullmatch(name) is None:
            raise BadManifest(
                self.path,
                f"{name!r} is not a name",
                "letters, digits, _ - and . are allowed, and the first is a letter or _",
            )
        return name

    def content_type(self) -> str:
        text = self.text(200)
        if not text or not text.isascii() or not text.isprintable():
            raise self.wrong("a content type")
        return text

    def choice(self, choices: Sequence[str]) -> str:
        if self.value not in choices:
            raise self.wrong(" or ".join(f'"{choice}"' for choice in choices))
        return str(self.value)

    def integer(self, low: int, high: int) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            raise self.wrong(f"a whole number from {low} to {high}")
        return self.value

    def boolean(self) -> bool:
        if type(self.value) is not bool:
            raise self.wrong("true or false")
        return self.value


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
