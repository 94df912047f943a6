"""`holdfast webhooks ...`: the secret alone on standard output, and refusals that say what to do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.running import Cli, running
from tests.ports import free_ports


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with running(tmp_path_factory.mktemp("node")) as cli:
        yield cli


def test_a_webhook_is_created_listed_tested_and_deleted(cli: Cli) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}/hook"

    secret = cli.ok("webhooks", "create", url, "--event", "failed", "--event", "in-doubt", "--service", "shop")
    [shown] = cli.json("webhooks", "list")["webhooks"]
    listed = cli.ok("webhooks", "list")
    tested = cli.run("webhooks", "test", shown["id"])
    deleted = cli.ok("webhooks", "delete", shown["id"])

    assert secret.startswith("whsec_") and len(secret.split()) == 1
    assert (shown["events"], shown["services"], shown["pending"]) == (["failed", "in-doubt"], ["shop"], 0)
    assert shown["id"] in listed and "failed, in-doubt" in listed and "never" in listed
    assert tested.exit_code == 1 and "did not take the event: cannot connect" in tested.stderr
    assert deleted == f"Deleted {shown['id']}.\n"
    assert cli.ok("webhooks", "list") == "There are no webhooks.\n"


def test_what_cannot_be_a_webhook_is_refused_with_a_reason(cli: Cli) -> None:
    nothing = cli.run("webhooks", "create", "http://a.example/")
    unknown = cli.run("webhooks", "create", "http://a.example/", "--event", "started")
    guarded = cli.run("webhooks", "create", "http://169.254.169.254/", "--event", "failed")
    missing = cli.run("webhooks", "delete", "wh_nothing")

    assert (nothing.exit_code, unknown.exit_code) == (2, 2) and "Missing option '--event'" in nothing.stderr
    assert "in-doubt" in unknown.stderr
    assert guarded.exit_code == 1 and "link-local or metadata address" in guarded.stderr
    assert missing.exit_code == 1 and "webhooks list" in missing.stderr
