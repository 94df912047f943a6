"""The evidence: a checker reads everything that a recorder writes, however the client ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from holdfast.chaos.history import BadHistory, History, Kind, Operation, Outcome, Recorder, Value, load, merge


def recorder(path: Path) -> Recorder:
    ticks = count(1)
    return Recorder(path, now=lambda: float(next(ticks)))


def test_a_recorded_history_is_loaded(tmp_path: Path) -> None:
    with recorder(tmp_path / "a") as history:
        write = history.invoke("c1", "x", Kind.WRITE, 5)
        read = history.invoke("c2", "x", Kind.READ)
        history.end(read, Outcome.OK, 5)
        history.end(write, Outcome.FAIL)

    operations = load(tmp_path / "a").operations

    assert operations == (
        Operation("c1", "x", Kind.WRITE, 5, None, 1.0, 4.0, Outcome.FAIL),
        Operation("c2", "x", Kind.READ, None, 5, 2.0, 3.0, Outcome.OK),
    )


@pytest.mark.parametrize(
    "value", [None, True, 1, 1.5, "é\n", (1, ("a", None)), frozenset({1, 2}), frozenset[int](), ()]
)
def test_a_value_keeps_its_type_and_order(tmp_path: Path, value: Value) -> None:
    with recorder(tmp_path / "a") as history:
        history.end(history.invoke("c", "x", Kind.READ_ALL), Outcome.OK, value)

    loaded = load(tmp_path / "a").operations[0].result

    assert loaded == value
    assert type(loaded) is type(value)


def test_an_operation_of_a_killed_client_is_unknown_not_absent(tmp_path: Path) -> None:
    path = tmp_path / "a"
    program = (
        "import os, signal, sys; from pathlib import Path; from holdfast.chaos.history import Kind, Recorder;"
        "Recorder(Path(sys.argv[1])).invoke('c', 'x', Kind.WRITE, 1); os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).resolve().parents[2]

    died = subprocess.run([sys.executable, "-c", program, str(path)], env={**os.environ, "PYTHONPATH": str(root)})

    assert died.returncode == -signal.SIGKILL
    (operation,) = load(path).operations
    assert (operation.outcome, operation.returned, operation.argument) == (Outcome.INFO, None, 1)


def test_a_torn_last_line_leaves_the_operation_unknown(tmp_path: Path) -> None:
    with recorder(tmp_path / "a") as history:
        history.end(history.invoke("c", "x", Kind.WRITE, 1), Outcome.OK)
    whole = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(whole[:-5])

    (operation,) = load(tmp_path / "a").operations

    assert operation.outcome is Outcome.INFO


def test_damage_before_the_last_line_is_refused_with_its_place(tmp_path: Path) -> None:
    with recorder(tmp_path / "a") as history:
        history.end(history.invoke("c", "x", Kind.WRITE, 1), Outcome.OK)
    lines = (tmp_path / "a").read_bytes().split(b"\n")
    lines[1] = lines[1][:-5]
    (tmp_path / "a").write_bytes(b"\n".join(lines))

    with pytest.raises(BadHistory, match="line 2"):
        load(tmp_path / "a")


def test_an_existing_history_is_never_overwritten(tmp_path: Path) -> None:
    recorder(tmp_path / "a").close()

    with pytest.raises(FileExistsError):
        recorder(tmp_path / "a")


def test_an_operation_ends_once(tmp_path: Path) -> None:
    with recorder(tmp_path / "a") as history:
        operation = history.invoke("c", "x", Kind.WRITE, 1)
        history.end(operation, Outcome.INFO)

        with pytest.raises(BadHistory, match="not open"):
            history.end(operation, Outcome.OK)


def test_merged_histories_are_in_order_of_invocation() -> None:
    def history(*times: float) -> History:
        return History("boot", tuple(Operation("c", "x", Kind.READ, None, 1, t, t, Outcome.OK) for t in times))

    merged = merge([history(1, 4), history(2, 3)])

    assert [operation.invoked for operation in merged.operations] == [1, 2, 3, 4]


def test_times_of_different_boots_are_never_compared() -> None:
    with pytest.raises(BadHistory, match="different clocks"):
        merge([History("boot-1", ()), History("boot-2", ())])


def test_an_acknowledged_operation_has_a_time_of_return() -> None:
    with pytest.raises(BadHistory):
        Operation("c", "x", Kind.READ, None, 1, 1.0, None, Outcome.OK)
    with pytest.raises(BadHistory):
        Operation("c", "x", Kind.READ, None, 1, 2.0, 1.0, Outcome.OK)
