"""`--wait` and `--timeout`: a command that began something waits until it is done, and its exit code says whether it was.

The work is the cluster's. Neither the end of `--timeout` nor Ctrl-C stops it, and both say so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import click

from holdfast.cli.client import Failed, Unanswered, printable
from holdfast.cli.output import Function
from holdfast.cluster.durations import format_duration_ms, parse_duration_ms

LOOK_S: Final = 0.3
#: How long nobody may answer before waiting is given up.
SILENT_S: Final = 60.0
#: As `timeout` of coreutils has it.
TIMED_OUT_EXIT_CODE: Final = 124
INTERRUPTED_EXIT_CODE: Final = 130


class Look(NamedTuple):
    """What a look found: whether the work is done, and what is left."""

    done: bool
    left: str = ""


class TimedOut(Failed):
    exit_code = TIMED_OUT_EXIT_CODE


def _read_timeout(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = parse_duration_ms(text) / 1000
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if not context.params.get("wait"):
        raise click.UsageError("--timeout needs --wait")
    return seconds


def wait_options(until: str, leaves: str = "the work running") -> Callable[[Function], Function]:
    """Add --wait and --timeout to a command. `until` completes "Wait until", `leaves` "Ctrl-C leaves"."""

    def add(command: Function) -> Function:
        timeout = click.option(
            "--timeout",
            metavar="DURATION",
            callback=_read_timeout,
            help=f"With --wait: give up after this long (30s, 10m), with exit code {TIMED_OUT_EXIT_CODE}.",
        )
        wait = click.option("--wait", is_flag=True, is_eager=True, help=f"Wait until {until}. Ctrl-C leaves {leaves}.")
        return wait(timeout(command))

    return add


def wait_until(look: Callable[[], Look], *, work: str, timeout_s: float | None, goes_on: str = "") -> None:
    """Look again and again, and show on stderr what is left. `work` is what goes on, as in "draining n2"; `goes_on` says
    it in other words.

    Raises TimedOut, Failed if nobody answers for long, and Exit if the user interrupts it."""
    shown = _Progress()
    goes_on = goes_on or f"the cluster goes on {work}"
    began_s = heard_s = time.monotonic()
    left = ""
    try:
        while True:
            try:
                found = look()
                heard_s, left = time.monotonic(), found.left
                if found.done:
                    return
                shown.show(f"{work}: {left}")
            except Unanswered as error:
                if time.monotonic() > heard_s + SILENT_S:
                    raise Failed(f"{error.message}; {goes_on}", error.hint) from None
                shown.show(f"{work}: {error.message}; trying again")
            if timeout_s is not None and time.monotonic() - began_s >= timeout_s:
                after = format_duration_ms(round(timeout_s * 1000))
                raise TimedOut(f"not done after {after}: {left or 'nobody answered'}", goes_on)
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        shown.clear()
        click.echo(f"Interrupted: {goes_on}.", err=True)
        raise click.exceptions.Exit(INTERRUPTED_EXIT_CODE) from None
    finally:
        shown.clear()


class _Progress:
    """One line on stderr, overwritten in a terminal, repeated elsewhere only when it says something new."""

    def __init__(self) -> None:
        self._last = ""
        self._is_terminal = sys.stderr.isatty()

    def show(self, text: str) -> None:
        text = printable(text)
        if text == self._last:
            return
        self._last = text
        click.echo(f"\r\x1b[K{text}" if self._is_terminal else text, err=True, nl=not self._is_terminal, color=True)

    def clear(self) -> None:
        if self._is_terminal and self._last:
            click.echo("\r\x1b[K", err=True, nl=False, color=True)
        self._last = ""


def node_of(shown: Any, name: str) -> Any:
    """A node in the answer of GET /cluster. Raises Failed."""
    for node in shown["nodes"]:
        if node["name"] == name:
            return node
    raise Failed(f"there is no node {name!r:.100} any more", "`holdfast cluster status` lists the nodes")
