"""`holdfast top`: the cluster at a glance, kept current."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any, Final

import click

from holdfast.cli import top_text
from holdfast.cli.client import Failed, Unanswered
from holdfast.cli.output import admin_option, json_option, print_json
from holdfast.cli.top_frame import make_frame
from holdfast.cli.top_readings import Reading, Readings

#: How often the terminal is looked at: its keys, and its size.
LOOK_S: Final = 0.1
#: After this long without an answer, the screen says for what it waits.
PATIENCE_S: Final = 2.0
#: How long a note stays on the screen.
NOTE_S: Final = 10.0
WIDTH_WITHOUT_TERMINAL: Final = 120


@click.command()
@click.option(
    "--every",
    metavar="SECONDS",
    default=2.0,
    show_default=True,
    type=click.FloatRange(0.2, 3600),
    help="Time between two readings.",
)
@click.option(
    "--once", is_flag=True, help="Print one frame as text and end. The default if standard output is no terminal."
)
@click.option(
    "--sort", type=click.Choice([*top_text.SORTS]), default="busiest", show_default=True, help="Which services first."
)
@admin_option
@json_option
def top(every: float, once: bool, sort: str, admin_url: str, as_json: bool) -> None:
    """Show nodes, partitions with problems, invocations, throughput, latencies, endpoints and services, kept current.

    Rates and latencies are those between two readings: --once and --json read twice, --every seconds apart. "accept" is
    Holdfast's own time until a new invocation is durable; "handler" is the time that attempts spend in handlers. CPU is in
    percent of one processor. When the node at --admin-url does not answer, another one is asked. Needs the role read.

    \b
    Keys: q quits, s sorts services differently, p pauses the display.
    """
    readings = Readings(admin_url)
    try:
        if as_json:
            print_json(_one(readings, every))
        elif once or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
            width = (sys.stdout.isatty() and os.get_terminal_size().columns) or WIDTH_WITHOUT_TERMINAL
            for line in top_text.draw(_one(readings, every), width, None, sort):
                click.echo(top_text.plain(line))
        else:
            _live(readings, every, sort)
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None


def _one(readings: Readings, every: float) -> dict[str, Any]:
    first = readings.read()
    time.sleep(every)
    return make_frame(first, readings.read())


class Reader:
    """Reads in a thread, so that keys work while a node is silent."""

    def __init__(self, readings: Readings, every: float) -> None:
        self.readings = readings
        self.frame: dict[str, Any] | None = None
        self.at_s = time.monotonic()  # Of the frame.
        self.problem = ""
        self.every = every
        self._noted: dict[str, float] = {}
        self._over = threading.Event()
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises what ended the thread, if something did."""
        if self._failed is not None:
            raise self._failed

    def stop(self) -> None:
        self._over.set()

    def _recent(self, notes: list[str]) -> list[str]:
        """A note of one reading stays for a while, so that it can be read."""
        now_s = time.monotonic()
        self._noted |= dict.fromkeys(notes, now_s)
        self._noted = {text: at_s for text, at_s in self._noted.items() if now_s - at_s < NOTE_S}
        return [*self._noted]

    def _run(self) -> None:
        before: Reading | None = None
        while not self._over.is_set():
            began_s = time.monotonic()
            try:
                now = self.readings.read()
                frame = make_frame(before, now)
                frame["notes"] = self._recent(now.notes)
            except Failed as error:
                if before is None or not isinstance(error, Unanswered):
                    self._failed = error
                    return
                self.problem = f"{error.message}; trying again"
            except Exception as error:  # An answer of another form.
                self._failed = error
                return
            else:
                self.frame, self.at_s, self.problem = frame, time.monotonic(), ""
                before = now
            self._over.wait(max(self.every - (time.monotonic() - began_s), 0.1))


def _live(readings: Readings, every: float, sort: str) -> None:
    from holdfast.cli.terminal import Terminal

    reader = Reader(readings, every)
    sorts = [*top_text.SORTS]
    is_paused, kept = False, None
    drawn: object = None
    with Terminal() as terminal:
        try:
            while True:
                reader.check()
                kept = kept if is_paused else reader.frame
                width, height = terminal.size
                wanted = (id(kept), width, height, sort, is_paused, _trouble(reader), terminal.entered)
                if wanted != drawn:
                    status = _status(reader, sort, is_paused=is_paused)
                    terminal.show(_screen(kept, width=width, height=height, sort=sort, status=status))
                    drawn = wanted
                match terminal.key(LOOK_S):
                    case "q" | "Q" | "\x04":
                        return
                    case "s":
                        sort = sorts[(sorts.index(sort) + 1) % len(sorts)]
                    case "p" | " ":
                        is_paused = not is_paused
        finally:
            reader.stop()


def _screen(frame: dict[str, Any] | None, *, width: int, height: int, sort: str, status: top_text.Line) -> list[str]:
    lines: list[top_text.Line] = [] if frame is None else top_text.draw(frame, width, max(height - 1, 1), sort)
    lines += [[] for _ in range(height - 1 - len(lines))]
    show = top_text.plain if os.environ.get("NO_COLOR") else top_text.styled
    return [show(top_text.cut(line, width)) for line in (*lines, status)][:height]


def _status(reader: Reader, sort: str, *, is_paused: bool) -> top_text.Line:
    if trouble := _trouble(reader):
        return [(trouble, top_text.WARN)]
    if is_paused:
        return [("The display is paused: p continues  q quits", top_text.WARN)]
    return [(f"q quits  s sorts services ({sort} first)  p pauses the display", top_text.DIM)]


def _trouble(reader: Reader) -> str:
    """Why the frame is old."""
    if reader.problem:
        return reader.problem
    waited_s = time.monotonic() - reader.at_s
    doing = reader.readings.doing
    return f"{doing} for {waited_s:.0f} s" if doing and waited_s > PATIENCE_S + reader.every else ""
