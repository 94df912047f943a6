"""The example of the README works as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.examples.test_examples import running

ROOT = Path(__file__).resolve().parents[2]


async def test_the_first_handler_of_the_readme_answers_and_prints_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [code] = re.findall(r"```python\n# hello.py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    module = ModuleType("readme_hello")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Type hints are resolved there.
    exec(code.replace("seconds=10", "seconds=0.2"), module.__dict__)  # noqa: S102 - our own text

    async with running(tmp_path, *module.app) as client:
        answer = await client.call("greeter/greet", "Ann")

    assert answer == "Hello, Ann!"
    assert capsys.readouterr().out == "Hello, Ann!\n"


def test_make_lists_every_target_that_people_run() -> None:
    targets = re.findall(r"^([a-z0-9-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)

    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout

    assert {*targets} - {"lint", "types", "dependencies"} == {line.split()[1] for line in listed.splitlines()}
