"""The settings of a node: a file `node.toml`, overridden by `HOLDFAST_*` variables.

Everything is checked here, once, before anything is opened, and an error names the setting, what was found and what is
expected. An unknown setting is an error too: a misspelt limit must not be silently ignored.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from holdfast.cluster.addresses import Addresses, read_addresses
from holdfast.cluster.log_level import read_log_format, read_log_level
from holdfast.cluster.origins import ANY_HOST, ANY_ORIGIN, ANYWHERE, host_behind_credentials, read_hosts, read_origins
from holdfast.cluster.quantities import MIB, read_bytes, read_count, read_ratio, read_seconds, show_size
from holdfast.cluster.redaction import REDACTED, read_header_names
from holdfast.sdk.ids import NodeId
from holdfast.snapshots.errors import BadStoreUrl
from holdfast.snapshots.stores import check_store_url

BODY_BYTES_MAX: Final = 32 * MIB
DEFAULT_PARTITIONS: Final = 8
DEV_PARTITIONS: Final = 4
CLUSTER_NAME_MAX: Final = 54
DEV_SECRET: Final = b"holdfast dev: one node, no peers"


class BadConfig(Exception):
    """A setting cannot be used. The text names it and says what is expected."""


@dataclass(frozen=True)
class HostPort:
    """Where something listens, or is reached."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class Config:
    """One node. Every bound that a request can meet is here.

    The comment on a field, or above it, is its text in the reference (docs/generate.py).
    """

    node: str = "n1"  # Name of this node, unique in the cluster for ever.
    cluster: str = "holdfast"  # Name of the cluster, the same on every node.
    data: Path = Path(".holdfast")  # Directory for log, state and snapshots, on a local disk.
    partitions: int = DEFAULT_PARTITIONS  # Number of partitions. Counts only when the cluster is formed.

    ingress: HostPort = HostPort("127.0.0.1", 8080)  # Where clients reach this node.
    admin: HostPort = HostPort("127.0.0.1", 9070)  # Where the admin API listens.
    peer: HostPort = HostPort("127.0.0.1", 5122)  # Where other nodes connect.
    # Where a thread answers liveness probes, even while the event loop hangs.
    health: HostPort | None = None
    # The address at which other nodes reach `peer`, if it differs. Default: this node's own entry in `peers`.
    advertise: HostPort | None = None
    peers: Mapping[str, HostPort] = field(default_factory=dict)  # Names and addresses of the nodes.
    founders: tuple[str, ...] = ()  # The nodes that form the cluster. Never changes.
    # For a node that joins a cluster made from a backup: the value that `holdfast restore` printed.
    restored: str = ""
    replication: int = 3  # Replicas of each partition, if there are that many nodes.
    zone: str = ""  # A host or rack. Replicas of one partition are placed in different zones.
    # Address of the ingress as others see it, if it differs from `ingress`.
    public_ingress_url: str = ""
    public_admin_url: str = ""  # Address of the admin API as others see it, if it differs from `admin`.
    secret: bytes | None = field(default=None, repr=False)
    # File with the secret by which nodes prove themselves to each other: at least 16 bytes.
    secret_file: Path | None = None
    # Who may use ingress and admin API: `tokens` (those with a token), or `off` (anyone who can reach them). A node that
    # other machines can reach must be given one of the two; on loopback, the default is `off`.
    auth: str = ""
    # File with an admin token, `hf_node_<secret>`. Default: each node makes its own, `admin-token` in `data`.
    admin_token_file: Path | None = None
    # Where handlers may be: names, addresses and networks, with ports or without. Default: everywhere but at link-local and
    # metadata addresses.
    deployment_addresses: Addresses = field(default_factory=Addresses)
    log_format: str = "text"  # The log on standard error: `text`, or `json` with one object per line.
    # Level of the log: `debug`, `info`, `warning` or `error`. `holdfast log-level` changes it at run time.
    log_level: str = "info"
    # Where webhooks may be, in the same way.
    webhook_addresses: Addresses = field(default_factory=Addresses)
    # OpenTelemetry collector that receives the spans of completed invocations by OTLP over HTTP: `http://10.0.0.9:4318`. It
    # needs the extra `otel`. Empty: no traces.
    traces: str = ""
    traces_ratio: float = 1.0  # Share of invocations that are traced, if their callers did not decide it.
    session_lifetime: float = 12 * 3600.0  # How long a session at the console lasts.
    # Host names under which clients reach this node: `holdfast.example,*.internal`, or `*` for any. Its own addresses and
    # `localhost` are known. Requests for other names are refused, because a web page could have sent them.
    allowed_hosts: tuple[str, ...] = ()
    # Origins of the web pages that may use the ingress: `https://shop.example`. `*` means all, and needs `auth = "tokens"`.
    cors_origins: tuple[str, ...] = ()
    # Headers of requests that are secrets: neither journaled nor passed on to handlers. `x-secret-*` names all that begin so.
    redact_headers: tuple[str, ...] = REDACTED
    # Whether a crash may leave a core dump (`on`), which holds tokens, keys and payloads, and debuggers of the same user may
    # attach.
    core_dumps: str = "off"
    tls_cert: Path | None = None  # Certificate of this node, for TLS between nodes instead of a secret.
    tls_key: Path | None = None  # Private key of that certificate.
    tls_ca: Path | None = None  # Certificate of the authority that signs the certificates of all nodes.

    ingress_tls_cert: Path | None = None  # Certificate (with its chain) of the ingress, which then speaks HTTPS only.
    ingress_tls_key: Path | None = None  # Private key of that certificate.
    admin_tls_cert: Path | None = None  # Certificate (with its chain) of the admin API, which then speaks HTTPS only.
    admin_tls_key: Path | None = None  # Private key of that certificate.
    # Clients of the admin API must show a certificate of this authority, beside their token.
    admin_tls_client_ca: Path | None = None

    body_bytes_max: int = 4 * MIB  # Size of a request's body, up to 32 MiB. Over it: 413.
    # Larger values are stored once, beside the journals that refer to them.
    blob_threshold_bytes: int = 256 * 1024
    # Requests in progress at the ingress, including those that wait for an outcome. Over it: 429.
    requests_max: int = 10_000
    request_bytes_max: int = 256 * MIB  # Total size of all bodies in progress.
    connections_max: int = 20_000  # Connections at the ingress.
    # Connections of one client address, at most three quarters of a port's. Raise it behind a proxy.
    connections_per_address_max: int = 2000
    # How long an invocation is paused before clients that wait for it get 503.
    paused_answer_after: float = 10.0
    attempts_max: int = 1000  # Attempts that run at the same time, per deployment.
    log_bytes_max: int = 16 * 1024 * MIB  # Size of the log of this node.
    state_bytes_max: int = 16 * 1024 * MIB  # Size of the state, per partition.
    # The bounds below become part of a partition's state, because all replicas must draw the same line: the leader sees to
    # that. Give all nodes the same.

    # Steps of one invocation. Beyond, its code gets `JournalTooLong`, and has a tenth in reserve. Same on every node.
    journal_steps_max: int = 100_000
    journal_bytes_max: int = 64 * MIB  # Bytes in the journal of one invocation. Same on every node.
    # How many calls of handlers may wait for each other in a chain. Beyond, the call fails. Same on every node.
    call_depth_max: int = 100
    # Bytes of the large values of one journal. Same on every node.
    journal_blob_bytes_max: int = 256 * MIB
    # Completed invocations kept per partition. Beyond, the oldest go before their retention ends.
    completed_max: int = 1_000_000
    completed_bytes_max: int = 4 * 1024 * MIB  # Bytes of completed invocations kept per partition.
    free_bytes_min: int = 64 * MIB  # Free disk space below which a node accepts nothing more.

    # Store that all nodes share: `s3://bucket/prefix?...` or a mounted directory. Default: each node keeps its own.
    snapshots: str = ""
    # Where large values are kept: `store` (the one above), `log`, or `auto`: the store if there is one.
    blobs: str = "auto"
    snapshot_entries: int = 100_000  # A partition cuts a snapshot after this many log entries.
    snapshot_bytes: int = 256 * MIB  # A partition cuts a snapshot after this many bytes of log.
    snapshot_age: float = 3600.0  # A partition cuts a snapshot after this time, if anything happened.
    snapshot_interval: float = 30.0  # Shortest time between two snapshots of a partition.
    snapshot_keep: int = 2  # Snapshots kept of each partition, on each node and in the store.
    snapshot_rate_bytes: int = 64 * MIB  # Bytes per second at which this node fetches snapshots.
    # Entries that stay in the log behind a snapshot, for nodes that were away for a moment.
    log_tail: int = 10_000


