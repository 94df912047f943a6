"""TCP and TLS: how connections to peers are opened, tuned and certified, and what the system's errors mean."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: our certificate with its chain, its key, and the CA that signs the certificates of all nodes."""

    cert: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def explain(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS failed: {error.verify_message or error.reason}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    if isinstance(error, ConnectionError | TimeoutError) and error.errno:
        # Each event loop words these differently; people search for the system's words.
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def tune(sock: socket.socket, idle_s: float) -> None:
    # A socket whose peer is already gone may refuse options; reading from it reports that.
    with contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(idle_s * 1000))


async def connect(loop: asyncio.AbstractEventLoop, address: Address, idle_s: float) -> socket.socket:
    """A socket connected to the first of the host's addresses that answers."""
    failure: OSError = ConnectionError(f"{address.host} has no address")
    for family, kind, protocol, _, where in await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        tune(sock, idle_s)
        try:
            await loop.sock_connect(sock, where)
            # Dialing a free local port can connect a socket to itself, which would keep the port from its owner.
            if sock.getsockname() == sock.getpeername():
                raise ConnectionRefusedError("no process listens there")
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


def tls_contexts(files: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts for accepting and dialing. Both require a certificate of our CA; the handshake checks its names."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    server.num_tickets = 0  # Sessions are never resumed.
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(files.cert, files.key, no_password(files.key))
        context.load_verify_locations(files.ca)
    return server, client


def no_password(key: str | os.PathLike[str]) -> Callable[[], str]:
    """What is asked for the password of an encrypted key. Without it, OpenSSL would ask the terminal and wait."""

    def refuse() -> str:
        raise ValueError(f"{key} is encrypted, and a node cannot ask for its password: use a key without one")

    return refuse


def certified_names(transport: asyncio.BaseTransport) -> frozenset[str] | None:
    """The DNS names and common name in the peer's verified certificate; None without TLS."""
    if transport.get_extra_info("ssl_object") is None:
        return None
    certificate = transport.get_extra_info("peercert") or {}
    names = {value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"}
    for part in certificate.get("subject", ()):
        names.update(value for kind, value in part if kind == "commonName")
    return frozenset(names)
