"""What a committed command of the meta group means: deployments, the services they offer, and the cluster's settings.

The state is small and read all the time, so it is plain Python values in memory. Like a partition's, it is a function of
the log: `apply` takes the state and a command, changes the state, and returns what it did. The log orders registrations
by several nodes, so apply checks for breaking changes.

A deployment is immutable (P7): code that resumes is the code that started. The same uri with another manifest is refused
unless it is forced. A forced deployment keeps its id, and its invocations continue on the changed code.
"""

from __future__ import annotations

import copy
from typing import Any, Final, NamedTuple, TypeAlias, assert_never

import msgpack

from holdfast.sdk.ids import DeploymentId, NodeId
from holdfast.statemachine.access import CreateToken, NoteTokenUse, RevokeToken, RotateToken, Tokens
from holdfast.statemachine.audit import RecordActs, Trail, read_acts
from holdfast.statemachine.effects import Code, Result
from holdfast.statemachine.identity import AddIdentityKey, Identity, RetireIdentityKey
from holdfast.statemachine.levels import FIRST, LEVEL, TooNew, trimmed
from holdfast.statemachine.members import AssignPartition, Membership, PutNode, SetNodeState
from holdfast.statemachine.pauses import Halt, Pauses, Release
from holdfast.statemachine.webhooks import CreateWebhook, DeleteWebhook, Webhooks

KINDS_OF_SERVICE: Final = ("service", "object", "workflow")
MODES_OF_HANDLER: Final = ("plain", "exclusive", "shared", "main")

#: The name of Holdfast's own handler protocol. A deployment without a name speaks it.
NATIVE: Final = "holdfast"

DEPLOYMENTS_MAX: Final = 1000
SERVICES_MAX: Final = 5000

# -- records ---------------------------------------------------------------------------------------------------------


class Handler(NamedTuple):
    """A handler as its manifest describes it. Schemas are JSON text, which only people and the console read."""

    name: str
    mode: str
    doc: str | None = None
    input_type: str = "application/json"
    input_schema: str | None = None
    output_type: str = "application/json"
    output_schema: str | None = None
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed in place


class Service(NamedTuple):
    """A service as one deployment offers it."""

    name: str
    kind: str
    handlers: list[Handler]
    doc: str | None = None
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed in place

    def handler(self, name: str) -> Handler | None:
        return next((handler for handler in self.handlers if handler.name == name), None)


class Deployment(NamedTuple):
    id: DeploymentId
    uri: str
    services: list[Service]
    sdk: str
    modes: list[str]  # how it can be reached: "stream", "request-response"
    protocol: list[int]  # [min, max]
    metadata: dict[str, str]
    created_ms: int
    revisions: dict[str, int]  # service -> the revision it is here
    protocol_name: str = NATIVE  # Another one only since level 2.

    def service(self, name: str) -> Service | None:
        return next((service for service in self.services if service.name == name), None)

    def same_manifest(self, command: RegisterDeployment, level: int) -> bool:
        """Whether nothing changed for callers and for running invocations.

        The release of the SDK may have changed, and may support further versions of the protocol.
        """
        if self.services != command.services or self.modes != command.modes:
            return False
        if self.protocol_name != command.protocol_name:
            return False
        if level < 2:
            return self.protocol == command.protocol and self.sdk == command.sdk
        (old_min, old_max), (new_min, new_max) = self.protocol, command.protocol
        return new_min <= old_min and old_max <= new_max


# -- commands --------------------------------------------------------------------------------------------------------


class FoundCluster(NamedTuple):
    """The first command of a cluster. The number of partitions is fixed for ever; the first command counts."""

    cluster: str
    partitions: int
    founders: list[NodeId] = []  # noqa: RUF012 - never changed in place
    replication: int = 3
    level: int = FIRST  # every founder supports it; see `levels`


class RegisterDeployment(NamedTuple):
    id: DeploymentId
    uri: str
    services: list[Service]
    sdk: str
    modes: list[str]
    protocol: list[int]
    metadata: dict[str, str]
    force: bool
    protocol_name: str = NATIVE


