"""Tags: short texts under names, by which people find an invocation.

They travel in a header, so that they need nothing of a handler protocol: the node that accepts an invocation reads them from
it, and its handler has them among its headers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote

#: `tenant=acme,order=17`, values percent-encoded as UTF-8.
TAGS_HEADER: Final = "x-holdfast-tags"
TAGS_MAX: Final = 16  # of one invocation,
TAGS_BYTES_MAX: Final = 2048  # names and values together; every step rewrites them,
TAG_NAME_BYTES_MAX: Final = 64
TAG_VALUE_BYTES_MAX: Final = 256
_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]+")
_UNSAFE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class BadTags(ValueError):
    """Tags that no invocation may have. The text says why."""


def check_tag(name: str, value: str) -> None:
    """Raises BadTags."""
    if type(name) is not str or type(value) is not str:
        raise BadTags(f"the name and the value of a tag must be texts, not {name!r:.60} and {value!r:.60}")
    if _NAME.fullmatch(name) is None or len(name) > TAG_NAME_BYTES_MAX:
        raise BadTags(
            f"the name of a tag must have 1 to {TAG_NAME_BYTES_MAX} letters, digits or characters of _.:/- and not be "
            f"{name!r:.80}"
        )
    if not 0 < _size(value) <= TAG_VALUE_BYTES_MAX or _UNSAFE.search(value) is not None:
        raise BadTags(
            f"the value of tag {name!r} must have 1 to {TAG_VALUE_BYTES_MAX} bytes of UTF-8 without control characters"
        )


def check_tags(tags: Mapping[str, str]) -> None:
    """Raises BadTags."""
    if not isinstance(tags, Mapping):
        raise BadTags(f"tags must be a dict of texts, not {type(tags).__name__}")
    for name, value in tags.items():
        check_tag(name, value)
    if len(tags) > TAGS_MAX:
        raise BadTags(f"an invocation must have at most {TAGS_MAX} tags, not {len(tags)}")
    size = sum(len(name) + _size(value) for name, value in tags.items())
    if size > TAGS_BYTES_MAX:
        raise BadTags(f"the tags of an invocation must have at most {TAGS_BYTES_MAX} bytes together, not {size}")


def _size(text: str) -> int:
    """In bytes; 0 for text that cannot be encoded."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0


def format_tags(tags: Mapping[str, str]) -> str:
    """The content of the header. Raises BadTags."""
    check_tags(tags)
    return ",".join(f"{name}={quote(value, safe='/:@')}" for name, value in tags.items())


def parse_tags(text: str) -> dict[str, str]:
    """The tags in the header. Raises BadTags."""
    tags: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise BadTags(f"{TAGS_HEADER} must be as in tenant=acme,order=17; {part.strip()!r:.60} has no =")
        if name in tags:
            raise BadTags(f"{TAGS_HEADER} has two tags of the name {name!r:.80}")
        try:
            tags[name] = unquote(value, errors="strict")
        except UnicodeDecodeError:
            raise BadTags(f"the value of tag {name!r:.80} must be percent-encoded UTF-8") from None
    check_tags(tags)
    return tags


def with_tags(headers: Mapping[str, str] | None, tags: Mapping[str, str] | None) -> dict[str, str]:
    """Headers with these tags in place of those that they had. Raises BadTags."""
    given = {**(headers or {})}
    if tags:
        given = {name: value for name, value in given.items() if name.lower() != TAGS_HEADER}
        given[TAGS_HEADER] = format_tags(tags)
    return given


def tags_in(headers: Mapping[str, str]) -> dict[str, str]:
    """The tags in these headers, whatever the case of their names. Raises BadTags."""
    for name, value in headers.items():
        if name.lower() == TAGS_HEADER:
            return parse_tags(value)
    return {}
