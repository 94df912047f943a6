"""Object storage outside the node's own disk: one interface, implemented by a directory and by S3.

A store holds whole objects under names. A name identifies its content (`format.name_of`,
`statemachine.blobs.object_name`), so writing a name again writes the same bytes. So nothing here needs conditional
writes, locks or versions, which some S3 servers lack and others silently ignore. The caller checks what a store
returns: snapshots and large values carry their sha256.

Calls block and belong in a thread (`work.in_thread`). They are safe to make from many threads at once.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from holdfast.snapshots.errors import BadStoreUrl, S3Missing, StoreFailed

if TYPE_CHECKING:
    from holdfast.snapshots.work import Work

NAME_BYTES_MAX: Final = 512
_SEGMENT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class Stat(NamedTuple):
    name: str
    size: int
    modified_ms: int
    """By the store's clock."""


class Store(Protocol):
    @property
    def url(self) -> str:
        """Names the store in errors and logs, without secrets."""

    def put(self, source: Path, name: str, work: Work | None = None) -> None:
        """Upload a file. On return the object is complete and durable; it is never visible in part."""

    def put_bytes(self, data: bytes, name: str) -> None: ...

    def get(self, name: str, to: Path, work: Work | None = None) -> None:
        """Download to `to`, resuming after the bytes it already holds. Fsynced on return. After an error, `to` keeps
        what arrived.
        """

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """Part of an object; shorter than `length` if the object ends earlier."""

    def stat(self, name: str) -> Stat: ...

    def list(self, prefix: str = "") -> list[Stat]:
        """Sorted by name. May be stale: it may lack new objects and contain deleted ones."""

    def delete(self, name: str) -> None:
        """Delete an object. Does nothing if it does not exist."""

    def check(self) -> None:
        """Check that the store is usable: write, read, list and delete an object."""


def probe(store: Store, token: str | None = None) -> None:
    """Test a store before a node relies on it. The object's name is random, so that two nodes do not collide."""
    name = f"probe/{token or secrets.token_hex(8)}"
    data = secrets.token_bytes(64)
    store.put_bytes(data, name)
    try:
        if store.read(name) != data:
            raise StoreFailed(store.url, "a test object read back differs from what was written")
        store.list("probe/")
    finally:
        store.delete(name)


def check_name(name: str) -> str:
    """We choose all names, so an invalid one is a bug or an attack through foreign data. Refuse both."""
    if len(name) > NAME_BYTES_MAX or not all(_SEGMENT.fullmatch(segment) for segment in name.split("/")):
        raise ValueError(f"{name!r} is not a valid object name")
    return name


def check_prefix(prefix: str) -> str:
    """A prefix is empty, or segments each followed by a slash, optionally followed by the beginning of one more
    segment.
    """
    head, _, tail = prefix.rpartition("/")
    if head:
        check_name(head)
    if tail and not _SEGMENT.fullmatch(tail):
        raise ValueError(f"{prefix!r} is not a valid prefix")
    return prefix


def check_store_url(url: str) -> Path | S3Place:
    """Parse a store URL without opening it. Raises BadStoreUrl if it is invalid or unsupported."""
    refuse_credentials(url)
    scheme, separator, _ = url.partition("://")
    if not separator:
        if not url:
            raise BadStoreUrl(url, "the URL is empty")
        return Path(url)
    if scheme == "s3":
        place = parse_s3_url(url)
        if find_spec("boto3") is None:  # Checked here, so that a node fails at start, not at its first snapshot.
            raise S3Missing(url)
        return place
    if scheme != "file":
        raise BadStoreUrl(url, f"unknown kind of store {scheme!r}")
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query:
        raise BadStoreUrl(url, "a file URL must have three slashes and an absolute path")
    return Path(unquote(parts.path))


