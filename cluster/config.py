"""How a node is told what to be: a file `node.toml`, and `HOLDFAST_*` variables that win over it.

Everything is checked here, once, before anything is opened, and an error names the setting, what was found and what is
expected. A setting nobody knows is an error too: a misspelt limit must not be a limit that does nothing.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from holdfast.cluster.durations import parse_duration_ms
from holdfast.snapshots.errors import BadStoreUrl
from holdfast.snapshots.stores import check_store_url

MIB: Final = 1024 * 1024
BODY_BYTES_MAX: Final = 32 * MIB
DEFAULT_PARTITIONS: Final = 8
DEV_PARTITIONS: Final = 4
CLUSTER_NAME_MAX: Final = 54
DEV_SECRET: Final = b"holdfast dev: one node, no peers"


class BadConfig(Exception):
    """A setting cannot be used. The text names it and says what would do."""


@dataclass(frozen=True)
class Endpoint:
    """Where something listens, or is reached."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class Config:
    """One node. Every bound that a request can meet is here."""

    node: str = "n1"
    cluster: str = "holdfast"
    data: Path = Path(".holdfast")
    partitions: int = DEFAULT_PARTITIONS  # Counts when the cluster is made; later the cluster's own number holds.

    ingress: Endpoint = Endpoint("127.0.0.1", 8080)
    admin: Endpoint = Endpoint("127.0.0.1", 9070)
    peer: Endpoint = Endpoint("127.0.0.1", 5122)
    advertise: Endpoint | None = None  # where the others reach `peer`, if not there: our own entry in peers
    peers: Mapping[str, Endpoint] = field(default_factory=dict)  # the others
    founders: tuple[str, ...] = ()  # who forms the cluster; none named: this node and its peers
    restored: str = ""  # what the cluster was made from, if from a backup: as `holdfast restore` said
    replication: int = 3  # replicas of each partition, if there are as many nodes
    zone: str = ""  # replicas of a partition are kept in different ones: a host, a rack
    public_ingress_url: str = ""  # what others are told of us, where they reach us by another address than ours
    public_admin_url: str = ""
    secret: bytes | None = field(default=None, repr=False)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None

    body_bytes_max: int = 4 * MIB
    blob_threshold_bytes: int = 256 * 1024  # a larger value is kept once, beside the journals that refer to it
    requests_max: int = 10_000  # in progress at the ingress, those that wait for an outcome included
    request_bytes_max: int = 256 * MIB  # of all bodies in progress
    connections_max: int = 20_000
    attempts_max: int = 1000  # running at a time, per deployment
    log_bytes_max: int = 16 * 1024 * MIB
    state_bytes_max: int = 16 * 1024 * MIB  # per partition
    # These become part of a partition's state, because all replicas must draw the same line: whoever leads it sees to that.
    # Give all nodes the same.
    journal_steps_max: int = 100_000  # per invocation; beyond, it is paused,
    journal_bytes_max: int = 64 * MIB
    journal_blob_bytes_max: int = 256 * MIB  # of large values, which are kept beside the journal
    completed_max: int = 1_000_000  # per partition; beyond, the oldest go before their retention is over,
    completed_bytes_max: int = 4 * 1024 * MIB
    free_bytes_min: int = 64 * MIB

    snapshots: str = (
        ""  # a store that all nodes share: s3://bucket/prefix?..., a mounted directory; none: each has its own
    )
    blobs: str = (
        "auto"  # where large values go: "store", that is the one above, or "log"; "auto": there if there is one
    )
    snapshot_entries: int = 100_000  # a partition cuts one after so many entries of its log,
    snapshot_bytes: int = 256 * MIB  # or so many bytes,
    snapshot_age: float = 3600.0  # or so many seconds, if anything happened,
    snapshot_interval: float = 30.0  # but not more often than this
    snapshot_keep: int = 2  # of each partition, on each node, and in the store
    snapshot_rate_bytes: int = 64 * MIB  # per second, that this node fetches
    log_tail: int = 10_000  # entries that stay in the log before a snapshot, for nodes that were away for a moment


def load(path: Path | None, environ: Mapping[str, str] | None = None) -> Config:
    """The file, if there is one, then the variables. Raises BadConfig."""
    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    if path is not None:
        for name, value in _read(path).items():
            values[name], where[name] = value, f"{path}: {name}"
    for variable, text in sorted((os.environ if environ is None else environ).items()):
        if variable.startswith("HOLDFAST_") and variable not in _OTHER_VARIABLES:
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
            settings["secret" if name == "secret_file" else name] = read(value)
        except (ValueError, OSError) as error:
            raise BadConfig(f"{place}: {error}") from None
    config = Config(**settings)
    # One list of peers may serve for all nodes: our own entry says where the others find us.
    others = {name: place for name, place in config.peers.items() if name != config.node}
    config = replace(config, peers=others, advertise=config.advertise or config.peers.get(config.node))
    _check_together(config)
    return config


