"""The arguments and the output of bench/e2e.py, which measures on request only."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import e2e


def row(work: str, in_flight: int) -> e2e.Row:
    figures = dict.fromkeys(e2e.Row.__dataclass_fields__, 1)
    return e2e.Row(**{**figures, "work": work, "in_flight": in_flight, "nodes_us": [100.0]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "shown"), [("64", "1/s"), ("1", "1.0 ms"), ("1,64", "1/s, 1.0 ms"), ("16, 256", "1/s")]
)
def test_any_choice_of_requests_in_flight_can_be_compared(words: str, shown: str) -> None:
    arguments = e2e.parser().parse_args(["--in-flight", words, "--work", "three"])

    head, line = e2e.compare([row(work, n) for work in arguments.work for n in arguments.in_flight])

    assert head.split()[0] == "work"
    assert line.startswith("three") and f" {shown} " in line


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--in-flight", "64,"], "'' must be a whole number of at least 1"),
        (["--in-flight", "0"], "'0' must be a whole number of at least 1"),
        (["--in-flight", "many"], "'many' must be a whole number"),
        (["--rounds", "-1"], "'-1' must be a whole number"),
        (["--work", "three,four"], "unknown work four; there are empty, three, ten, counter"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_before_anything_is_started(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        e2e.parser().parse_args(words)

    assert reason in capsys.readouterr().err


def test_without_a_choice_all_work_is_measured_alone_and_with_64_in_flight() -> None:
    arguments = e2e.parser().parse_args([])

    assert arguments.work == list(e2e.TABLE) == ["empty", "three", "ten", "counter"]
    assert arguments.in_flight == [1, 64]


@pytest.mark.slow("starts a node, an endpoint and the processes of the load")
async def test_requests_that_are_all_refused_end_the_measurement(tmp_path: Path) -> None:
    arguments = e2e.parser().parse_args(["--in-flight", "1", "--seconds", "0.2", "--data", str(tmp_path)])
    arguments.work = ["unknown"]

    with pytest.raises(SystemExit, match=r"none of the requests succeeded; the last answer: 404 .*unknown"):
        await e2e.run(arguments)
