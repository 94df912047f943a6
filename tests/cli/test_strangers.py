"""The answers of an address that is not a node: redirects, other JSON, and text that a terminal would obey."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from holdfast.cli.main import main
from holdfast.sdk import CallFailed, Client, SyncClient

TOKEN = "hf_a_secret"


class Stranger(ThreadingHTTPServer):
    """Answers everything alike, and keeps what it was sent."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = (status, headers, body)
        self.seen: list[tuple[str, str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Stranger

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.command, self.path, self.headers.get("Authorization")))
        status, headers, body = self.server.answer
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 - the name that http.server looks up

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def stranger(status: int = 200, body: Any = None, **headers: str) -> Iterator[Stranger]:
    with Stranger(status, headers, json.dumps(body).encode()) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def run(url: str, *arguments: str) -> Result:
    environ = {"HOLDFAST_ADMIN_URL": url, "HOLDFAST_INGRESS_URL": url, "HOLDFAST_TOKEN": TOKEN}
    return CliRunner().invoke(main, arguments, env=environ)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("command", [("services", "list"), ("call", "trips/book", "{}")], ids=" ".join)
def test_a_redirect_is_an_error_and_the_token_goes_no_further(command: tuple[str, ...], status: int) -> None:
    with stranger(body={}) as other, stranger(status, Location=f"{other.url}/x") as first:
        done = run(first.url, *command)

    assert done.exit_code == 1
    assert f"redirect to {other.url} ({status})" in done.stderr and "use that address" in done.stderr
    assert other.seen == [] and len(first.seen) == 1


@pytest.mark.parametrize("location", ["/login", "http://[", "http://h\x1b[31m/", "https://ann:hush@", "javascript:x"])
def test_a_redirect_to_no_other_host_is_an_error_too(location: str) -> None:
    with stranger(302, Location=location) as first:
        done = run(first.url, "services", "list")

    assert done.exit_code == 1 and "redirect (302)" in done.stderr
    assert "\x1b" not in done.stderr and "hush" not in done.stderr


def test_clients_follow_no_redirect_either() -> None:
    with (
        stranger(body={}) as other,
        stranger(302, Location=f"{other.url}/x") as first,
        SyncClient(first.url, token=TOKEN) as client,
        pytest.raises(CallFailed, match=other.url) as refused,
    ):
        client.call("trips/book", {})

    assert refused.value.code == 302 and "give that address to the client" in str(refused.value)
    assert other.seen == [] and [method for method, _, _ in first.seen] == ["POST"]


async def test_asynchronous_clients_follow_no_redirect_either() -> None:
    with stranger(body={}) as other, stranger(302, Location=f"{other.url}/x") as first:
        async with Client(first.url, token=TOKEN) as client:
            with pytest.raises(CallFailed, match=other.url) as refused:
                await client.call("trips/book", {})

    assert refused.value.code == 302 and "give that address to the client" in str(refused.value)
    assert other.seen == [] and [method for method, _, _ in first.seen] == ["POST"]


#: Codes of a terminal, what turns the direction of writing, and half of a surrogate pair, as JSON can name it.
EVIL = "a\x1b]0;owned\x07\x9b31m\x7f\u202e\u2066\ud800b"
SHOWN = "a\\x1b]0;owned\\x07\\x9b31m\\x7f\\u202e\\u2066\\ud800b"
APPROVAL = {
    "id": "apr_1", "title": EVIL, "status": EVIL, "choices": [EVIL, "no"], "assignee": EVIL, "service": "s", "handler": "h",
    "key": EVIL, "invocation": "inv_1", "step": 1, "since": "2026-11-18T04:00:00Z", "due_at": None, "reminded_at": None,
    "payload": {EVIL: EVIL}, "editable": True,
    "decision": {"choice": EVIL, "by": {"id": None, "name": EVIL}, "at": EVIL, "comment": EVIL, "payload": [EVIL]},
}  # fmt: skip


def harmless(text: str) -> bool:
    return not any(
        (ord(each) < 32 and each not in "\n\t") or 127 <= ord(each) < 160 or each in "\u202e\u2066\ud800"
        for each in text
    )


@pytest.mark.parametrize("as_json", [(), ("--json",)])
@pytest.mark.parametrize(
    ("command", "body"),
    [
        (("state", "get", "s", "k"), {"state": {EVIL: EVIL}, "held_by": None}),
        (("state", "get", "s", "k"), {"state": {"n": [EVIL]}, "held_by": None}),
        (("invocations", "journal", "i"), {"steps": [
            {"index": 1, "op": "run", "argument": {"name": EVIL}, "abandoned": False, "completed_as": None,
             "outcome": {"failure": {"message": EVIL}}}], "next": None}),
        (("audit",), {"acts": [
            {"at": "now", "principal": {"id": "a", "name": EVIL}, "address": None, "action": EVIL, "targets": {EVIL: EVIL},
             "outcome": "failed", "error": EVIL, "unrecorded": 0}], "newest": 1, "cursor": None}),
        (("invocations", "resume", "i"), {"status": "resumed", "message": EVIL}),
        (("approvals", "list"), {"approvals": [APPROVAL], "cursor": None}),
        (("approvals", "show", "apr_1"), APPROVAL),
        (("approvals", "approve", "apr_1"), {**APPROVAL, "status": "Decided"}),
        (("approvals", "approve", "apr_1"), {**APPROVAL, "status": "AlreadyDecided"}),
    ],
)  # fmt: skip
def test_control_characters_of_clients_are_shown_as_escapes(
    command: tuple[str, ...], body: Any, as_json: tuple[str, ...]
) -> None:
    with stranger(body=body) as node:
        done = run(node.url, *command, *as_json)

    assert done.exit_code == 0, done.output
    assert harmless(done.output), done.output
    assert "owned" in done.output
    if as_json:
        assert EVIL in str(json.loads(done.stdout)) or repr(EVIL)[1:-1] in str(json.loads(done.stdout))


