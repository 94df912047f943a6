"""The steps of a journal for people: what each one does, how long it took, and how it ended."""

from __future__ import annotations

import json
from typing import Any

import click

from holdfast.cli.output import table
from holdfast.cluster.durations import format_duration_ms


def print_journal(journal: dict[str, Any]) -> None:
    table(
        ("STEP", "OP", "WHAT", "BEGAN", "TOOK", "ATTEMPT", "OUTCOME"),
        (
            (step["index"], step["op"], what(step), step.get("began_at"), took(step), step.get("attempt"), outcome(step))
            for step in journal["steps"]
        ),
        empty="The journal is empty.",
    )  # fmt: skip
    if journal["next"] is not None:
        click.echo(f"There are more steps: holdfast invocations journal --start {journal['next']}", err=True)


def took(step: dict[str, Any]) -> str | None:
    duration = step.get("duration_ms")
    return format_duration_ms(duration) if duration is not None and step["op"] != "input" else None


def what(step: dict[str, Any]) -> str:
    argument = {name: value for name, value in step["argument"].items() if value not in (None, "", {})}
    name = argument.pop("name", None)
    if step["op"] in ("call", "send") and "service" in argument:
        key = f"/{argument.pop('key')}" if "key" in argument else ""
        name = f"{argument.pop('service')}{key}/{argument.pop('handler', '')}"
    trace = argument.pop("trace", None)
    if trace:
        argument["at"] = trace[-1]
    rest = ", ".join(f"{field} {short(value)}" for field, value in argument.items())
    return " ".join(part for part in (name, rest) if part)


def outcome(step: dict[str, Any]) -> str:
    if step["abandoned"]:
        return "abandoned"
    outcome = step["outcome"]
    if outcome is None:
        return "" if step["completed_as"] or step["op"] in _WITHOUT_OUTCOME else "waiting"
    if "failure" in outcome:
        return f"failed: {outcome['failure']['message']}"
    return short(outcome["value"])


_WITHOUT_OUTCOME = ("set", "clear", "clear_all", "send", "cancel", "resolve_awakeable")


def short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else text[:97] + "..."