class RemoveDeployment(NamedTuple):
    """Remove a deployment. `force` removes even one that new invocations use. The proposer has checked whether it is
    drained."""

    id: DeploymentId
    force: bool


class RestoreDeployment(NamedTuple):
    """A deployment of the cluster that this one is restored from. Accepted only before this one is founded."""

    id: DeploymentId
    uri: str
    services: list[Service]
    sdk: str
    modes: list[str]
    protocol: list[int]
    metadata: dict[str, str]
    created_ms: int
    revisions: dict[str, int]
    protocol_name: str = NATIVE


class RestoreCluster(NamedTuple):
    """Found a cluster that is restored from a backup, when all its deployments are there.

    Certain nodes already have the states of its partitions on their disks, so `placement` names the members of each, and
    every node supports the level of those states.
    """

    cluster: str
    placement: list[list[NodeId]]
    replication: int
    offers: dict[str, list[DeploymentId]]
    revisions: dict[str, int]
    level: int = FIRST


class RaiseLevel(NamedTuple):
    """Every node of the cluster supports this level. The leaders of the partitions raise theirs when they see it."""

    level: int


MetaCommand: TypeAlias = (
    FoundCluster
    | RegisterDeployment
    | RemoveDeployment
    | PutNode
    | SetNodeState
    | AssignPartition
    | RestoreDeployment
    | RestoreCluster
    | RaiseLevel
    | CreateToken
    | RotateToken
    | RevokeToken
    | NoteTokenUse
    | RecordActs
    | AddIdentityKey
    | RetireIdentityKey
    | Halt
    | Release
    | CreateWebhook
    | DeleteWebhook
)

#: Numbers never change: later releases replay logs that were written today.
NUMBERS: Final[dict[type[Any], int]] = {
    FoundCluster: 1,
    RegisterDeployment: 2,
    RemoveDeployment: 3,
    PutNode: 4,
    SetNodeState: 5,
    AssignPartition: 6,
    RestoreDeployment: 7,
    RestoreCluster: 8,
    RaiseLevel: 9,
    CreateToken: 10,
    RotateToken: 11,
    RevokeToken: 12,
    NoteTokenUse: 13,
    RecordActs: 14,
    AddIdentityKey: 15,
    RetireIdentityKey: 16,
    Halt: 17,
    Release: 18,
    CreateWebhook: 19,
    DeleteWebhook: 20,
}
KINDS: Final = {number: kind for kind, number in NUMBERS.items()}
#: The defaults of the fields that a command or record got in level 2. They are left out while they have their defaults.
_LATER: Final[dict[type[Any], tuple[Any, ...]]] = {
    FoundCluster: (FIRST,),
    RestoreCluster: (FIRST,),
    RegisterDeployment: (NATIVE,),
    RestoreDeployment: (NATIVE,),
    Deployment: (NATIVE,),
}


class Proposal(NamedTuple):
    """One entry of the meta group. By `origin` and `sequence`, its proposer finds those who wait for it."""

    origin: bytes
    sequence: int
    now_ms: int
    command: MetaCommand


def encode(proposal: Proposal) -> bytes:
    command = proposal.command
    row = (NUMBERS[type(command)], *trimmed(command, _LATER.get(type(command), ())))
    packed: bytes = msgpack.packb((proposal.origin, proposal.sequence, proposal.now_ms, row))
    return packed


def decode(raw: bytes) -> Proposal:
    origin, sequence, now_ms, row = msgpack.unpackb(raw)
    kind = KINDS.get(row[0])
    fields = row[1:]
    if kind is None or len(fields) > len(kind._fields):
        raise TooNew(f"command {row[0]} of the meta group's log", LEVEL + 1)
    if kind in (RegisterDeployment, RestoreDeployment):
        fields[2] = [_service(service) for service in fields[2]]
    elif kind is RecordActs:
        fields[1] = read_acts(fields[1])
    return Proposal(origin, sequence, now_ms, kind(*fields))