@dataclass(frozen=True)
class S3Place:
    """Where a bucket is, and how to access it. boto3 finds the credentials: environment, files, role."""

    bucket: str
    prefix: str = ""
    """Empty, or ends with a slash."""
    endpoint_url: str | None = None
    region: str | None = None
    style: str = "auto"
    """path: host/bucket/name; virtual: bucket.host/name; auto: path for a given endpoint, else virtual."""
    profile: str | None = None
    attempts: int = 6
    """Attempts per request, with exponential backoff and jitter between them."""
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 30.0
    part_bytes: int = 16 << 20

    def hasty(self) -> S3Place:
        """The same place with shorter timeouts and fewer attempts."""
        return replace(
            self,
            attempts=min(self.attempts, 2),
            connect_timeout_s=min(self.connect_timeout_s, 3.0),
            read_timeout_s=min(self.read_timeout_s, 10.0),
        )


_TEXTS: Final = ("endpoint_url", "region", "style", "profile")
_NUMBERS: Final = ("attempts", "connect_timeout_s", "read_timeout_s", "part_bytes")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_CREDENTIALS: Final = frozenset(
    {"access_key", "access_key_id", "aws_access_key_id", "secret_key", "secret_access_key", "aws_secret_access_key",
     "session_token", "aws_session_token", "password", "token"}
)  # fmt: skip
_NO_CREDENTIALS: Final = (
    "credentials do not belong in a URL, which ends up in logs: give them as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "in ~/.aws/credentials (option profile=), or as a role of the machine"
)
S3_PART_BYTES_MIN: Final = 5 << 20


def refuse_credentials(url: str) -> None:
    """Before anything else is said about a URL, because other errors repeat it."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in authority:
        raise BadStoreUrl(f"{scheme}://...@{authority.rpartition('@')[2]}", _NO_CREDENTIALS)
    place, _, query = url.partition("?")
    for name, value in parse_qsl(query, keep_blank_values=True):
        inner = re.split(r"[/?#]", value.partition("://")[2], maxsplit=1)[0]
        if name.lower() in _CREDENTIALS or "@" in inner:
            raise BadStoreUrl(f"{place}?{name}=...", _NO_CREDENTIALS)


def parse_s3_url(url: str) -> S3Place:
    refuse_credentials(url)
    parts = urlsplit(url)
    if not _BUCKET.fullmatch(parts.netloc):
        raise BadStoreUrl(url, f"{parts.netloc!r} is not a valid bucket name")
    place = S3Place(parts.netloc)
    prefix = unquote(parts.path).strip("/")
    if prefix:
        try:
            place = replace(place, prefix=check_name(prefix) + "/")
        except ValueError:
            raise BadStoreUrl(
                url, f"{prefix!r} is not a valid prefix: use letters, digits, '.', '-', '_' and '/'"
            ) from None
    try:
        options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise BadStoreUrl(url, "the query must have the form name=value&name=value") from None
    for name, value in options:
        place = _set_option(url, place, name, value)
    return place


def _replaced(place: S3Place, name: str, value: Any) -> S3Place:
    return replace(place, **{name: value})


def _set_option(url: str, place: S3Place, name: str, value: str) -> S3Place:
    if name in _NUMBERS:
        try:
            number = float(value) if name.endswith("_s") else int(value)
        except ValueError:
            number = 0
        least = S3_PART_BYTES_MIN if name == "part_bytes" else 0
        if number <= 0 or number < least:
            raise BadStoreUrl(url, f"{name} must be a number above {least}, not {value!r}")
        return _replaced(place, name, number)
    if name not in _TEXTS:
        raise BadStoreUrl(url, f"unknown option {name!r}; the options are {', '.join((*_TEXTS, *_NUMBERS))}")
    if name == "style" and value not in ("path", "virtual", "auto"):
        raise BadStoreUrl(url, f"style must be path, virtual or auto, not {value!r}")
    if name == "endpoint_url" and urlsplit(value).scheme not in ("http", "https"):
        raise BadStoreUrl(url, f"endpoint_url must begin with https:// or http://, not {value!r}")
    return _replaced(place, name, value or None)
