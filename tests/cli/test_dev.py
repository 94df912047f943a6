"""`holdfast dev` as a new user runs it: real processes, killed and changed while they work."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.authority import make_authority, make_for_node
from holdfast.cli.develop import sample, snapshot
from holdfast.cli.run import _dev_config
from holdfast.cluster.config import BadConfig
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 90.0

APP = """
import asyncio, pathlib
from holdfast.sdk import Context, Service

work = Service("work")
seen = pathlib.Path(__file__).with_name("seen")

@work.handler
async def go(ctx: Context, name: str) -> str:
    for step in ("one", "two", "three"):
        await ctx.run(step, did, step)
    return "VERSION " + name

async def did(step: str) -> None:
    with seen.open("a") as file:
        file.write(step + "\\n")
    await asyncio.sleep(0.5)

app = [work]
"""


class Dev:
    def __init__(
        self, folder: Path, *more: str, app: str = "things:app", environment: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.port, self.admin_port, self.handlers_port = free_ports(3)
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "dev", "--app", app, "--port", str(self.port), "--admin-port",
             str(self.admin_port), "--handlers-port", str(self.handlers_port), *more],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def until(self, pattern: str, times: int = 1) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while len(found := re.findall(pattern, self.text)) < times:
            assert time.monotonic() < deadline, f"{pattern} not seen in:\n{self.text}"
            assert self.process.poll() is None, f"ended:\n{self.text}"
            time.sleep(0.05)
        return str(found[-1])

    def handlers_pid(self, times: int = 1) -> int:
        return int(self.until(r"Process (\d+) serves", times))

    def call(self, path: str, value: Any) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", data=json.dumps(value).encode())
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return json.load(response)


@contextmanager
def dev(folder: Path, *more: str, **settings: Any) -> Iterator[Dev]:
    made = Dev(folder, *more, **settings)
    try:
        yield made
    finally:
        with suppress(ProcessLookupError):
            made.process.kill()
        made.process.wait()
        made._reader.join()
        assert made.process.stdout is not None
        made.process.stdout.close()


def gone(pid: int) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_killed_handler_process_restarts_and_continues_at_the_right_step(tmp_path: Path) -> None:
    (tmp_path / "things.py").write_text(APP)
    seen = tmp_path / "seen"
    with dev(tmp_path) as it:
        pid = it.handlers_pid()
        answers: list[Any] = []
        caller = threading.Thread(target=lambda: answers.append(it.call("work/go", "ann")))
        caller.start()
        deadline = time.monotonic() + PATIENCE_S
        while not (seen.exists() and "two" in seen.read_text()):
            assert time.monotonic() < deadline, it.text
            time.sleep(0.01)

        os.kill(pid, signal.SIGKILL)
        caller.join(PATIENCE_S)

        assert answers == ["VERSION ann"]
        assert seen.read_text().split() == ["one", "two", "two", "three"]
        assert it.handlers_pid(2) != pid
        assert "ended by SIGKILL" in it.text


def test_requests_before_the_handlers_are_registered_get_503_with_retry_after(tmp_path: Path) -> None:
    (tmp_path / "things.py").write_text(
        "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)\n" + APP
    )
    # The settings of a node count here too.
    with dev(tmp_path, environment={"HOLDFAST_BODY_BYTES_MAX": "1 KiB"}) as it:
        it.until("Ctrl-C stops it")

        with pytest.raises(urllib.error.HTTPError) as refused:
            it.call("work/go", "ann")

        assert (refused.value.code, refused.value.headers["Retry-After"]) == (503, "1")
        assert "the handlers of things:app are not registered yet" in json.load(refused.value)["message"]
        (tmp_path / "go").touch()
        it.handlers_pid()
        assert it.call("work/go", "ann") == "VERSION ann"
        with pytest.raises(urllib.error.HTTPError) as too_large:
            it.call("work/go", "a" * 1024)
        assert too_large.value.code == 413


def test_options_of_dev_override_variables_which_override_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_INGRESS", "0.0.0.0:1234")
    monkeypatch.setenv("HOLDFAST_PARTITIONS", "7")
    monkeypatch.setenv("HOLDFAST_SNAPSHOT_KEEP", "5")
    nothing: dict[str, Any] = dict.fromkeys(("host", "port", "admin_port", "data", "partitions"))

    plain = _dev_config(**nothing)
    given = _dev_config(**{**nothing, "port": 4321, "partitions": 2, "data": Path("there")})

    assert (str(plain.ingress), str(plain.admin), plain.partitions) == ("0.0.0.0:1234", "127.0.0.1:9070", 7)
    assert (plain.node, plain.cluster, plain.data, plain.snapshot_keep) == ("dev", "dev", Path(".holdfast"), 5)
    assert (str(given.ingress), given.partitions, given.data) == ("0.0.0.0:4321", 2, Path("there"))
    monkeypatch.setenv("HOLDFAST_FOUNDERS", "dev,n2")
    with pytest.raises(BadConfig, match="holdfast dev runs a single node"):
        _dev_config(**nothing)


def test_a_changed_file_is_served_and_a_broken_one_awaits_a_correction(tmp_path: Path) -> None:
    things = tmp_path / "things.py"
    things.write_text(APP)
    with dev(tmp_path) as it:
        it.handlers_pid()
        things.write_text("def broken(\n")
        it.until("Waiting for one of its files to change")
        assert "SyntaxError" in it.text
        things.write_text(APP.replace("VERSION", "CHANGED"))
        it.until("Process .* serves", 2)

        assert it.call("work/go", "ann") == "CHANGED ann"


def test_ctrl_c_stops_everything_and_accepted_work_continues_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "things.py").write_text(APP)
    with dev(tmp_path) as it:
        pid = it.handlers_pid()
        it.call("work/go/send", "ann")
        it.process.send_signal(signal.SIGINT)
        assert it.process.wait(PATIENCE_S) == 0, it.text
        assert gone(pid)
        assert "Traceback" not in it.text
    with dev(tmp_path, "--handlers-port", str(it.handlers_port)) as again:
        again.handlers_pid()
        deadline = time.monotonic() + PATIENCE_S
        seen = tmp_path / "seen"
        while not (seen.exists() and "three" in seen.read_text()):
            assert time.monotonic() < deadline, again.text
            time.sleep(0.05)


def test_a_killed_node_takes_its_handlers_with_it(tmp_path: Path) -> None:
    (tmp_path / "things.py").write_text(APP)
    with dev(tmp_path) as it:
        pid = it.handlers_pid()
        it.process.kill()

        assert gone(pid)


def test_the_line_to_try_works(tmp_path: Path) -> None:
    (tmp_path / "things.py").write_text(APP.replace("asyncio.sleep(0.5)", "asyncio.sleep(0)"))
    with dev(tmp_path) as it:
        line = it.until("Try:  (curl .*)")
        url = re.findall(r"http://\S+", line)[0]
        body = re.findall(r"-d '?(.*?)'?$", line)[0]

        assert it.call(url.split("/", 3)[3], json.loads(body)) == "VERSION ..."


def test_the_line_to_try_works_with_tokens_and_tls(tmp_path: Path) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    (folder / "things.py").write_text(APP.replace("asyncio.sleep(0.5)", "asyncio.sleep(0)"))
    make_authority(folder, "test")
    made = make_for_node(folder, "n1", ("127.0.0.1", "localhost"))
    settings = {
        "HOLDFAST_AUTH": "tokens",
        "HOLDFAST_INGRESS_TLS_CERT": str(made.cert),
        "HOLDFAST_INGRESS_TLS_KEY": str(made.key),
    }
    with dev(folder, environment=settings) as it:
        line = it.until("Try:  (curl .*)")
        done = subprocess.run(["sh", "-c", line], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)

        assert json.loads(done.stdout) == "VERSION ...", (line, done)
        assert "hf_node" not in line


def test_a_port_or_directory_in_use_is_reported_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "things.py").write_text(APP)

    def fails(*more: str) -> str:
        answer = subprocess.run(
            [sys.executable, "-m", "holdfast", "dev", *more], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert answer.returncode == 1, answer
        assert "Traceback" not in answer.stderr
        return answer.stderr

    with dev(tmp_path) as it:
        it.handlers_pid()
        taken = fails("--data", "other", "--port", str(it.port), "--admin-port", "0")
        used = fails("--port", "0", "--admin-port", "0")
        handlers = fails("--app", "things:app", "--handlers-port", str(it.handlers_port), "--port", "0")
        strange = fails("--data", ".", "--port", "0", "--admin-port", "0")

    assert "a port is already in use" in taken and "--port" in taken
    assert f"in use by process {it.process.pid}" in used
    assert "--handlers-port" in handlers
    assert "not a data directory of Holdfast" in strange


def test_only_python_files_of_the_project_are_watched(tmp_path: Path) -> None:
    for name in ("a.py", "pkg/b.py", ".venv/c.py", "node_modules/d.py", "e.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")

    assert set(snapshot(tmp_path)) == {"a.py", "pkg/b.py"}


def test_a_sample_fits_its_schema() -> None:
    schema = json.loads(
        textwrap.dedent(
            """
            {"$ref": "#/$defs/Trip", "$defs": {"Trip": {"type": "object", "required": ["to", "days"], "properties":
            {"to": {"type": "string"}, "days": {"type": "integer", "minimum": 3}, "tags": {"type": "array"}}}}}
            """
        )
    )

    assert sample(schema, schema) == {"to": "...", "days": 3}
    assert sample({"anyOf": [{"type": "array", "items": {"enum": ["x"]}}, {"type": "null"}]}, {}) == ["x"]
    assert sample({"$ref": "#/$defs/loop", "$defs": {"loop": {"$ref": "#/$defs/loop"}}}, {"$defs": {}}) is not None
