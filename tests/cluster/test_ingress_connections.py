"""Connections to the ingress: clients that send Expect, stay idle, disconnect or do not speak HTTP, and a node that
stops.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from holdfast.cluster.http import server as server_module
from holdfast.sdk.ids import (
    Route,
    format_id,
    idempotent_id,
)
from holdfast.statemachine.commands import Invoke
from tests.cluster.ingress_rig import Rig, run


async def exchange(port: int, head: bytes, body: bytes = b"") -> tuple[bytes, bytes]:
    """The answer before the body is sent, and the answer after it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    first = await reader.readuntil(b"\r\n\r\n")
    rest = b""
    if first.startswith(b"HTTP/1.1 100 "):
        writer.write(body)
        rest = await reader.readuntil(b"\r\n\r\n")
        writer.close()
    else:
        rest = await reader.read()  # Until it is closed.
        writer.close()
    return first, rest


def test_expect_100_continue_is_answered_by_continue_or_a_refusal() -> None:
    async def scenario(rig: Rig) -> None:
        def head(path: str, length: int) -> bytes:
            return b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n" % (
                path.encode(),
                length,
            )

        wanted, answer = await exchange(rig.server.port, head("/echo/say", 5), b"hello")
        large, _ = await exchange(rig.server.port, head("/echo/say", 10_000_000_000))
        unknown, _ = await exchange(rig.server.port, head("/nobody/say", 5))

        assert wanted == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert large.startswith(b"HTTP/1.1 413 ")
        assert unknown.startswith(b"HTTP/1.1 404 ")
        [command] = rig.partition.commands
        assert isinstance(command, Invoke) and command.payload == b"hello"

    run(scenario)


def test_a_connection_without_a_request_is_closed_and_one_that_waits_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(rig: Rig) -> None:
        waiting = asyncio.ensure_future(rig.ask("POST", "/echo/say", data=b"wait"))
        await rig.until(lambda: rig.ingress.waiting == 1)
        silent = await asyncio.open_connection("127.0.0.1", rig.server.port)
        slow = await asyncio.open_connection("127.0.0.1", rig.server.port)
        slow[1].write(b"POST /echo/say HTTP/1.1\r\nHo")

        assert await silent[0].read() == await slow[0].read() == b""
        for _, writer in (silent, slow):
            writer.close()
        [raw] = rig.partition.invoked
        rig.partition.complete(raw, [0, b"done"])
        assert (await waiting)[:2] == (200, b"done")

    monkeypatch.setattr(server_module, "IDLE_S", 0.3)
    run(scenario)


def test_a_client_that_goes_away_ends_its_wait_and_not_the_invocation() -> None:
    async def scenario(rig: Rig) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
        writer.write(
            b"POST /echo/say HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: k\r\nContent-Length: 4\r\n\r\nwait"
        )
        await rig.until(lambda: rig.ingress.waiting == 1)

        writer.close()
        await rig.until(lambda: rig.ingress.waiting == 0 and rig.exchange.active == 0)

        id_ = idempotent_id("echo", None, "say", "k")
        assert rig.partition.outcomes[id_] is None
        rig.partition.complete(id_, [0, b"done"])
        found = await rig.ask("GET", f"/holdfast/invocation/{format_id(id_)}/output")
        assert found[1] == b"done"

    run(scenario)


def test_a_stopping_node_answers_waiting_clients() -> None:
    async def scenario(rig: Rig) -> None:
        waiting = asyncio.ensure_future(rig.error("POST", "/echo/say", data=b"wait"))
        await rig.until(lambda: rig.ingress.waiting == 1)

        await rig.server.stop()

        status, error = await waiting
        assert status == 503
        assert "goes on" in error["message"]

    run(scenario)


def test_a_stopping_node_answers_requests_with_an_unknown_outcome_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not have been accepted, so its outcome is not awaited, but its connection must not just break."""
    monkeypatch.setattr(server_module, "ANSWER_S", 0.05)

    async def scenario(rig: Rig) -> None:
        asked = asyncio.Event()

        async def never(route: Route, command: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

        rig.partition.submit = never  # type: ignore[method-assign]
        sent = asyncio.ensure_future(rig.ask("POST", "/echo/say/send", data=b"1", headers={"Idempotency-Key": "k"}))
        await asked.wait()

        await rig.server.stop()

        status, body, response = await sent
        assert status == 503 and "outcome of this request is unknown" in json.loads(body)["message"]
        assert response.headers["x-holdfast-id"] == format_id(idempotent_id("echo", None, "say", "k"))
        assert response.headers["Retry-After"] and response.headers["Connection"] == "close"

    run(scenario)


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"POST /echo/say HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /echo/say HTTP/9.9\r\n\r\n",
        b"POST /echo/say HTTP/1.1\r\nHost: localhost\r\nBad Header\r\n\r\n",
        b"POST /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /echo/say HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 20_000 + b"\r\n\r\n",
    ],
)
def test_bytes_that_are_not_http_get_a_json_error_too(request_: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
        writer.write(request_)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()

        assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
        assert json.loads(body)["code"] == 400
        assert (await rig.ask("POST", "/echo/say", data=b"1"))[0] == 200

    run(scenario)


def test_a_whole_url_as_target_works() -> None:
    async def scenario(rig: Rig) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
        writer.write(
            b"POST http://proxy:80/echo/say HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 1\r\n\r\n1"
        )
        answer = await reader.read()
        writer.close()

        assert answer.startswith(b"HTTP/1.1 200 ")

    run(scenario)
