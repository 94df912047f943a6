"""Settings from file and variables: what is accepted, and the errors for wrong ones."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster.advice import advise, find_faults
from holdfast.cluster.config import (
    BadConfig,
    Config,
    HostPort,
    build,
    describe,
    founders_of,
    load,
)
from holdfast.cluster.quantities import MIB

ROOT = Path(__file__).resolve().parents[2]


def test_without_file_and_variables_there_are_defaults() -> None:
    assert load(None, {}) == Config()


def test_a_file_is_read_and_variables_win_over_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    file = tmp_path / "node.toml"
    file.write_text(
        f"""
        node = "n2"
        data = "{tmp_path}/data"
        ingress = "0.0.0.0:80"
        body_bytes_max = "8 MiB"
        secret_file = "{tmp_path}/secret"
        [peers]
        n1 = "10.0.0.1:5122"
        n3 = "[::1]:5122"
        """
    )

    config = load(file, {"HOLDFAST_INGRESS": ":81", "HOLDFAST_PARTITIONS": "16", "HOLDFAST_ADMIN_URL": "x", "PATH": ""})

    assert config.node == "n2"
    assert config.data == tmp_path / "data"
    assert config.ingress == HostPort("127.0.0.1", 81)
    assert config.body_bytes_max == 8 * MIB
    assert config.partitions == 16
    assert config.secret == b"0123456789abcdef"
    assert config.peers == {"n1": HostPort("10.0.0.1", 5122), "n3": HostPort("::1", 5122)}
    assert "0123456789abcdef" not in repr(config)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"HOLDFAST_PARTITION": "8"}, "HOLDFAST_PARTITION: there is no such setting; did you mean partitions?"),
        ({"HOLDFAST_PARTITIONS": "0"}, "HOLDFAST_PARTITIONS: 0 is not a whole number from 1 to 4096"),
        ({"HOLDFAST_BODY_BYTES_MAX": "64 MiB"}, "HOLDFAST_BODY_BYTES_MAX: '64 MiB' is not between 1 KiB and 32 MiB"),
        ({"HOLDFAST_BODY_BYTES_MAX": "big"}, "HOLDFAST_BODY_BYTES_MAX: 'big' is not a size, as in 4 MiB"),
        ({"HOLDFAST_INGRESS": "localhost"}, "HOLDFAST_INGRESS: 'localhost' is not host:port, as in 127.0.0.1:8080"),
        ({"HOLDFAST_NODE": "a b"}, "HOLDFAST_NODE: 'a b' is not a name"),
        ({"HOLDFAST_PEERS": "n2"}, "HOLDFAST_PEERS: name=host:port, separated by commas, expected"),
        ({"HOLDFAST_PEERS": "n2=h:1"}, "secret: a cluster of several nodes needs one"),
        ({"HOLDFAST_SECRET_FILE": "/does/not/exist"}, "HOLDFAST_SECRET_FILE: "),
        ({"HOLDFAST_TLS_CA": "/does/not/exist"}, "HOLDFAST_TLS_CA: "),
        ({"HOLDFAST_TLS_CA": __file__}, "tls_cert: TLS between nodes needs tls_cert, tls_key and tls_ca, all three"),
        ({"HOLDFAST_FOUNDERS": ","}, "HOLDFAST_FOUNDERS: a list of names expected, as in n1,n2,n3"),
        ({"HOLDFAST_FOUNDERS": "n1,n1"}, "HOLDFAST_FOUNDERS: duplicate name"),
        ({"HOLDFAST_FOUNDERS": "n2"}, "peers: n1 is not among the founders, so it needs the address of a node to join"),
        ({"HOLDFAST_REPLICATION": "8"}, "HOLDFAST_REPLICATION: 8 is not a whole number from 1 to 7"),
        ({"HOLDFAST_ZONE": "a b"}, "HOLDFAST_ZONE: 'a b' is not a name"),
        ({"HOLDFAST_CLUSTER": "c" * 55}, f"HOLDFAST_CLUSTER: '{'c' * 55}' is longer than 54 characters"),
        ({"HOLDFAST_BLOBS": "s3"}, "HOLDFAST_BLOBS: 's3' is neither store, nor log, nor auto"),
        ({"HOLDFAST_BLOBS": "store"}, "blobs: large values cannot go to a store while there is none"),
        ({"HOLDFAST_PUBLIC_ADMIN_URL": "n1:9070"}, "HOLDFAST_PUBLIC_ADMIN_URL: 'n1:9070' is not a URL"),
    ],
)
def test_a_wrong_setting_is_named_with_the_expected_value(variables: dict[str, str], sentence: str) -> None:
    with pytest.raises(BadConfig) as caught:
        load(None, variables)

    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("text", ["node = ", "node = 1", "[ingress]\nport = 1", "\x00"])
def test_a_broken_file_is_a_bad_config_that_names_the_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text)

    with pytest.raises(BadConfig) as caught:
        load(file, {})

    assert str(file) in str(caught.value)


def test_a_missing_file_and_a_folder_are_clear_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.toml", tmp_path):
        with pytest.raises(BadConfig, match=str(path)):
            load(path, {})


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("short")

    with pytest.raises(BadConfig, match="at least 16"):
        build({"secret_file": str(tmp_path / "secret")})


def test_the_home_of_a_user_who_does_not_exist_is_refused() -> None:
    with pytest.raises(BadConfig, match=r"data: .*home directory.* does not exist"):
        build({"data": "~nobody-has-this-name/data"})


def test_one_list_of_peers_may_serve_for_all_nodes(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef")

    read = build({"node": "n1", "peers": "n1=h:1,n2=h:2", "secret_file": str(tmp_path / "secret")})

    assert read.peers == {"n2": HostPort("h", 2)}


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)


@given(st.sampled_from(["node", "data", "partitions", "ingress", "peers", "body_bytes_max", "secret_file"]), values)
def test_any_value_is_read_or_refused_in_a_sentence(name: str, value: object) -> None:
    try:
        build({name: value})
    except BadConfig as error:
        assert str(error).startswith((name, "secret", "ingress, ", "admin, "))  # Two listeners may collide.


def test_the_own_entry_among_the_peers_is_the_advertised_address(tmp_path: Path) -> None:
    """So that all nodes can share one file."""
    (tmp_path / "secret").write_text("0123456789abcdef")
    values = {"peers": "n1=10.0.0.1:5122,n2=10.0.0.2:5122", "secret_file": str(tmp_path / "secret")}

    one, two = (build({**values, "node": name, "peer": "0.0.0.0:5122"}) for name in ("n1", "n2"))

    assert one.advertise == HostPort("10.0.0.1", 5122) and list(one.peers) == ["n2"]
    assert two.advertise == HostPort("10.0.0.2", 5122) and list(two.peers) == ["n1"]
    assert founders_of(one) == founders_of(two) == ("n1", "n2")


def test_the_settings_are_described_without_the_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef")
    shown = describe(build({"peers": "n2=h:1", "secret_file": str(tmp_path / "secret")}))

    assert {*shown} == {each.name for each in fields(Config)}
    assert shown["secret"] == "(set)" and "0123456789abcdef" not in str(shown)
    assert shown["founders"] == "(this node and its peers: n1, n2)" and shown["body_bytes_max"] == "4 MiB"


def test_advice_names_settings_that_are_probably_mistakes(tmp_path: Path) -> None:
    def advice(**values: str) -> str:
        return "\n".join(advise(with_secret(tmp_path, **values)))

    assert advice() == ""
    assert "a cluster of two nodes stops when either node stops" in advice(peers="n2=h:1")
    assert "has no address of n3" in advice(founders="n1,n2,n3", peers="n2=h:1")
    assert "n4 is not among them: it waits until it is added" in advice(
        node="n4", founders="n1", peers="n1=127.0.0.1:1"
    )
    assert "n2, n3 cannot reach 127.0.0.1:5122" in advice(peers="n2=h:1,n3=h:2")


def with_secret(tmp_path: Path, **values: str) -> Config:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    return build({**values, "secret_file": str(secret)})


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"ingress": "9070"}, "ingress, admin: both listen on port 9070; give each a port of its own"),
        ({"admin": "0.0.0.0:8080"}, "ingress, admin: both listen on port 8080"),
        ({"peer": "[::]:8080"}, "ingress, peer: both listen on port 8080"),
        ({"health": "9070"}, "admin, health: both listen on port 9070"),
        ({"peers": "n2=h:1,n3=h:1"}, "peers: n2 and n3 have the same address, h:1; give each node its own"),
        ({"peers": "n2=127.0.0.1:5122"}, "peers: n1 and n2 have the same address, 127.0.0.1:5122"),
        ({"peers": "n1=h:1,n2=h:1"}, "peers: n1 and n2 have the same address, h:1"),
    ],
)
def test_addresses_that_collide_are_refused(values: dict[str, str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig) as refused:
        with_secret(tmp_path, **values)

    assert sentence in str(refused.value)


def test_the_same_port_of_different_addresses_and_any_free_port_are_fine() -> None:
    build({"ingress": "127.0.0.1:80", "admin": "127.0.0.2:80"})
    build({"ingress": "0", "admin": "0", "peer": "0"})


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("public_ingress_url", "https://ann:hush@h:1"),
        ("snapshots", "s3://ann:hush@bucket/x"),
        ("snapshots", "s3://bucket/x?endpoint_url=https://ann:hush@h:1"),
        ("snapshots", "s3://bucket/x?secret_access_key=hush"),
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(name: str, url: str) -> None:
    with pytest.raises(BadConfig) as refused:
        build({name: url})

    said = str(refused.value)
    assert said.startswith(f"{name}: ") and "credentials" in said and "hush" not in said
    assert "write it without them" in said or "give them as AWS_ACCESS_KEY_ID" in said


def test_advice_is_given_on_replication_and_on_who_can_read_a_secret(tmp_path: Path) -> None:
    config = with_secret(tmp_path, replication="5", peers="n2=127.0.0.1:1,n3=127.0.0.1:2", founders="n1,n2,n3")
    [one] = advise(config)
    assert one.startswith("replication: 5 replicas of each partition are wanted, and the settings name 3 nodes")
    assert advise(with_secret(tmp_path)) == [], "one node with the default is a cluster that may grow"
    assert "the settings name 1 node:" in advise(with_secret(tmp_path, replication="5"))[0]

    for mode in (0o640, 0o604, 0o602):
        config = with_secret(tmp_path)
        (tmp_path / "secret").chmod(mode)
        [one] = advise(config)
        assert "secret_file: other users of this machine can read or write" in one and "chmod 600" in one


def test_a_data_directory_that_cannot_be_used_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert find_faults(build({"data": str(tmp_path / "new" / "data")})) == []
    assert "is not a directory" in find_faults(build({"data": str(tmp_path / "file")}))[0]

    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    program = (
        "import os, sys; from holdfast.cluster.advice import find_faults; from holdfast.cluster.config import build\n"
        "config = build({'data': sys.argv[1]})\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "print(find_faults(config))"
    )
    for each in (tmp_path, *tmp_path.parents[:3]):
        if str(each).startswith(tempfile.gettempdir() + os.sep):
            each.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", program, str(closed / "data")], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert f"data: {closed} cannot be written to by user" in done.stdout, done.stderr


def test_variables_of_kubernetes_services_are_no_settings() -> None:
    injected = {
        "HOLDFAST_SERVICE_HOST": "10.0.0.1",
        "HOLDFAST_SERVICE_PORT_INGRESS": "8080",
        "HOLDFAST_PORT": "tcp://10.0.0.1:8080",
        "HOLDFAST_PORT_8080_TCP_ADDR": "10.0.0.1",
        "HOLDFAST_PEERS_PORT_5122_TCP": "tcp://10.0.0.1:5122",
        "HOLDFAST_PEERS_SERVICE_PORT": "5122",
    }

    assert load(None, injected) == Config()
    with pytest.raises(BadConfig, match="there is no such setting"):
        load(None, {"HOLDFAST_REPORT": "1"})