def load(
    path: Path | None, environ: Mapping[str, str] | None = None, defaults: Mapping[str, Any] | None = None
) -> Config:
    """The file, if there is one, then the variables. `defaults`: instead of those of `Config`. Raises BadConfig."""
    values: dict[str, Any] = dict(defaults or {})
    where: dict[str, str] = {}
    if path is not None:
        for name, value in _read(path).items():
            values[name], where[name] = value, f"{path}: {name}"
    for variable, text in sorted((os.environ if environ is None else environ).items()):
        if (
            variable.startswith("HOLDFAST_")
            and variable not in _OTHER_VARIABLES
            and not _KUBERNETES.fullmatch(variable)
        ):
            name = variable.removeprefix("HOLDFAST_").lower()
            values[name], where[name] = text, variable
    return build(values, where)


def build(values: Mapping[str, Any], where: Mapping[str, str] | None = None) -> Config:
    """A configuration from plain values (text, numbers, tables), each checked."""
    where = where or {}
    settings: dict[str, Any] = {}
    for name, value in values.items():
        place = where.get(name, name)
        read = _SETTINGS.get(name)
        if read is None:
            close = difflib.get_close_matches(name, _SETTINGS, 1)
            known = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(_SETTINGS))}"
            raise BadConfig(f"{place}: there is no such setting; {known}")
        try:
            settings[name] = read(value)
            if name == "secret_file":
                settings["secret"] = read_secret(settings[name])
        except OSError as error:
            raise BadConfig(f"{place}: {error}") from None
        except ValueError as error:
            raise BadConfig(f"{place}: {_without_credentials(read, value, error)}") from None
    config = Config(**settings)
    # One list of peers may serve for all nodes: our own entry says where the others find us.
    others = {name: place for name, place in config.peers.items() if name != config.node}
    config = replace(config, peers=others, advertise=config.advertise or config.peers.get(config.node))
    _check_together(config)
    return config


