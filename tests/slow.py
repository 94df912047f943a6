"""A test that takes longer than ten seconds gives a reason: `@pytest.mark.slow("reason")`.

A mark without a reason ends the run before it begins. A slower test without a mark is only listed at the end of the
run, because on a busy machine every test is slow.
"""

from __future__ import annotations

from typing import Final

import pytest

SLOW_S: Final = 10.0
NAMED_MAX: Final = 20

_marked: Final = pytest.StashKey[set[str]]()
_took: Final = pytest.StashKey[dict[str, float]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow(reason): takes longer than ten seconds, and why; see tests/slow.py")
    config.stash[_marked] = set()
    config.stash[_took] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unexplained = []
    for item in items:
        if (mark := item.get_closest_marker("slow")) is not None:
            config.stash[_marked].add(item.nodeid)
            reason = mark.args[0] if len(mark.args) == 1 and not mark.kwargs else None
            if not isinstance(reason, str) or not reason.strip():
                unexplained.append(item.nodeid)
    if unexplained:
        raise pytest.UsageError(
            '@pytest.mark.slow needs a reason, as in @pytest.mark.slow("three nodes start"): ' + ", ".join(unexplained)
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    took = item.config.stash[_took]
    took[item.nodeid] = took.get(item.nodeid, 0.0) + call.duration
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    marked = config.stash[_marked]
    slow = sorted(
        ((s, test) for test, s in config.stash[_took].items() if s > SLOW_S and test not in marked), reverse=True
    )
    if slow:
        terminalreporter.section("over ten seconds, without a reason")
        for seconds, test in slow[:NAMED_MAX]:
            terminalreporter.write_line(f"{seconds:6.1f}s {test}")