def _check_together(config: Config) -> None:
    """What no setting can say alone."""
    files = {"tls_cert": config.tls_cert, "tls_key": config.tls_key, "tls_ca": config.tls_ca}
    missing = [name for name, file in files.items() if file is None]
    if 0 < len(missing) < len(files):
        raise BadConfig(f"{missing[0]}: TLS between nodes needs tls_cert, tls_key and tls_ca, all three")
    if config.peers and config.secret is None and missing:
        raise BadConfig(
            "secret: a cluster of several nodes needs one, the same on each: set secret_file, or tls_cert, tls_key, tls_ca"
        )
    if config.request_bytes_max < config.body_bytes_max:
        raise BadConfig(
            f"request_bytes_max: {_size(config.request_bytes_max)} for all bodies in progress are less than "
            f"{_size(config.body_bytes_max)} for one (body_bytes_max)"
        )
    if config.blobs == "store" and not config.snapshots:
        raise BadConfig(
            "blobs: large values cannot go to a store while there is none that all nodes share: set snapshots"
        )
    if config.node not in config.founders and config.founders and not config.peers:
        raise BadConfig(f"peers: {config.node} is not among the founders, so it needs the address of a node to join")


def describe(config: Config) -> dict[str, str]:
    """The effective settings as text, for an operator's eyes. A secret is only said to be there."""
    shown: dict[str, str] = {}
    for each in fields(Config):
        value = getattr(config, each.name)
        if each.name == "secret":
            shown["secret"] = "(not set)" if value is None else "(set)"
        elif isinstance(value, Mapping):
            shown[each.name] = ", ".join(f"{name}={place}" for name, place in sorted(value.items())) or "(none)"
        elif isinstance(value, tuple):
            shown[each.name] = ", ".join(value) or f"(this node and its peers: {', '.join(founders_of(config))})"
        elif each.name.endswith(("_bytes_max", "_bytes_min", "_bytes")):
            shown[each.name] = _size(value)
        else:
            shown[each.name] = "(not set)" if value is None or value == "" else str(value)
    return shown


def founders_of(config: Config) -> tuple[str, ...]:
    """Who forms the cluster, as far as the settings say: those named, or else everybody they know."""
    return tuple(sorted(set(config.founders or (config.node, *config.peers))))


def advise(config: Config) -> list[str]:
    """What is allowed and most likely not meant."""
    found = []
    founders = founders_of(config)
    absent = [name for name in founders if name != config.node and name not in config.peers]
    if absent:
        found.append(
            f"peers: has no address of {', '.join(absent)}, founders of the cluster; the cluster cannot form without them"
        )
    if len(founders) == 2:
        found.append("founders: two nodes stand still when either stops; use one, or three and more")
    elif len(founders) % 2 == 0:
        found.append(f"founders: {len(founders)} nodes bear no more losses than {len(founders) - 1} do")
    if config.peers and not config.founders:
        found.append(
            "founders: not set, so they are this node and its peers; name them before another node is added to peers"
        )
    if config.node not in founders:
        found.append(f"founders: {config.node} is not among them: it waits until it is added (holdfast cluster add)")
    if config.peers and (config.advertise or config.peer).host in ("127.0.0.1", "::1", "localhost"):
        elsewhere = [
            name for name, place in config.peers.items() if place.host not in ("127.0.0.1", "::1", "localhost")
        ]
        if elsewhere:
            found.append(f"peer: {', '.join(elsewhere)} cannot reach {config.advertise or config.peer}")
    return found


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
    return Path(value).expanduser()


