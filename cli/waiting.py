"""`holdfast waiting`: what waits for a decision, a signal, or its time."""

from __future__ import annotations

from typing import Any

import click

from holdfast.cli import client, complete
from holdfast.cli.output import admin_option, age, json_option, print_json, table


@click.command()
@click.option(
    "--kind",
    help="One or more of approval, awakeable, promise, in-doubt, timer, separated by commas. Default: all but timer.",
)
@click.option("--service", shell_complete=complete.services, help="Only invocations of this service.")
@click.option(
    "--limit", default=100, show_default=True, type=click.IntRange(1, 100_000), help="Show at most this many."
)
@admin_option
@json_option
def waiting(kind: str | None, service: str | None, limit: int, admin_url: str, as_json: bool) -> None:
    """List the steps that wait for somebody: approvals, awakeables, promises, and steps in doubt. Timers if they are asked for.

    \b
    holdfast waiting --kind in-doubt
    holdfast waiting --kind timer --service trips
    """
    found: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        parameters = {
            "kind": kind or "approval,awakeable,promise,in-doubt",
            "service": service,
            "limit": min(limit - len(found), 1000),
            "cursor": cursor,
        }
        page = client.admin(admin_url, "GET", "/waiting", parameters=parameters)
        found += page["waiting"]
        cursor = page["cursor"]
        if cursor is None or len(found) >= limit:
            break
    if as_json:
        print_json({"waiting": found, "more": cursor is not None})
        return
    table(
        ("KIND", "INVOCATION", "TARGET", "STEP", "NAME", "SINCE", "DUE"),
        (
            (each["kind"], each["invocation"], _target(each), each["step"], each["name"], f"{age(each['since'])} ago",
             each["due_at"])
            for each in found
        ),
        empty="Nothing waits.",
    )  # fmt: skip
    if cursor is not None:
        click.echo(f"There are more than these {len(found)}: see --limit, or narrow the filter.", err=True)


def _target(each: dict[str, Any]) -> str:
    key = f"/{each['key']}" if each["key"] is not None else ""
    return f"{each['service']}{key}/{each['handler']}"
