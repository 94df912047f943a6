"""Certificates of a node: reloaded when their files change, and announced before they expire."""

from __future__ import annotations

import asyncio
import logging
import ssl
import tempfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from holdfast.cli.authority import Pair, make_authority, make_for_node
from holdfast.cluster.advice import find_faults
from holdfast.cluster.certificates import Certificates, of_certificates
from holdfast.cluster.config import BadConfig, Config, build

NOW = datetime(2030, 1, 1, tzinfo=UTC)
NOW_MS = int(NOW.timestamp() * 1000)


def made(folder: Path, *, days: int = 90, force: bool = False) -> Pair:
    if not (folder / "ca.pem").exists():
        make_authority(folder, "test", now=NOW)
    return make_for_node(folder, "n1", days=days, force=force, now=NOW)


def config_with(files: Pair, **settings: Any) -> Config:
    pair = {"ingress_tls_cert": str(files.cert), "ingress_tls_key": str(files.key)}
    return build({**pair, **settings})


def opened(files: Pair, days: float = 0, /, **settings: Any) -> Certificates:
    certificates = Certificates(config_with(files, **settings), lambda: NOW_MS + int(days * 86_400_000))
    certificates.load()
    return certificates


@pytest.mark.parametrize(
    ("days", "sentence"),
    [
        (0, None),
        (75.9, None),
        (76.5, "expires on 2030-04-01 00:00 UTC, in 13 days: renew it"),
        (89.5, "in 0 days: renew it"),
        (91, "expired on 2030-04-01 00:00 UTC: renew it"),
        (-1, "is not valid before 2029-12-31 23:00 UTC: renew it"),
    ],
)
def test_a_certificate_is_announced_two_weeks_before_it_expires(
    tmp_path: Path, days: float, sentence: str | None
) -> None:
    warnings = opened(made(tmp_path), days).warnings()

    if sentence is None:
        assert warnings == []
    else:
        [warning] = warnings
        assert warning.startswith(f"the certificate {tmp_path / 'n1.pem'} (ingress) ") and sentence in warning


def test_a_chain_expires_with_its_first_certificate_and_authorities_with_the_last(tmp_path: Path) -> None:
    files, soon = made(tmp_path / "one"), made(tmp_path / "other", days=5)
    files.cert.write_bytes(files.cert.read_bytes() + soon.cert.read_bytes())
    both = tmp_path / "both.pem"
    both.write_bytes(soon.cert.read_bytes() + (tmp_path / "one" / "ca.pem").read_bytes())
    admin: dict[str, Any] = {
        "admin_tls_cert": str(files.cert),
        "admin_tls_key": str(files.key),
        "admin_tls_client_ca": str(both),
    }

    warnings = opened(files, 0, **admin).warnings()

    assert ["(ingress) expires on 2030-01-06" in each or "(admin) expires on" in each for each in warnings] == [
        True
    ] * 2


def test_the_expiry_is_a_metric(tmp_path: Path) -> None:
    certificates = opened(made(tmp_path))

    expires, stale = of_certificates(certificates)

    [sample] = expires.samples
    assert (sample.labels, sample.value) == ({"use": "ingress"}, (NOW + timedelta(days=90)).timestamp())
    assert [each.value for each in stale.samples] == [0.0]


