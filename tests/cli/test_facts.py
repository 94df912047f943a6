"""Commands that show facts: counts, lists, trees, keys, and what waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.running import Cli, running


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with running(tmp_path_factory.mktemp("node")) as cli:
        yield cli


def test_statistics_have_a_row_per_service_and_their_sum(cli: Cli) -> None:
    cli.ok("call", "echo/say", "1")
    cli.ok("call", "counter/x/add")

    text = cli.ok("statistics")

    assert "echo" in text and "counter" in text and "TOTAL" in text
    assert cli.json("statistics")["services"]["counter"]["succeeded"] == 1


def test_lists_are_filtered_and_ordered(cli: Cli) -> None:
    first = cli.ok("send", "flaky/stop").strip()
    cli.reaches(first, "paused")
    second = cli.ok("send", "flaky/stop").strip()
    cli.reaches(second, "paused")
    cli.ok("call", "counter/order-7/add")

    oldest = cli.json("invocations", "list", "--service", "flaky", "--order", "oldest")["invocations"]
    text = cli.ok("invocations", "list", "--failure", "CODE HAS")

    assert [each["id"] for each in oldest] == [first, second]
    assert first in text and "the code has changed" in text
    assert "order-7" in cli.ok("invocations", "list", "--key-prefix", "order-", "--completed-since", "1h")
    assert cli.ok("invocations", "list", "--parent", first) == "No invocations match.\n"


def test_a_dry_run_says_how_many_would_be_acted_on(cli: Cli) -> None:
    for _ in range(2):
        cli.reaches(cli.ok("send", "payments/pay").strip(), "paused")

    text = cli.ok("invocations", "cancel", "--service", "payments", "--dry-run")
    counted = cli.json("invocations", "cancel", "--service", "payments", "--dry-run", "--limit", "1")
    wrong = cli.run("invocations", "cancel", "inv_1", "--dry-run")

    assert text == "cancel would act on 2 invocations with service payments. Nothing was changed.\n"
    assert counted == {"action": "cancel", "matched": 1, "more": True}
    assert wrong.exit_code == 2
    assert len(cli.json("invocations", "list", "--service", "payments", "--status", "paused")["invocations"]) == 2
