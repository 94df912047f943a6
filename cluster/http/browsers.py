"""Which requests of web browsers a listener accepts, and its headers for them.

A web page can make its visitor's browser send requests anywhere, including to a node on the same machine or network.
Three headers reveal this, and neither scripts nor forms can change them:

- `Host` is the name that the browser resolved. A page at evil.example whose name resolves to 127.0.0.1 (DNS rebinding)
has that name there. An IP address cannot be rebound, so a listener on all interfaces accepts any address.
- `Origin` is the origin of the page. Every browser sends it with each request that is not a plain GET or HEAD.
- `Sec-Fetch-Site` is the relation of the page to us, even with a plain GET, if the address is loopback or TLS.

A request that acts and has neither `Origin` nor `Sec-Fetch-Site` does not come from a page: so `curl -d` works although
it sends the content type of a form. As a second line of defence, browsers must use a content type that no form can
have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from holdfast.cluster.config import Config
from holdfast.cluster.errors import BadRequest, Forbidden, UnsupportedEncoding
from holdfast.cluster.origins import (
    ANY_HOST,
    ANY_ORIGIN,
    ANYWHERE,
    is_address,
    is_loopback,
    normal_origin,
    split_host,
)

INGRESS: Final = "ingress"
ADMIN: Final = "admin"
SEEN_MAX: Final = 1024  # Accepted hosts: clients use few names.
REQUEST_HEADERS_LENGTH_MAX: Final = 2048
PREFLIGHT_S: Final = 600  # How long browsers may cache the answer to a preflight.
SAFE: Final = frozenset({"GET", "HEAD"})
#: The content types of forms, and of scripts without a preflight.
_FORM_TYPES: Final = frozenset({"application/x-www-form-urlencoded", "multipart/form-data", "text/plain"})
_HEADER_NAMES: Final = re.compile(
    r"[a-z0-9!#$%&'*+.^_`|~\-]+(?: *, *[a-z0-9!#$%&'*+.^_`|~\-]+)*", re.ASCII | re.IGNORECASE
)
_EXPOSED: Final = "x-holdfast-id, x-holdfast-status, Retry-After"

#: Sent with every answer of the ingress. Results of handlers are data: a browser must not execute or embed them.
INGRESS_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
#: Sent with every answer of the admin API. Its pages may load only content of this node.
ADMIN_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Browsers:
    """The rules of one listener. Every request passes `check`, so a request that is not from a browser costs only a few
    lookups."""

    def __init__(self, config: Config, door: str) -> None:
        self.headers = INGRESS_HEADERS if door == INGRESS else ADMIN_HEADERS
        self._door = door
        place = config.ingress if door == INGRESS else config.admin
        urls = [url for url in (config.public_ingress_url, config.public_admin_url) if url]
        hosts = [place.host, (config.advertise or config.peer).host, *(urlsplit(url).hostname or "" for url in urls)]
        self._names = {"localhost", *config.allowed_hosts, *(host.lower() for host in hosts if host not in ANYWHERE)}
        self._suffixes = tuple(name[1:] for name in config.allowed_hosts if name.startswith("*."))
        self._any_address = place.host in ANYWHERE
        self._any_host = ANY_HOST in config.allowed_hosts
        self._own = {normal_origin("{0.scheme}://{0.netloc}".format(urlsplit(url))) for url in urls}
        self._shared = frozenset(config.cors_origins) if door == INGRESS else frozenset()
        self.shares = bool(self._shared)  # Whether pages of other origins may read answers.
        has_tls = (config.ingress_tls_cert if door == INGRESS else config.admin_tls_cert) is not None
        self._schemes = ("https",) if has_tls else ("http", "https")  # Without TLS, a proxy may speak it for us.
        self._seen: dict[str, None] = {}

    def check(self, method: str, target: str, headers: Mapping[str, str]) -> None:
        """Raises Forbidden for a request that may come from a page of another origin, and UnsupportedEncoding for the
        body of a form."""
        host = headers.get("Host")
        if host is not None and host not in self._seen:  # Every browser sends one.
            self._check_host(host)
        origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site")
        if origin is not None or site is not None:
            self._check_page(method, target, headers)
        kind = headers.get("Content-Type")
        if kind != "application/json" and method not in SAFE and _may_be_form(kind, headers):
            is_page = origin is not None or site is not None or headers.get("User-Agent", "").startswith("Mozilla/")
            if is_page:
                raise UnsupportedEncoding(
                    f"a browser may not send a body as {kind or 'no particular type'!r:.80}, because any form could",
                    "send it with Content-Type: application/json",
                )

    def _check_host(self, host: str) -> None:
        name = split_host(host)
        if name is None:
            raise BadRequest(f"the header Host is not a host: {host!r:.80}")
        if not self._is_known(name):
            raise Forbidden(
                f"this node is not known as {name!r:.80}",
                f'add the name to its setting allowed_hosts, as in allowed_hosts = ["{name:.80}"], if it is yours',
            )
        if len(self._seen) >= SEEN_MAX:
            self._seen.clear()
        self._seen[host] = None

    def _is_known(self, name: str) -> bool:
        if name in self._names or self._any_host:
            return True
        if is_address(name):
            return self._any_address or is_loopback(name)
        return name.endswith(self._suffixes)

    def _check_page(self, method: str, target: str, headers: Mapping[str, str]) -> None:
        origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site")
        if origin is not None:
            if self._shares_with(origin):
                return
            if not self._is_own(origin, headers.get("Host", "")):
                raise self._refusal(origin)
        if site is None or site in ("same-origin", "none"):
            return
        if self._door == ADMIN and target.partition("?")[0] == "/" and method in SAFE and _is_followed_link(headers):
            return  # Only the page: it shows nothing without signing in, and only its reader sees it.
        raise self._refusal("another site")

    def _refusal(self, origin: str) -> Forbidden:
        if self._door == INGRESS:
            return Forbidden(
                f"web pages of {origin!r:.80} may not use this node",
                "add the origin of the page to the setting cors_origins, as in https://shop.example, if it is yours",
            )
        return Forbidden(
            f"web pages of {origin!r:.80} may not use the admin API", "open the node's own page, or use a program"
        )

    def _is_own(self, origin: str, host: str) -> bool:
        own = [f"{scheme}://{host}" for scheme in self._schemes]
        if origin in own:
            return True
        normal = normal_origin(origin)
        return normal is not None and (normal in self._own or normal in map(normal_origin, own))

    def is_same_origin(self, headers: Mapping[str, str]) -> bool:
        """Whether the browser declares that a page of ours sent the request."""
        origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site")
        if origin is not None and not self._is_own(origin, headers.get("Host", "")):
            return False
        return site == "same-origin" if site is not None else origin is not None

    # -- pages that may use the ingress ------------------------------------------------------------------------------

    def _shares_with(self, origin: str) -> bool:
        return bool(self._shared) and origin != "null" and (origin in self._shared or ANY_ORIGIN in self._shared)

    def preflight(self, headers: Mapping[str, str]) -> dict[str, str] | None:
        """The answer to a browser that asks whether a page may send a request (CORS). None: it is not such a request.

        Credentials are never allowed: the ingress uses no cookies, and pages send a token as a header.
        """
        if "Access-Control-Request-Method" not in headers or not self._shares_with(headers.get("Origin", "null")):
            return None
        answer = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": str(PREFLIGHT_S)}
        wanted = headers.get("Access-Control-Request-Headers", "")
        if wanted and len(wanted) <= REQUEST_HEADERS_LENGTH_MAX and _HEADER_NAMES.fullmatch(wanted):
            answer["Access-Control-Allow-Headers"] = wanted
        if headers.get("Access-Control-Request-Private-Network") == "true":
            answer["Access-Control-Allow-Private-Network"] = "true"
        return answer

    def shared(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Headers that allow a page to read an answer, if it may."""
        origin = headers.get("Origin")
        if origin is None or not self._shares_with(origin):
            return {"Vary": "Origin"}
        return {
            "Vary": "Origin",
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": _EXPOSED,
        }


def check_no_form(headers: Mapping[str, str]) -> None:
    """Raises UnsupportedEncoding if JSON is expected and the content type is one that a form can send."""
    kind = headers.get("Content-Type", "")
    if _is_form(kind):
        raise UnsupportedEncoding(
            f"the body must be JSON, not {kind!r:.80}",
            "send it with Content-Type: application/json (curl --json does)",
        )


def _is_followed_link(headers: Mapping[str, str]) -> bool:
    """Whether a whole tab is opened, in contrast to a page that loads or frames something."""
    return headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"


def _may_be_form(kind: str | None, headers: Mapping[str, str]) -> bool:
    if kind is not None:
        return _is_form(kind)
    return headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in headers


def _is_form(kind: str) -> bool:
    return kind.partition(";")[0].strip().lower() in _FORM_TYPES
