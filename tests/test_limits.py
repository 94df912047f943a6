"""The limit of tests/limits.py, in a run of pytest whose tests hang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SCRIPT = """
import asyncio, subprocess, uvloop, pytest

async def wait_in_a_coroutine():
    await asyncio.Event().wait()

async def start_and_wait():
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("left", left.pid)
    try:
        await wait_in_a_coroutine()
    finally:
        print("cleaned up")

@pytest.mark.limit(1)
def test_asyncio():
    asyncio.run(start_and_wait())

@pytest.mark.limit(1)
def test_uvloop():
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(start_and_wait())

@pytest.fixture
def orphan():
    # The shell ends at once: the process has another parent then.
    done = subprocess.run("sleep 600 >/dev/null 2>&1 & echo $!", shell=True, capture_output=True, text=True)
    print("left", done.stdout)
    yield
    print("cleaned up")
    wait_in_a_teardown()

def wait_in_a_teardown():
    subprocess.run(["sleep", "600"])

@pytest.mark.limit(1, grace=1)
def test_teardown(orphan):
    subprocess.run(["sleep", "600"])

def test_after_them():
    pass
"""


def test_a_test_that_hangs_fails_with_its_stacks_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_hanging.py").write_text(SCRIPT)

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.limits", "-p", "no:cacheprovider", "."],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )

    for test in ("test_asyncio", "test_uvloop", "test_teardown"):
        assert f"{test} did not end within 1 s" in done.stdout, done.stdout
    stacks = done.stdout.split("Captured stderr")[1:]
    assert sum(" in wait_in_a_coroutine" in stack for stack in stacks) == 2, "one for each event loop"
    assert any("in wait_in_a_teardown" in stack for stack in stacks)
    assert done.stdout.count("\ncleaned up") >= 3
    assert "3 failed, 1 passed, 1 error" in done.stdout, "the test after them ran"
    left = {int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("left ")}
    assert len(left) == 3
    assert [pid for pid in left if is_running(pid)] == []


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