def _without_credentials(read: Callable[[Any], Any], value: Any, error: ValueError) -> str:
    """The text of the error, without any credentials that the value holds."""
    hidden = _hide(value)
    if hidden == value or "credentials" in str(error):
        return str(error)
    try:
        read(hidden)
    except ValueError as same:
        return str(same)
    return "the value is not valid (it has an @, so it is not repeated here)"


def _hide(value: Any) -> Any:
    """Cut each text up to its last @: a password may have commas, slashes and spaces in it."""
    if isinstance(value, str):
        return f"...@{value.rpartition('@')[2]}" if "@" in value else value
    if isinstance(value, list):
        return [_hide(each) for each in value]
    if isinstance(value, Mapping):
        return {_hide(name): _hide(each) for name, each in value.items()}
    return value


def _check_together(config: Config) -> None:
    """Checks that involve several settings."""
    files = {"tls_cert": config.tls_cert, "tls_key": config.tls_key, "tls_ca": config.tls_ca}
    missing = [name for name, file in files.items() if file is None]
    if 0 < len(missing) < len(files):
        raise BadConfig(f"{missing[0]}: TLS between nodes needs tls_cert, tls_key and tls_ca, all three")
    if config.peers and config.secret is None and missing:
        raise BadConfig(
            "secret: a cluster of several nodes needs one, the same on each: set secret_file, or tls_cert, tls_key, tls_ca"
        )
    for door in ("ingress", "admin"):
        cert, key = getattr(config, f"{door}_tls_cert"), getattr(config, f"{door}_tls_key")
        if (cert is None) != (key is None):
            lacking = "cert" if cert is None else "key"
            raise BadConfig(f"{door}_tls_{lacking}: TLS needs both {door}_tls_cert and {door}_tls_key")
    if config.admin_tls_client_ca is not None and config.admin_tls_cert is None:
        raise BadConfig("admin_tls_client_ca: client certificates need TLS: set admin_tls_cert and admin_tls_key")
    doors = {"ingress": config.ingress, "admin": config.admin, "peer": config.peer}
    if config.health is not None:
        doors["health"] = config.health
    for (one, first), (other, second) in combinations(doors.items(), 2):
        if _overlap(first, second):
            raise BadConfig(f"{one}, {other}: both listen on port {first.port}; give each a port of its own")
    named: dict[str, str] = {}
    own = config.advertise or config.peer
    for name, place in sorted({**config.peers, config.node: own}.items()):
        if place.port and (before := named.setdefault(str(place), name)) != name:
            raise BadConfig(
                f"peers: {before} and {name} have the same address, {place}; give each node its own "
                "(of this node it is `advertise`, or else `peer`)"
            )
    if config.request_bytes_max < config.body_bytes_max:
        raise BadConfig(
            f"request_bytes_max: {show_size(config.request_bytes_max)} for all bodies in progress are less than "
            f"{show_size(config.body_bytes_max)} for one (body_bytes_max)"
        )
    if config.blobs == "store" and not config.snapshots:
        raise BadConfig(
            "blobs: large values cannot go to a store while there is none that all nodes share: set snapshots"
        )
    if ANY_HOST in config.allowed_hosts and config.auth != "tokens":
        raise BadConfig(
            'allowed_hosts: * would let every web page use this node (DNS rebinding); it needs auth = "tokens", or name hosts'
        )
    if ANY_ORIGIN in config.cors_origins and config.auth != "tokens":
        raise BadConfig(
            'cors_origins: * would let every web page call handlers; it needs auth = "tokens", or name origins'
        )
    if config.node not in config.founders and config.founders and not config.peers:
        raise BadConfig(f"peers: {config.node} is not among the founders, so it needs the address of a node to join")


