"""`holdfast events`: changes as they happen, over reconnections."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import click

from holdfast.cli import client, complete
from holdfast.cli.client import Unanswered
from holdfast.cli.output import admin_option, json_option

#: A node shows a sign of life every 15 seconds.
SILENCE_S: Final = 45.0
RETRY_S: Final = 1.0


class Event(NamedTuple):
    kind: str
    data: dict[str, Any]


def follow(admin_url: str, wanted: Mapping[str, Any], where: str = "/events") -> Iterator[Event]:
    """Events from now on, without an end. It connects again, after the last event, for as long as it takes. Raises Failed if
    the first attempt does."""
    last: str | None = None
    is_connected = is_waiting = False
    while True:
        try:
            kind, data, id_ = "", "", last
            headers = {"Accept": "text/event-stream", **({} if last is None else {"Last-Event-ID": last})}
            for line in client.lines(admin_url, where, parameters=wanted, headers=headers, silence_s=SILENCE_S):
                name, _, value = line.partition(": ")
                if name == "id":
                    id_ = value
                elif name == "event":
                    kind = value
                elif name == "data":
                    data = value
                elif not line:
                    last = id_  # Not before the block is whole: its event would be lost if the connection broke now.
                    if kind:
                        is_connected, is_waiting = True, False
                        yield Event(kind, json.loads(data))
                    kind = ""
        except Unanswered as error:
            if not is_connected:
                raise
            if not is_waiting:
                click.echo(client.printable(f"{error.message}; trying again"), err=True)
                is_waiting = True
        time.sleep(RETRY_S)


@click.command()
@click.option("--service", shell_complete=complete.services, help="Events of invocations of this service.")
@click.option("--handler", help="Events of invocations of this handler.")
@click.option("--key", help="Events of invocations of this key of a virtual object or workflow.")
@click.option("--id", "id_", metavar="ID", shell_complete=complete.invocations, help="Events of this invocation.")
@click.option("--status", help="Events of invocations that came to one of these statuses, separated by commas.")
@click.option(
    "--kinds", help="Of events, separated by commas: invocation, cluster, deployments, approvals. Default: all."
)
@admin_option
@json_option
def events(id_: str | None, admin_url: str, as_json: bool, **chosen: str | None) -> None:
    """Print changes as they happen: of invocations, the cluster, deployments and the inbox of approvals.

    It goes on until it is interrupted, and connects again after the last event when the connection breaks. With --json, each
    line is one event.

    \b
    holdfast events --kinds invocation --status paused,backing-off
    holdfast events --service trips --json
    """
    try:
        for kind, data in follow(admin_url, {**chosen, "id": id_}):
            if kind != "hello":
                click.echo(json.dumps({"event": kind, **data}) if as_json else client.printable(line_of(kind, data)))
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None


def line_of(kind: str, data: dict[str, Any]) -> str:
    if kind == "reset":
        return f"Events were missed: {data['reason']}. Read the current state: holdfast invocations list"
    if kind != "invocation":
        return {
            "cluster": "The cluster has changed: see holdfast cluster status",
            "deployments": "Deployments have changed: see holdfast deployments list",
            "approvals": "The inbox has changed: see holdfast approvals list",
        }.get(kind, kind)
    key = f"/{data['key']}" if data["key"] is not None else ""
    attempt = f"attempt {data['attempts']}" if data["attempts"] else ""
    target = f"{data['service']}{key}/{data['handler']}"
    return f"{data['since']}  {data['id']}  {data['end'] or data['status']:<11}  {target}  {attempt}".rstrip()