def test_the_log_says_once_a_day_that_a_certificate_expires(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificates = opened(made(tmp_path))
    hours = [0]
    certificates._now_ms = lambda: NOW_MS + (80 * 24 + hours[0]) * 3_600_000

    with caplog.at_level(logging.WARNING):
        for hours[0] in range(0, 50, 5):
            certificates._log()

    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3 and all("expires on 2030-04-01" in each for each in said)


def test_new_files_are_used_and_broken_ones_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = made(tmp_path)
    certificates = opened(files)
    door = certificates.door("ingress")
    assert door is not None
    before = door()
    certificates.look()
    assert door() is before, "nothing changed"

    for broken in (b"", files.cert.read_bytes()[:200], b"\0\xff"):
        files.cert.write_bytes(broken)
        certificates.look()
        certificates.look()
        assert door() is before
        assert "the new certificate is not used" in "\n".join(certificates.warnings())
    assert [sample.value for sample in list(of_certificates(certificates))[1].samples] == [1.0]
    assert len(caplog.records) == 3, "once for each broken file, and not at every look"

    made(tmp_path, days=60, force=True)
    certificates.look()
    assert door() is not before
    assert certificates.warnings() == []


def test_a_new_key_that_others_can_read_is_used_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # Others can enter it, unlike those of pytest.
        Path(folder).chmod(0o755)
        files = made(Path(folder))
        certificates = opened(files)
        [ingress] = certificates.all
        assert not certificates.warnings()

        made(Path(folder), days=60, force=True)
        files.key.chmod(0o644)
        certificates.look()
        certificates._log()

        [warning] = certificates.warnings()
        assert f"chmod 600 {files.key}" in warning and warning.startswith("ingress: other users of this machine can")
        assert warning in caplog.text
        assert ingress.valid["ingress"].ends_ms == NOW_MS + 60 * 86_400_000, "the new certificate is in use"

        files.key.chmod(0o600)
        certificates.look()

        assert not certificates.warnings()


def test_a_new_key_is_used_only_together_with_its_certificate(tmp_path: Path) -> None:
    files, new = made(tmp_path / "old"), made(tmp_path / "new")
    certificates = opened(files)
    door = certificates.door("ingress")
    assert door is not None
    before = door()

    files.key.write_bytes(new.key.read_bytes())
    certificates.look()
    assert door() is before and "does not belong to the certificate" in certificates.warnings()[0]

    files.cert.write_bytes(new.cert.read_bytes())
    certificates.look()
    assert door() is not before and certificates.warnings() == []


def test_a_certificate_behind_a_link_is_reloaded_when_the_link_changes(tmp_path: Path) -> None:
    """Kubernetes mounts a secret like this: `..data` is a link to a directory, and is replaced."""
    made(tmp_path / "v1")
    made(tmp_path / "v2")
    (tmp_path / "..data").symlink_to("v1")
    certificates = opened(Pair(tmp_path / "..data" / "n1.pem", tmp_path / "..data" / "n1.key"))
    door = certificates.door("ingress")
    assert door is not None
    before = door()

    (tmp_path / "..new").symlink_to("v2")
    (tmp_path / "..new").replace(tmp_path / "..data")
    certificates.look()

    assert door() is not before


def encrypt(files: Pair) -> None:
    key = load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")))


def swap(files: Pair) -> None:
    cert, key = files.cert.read_bytes(), files.key.read_bytes()
    files.cert.write_bytes(key)
    files.key.write_bytes(cert)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda files: files.cert.write_text("hello"), "n1.pem is not a certificate in PEM"),
        (lambda files: files.key.write_text("hello"), "n1.key cannot be used"),
        (swap, "n1.pem is not a certificate in PEM"),
        (encrypt, "n1.key is encrypted, and a node cannot ask for its password: use a key without one"),
        (
            lambda files: files.key.write_bytes(made(files.key.parent / "other").key.read_bytes()),
            "n1.key does not belong to the certificate",
        ),
    ],
)
@pytest.mark.parametrize("use", ["ingress_", "admin_", ""])
def test_unusable_certificates_are_found_before_the_start(tmp_path: Path, spoil: Any, sentence: str, use: str) -> None:
    files = made(tmp_path)
    spoil(files)
    ca = {"tls_ca": str(tmp_path / "ca.pem")} if use == "" else {}
    config = build({f"{use}tls_cert": str(files.cert), f"{use}tls_key": str(files.key), **ca})

    [fault] = find_faults(replace(config, data=tmp_path))

    assert fault.startswith(f"{use}tls_cert: ") and sentence in fault
    with pytest.raises(BadConfig, match=f"{use}tls_cert: "):
        Certificates(config, lambda: 0).load()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"ingress_tls_cert": __file__}, "ingress_tls_key: TLS needs both ingress_tls_cert and ingress_tls_key"),
        ({"admin_tls_key": __file__}, "admin_tls_cert: TLS needs both admin_tls_cert and admin_tls_key"),
        ({"admin_tls_client_ca": __file__}, "admin_tls_client_ca: client certificates need TLS"),
        ({"ingress_tls_cert": "/does/not/exist"}, "ingress_tls_cert: "),
    ],
)
def test_half_of_the_settings_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadConfig) as caught:
        build(settings)

    assert sentence in str(caught.value)


async def test_the_files_are_checked_while_the_node_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.cluster.certificates.LOOK_S", 0.01)
    files = made(tmp_path)
    certificates = opened(files)
    door = certificates.door("ingress")
    assert door is not None
    before = door()
    told: list[ssl.SSLContext] = []
    certificates.watch(lambda *contexts: told.extend(contexts))

    made(tmp_path, force=True)
    async with asyncio.timeout(30):
        while door() is before:
            await asyncio.sleep(0.01)
    await certificates.stop()

    assert told == [], "no certificate between nodes is set"
