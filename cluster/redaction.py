"""Which headers of a client's request are secrets: they are neither journaled nor passed on to handlers."""

from __future__ import annotations

import re
from typing import Any, Final

#: Credentials of the client, for this node or for others. The setting `redact_headers` replaces this list.
REDACTED: Final = (
    "api-key",
    "authorization",
    "cookie",
    "proxy-authorization",
    "set-cookie",
    "x-access-token",
    "x-amz-security-token",
    "x-api-key",
    "x-auth-token",
    "x-csrf-token",
    "x-goog-api-key",
    "x-xsrf-token",
)
NAMES_MAX: Final = 256
_NAME: Final = re.compile(r"[a-z0-9!#$%&'+.^_`|~\-]{0,128}\*?")


def read_header_names(value: Any) -> tuple[str, ...]:
    """A list of names of headers, or as text `x-api-key,x-secret-*`. A name that ends in * is a prefix."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("a list of names of headers expected, as in x-api-key,x-secret-*")
    found = tuple(dict.fromkeys(name.strip().lower() for name in names if name.strip()))
    for name in found:
        if _NAME.fullmatch(name) is None:
            raise ValueError(
                f"{name!r:.80} is not the name of a header, as in x-api-key, or the beginning of some, as in x-secret-*"
            )
    if len(found) > NAMES_MAX:
        raise ValueError(f"{len(found)} names are too many: at most {NAMES_MAX}")
    return found
