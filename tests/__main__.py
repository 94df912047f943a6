"""Runs of many tests: everything (`make test`), or what a contributor wants to know after each change (`make quick`).

Everything: the simulators only compute, since virtual time does not care how fast they are. The other tests mostly wait, for
real clocks, disks and processes. So the simulators run beside them, at the lowest priority, on the processor time that is left.

Quick: the rooms that are pure or nearly so, without the files that need seconds, in two processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Final

SIMULATORS: Final = "tests/sim"
PYTEST: Final = (sys.executable, "-m", "pytest", "-q")

#: Each tuple is the work of one process.
QUICK: Final = (("tests/statemachine", "tests/log", "tests/test_structure.py"), ("tests/sdk",))
#: Files in there that are not quick, and why.
NOT_QUICK: Final = {
    "tests/statemachine/test_total.py": "long random histories",
    "tests/statemachine/test_model.py": "long random programs",
    "tests/log/test_journal.py": "disks, a million entries",
    "tests/log/test_store.py": "disks, a million entries",
    "tests/log/test_rows.py": "disks, many entries",
    "tests/log/test_rows_model.py": "long random histories",
    "tests/log/test_link.py": "sockets",
    "tests/log/test_messages.py": "thousands of random frames",
    "tests/log/test_node.py": "sockets and disks",
    "tests/sdk/test_against_node.py": "a node",
    "tests/sdk/test_asgi.py": "servers of others",
    "tests/sdk/test_bounds.py": "large messages",
    "tests/sdk/test_client.py": "sockets",
    "tests/sdk/test_loop.py": "sockets",
    "tests/sdk/test_server.py": "sockets and processes",
    "tests/sdk/test_timers.py": "waits for real timers",
    "tests/sdk/test_typing.py": "a run of the type checker",
    "tests/sdk/test_watchdog.py": "processes that hang",
}


def main(arguments: Sequence[str]) -> int:
    # Of every process that a test starts, compiling our modules again would be the slowest part.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return quick(arguments[1:]) if arguments[:1] == ["--quick"] else everything(arguments)


def quick(arguments: Sequence[str]) -> int:
    ignored = [f"--ignore={name}" for name in NOT_QUICK]
    options = ["-p", "no:cacheprovider", "-m", "not slow", "--hypothesis-profile=quick", *ignored, *arguments]
    return run([[*PYTEST, *options, *part] for part in QUICK])


def run(commands: Sequence[Sequence[str]]) -> int:
    """All at once. What they say comes one after the other."""
    code = 0
    with ExitStack() as files:
        started = []
        for command in commands:
            output = files.enter_context(tempfile.TemporaryFile())
            started.append((subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT), output))
        for process, output in started:
            code = process.wait() or code
            output.seek(0)
            print(output.read().decode(errors="replace"), end="", flush=True)
    return code


def everything(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryFile() as output:
        beside = subprocess.Popen(
            [*PYTEST, "-p", "no:cacheprovider", "--durations=10", SIMULATORS],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # So that its workers can be ended with it.
            preexec_fn=lambda: os.nice(19),
        )
        try:
            code = subprocess.call([*PYTEST, "--durations=30", f"--ignore={SIMULATORS}", *arguments])
            print("==> simulators, which ran beside the others", flush=True)
            code = beside.wait() or code
        finally:
            with suppress(ProcessLookupError):
                os.killpg(beside.pid, signal.SIGKILL)
        output.seek(0)
        print(output.read().decode(errors="replace"), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
