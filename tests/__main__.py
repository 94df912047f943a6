"""Runs many tests: all of them (`make test`), or the fast ones that a contributor runs after each change (`make
quick`).

All tests run in three processes. The tests of cluster/ mostly wait for real clocks, disks and processes. The other
rooms run in parallel with them, followed by the faults on real processes. So do the simulators, at the lowest priority,
on the remaining processor time: they only compute, and virtual time does not depend on their speed.

Quick: the rooms that are pure or nearly so, without files that take seconds, in two processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

SIMULATORS: Final = "tests/sim"
#: Runs in parallel with the tests of cluster/, in this order: both take about the same time.
BESIDE: Final = (
    "tests/cli", "tests/docs", "tests/examples", "tests/log", "tests/sdk", "tests/snapshots", "tests/statemachine",
    "tests/bench", "tests/promises", "tests/chaos",
)  # fmt: skip
PYTEST: Final = (sys.executable, "-m", "pytest", "-q")

#: Each tuple is the work of one process.
QUICK: Final = (("tests/statemachine", "tests/log", "tests/test_structure.py"), ("tests/sdk",))
#: Files of these rooms that are not quick, and why.
NOT_QUICK: Final = {
    "tests/statemachine/test_total.py": "long random histories",
    "tests/statemachine/test_model.py": "long random programs",
    "tests/log/test_journal.py": "disks, long random histories",
    "tests/log/test_journal_damage.py": "disks",
    "tests/log/test_journal_limits.py": "disks, a million entries",
    "tests/log/test_store.py": "disks, a million entries",
    "tests/log/test_store_opening.py": "disks and processes",
    "tests/log/test_rows.py": "disks, many entries",
    "tests/log/test_rows_damage.py": "disks",
    "tests/log/test_rows_model.py": "long random histories",
    "tests/log/test_link.py": "sockets",
    "tests/log/test_link_refusals.py": "sockets",
    "tests/log/test_link_tls.py": "sockets",
    "tests/log/test_messages.py": "thousands of random frames",
    "tests/log/test_node.py": "sockets and disks",
    "tests/sdk/test_against_node.py": "a node",
    "tests/sdk/test_asgi.py": "servers of others",
    "tests/sdk/test_bounds.py": "large messages",
    "tests/sdk/test_call_depth.py": "a node",
    "tests/sdk/test_client.py": "sockets",
    "tests/sdk/test_loop.py": "sockets",
    "tests/sdk/test_server.py": "sockets and processes",
    "tests/sdk/test_timers.py": "waits for real timers",
    "tests/sdk/test_typing.py": "a run of the type checker",
    "tests/sdk/test_watchdog.py": "processes that hang",
}


def main(arguments: Sequence[str]) -> int:
    # Compiling our modules again would be the slowest part of every process that a test starts.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return quick(arguments[1:]) if arguments[:1] == ["--quick"] else everything(arguments)


def quick(arguments: Sequence[str]) -> int:
    ignored = [f"--ignore={name}" for name in NOT_QUICK]
    options = ["-p", "no:cacheprovider", "-m", "not slow", "--hypothesis-profile=quick", *ignored, *arguments]
    return run([[*PYTEST, *options, *part] for part in QUICK])


def run(commands: Sequence[Sequence[str]]) -> int:
    """Run all at once. Their output follows one after the other."""
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
    options = ["-p", "no:cacheprovider", "--durations=20"]
    ignored = [f"--ignore={name}" for name in (*BESIDE, SIMULATORS)]
    with (
        beside("other rooms, and faults on real processes", [*PYTEST, *options, *arguments, *BESIDE]) as finish_rooms,
        beside("simulators", [*PYTEST, *options, SIMULATORS], niceness=19) as finish_simulators,
    ):
        codes = [
            subprocess.call([*PYTEST, "--durations=30", *ignored, *arguments]),
            finish_rooms(),
            finish_simulators(),
        ]
    return next((code for code in codes if code), 0)


@contextmanager
def beside(what: str, command: Sequence[str], *, niceness: int = 0) -> Iterator[Callable[[], int]]:
    """Run a command. The yielded function waits for its end, prints its output, and returns its exit code."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # So that its workers can be ended with it.
            preexec_fn=lambda: os.nice(niceness),
        )

        def finish() -> int:
            code = process.wait()
            print(f"==> {what}, which ran beside the others", flush=True)
            output.seek(0)
            print(output.read().decode(errors="replace"), flush=True)
            return code

        try:
            yield finish
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
