"""`holdfast log-level`: how much the log of a node says."""

from __future__ import annotations

from typing import Any

import click

from holdfast.cli import client
from holdfast.cli.output import admin_option, json_option, print_json
from holdfast.cluster.log_level import LEVELS


@click.command("log-level")
@click.argument("level", required=False, type=click.Choice([*LEVELS, "reset"]))
@click.option(
    "--for", "duration", metavar="DURATION", help="Return to the level of the setting after this long: 10m, 1h."
)
@admin_option
@json_option
def log_level(level: str | None, duration: str | None, admin_url: str, as_json: bool) -> None:
    """Show or change the level of the log of the node at --admin-url, while it runs.

    It concerns that node alone, until it ends. `reset` returns to the level of its setting `log_level`.

    \b
    holdfast log-level
    holdfast log-level debug --for 10m
    holdfast log-level reset
    """
    shown: dict[str, Any]
    if level is None:
        if duration is not None:
            raise click.UsageError("--for needs a LEVEL")
        shown = client.admin(admin_url, "GET", "/log-level")
    else:
        value = {"level": None if level == "reset" else level, **({"for": duration} if duration is not None else {})}
        shown = client.admin(admin_url, "PUT", "/log-level", value=value)
    if as_json:
        print_json(shown)
        return
    until = f" until {shown['until']}, then {shown['configured']}" if shown["until"] else ""
    setting = f" (setting: {shown['configured']})" if shown["level"] != shown["configured"] and not until else ""
    click.echo(f"{shown['node']} logs {shown['level']}{until}{setting}")
