"""Host names and origins in settings and in headers: how they are read, and which of them mean this machine.

Nothing here resolves a name. A name is only text: its owner decides what it resolves to.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any, Final

HOST_LENGTH_MAX: Final = 253
ANY_ORIGIN: Final = "*"
ANY_HOST: Final = "*"
#: A listener at one of these takes connections at every address of its machine.
ANYWHERE: Final = frozenset({"0.0.0.0", "::", ""})
_NAME: Final = re.compile(r"(?:\*\.)?[a-z0-9_](?:[a-z0-9_\-]*[a-z0-9_])?(?:\.[a-z0-9_](?:[a-z0-9_\-]*[a-z0-9_])?)*")
_ORIGIN: Final = re.compile(r"(https?)://(\[[0-9a-f:.]+\]|[a-z0-9_.\-]+)(?::([0-9]{1,5}))?")
_CREDENTIALS: Final = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.\-]*:)?(?://)?[^/?#]*@([^/?#]*)")
_DEFAULT_PORTS: Final = {"http": "80", "https": "443"}


#: What to do about the URI of a deployment.
NO_CREDENTIALS: Final = (
    "write it without them; handlers can verify the signature of the cluster instead: holdfast identity show"
)


def host_behind_credentials(url: str) -> str | None:
    """The host of a URL with a user or a password in it, which an error must not repeat. None: the URL has none."""
    match = _CREDENTIALS.match(url)
    return match[1] if match is not None else None


def is_address(host: str) -> bool:
    """Whether this is an IP address, and so nothing that anybody could resolve to another one."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def split_host(text: str) -> str | None:
    """The host of a Host header, in lower case and without its port. None if it is not one."""
    if len(text) > HOST_LENGTH_MAX + len(":65535"):
        return None
    if text[:1] == "[":
        host, bracket, port = text[1:].partition("]")
        if not bracket or not is_address(host) or (port and port[:1] != ":"):
            return None
        port = port[1:]
    else:
        host, _, port = text.partition(":")
    if port and not (port.isascii() and port.isdigit()):
        return None
    host = host.lower().removesuffix(".")
    return host if is_address(host) or (_NAME.fullmatch(host) and host[0] != "*") else None


def read_hosts(value: Any) -> tuple[str, ...]:
    """A list of host names, or as text `holdfast.example,*.internal`."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("a list of host names expected, as in holdfast.example,*.internal")
    found = []
    for name in names:
        host = name.strip().lower().removesuffix(".")
        if not host:
            continue
        if host != ANY_HOST and not is_address(host) and not _NAME.fullmatch(host):
            raise ValueError(
                f"{name.strip()!r:.80} is not a host name (without port), as in holdfast.example or *.internal"
            )
        found.append(host)
    return tuple(dict.fromkeys(found))


def read_origins(value: Any) -> tuple[str, ...]:
    """A list of origins, or as text `https://shop.example,https://admin.example:8443`."""
    origins = value.split(",") if isinstance(value, str) else value
    if not isinstance(origins, list) or not all(isinstance(each, str) for each in origins):
        raise ValueError("a list of origins expected, as in https://shop.example")
    found = []
    for each in origins:
        text = each.strip()
        if not text:
            continue
        origin = ANY_ORIGIN if text == ANY_ORIGIN else normal_origin(text.removesuffix("/"))
        if origin is None:
            raise ValueError(f"{text!r:.80} is not an origin, as in https://shop.example or http://localhost:3000")
        found.append(origin)
    return tuple(dict.fromkeys(found))


def normal_origin(text: str) -> str | None:
    """An origin as browsers write it: lower case, no default port. None if it is not one, which `null` is not either."""
    match = _ORIGIN.fullmatch(text.lower())
    if match is None or len(text) > HOST_LENGTH_MAX + 16:
        return None
    scheme, host, port = match.groups()
    return f"{scheme}://{host}" if port is None or port == _DEFAULT_PORTS[scheme] else f"{scheme}://{host}:{port}"
