"""`holdfast sql`: query the cluster with SQL, once or at a prompt."""

from __future__ import annotations

import csv
import json
import sys
from contextlib import suppress
from typing import Any, Final

import click

from holdfast.cli import client
from holdfast.cli.client import Failed
from holdfast.cli.output import admin_option, counted, json_option, print_json, table

_SPARE_S: Final = 15.0  # for the answer, after the time of the query
_PROMPT: Final = "sql> "
_PROMPT_ON: Final = "...> "
_HELP: Final = """\
End a statement with a semicolon. \\tables lists the tables, \\columns TABLE the columns of one, \\q or Ctrl-D leaves.\
"""


@click.command()
@click.argument("statement", required=False)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with a header.")
@click.option(
    "--limit", default=1000, show_default=True, type=click.IntRange(1, 10_000), help="At most this many rows."
)
@click.option(
    "--timeout", "timeout_s", default=30.0, show_default=True, type=click.FloatRange(0.1, 120), help="Seconds."
)
@click.option("--fresh", is_flag=True, help="See everything acknowledged before, for a round trip to each leader.")
@click.option("--tables", "list_tables", is_flag=True, help="List the tables, or the columns of the table STATEMENT.")
@admin_option
@json_option
def sql(
    statement: str | None,
    as_csv: bool,
    limit: int,
    timeout_s: float,
    fresh: bool,
    list_tables: bool,
    admin_url: str,
    as_json: bool,
) -> None:
    """Query the cluster with one SELECT statement. Without one, read it from stdin, or prompt in a terminal.

    \b
    holdfast sql "select status, sum(count) from statistics group by status"
    holdfast sql "select id, failure_message from invocations where status = 'paused' order by created_ms desc"
    holdfast sql --tables invocations
    """
    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other")
    if list_tables:
        _show_tables(admin_url, statement, as_json=as_json)
        return

    def run(text: str) -> None:
        _run(
            text,
            admin_url,
            limit=limit,
            timeout_s=timeout_s,
            fresh=fresh,
            form="csv" if as_csv else "json" if as_json else "",
        )

    if statement is None and sys.stdin.isatty():
        _prompt(run, admin_url)
        return
    run(sys.stdin.read() if statement in (None, "-") else str(statement))


def _run(text: str, admin_url: str, *, limit: int, timeout_s: float, fresh: bool, form: str) -> None:
    asked = {"sql": text, "limit": limit, "timeout_s": timeout_s, "fresh": fresh}
    answer = client.ask(
        admin_url,
        "POST",
        "/query",
        body=json.dumps(asked).encode(),
        headers={"Content-Type": "application/json"},
        timeout_s=timeout_s + _SPARE_S,
    )
    found = client.checked(answer).json()
    names = [column["name"] for column in found["columns"]]
    if form == "json":
        print_json(found)
        return
    if form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([_plain(value) for value in row] for row in found["rows"])
    else:
        table(names, found["rows"], empty="No rows.")
        if found["rows"]:
            click.echo(f"{counted(len(found['rows']), 'row')} in {found['took_ms']} ms", err=True)
    if found["more"]:
        click.echo("There are more rows: see --limit, or narrow the query.", err=True)


def _plain(value: Any) -> Any:
    return value["base64"] if isinstance(value, dict) else value


def _show_tables(admin_url: str, name: str | None, *, as_json: bool) -> None:
    tables = client.admin(admin_url, "GET", "/query/tables")["tables"]
    if name is None:
        if as_json:
            print_json({"tables": tables})
            return
        table(("TABLE", "ABOUT"), ((each["name"], each["about"]) for each in tables), empty="")
        return
    known = next((each for each in tables if each["name"] == name), None)
    if known is None:
        raise Failed(f"there is no table {name!r}", f"there are: {', '.join(each['name'] for each in tables)}")
    if as_json:
        print_json(known)
        return
    columns = ((each["name"], each["type"], each["about"]) for each in known["columns"])
    table(("COLUMN", "TYPE", "ABOUT"), columns, empty="")


# -- the prompt ------------------------------------------------------------------------------------------------------


def _prompt(run: Any, admin_url: str) -> None:
    """Statements end with a semicolon. An error ends the statement, not the session."""
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` then edits lines and has a history
    click.echo(_HELP)
    lines: list[str] = []
    while True:
        try:
            line = input(_PROMPT_ON if lines else _PROMPT)
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo()
            lines = []
            continue
        if not lines and line.strip().startswith("\\"):
            if line.strip() in ("\\q", "\\quit"):
                return
            _guarded(lambda line=line: _command(line.split(), admin_url))
            continue
        lines.append(line)
        text = "\n".join(lines)
        if text.rstrip().endswith(";"):
            lines = []
            _guarded(lambda text=text: run(text))
        elif not text.strip():
            lines = []


def _command(words: list[str], admin_url: str) -> None:
    if words[0] in ("\\tables", "\\columns") and len(words) <= 2:
        _show_tables(admin_url, words[1] if len(words) == 2 else None, as_json=False)
    else:
        click.echo(_HELP)


def _guarded(step: Any) -> None:
    try:
        step()
    except Failed as error:
        error.show()
    except KeyboardInterrupt:
        click.echo("Interrupted: the node ends the query.", err=True)
