"""`holdfast invocations describe --tree` and `holdfast invocations value`: a tree of calls with steps, and whole values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import click

from holdfast.cli import client, complete
from holdfast.cli.calls import print_body, shown_body
from holdfast.cli.client import Failed
from holdfast.cli.journals import outcome, took, what
from holdfast.cli.output import admin_option, coloured, console, json_option, print_json
from holdfast.cluster.durations import format_duration_ms

#: Journals that are read for one tree, and steps that are shown of each. Of other invocations, only the calls are shown.
JOURNALS_MAX: Final = 50
STEPS_MAX: Final = 100


class _Branch(NamedTuple):
    text: str
    below: Sequence[_Branch] = ()


def print_tree(tree: dict[str, Any], chosen: str, admin_url: str) -> None:
    """The tree of calls with the steps of its invocations, and the chosen invocation marked."""
    for line in _lines(_branches(tree, chosen, admin_url)):
        console().print(line, soft_wrap=True)
    if not tree["complete"]:
        click.echo(f"The tree has more than these {len(tree['nodes'])} invocations.", err=True)


def _branches(tree: dict[str, Any], chosen: str, admin_url: str) -> _Branch:
    """Children come after their parents in the list, so it is read from its end."""
    journals = _journals(tree, chosen, admin_url)
    below: dict[str, list[tuple[dict[str, Any], _Branch]]] = {}
    made = _Branch("")
    for node in reversed(tree["nodes"]):
        calls = below.get(node["id"], [])[::-1]
        made = _Branch(_show(node, chosen), _steps(journals.get(node["id"], []), calls))
        below.setdefault(node["parent"], []).append((node, made))
    return made


def _journals(tree: dict[str, Any], chosen: str, admin_url: str) -> dict[str, list[dict[str, Any]]]:
    """The steps of the chosen invocation and of the first others."""
    known = [node["id"] for node in tree["nodes"] if node["status"] is not None]
    found = {}
    for id_ in sorted(known, key=lambda id_: id_ != chosen)[:JOURNALS_MAX]:
        try:
            where = client.path("invocations", id_, "journal")
            found[id_] = client.admin(admin_url, "GET", where, parameters={"start": 1, "limit": STEPS_MAX})["steps"]
        except Failed:
            continue  # It was removed since the tree was read.
    return found


def _steps(steps: list[dict[str, Any]], calls: list[tuple[dict[str, Any], _Branch]]) -> list[_Branch]:
    """The steps in their order, with the invocations that they began in the place of calls and sends."""
    rows = [(node["step"] or 0, branch) for node, branch in calls]
    shown = {node["step"] for node, _ in calls}
    rows += [(step["index"], _Branch(_step(step))) for step in steps if step["index"] not in shown]
    if len(steps) == STEPS_MAX:
        rows.append((steps[-1]["index"], _Branch("…")))
    return [branch for _, branch in sorted(rows, key=lambda row: row[0])]


def _step(step: dict[str, Any]) -> str:
    parts = (f"step {step['index']}: {step['op']}", what(step), took(step) or "", outcome(step))
    return coloured("  ".join(part for part in parts if part))


def _lines(root: _Branch) -> Iterator[str]:
    """Without recursion, because a chain of calls may be long."""
    left = [(root, "", "")]
    while left:
        branch, before, indent = left.pop()
        yield f"{before}{branch.text}"
        for index, child in reversed(list(enumerate(branch.below))):
            last = index == len(branch.below) - 1
            left.append((child, f"{indent}{'└─ ' if last else '├─ '}", f"{indent}{'   ' if last else '│  '}"))


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
@click.argument("id_", metavar="ID", shell_complete=complete.invocations)
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
