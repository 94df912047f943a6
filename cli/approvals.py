"""`holdfast approvals ...`: what handlers ask people, and the decisions of people."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from holdfast.cli import client, complete
from holdfast.cli.output import admin_option, age, json_option, print_json, table


@click.group()
def approvals() -> None:
    """List approvals that handlers wait for, and approve, reject or decide them."""


@approvals.command("list")
@click.option("--service", shell_complete=complete.services, help="Only those asked for by this service.")
@click.option("--assignee", help="Only those meant for this assignee.")
@click.option("--key", help="Only those asked for by this key of a virtual object or workflow.")
@click.option("--older-than", metavar="DURATION", help="Only those that wait for longer: 10m, 2h, 1d.")
@click.option("--due-within", metavar="DURATION", help="Only those with a deadline within this time: 1h.")
@click.option(
    "--limit", default=100, show_default=True, type=click.IntRange(1, 100_000), help="Show at most this many."
)
@admin_option
@json_option
def list_(limit: int, admin_url: str, as_json: bool, **chosen: str | None) -> None:
    """List the approvals that wait, the oldest first.

    \b
    holdfast approvals list --assignee finance
    holdfast approvals list --service refunds --older-than 1d
    """
    found: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        parameters = {**chosen, "limit": min(limit - len(found), 1000), "cursor": cursor}
        page = client.admin(admin_url, "GET", "/approvals", parameters=parameters)
        found += page["approvals"]
        cursor = page["cursor"]
        if cursor is None or len(found) >= limit:
            break
    if as_json:
        print_json({"approvals": found, "more": cursor is not None})
        return
    table(
        ("APPROVAL", "TITLE", "CHOICES", "ASSIGNEE", "TARGET", "WAITS FOR", "DUE"),
        (
            (each["id"], each["title"], ", ".join(each["choices"]), each["assignee"], _target(each), age(each["since"]),
             each["due_at"])
            for each in found
        ),
        empty="Nobody is asked for an approval.",
    )  # fmt: skip
    if cursor is not None:
        click.echo(f"There are more than these {len(found)}: see --limit, or narrow the filter.", err=True)


@approvals.command()
@click.argument("approval", shell_complete=complete.approvals)
@admin_option
@json_option
def show(approval: str, admin_url: str, as_json: bool) -> None:
    """Show APPROVAL with its payload, and what became of it."""
    shown = client.admin(admin_url, "GET", client.path("approvals", approval))
    if as_json:
        print_json(shown)
        return
    decision = shown["decision"]
    lines = [
        ("title", shown["title"]),
        ("status", shown["status"]),
        ("choices", ", ".join(shown["choices"])),
        ("assignee", shown["assignee"]),
        ("asked by", f"{_target(shown)} {shown['invocation']} (step {shown['step']})"),
        ("since", f"{shown['since']} ({age(shown['since'])} ago)"),
        ("due", shown["due_at"]),
        ("reminded", shown["reminded_at"]),
        ("decision", _sentence(decision) if decision is not None and decision["choice"] is not None else None),
        ("comment", decision["comment"] if decision is not None else None),
    ]
    for name, value in lines:
        if value is not None:
            # Further lines of a text must not look like fields of their own.
            click.echo(f"{name:<10}" + client.printable(str(value)).replace("\n", "\n" + " " * 10))
    click.echo("payload" + ("" if shown["editable"] else " (must not be edited)"))
    print_json(shown["payload"])
    if decision is not None and "payload" in decision:
        click.echo("edited payload, which was approved instead")
        print_json(decision["payload"])


_comment = click.option("--comment", help="Why; it stays in the journal.")
_payload = click.option(
    "--payload", metavar="JSON", help="What is approved, in place of what was shown. - reads it from stdin."
)


@approvals.command()
@click.argument("approval", shell_complete=complete.approvals)
@_comment
@_payload
@admin_option
@json_option
def approve(approval: str, comment: str | None, payload: str | None, admin_url: str, as_json: bool) -> None:
    """Decide "approve" about APPROVAL.

    \b
    holdfast approvals approve apr_0123… --comment "as discussed"
    holdfast approvals approve apr_0123… --payload '{"order": 17, "eur": 200}'
    """
    _decide(admin_url, approval, "approve", comment=comment, payload=payload, as_json=as_json)


@approvals.command()
@click.argument("approval", shell_complete=complete.approvals)
@_comment
@admin_option
@json_option
def reject(approval: str, comment: str | None, admin_url: str, as_json: bool) -> None:
    """Decide "reject" about APPROVAL."""
    _decide(admin_url, approval, "reject", comment=comment, payload=None, as_json=as_json)


@approvals.command()
@click.argument("approval", shell_complete=complete.approvals)
@click.argument("choice")
@_comment
@_payload
@admin_option
@json_option
def decide(approval: str, choice: str, comment: str | None, payload: str | None, admin_url: str, as_json: bool) -> None:
    """Decide CHOICE about APPROVAL, which is one of its choices."""
    _decide(admin_url, approval, choice, comment=comment, payload=payload, as_json=as_json)


def _decide(
    admin_url: str, approval: str, choice: str, *, comment: str | None, payload: str | None, as_json: bool
) -> None:
    value: dict[str, Any] = {"choice": choice, **({"comment": comment} if comment is not None else {})}
    if payload is not None:
        try:
            value["payload"] = json.loads(sys.stdin.read() if payload == "-" else payload)
        except ValueError as error:
            raise click.UsageError(f"--payload is not JSON: {error}") from None
    done = client.admin(admin_url, "POST", client.path("approvals", approval), value=value)
    if as_json:
        print_json(done)
        return
    if done["status"] == "Decided":
        click.echo(client.printable(f"Decided: {done['decision']['choice']}."))
    else:
        click.echo(client.printable(f"It was decided before: {_sentence(done['decision'])}."))


def _sentence(decision: dict[str, Any]) -> str:
    return f"{decision['choice']!r} by {decision['by']['name']} at {decision['at']}"


def _target(each: dict[str, Any]) -> str:
    key = f"/{each['key']}" if each["key"] is not None else ""
    return f"{each['service']}{key}/{each['handler']}"
