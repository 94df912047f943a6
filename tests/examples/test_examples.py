"""Every example runs: a real node, its own handlers on a real endpoint, called as its docstring says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn

from examples import agent, chat, fastapi_app, hello, researchers, trips
from examples.agents import pydantic_ai
from holdfast.cluster.config import Config, HostPort
from holdfast.cluster.ingress.routes import ROUTES
from holdfast.cluster.node import Node
from holdfast.sdk import CallFailed, Client, Server


class Running(Client):
    """A client of a node in this process."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.doors.urls.ingress)
        self.node = node

    async def __aenter__(self) -> Running:
        return self


@asynccontextmanager
async def running(path: Path, *services: Any) -> AsyncIterator[Running]:
    free = HostPort("127.0.0.1", 0)
    failures: list[BaseException] = []
    node = Node(Config(data=path / "data", partitions=2, ingress=free, admin=free, peer=free), on_fatal=failures.append)
    server = Server(services) if services else None
    await node.start()
    try:
        if server is not None:
            await server.start(port=0)
            await node.ground.registry.register(f"http://127.0.0.1:{server.port}")
        async with Running(node) as client:
            yield client
    finally:
        await node.stop()
        if server is not None:
            await server.stop()
    assert not failures


def test_paths_that_examples_tell_readers_to_call_exist() -> None:
    templates = [re.compile(re.sub(r"\{\w+\}", "[^/]+", route.path)) for route in ROUTES]
    folder = Path(__file__).parents[2] / "examples"

    paths = [
        path for file in folder.rglob("*.py") for path in re.findall(r":8080(/holdfast/[^\s?'\"]+)", file.read_text())
    ]

    assert len(paths) >= 3
    assert [path for path in paths if not any(each.fullmatch(path) for each in templates)] == []


async def test_hello(tmp_path: Path) -> None:
    async with running(tmp_path, hello.hello) as client:
        assert await client.call(hello.greet, "Ada") == "Hello, Ada!"


async def test_a_trip_is_booked_in_full(tmp_path: Path) -> None:
    async with running(tmp_path, trips.trips) as client:
        receipt = await client.call(trips.book, trips.Trip("Ada", "Lisbon"))

        assert receipt.flight.startswith("flight-") and receipt.car.startswith("car-")


async def test_a_trip_that_cannot_be_booked_in_full_is_undone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="trips")
    async with running(tmp_path, trips.trips) as client:
        with pytest.raises(CallFailed, match="no car in Atlantis"):
            await client.call(trips.book, trips.Trip("Ada", "Atlantis"))

        undone = [record.getMessage().split()[1] for record in caplog.records if "cancelling" in record.getMessage()]
        assert undone == ["hotel", "flight"]


async def test_researchers_work_in_parallel_and_the_editor_puts_it_together(tmp_path: Path) -> None:
    questions = [f"question {number}?" for number in range(10)]
    async with running(tmp_path, researchers.researcher, researchers.editor) as client:
        article = await client.call(researchers.write, researchers.Assignment("tides", questions))

        assert [finding.question for finding in article.findings] == questions
        assert article.summary == "What 10 researchers found out about tides."


async def test_an_article_without_questions_is_refused_once_and_for_all(tmp_path: Path) -> None:
    async with running(tmp_path, researchers.researcher, researchers.editor) as client:
        with pytest.raises(CallFailed, match="at least one question") as failed:
            await client.call(researchers.write, researchers.Assignment("tides", []))

        assert failed.value.code == 422


async def test_a_chat_remembers_and_forgets(tmp_path: Path) -> None:
    async with running(tmp_path, chat.chat) as client:
        answers = await asyncio.gather(*(client.call(chat.say, f"line {n}", key="ada") for n in range(5)))
        lines = await client.call(chat.history, key="ada")

        assert len(lines) == 10 and len(answers) == 5
        heard = sorted(int(answer.split("exchanged ")[1].split()[0]) for answer in answers)
        assert heard == [0, 2, 4, 6, 8], "one at a time, each with all that was said before"

        await client.call(chat.forget, key="ada")
        assert await client.call(chat.history, key="ada") == []


async def test_an_agent_books_when_a_person_approves(tmp_path: Path) -> None:
    async with running(tmp_path, agent.agent) as client:
        await client.send(agent.run, agent.Goal("a weekend in Lisbon"), key="trip")
        while await client.call(agent.status, key="trip") != "waiting for approval of 380":
            await asyncio.sleep(0.05)
        assert await client.call(agent.approve, agent.Decision(approved=True, by="Ada"), key="trip") == "noted"

        report = await client.attach_workflow(agent.agent, "trip", agent.Report)

        assert report.outcome == "Booked Baixa for 380." and report.notes == ["Ada said yes"]


async def test_an_agent_does_not_wait_for_ever(tmp_path: Path) -> None:
    async with running(tmp_path, agent.agent) as client:
        report = await client.call(agent.run, agent.Goal("a weekend", approval_within_s=0.2), key="trip")

        assert report.outcome == "not approved" and report.notes == ["nobody answered in time"]


async def test_an_agent_keeps_to_the_budget(tmp_path: Path) -> None:
    async with running(tmp_path, agent.agent) as client:
        with pytest.raises(CallFailed, match="over the budget") as failed:
            await client.call(agent.run, agent.Goal("a weekend", budget=100), key="trip")

        assert failed.value.code == 422


async def test_handlers_mounted_in_fastapi_are_called_by_its_routes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as client, serving(fastapi_app.api) as url, aiohttp.ClientSession() as browser:
        await client.node.ground.registry.register(f"{url}/holdfast")
        monkeypatch.setattr(fastapi_app, "client", client)

        answers = []
        for _ in range(2):
            async with browser.put(f"{url}/orders/42") as response:
                answers.append(await response.json())

        assert answers[0] == {"order": "42", "receipt": "receipt-42", "again": False}
        assert answers[1] == {**answers[0], "again": True}


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """An ASGI application as a user would run it."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    task = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await task


@pytest.mark.parametrize("path", sorted(Path(hello.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_every_line_to_try_is_a_request_that_handlers_take(path: Path) -> None:
    """curl without a body sends a GET, which a handler answers with 405."""
    lines = [line.strip() for line in path.read_text().splitlines() if "curl " in line and ":8080/" in line]

    for line in lines:
        assert "/holdfast/" in line or "--json" in line or "-d " in line or "-X POST" in line, line


async def test_an_agent_of_pydantic_ai_looks_at_cities_at_once_and_asks_before_it_books(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(pydantic_ai, "ask_boss", lambda tool, awakeable: asked.append(awakeable))
    async with running(tmp_path, pydantic_ai.scout) as client, asyncio.timeout(60):
        sent = await client.send(pydantic_ai.ask, "A weekend in the sun, up to 300 euros.")
        while not asked:
            await asyncio.sleep(0.02)
        await client.resolve_awakeable(asked[0], True)

        assert await client.attach(sent) == "Palermo: booked for 280 euros"
