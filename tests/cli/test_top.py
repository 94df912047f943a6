"""`holdfast top`: what it makes of two readings, how it draws them, and how it behaves in a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from holdfast.cli import client, top, top_text
from holdfast.cli.client import Failed, Response, Unanswered
from holdfast.cli.top import Reader
from holdfast.cli.top_frame import make_frame, percentile_ms
from holdfast.cli.top_readings import Reading, Readings
from tests.cli.running import Cli, running, three_nodes
from tests.cluster.harness import PATIENCE_S

STATUSES = ("running", "queued", "suspended", "scheduled", "backing-off", "paused", "completed")
EVER = ("invoked", "succeeded", "failed", "cancelled", "killed", "attempts", "attempts_failed", "steps")


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with running(tmp_path_factory.mktemp("node")) as cli:
        yield cli


def node(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "state": "active", "condition": "ok", "connected": True, "replicas": 2, "version": "0.2.0",
        "uptime_s": 60, "disk": {"free": 50, "total": 100}, "memory_bytes": 2**20, "loop_lag_ms": 1, "cpu_ms": 1000,
        "latency": {"accept": {"bounds_s": [0.01, 0.1], "counts": [0, 0, 0], "sum_s": 0.0}}, "error": None, **more,
    }  # fmt: skip


def figures(**given: int) -> dict[str, Any]:
    statuses = {name: given.pop(name.replace("-", "_"), 0) for name in STATUSES}
    return {"by_status": statuses, **{name: given.get(name, 0) for name in EVER}}


def reading(at_s: float, nodes: list[dict[str, Any]], services: dict[str, dict[str, Any]], **more: Any) -> Reading:
    partitions = more.pop("partitions", [{"partition": 0, "leader": "n1", "members": ["n1"], "epoch": 0, "here": True}])
    totals = figures()
    for each in services.values():
        totals["by_status"] = {name: totals["by_status"][name] + each["by_status"][name] for name in STATUSES}
        totals |= {name: totals[name] + each[name] for name in EVER}
    cluster = {
        "cluster": "orders", "answered_by": "n1", "nodes": nodes, "partitions": partitions, "replication": 3,
        "pauses": more.pop("pauses", []), "changing": None,
    }  # fmt: skip
    return Reading(
        **{
            "at": "2026-11-18T04:00:00Z", "at_s": at_s, "cluster": cluster, "deployments": [], "in_doubt": 0, "approvals": None,
            "statistics": {"services": services, "totals": totals}, "warnings": [], "notes": [], **more,
        }
    )  # fmt: skip


def text(frame: dict[str, Any], width: int = 120, height: int | None = None, sort: str = "busiest") -> list[str]:
    return [top_text.plain(line) for line in top_text.draw(frame, width, height, sort)]


# -- what follows from two readings


def test_rates_are_differences_between_two_readings() -> None:
    first = reading(10.0, [node("n1")], {"trips": figures(invoked=100, succeeded=90, failed=5, steps=10)})
    later = reading(
        12.0,
        [node("n1", cpu_ms=2000)],
        {"trips": figures(invoked=120, succeeded=100, failed=6, steps=50, running=3), "new": figures(invoked=4)},
    )

    alone, frame = make_frame(None, first), make_frame(first, later)

    assert alone["throughput"] is None and alone["latency"] is None and alone["services"][0]["started_per_s"] is None
    assert frame["throughput"]["started_per_s"] == 12.0 and frame["throughput"]["failed_per_s"] == 0.5
    assert frame["throughput"]["completed_per_s"] == 5.5 and frame["throughput"]["steps_per_s"] == 20.0
    assert [(each["name"], each["started_per_s"]) for each in frame["services"]] == [("trips", 10.0), ("new", 2.0)]
    assert frame["nodes"][0]["cpu_percent"] == 50.0
    assert json.dumps(frame)


def test_a_node_that_was_restarted_does_not_count_for_once() -> None:
    def histogram(*counts: int) -> dict[str, Any]:
        return {"accept": {"bounds_s": [0.01, 0.1], "counts": [*counts], "sum_s": 0.0}}

    first = reading(0.0, [node("n1", latency=histogram(0, 0, 0)), node("n2", latency=histogram(9, 0, 0))], {})
    later = reading(1.0, [node("n1", latency=histogram(0, 4, 0)), node("n2", latency=histogram(1, 0, 0), cpu_ms=1)], {})

    frame = make_frame(first, later)

    assert frame["latency"]["accept"] == {"count": 4, "p50_ms": 55.0, "p99_ms": 99.1}
    assert frame["nodes"][1]["cpu_percent"] is None


@pytest.mark.parametrize(
    ("counts", "part", "expected"),
    [([0, 0, 0], 0.5, None), ([10, 0, 0], 0.5, 5.0), ([0, 10, 0], 1.0, 100.0), ([1, 0, 99], 0.5, 100.0)],
)
def test_a_percentile_lies_in_its_bucket(counts: list[int], part: float, expected: float | None) -> None:
    assert percentile_ms([0.01, 0.1], counts, part) == expected


def test_partitions_with_the_same_problem_are_shown_together() -> None:
    dead = node("n3", connected=False, condition="unreachable", disk=None, memory_bytes=None, loop_lag_ms=None,
                latency=None, cpu_ms=None, uptime_s=None)  # fmt: skip
    partitions = [
        {"partition": 0, "leader": "n1", "members": ["n1", "n2", "n3"], "follower_lag": {"n2": 5000, "n3": 9000}},
        {"partition": 1, "leader": "n3", "members": ["n1", "n2", "n3"]},
        {"partition": 2, "leader": None, "members": ["n1", "n2"], "snapshot": {"error": "the store is down"}},
        {"partition": 3, "leader": "n2", "members": ["n1", "n2", "n4"]},
    ]
    nodes = [node("n1"), node("n2"), dead, node("n4")]

    found = make_frame(None, reading(0.0, nodes, {}, partitions=partitions))["partitions"]

    assert found["count"] == 4
    assert {each["problem"]: each["partitions"] for each in found["problems"]} == {
        "2 of 3 replicas answer: not that of n3": [0, 1],
        "n2 lacks more than 1000 entries": [0],
        "the leader n3 does not answer, and there is no other yet": [1],
        "no leader": [2],
        "2 of 3 replicas": [2],
        "snapshot: the store is down": [2],
    }


def test_what_needs_a_human_is_named_with_the_command_that_shows_it() -> None:
    pause = {"service": "shop", "key": None, "by": "ada", "reason": "the provider is down", "since": ""}
    now = reading(
        0.0,
        [node("n1")],
        {"trips": figures(paused=2, backing_off=1)},
        pauses=[pause],
        in_doubt=100,
        approvals=3,
        warnings=["the disk of n2 is full", "service shop is paused; `holdfast resume --service shop` ends it"],
        deployments=[
            {"id": "dp_1", "uri": "http://a", "in_flight": 0, "health": {"status": "ok", "nodes": []}},
            {"id": "dp_2", "uri": "http://b", "in_flight": 4, "health": {"status": "down", "nodes": [
                {"node": "n1", "down_since": "2026-11-18T04:00:00Z", "error": "connection refused", "restraint": None},
            ]}},
        ],
    )  # fmt: skip

    shown = "\n".join(text(make_frame(None, now), width=200))

    assert "2 paused: holdfast invocations list --status paused" in shown
    assert "100 or more in doubt: holdfast waiting --kind in-doubt" in shown
    assert "3 approvals wait: holdfast approvals list" in shown
    assert "1 endpoint failing: holdfast deployments list" in shown
    assert "1 retry later" in shown and "paused shop by ada: the provider is down" in shown
    assert "the disk of n2 is full" in shown and "holdfast resume" not in shown
    assert "1 well" in shown and re.search(r"http://b \(4 in flight\) down for .* \(n1\): connection refused", shown)


def test_a_part_that_cannot_be_read_is_unknown_and_not_zero() -> None:
    frame = make_frame(
        None, reading(0.0, [node("n1")], {}, statistics=None, deployments=None, notes=["no statistics: x"])
    )

    shown = text(frame)

    assert shown[1] == "no statistics: x"
    assert "Invocations  unknown" in shown and "Endpoints    unknown" in shown and shown[-1] == "Services: unknown"


def test_a_node_that_fails_needs_a_human() -> None:
    nodes = [node("n1"), node("n2", condition="unreachable", connected=False), node("n3", condition="disk full")]

    assert "Attention    n2, n3 failing: holdfast cluster status, holdfast logs --level warning" in text(
        make_frame(None, reading(0.0, nodes, {}))
    )
    assert "Attention    nothing needs you" in text(make_frame(None, reading(0.0, [node("n1")], {})))


# -- how it is drawn


@pytest.mark.parametrize("width", [60, 61, 72, 80, 100, 132, 250])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    nodes = [node("n1"), node("a-node-with-quite-a-long-name-of-its-own", error="connection refused " * 9)]
    services = {f"服务-{number}-{'x' * number * 7}": figures(running=number, invoked=1) for number in range(9)}
    frame = make_frame(None, reading(0.0, nodes, services, warnings=["w" * 300, "a\x1b[2Jb\nc"], notes=["n" * 300]))

    for height in (None, 1, 5, 24):
        lines = text(frame, width, height)
        assert all(cell_len(line) <= width for line in lines)
        assert height is None or len(lines) <= height
    assert "\x1b" not in "".join(text(frame, 400))
    assert all(name in "".join(text(frame, width)) for name in ("SERVICE", "ACTIVE", "NODE", "STATE", "LEADS"))


def test_a_long_name_hides_no_figures() -> None:
    services = {"short": figures(running=1), "x" * 200: figures(running=2)}

    lines = text(make_frame(None, reading(0.0, [node("n1")], services)), 120)

    [head] = [line for line in lines if line.startswith("SERVICE")]
    assert all(title in head for title in ("RUNNING", "QUEUED", "BACKING OFF", "PAUSED", "FAILED/S"))
    [cut] = [line for line in lines if line.startswith("xxx")]
    assert len(cut.split()[0]) >= 32 and cut.split()[0].endswith("…"), "it has the room that is left"


def test_one_approval_is_not_called_several() -> None:
    def attention(count: int) -> str:
        lines = text(make_frame(None, reading(0.0, [node("n1")], {}, approvals=count)))
        return next(line for line in lines if line.startswith("Attention"))

    assert attention(1) == "Attention    1 approval waits: holdfast approvals list"
    assert attention(2) == "Attention    2 approvals wait: holdfast approvals list"


def test_services_that_do_not_fit_are_counted() -> None:
    frame = make_frame(None, reading(0.0, [node("n1")], {f"s{number:02}": figures() for number in range(50)}))

    lines = text(frame, 80, 24)

    assert len(lines) == 24
    [head] = [place for place, line in enumerate(lines) if line.startswith("SERVICE")]
    assert lines[-1] == f"and {50 - (24 - head - 2)} more"


def test_services_are_sorted_as_asked() -> None:
    first = reading(0.0, [node("n1")], {name: figures() for name in ("a", "b", "c")})
    later = reading(
        1.0, [node("n1")], {"a": figures(running=5), "b": figures(invoked=9), "c": figures(invoked=1, failed=1)}
    )
    frame = make_frame(first, later)

    def order(sort: str) -> str:
        return "".join(line[0] for line in text(frame, sort=sort)[-3:])

    assert [order(sort) for sort in top_text.SORTS] == ["bca", "abc", "cab", "abc"]


# -- against nodes


def test_one_frame_is_text_or_json(cli: Cli) -> None:
    id_ = cli.ok("send", "agent/wait").strip()
    cli.reaches(id_, "suspended")

    shown = cli.ok("top", "--once", "--every", "0.2")
    frame = cli.json("top", "--every", "0.2")

    assert "suspended 1" in shown and "n1" in shown and "agent" in shown and "\x1b" not in shown
    assert cli.ok("top", "--every", "0.2").startswith("Holdfast "), "stdout is no terminal"
    assert frame["invocations"]["suspended"] == 1 and frame["asked"] == "n1" and frame["interval_s"] >= 0.2
    assert frame["nodes"][0]["cpu_percent"] is not None and frame["throughput"]["started_per_s"] == 0.0


def test_no_node_at_all_is_an_error(cli: Cli) -> None:
    result = cli.run("top", "--once", "--admin-url", "http://127.0.0.1:1")

    assert result.exit_code == 1 and "no node answers at http://127.0.0.1:1" in result.stderr


def test_another_node_is_asked_when_one_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_token", None)
    with three_nodes(tmp_path) as (cluster, loop):
        url = cluster.seats["n1"].node.doors.urls.admin
        readings = Readings(url)
        while len(readings._names) < 3:  # Nodes announce their addresses soon after they start.
            first = readings.read()
        asyncio.run_coroutine_threadsafe(cluster.seats["n1"].kill(), loop).result(PATIENCE_S)

        second, third = readings.read(), readings.read()
        frame = make_frame(first, second)

        assert "node n1 does not answer, asking n2" in second.notes
        assert second.cluster["answered_by"] == "n2"
        assert "node n1 does not answer, asking n2" not in third.notes, "it asks n2 from now on"
        assert text(frame)[1].startswith("node n1 does not answer")


def test_a_token_of_a_profile_follows_to_the_other_nodes_but_not_from_https_to_http(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_token", "hf_a_b")
    monkeypatch.setattr(client, "_token_urls", ("https://n1:9070",))
    client.extend_token(["https://n2:9070", "http://n3:9070"])

    assert "Authorization" in client._with_token("https://n2:9070", None)
    assert "Authorization" not in client._with_token("http://n3:9070", None)
    monkeypatch.setattr(client, "_token_urls", ())
    client.extend_token(["https://n2:9070"])
    assert client._token_urls == (), "a token that was given for this command goes to every address"


def test_the_loopback_address_of_another_machine_is_not_asked() -> None:
    readings = Readings("http://10.0.0.1:9070")
    nodes = [node("n1", admin_url="http://127.0.0.1:9070"), node("n2", admin_url="http://127.0.0.1:9070"),
             node("n3", admin_url="http://10.0.0.3:9070"), node("n4", admin_url=None)]  # fmt: skip

    readings._learn({"answered_by": "n1", "nodes": nodes})

    assert readings._names == {"http://10.0.0.1:9070": "n1", "http://10.0.0.3:9070": "n3"}


def test_no_address_is_asked_in_clear_text_when_the_first_one_was_asked_over_https() -> None:
    readings = Readings("https://10.0.0.1:9070")
    nodes = [node("n1"), node("n2", admin_url="http://10.0.0.2:9070"), node("n3", admin_url="https://10.0.0.3:9070")]

    readings._learn({"answered_by": "n1", "nodes": nodes})

    assert readings._names == {"https://10.0.0.1:9070": "n1", "https://10.0.0.3:9070": "n3"}


@pytest.mark.parametrize(
    ("status", "body", "found"),
    [
        (200, {"approvals": [{}, {}], "cursor": None}, 2),
        (404, {"message": "there is nothing"}, None),
        (503, {"message": "x"}, None),
    ],
)
def test_approvals_are_counted_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, status: int, body: Any, found: int | None
) -> None:
    answers = {
        "/cluster": {"answered_by": "n1", "nodes": []}, "/statistics": {}, "/deployments": {"deployments": []},
        "/waiting": {"waiting": [{}]}, "/health": {"status": "ok"},
    }  # fmt: skip

    def ask(url: str, method: str, where: str, **more: Any) -> Response:
        code, shown = (status, body) if where == "/approvals" else (200, answers[where])
        return Response(code, {}, json.dumps(shown).encode())

    monkeypatch.setattr(client, "ask", ask)
    seen = Readings("http://127.0.0.1:1").read()

    assert (seen.approvals, seen.in_doubt) == (found, 1)
    assert seen.notes == (["no approvals: x (503)"] if status == 503 else [])


def test_no_answer_from_any_node_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*arguments: Any, **more: Any) -> Any:
        raise Unanswered("nobody")

    readings = Readings("http://10.0.0.1:9070")
    readings._learn({"answered_by": "n1", "nodes": [node("n2", admin_url="http://10.0.0.2:9070")]})
    monkeypatch.setattr(client, "ask", silent)

    with pytest.raises(Unanswered, match="node n1 does not answer, asking n2; node n2 does not answer"):
        readings.read()


def test_a_token_that_only_one_node_knows_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = json.dumps({"message": "the token is not valid"}).encode()

    def ask(url: str, *arguments: Any, **more: Any) -> Response:
        if url == "http://10.0.0.1:9070":
            raise Unanswered("nobody")
        return Response(401, {}, refused)

    readings = Readings("http://10.0.0.1:9070")
    readings._learn({"answered_by": "n1", "nodes": [node("n2", admin_url="http://10.0.0.2:9070")]})
    monkeypatch.setattr(client, "ask", ask)

    with pytest.raises(Unanswered, match="n1 does not answer, asking n2; node n2 refuses: the token is not valid"):
        readings.read()
    monkeypatch.setattr(client, "ask", lambda *arguments, **more: Response(401, {}, refused))
    with pytest.raises(Failed, match="the token is not valid") as ended:
        readings.read()
    assert not isinstance(ended.value, Unanswered), "the node that was asked all the time knows it no more"


def test_a_note_stays_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "NOTE_S", PATIENCE_S)
    notes = iter([["node n1 does not answer, asking n2"]])

    class Told(Readings):
        def read(self) -> Reading:
            return reading(0.0, [node("n1")], {}, notes=next(notes, []))

    def shown() -> list[str]:
        """The notes of the next frame."""
        before = reader.frame
        deadline = time.monotonic() + PATIENCE_S
        while reader.frame is before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert reader.frame is not None
        found: list[str] = reader.frame["notes"]
        return found

    reader = Reader(Told("http://127.0.0.1:1"), 0.1)
    try:
        shown()
        assert shown() == ["node n1 does not answer, asking n2"]
        monkeypatch.setattr(top, "NOTE_S", 0.0)
        shown()
        assert shown() == []
    finally:
        reader.stop()


# -- in a terminal


class Pty:
    """A command in a terminal of its own."""

    def __init__(self, cli: Cli, *arguments: str, **environ: str) -> None:
        self.main, other = pty.openpty()
        self.other = other
        self.resize(80, 24)
        self.settings = termios.tcgetattr(other)
        env = {**os.environ, **cli.environ, "TERM": "xterm", **environ}
        env.pop("COLUMNS", None), env.pop("LINES", None)
        command = [sys.executable, "-m", "holdfast", "top", *arguments]
        self.process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=env)
        self.seen = ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, wanted: str) -> None:
        while wanted not in self.seen:
            readable, _, _ = select.select([self.main], [], [], PATIENCE_S)
            assert readable, self.seen
            self.seen += os.read(self.main, 65536).decode(errors="replace")

    def press(self, keys: str) -> None:
        self.seen = ""
        os.write(self.main, keys.encode())

    def ended(self) -> int:
        code = self.process.wait(PATIENCE_S)
        os.set_blocking(self.main, False)
        with suppress(OSError):
            while piece := os.read(self.main, 65536):
                self.seen += piece.decode(errors="replace")
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.main)
        os.close(self.other)


@contextmanager
def terminal(cli: Cli, *arguments: str, **environ: str) -> Iterator[Pty]:
    made = Pty(cli, *arguments, **environ)
    try:
        yield made
    finally:
        made.close()


def test_keys_sort_pause_and_quit_and_the_terminal_is_restored(cli: Cli) -> None:
    with terminal(cli, "--every", "0.2") as shown:
        shown.until("q quits")
        assert shown.seen.startswith("\x1b[?1049h") and "\x1b[2J" not in shown.seen, (
            "nothing is cleared, so nothing flickers"
        )
        shown.press("s")
        shown.until("(active first)")
        shown.press("p")
        shown.until("The display is paused")
        shown.resize(61, 30)
        shown.press("p")
        shown.until("(active first)")
        # The last line of a frame has no end of line: the next frame begins at the top.
        lines = re.split(r"\r\n|\x1b\[H", shown.seen)
        longest = max(len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)) for line in lines)
        assert longest <= 61
        shown.press("q")

        assert shown.ended() == 0
        assert shown.seen.endswith("\x1b[?25h\x1b[?1049l")
        assert termios.tcgetattr(shown.other) == shown.settings


def test_a_terminal_that_does_not_know_its_size_is_one_of_80_columns(cli: Cli) -> None:
    reading, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    command = [sys.executable, "-m", "holdfast", "top", "--every", "0.2"]
    environ = {**os.environ, **cli.environ, "TERM": "xterm", "PYTHONIOENCODING": "iso-8859-1"}
    process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=environ)
    seen = ""
    try:
        while "SERVICE" not in seen and "No services" not in seen:
            readable, _, _ = select.select([reading], [], [], PATIENCE_S)
            assert readable and process.poll() is None, seen
            seen += os.read(reading, 65536).decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(reading)
        os.close(other)


def test_ctrl_z_gives_the_screen_back_and_the_shell_can_go_on(cli: Cli) -> None:
    with terminal(cli, "--every", "3600") as shown:
        shown.until("q quits")
        shown.press("")
        shown.process.send_signal(signal.SIGTSTP)
        shown.until("\x1b[?1049l")
        os.waitpid(shown.process.pid, os.WUNTRACED)  # It has stopped.
        assert termios.tcgetattr(shown.other) == shown.settings
        shown.press("")
        shown.process.send_signal(signal.SIGCONT)
        shown.until("q quits")
        shown.press("q")

        assert shown.ended() == 0


def test_an_answer_of_another_form_ends_it_with_an_explanation(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Readings) -> Reading:
        raise KeyError("nodes")

    monkeypatch.setattr(Readings, "read", read)
    reader = Reader(Readings("http://127.0.0.1:1"), 0.1)
    reader._thread.join(PATIENCE_S)

    with pytest.raises(KeyError):  # The command line makes a sentence of it.
        reader.check()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_restores_the_terminal(cli: Cli, number: signal.Signals, code: int) -> None:
    with terminal(cli, "--every", "0.2", NO_COLOR="1") as shown:
        shown.until("q quits")
        assert not re.search(r"\x1b\[[0-9;]*m", shown.seen), "NO_COLOR"
        shown.process.send_signal(number)

        assert shown.ended() == code
        assert shown.seen.endswith("\x1b[?25h\x1b[?1049l")
        assert termios.tcgetattr(shown.other) == shown.settings
