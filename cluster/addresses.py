"""Where handlers may be: the addresses to which this node connects for discovery, streams and requests.

A client that may register a deployment chooses where the nodes send requests. So the setting `deployment_addresses`
restricts the addresses, and some are refused whether or not it is set: link-local ones, and the metadata services of clouds,
which hand out credentials to every process that can reach them. A name in a URI proves nothing, because its owner may change
what it resolves to. The check is therefore made on the address of each connection (see handlers/protocols/native/dialing.py).
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

Ip: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

PORT_MAX: Final = 65535
ENTRIES_MAX: Final = 1000
RESOLVE_S: Final = 5.0
#: Refused unless an entry names them, or a part of them. A larger network such as 0.0.0.0/0 does not.
GUARDED: Final[tuple[Network, ...]] = (
    ipaddress.ip_network("169.254.0.0/16"),  # Link-local, with the metadata services of most clouds (169.254.169.254).
    ipaddress.ip_network("fe80::/10"),  # Link-local.
    ipaddress.ip_network("fd00:ec2::/32"),  # AWS: metadata (fd00:ec2::254), credentials of pods (fd00:ec2::23).
    ipaddress.ip_network("fd20:ce::254/128"),  # Google Cloud: metadata.
    ipaddress.ip_network("fd00:42::42/128"),  # Scaleway: metadata.
    ipaddress.ip_network("100.100.100.200/32"),  # Alibaba Cloud: metadata.
    ipaddress.ip_network("168.63.129.16/32"),  # Azure: the host's own services.
    ipaddress.ip_network("192.0.0.192/32"),  # Oracle Cloud: metadata of the first generation.
)
#: IPv6 networks in whose addresses the last four bytes are the IPv4 address that is really reached.
_TRANSLATED: Final = (
    ipaddress.IPv6Network("::/96"),  # IPv4-compatible.
    ipaddress.IPv6Network("64:ff9b::/96"),  # NAT64.
    ipaddress.IPv6Network("64:ff9b:1::/48"),  # Local NAT64.
)
_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_\-]*[a-z0-9_])?"
_NAME: Final = re.compile(rf"(?:\*|{_LABEL})(?:\.{_LABEL})*")
_EXPECTED: Final = (
    "a network, an address or a name, and ports if they matter, as in 10.0.0.0/8, *.handlers.internal:9080-9090"
)


class AddressRefused(OSError):
    """This node does not connect to this address. An OSError, because it is raised where a socket is made.

    The text does not have the address: aiohttp merges equal errors for the addresses of one name, and hides different ones.
    """


class Entry(NamedTuple):
    """One place where handlers may be: a network or, where that is None, a name."""

    text: str
    network: Network | None
    name: str  # `*` or `*.` at its beginning stands for any labels
    ports: range

    def has_name(self, name: str, port: int) -> bool:
        if self.network is not None or port not in self.ports:
            return False
        if self.name.startswith("*"):
            return name.endswith(self.name[1:]) and len(name) > len(self.name) - 1
        return name == self.name


@dataclass(frozen=True)
class Addresses:
    """The setting. Without entries every address is allowed that is not guarded."""

    entries: tuple[Entry, ...] = ()

    def __str__(self) -> str:
        return ", ".join(entry.text for entry in self.entries) or "(all but link-local and metadata addresses)"

    def allows_name(self, host: str, port: int) -> bool:
        """Whether handlers may be at this host whatever its name resolves to, guarded addresses excepted."""
        name = host.lower().rstrip(".")
        return parse_ip(name) is None and any(entry.has_name(name, port) for entry in self.entries)

    def check(self, address: str, port: int, *, named: bool = False) -> None:
        """Raises AddressRefused. `named`: the name of the host was allowed."""
        ip = parse_ip(address)
        if ip is None:
            raise AddressRefused(errno.EACCES, "not an IP address")
        forms = [ip, *_reached_through(ip)]
        for form in forms:
            guard = next((network for network in GUARDED if _contains(network, form)), None)
            if guard is not None and not any(self._names_guarded(entry, guard, form, port) for entry in self.entries):
                raise AddressRefused(errno.EACCES, "it is a link-local or metadata address")
        if named or not self.entries:
            return
        if not any(
            entry.network is not None and _contains(entry.network, form) and port in entry.ports
            for entry in self.entries
            for form in forms
            if form is ip or _is_mapped(ip)
        ):
            raise AddressRefused(errno.EACCES, "its address and port are not among the allowed ones")

    @staticmethod
    def _names_guarded(entry: Entry, guard: Network, ip: Ip, port: int) -> bool:
        network = entry.network
        return (
            network is not None
            and port in entry.ports
            and _contains(network, ip)
            and network.version == guard.version
            and network.prefixlen >= guard.prefixlen
        )


async def find_guarded(host: str, port: int) -> str | None:
    """Why a node must not be sent to this host: one of its addresses is link-local or serves metadata. None: it may.

    A name that does not resolve yet is accepted.
    """
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, ValueError):
        return None
    for *_, where in found:
        try:
            Addresses().check(str(where[0]).partition("%")[0], port)
        except AddressRefused as error:
            return f"nodes do not connect to {host:.253}: {error.strerror}"
    return None


def parse_ip(text: str) -> Ip | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _contains(network: Network, ip: Ip) -> bool:
    return ip.version == network.version and ip in network


def _is_mapped(ip: Ip) -> bool:
    return isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None


def _reached_through(ip: Ip) -> Iterable[Ip]:
    """The IPv4 addresses that a packet to this IPv6 address may end at."""
    if isinstance(ip, ipaddress.IPv4Address):
        return
    if ip.ipv4_mapped is not None:
        yield ip.ipv4_mapped
    if ip.sixtofour is not None:
        yield ip.sixtofour
    if ip.teredo is not None:
        yield from ip.teredo
    if any(ip in network for network in _TRANSLATED):
        yield ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)


def read_addresses(value: Any) -> Addresses:
    """A list of texts, or one text with commas. Raises ValueError."""
    items = [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > ENTRIES_MAX or not all(isinstance(item, str) for item in items):
        raise ValueError(f"a list expected, each item {_EXPECTED}")
    return Addresses(tuple(_read_entry(item) for item in items))


def _read_entry(text: str) -> Entry:
    host, ports = text, range(1, PORT_MAX + 1)
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")) or ":" not in host:
            raise ValueError(f"{text!r:.80} is not {_EXPECTED}")
        if rest:
            ports = _read_ports(text, rest[1:])
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
        ports = _read_ports(text, port)
    network = _read_network(text, host)
    if network is not None:
        return Entry(text, network, "", ports)
    try:
        name = host.lower().rstrip(".")
        name = name if name.isascii() else name.encode("idna").decode()
    except ValueError:
        name = ""
    if _NAME.fullmatch(name) is None or re.fullmatch(r"[0-9.]+|0x[0-9a-f.x]*", name):
        raise ValueError(f"{text!r:.80} is not {_EXPECTED}")
    return Entry(text, None, name, ports)


def _read_network(text: str, host: str) -> Network | None:
    try:
        return ipaddress.ip_network(host)
    except ValueError as error:
        if "host bits" in str(error):
            right = ipaddress.ip_network(host, strict=False)
            raise ValueError(f"{text!r:.80} is not a network: did you mean {right}?") from None
        return None


def _read_ports(text: str, ports: str) -> range:
    match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", ports)
    first = int(match[1]) if match is not None else 0
    last = int(match[2] or first) if match is not None else 0
    if not 1 <= first <= last <= PORT_MAX:
        raise ValueError(f"{text!r:.80}: {ports!r:.40} is not a port from 1 to {PORT_MAX}, nor a range as in 9080-9090")
    return range(first, last + 1)
