"""A small certificate authority: what `holdfast cert` makes, and when it refuses to.

One certificate of a node serves for the link between nodes, for the ingress and for the admin API. It names the node, by
which other nodes know it, and the hosts at which clients reach it. A client certificate cannot pass for that
of a node: its common name has a slash, which the name of a node cannot have.
"""

from __future__ import annotations

import ipaddress
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_DAYS: Final = 3650
NODE_DAYS: Final = 825  # More is refused by some systems.
CA: Final = "ca"
#: Clocks differ: a certificate is valid a little before it was made.
EARLY: Final = timedelta(hours=1)
LOCAL: Final = ("localhost", "127.0.0.1", "::1")  # For commands on the node's own machine.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,62}")
_HOST: Final = re.compile(r"(?:\*\.)?[A-Za-z0-9_]([A-Za-z0-9_\-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_\-]{0,62}))*")


class Refused(Exception):
    """A certificate cannot be made. The text says why and what to do."""


class Pair(NamedTuple):
    """A certificate and its key, as files of one folder."""

    cert: Path
    key: Path


def pair(folder: Path, name: str) -> Pair:
    return Pair(folder / f"{name}.pem", folder / f"{name}.key")


def make_authority(
    folder: Path, name: str, *, days: int = CA_DAYS, force: bool = False, now: datetime | None = None
) -> Pair:
    begins = _begins(now)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{_checked(name)} CA")])
    key = ec.generate_private_key(ec.SECP256R1())
    made = (
        _builder(subject, subject, key.public_key(), begins=begins, ends=begins + EARLY + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = pair(folder, CA)
    _write(files, made, key, force=force)
    return files


def make_for_node(
    folder: Path,
    name: str,
    hosts: tuple[str, ...] = (),
    *,
    days: int = NODE_DAYS,
    force: bool = False,
    now: datetime | None = None,
) -> Pair:
    if name in (CA, *LOCAL):
        raise Refused(f"a node cannot be called {name}: every certificate of a node names it; choose another name")
    for host in hosts:
        if host != name and pair(folder, host).cert.exists():
            raise Refused(f"{host} is the name of another node: a certificate with both would let {name} pass for it")
    names = dict.fromkeys([_checked(name), *LOCAL, *hosts])
    alternatives = x509.SubjectAlternativeName([_general(each) for each in names])
    return _issue(folder, name, name, alternatives, both=True, days=days, force=force, now=now)


def make_for_client(
    folder: Path, name: str, *, days: int = NODE_DAYS, force: bool = False, now: datetime | None = None
) -> Pair:
    return _issue(
        folder, f"client-{_checked(name)}", f"client/{name}", None, both=False, days=days, force=force, now=now
    )


def _issue(
    folder: Path,
    file: str,
    common_name: str,
    alternatives: x509.SubjectAlternativeName | None,
    *,
    both: bool,
    days: int,
    force: bool,
    now: datetime | None,
) -> Pair:
    """Signed by the authority in the same folder. `both`: for servers too."""
    authority, authority_key = _authority(folder)
    begins = _begins(now)
    ends = min(begins + EARLY + timedelta(days=days), authority.not_valid_after_utc)
    if ends <= begins:
        raise Refused(
            f"the authority {folder / 'ca.pem'} expired: make a new one with holdfast cert ca --force, "
            "and new certificates for all nodes"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    usages = [ExtendedKeyUsageOID.SERVER_AUTH] * both + [ExtendedKeyUsageOID.CLIENT_AUTH]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    made = (
        _builder(subject, authority.subject, key.public_key(), begins=begins, ends=ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
    )
    if alternatives is not None:
        made = made.add_extension(alternatives, critical=False)
    files = pair(folder, file)
    _write(files, made.sign(authority_key, hashes.SHA256()), key, force=force)
    return files


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, begins: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    files = pair(folder, CA)
    try:
        cert = x509.load_pem_x509_certificate(files.cert.read_bytes())
        key = load_pem_private_key(files.key.read_bytes(), None)
    except FileNotFoundError as error:
        raise Refused(f"{error.filename} does not exist: create an authority first, with `holdfast cert ca`") from None
    except (OSError, ValueError, TypeError) as error:
        raise Refused(f"the authority {files.cert} with {files.key} cannot be used: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        raise Refused(f"{files.key} is not the key of {files.cert}, as holdfast cert ca makes it")
    return cert, key


def _begins(now: datetime | None) -> datetime:
    return (now or datetime.now(UTC)) - EARLY


def _checked(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise Refused(f"{name!r:.80} is not a name: up to 63 letters, digits, _ - and . are allowed")
    return name


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if _HOST.fullmatch(host) is None or len(host) > 253:
        raise Refused(f"{host!r:.80} is neither a host name nor an IP address (no port, no https://)")
    return x509.DNSName(host)


def _write(files: Pair, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey, *, force: bool) -> None:
    """The key first: a node that reads both in between notices that they do not belong together, and reads again."""
    there = [str(path) for path in files if path.exists()]
    if there and not force:
        raise Refused(f"{' and '.join(there)} exist already; --force replaces them, and the old key is lost")
    files.cert.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _put(files.key, text, 0o600)
    _put(files.cert, cert.public_bytes(Encoding.PEM), 0o644)


def _put(path: Path, text: bytes, mode: int) -> None:
    """The old file or the new one, never half of it."""
    making = path.with_name(f".{path.name}.new")
    making.unlink(missing_ok=True)
    descriptor = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    making.replace(path)
