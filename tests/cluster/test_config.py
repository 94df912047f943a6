"""Settings from file and variables: what is accepted, and what an operator reads when one is wrong."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster.config import (
    MIB,
    BadConfig,
    Config,
    Endpoint,
    advise,
    build,
    describe,
    founders_of,
    load,
)


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
    assert config.ingress == Endpoint("127.0.0.1", 81)
    assert config.body_bytes_max == 8 * MIB
    assert config.partitions == 16
    assert config.secret == b"0123456789abcdef"
    assert config.peers == {"n1": Endpoint("10.0.0.1", 5122), "n3": Endpoint("::1", 5122)}
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
        ({"HOLDFAST_FOUNDERS": "n1,n1"}, "HOLDFAST_FOUNDERS: a name stands there twice"),
        ({"HOLDFAST_FOUNDERS": "n2"}, "peers: n1 is not among the founders, so it needs the address of a node to join"),
        ({"HOLDFAST_REPLICATION": "8"}, "HOLDFAST_REPLICATION: 8 is not a whole number from 1 to 7"),
        ({"HOLDFAST_ZONE": "a b"}, "HOLDFAST_ZONE: 'a b' is not a name"),
        ({"HOLDFAST_CLUSTER": "c" * 55}, f"HOLDFAST_CLUSTER: '{'c' * 55}' is longer than 54 characters"),
        ({"HOLDFAST_BLOBS": "s3"}, "HOLDFAST_BLOBS: 's3' is neither store, nor log, nor auto"),
        ({"HOLDFAST_BLOBS": "store"}, "blobs: large values cannot go to a store while there is none"),
        ({"HOLDFAST_PUBLIC_ADMIN_URL": "n1:9070"}, "HOLDFAST_PUBLIC_ADMIN_URL: 'n1:9070' is not a URL"),
    ],
)
def test_a_wrong_setting_is_named_with_what_would_do(variables: dict[str, str], sentence: str) -> None:
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


def test_one_list_of_peers_may_serve_for_all_nodes(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef")

    read = build({"node": "n1", "peers": "n1=h:1,n2=h:2", "secret_file": str(tmp_path / "secret")})

    assert read.peers == {"n2": Endpoint("h", 2)}


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)


@given(st.sampled_from(["node", "data", "partitions", "ingress", "peers", "body_bytes_max", "secret_file"]), values)
def test_any_value_is_read_or_refused_in_a_sentence(name: str, value: object) -> None:
    try:
        build({name: value})
    except BadConfig as error:
        assert str(error).startswith((name, "secret"))


def test_the_own_entry_among_the_peers_is_the_advertised_address(tmp_path: Path) -> None:
    """So that one file serves for all nodes."""
    (tmp_path / "secret").write_text("0123456789abcdef")
    values = {"peers": "n1=10.0.0.1:5122,n2=10.0.0.2:5122", "secret_file": str(tmp_path / "secret")}

    one, two = (build({**values, "node": name, "peer": "0.0.0.0:5122"}) for name in ("n1", "n2"))

    assert one.advertise == Endpoint("10.0.0.1", 5122) and list(one.peers) == ["n2"]
    assert two.advertise == Endpoint("10.0.0.2", 5122) and list(two.peers) == ["n1"]
    assert founders_of(one) == founders_of(two) == ("n1", "n2")


def test_the_settings_are_described_without_the_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef")
    shown = describe(build({"peers": "n2=h:1", "secret_file": str(tmp_path / "secret")}))

    assert {*shown} == {each.name for each in fields(Config)}
    assert shown["secret"] == "(set)" and "0123456789abcdef" not in str(shown)
    assert shown["founders"] == "(this node and its peers: n1, n2)" and shown["body_bytes_max"] == "4 MiB"


def test_advice_tells_what_is_most_likely_not_meant(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef")

    def advice(**values: str) -> str:
        return "\n".join(advise(build({**values, "secret_file": str(tmp_path / "secret")})))

    assert advice() == ""
    assert "two nodes stand still when either stops" in advice(peers="n2=h:1")
    assert "has no address of n3" in advice(founders="n1,n2,n3", peers="n2=h:1")
    assert "n4 is not among them: it waits until it is added" in advice(
        node="n4", founders="n1", peers="n1=127.0.0.1:1"
    )
    assert "n2, n3 cannot reach 127.0.0.1:5122" in advice(peers="n2=h:1,n3=h:1")