def _service(row: list[Any]) -> Service:
    name, kind, handlers, *rest = row
    return Service(name, kind, [Handler(*handler) for handler in handlers], *rest)


# -- state -----------------------------------------------------------------------------------------------------------


class MetaState:
    """The whole state. `offers` lists for each service the deployments that offer it, oldest first: the last one is
    current."""

    def __init__(self) -> None:
        self.cluster = ""
        self.partitions = 0
        self.deployments: dict[DeploymentId, Deployment] = {}
        self.offers: dict[str, list[DeploymentId]] = {}
        self.revisions: dict[str, int] = {}  # service -> the newest revision number ever given
        self.now_ms = 0
        self.membership = Membership()
        self.level = FIRST  # See `levels`.
        self.tokens = Tokens()
        self.trail = Trail()
        self.identity = Identity()
        self.pauses = Pauses()
        self.webhooks = Webhooks()

    def current(self, service: str) -> Deployment | None:
        """The deployment that new invocations of a service use."""
        offers = self.offers.get(service)
        return self.deployments[offers[-1]] if offers else None

    def at(self, uri: str) -> Deployment | None:
        """The deployment registered at a uri. There is never more than one."""
        return next((deployment for deployment in self.deployments.values() if deployment.uri == uri), None)


def encode_state(state: MetaState) -> bytes:
    """For backups. Tokens, the audit trail, the identity, pauses and webhooks are not part of it: they belong to one cluster,
    and a cluster made from a backup is another one."""
    packed: bytes = msgpack.packb(
        (
            state.cluster,
            state.partitions,
            [tuple(trimmed(deployment, _LATER[Deployment])) for deployment in state.deployments.values()],
            state.offers,
            state.revisions,
            state.now_ms,
            state.membership.pack(),
            *((state.level,) if state.level != FIRST else ()),
        )
    )
    return packed


def decode_state(raw: bytes) -> MetaState:
    state = MetaState()
    row = msgpack.unpackb(raw)
    state.cluster, state.partitions, deployments, state.offers, state.revisions, state.now_ms, membership, *later = row
    if later:
        state.level = later[0]
    state.membership = Membership.unpack(membership)
    for id_, uri, services, *rest in deployments:
        state.deployments[id_] = Deployment(id_, uri, [_service(service) for service in services], *rest)
    return state


# -- apply -----------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What a proposer is told."""

    result: Result
    deployment: DeploymentId | None = None
    differences: tuple[str, ...] = ()


def apply(state: MetaState, now_ms: int, command: MetaCommand) -> Outcome:
    """Total: an invalid manifest was refused before it was proposed."""
    state.now_ms = max(state.now_ms, now_ms)
    match command:
        case FoundCluster():
            return _found(state, command)
        case RegisterDeployment():
            return _register(state, command)
        case RemoveDeployment():
            return _remove(state, command)
        case PutNode():
            return Outcome(state.membership.put(command))
        case SetNodeState():
            return Outcome(state.membership.set_state(command))
        case AssignPartition():
            return Outcome(state.membership.assign(command))
        case RaiseLevel():
            return _raise_level(state, command.level)
        case CreateToken():
            return Outcome(state.tokens.create(command, state.now_ms))
        case RotateToken():
            return Outcome(state.tokens.rotate(command, state.now_ms))
        case RevokeToken():
            return Outcome(state.tokens.revoke(command))
        case NoteTokenUse():
            return Outcome(state.tokens.note_use(command))
        case RecordActs():
            return Outcome(state.trail.record(command))
        case AddIdentityKey():
            return Outcome(state.identity.add(command, state.now_ms))
        case RetireIdentityKey():
            return Outcome(state.identity.retire(command))
        case Halt():
            return Outcome(state.pauses.halt(command, state.now_ms))
        case Release():
            return Outcome(state.pauses.release(command))
        case CreateWebhook():
            return Outcome(state.webhooks.create(command, state.now_ms))
        case DeleteWebhook():
            return Outcome(state.webhooks.delete(command, state.now_ms))
        case RestoreDeployment():
            return _restore_deployment(state, command)
        case RestoreCluster():
            return _restore(state, command)
        case _:
            assert_never(command)


