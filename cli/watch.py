"""A list that stays current in a terminal: it is read again when an event says that something has changed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.cli.client import Failed, Unanswered, printable
from holdfast.cli.events import follow
from holdfast.cli.output import console

PAUSE_S: Final = 1.0  # Between two readings, however much changes.
AGE_S: Final = 5.0  # Ages grow although nothing changes.
_BESIDE: Final = 3  # Lines of the screen that are not rows.


def keep_current(admin_url: str, events: Mapping[str, str | None], read: Callable[[int], Table]) -> None:
    """Show what `read` gives, cut to its limit of rows, until it is interrupted. `events`: filters of those that matter."""
    if not sys.stdout.isatty():
        raise click.UsageError("--watch needs a terminal: for a script, use `holdfast events --json`")
    screen = console()
    try:
        with Live(console=screen, screen=True, auto_refresh=False) as live:
            for _ in changes(admin_url, {**events, "kinds": "invocation"}):
                live.update(_shown(read, max(screen.height - _BESIDE, 1)), refresh=True)
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None


def _shown(read: Callable[[int], Table], most: int) -> Group:
    try:
        made = read(most)
    except Unanswered as error:
        return Group(Text(printable(f"{error.message}; trying again")))
    return Group(
        made if made.row_count else Text("No invocations match."),
        Text(f"{time.strftime('%H:%M:%S')}  Ctrl-C ends.", style="dim"),
    )


def changes(admin_url: str, wanted: dict[str, str | None]) -> Iterator[None]:
    """Now, soon after something has changed, and now and then. Raises Failed if the events cannot be read."""
    news = threading.Event()
    failed: list[Failed] = []

    def listen() -> None:
        try:
            for _ in follow(admin_url, wanted):
                news.set()
        except Failed as error:
            failed.append(error)
            news.set()

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield
        time.sleep(PAUSE_S)
        news.wait(AGE_S)
        if failed:
            raise failed[0]
        news.clear()  # Before reading: what changes meanwhile is read once more.
