"""Agents on a real node, in a process of their own that is killed."""

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from holdfast.cluster.config import Config, HostPort
from holdfast.cluster.node import Node
from holdfast.sdk import Client
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parent.parent.parent


class Agents:
    """A node, and the process of the agents."""

    def __init__(self, path: Path) -> None:
        self.file = path / "happened"
        self.file.touch()
        self.port = free_ports(1)[0]
        free = HostPort("127.0.0.1", 0)
        self.node = Node(Config(data=path / "node", partitions=2, ingress=free, admin=free, peer=free))
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.ext.agents_app", str(self.port), str(self.file), cwd=ROOT
        )

    async def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        assert await self.process.wait() == -signal.SIGKILL

    def happened(self) -> list[list[str]]:
        return [line.split() for line in self.file.read_text().splitlines()]

    async def until(self, *, count: int, first: str) -> list[list[str]]:
        async with asyncio.timeout(60):
            while True:
                found = [words for words in self.happened() if words[0] == first]
                if len(found) >= count:
                    return found
                await asyncio.sleep(0.02)

    async def get(self, path: str) -> dict[str, object]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.node.doors.urls.admin}{path}") as response:
            found: dict[str, object] = json.loads(await response.text())
            return found

    async def until_suspended(self, invocation: str) -> None:
        async with asyncio.timeout(60):
            while (await self.get(f"/invocations/{invocation}"))["status"] != "suspended":
                await asyncio.sleep(0.05)


@asynccontextmanager
async def running(path: Path) -> AsyncIterator[tuple[Agents, Client]]:
    agents = Agents(path)
    await agents.node.start()
    client = Client(agents.node.doors.urls.ingress, retry_for=60)
    try:
        await agents.start()
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while True:
                body = {"uri": f"http://127.0.0.1:{agents.port}"}
                async with session.post(f"{agents.node.doors.urls.admin}/deployments", json=body) as response:
                    if response.status < 300:
                        break
                await asyncio.sleep(0.1)
        yield agents, client
    finally:
        await client.close()
        if agents.process is not None and agents.process.returncode is None:
            await agents.kill()
        await agents.node.stop()


@pytest.mark.slow("a process with an agent framework starts twice")
async def test_finished_tools_run_once_and_the_others_again_after_kill_9(tmp_path: Path) -> None:
    async with running(tmp_path) as (agents, client):
        sent = await client.send("agents/travel")
        await agents.until(count=2, first="end")
        journal = await agents.get(f"/invocations/{sent.invocation_id}/journal")
        for _ in range(200):
            journal = await agents.get(f"/invocations/{sent.invocation_id}/journal")
            if str(journal).count(":#=call") >= 2:
                break
            await asyncio.sleep(0.05)
        await agents.kill()
        Path(f"{agents.file}.second").touch()
        before = agents.happened()
        await agents.start()

        async with asyncio.timeout(120):
            assert await client.attach(sent.invocation_id) == "seen it all"
        counts = Counter(" ".join(words[:2]) for words in agents.happened())
        assert [words[0] for words in agents.happened()].count("model") == 3
        assert counts["inside"] == 1
        assert [counts[f"begin {n}"] for n in (0, 1, 2, 3, 9)] == [1, 1, 2, 2, 1]
        assert [counts[f"end {n}"] for n in (0, 1, 2, 3, 9)] == [1, 1, 1, 1, 1]
        begins = {words[1]: int(words[2]) for words in before if words[0] == "begin"}
        ends = [int(words[2]) for words in before if words[0] == "end"]
        assert len(begins) == 4
        assert max(begins.values()) < min(ends), "the fourth tool began before the first ended"
        keys = str(await agents.get(f"/invocations/{sent.invocation_id}/journal"))
        assert "'inside'" in keys, "a step of the root task keeps its key inside agent.iter"


@pytest.mark.slow("a process with an agent framework starts twice")
async def test_a_waiting_agent_is_suspended_and_acts_once_after_kill_9(tmp_path: Path) -> None:
    async with running(tmp_path) as (agents, client):
        sent = await client.send("agents/settle")
        ((_, awakeable),) = await agents.until(count=1, first="ask")
        await agents.until_suspended(sent.invocation_id)
        await agents.kill()
        await agents.start()

        await client.resolve_awakeable(awakeable, True)
        async with asyncio.timeout(120):
            assert await client.attach(sent.invocation_id) == "paid"
        counts = Counter(words[0] for words in agents.happened())
        assert counts == {"model": 2, "ask": 1, "pay": 1}


@pytest.mark.slow("a hundred agents on two shared cores")
async def test_waiting_agents_take_no_memory(tmp_path: Path) -> None:
    if not os.path.exists("/proc/self/status"):
        pytest.skip("needs /proc")
    async with running(tmp_path) as (agents, client):
        waiting: list[str] = []

        async def settle(count: int) -> int:
            """Start this many more waiting agents, and return the memory of the process."""
            for _ in range(count // 5):
                for _ in range(5):  # A few at a time: a peak of all at once would stay with the allocator.
                    waiting.append((await client.send("agents/settle")).invocation_id)
                await agents.until(count=len(waiting), first="ask")
                for each in waiting[-5:]:
                    await agents.until_suspended(each)
            return int(await client.call("agents/memory"))

        idle = await settle(10)  # What the first agents load stays.
        assert await settle(100) < idle * 1.1
        async with asyncio.timeout(30):
            while await client.call("agents/attempts") != 1:  # Itself.
                await asyncio.sleep(0.2)
