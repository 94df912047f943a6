"""The table of the hardening names the place and the tests that close each deviation. It must stay correct."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "raft-hardening.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d+) \|(.*)\|(.*)\|(.*)\|$", re.MULTILINE)


def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_deviation_has_a_row_a_place_and_a_test() -> None:
    rows = ROW.findall(TEXT)

    assert [int(number) for number, *_ in rows] == list(range(1, 39))
    for number, what, where, tests in rows:
        assert what.strip(), number
        assert "`" in where, f"{number}: where is it closed?"
        assert re.search(r"`[^`]*test_\w+`", tests), f"{number}: which test fails without it?"


def test_every_named_test_exists() -> None:
    here = {name for file in Path(__file__).parent.glob("test_*.py") for name in functions(file)}
    named = set(re.findall(r"`(test_\w+)`", TEXT)) - {"test_hardening_table"}
    elsewhere = re.findall(r"`(tests/[\w/]+\.py): (test_\w+)`", TEXT)

    assert len(named) > 80
    assert sorted(named - here) == []
    assert [pair for pair in elsewhere if pair[1] not in functions(ROOT / pair[0])] == []


def test_every_named_place_exists() -> None:
    places = set(re.findall(r"`(\w+\.py): (\w+)`", TEXT))

    assert len(places) > 40
    missing = [
        (file, symbol)
        for file, symbol in sorted(places)
        if not re.search(rf"\b{symbol}\b", (ROOT / "log" / file).read_text(encoding="utf-8"))
    ]
    assert missing == []
