"""The replicated log on real processes, under real faults; and proof that the run would notice a loss."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import tempfile
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.chaos.history import Kind, Outcome, Recorder, load
from holdfast.chaos.log import Plan, Result, faults_for, run, wish
from holdfast.chaos.log_clients import Client
from holdfast.chaos.log_cluster import LogCluster, Net
from holdfast.chaos.netns import Network, NotPermitted


def best_net() -> Net:
    """Cuts by the kernel where possible, otherwise by proxies; the summary of the test run gives the reason."""
    try:
        with Network(["a", "b"]):
            return Net.NETNS
    except NotPermitted as reason:
        warnings.warn(f"links are cut by proxies, not by the kernel: {reason}", stacklevel=2)
        return Net.PROXY


def check(result: Result, *, faults: int, acknowledged: int) -> None:
    assert result.ok, str(result)
    assert sum(result.faults.values()) >= faults, str(result)
    assert result.restarts > 0, str(result)
    assert result.count(Outcome.OK) >= acknowledged, str(result)
    assert result.alive_after_s is not None


@pytest.mark.slow("a minute of faults on real processes")
def test_three_nodes_lose_nothing_in_a_minute_of_faults(tmp_path: Path) -> None:
    seed = 23  # Begins with: isolate leader, kill leader, pause majority, kill all, ring.

    result = asyncio.run(run(Plan(seconds=60, nodes=3, net=Net.PROXY, seed=seed), tmp_path / "run"))

    check(result, faults=5, acknowledged=500)
    assert any(result.changes.get(change, 0) for change in ("add", "remove", "replace")), str(result)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["ok"] and report["faults"] == result.faults


@pytest.mark.slow("five processes under faults")
def test_five_nodes_lose_nothing_either(tmp_path: Path) -> None:
    seed = 24  # Begins with a kill, whichever way links are cut.

    result = asyncio.run(run(Plan(seconds=20, nodes=5, net=best_net(), seed=seed), tmp_path / "run"))

    check(result, faults=2, acknowledged=100)


@pytest.mark.slow("seconds of load, and a judge of the whole history")
def test_a_write_that_is_acknowledged_and_forgotten_is_found(tmp_path: Path) -> None:
    result = asyncio.run(run(Plan(seconds=4, nodes=3, seed=5, forgetful=True), tmp_path / "run"))

    assert result.violations
    assert not result.ok
    assert "VIOLATION" in str(result) and result.command in str(result)


def test_nothing_outlives_the_run(tmp_path: Path) -> None:
    async def scenario() -> list[int]:
        async with LogCluster(tmp_path, members=3, groups=1, net=Net.PROXY) as cluster:
            pids = [cast(int, cluster.pid(name)) for name in cluster.names]
            await cluster.kill("n1", signal.SIGSTOP)
            await cluster.kill("n2", signal.SIGKILL)
            assert cluster.pid("n2") is None
        assert cluster.deaths == []
        return pids

    pids = asyncio.run(scenario())

    assert len(set(pids)) == 4
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_node_that_ends_by_itself_is_evidence(tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        async with LogCluster(tmp_path, members=3, groups=1, net=Net.PROXY) as cluster:
            os.kill(cast(int, cluster.pid("n1")), signal.SIGTERM)  # Not by the run, so it is unexpected.
            async with asyncio.timeout(60):
                while not cluster.deaths:
                    await asyncio.sleep(0.01)
            return cluster.deaths

    (death,) = asyncio.run(scenario())

    assert death.startswith("n1 ended by itself with status -15")


class Script:
    """A cluster of one that answers from a script: a dictionary, or None to break the connection."""

    def __init__(self, folder: Path, answers: list[dict[str, Any] | None]) -> None:
        self.names = ["n1"]
        self.groups = range(1, 2)
        self.requests: list[dict[str, Any]] = []
        self._folder = folder
        self._answers = answers

    def socket(self, name: str) -> Path:
        return self._folder / name

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            self.requests.append(json.loads(line))
            answer = self._answers.pop(0)
            if answer is None:
                break
            writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()


@asynccontextmanager
async def client_of(answers: list[dict[str, Any] | None], path: Path) -> AsyncIterator[tuple[Client, Script]]:
    with tempfile.TemporaryDirectory(prefix="hf-") as folder, Recorder(path) as recorder:
        script = Script(Path(folder), answers)
        server = await asyncio.start_unix_server(script.serve, script.socket("n1"))
        client = Client("c", cast(LogCluster, script), recorder, random.Random(1))
        try:
            yield client, script
        finally:
            client.close()
            server.close()


def outcome_of(answers: list[dict[str, Any] | None], path: Path, *, patience_s: float = 60.0) -> tuple[Outcome, int]:
    async def scenario() -> tuple[Outcome, int]:
        async with client_of(answers, path) as (client, script):
            client.patience_s = patience_s
            outcome, _ = await client.ask(Kind.WRITE, "r", "value")
            return outcome, len(script.requests)

    outcome, requests = asyncio.run(scenario())
    (operation,) = load(path).operations
    assert operation.outcome is outcome
    return outcome, requests


REFUSED = {"error": "NotLeader", "definite": True, "leader": None, "message": ""}
UNKNOWN = {"error": "OutcomeUnknown", "definite": False, "leader": None, "message": ""}


def test_a_client_asks_again_after_a_definite_refusal(tmp_path: Path) -> None:
    assert outcome_of([REFUSED, REFUSED, {"result": None}], tmp_path / "h") == (Outcome.OK, 3)


def test_a_client_that_was_only_refused_knows_that_nothing_happened(tmp_path: Path) -> None:
    assert outcome_of([REFUSED, REFUSED], tmp_path / "h", patience_s=0.0) == (Outcome.FAIL, 1)


@pytest.mark.parametrize("answer", [UNKNOWN, None], ids=["told so", "connection broken"])
def test_a_client_never_retries_an_operation_with_an_unknown_outcome(
    answer: dict[str, Any] | None, tmp_path: Path
) -> None:
    assert outcome_of([answer, {"result": None}], tmp_path / "h") == (Outcome.INFO, 1)


def test_wishes_change_at_most_one_member(tmp_path: Path) -> None:
    cluster = LogCluster(tmp_path, members=3, groups=1, net=Net.PROXY)
    chance = random.Random(1)
    members: set[str] = set(cluster.first_members)
    seen = set()

    for _ in range(200):
        what, request = wish(cluster, chance, sorted(members))
        seen.add(what)
        if what != "transfer":
            after = set(cast(list[str], request["members"]))
            assert len(after - members) <= 1 and len(members - after) <= 1 and after != members
            assert 3 <= len(after) <= 4
            members = after

    assert seen == {"transfer", "add", "replace", "remove"}


def test_slow_links_are_left_to_proxies() -> None:
    is_slow: Callable[[Net], bool] = lambda net: any("slow" in it.name for it in faults_for(net, random.Random(1)))  # noqa: E731

    assert is_slow(Net.PROXY) and not is_slow(Net.NETNS)