def _founded(state: MetaState) -> Outcome:
    return Outcome(Result(Code.UNCHANGED, f"the cluster has {state.partitions} partitions"))


def _found(state: MetaState, command: FoundCluster) -> Outcome:
    if state.partitions:
        return _founded(state)
    state.cluster, state.partitions = command.cluster, command.partitions
    state.membership.found(partitions=command.partitions, founders=command.founders, replication=command.replication)
    _raise_level(state, command.level)
    return Outcome(Result())


def _raise_level(state: MetaState, level: int) -> Outcome:
    if level > LEVEL:
        raise TooNew("the meta group", level)
    if level <= state.level:
        return Outcome(Result(Code.UNCHANGED, f"the level is {state.level}"))
    state.level = level
    return Outcome(Result())


def _restore_deployment(state: MetaState, command: RestoreDeployment) -> Outcome:
    if state.partitions:
        return _founded(state)
    state.deployments[command.id] = Deployment(*command)
    return Outcome(Result(), command.id)


def _restore(state: MetaState, command: RestoreCluster) -> Outcome:
    if state.partitions:
        return _founded(state)
    missing = {id_ for offers in command.offers.values() for id_ in offers} - set(state.deployments)
    if missing:
        return Outcome(Result(Code.CONFLICT, f"deployments are missing: {', '.join(sorted(missing))}"))
    state.cluster, state.partitions = command.cluster, len(command.placement)
    state.offers = {service: list(ids) for service, ids in command.offers.items() if ids}
    state.revisions = dict(command.revisions)
    state.membership.place(command.placement, command.replication)
    _raise_level(state, command.level)
    if command.level >= 2:
        state.webhooks.renew(state.now_ms)  # Partitions forget the webhooks of the cluster in the backup.
    return Outcome(Result())


def restored(old: MetaState, *, cluster: str, placement: list[list[NodeId]], replication: int) -> list[MetaCommand]:
    """The commands, in order, that give a new cluster what the old one knew, except for its nodes."""
    return [
        *(RestoreDeployment(*deployment) for deployment in old.deployments.values()),
        RestoreCluster(
            cluster=cluster,
            placement=placement,
            replication=replication,
            offers=old.offers,
            revisions=old.revisions,
            level=old.level,
        ),
    ]


def _register(state: MetaState, command: RegisterDeployment) -> Outcome:
    there = state.at(command.uri)
    if there is not None and there.same_manifest(command, state.level):
        return _register_again(state, there, command)
    if not command.force:
        if there is not None:
            return Outcome(
                Result(
                    Code.CONFLICT,
                    f"{command.uri} is registered as {there.id} with another manifest, and a deployment never changes: "
                    "invocations that started on it must find their code again",
                ),
                there.id,
                tuple(manifest_differences(there.services, command.services)) or ("the way to reach it changed",),
            )
        breaking = [text for service in command.services for text in breaking_changes(state, service)]
        if breaking:
            return Outcome(Result(Code.CONFLICT, "the deployment would break callers"), None, tuple(breaking))
    if there is None and len(state.deployments) >= DEPLOYMENTS_MAX:
        return Outcome(Result(Code.FULL, f"there are already {DEPLOYMENTS_MAX} deployments: remove drained ones"))
    fresh = [service.name for service in command.services if service.name not in state.revisions]
    if len(state.revisions) + len(fresh) > SERVICES_MAX:
        return Outcome(Result(Code.FULL, f"there are already {SERVICES_MAX} services"))
    id_ = there.id if there is not None else command.id
    if there is None and id_ in state.deployments:
        return Outcome(Result(Code.CONFLICT, f"the id {id_} is already used: try again"))  # Two random ids were equal.
    _withdraw(state, id_)
    revisions = {}
    for service in command.services:
        revision = state.revisions[service.name] = state.revisions.get(service.name, 0) + 1
        revisions[service.name] = revision
        state.offers.setdefault(service.name, []).append(id_)
    created_ms = there.created_ms if there is not None else state.now_ms
    state.deployments[id_] = Deployment(
        id=id_,
        uri=command.uri,
        services=copy.deepcopy(command.services),
        sdk=command.sdk,
        modes=list(command.modes),
        protocol=list(command.protocol),
        metadata=dict(command.metadata),
        created_ms=created_ms,
        revisions=revisions,
        protocol_name=command.protocol_name,
    )
    return Outcome(Result(), id_)


