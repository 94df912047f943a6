"""HTTP sessions to endpoints: they connect to allowed addresses only, and never follow a redirect.

aiohttp asks for a socket once for each address that it is about to connect to, with that very address: after names were
resolved, for addresses written in a URI, and for each one of several. The check is made there. Nothing can change between the
check and its use, whatever a name resolves to a moment later.
"""

from __future__ import annotations

import errno
import logging
import socket
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from holdfast.cluster.addresses import Addresses, AddressRefused, parse_ip

logger = logging.getLogger(__name__)

HINT: Final = "register an address that the setting deployment_addresses of the nodes allows (docs/security.md)"
_Address = tuple[int, int, int, str, tuple[Any, ...]]


class Dialing:
    """The sessions of one purpose: two, because hosts that are allowed by name may be at any address."""

    def __init__(self, addresses: Addresses, **options: Any) -> None:
        self._addresses = addresses
        self._options = options
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    def session(self, uri: str) -> aiohttp.ClientSession:
        """For requests to this URI alone. Raises AddressRefused or ValueError."""
        parts = urlsplit(uri)
        host, port = parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
        named = self._addresses.allows_name(host, port)
        if not named and self._addresses.entries and parse_ip(host) is None:
            self._check_name(host)
        if named not in self._sessions:
            self._sessions[named] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, ttl_dns_cache=10, socket_factory=partial(_open_socket, self._addresses, named)
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                trace_configs=[_no_redirects()],
                **self._options,
            )
        return self._sessions[named]

    def _check_name(self, host: str) -> None:
        """Where no network is allowed, a name that is not allowed is not even resolved."""
        if all(entry.network is None for entry in self._addresses.entries):
            raise AddressRefused(errno.EACCES, "its name is not among the allowed ones")

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()


def refusal(error: BaseException) -> AddressRefused | None:
    """The refusal of this node that caused the error, or None."""
    cause: BaseException | None = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return cause if isinstance(cause, AddressRefused) else None


def explain(error: BaseException) -> str:
    """An error of aiohttp or of the system as a sentence."""
    refused = refusal(error)
    if refused is not None:
        return f"deployment_addresses does not allow it: {refused.strerror}"
    return str(error) or type(error).__name__


def _open_socket(addresses: Addresses, named: bool, address: _Address) -> socket.socket:
    family, kind, number, _, place = address
    host, port = place[:2]
    addresses.check(host, port, named=named)
    return socket.socket(family, kind, number)


def _no_redirects() -> aiohttp.TraceConfig:
    """Work goes to the registered address and nowhere else: the server there must not redirect it to a third party,
    or to an address that only nodes can reach. `ws_connect` has no option for that."""

    async def refuse(_: aiohttp.ClientSession, __: object, found: aiohttp.TraceRequestRedirectParams) -> None:
        where = found.response.headers.get("Location", "")
        raise aiohttp.ClientError(
            f"{found.url} redirects to {where:.200}, and redirects are not followed: register the address itself"
        )

    tracing = aiohttp.TraceConfig()
    tracing.on_request_redirect.append(refuse)
    return tracing
