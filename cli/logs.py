"""`holdfast logs`: what the nodes wrote to their logs lately, and what they write now."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Final

import click

from holdfast.cli import client, complete
from holdfast.cli.events import follow as follow_events
from holdfast.cli.output import admin_option, json_option, print_json
from holdfast.cluster.log_level import LEVELS

LIMIT_MAX: Final = 1000
_COLOURS: Final = {"debug": "bright_black", "warning": "yellow", "error": "red", "critical": "red"}
#: What every record has; further fields follow the message.
_PLAIN: Final = frozenset({"time", "level", "logger", "message", "node", "error", "stack"})


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Keep running, and print new records as the nodes write them.")
@click.option(
    "--level", type=click.Choice(LEVELS), default="info", show_default=True, help="Records of this level or above."
)
@click.option(
    "--invocation", metavar="ID", shell_complete=complete.invocations, help="Records that name this invocation."
)
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="NAME",
    shell_complete=complete.nodes,
    help="Records of this node; may be repeated. Default: all.",
)
@click.option("--since", metavar="TIME", help="At or after: 10m (ago), 2026-11-18T04:00:00Z.")
@click.option("--until", metavar="TIME", help="Before: 10m (ago), 2026-11-18T04:00:00Z.")
@click.option(
    "--limit",
    "-n",
    default=200,
    show_default=True,
    type=click.IntRange(1, LIMIT_MAX),
    help="Show the newest, at most this many.",
)
@admin_option
@json_option
def logs(
    follow: bool,
    level: str,
    invocation: str | None,
    nodes: tuple[str, ...],
    since: str | None,
    until: str | None,
    limit: int,
    admin_url: str,
    as_json: bool,
) -> None:
    """Print the newest records of the logs of all nodes, oldest first. Needs the role admin.

    Each node keeps its newest records in memory while it runs: 2,000 records and 1 MiB. Standard error of the node has all
    of them. A node logs what its level allows: `holdfast log-level debug --for 10m` makes it say more for a while, also
    about each lost or failed attempt. With --json and --follow, each line is one record.

    \b
    holdfast logs --level warning --since 1h
    holdfast logs --follow --node n2
    holdfast logs --level debug --invocation inv_018f...
    """
    if follow and until is not None:
        raise click.UsageError("--until and --follow exclude each other")
    wanted = {
        "level": level,
        "invocation": invocation,
        "node": ",".join(nodes) or None,
        "since": since,
        "until": until,
        "limit": limit,
    }
    if follow:
        _follow(admin_url, wanted, as_json=as_json)
        return
    page = client.admin(admin_url, "GET", "/logs", parameters=wanted)
    if as_json:
        print_json(page)
        return
    for record in page["records"]:
        click.echo(shown(record))
    if not page["records"]:
        click.echo("No records match." if invocation or nodes or since or until else "No records.")
    if page["more"]:
        click.echo(f"There are older ones than these {len(page['records'])}: see --limit and --until.", err=True)
    for name in page["silent"]:
        click.echo(_silent(name), err=True)


def _follow(admin_url: str, wanted: dict[str, Any], *, as_json: bool) -> None:
    try:
        for kind, data in follow_events(admin_url, wanted, "/logs"):
            if kind == "record":
                click.echo(json.dumps(data) if as_json else shown(data))
            elif kind == "silent":
                click.echo(_silent(data["node"]), err=True)
            elif kind == "lost":
                click.echo(f"Some records of {data['node']} were dropped before they could be read.", err=True)
            sys.stdout.flush()
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None


def _silent(name: str) -> str:
    return f"{name} does not answer, or runs a release that keeps no records: its records are missing."


def shown(record: dict[str, Any]) -> str:
    """For people: one line, and a traceback below it."""
    level = record["level"]
    colour = None if os.environ.get("NO_COLOR") else _COLOURS.get(level)
    name = click.style(f"{level.upper():<7}", fg=colour) if colour else f"{level.upper():<7}"
    more = "".join(f"  {field}={value}" for field, value in record.items() if field not in _PLAIN)
    text = client.printable(f"{record['node']}  {record['logger']}: {record['message']}{more}")
    below = "".join(f"\n{client.printable(record[field])}" for field in ("error", "stack") if record.get(field))
    return f"{record['time']}  {name}  {text}" + below.replace("\n", "\n    ")
