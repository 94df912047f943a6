"""Clients that follow an invocation get its progress and its outcome as events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from holdfast.cluster.ingress import following
from holdfast.cluster.ingress.following import INLINE_BYTES_MAX, show_outcome
from tests.cluster.harness import PATIENCE_S
from tests.cluster.serving import Serving, serving

EVENTS = {"Accept": "text/event-stream"}


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line.startswith(":"):
            yield "comment", line
        elif line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def url(at: Serving, id_: str) -> str:
    return f"{at.node.doors.urls.ingress}/holdfast/invocation/{id_}/attach"


async def test_a_follower_gets_progress_and_then_the_outcome(tmp_path: Path) -> None:
    async with serving(tmp_path) as at, aiohttp.ClientSession() as http, asyncio.timeout(PATIENCE_S):
        id_ = await at.send("flaky/fail")
        await at.reaches(id_, "backing-off")

        async with http.get(url(at, id_), headers=EVENTS) as response:
            assert response.status == 200 and response.content_type == "text/event-stream"
            assert response.headers["x-holdfast-id"] == id_
            heard = events(response)
            name, progress = await anext(heard)
            assert (name, progress["status"]) == ("progress", "backing-off")
            assert "the database is down" in progress["reason"]
            await at.admin("POST", f"/invocations/{id_}/kill")
            rest = [each async for each in heard]

        assert [name for name, _ in rest][-1] == "outcome"
        assert rest[-1][1]["failure"]["source"] == "invocation"


async def test_who_comes_late_gets_the_outcome_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as at, aiohttp.ClientSession() as http, asyncio.timeout(PATIENCE_S):
        id_ = await at.send("echo/say", data=b'{"a": 1}')
        await at.reaches(id_, "completed")

        async with http.get(url(at, id_), headers=EVENTS) as response:
            assert [each async for each in events(response)] == [("outcome", {"value": {"a": 1}})]


async def test_a_follower_of_nothing_gets_an_error_and_no_stream(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as at,
        aiohttp.ClientSession() as http,
        http.get(url(at, "inv_" + "0" * 32), headers=EVENTS) as response,
    ):
        assert (response.status, response.content_type) == (404, "application/json")


async def test_a_quiet_stream_shows_signs_of_life_and_ends_with_the_node(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(following, "SIGN_OF_LIFE_S", 0.05)
    async with serving(tmp_path) as at, aiohttp.ClientSession() as http, asyncio.timeout(PATIENCE_S):
        id_ = await at.send("agent/wait")
        async with http.get(url(at, id_), headers=EVENTS) as response:
            heard = events(response)
            async for name, _ in heard:
                if name == "comment":
                    break
            at.node.doors.ingress.leave()
            assert "outcome" not in [name async for name, _ in heard]


def test_outcomes_that_are_no_json_or_too_large_are_shown_as_such() -> None:
    assert show_outcome([0, b"\xff"]) == {"base64": "/w=="}
    assert show_outcome([0, b""]) == {"value": None}
    assert show_outcome([0, b"1" * (INLINE_BYTES_MAX + 1)]) == {"bytes": INLINE_BYTES_MAX + 1}
    assert show_outcome([0, b"[" * 100_000]).keys() == {"base64"}, "too deep for JSON"