def _overlap(one: HostPort, other: HostPort) -> bool:
    """Whether two listeners on one machine collide. Port 0 means any free port."""
    return one.port == other.port != 0 and (one.host == other.host or not {one.host, other.host}.isdisjoint(ANYWHERE))


def describe(config: Config) -> dict[str, str]:
    """The effective settings as text for an operator. Of a secret, only its presence is shown."""
    shown: dict[str, str] = {}
    for each in fields(Config):
        value = getattr(config, each.name)
        if each.name == "secret":
            shown["secret"] = "(not set)" if value is None else "(set)"
        elif isinstance(value, Mapping):
            shown[each.name] = ", ".join(f"{name}={place}" for name, place in sorted(value.items())) or "(none)"
        elif isinstance(value, tuple):
            none = (
                f"(this node and its peers: {', '.join(founders_of(config))})" if each.name == "founders" else "(none)"
            )
            shown[each.name] = ", ".join(value) or none
        elif each.name.endswith(("_bytes_max", "_bytes_min", "_bytes")):
            shown[each.name] = show_size(value)
        else:
            shown[each.name] = "(not set)" if value is None or value == "" else str(value)
    return shown


def founders_of(config: Config) -> tuple[NodeId, ...]:
    """The founders: those that are named, or else this node and its peers."""
    return tuple(sorted({NodeId(name) for name in config.founders or (config.node, *config.peers)}))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadConfig(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadConfig(f"{path}: not TOML: {error}") from None


# -- readers of one setting: a value of the file or text of a variable; ValueError says what is expected ---------------


def read_name(value: Any) -> str:
    if not isinstance(value, str) or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,62}", value) is None:
        raise ValueError(f"{value!r:.80} is not a name: up to 63 letters, digits, _ - and . are allowed")
    return value


def read_path(value: Any) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("a path expected")
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ValueError("the user whose home directory it names does not exist: write the path out") from None


