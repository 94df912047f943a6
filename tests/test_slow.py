"""Marks of slow tests have reasons: a run with one that has none does not begin."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(source)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.slow",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
    ]
    return subprocess.run(
        [*command, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )  # From ROOT, where the plugin can be imported.


def test_a_run_with_unexplained_marks_does_not_begin_and_names_them(tmp_path: Path) -> None:
    marks = ["slow", "slow()", "slow('')", "slow(3)", "slow(why='because')", "slow('because')"]
    tests = (f"@pytest.mark.{mark}\ndef test_{n}():\n    pass\n" for n, mark in enumerate(marks))

    answer = run(tmp_path, "import pytest\n\n" + "\n".join(tests))

    assert answer.returncode == pytest.ExitCode.USAGE_ERROR and "passed" not in answer.stdout
    assert re.findall(r"test_it.py::test_(\d)", answer.stdout + answer.stderr) == ["0", "1", "2", "3", "4"]


def test_a_slow_test_without_a_reason_is_named(tmp_path: Path) -> None:
    source = (
        "import pytest\nimport tests.slow\ntests.slow.SLOW_S = -1.0\n\n"
        "def test_unmarked():\n    pass\n\n@pytest.mark.slow('many nodes')\ndef test_marked():\n    pass\n"
    )

    answer = run(tmp_path, source)

    assert answer.returncode == 0, answer.stdout
    assert "over ten seconds, without a reason" in answer.stdout
    assert "test_it.py::test_unmarked" in answer.stdout and "test_it.py::test_marked" not in answer.stdout
