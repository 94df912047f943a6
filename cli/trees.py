"""`holdfast invocations describe --tree` and `holdfast invocations value`: calls below an invocation, and whole values."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import click

from holdfast.cli import client
from holdfast.cli.calls import print_body, shown_body
from holdfast.cli.output import admin_option, coloured, console, json_option, print_json
from holdfast.cluster.durations import format_duration_ms


def print_tree(tree: dict[str, Any], chosen: str) -> None:
    """The tree of calls, with the chosen invocation marked."""
    below: dict[str | None, list[dict[str, Any]]] = {}
    for node in tree["nodes"]:
        below.setdefault(node["parent"], []).append(node)
    [root] = [node for node in tree["nodes"] if node["id"] == tree["root"]]
    for line in _lines(root, below, chosen):
        console().print(line, soft_wrap=True)
    if not tree["complete"]:
        click.echo(f"The tree has more than these {len(tree['nodes'])} invocations.", err=True)


def _lines(root: dict[str, Any], below: dict[str | None, list[dict[str, Any]]], chosen: str) -> Iterator[str]:
    """Without recursion, because a chain of calls may be long."""
    left = [(root, "", "")]
    while left:
        node, before, indent = left.pop()
        yield f"{before}{_show(node, chosen)}"
        children = below.get(node["id"], [])
        following = []
        for index, child in enumerate(children):
            last = index == len(children) - 1
            following.append((child, f"{indent}{'└─ ' if last else '├─ '}", f"{indent}{'   ' if last else '│  '}"))
        left += reversed(following)


def _show(node: dict[str, Any], chosen: str) -> str:
    key = f"/{node['key']}" if node["key"] is not None else ""
    step = f"step {node['step']}: " if node["step"] is not None else ""
    target = coloured(f"{step}{node['service']}{key}/{node['handler']}")
    status = node["end"] or node["status"] or "removed"
    mark = "  ← this one" if node["id"] == chosen else ""
    return f"{target}  {node['id']}  {coloured(status)}{_lasted(node)}{mark}"


def _lasted(node: dict[str, Any]) -> str:
    if node["created_at"] is None:
        return ""
    began = datetime.fromisoformat(node["created_at"])
    ended = datetime.fromisoformat(node["completed_at"]) if node["completed_at"] else datetime.now(UTC)
    lasted = format_duration_ms(max(round((ended - began).total_seconds() * 1000), 0))
    return f" after {lasted}" if node["completed_at"] else f" for {lasted}"


@click.command()
@click.argument("id_", metavar="ID")
@click.argument("step", default="outcome")
@click.option("--input", "-i", "is_input", is_flag=True, help="What the step was given, instead of what it returned.")
@admin_option
@json_option
def value(id_: str, step: str, is_input: bool, admin_url: str, as_json: bool) -> None:
    """Print the whole value of a STEP, or of the outcome of the invocation ID. `describe` shortens large values.

    \b
    holdfast invocations value inv_... 3 > answer.json
    """
    where = client.path("invocations", id_, "steps", step, "value")
    answer = client.checked(client.ask(admin_url, "GET", where, parameters={"part": "input" if is_input else "output"}))
    print_json({"id": id_, "value": shown_body(answer.body)}) if as_json else print_body(answer.body)
