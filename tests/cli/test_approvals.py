"""`holdfast approvals` against a real node: list, show, approve, reject, decide."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.cli.running import Cli, running
from tests.cluster.harness import PATIENCE_S
from tests.cluster.test_approvals import asks, name_of


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with running(tmp_path_factory.mktemp("node")) as cli:
        cli.at.endpoint.add("refunds/ask", asks)
        register = cli.at.admin("POST", "/deployments", json={"uri": cli.at.endpoint.uri, "force": True})
        asyncio.run_coroutine_threadsafe(register, cli.loop).result(PATIENCE_S)
        yield cli


def asked(cli: Cli, title: str) -> str:
    """The name of a new approval."""
    id_ = cli.ok("send", "refunds/ask", f'"{title}"').strip()
    cli.reaches(id_, "suspended")
    return name_of(id_)


def test_an_approval_is_listed_shown_and_approved_with_another_payload(cli: Cli) -> None:
    approval = asked(cli, "Refund order 17?")

    listed = cli.ok("approvals", "list", "--assignee", "finance", "--service", "refunds")
    shown = cli.ok("approvals", "show", approval)
    done = cli.ok("approvals", "approve", approval, "--comment", "fine", "--payload", '{"eur": 200}')
    after = cli.ok("approvals", "show", approval)

    assert approval in listed and "Refund order 17?" in listed and "approve, reject" in listed
    assert "status    waiting" in shown and '"eur": 240' in shown and "decision" not in shown
    assert done == "Decided: approve.\n"
    assert "decision  'approve' by anybody at 20" in after and "comment   fine" in after and '"eur": 200' in after
    assert cli.ok("approvals", "list") == "Nobody is asked for an approval.\n"
    again = cli.ok("approvals", "approve", approval, "--payload", "-", input='{"eur": 200}')
    assert again.startswith("It was decided before: 'approve' by anybody at 20")


def test_a_decision_that_comes_too_late_fails_and_says_who_decided(cli: Cli) -> None:
    approval = asked(cli, "Refund?")

    assert cli.json("approvals", "reject", approval)["decision"]["choice"] == "reject"
    late = cli.run("approvals", "decide", approval, "approve")

    assert late.exit_code == 1 and "'reject' was decided by anybody at" in late.stderr


def test_a_wrong_decision_is_refused_with_the_choices(cli: Cli) -> None:
    approval = asked(cli, "fixed")

    unknown = cli.run("approvals", "decide", approval, "maybe")
    edited = cli.run("approvals", "approve", approval, "--payload", "1")
    malformed = cli.run("approvals", "approve", approval, "--payload", "{")

    assert unknown.exit_code == 1 and "choose approve or reject" in unknown.stderr
    assert edited.exit_code == 1 and "must not be edited" in edited.stderr
    assert malformed.exit_code == 2 and "--payload is not JSON" in malformed.stderr
    [row] = cli.json("approvals", "list", "--limit", "5")["approvals"]
    assert row["id"] == approval and cli.json("approvals", "show", approval) == row
    assert cli.json("waiting")["waiting"][0]["kind"] == "approval"


def test_a_title_cannot_pose_as_another_field_or_steer_the_terminal(cli: Cli) -> None:
    id_ = cli.ok("send", "refunds/ask", r'"\u001b[2K\rRefund?\nstatus    decided \u202eevil"').strip()
    cli.reaches(id_, "suspended")

    shown = cli.ok("approvals", "show", name_of(id_))

    assert r"title     \x1b[2K\x0dRefund?" in shown and r"          status    decided \u202eevil" in shown
    assert cli.ok("approvals", "reject", name_of(id_)) == "Decided: reject.\n"
