"""`holdfast sql`: its forms of output, its input, and its prompt in a terminal."""

from __future__ import annotations

import csv
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.running import Cli, running
from tests.cluster.harness import PATIENCE_S

VALUES = "select 1 as n, 'a,b' as text, null as none, x'00' as bytes union all select 2, 'é', 1.5, ''"


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with running(tmp_path_factory.mktemp("node")) as cli:
        cli.ok("call", "trips/book")
        yield cli


def test_a_query_prints_a_table_json_or_csv(cli: Cli) -> None:
    text = cli.ok("sql", "select service, status, count from statistics")
    shown = cli.json("sql", VALUES)
    rows = list(csv.reader(cli.ok("sql", "--csv", VALUES).splitlines()))

    assert [line.split() for line in text.splitlines()] == [
        ["service", "status", "count"],
        ["trips", "completed", "1"],
    ]
    assert shown["rows"] == [[1, "a,b", None, {"base64": "AA=="}], [2, "é", 1.5, ""]] and shown["more"] is False
    assert rows == [["n", "text", "none", "bytes"], ["1", "a,b", "", "AA=="], ["2", "é", "1.5", ""]]
    assert cli.ok("sql", "select 1 where 0") == "No rows.\n"


def test_a_statement_is_read_from_stdin(cli: Cli) -> None:
    assert cli.ok("sql", "--csv", input="select 1 as one\n") == "one\n1\n"
    assert cli.ok("sql", "--csv", "-", input="select 2 as two;\n") == "two\n2\n"


def test_what_a_limit_cuts_off_is_told(cli: Cli) -> None:
    result = cli.run("sql", "--limit", "2", "select 1 union select 2 union select 3")

    assert result.exit_code == 0 and "There are more rows: see --limit" in result.stderr
    assert "2 rows in" in result.stderr and "3" not in result.stdout


def test_wrong_queries_fail_with_the_place_and_a_hint(cli: Cli) -> None:
    wrong = cli.run("sql", "select absent from invocations")

    assert wrong.exit_code == 1 and wrong.stdout == ""
    assert "Error: no such column: absent (line 1, column 8) (400)" in wrong.stderr
    assert "Hint: tables: invocations, " in wrong.stderr
    assert cli.run("sql", "--csv", "--json", "select 1").exit_code == 2
    assert cli.run("sql", "--limit", "0", "select 1").exit_code == 2


def test_the_tables_and_their_columns_are_listed(cli: Cli) -> None:
    assert "journal" in cli.ok("sql", "--tables")
    assert "when it fires" in cli.ok("sql", "--tables", "timers")
    assert cli.json("sql", "--tables", "timers")["name"] == "timers"
    missing = cli.run("sql", "--tables", "workflows")
    assert missing.exit_code == 1 and "there is no table 'workflows'" in missing.stderr


def test_a_prompt_takes_statements_until_it_is_left(cli: Cli, tmp_path: Path) -> None:
    typed = "\\tables\nselect 'in two',\n  'lines' ;\nselct 1;\n\\nonsense\n\\columns state\nselect 'last';\n\\q\n"
    ours, theirs = pty.openpty()
    os.write(ours, typed.encode())

    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "sql"],
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **cli.environ, "HOME": str(tmp_path)},
        check=False,
    )
    os.close(ours)
    os.close(theirs)

    assert done.returncode == 0, done.stderr
    assert "in two" in done.stdout and "lines" in done.stdout and "last" in done.stdout
    assert "...> " in done.stdout and "\\columns TABLE" in done.stdout
    assert "the name of the value" in done.stdout and "awakeables" in done.stdout
    assert 'near "selct": syntax error' in done.stderr
