"""`holdfast audit`: who changed what in the cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

import click

from holdfast.cli import client
from holdfast.cli.output import admin_option, json_option, print_json, table

LOOK_S: Final = 1.0
PAGE_MAX: Final = 1000


@click.command()
@click.option(
    "--since", metavar="TIME", help="At or after this time, or a duration before now: 2h, 2026-11-18T04:00:00Z."
)
@click.option("--until", metavar="TIME", help="Before this time, or a duration before now.")
@click.option("--principal", metavar="TOKEN", help="By the token with this id or name.")
@click.option("--action", help="With this name: kill, register, create_token, resolve_awakeable, ...")
@click.option("--outcome", help="done, refused, failed, unknown, or a status: 404.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Number of acts to show.")
@click.option("--follow", "-f", is_flag=True, help="Keep running, and print new acts as they are recorded.")
@admin_option
@json_option
def audit(
    since: str | None,
    until: str | None,
    principal: str | None,
    action: str | None,
    outcome: str | None,
    limit: int,
    follow: bool,
    admin_url: str,
    as_json: bool,
) -> None:
    """List who changed what, when, from where, and with which outcome. Needs the role admin.

    Acts are requests that changed something, and requests that were refused with 401 or 403. The cluster keeps the newest
    10,000. With --json and --follow, each line is one act.
    """
    if follow and until is not None:
        raise click.UsageError("--until and --follow exclude each other")
    wanted = {"since": since, "until": until, "principal": principal, "action": action, "outcome": outcome}
    shown, newest = _newest(admin_url, wanted, limit)
    if not follow:
        if as_json:
            print_json({"acts": shown})
        else:
            table(
                ("TIME", "WHO", "FROM", "ACTION", "TARGETS", "OUTCOME"),
                (_row(each) for each in shown),
                empty="No acts.",
            )
        return
    for each in chain(reversed(shown), _coming(admin_url, wanted, newest)):
        click.echo(json.dumps(each) if as_json else client.printable("  ".join(_row(each))))


def _newest(admin_url: str, wanted: dict[str, str | None], limit: int) -> tuple[list[dict[str, Any]], int]:
    """The newest acts, and the sequence number after which others follow."""
    shown: list[dict[str, Any]] = []
    cursor, newest = None, None
    while True:
        parameters = {**wanted, "limit": min(limit - len(shown), PAGE_MAX), "cursor": cursor}
        page = client.admin(admin_url, "GET", "/audit", parameters=parameters)
        newest = page["newest"] if newest is None else newest
        shown += page["acts"]
        cursor = page["cursor"]
        if cursor is None or len(shown) >= limit:
            return shown, newest


def _coming(admin_url: str, wanted: dict[str, str | None], after: int) -> Iterator[dict[str, Any]]:
    """Acts as they are recorded, until the user has seen enough."""
    while True:
        page = client.admin(admin_url, "GET", "/audit", parameters={**wanted, "after": after, "limit": PAGE_MAX})
        yield from page["acts"]
        if len(page["acts"]) == PAGE_MAX:
            after = page["acts"][-1]["sequence"]
            continue
        after = max(after, page["newest"])
        time.sleep(LOOK_S)


def _row(act: dict[str, Any]) -> tuple[str, ...]:
    principal = act["principal"]
    who = f"{principal['name']} ({principal['id']})" if principal["id"] else principal["name"]
    targets = " ".join(f"{name}={value}" for name, value in act["targets"].items())
    outcome = act["outcome"] if act["outcome"] == "done" else f"{act['outcome']} {act['error'] or ''}".rstrip()
    if act["unrecorded"]:
        outcome += f" (after {act['unrecorded']} acts that only the log of {act['node']} has)"
    return (act["at"], who, act["address"] or "", act["action"], targets, outcome)
