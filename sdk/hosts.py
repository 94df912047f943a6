"""Names in the header Host, against DNS rebinding.

The owner of evil.example can make that name resolve to 127.0.0.1, after a browser loaded a page from there. Then requests of
the page reach a server on the reader's machine, and the browser takes them for requests of the page to its own origin: no
header but Host tells them from others.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from typing import Final

HOST_REFUSED: Final = (
    "this endpoint listens on loopback only, and accepts no requests to another host: register it under the address it "
    "listens on, let a proxy send that address as Host, or give the endpoint identity_keys"
)
_NAME: Final = re.compile(r"(?P<name>\[[^\]]*\]|[^:\[\]]*)(?::[0-9]*)?\Z")


def is_loopback_host(host: str) -> bool:
    """Whether a name or an address can only mean this machine. Browsers never ask a name server about localhost."""
    host = host.strip("[]").rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_for_another_host(header: str | None, known: Collection[str] = ()) -> bool:
    """Whether a request at a loopback address names neither this machine nor a host in `known`. A request without the
    header is not from a browser."""
    if header is None:
        return False
    found = _NAME.match(header.strip())
    if found is None:
        return True
    name = found["name"].strip("[]").rstrip(".").lower()
    return not is_loopback_host(name) and name not in known


def is_from_browser(user_agent: str | None, language: str | None) -> bool:
    """Every browser sends both. A page can change their values, but not leave out the second. Nodes never send it."""
    return language is not None or (user_agent is not None and user_agent.startswith("Mozilla/"))