def read_host_port(value: Any) -> HostPort:
    """`host:port`, `:port`, `[::1]:port` or a port alone; without a host it is 127.0.0.1."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str):
        if (host := host_behind_credentials(text)) is not None:
            raise ValueError(f"the address of {host} has credentials in it; write it as host:port")
        host, _, port = text.rpartition(":")
        if port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535:
            bare = host.removeprefix("[").removesuffix("]")
            if (":" not in bare or host == f"[{bare}]") and not any(c.isspace() for c in bare):
                return HostPort(bare or "127.0.0.1", int(port))
    raise ValueError(f"{value!r:.80} is not host:port, as in 127.0.0.1:8080")


def read_peers(value: Any) -> dict[str, HostPort]:
    """A table name = "host:port", or as text `n2=host:port,n3=host:port`."""
    if isinstance(value, str):
        pairs = [item.partition("=") for item in value.split(",") if item.strip()]
        if any(not equals for _, equals, _ in pairs):
            raise ValueError("name=host:port, separated by commas, expected")
        value = {name.strip(): address.strip() for name, _, address in pairs}
    if not isinstance(value, dict):
        raise ValueError('a table of name = "host:port" expected')
    return {read_name(name): read_host_port(address) for name, address in value.items()}


def read_names(value: Any) -> tuple[str, ...]:
    """A list of names, or as text `n1,n2,n3`."""
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",") if name.strip()]
    if not isinstance(value, list) or not value:
        raise ValueError("a list of names expected, as in n1,n2,n3")
    names = tuple(sorted(read_name(name) for name in value))
    if len(set(names)) != len(names):
        raise ValueError("duplicate name")
    return names


def read_cluster_name(value: Any) -> str:
    """Shorter than other names: the link adds a digest of the founders to it."""
    name = read_name(value)
    if len(name) > CLUSTER_NAME_MAX:
        raise ValueError(f"{name!r:.80} is longer than {CLUSTER_NAME_MAX} characters")
    return name


def read_restored(value: Any) -> str:
    """As `holdfast restore` prints it and GET /cluster shows it: a backup, and a digest of what was made of it."""
    if value == "":
        return ""
    if not isinstance(value, str) or re.fullmatch(r"backup-[0-9a-f\-]{8,40}\.[0-9a-f]{16}", value) is None:
        raise ValueError(f"{value!r:.80} is not what holdfast restore printed, or GET /cluster shows as `restored`")
    return value


def read_zone(value: Any) -> str:
    return "" if value == "" else read_name(value)


def read_url(value: Any) -> str:
    if value == "":
        return ""
    if isinstance(value, str) and (host := host_behind_credentials(value)) is not None:
        raise ValueError(f"the URL of {host} has credentials in it, which everybody would see; write it without them")
    parts = urlsplit(value) if isinstance(value, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{value!r:.80} is not a URL, as in http://10.0.0.1:8080")
    return str(value).rstrip("/")


def read_file(value: Any) -> Path:
    """A file that exists and can be read, checked before the node opens anything."""
    path = read_path(value)
    with path.open("rb"):
        return path


def read_secret(path: Path) -> bytes:
    secret = path.read_bytes().strip()
    if len(secret) < 16:
        raise ValueError(f"{path} holds {len(secret)} bytes; a secret has at least 16 (try: openssl rand -hex 32)")
    return secret


def read_store(value: Any) -> str:
    """Where a store is. Whether it answers is found out when the node runs, and never keeps it from running."""
    if value == "":
        return ""
    if not isinstance(value, str):
        raise ValueError("a directory or s3://bucket/prefix expected")
    try:
        check_store_url(value)
    except BadStoreUrl as error:
        raise ValueError(str(error)) from None
    return value


def read_blobs(value: Any) -> str:
    if value not in ("auto", "store", "log"):
        raise ValueError(f"{value!r:.80} is neither store, nor log, nor auto")
    return str(value)


def read_traces(value: Any) -> str:
    url = read_url(value)
    if url and (find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter") is None):
        raise ValueError("OpenTelemetry is not installed: pip install 'holdfast[otel]'")
    return url


def read_auth(value: Any) -> str:
    if value not in ("tokens", "off"):
        raise ValueError(f"{value!r:.80} is neither tokens nor off")
    return str(value)


def read_switch(value: Any) -> str:
    if value not in ("on", "off"):
        raise ValueError(f"{value!r:.80} is neither on nor off")
    return str(value)


_SETTINGS: Final[dict[str, Callable[[Any], Any]]] = {
    "node": read_name,
    "cluster": read_cluster_name,
    "data": read_path,
    "partitions": read_count(1, 4096),
    "ingress": read_host_port,
    "admin": read_host_port,
    "peer": read_host_port,
    "health": read_host_port,
    "advertise": read_host_port,
    "peers": read_peers,
    "founders": read_names,
    "restored": read_restored,
    "replication": read_count(1, 7),
    "zone": read_zone,
    "public_ingress_url": read_url,
    "public_admin_url": read_url,
    "secret_file": read_path,
    "auth": read_auth,
    "admin_token_file": read_file,
    "deployment_addresses": read_addresses,
    "log_format": read_log_format,
    "log_level": read_log_level,
    "webhook_addresses": read_addresses,
    "traces": read_traces,
    "traces_ratio": read_ratio,
    "session_lifetime": read_seconds(60, 30 * 86400),
    "allowed_hosts": read_hosts,
    "redact_headers": read_header_names,
    "core_dumps": read_switch,
    "cors_origins": read_origins,
    "tls_cert": read_file,
    "tls_key": read_file,
    "tls_ca": read_file,
    "ingress_tls_cert": read_file,
    "ingress_tls_key": read_file,
    "admin_tls_cert": read_file,
    "admin_tls_key": read_file,
    "admin_tls_client_ca": read_file,
    "body_bytes_max": read_bytes(1024, BODY_BYTES_MAX),
    "blob_threshold_bytes": read_bytes(4 * 1024, MIB),
    "requests_max": read_count(1, 1_000_000),
    "request_bytes_max": read_bytes(MIB, 64 * 1024 * MIB),
    "connections_max": read_count(1, 1_000_000),
    "connections_per_address_max": read_count(8, 1_000_000),
    "paused_answer_after": read_seconds(0, 366 * 86400),
    "attempts_max": read_count(1, 1_000_000),
    "log_bytes_max": read_bytes(64 * MIB, 1024 * 1024 * MIB),
    "state_bytes_max": read_bytes(16 * MIB, 1024 * 1024 * MIB),
    "call_depth_max": read_count(1, 10_000),
    "journal_steps_max": read_count(10, 10_000_000),
    "journal_bytes_max": read_bytes(MIB, 1024 * MIB),
    "journal_blob_bytes_max": read_bytes(MIB, 1024 * 1024 * MIB),
    "completed_max": read_count(0, 1_000_000_000),
    "completed_bytes_max": read_bytes(0, 1024 * 1024 * MIB),
    "free_bytes_min": read_bytes(0, 1024 * 1024 * MIB),
    "snapshots": read_store,
    "blobs": read_blobs,
    "snapshot_entries": read_count(1, 1_000_000_000),
    "snapshot_bytes": read_bytes(64 * 1024, 1024 * 1024 * MIB),
    "snapshot_age": read_seconds(1, 366 * 86400),
    "snapshot_interval": read_seconds(0, 86400),
    "snapshot_keep": read_count(1, 1000),
    "snapshot_rate_bytes": read_bytes(64 * 1024, 1024 * 1024 * MIB),
    "log_tail": read_count(0, 1_000_000_000),
}
#: Variables with the same prefix that are not settings of a node: they tell the command line where to find one.
_OTHER_VARIABLES: Final = frozenset(
    {
        "HOLDFAST_ADMIN_URL",
        "HOLDFAST_IDENTITY_AUDIENCE",
        "HOLDFAST_IDENTITY_KEYS",
        "HOLDFAST_INGRESS_URL",
        "HOLDFAST_PROFILE",
        "HOLDFAST_PROFILES",
        "HOLDFAST_TOKEN",
        "HOLDFAST_TOKEN_FILE",
        "HOLDFAST_CA_FILE",
        "HOLDFAST_CLIENT_CERT_FILE",
        "HOLDFAST_CLIENT_KEY_FILE",
    }
)
#: What Kubernetes puts into the environment of every pod for a Service whose name begins with "holdfast".
_KUBERNETES: Final = re.compile(
    r"HOLDFAST_(?:[A-Z0-9_]+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_[A-Z0-9_]+)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)?)"
)
assert {each.name for each in fields(Config)} == {*_SETTINGS, "secret"}, "every setting is read"
assert not any(_KUBERNETES.fullmatch(f"HOLDFAST_{name.upper()}") for name in _SETTINGS), "none is taken for another's"