def _register_again(state: MetaState, there: Deployment, command: RegisterDeployment) -> Outcome:
    """The same uri and manifest: only the metadata and the SDK's description change. If forced, the deployment also
    becomes the newest again."""
    metadata = dict(command.metadata) if command.metadata else there.metadata
    state.deployments[there.id] = there._replace(sdk=command.sdk, protocol=list(command.protocol), metadata=metadata)
    if command.force:
        for service in there.services:
            offers = state.offers[service.name]
            offers.remove(there.id)
            offers.append(there.id)
    return Outcome(Result(Code.UNCHANGED, "unchanged"), there.id)


def _remove(state: MetaState, command: RemoveDeployment) -> Outcome:
    deployment = state.deployments.get(command.id)
    if deployment is None:
        return Outcome(Result(Code.NOT_FOUND, f"there is no deployment {command.id}"))
    newest = [name for name in deployment.revisions if state.offers[name][-1] == command.id]
    if newest and not command.force:
        services = ", ".join(sorted(newest))
        return Outcome(
            Result(
                Code.CONFLICT,
                f"{command.id} is where new invocations of {services} go: register a newer deployment first",
            ),
            command.id,
            tuple(f"{name}: this is its newest revision" for name in sorted(newest)),
        )
    _withdraw(state, command.id)
    del state.deployments[command.id]
    return Outcome(Result(), command.id)


def _withdraw(state: MetaState, deployment: DeploymentId) -> None:
    for service in [name for name, offers in state.offers.items() if deployment in offers]:
        state.offers[service].remove(deployment)
        if not state.offers[service]:
            del state.offers[service]


def breaking_changes(state: MetaState, service: Service) -> list[str]:
    """What callers of a service's current revision would miss in a new one, as sentences."""
    deployment = state.current(service.name)
    current = deployment.service(service.name) if deployment is not None else None
    return _service_differences(current, service) if current is not None else []


def _service_differences(old: Service, new: Service) -> list[str]:
    found = []
    if old.kind != new.kind:
        found.append(f"{old.name}: was of kind {old.kind}, is of kind {new.kind}")
    if _private(old.options) < _private(new.options):
        found.append(f"{old.name}: was public, is private")
    for was in old.handlers:
        now = new.handler(was.name)
        if now is None:
            found.append(f"{old.name}/{was.name}: was removed")
            continue
        if was.mode != now.mode:
            found.append(f"{old.name}/{was.name}: was {was.mode}, is {now.mode}")
        if _private(was.options) < _private(now.options):
            found.append(f"{old.name}/{was.name}: was public, is private")
    return found


def manifest_differences(old: list[Service], new: list[Service]) -> list[str]:
    """Everything that changed at one uri: more than what breaks callers, because replay depends on all of it."""
    by_name = {service.name: service for service in new}
    found = []
    for was in old:
        now = by_name.pop(was.name, None)
        if now is None:
            found.append(f"{was.name}: was removed")
            continue
        breaking = _service_differences(was, now)
        found += breaking
        known = {handler.name for handler in was.handlers}
        found += [f"{was.name}/{handler.name}: was added" for handler in now.handlers if handler.name not in known]
        changed = [
            f"{was.name}/{handler.name}: its description, schema or options changed"
            for handler in was.handlers
            if (other := now.handler(handler.name)) is not None and other != handler and other.mode == handler.mode
        ]
        found += changed
        if now != was and not breaking and not changed and len(now.handlers) == len(was.handlers):
            found.append(f"{was.name}: its description or options changed")
    return found + [f"{name}: was added" for name in by_name]


def _private(options: dict[str, Any]) -> bool:
    return options.get("private") is True
