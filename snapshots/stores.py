"""Where files are kept beside the node's own disk: one interface, a directory and S3 behind it.

A store holds whole objects under names, and each name is written once: whoever writes a name again writes the same bytes,
because names carry what makes the content unique (`format.name_of`, `statemachine.blobs.object_name`). So nothing here
needs conditional writes, locks or versions, which some S3 servers lack and others silently ignore. What a store returns is
checked by those who know what it must be: snapshots and large values carry their sha256.

The calls block; they belong in a thread (`work.in_thread`). They may be made from many threads at once.
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
        """The object is there whole and durable when this returns, and never there in part."""

    def put_bytes(self, data: bytes, name: str) -> None: ...

    def get(self, name: str, to: Path, work: Work | None = None) -> None:
        """Go on behind what `to` already holds; it is fsynced when this returns. After an error it holds what came."""

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """Part of an object; less than `length` if the object ends before."""

    def stat(self, name: str) -> Stat: ...

    def list(self, prefix: str = "") -> list[Stat]:
        """By name. May be stale: lack what is new, hold what is gone."""

    def delete(self, name: str) -> None:
        """Fine if there is none."""

    def check(self) -> None:
        """Whether this store can be used: writes, reads, lists and deletes an object."""


def probe(store: Store) -> None:
    """What a node does before it relies on a store. The probe's name is new, so that two nodes do not meet."""
    name = f"probe/{secrets.token_hex(8)}"
    data = secrets.token_bytes(64)
    store.put_bytes(data, name)
    try:
        if store.read(name) != data:
            raise StoreFailed(store.url, "what was written is not what is read")
        store.list("probe/")
    finally:
        store.delete(name)


def check_name(name: str) -> str:
    """Names are made by us, so a bad one is a bug, or an attack through data of others: both end here."""
    if len(name) > NAME_BYTES_MAX or not all(_SEGMENT.fullmatch(segment) for segment in name.split("/")):
        raise ValueError(f"{name!r} is not a name of an object")
    return name


def check_prefix(prefix: str) -> str:
    """Empty, or segments with a slash behind each, or such with the beginning of a last one."""
    head, _, tail = prefix.rpartition("/")
    if head:
        check_name(head)
    if tail and not _SEGMENT.fullmatch(tail):
        raise ValueError(f"{prefix!r} is not a prefix of names")
    return prefix


def check_store_url(url: str) -> Path | S3Place:
    """What the text means; BadStoreUrl if it means nothing or cannot be used. Nothing is opened."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        if not url:
            raise BadStoreUrl(url, "it is empty")
        return Path(url)
    if scheme == "s3":
        place = parse_s3_url(url)
        if find_spec("boto3") is None:  # Here, so that a node says so when it starts, not at its first snapshot.
            raise S3Missing(url)
        return place
    if scheme != "file":
        raise BadStoreUrl(url, f"there is no kind of store called {scheme!r}")
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query:
        raise BadStoreUrl(url, "a file URL has three slashes and an absolute path")
    return Path(unquote(parts.path))


@dataclass(frozen=True)
class S3Place:
    """Where a bucket is, and how to speak to it. Credentials come from where boto3 finds them: environment, files, role."""

    bucket: str
    prefix: str = ""
    """Empty, or with a slash at its end."""
    endpoint_url: str | None = None
    region: str | None = None
    style: str = "auto"
    """path: host/bucket/name; virtual: bucket.host/name; auto: path for a given endpoint, else virtual."""
    profile: str | None = None
    attempts: int = 6
    """Of each request, with exponential backoff and jitter between them."""
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 30.0
    part_bytes: int = 16 << 20

    def hasty(self) -> S3Place:
        """The same place with less patience."""
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


def parse_s3_url(url: str) -> S3Place:
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise BadStoreUrl(f"s3://...@{parts.netloc.rpartition('@')[2]}", _NO_CREDENTIALS)
    if not _BUCKET.fullmatch(parts.netloc):
        raise BadStoreUrl(url, f"{parts.netloc!r} is not a name of a bucket")
    place = S3Place(parts.netloc)
    prefix = unquote(parts.path).strip("/")
    if prefix:
        try:
            place = replace(place, prefix=check_name(prefix) + "/")
        except ValueError:
            raise BadStoreUrl(url, f"{prefix!r} is not a prefix: letters, digits, '.', '-', '_' and '/'") from None
    try:
        options = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise BadStoreUrl(url, "what follows the question mark is not name=value&name=value") from None
    for name, value in options:
        if name.lower() in _CREDENTIALS or "@" in urlsplit(value).netloc:
            raise BadStoreUrl(f"s3://{parts.netloc}{parts.path}?{name}=...", _NO_CREDENTIALS)
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
            raise BadStoreUrl(url, f"{name} is a number above {least}, not {value!r}")
        return _replaced(place, name, number)
    if name not in _TEXTS:
        raise BadStoreUrl(url, f"there is no option {name!r}; there are {', '.join((*_TEXTS, *_NUMBERS))}")
    if name == "style" and value not in ("path", "virtual", "auto"):
        raise BadStoreUrl(url, f"style is path, virtual or auto, not {value!r}")
    if name == "endpoint_url" and urlsplit(value).scheme not in ("http", "https"):
        raise BadStoreUrl(url, f"endpoint_url begins with https:// or http://, unlike {value!r}")
    return _replaced(place, name, value or None)
