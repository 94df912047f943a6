"""The certificates of a node: TLS at its doors and between nodes, read again when their files change, and when they expire.

New connections use the newest files that work; connections that exist keep the certificate they began with. Files that
cannot be used, because they are half written, broken, or a key without its certificate, change nothing but a warning.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client.core import GaugeMetricFamily, Metric

from holdfast.cluster.config import BadConfig, Config
from holdfast.cluster.private import find_exposure
from holdfast.log.sockets import TlsFiles, no_password, tls_contexts

if TYPE_CHECKING:
    from datetime import datetime

logger = logging.getLogger(__name__)

LOOK_S: Final = 5.0
WARN_DAYS: Final = 14
DAY_MS: Final = 86_400_000
UsePeers = Callable[[ssl.SSLContext, ssl.SSLContext], None]
_Stamp = tuple[tuple[int, int, int] | None, ...]


class BadCertificate(Exception):
    """Files that cannot be used for TLS. The text names the file and says why."""


@dataclass(frozen=True, slots=True)
class Validity:
    """When certificates are valid, in milliseconds since 1970."""

    begins_ms: int
    ends_ms: int

    def fault(self, now_ms: int) -> str | None:
        """What an operator should know about it now."""
        if now_ms < self.begins_ms:
            return f"is not valid before {_day(self.begins_ms)}"
        if now_ms >= self.ends_ms:
            return f"expired on {_day(self.ends_ms)}"
        days = (self.ends_ms - now_ms) // DAY_MS
        if days < WARN_DAYS:
            return f"expires on {_day(self.ends_ms)}, in {days} day{'s' * (days != 1)}"
        return None


class Certificate:
    """What one listener, or the link between nodes, uses. `use_files` raises if the files are no good."""

    def __init__(self, use: str, cert: Path, key: Path, ca: Path | None, use_files: Callable[[], None]) -> None:
        self.use = use
        self.cert, self.key, self.ca = cert, key, ca
        self.valid: dict[str, Validity] = {}  # By what it is: the certificate itself, and the authority of others.
        self.broken = ""  # Why the newest files are not in use.
        self.exposed = ""  # Who else can use the key. A node does not start with such a key.
        self._use_files = use_files
        self._stamp: _Stamp = ()

    def load(self) -> None:
        """Raises BadCertificate, and leaves everything as it was."""
        self._stamp = self._stamp_now()
        try:
            valid = {self.use: validity_of(self.cert)}
            if self.ca is not None:
                valid[f"{self.use}-ca"] = validity_of(self.ca, authority=True)
            self._use_files()
        except (OSError, ValueError) as error:
            raise BadCertificate(self._explain(error)) from None
        self.valid, self.broken = valid, ""

    def look(self) -> bool:
        """Load the files if they changed. Whether the new ones are in use.

        A key that others can read is used, because the old certificate may be about to expire: there are warnings instead.
        """
        self.exposed = self._find_exposure()
        if self._stamp_now() == self._stamp:
            return False
        try:
            self.load()
        except BadCertificate as error:
            self.broken = str(error)
            logger.warning("%s: the new certificate is not used, the previous one still is: %s", self.use, error)
            return False
        logger.info("%s: new certificate, valid until %s", self.use, _day(self.valid[self.use].ends_ms))
        return True

    def warnings(self, now_ms: int) -> Iterator[str]:
        if self.broken:
            yield f"{self.use}: the new certificate is not used, the previous one still is: {self.broken}"
        if self.exposed:
            yield f"{self.use}: {self.exposed}; until then this node would not start again"
        for name, valid in self.valid.items():
            if (fault := valid.fault(now_ms)) is not None:
                yield f"the certificate {self.cert if name == self.use else self.ca} ({name}) {fault}: renew it"

    def _find_exposure(self) -> str:
        try:
            return find_exposure(self.key) or ""
        except OSError:  # The file is being replaced, and is not used before it is there.
            return self.exposed

    def _stamp_now(self) -> _Stamp:
        return tuple(_stamp(path) for path in (self.cert, self.key, self.ca) if path is not None)

    def _explain(self, error: Exception) -> str:
        if isinstance(error, ssl.SSLError):
            if error.reason == "KEY_VALUES_MISMATCH":
                return f"the key {self.key} does not belong to the certificate {self.cert}"
            return f"{self.cert} and {self.key} cannot be used: {error.reason or 'no private key in PEM'}"
        if isinstance(error, OSError):
            return f"{error.filename or self.cert}: {error.strerror or error}"
        return str(error)


class Certificates:
    """All certificates of a node."""

    def __init__(self, config: Config, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._use_peers: UsePeers | None = None
        self._warned: dict[str, int] = {}  # Warnings in the log, and when they were last there.
        self._task: asyncio.Task[None] | None = None
        self.all: list[Certificate] = [
            Certificate(use=use, cert=cert, key=key, ca=ca, use_files=partial(self._use, use, cert, key, client_ca=ca))
            for use, cert, key, ca in _doors(config)
        ]
        peers = peer_files(config)
        if peers is not None:
            cert, key, ca = Path(peers.cert), Path(peers.key), Path(peers.ca)
            self.all.append(
                Certificate(use="peer", cert=cert, key=key, ca=ca, use_files=lambda: self._use_for_peers(peers))
            )

    def load(self) -> None:
        """Before anything listens. Raises BadConfig."""
        for each in self.all:
            try:
                each.load()
            except BadCertificate as error:
                raise BadConfig(f"{'' if each.use == 'peer' else each.use + '_'}tls_cert: {error}") from None

    def door(self, name: str) -> Callable[[], ssl.SSLContext] | None:
        """What the next connection at a door needs. None: the door has no TLS."""
        return (lambda: self._contexts[name]) if any(each.use == name for each in self.all) else None

    def watch(self, use_peers: UsePeers) -> None:
        """Look at the files every few seconds. `use_peers` is told of new contexts for accepting and dialing other nodes."""
        self._use_peers = use_peers
        if self.all:
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _watch(self) -> None:
        while True:
            self._log()
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        for each in self.all:
            each.look()

    def warnings(self) -> list[str]:
        now_ms = self._now_ms()
        return [warning for each in self.all for warning in each.warnings(now_ms)]

    def _log(self) -> None:
        """Once a day each: an operator may not look at anything else."""
        now_ms = self._now_ms()
        current = [warning for each in self.all if not each.broken for warning in each.warnings(now_ms)]
        self._warned = {text: at for text, at in self._warned.items() if now_ms - at < DAY_MS and text in current}
        for text in current:
            if text not in self._warned:
                self._warned[text] = now_ms
                logger.warning("%s", text)

    def _use(self, name: str, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._contexts[name] = door_context(cert, key, client_ca)

    def _use_for_peers(self, files: TlsFiles) -> None:
        contexts = tls_contexts(files)
        if self._use_peers is not None:  # Before, the link reads them itself.
            self._use_peers(*contexts)


def peer_files(config: Config) -> TlsFiles | None:
    if config.tls_cert is None or config.tls_key is None or config.tls_ca is None:
        return None
    return TlsFiles(config.tls_cert, config.tls_key, config.tls_ca)


def _doors(config: Config) -> Iterator[tuple[str, Path, Path, Path | None]]:
    if config.ingress_tls_cert is not None and config.ingress_tls_key is not None:
        yield "ingress", config.ingress_tls_cert, config.ingress_tls_key, None
    if config.admin_tls_cert is not None and config.admin_tls_key is not None:
        yield "admin", config.admin_tls_cert, config.admin_tls_key, config.admin_tls_client_ca


def find_certificate_faults(config: Config) -> list[str]:
    """Why a node with these settings could not use its certificates."""
    try:
        Certificates(config, lambda: 0).load()
    except BadConfig as error:
        return [str(error)]
    return []


def door_context(cert: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """TLS 1.2 or 1.3 with the ciphers that Python thinks safe. Raises OSError, of which ssl.SSLError is one, or ValueError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # It would let a client have us calculate for free.
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(cert, key, no_password(key))
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_ca)
        # A resumed session is not verified again.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    return context


