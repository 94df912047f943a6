"""`holdfast cert`: the certificates that it creates, and its refusals."""

from __future__ import annotations

import json
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography import x509

from holdfast.cli.authority import Refused, make_authority, make_for_client, make_for_node
from holdfast.cli.main import main


def holdfast(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["cert", *arguments, "--out", str(folder)])


def shown(folder: Path, *arguments: str) -> dict[str, Any]:
    done = holdfast(folder, *arguments, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> dict[str, Any]:
    """The certificate that the server sees, after a handshake in memory. Raises ssl.SSLError."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(back, there, server_hostname=host)
    theirs = server.wrap_bio(there, back, server_side=True)
    for _ in range(4):
        for side in (ours, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return theirs.getpeercert() or {}


def contexts(folder: Path, server: str, client: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    accepting = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=folder / "ca.pem")
    accepting.verify_mode = ssl.CERT_REQUIRED
    accepting.load_cert_chain(folder / f"{server}.pem", folder / f"{server}.key")
    dialing = ssl.create_default_context(cafile=folder / "ca.pem")
    dialing.load_cert_chain(folder / f"{client}.pem", folder / f"{client}.key")
    for context in (accepting, dialing):
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # The default of Python 3.13.
    return accepting, dialing


def test_a_cluster_gets_its_certificates(tmp_path: Path) -> None:
    folder = tmp_path / "certs"

    assert shown(folder, "ca")["subject"] == "CN=holdfast CA"
    node = shown(folder, "node", "n1", "--host", "n1.internal", "--host", "10.0.0.1")
    shown(folder, "node", "n2")
    client = shown(folder, "client", "ada")

    assert node["names"] == ["n1", "localhost", "127.0.0.1", "::1", "n1.internal", "10.0.0.1"]
    assert client["names"] == [] and client["subject"] == "CN=client/ada"
    assert mode(folder) == 0o700
    assert {mode(path) for path in folder.glob("*.key")} == {0o600}
    assert {path.name for path in folder.iterdir()} == {
        f"{name}.{kind}" for name in ("ca", "n1", "n2", "client-ada") for kind in ("pem", "key")
    }


@pytest.mark.parametrize("host", ["n1", "n1.internal", "10.0.0.1", "localhost", "127.0.0.1"])
@pytest.mark.parametrize("client", ["n2", "client-ada"])
def test_a_node_is_trusted_under_its_names_and_trusts_nodes_and_clients(tmp_path: Path, host: str, client: str) -> None:
    make_authority(tmp_path, "test")
    make_for_node(tmp_path, "n1", ("n1.internal", "10.0.0.1"))
    make_for_node(tmp_path, "n2")
    make_for_client(tmp_path, "ada")

    seen = handshake(*contexts(tmp_path, "n1", client), host)

    assert (("commonName", client.replace("client-", "client/")),) in seen["subject"]


def test_a_node_is_not_trusted_under_another_name_and_a_client_is_no_server(tmp_path: Path) -> None:
    make_authority(tmp_path, "test")
    make_for_node(tmp_path, "n1")
    make_for_client(tmp_path, "ada")

    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(*contexts(tmp_path, "n1", "n1"), "n2")
    with pytest.raises(ssl.SSLCertVerificationError, match=r"unsuit|purpose"):
        handshake(*contexts(tmp_path, "client-ada", "n1"), "ada")


def test_nothing_is_replaced_unless_it_is_forced(tmp_path: Path) -> None:
    assert holdfast(tmp_path, "ca").exit_code == 0
    assert holdfast(tmp_path, "node", "n1").exit_code == 0
    (tmp_path / "n1.pem").unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    for command in (("ca",), ("node", "n1")):
        refused = holdfast(tmp_path, *command)
        assert refused.exit_code == 1 and "already; --force replaces them" in refused.output
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    assert holdfast(tmp_path, "node", "n1", "--force").exit_code == 0
    assert (tmp_path / "n1.key").read_bytes() != before["n1.key"]
    assert mode(tmp_path / "n1.key") == 0o600


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("node", "n/1"), "'n/1' is not a name"),
        (("node", "ca"), "a node cannot be called ca"),
        (("node", "localhost"), "a node cannot be called localhost"),
        (("node", "n3", "--host", "n2"), "n2 is the name of another node"),
        (("node", "n3", "--host", "https://n3:8080"), "is neither a host name nor an IP address"),
        (("client", ".."), "'..' is not a name"),
        (("ca", "--name", "a,b", "--force"), "'a,b' is not a name"),
        (("node", "n3", "--days", "0"), "0 is not in the range"),
    ],
)
def test_what_cannot_be_made_is_refused(tmp_path: Path, command: tuple[str, ...], sentence: str) -> None:
    make_authority(tmp_path, "test")
    make_for_node(tmp_path, "n2")

    refused = holdfast(tmp_path, *command)

    assert refused.exit_code != 0 and sentence in refused.output, refused.output
    assert not (tmp_path / "n3.pem").exists()


def test_an_authority_is_needed_first_and_must_be_whole(tmp_path: Path) -> None:
    assert "create an authority first, with `holdfast cert ca`" in holdfast(tmp_path, "node", "n1").output
    make_authority(tmp_path, "test")
    make_authority(tmp_path / "other", "test")
    (tmp_path / "other" / "ca.key").replace(tmp_path / "ca.key")

    assert "is not the key of" in holdfast(tmp_path, "node", "n1").output


def test_a_certificate_never_outlives_its_authority(tmp_path: Path) -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    authority = make_authority(tmp_path, "test", days=30, now=now)
    ends = x509.load_pem_x509_certificate(authority.cert.read_bytes()).not_valid_after_utc

    node = make_for_node(tmp_path, "n1", now=now + timedelta(days=1))

    assert x509.load_pem_x509_certificate(node.cert.read_bytes()).not_valid_after_utc == ends
    with pytest.raises(Refused, match="expired: make a new one"):
        make_for_node(tmp_path, "n2", now=now + timedelta(days=31))


def test_certificates_are_shown(tmp_path: Path) -> None:
    make_authority(tmp_path, "test")
    node = make_for_node(tmp_path, "n1")

    done = CliRunner().invoke(main, ["cert", "show", str(node.cert), str(tmp_path / "ca.pem")])
    key = CliRunner().invoke(main, ["cert", "show", str(node.key)])

    assert done.exit_code == 0 and "CN=n1" in done.output and "n1, localhost" in done.output
    assert key.exit_code == 1 and "is not a certificate in PEM" in key.output
    assert "PRIVATE" not in key.output
