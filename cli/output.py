"""The output of commands: tables for people, JSON for scripts; and the options that all commands share."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from holdfast.cli.client import ADMIN_URL, INGRESS_URL, REVERSALS, SURROGATES, printable
from holdfast.cluster.durations import format_duration_ms

Function = TypeVar("Function", bound=Callable[..., Any])

admin_option = click.option(
    "--admin-url",
    envvar="HOLDFAST_ADMIN_URL",
    default=ADMIN_URL,
    show_default=True,
    help="The URL of the admin API of any node. Default: HOLDFAST_ADMIN_URL.",
)
ingress_option = click.option(
    "--ingress-url",
    envvar="HOLDFAST_INGRESS_URL",
    default=INGRESS_URL,
    show_default=True,
    help="The URL of the ingress of any node. Default: HOLDFAST_INGRESS_URL.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")

_COLOURS = {
    "running": "green",
    "suspended": "cyan",
    "backing-off": "yellow",
    "paused": "red",
    "queued": "blue",
    "scheduled": "blue",
    "succeeded": "green",
    "failed": "red",
    "killed": "red",
    "cancelled": "yellow",
}


def console() -> Console:
    """Created on use, so that it writes to the current stdout. Wide without a terminal, because grep needs whole lines."""
    wide = None if sys.stdout.isatty() else 240
    return Console(highlight=False, soft_wrap=False, width=wide, emoji=False, markup=True)


def size(count: int) -> str:
    """For people: 20.0 MiB."""
    if count < 1024:
        return f"{count} bytes"
    for unit in ("KiB", "MiB"):
        if count < 1024 * 1024:
            return f"{count / 1024:.1f} {unit}"
        count //= 1024
    return f"{count / 1024:.1f} GiB"


def counted(number: int, noun: str) -> str:
    """1 large value, 2 large values."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


#: Those of `printable` that JSON leaves as they are.
_JSON_CONTROLS = {code: f"\\u{code:04x}" for code in (*range(127, 160), *REVERSALS, *SURROGATES)}


def print_json(value: Any) -> None:
    click.echo(json_text(value))


def json_text(value: Any) -> str:
    """JSON escapes most control characters itself, and the others mean the same when they are escaped. So do all characters
    that standard output cannot write, because its encoding is not that of Unicode."""
    is_unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    return json.dumps(value, indent=2, ensure_ascii=not is_unicode).translate(_JSON_CONTROLS)


def write_anything() -> None:
    """Write characters that the encoding of the terminal lacks as escapes, rather than fail in the middle of a table."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def table(columns: Iterable[str], rows: Iterable[Iterable[Any]], *, empty: str) -> None:
    made = made_table(columns, rows)
    if made.row_count:
        console().print(made)
    else:
        click.echo(empty)


def made_table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, overflow="fold", no_wrap=column in ("ID", "STATUS", "AGE"))
    for row in rows:
        made.add_row(*(_cell(cell) for cell in row))
    return made


def fields(rows: Iterable[tuple[str, Any]]) -> None:
    """Name and value, one per line; empty values are left out."""
    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        if value is not None and value != "" and value != {} and value != []:
            made.add_row(_cell(name), _cell(value))
    console().print(made)


def _cell(value: Any) -> str:
    return coloured("" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def coloured(text: str) -> str:
    """As markup: statuses have a colour."""
    from rich.markup import escape

    colour = _COLOURS.get(text)
    return f"[{colour}]{text}[/]" if colour else escape(printable(text))


def age(text: str | None) -> str:
    """The time since a timestamp of the API."""
    if text is None:
        return ""
    try:
        then = datetime.fromisoformat(text)
    except ValueError:
        return text
    return format_duration_ms(max(int((datetime.now(UTC) - then).total_seconds() * 1000), 0))
