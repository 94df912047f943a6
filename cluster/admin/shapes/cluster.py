"""The cluster as one node shows it: its nodes, partitions and pauses, and the level of its log."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict

from holdfast.cluster.admin.choices import REASON_MAX
from holdfast.cluster.backup.job import Backup
from holdfast.cluster.log_level import LEVELS
from holdfast.cluster.members.operations import NodeMembership
from holdfast.cluster.members.vitals import ShownVitals
from holdfast.cluster.partition.views import ShownGroup
from holdfast.cluster.schemas import Duration, Keywords, Time, one_of
from holdfast.cluster.snapshotting.service import StoredSnapshot
from holdfast.cluster.snapshotting.views import KeptSnapshots, SnapshotStore
from holdfast.cluster.values.shared_store import LargeValues
from holdfast.log.engine import ROLE_NAMES


class Pause(TypedDict):
    """What leaders may not start, until the pause is ended."""

    service: Annotated[str | None, "null: everything"]
    key: Annotated[str | None, "null: all keys of the service"]
    by: Annotated[str, "who paused it"]
    since: Time | None
    reason: str
    stop: Annotated[bool, "running attempts were asked to suspend"]


class BegunPause(Pause):
    not_confirmed: Annotated[list[str], "nodes that may not know of the pause yet"]


class Pauses(TypedDict):
    all: Annotated[Pause | None, "the pause of everything"]
    services: list[Pause]
    keys: list[Pause]


class NewPause(TypedDict):
    service: NotRequired[Annotated[str | None, "everything, if it is not given"]]
    key: NotRequired[Annotated[str | None, "only this key of the service"]]
    reason: Annotated[str, Keywords(minLength=1, maxLength=REASON_MAX)]
    stop: NotRequired[Annotated[bool, "also ask running attempts to suspend"]]


class PauseScope(TypedDict):
    service: NotRequired[Annotated[str | None, "everything, if it is not given"]]
    key: NotRequired[Annotated[str | None, "only this key of the service"]]


class Resumed(TypedDict):
    resumed: Annotated[str, "what, in words"]
    still_paused: Pauses


class NodeAddress(TypedDict):
    """A node that may join."""

    name: Annotated[str, "up to 63 letters, digits, _ - and .", Keywords(minLength=1, maxLength=63)]
    address: Annotated[str, "host:port of its peer link, not link-local", Keywords(minLength=1)]
    zone: NotRequired[str | None]


class Node(NodeMembership, ShownVitals):
    """A node, and how it is doing. What it alone knows is null if it does not answer."""

    condition: Annotated[str, "ok, unreachable, disk full, or the state of a node that is not active"]
    version: Annotated[str | None, "its release"]
    level: Annotated[int | None, "the highest level of the state machine that it supports"]
    disk_full: bool
    connected: Annotated[bool, "to the node that answers"]
    error: Annotated[str | None, "why it is not connected; only the role admin sees the reason"]


class Partition(TypedDict):
    """A partition. The fields from `role` on are only there if the node that answers has a replica."""

    partition: int
    leader: str | None
    members: list[str]
    epoch: Annotated[int, "how often its members have changed"]
    here: Annotated[bool, "the node that answers has a replica"]
    role: NotRequired[Annotated[str, one_of([*ROLE_NAMES.values(), "learner"])]]
    term: NotRequired[int]
    commit: NotRequired[int]
    applied: NotRequired[int]
    apply_lag: NotRequired[int]
    follower_lag: NotRequired[dict[str, int] | None]
    snapshot: NotRequired[KeptSnapshots]


class Linearizable(TypedDict):
    """Which parts include every change that was acknowledged before."""

    nodes: bool
    members: bool
    leaders: bool
    lags: bool


class Cluster(TypedDict):
    cluster: Annotated[str, "its name"]
    founders: list[str]
    restored: Annotated[str | None, "the backup that the cluster was restored from"]
    answered_by: Annotated[str, "the node whose view this is"]
    linearizable: Linearizable
    changing: Annotated[str | None, "the change of members in progress, in words"]
    pauses: list[Pause]
    replication: Annotated[int, "replicas of each partition"]
    level: Annotated[int, "of the state machine, which all nodes use"]
    nodes: list[Node]
    snapshots: SnapshotStore
    blobs: LargeValues
    meta: ShownGroup
    partitions: list[Partition]


class StoredSnapshots(TypedDict):
    store: Annotated[str, "its address"]
    snapshots: list[StoredSnapshot]


class NewBackup(TypedDict):
    to: Annotated[
        str,
        "s3://bucket/prefix?..., or a directory that all nodes share, as the nodes see it",
        Keywords(minLength=1),
    ]


class RecentBackups(TypedDict):
    backups: Annotated[list[Backup], "that this node has made or started since it came up, newest first"]


class LogLevel(TypedDict):
    node: str
    level: Annotated[str, one_of(LEVELS)]
    configured: Annotated[str, "by the setting log_level", one_of(LEVELS)]
    until: Annotated[Time | None, "when the level of the setting returns; null: never"]


#: Its field `for` is a keyword of Python.
LogLevelChange = TypedDict(
    "LogLevelChange",
    {
        "level": Annotated[Annotated[str, one_of(LEVELS)] | None, "null: the level of the setting `log_level`"],
        "for": NotRequired[Annotated[Duration | None, "return to the level of the setting after this long: 10m"]],
    },
)


#: At least `time`, `level`, `logger`, `message` and `node`.
LogRecord = dict[str, Any]


class LogPage(TypedDict):
    """Records of the logs of the nodes, oldest first."""

    records: Annotated[
        list[LogRecord],
        'as a node writes them with `log_format = "json"`: fields that belong to a record are beside these',
    ]
    more: Annotated[bool, "older records match"]
    silent: Annotated[list[str], "nodes that did not answer"]


class SilentNode(TypedDict):
    node: str


class LogsHello(TypedDict):
    """The first event."""

    node: Annotated[str, "the node that answers"]
    resumed: Annotated[bool, "the stream continues after Last-Event-ID"]