def validity_of(path: Path, *, authority: bool = False) -> Validity:
    """Of a chain, when its first certificate expires; of authorities, any of which may have signed, when the last one does.

    Raises OSError or ValueError.
    """
    # Reading a certificate costs 50 ms of imports, which a node without TLS does not need.
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not a certificate in PEM: {error}") from None
    ends = [_ms(each.not_valid_after_utc) for each in found]
    begins = [_ms(each.not_valid_before_utc) for each in found]
    return Validity(min(begins), max(ends)) if authority else Validity(max(begins), min(ends))


def _ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def _day(ms: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes when the file does. Kubernetes replaces the directory that a link in its path leads to."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def of_certificates(certificates: Certificates) -> Iterator[Metric]:
    expires = GaugeMetricFamily(
        "holdfast_certificate_expires_timestamp_seconds",
        "When a certificate of this node expires, in seconds since 1970: of ingress, admin or peer, or of an authority (-ca).",
        labels=["use"],
    )
    stale = GaugeMetricFamily(
        "holdfast_certificate_stale",
        "1 if the files of a certificate changed and cannot be used, so the previous one still is.",
        labels=["use"],
    )
    for each in certificates.all:
        stale.add_metric([each.use], float(bool(each.broken)))
        for use, valid in each.valid.items():
            expires.add_metric([use], valid.ends_ms / 1000)
    yield expires
    yield stale
