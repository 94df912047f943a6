"""The output of `holdfast dev` about failures and pauses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.cli.failures import Reporter, why_paused
from holdfast.cluster.partition.door import Partition
from holdfast.sdk.ids import InvocationId, parse_id
from holdfast.statemachine import queries
from holdfast.statemachine.commands import FailAttempt, Retry
from holdfast.statemachine.effects import OK
from tests.cluster.harness import PATIENCE_S
from tests.cluster.serving import serving


async def test_failures_and_pauses_are_printed_with_their_reason_and_the_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tmp_path) as at, asyncio.timeout(PATIENCE_S):
        at.node.observe(Reporter())
        failing, paused = await at.send("flaky/fail"), await at.send("flaky/stop")
        await at.reaches(failing, "backing-off")
        await at.reaches(paused, "paused")
        by_hand = await at.send("agent/wait")
        await at.reaches(by_hand, "suspended")
        await at.admin("POST", f"/invocations/{by_hand}/pause")
        await at.call("echo/say")

    text = capsys.readouterr().out
    assert f"attempt 1 failed: flaky/fail {failing}: the database is down" in text
    assert "next attempt in 59m" in text or "next attempt in 1h" in text
    assert f"PAUSED: flaky/stop {paused}: the code has changed" in text
    assert f"continue with: holdfast invocations resume {paused}" in text
    assert f"PAUSED: agent/wait {by_hand}: by an operator" in text
    assert "echo/say" not in text


async def test_repeated_failures_of_one_invocation_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tmp_path) as at, asyncio.timeout(PATIENCE_S):
        id_ = await at.send("flaky/fail")
        await at.reaches(id_, "backing-off")
        reporter, raw = Reporter(), parse_id(id_)
        [partition] = [each for each in at.node.partitions if _has(each, raw)]
        for epoch in range(1, 21):
            reporter(partition, FailAttempt(raw, epoch, [1, 500, "boom", "E"], Retry(), 0, 0, False), OK)

    text = capsys.readouterr().out
    assert [line.split(" failed: ")[0] for line in text.splitlines() if " failed: " in line] == [
        f"attempt {number}" for number in (1, 2, 4, 8, 16)
    ]
    assert "; 16 failures so far" in text


def test_a_pause_for_lost_processes_says_how_often_they_ended() -> None:
    closed = "the endpoint closed the stream"
    command = FailAttempt(InvocationId(bytes(16)), 5, [1, 503, closed, ""], Retry(), 0, 0, False)
    last = queries.FailedAttempt(5, 0, 503, f"the handler process ended 5 times. The last time: {closed}", "")

    assert why_paused(command, last) == last.message
    assert why_paused(command, None) == closed


def _has(partition: Partition, raw: InvocationId) -> bool:
    with partition.state.read() as txn:
        return queries.load(txn, raw) is not None
