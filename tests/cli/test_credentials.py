"""Credentials in a URL are refused wherever a URL is given, and no error repeats them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.cli.main import main
from holdfast.cluster.config import BadConfig, build
from holdfast.cluster.errors import BadRequest
from holdfast.cluster.registry.registry import normalize_uri
from holdfast.sdk import Client, SyncClient
from holdfast.snapshots.errors import BadStoreUrl
from holdfast.snapshots.stores import check_store_url

USERS = ("ann:hush@", "hush@", ":hush@", "ann%40x:hush@", "ann:hu@sh@")
HIDDEN = ("hush", "hu@sh")


def said(text: str) -> str:
    assert "credentials" in text, text
    assert not any(secret in text for secret in HIDDEN), text
    return text


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(
    "command",
    [
        ("services", "list", "--admin-url", "http://{}127.0.0.1:1"),
        ("services", "list", "--admin-url", "ftp://{}127.0.0.1:1"),
        ("call", "trips/book", "--ingress-url", "http://{}127.0.0.1:1"),
        ("deployments", "register", "http://{}127.0.0.1:9080"),
        ("profile", "set", "p", "--admin-url", "https://{}127.0.0.1:1"),
        ("backup", "list", "--from", "s3://{}bucket/prefix"),
        ("backup", "list", "--from", "ftp://{}bucket/prefix"),
        ("backup", "--to", "s3://{}bucket/prefix", "--admin-url", "http://127.0.0.1:1"),
        ("backup", "--to", "s3://b/x?endpoint_url=https://{}h:1", "--admin-url", "http://127.0.0.1:1"),
        ("restore", "--from", "s3://{}bucket/prefix", "--config", "nothing.toml"),
    ],
    ids=" ".join,
)
def test_commands_refuse_credentials_in_urls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], user: str
) -> None:
    monkeypatch.setenv("HOLDFAST_PROFILES", str(tmp_path / "profiles.toml"))

    done = CliRunner().invoke(main, [word.format(user) for word in command])

    assert done.exit_code == 1
    said(done.output)
    assert not (tmp_path / "profiles.toml").exists()


def test_a_variable_with_credentials_is_refused_too() -> None:
    done = CliRunner().invoke(main, ["services", "list"], env={"HOLDFAST_ADMIN_URL": "http://ann:hush@127.0.0.1:1"})

    assert done.exit_code == 1 and "--token-file or HOLDFAST_TOKEN" in said(done.output)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(
    "uri", ["http://{}h:9080", "https://{}h", "ftp://{}h", "HTTP://{}h:x", "http://{}[::1", "//{}h"]
)
def test_a_node_refuses_them_in_the_uri_of_a_deployment(uri: str, user: str) -> None:
    with pytest.raises(BadRequest) as refused:
        normalize_uri(uri.format(user))

    said(refused.value.message)
    assert "without them" in (refused.value.hint or "")


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("public_ingress_url", "https://{}h:1"),
        ("public_admin_url", "ftp://{}h"),
        ("public_admin_url", "http://{}[h"),
        ("advertise", "{}h:5122"),
        ("peers", "n2={}h:5122"),
        ("snapshots", "s3://{}bucket/x"),
        ("snapshots", "https://{}bucket/x"),
        ("snapshots", "s3://bucket/x?endpoint_url=https://{}h:1"),
    ],
)
def test_settings_refuse_them(name: str, url: str, user: str) -> None:
    with pytest.raises(BadConfig) as refused:
        build({name: url.format(user)})

    assert said(str(refused.value)).startswith(f"{name}: ")


@pytest.mark.parametrize("user", [*USERS, "ann:hush,hush@", "ann:hush/hush hush@", f"ann:{'hush' * 30}@"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cors_origins", "https://{}h"),
        ("allowed_hosts", "{}h"),
        ("deployment_addresses", "{}h:9080"),
        ("deployment_addresses", "[{}h"),
        ("blobs", "s3://{}h"),
        ("restored", "s3://{}h"),
        ("auth", "{}h"),
        ("node", "{}h"),
        ("founders", "n1,{}h"),
        ("peers", "{}h=127.0.0.1:1"),
        ("ingress", "{}h"),
        ("redact_headers", "{}h"),
    ],
)
def test_errors_about_settings_repeat_nothing_before_an_at_sign(name: str, text: str, user: str) -> None:
    for value in (text.format(user), [text.format(user)]):
        with pytest.raises(BadConfig) as refused:
            build({name: value})

        assert str(refused.value).startswith(f"{name}: ")
        assert not any(secret in str(refused.value) for secret in HIDDEN), refused.value


@pytest.mark.parametrize(
    "url", ["s3://Bad_Bucket!/x?secret_access_key=hush", "s3://b/x?region=&Token=hush", "file://x/?password=hush"]
)
def test_keys_of_a_store_are_refused_before_anything_else_is_said(url: str) -> None:
    with pytest.raises(BadStoreUrl) as refused:
        check_store_url(url)

    assert "AWS_ACCESS_KEY_ID" in said(str(refused.value))


@pytest.mark.parametrize("user", USERS)
def test_clients_refuse_them(user: str) -> None:
    for kind in (Client, SyncClient):
        with pytest.raises(ValueError) as refused:
            kind(f"http://{user}127.0.0.1:8080")

        assert "pass a token with token=" in said(str(refused.value))


def test_an_at_sign_elsewhere_is_no_credential() -> None:
    assert normalize_uri("http://h:9080/a@b") == "http://h:9080/a@b"
    assert build({"snapshots": "/mnt/a@b"}).snapshots == "/mnt/a@b"
    SyncClient("http://h:8080/a@b")
