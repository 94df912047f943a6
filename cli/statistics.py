"""`holdfast statistics`: how many invocations there are, by service and status."""

from __future__ import annotations

import click

from holdfast.cli import client
from holdfast.cli.output import admin_option, json_option, print_json, table

_NOW = ("running", "suspended", "queued", "scheduled", "backing-off", "paused", "completed")
_EVER = ("invoked", "succeeded", "failed", "cancelled", "killed")


@click.command()
@admin_option
@json_option
def statistics(admin_url: str, as_json: bool) -> None:
    """Count invocations by service: how many there are now, by status, and how many there ever were, by outcome."""
    shown = client.admin(admin_url, "GET", "/statistics")
    if as_json:
        print_json(shown)
        return
    rows = [*shown["services"].items(), *([("TOTAL", shown["totals"])] if len(shown["services"]) > 1 else [])]
    table(
        ("SERVICE", *(name.upper() for name in (*_NOW, *_EVER))),
        ((name, *(row["by_status"][each] for each in _NOW), *(row[each] for each in _EVER)) for name, row in rows),
        empty="No invocations.",
    )