def test_further_lines_of_a_title_do_not_look_like_fields_of_the_approval() -> None:
    shown = {**APPROVAL, "title": "Refund?\nstatus    decided", "status": "waiting", "decision": None}
    with stranger(body=shown) as node:
        lines = run(node.url, "approvals", "show", "apr_1").stdout.splitlines()

    assert [line for line in lines if line.startswith("status")] == ["status    waiting"]
    assert lines[:2] == ["title     Refund?", "          status    decided"]


@pytest.mark.parametrize("encoding", ["iso-8859-1", "ascii", "utf-8"])
@pytest.mark.parametrize("command", ["list", "show", "list --json", "show --json"])
def test_a_terminal_of_another_encoding_gets_escapes(encoding: str, command: str) -> None:
    title = "caf\u00e9 \u2713 \U0001f600 \ud800"
    shown = {**APPROVAL, "title": title, "choices": ["yes"], "assignee": None, "decision": None, "payload": title}
    name, *options = command.split()
    with stranger(body=shown if name == "show" else {"approvals": [shown], "cursor": None}) as node:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", "approvals", name, *(["apr_1"] if name == "show" else []), *options],
            env={**os.environ, "HOLDFAST_ADMIN_URL": node.url, "PYTHONIOENCODING": encoding},
            capture_output=True, timeout=60, check=False,
        )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, b"")
    if options:
        found = json.loads(done.stdout.decode(encoding))
        assert (found if name == "show" else found["approvals"][0])["title"] == title
    else:
        assert b"caf" in done.stdout and rb"\ud800" in done.stdout


@pytest.mark.parametrize("token", ["hf_a\nhf_b", "hf_a hf_b", "hf_\u00e9", "hf_\x07"])
def test_what_cannot_be_a_token_is_refused_and_not_repeated(token: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text(token)

    by_variable = CliRunner().invoke(main, ["services", "list"], env={"HOLDFAST_TOKEN": token})
    by_file = CliRunner().invoke(main, ["--token-file", str(file), "services", "list"])

    for done, where in ((by_variable, "HOLDFAST_TOKEN"), (by_file, f"--token-file: {file}")):
        assert done.exit_code == 1 and f"{where} must be a token and nothing else" in done.stderr
        assert "hf_" not in done.output


@pytest.mark.parametrize("command", [("call", "s/h"), ("sql", "select 1"), ("services", "list")], ids=" ".join)
def test_ctrl_c_while_a_node_is_silent_exits_with_130(command: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", *command],
            env={**os.environ, "HOLDFAST_ADMIN_URL": url, "HOLDFAST_INGRESS_URL": url},
            stderr=subprocess.PIPE,
        )
        silent.settimeout(60)
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(1)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)

    assert (process.returncode, said) == (130, b"\n")


def test_control_characters_in_an_error_are_shown_as_escapes() -> None:
    with stranger(404, {"message": EVIL, "hint": EVIL, "details": [EVIL]}) as node:
        done = run(node.url, "services", "list")

    assert done.exit_code == 1 and harmless(done.output) and done.stderr.count(SHOWN) == 3


def test_the_outcome_of_a_call_is_escaped_for_a_terminal_alone() -> None:
    said, shown = EVIL.replace("\ud800", ""), SHOWN.replace("\\ud800", "")
    reading, terminal = os.openpty()
    with stranger(body=said) as node:
        node.answer = (200, {}, said.encode())
        assert run(node.url, "call", "trips/book").stdout == said + "\n"

        subprocess.run(
            [sys.executable, "-m", "holdfast", "call", "trips/book", "--ingress-url", node.url],
            stdout=terminal, check=True, timeout=60,
        )  # fmt: skip
    printed = os.read(reading, 1000).decode()
    os.close(terminal)
    os.close(reading)

    assert printed.strip() == shown


@pytest.mark.parametrize("body", [{}, [], None, 7, "text", {"tokens": 7, "invocations": None, "id": []}], ids=repr)
@pytest.mark.parametrize(
    "command",
    [
        ("token", "list"),
        ("token", "create", "ada", "--role", "read"),
        ("invocations", "list"),
        ("invocations", "describe", "i"),
        ("invocations", "journal", "i"),
        ("invocations", "resume", "i"),
        ("cluster", "status"),
        ("services", "list"),
        ("deployments", "list"),
        ("deployments", "register", "http://127.0.0.1:9080"),
        ("state", "get", "s", "k"),
        ("audit",),
        ("identity", "show"),
        ("send", "trips/book", "{}"),
    ],
    ids=" ".join,
)
def test_other_json_is_not_the_answer_of_a_node(command: tuple[str, ...], body: Any) -> None:
    with stranger(body=body) as other:
        done = run(other.url, *command)

    which = "ingress" if command[0] == "send" else "admin API"
    assert done.exit_code == 1 and f"{other.url} is not the {which} of a Holdfast node" in done.stderr, done.output
