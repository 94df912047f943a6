"""`holdfast state keys|edit|queue|promises`: the keys of virtual objects and workflows, and what is in front of them."""

from __future__ import annotations

import json
import tempfile
from typing import Any

import click

from holdfast.cli import client, complete
from holdfast.cli.calls import state
from holdfast.cli.client import Failed
from holdfast.cli.output import admin_option, age, counted, fields, json_option, print_json, size, table

__all__ = ["state"]


@state.command()
@click.argument("service", shell_complete=complete.services)
@click.option("--prefix", help="Keys that begin with this text.")
@click.option(
    "--limit", default=100, show_default=True, type=click.IntRange(1, 100_000), help="Show at most this many."
)
@admin_option
@json_option
def keys(service: str, prefix: str | None, limit: int, admin_url: str, as_json: bool) -> None:
    """List the keys of a SERVICE that have state, promises or an invocation that holds them, in no particular order."""
    found: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        parameters = {"prefix": prefix, "limit": min(limit - len(found), 1000), "cursor": cursor}
        page = client.admin(admin_url, "GET", client.path("services", service, "keys"), parameters=parameters)
        found += page["keys"]
        cursor = page["cursor"]
        if cursor is None or len(found) >= limit:
            break
    if as_json:
        print_json({"keys": found, "more": cursor is not None})
        return
    table(
        ("KEY", "HELD BY", "WAITING", "VALUES", "SIZE", "PROMISES"),
        (
            (each["key"], each["held_by"], each["waiting"] or None, each["values"], size(each["bytes"]),
             each["promises"] or None)
            for each in found
        ),
        empty="No keys.",
    )  # fmt: skip
    if cursor is not None:
        click.echo(f"There are more than these {len(found)}: see --limit, or --prefix.", err=True)


@state.command()
@click.argument("service", shell_complete=complete.services)
@click.argument("key")
@admin_option
@json_option
def queue(service: str, key: str, admin_url: str, as_json: bool) -> None:
    """Show which invocation holds a KEY of a SERVICE, and which wait for it, in their order."""
    shown = client.admin(admin_url, "GET", client.path("services", service, key, "queue"))
    if as_json:
        print_json(shown)
        return
    holder = shown["holder"]
    if holder is None:
        click.echo(f"No invocation holds {service}/{key}.")
        return
    click.echo(client.printable(f"{holder['id']} ({holder['handler']}, {holder['status']}) holds {service}/{key}."))
    table(
        ("WAITING", "HANDLER", "AGE"),
        ((each["id"], each["handler"], age(each["created_at"])) for each in shown["waiting"]),
        empty="Nothing waits for it.",
    )
    if shown["more"]:
        click.echo(f"There are more than these {len(shown['waiting'])}.", err=True)


@state.command()
@click.argument("service", shell_complete=complete.services)
@click.argument("key")
@admin_option
@json_option
def promises(service: str, key: str, admin_url: str, as_json: bool) -> None:
    """List the promises of the workflow SERVICE with this KEY, with their outcomes."""
    shown = client.admin(admin_url, "GET", client.path("services", service, key, "promises"))
    if as_json:
        print_json(shown)
        return
    table(
        ("PROMISE", "OUTCOME"),
        ((each["name"], each["outcome"] if each["completed"] else "waiting") for each in shown["promises"]),
        empty="No promises.",
    )
    if shown["more"]:
        click.echo(f"There are more than these {len(shown['promises'])}.", err=True)


@state.command()
@click.argument("service", shell_complete=complete.services)
@click.argument("key")
@admin_option
@json_option
def edit(service: str, key: str, admin_url: str, as_json: bool) -> None:
    """Edit the state of one KEY of a SERVICE in an editor ($VISUAL or $EDITOR).

    The edit is refused if the values that you change have changed meanwhile.
    """
    where = client.path("services", service, key, "state")
    shown = client.admin(admin_url, "GET", where)
    if not shown["complete"]:
        raise Failed(f"the state of {service}/{key} is too large to edit as a whole", "use `holdfast state set`")
    before = shown["state"]
    text = click.edit(json.dumps(before, indent=2, ensure_ascii=False) + "\n", extension=".json")
    if text is None:
        click.echo("Nothing changed.")
        return
    body = _difference(before, _parse(text))
    if body is None:
        click.echo("Nothing changed.")
        return
    try:
        edited = client.admin(admin_url, "PUT", where, value=body)
    except Failed as error:
        raise Failed(error.message, f"{error.hint or 'try again'}; {_kept(text)}", error.details) from None
    if as_json:
        print_json(edited)
    else:
        fields(edited["state"].items())
        click.echo(f"Changed {counted(len(body['values']), 'value')}, removed {len(body['remove'])}.", err=True)


def _parse(text: str) -> dict[str, Any]:
    try:
        after = json.loads(text)
    except ValueError as error:
        raise Failed(f"the edited text is not JSON: {error}", _kept(text)) from None
    if not isinstance(after, dict):
        raise Failed("the edited text must be a JSON object: values by name", _kept(text))
    return after


def _kept(text: str) -> str:
    """Nobody types it twice."""
    with tempfile.NamedTemporaryFile("w", prefix="holdfast-state-", suffix=".json", delete=False) as file:
        file.write(text)
    return f"your text is in {file.name}"


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any] | None:
    """The request that changes one into the other; None: they are the same."""
    changed = {name: value for name, value in after.items() if name not in before or not _same(before[name], value)}
    removed = [name for name in before if name not in after]
    if not changed and not removed:
        return None
    return {
        "values": changed,
        "remove": removed,
        "expect": {name: before.get(name) for name in (*changed, *removed)},
    }


def _same(one: Any, other: Any) -> bool:
    """1 and true are different values, although Python finds them equal."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
