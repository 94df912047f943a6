"""`holdfast events` against real nodes: its output, and that it goes on after a broken connection."""

from __future__ import annotations

import json
import os
import pty
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import client, watch
from holdfast.cli import events as module
from holdfast.cli.client import Failed, Unanswered
from holdfast.cli.events import follow, line_of
from tests.cli.running import Cli, running
from tests.cluster.harness import PATIENCE_S
from tests.ports import free_ports


class Followed:
    """`follow` in a thread of its own: it has no end."""

    def __init__(self, url: str, **wanted: str | None) -> None:
        self._found: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._run, args=(url, wanted), daemon=True).start()

    def _run(self, url: str, wanted: dict[str, str | None]) -> None:
        try:
            for event in follow(url, wanted):
                self._found.put(event)
        except Failed as error:
            self._found.put(error)

    def next(self) -> Any:
        return self._found.get(timeout=PATIENCE_S)

    def until(self, kind: str) -> Any:
        while (event := self.next()).kind != kind:
            pass
        return event


@pytest.fixture(autouse=True)
def followers_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`follow` has no end. A thread that went on would call what later tests put in place of `lines` and `time.sleep`."""

    def end(*_: Any, **__: Any) -> Iterator[str]:
        raise Failed("the test is over")

    before = {*threading.enumerate()}
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    yield
    with monkeypatch.context() as ending:
        ending.setattr(client, "lines", end)
        for thread in {*threading.enumerate()} - before:
            if thread.name.endswith(("(_run)", "(listen)")):
                thread.join(PATIENCE_S)
                assert not thread.is_alive()


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    with running(tmp_path) as cli:
        yield cli


def test_events_are_followed_with_filters(cli: Cli) -> None:
    followed = Followed(cli.environ["HOLDFAST_ADMIN_URL"], service="agent", kinds="invocation")
    assert followed.next().kind == "hello"

    cli.ok("send", "echo/say", "1")
    id_ = cli.ok("send", "agent/wait").strip()

    assert [followed.next().data["status"] for _ in range(2)] == ["running", "suspended"]
    cli.ok("invocations", "kill", id_)
    killed = followed.next()
    assert (killed.data["id"], killed.data["end"]) == (id_, "killed")


def test_a_broken_connection_is_continued_after_the_last_event(cli: Cli) -> None:
    followed = Followed(cli.environ["HOLDFAST_ADMIN_URL"], kinds="invocation")
    followed.next()
    first = cli.ok("send", "agent/wait").strip()
    assert [followed.next().data["id"] for _ in range(2)] == [first, first]

    streams = cli.at.node.doors.admin.exchange.streams
    cli.loop.call_soon_threadsafe(lambda: streams.end_all("the test"))
    assert cli.run("events").exit_code == 1, "it begins no more"
    second = cli.ok("send", "echo/say", "1").strip()
    cli.reaches(second, "completed")
    cli.loop.call_soon_threadsafe(streams.__init__)  # type: ignore[misc]

    hello = followed.next()
    assert (hello.kind, hello.data["resumed"]) == ("hello", True)
    assert followed.next().data["id"] == second


def test_an_event_that_was_cut_in_the_midst_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    answers = [
        ["id: 1", "event: hello", "data: {}", "", "id: 2", "event: cluster"],
        ["id: 3", "event: reset", "data: {}", ""],
    ]

    def lines(url: str, where: str, *, headers: dict[str, str], **_: Any) -> Iterator[str]:
        asked.append(headers.get("Last-Event-ID"))
        return iter(answers.pop(0))

    monkeypatch.setattr(client, "lines", lines)
    monkeypatch.setattr(module, "RETRY_S", 0)
    followed = follow("http://127.0.0.1", {})

    assert [next(followed).kind, next(followed).kind] == ["hello", "reset"]
    assert asked == [None, "1"]


def test_what_is_wrong_with_the_request_is_said_at_once(cli: Cli) -> None:
    result = cli.run("events", "--status", "done")

    assert result.exit_code == 1
    assert "there is no status 'done'" in result.stderr


def test_nobody_at_the_address_is_said_at_once() -> None:
    [port] = free_ports(1)

    with pytest.raises(Unanswered, match="no node answers"):
        next(follow(f"http://127.0.0.1:{port}", {}))


def test_the_command_prints_lines_for_people_and_for_scripts(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[str, Any] = {
        "id": "inv_1", "service": "trips", "handler": "book", "key": "k\x1b", "status": "completed", "end": "failed",
        "since": "2026-11-18T04:00:00.000Z", "attempts": 2, "created_at": "2026-11-18T04:00:00.000Z", "caller": None,
    }  # fmt: skip
    said = [("hello", {"node": "n1", "resumed": False}), ("invocation", shown), ("reset", {"reason": "too late"})]
    monkeypatch.setattr(module, "follow", lambda url, wanted: iter(said))

    lines = cli.ok("events").splitlines()
    rows = [json.loads(line) for line in cli.ok("events", "--json").splitlines()]

    assert lines[0] == "2026-11-18T04:00:00.000Z  inv_1  failed       trips/k\\x1b/book  attempt 2"
    assert lines[1].startswith("Events were missed: too late.")
    assert rows == [{"event": "invocation", **shown}, {"event": "reset", "reason": "too late"}]
    assert "holdfast cluster status" in line_of("cluster", {})


# -- a list that stays current


def test_a_list_is_read_again_when_something_has_changed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PAUSE_S", 0.0)
    monkeypatch.setattr(watch, "AGE_S", PATIENCE_S)
    found = watch.changes(cli.environ["HOLDFAST_ADMIN_URL"], {"kinds": "invocation"})
    next(found)  # At once,
    next(found)  # and when the events begin.

    cli.ok("send", "agent/wait")

    next(found)


def test_a_terminal_shows_the_list_until_it_is_interrupted(cli: Cli) -> None:
    """In a terminal of its own: a pseudo-terminal."""
    cli.ok("send", "agent/wait")
    main_end, other_end = pty.openpty()
    command = [sys.executable, "-m", "holdfast", "invocations", "list", "--watch", "--service", "agent"]
    environ = {**os.environ, **cli.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "20"}
    process = subprocess.Popen(command, stdin=other_end, stdout=other_end, stderr=other_end, env=environ)
    os.close(other_end)
    shown = b""
    try:
        while b"suspended" not in shown or b"Ctrl-C ends" not in shown:
            shown += os.read(main_end, 65536)
        id_ = cli.json("invocations", "list", "--service", "agent")["invocations"][0]["id"]
        cli.ok("invocations", "kill", id_)
        while b"killed" not in shown:
            shown += os.read(main_end, 65536)
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # The terminal is gone.
            while piece := os.read(main_end, 65536):
                shown += piece
        assert process.wait(PATIENCE_S) == 130, shown
        os.close(main_end)


def test_a_list_is_kept_current_in_a_terminal_alone(cli: Cli) -> None:
    for more in ((), ("--json",)):
        result = cli.run("invocations", "list", "--watch", *more)

        assert result.exit_code == 2
        assert "holdfast events --json" in result.stderr