def read_endpoint(value: Any) -> Endpoint:
    """`host:port`, `:port`, `[::1]:port` or a port alone; without a host it is 127.0.0.1."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str):
        host, _, port = text.rpartition(":")
        if port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535:
            bare = host.removeprefix("[").removesuffix("]")
            if (":" not in bare or host == f"[{bare}]") and not any(c.isspace() for c in bare):
                return Endpoint(bare or "127.0.0.1", int(port))
    raise ValueError(f"{value!r:.80} is not host:port, as in 127.0.0.1:8080")


def read_peers(value: Any) -> dict[str, Endpoint]:
    """A table name = "host:port", or as text `n2=host:port,n3=host:port`."""
    if isinstance(value, str):
        pairs = [item.partition("=") for item in value.split(",") if item.strip()]
        if any(not equals for _, equals, _ in pairs):
            raise ValueError("name=host:port, separated by commas, expected")
        value = {name.strip(): address.strip() for name, _, address in pairs}
    if not isinstance(value, dict):
        raise ValueError('a table of name = "host:port" expected')
    return {read_name(name): read_endpoint(address) for name, address in value.items()}


def read_names(value: Any) -> tuple[str, ...]:
    """A list of names, or as text `n1,n2,n3`."""
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",") if name.strip()]
    if not isinstance(value, list) or not value:
        raise ValueError("a list of names expected, as in n1,n2,n3")
    names = tuple(sorted(read_name(name) for name in value))
    if len(set(names)) != len(names):
        raise ValueError("a name stands there twice")
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
    parts = urlsplit(value) if isinstance(value, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{value!r:.80} is not a URL, as in http://10.0.0.1:8080")
    return str(value).rstrip("/")


def read_file(value: Any) -> Path:
    """A file that is there and can be read, found out before the node opens anything."""
    path = read_path(value)
    with path.open("rb"):
        return path


def read_secret_file(value: Any) -> bytes:
    path = read_path(value)
    secret = path.read_bytes().strip()
    if len(secret) < 16:
        raise ValueError(f"{path} holds {len(secret)} bytes; a secret has at least 16 (try: openssl rand -hex 32)")
    return secret


def read_count(low: int, high: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, str) and value.isascii() and value.isdigit():
            value = int(value[:20])
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{value!r:.80} is not a whole number from {low} to {high}")
        return value

    return read


def read_seconds(low: float, high: float) -> Callable[[Any], float]:
    """A number of seconds, or text with units: `1h`, `90s`."""

    def read(value: Any) -> float:
        seconds = value
        if isinstance(value, str):
            seconds = parse_duration_ms(value) / 1000
        if type(seconds) not in (int, float) or not low <= seconds <= high:
            raise ValueError(f"{value!r:.80} is not between {low:g} and {high:g} seconds")
        return float(seconds)

    return read


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


_UNITS: Final = {"": 1, "b": 1, "kib": 1024, "mib": MIB, "gib": 1024 * MIB, "tib": 1024 * 1024 * MIB}


def read_bytes(low: int, high: int) -> Callable[[Any], int]:
    """A number of bytes, or text with a unit: `4 MiB`."""

    def read(value: Any) -> int:
        size = value
        if isinstance(value, str):
            match = re.fullmatch(r"\s*([0-9]{1,18})\s*([A-Za-z]*)\s*", value)
            if match is None or match[2].lower() not in _UNITS:
                raise ValueError(f"{value!r:.80} is not a size, as in 4 MiB")
            size = int(match[1]) * _UNITS[match[2].lower()]
        if type(size) is not int or not low <= size <= high:
            raise ValueError(f"{value!r:.80} is not between {_size(low)} and {_size(high)}")
        return size

    return read


def _size(count: int) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNITS[unit.lower()] if unit != "KiB" else 1024
        if count >= factor and count % factor == 0:
            return f"{count // factor} {unit}"
    return f"{count} bytes"


_SETTINGS: Final[dict[str, Callable[[Any], Any]]] = {
    "node": read_name,
    "cluster": read_cluster_name,
    "data": read_path,
    "partitions": read_count(1, 4096),
    "ingress": read_endpoint,
    "admin": read_endpoint,
    "peer": read_endpoint,
    "advertise": read_endpoint,
    "peers": read_peers,
    "founders": read_names,
    "restored": read_restored,
    "replication": read_count(1, 7),
    "zone": read_zone,
    "public_ingress_url": read_url,
    "public_admin_url": read_url,
    "secret_file": read_secret_file,
    "tls_cert": read_file,
    "tls_key": read_file,
    "tls_ca": read_file,
    "body_bytes_max": read_bytes(1024, BODY_BYTES_MAX),
    "blob_threshold_bytes": read_bytes(4 * 1024, MIB),
    "requests_max": read_count(1, 1_000_000),
    "request_bytes_max": read_bytes(MIB, 64 * 1024 * MIB),
    "connections_max": read_count(1, 1_000_000),
    "attempts_max": read_count(1, 1_000_000),
    "log_bytes_max": read_bytes(64 * MIB, 1024 * 1024 * MIB),
    "state_bytes_max": read_bytes(16 * MIB, 1024 * 1024 * MIB),
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
#: Variables of the same prefix that are not a node's settings: where the command finds a node.
_OTHER_VARIABLES: Final = frozenset({"HOLDFAST_ADMIN_URL", "HOLDFAST_INGRESS_URL"})
assert {each.name for each in fields(Config)} == {*_SETTINGS} - {"secret_file"} | {"secret"}, "every setting is read"
