"""The ingress over real HTTP: every path, status and header of it, and whatever else a client may send.

Below it stands a partition in memory that knows what the state machine would answer; whole nodes are in test_node.py.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yarl import URL

from holdfast.cluster.config import Config, Endpoint
from holdfast.cluster.ingress import server as ingress_module
from holdfast.cluster.ingress.ingress import Ingress
from holdfast.cluster.ingress.server import IngressServer
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.routing.reader import Summary
from holdfast.log.errors import NotLeader, OutcomeUnknown
from holdfast.log.errors import Overloaded as LogOverloaded
from holdfast.sdk.ids import (
    InvocationId,
    format_awakeable,
    format_id,
    idempotent_id,
    new_id,
    workflow_id,
)
from holdfast.statemachine import refs
from holdfast.statemachine.commands import Command, CompletePromise, CompleteStep, Invoke, Ref
from holdfast.statemachine.effects import Result
from tests.cluster.rig import EVERY_KIND, PATIENCE_S, endpoint, registry

NOW_MS = 1_000_000


class Partition:
    """Everything below the ingress. Invocations complete with their own input, unless the input says otherwise:
    `wait` stays open, `fail` is a terminal error, and `refuse` is what the log raises."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.outcomes: dict[bytes, list[Any] | None] = {}
        self.invoked: dict[bytes, Invoke] = {}
        self.waiting: dict[bytes, list[asyncio.Future[list[Any]]]] = {}
        self.refuse: Exception | None = None
        self.answer = Result()
        self.large: dict[bytes, bytes] = {}

    def mint(self, service: str, key: str | None, /) -> InvocationId:
        return new_id(service, key, os.urandom(16))

    @contextmanager
    def wait(self, invocation: bytes, /) -> Iterator[asyncio.Future[list[Any]]]:
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(invocation, []).append(future)
        try:
            yield future
        finally:
            self.waiting[invocation].remove(future)
            future.cancel()

    async def submit(self, invocation: bytes, command: Command, /) -> Result:
        self.commands.append(command)
        if self.refuse is not None:
            raise self.refuse
        if not isinstance(command, Invoke):
            return self.answer
        if invocation in self.outcomes:
            return Result(200, "", self.outcomes[invocation])
        self.invoked[invocation] = command
        self.outcomes[invocation] = None
        if command.payload == b"fail":
            self.complete(invocation, [1, 418, "I am a teapot", "TerminalError"])
        elif command.payload != b"wait":
            self.complete(invocation, [0, command.payload])
        return Result()

    def complete(self, invocation: bytes, outcome: list[Any]) -> None:
        self.outcomes[invocation] = outcome
        for future in self.waiting.get(invocation, []):
            if not future.done():
                future.set_result(outcome)

    async def load(self, invocation: bytes, ref: Ref) -> bytes:
        return refs.restored(ref, self.large[ref.data])

    async def lookup(self, invocation: InvocationId) -> Summary | None:
        invoke = self.invoked.get(invocation)
        return Summary(self.outcomes[invocation], invoke.service, invoke.handler, None) if invoke is not None else None


class Rig:
    def __init__(
        self, partition: Partition, ingress: Ingress, server: IngressServer, http: aiohttp.ClientSession
    ) -> None:
        self.partition = partition
        self.ingress = ingress
        self.server = server
        self.http = http

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def ask(self, method: str, path: str, **more: Any) -> tuple[int, bytes, aiohttp.ClientResponse]:
        async with self.http.request(method, URL(self.url + path, encoded=True), **more) as response:
            return response.status, await response.read(), response

    async def error(self, method: str, path: str, **more: Any) -> tuple[int, dict[str, Any]]:
        status, body, response = await self.ask(method, path, **more)
        assert response.content_type == "application/json"
        parsed = json.loads(body)
        assert set(parsed) == {"code", "message", "source", "hint"} and parsed["code"] == status, parsed
        assert parsed["message"]
        return status, parsed

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.005)


async def known_services() -> Registry:
    async with endpoint(EVERY_KIND) as (_, uri):
        known = registry()
        await known.register(uri)
        await known.close()
        return known


@asynccontextmanager
async def rig(**settings: Any) -> AsyncIterator[Rig]:
    config = Config(ingress=Endpoint("127.0.0.1", 0), **settings)
    partition = Partition()
    ingress = Ingress(
        config,
        await known_services(),
        partition,
        partition,
        lookup=partition.lookup,
        load=partition.load,
        now_ms=lambda: NOW_MS,
    )
    server = IngressServer(config, ingress)
    await server.start()
    async with aiohttp.ClientSession() as http:
        yield Rig(partition, ingress, server, http)
    await server.stop()


def run(scenario: Callable[[Rig], Awaitable[None]], **settings: Any) -> None:
    async def inside() -> None:
        async with asyncio.timeout(PATIENCE_S), rig(**settings) as ready:
            await scenario(ready)

    asyncio.run(inside())


def test_a_call_answers_with_the_outcome_its_content_type_and_its_id() -> None:
    async def scenario(rig: Rig) -> None:
        status, body, response = await rig.ask("POST", "/echo/say", data=b'{"a":1}')
        text = await rig.ask("POST", "/echo/raw", data=b"hello")

        assert (status, body, response.content_type) == (200, b'{"a":1}', "application/json")
        assert response.headers["x-holdfast-id"] == format_id(next(iter(rig.partition.invoked)))
        assert text[2].content_type == "text/plain"

    run(scenario)


def test_the_handler_gets_headers_but_no_credentials() -> None:
    async def scenario(rig: Rig) -> None:
        headers = {"Authorization": "Bearer x", "Cookie": "a=b", "X-Tenant": "t1", "Content-Type": "text/csv"}

        await rig.ask("POST", "/echo/say", data=b"1", headers=headers)

        [invoke] = rig.partition.invoked.values()
        assert invoke.headers == {"x-tenant": "t1", "content-type": "text/csv"}

    run(scenario)


def test_a_terminal_error_keeps_its_code() -> None:
    async def scenario(rig: Rig) -> None:
        status, error = await rig.error("POST", "/echo/say", data=b"fail")

        assert (status, error["message"], error["source"]) == (418, "I am a teapot", "invocation")

    run(scenario)


def test_keys_are_percent_decoded() -> None:
    async def scenario(rig: Rig) -> None:
        for path, key in (
            ("/counter/a%2Fb/add", "a/b"),
            ("/counter/%C3%BC%20x/add", "ü x"),
            ("/counter/send/add", "send"),
            ("/counter/50%25/add", "50%"),
        ):
            status, _, _ = await rig.ask("POST", path, data=b"1")

            assert status == 200
            [*_, invoke] = rig.partition.invoked.values()
            assert invoke.key == key

    run(scenario)


def test_a_send_is_accepted_at_once_and_once() -> None:
    async def scenario(rig: Rig) -> None:
        first = await rig.ask("POST", "/echo/say/send", data=b"wait", headers={"Idempotency-Key": "k"})
        again = await rig.ask("POST", "/echo/say/send", data=b"wait", headers={"Idempotency-Key": "k"})

        name = format_id(idempotent_id("echo", None, "say", "k"))
        assert first[0] == again[0] == 202
        assert json.loads(first[1]) == {"invocationId": name, "status": "Accepted"}
        assert json.loads(again[1]) == {"invocationId": name, "status": "PreviouslyAccepted"}
        assert first[2].headers["x-holdfast-id"] == name

    run(scenario)


def test_a_handler_named_send_is_told_from_a_send() -> None:
    async def scenario(rig: Rig) -> None:
        called = await rig.ask("POST", "/echo/send", data=b"1")
        sent = await rig.ask("POST", "/echo/send/send", data=b"1")
        keyed = await rig.ask("POST", "/counter/k/add/send", data=b"1")

        assert [answer[0] for answer in (called, sent, keyed)] == [200, 202, 202]

    run(scenario)


@pytest.mark.parametrize(
    ("text", "milliseconds"), [("10s", 10_000), ("1h30m", 5_400_000), ("PT1.5S", 1500), ("P1D", 86_400_000), ("0s", 0)]
)
def test_a_send_can_be_delayed(text: str, milliseconds: int) -> None:
    async def scenario(rig: Rig) -> None:
        status, _, _ = await rig.ask("POST", f"/echo/say/send?delay={text}", data=b"1")

        assert status == 202
        [invoke] = rig.partition.invoked.values()
        assert invoke.start_at_ms == (NOW_MS + milliseconds if milliseconds else 0)

    run(scenario)


def test_a_second_request_with_the_same_key_attaches_to_the_first() -> None:
    async def scenario(rig: Rig) -> None:
        headers = {"Idempotency-Key": "double click"}
        first = asyncio.ensure_future(rig.ask("POST", "/echo/say", data=b"wait", headers=headers))
        second = asyncio.ensure_future(rig.ask("POST", "/echo/say", data=b"wait", headers=headers))
        await rig.until(lambda: rig.ingress.waiting == 2)

        rig.partition.complete(idempotent_id("echo", None, "say", "double click"), [0, b"done"])

        assert [(await task)[:2] for task in (first, second)] == [(200, b"done")] * 2
        assert len(rig.partition.invoked) == 1
        late = await rig.ask("POST", "/echo/say", data=b"wait", headers=headers)
        assert late[:2] == (200, b"done")

    run(scenario)


def test_a_workflow_runs_once_per_key() -> None:
    async def scenario(rig: Rig) -> None:
        first = await rig.ask("POST", "/signup/ann/run", data=b"1")
        second = await rig.ask("POST", "/signup/ann/run", data=b"2")
        status = await rig.ask("POST", "/signup/ann/status", data=b"3")

        assert first[1] == second[1] == b"1"
        assert first[2].headers["x-holdfast-id"] == format_id(workflow_id("signup", "ann"))
        assert status[1] == b"3"

    run(scenario)


def test_attach_waits_and_output_does_not() -> None:
    async def scenario(rig: Rig) -> None:
        _, _, response = await rig.ask("POST", "/echo/raw/send", data=b"wait")
        name = response.headers["x-holdfast-id"]
        [raw] = rig.partition.invoked

        status, error = await rig.error("GET", f"/holdfast/invocation/{name}/output")
        attached = asyncio.ensure_future(rig.ask("GET", f"/holdfast/invocation/{name}/attach"))
        await rig.until(lambda: rig.ingress.waiting == 1)
        rig.partition.complete(raw, [0, b"done"])

        assert status == 470 and "attach" in error["hint"]
        assert (await attached)[:2] == (200, b"done")
        output = await rig.ask("GET", f"/holdfast/invocation/{name}/output")
        assert output[:2] == (200, b"done")
        assert output[2].headers["x-holdfast-id"] == name
        assert output[2].content_type == "text/plain"

    run(scenario)


def test_a_workflow_is_found_by_its_key() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.ask("POST", "/signup/a%2Fb/run", data=b"1")

        found = await rig.ask("GET", "/holdfast/workflow/signup/a%2Fb/output")
        missing = await rig.error("GET", "/holdfast/workflow/signup/other/attach")
        wrong = await rig.error("GET", "/holdfast/workflow/echo/k/attach")

        assert found[:2] == (200, b"1")
        assert (missing[0], wrong[0]) == (404, 400)

    run(scenario)


def test_awakeables_and_promises_are_completed_by_clients() -> None:
    async def scenario(rig: Rig) -> None:
        id_ = workflow_id("signup", "ann")
        awakeable = format_awakeable(id_, 7)

        resolved = await rig.ask("POST", f"/holdfast/awakeables/{awakeable}/resolve", data=b'"yes"')
        await rig.ask("POST", f"/holdfast/awakeables/{awakeable}/reject", data=b"too late")
        await rig.ask("POST", "/holdfast/workflow/signup/ann/promises/ok/resolve", data=b"true")
        await rig.ask(
            "POST", "/holdfast/workflow/signup/ann/promises/ok/reject", data=b'{"message": "no budget", "code": 409}'
        )

        assert rig.partition.commands == [
            CompleteStep(id_, 7, [0, b'"yes"']),
            CompleteStep(id_, 7, [1, 500, "too late", "Rejected"]),
            CompletePromise("signup", "ann", "ok", [0, b"true"]),
            CompletePromise("signup", "ann", "ok", [1, 409, "no budget", "Rejected"]),
        ]
        assert (resolved[0], json.loads(resolved[1])) == (200, {"status": "Resolved"})
        assert resolved[2].headers["x-holdfast-id"] == format_id(id_)
        rig.partition.answer = Result(200)
        again = await rig.ask("POST", f"/holdfast/awakeables/{awakeable}/resolve", data=b'"yes"')
        assert json.loads(again[1]) == {"status": "AlreadyResolved"}
        rig.partition.answer = Result(404, "there is no such awakeable")
        assert (await rig.error("POST", f"/holdfast/awakeables/{awakeable}/resolve"))[0] == 404

    run(scenario)


def test_a_large_body_for_nobody_is_refused_before_it_is_read() -> None:
    async def scenario(rig: Rig) -> None:
        awakeable = format_awakeable(workflow_id("signup", "nobody"), 7)
        hostile = b"[" + b"[]," * 1_000_000 + b"[]]"

        for which in ("resolve", "reject"):
            assert (await rig.error("POST", f"/holdfast/awakeables/{awakeable}/{which}", data=hostile))[0] == 404

        assert rig.partition.commands == []

    run(scenario)


def test_a_rejection_is_no_larger_than_its_text_can_be() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.ask("POST", "/signup/ann/run/send", data=b"wait")
        awakeable = format_awakeable(workflow_id("signup", "ann"), 7)
        promise = "/holdfast/workflow/signup/ann/promises/ok/reject"

        large = await rig.error("POST", f"/holdfast/awakeables/{awakeable}/reject", data=b"[[]," * 100_000)
        promised = await rig.error("POST", promise, data=b"[[]," * 100_000)
        await rig.ask("POST", promise, data=b"[" + b"[]," * 20_000 + b"[]]")

        assert (large[0], promised[0]) == (413, 413)
        command = rig.partition.commands[-1]
        assert isinstance(command, CompletePromise) and command.outcome[2].startswith("[[],[]")

    run(scenario)


def test_health_is_for_load_balancers() -> None:
    async def scenario(rig: Rig) -> None:
        well = await rig.ask("GET", "/holdfast/health")
        head = await rig.ask("HEAD", "/holdfast/health")
        rig.ingress._unhealthy = lambda: "partition 3 has no leader"
        ill = await rig.error("GET", "/holdfast/health")

        assert (well[0], head[0]) == (200, 200)
        assert (ill[0], ill[1]["message"]) == (503, "partition 3 has no leader")

    run(scenario)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/nothing/run", 404),
        ("POST", "/echo/nothing", 404),
        ("POST", "/echo", 404),
        ("POST", "/echo/", 404),
        ("POST", "/echo/say/", 404),
        ("POST", "/echo/k/say", 404),
        ("POST", "/counter/add", 404),
        ("POST", "/counter/k/add/sent", 404),
        ("POST", "/counter//add", 400),
        ("POST", "/counter/" + "k" * 600 + "/add", 400),
        ("POST", "/counter/%ff/add", 400),
        ("POST", "/hidden/say", 403),
        ("GET", "/echo/say", 405),
        ("DELETE", "/echo/say", 405),
        ("POST", "/echo/say?delay=10s", 400),
        ("POST", "/echo/say/send?delay=soon", 400),
        ("POST", "/echo/say/send?delay=", 400),
        ("POST", "/echo/say/send?delay=9999w", 400),
        ("POST", "/echo/say/send?dealy=10s", 400),
        ("POST", "/holdfast/health", 405),
        ("GET", "/holdfast", 404),
        ("GET", "/holdfast/invocation/inv_12/output", 400),
        ("GET", "/holdfast/invocation/inv_" + "0" * 32 + "/output", 404),
        ("GET", "/holdfast/invocation/inv_" + "0" * 32 + "/input", 404),
        ("POST", "/holdfast/awakeables/awk_12/resolve", 400),
        ("GET", "/holdfast/awakeables/awk_" + "0" * 40 + "/resolve", 405),
    ],
)
def test_a_wrong_request_gets_a_clear_error(method: str, path: str, status: int) -> None:
    async def scenario(rig: Rig) -> None:
        found, error = await rig.error(method, path)

        assert found == status
        assert error["source"] == "ingress"
        assert rig.partition.commands == []

    run(scenario)


def test_a_wrong_method_says_which_is_right() -> None:
    async def scenario(rig: Rig) -> None:
        _, _, response = await rig.ask("GET", "/echo/say")

        assert response.headers["Allow"] == "POST"

    run(scenario)


def test_a_path_without_its_key_names_the_kind_of_service() -> None:
    async def scenario(rig: Rig) -> None:
        _, error = await rig.error("POST", "/counter/add")

        assert error["message"].startswith("counter is a virtual object, and ")

    run(scenario)


def test_a_wrong_rejection_and_a_wrong_idempotency_key_are_refused() -> None:
    async def scenario(rig: Rig) -> None:
        awakeable = format_awakeable(b"\0" * 16, 1)
        rejection = await rig.error("POST", f"/holdfast/awakeables/{awakeable}/reject", data=b'{"code": 200}')
        empty = await rig.error("POST", "/echo/say", headers={"Idempotency-Key": ""})
        long = await rig.error("POST", "/echo/say", headers={"Idempotency-Key": "k" * 513})

        assert [rejection[0], empty[0], long[0]] == [400] * 3

    run(scenario)


def test_a_body_over_the_bound_is_refused_whether_announced_or_not() -> None:
    async def scenario(rig: Rig) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(4):
                yield b"x" * 600

        announced = await rig.error("POST", "/echo/say", data=b"x" * 2049)
        chunked = await rig.error("POST", "/echo/say", data=chunks())
        fits = await rig.ask("POST", "/echo/say", data=b"x" * 2048)

        assert (announced[0], chunked[0], fits[0]) == (413, 413, 200)
        assert rig.ingress.active_bytes == 0

    run(scenario, body_bytes_max=2048)


def test_a_compressed_body_is_unpacked_within_the_bound() -> None:
    async def scenario(rig: Rig) -> None:
        headers = {"Content-Encoding": "deflate"}
        small = await rig.ask("POST", "/echo/say", data=zlib.compress(b"x" * 2000), headers=headers)
        bomb = await rig.error("POST", "/echo/say", data=zlib.compress(b"x" * 10_000_000), headers=headers)
        broken = await rig.error("POST", "/echo/say", data=b"not deflate", headers=headers)
        cut = await rig.error("POST", "/echo/say", data=zlib.compress(b"x" * 2000)[:-5], headers=headers)
        gzipped = await rig.ask("POST", "/echo/say", data=gzip.compress(b"x"), headers={"Content-Encoding": "gzip"})
        strange = await rig.error("POST", "/echo/say", data=b"x", headers={"Content-Encoding": "br"})
        two = await rig.error("POST", "/echo/say", data=zlib.compress(b"x") + zlib.compress(b"y"), headers=headers)

        assert two[0] == 400, "what is behind the end is neither dropped nor kept"
        assert small[:2] == (200, b"x" * 2000) and gzipped[:2] == (200, b"x")
        assert (bomb[0], broken[0], cut[0], strange[0]) == (413, 400, 400, 415)

    run(scenario, body_bytes_max=2048)


def test_a_flood_is_told_to_come_back_later_and_what_was_accepted_goes_on() -> None:
    async def scenario(rig: Rig) -> None:
        accepted = [asyncio.ensure_future(rig.ask("POST", "/echo/say", data=b"wait")) for _ in range(8)]
        await rig.until(lambda: rig.ingress.waiting == 8)

        flood = await asyncio.gather(*(rig.ask("POST", "/echo/say", data=b"1") for _ in range(30)))
        for raw in rig.partition.invoked:
            rig.partition.complete(raw, [0, b"done"])

        assert {answer[0] for answer in flood} == {429}
        assert {answer[2].headers["Retry-After"] for answer in flood} == {"1"}
        assert [(await task)[0] for task in accepted] == [200] * 8
        assert rig.ingress.active == 0
        assert (await rig.ask("POST", "/echo/say", data=b"1"))[0] == 200

    run(scenario, requests_max=8)


def test_bodies_in_progress_are_bounded_together() -> None:
    async def scenario(rig: Rig) -> None:
        go_on = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b"x" * 700_000
            await go_on.wait()
            yield b"x"

        first = asyncio.ensure_future(rig.ask("POST", "/echo/say", data=slow()))
        await rig.until(lambda: rig.ingress.active_bytes >= 700_000)
        refused = await rig.error("POST", "/echo/say", data=b"x" * 500_000)
        go_on.set()

        assert refused[0] == 429
        assert (await first)[0] == 200
        assert rig.ingress.active_bytes == 0

    run(scenario, request_bytes_max=1024 * 1024)


def test_connections_are_bounded() -> None:
    async def scenario(rig: Rig) -> None:
        waiting = [asyncio.ensure_future(rig.ask("POST", "/echo/say", data=b"wait")) for _ in range(3)]
        await rig.until(lambda: rig.ingress.waiting == 3)

        reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
        answer = await reader.read()

        assert answer.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1\r\n" in answer
        writer.close()
        for raw in list(rig.partition.invoked):
            rig.partition.complete(raw, [0, b"done"])
        assert [(await each)[0] for each in waiting] == [200] * 3
        assert (await rig.ask("POST", "/echo/say", data=b"1"))[0] == 200

    run(scenario, connections_max=3)


async def exchange(port: int, head: bytes, body: bytes = b"") -> tuple[bytes, bytes]:
    """(what comes before the body is sent, what comes after it)"""
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


def test_a_client_that_asks_first_is_told_to_send_its_body_or_that_it_is_not_wanted() -> None:
    async def scenario(rig: Rig) -> None:
        def head(path: str, length: int) -> bytes:
            return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n" % (
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

    monkeypatch.setattr(ingress_module, "IDLE_S", 0.3)
    run(scenario)


@pytest.mark.parametrize(
    ("error", "status"),
    [(NotLeader(None), 503), (LogOverloaded("full"), 429), (OutcomeUnknown("lost"), 503), (TimeoutError(), 503)],
)
def test_what_the_log_refuses_becomes_http_with_the_id_to_ask_for(error: Exception, status: int) -> None:
    async def scenario(rig: Rig) -> None:
        rig.partition.refuse = error

        found, _, response = await rig.ask("POST", "/echo/say", data=b"1")

        assert found == status
        assert response.headers["Retry-After"] == "1"
        assert response.headers["x-holdfast-id"].startswith("inv_")

    run(scenario)


def test_a_defect_is_a_500_with_its_cause_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(rig: Rig) -> None:
        rig.partition.refuse = ZeroDivisionError("the cause")

        status, error = await rig.error("POST", "/echo/say", data=b"1")

        assert status == 500
        assert "the cause" not in error["message"]

    with caplog.at_level(logging.ERROR):
        run(scenario)

    assert "the cause" in caplog.text


def test_a_client_that_goes_away_ends_its_wait_and_not_the_invocation() -> None:
    async def scenario(rig: Rig) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
        writer.write(b"POST /echo/say HTTP/1.1\r\nHost: h\r\nIdempotency-Key: k\r\nContent-Length: 4\r\n\r\nwait")
        await rig.until(lambda: rig.ingress.waiting == 1)

        writer.close()
        await rig.until(lambda: rig.ingress.waiting == 0 and rig.ingress.active == 0)

        id_ = idempotent_id("echo", None, "say", "k")
        assert rig.partition.outcomes[id_] is None
        rig.partition.complete(id_, [0, b"done"])
        found = await rig.ask("GET", f"/holdfast/invocation/{format_id(id_)}/output")
        assert found[1] == b"done"

    run(scenario)


def test_a_stopping_node_answers_those_who_wait() -> None:
    async def scenario(rig: Rig) -> None:
        waiting = asyncio.ensure_future(rig.error("POST", "/echo/say", data=b"wait"))
        await rig.until(lambda: rig.ingress.waiting == 1)

        await rig.server.stop()

        status, error = await waiting
        assert status == 503
        assert "goes on" in error["message"]

    run(scenario)


def test_a_stopping_node_answers_also_a_request_whose_fate_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not known to have been accepted, so nobody waits for its outcome; its connection must not just break."""
    monkeypatch.setattr(ingress_module, "ANSWER_S", 0.05)

    async def scenario(rig: Rig) -> None:
        asked = asyncio.Event()

        async def never(invocation: bytes, command: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

        rig.partition.submit = never  # type: ignore[method-assign]
        sent = asyncio.ensure_future(rig.ask("POST", "/echo/say/send", data=b"1", headers={"Idempotency-Key": "k"}))
        await asked.wait()

        await rig.server.stop()

        status, body, response = await sent
        assert status == 503 and "does not know" in json.loads(body)["message"]
        assert response.headers["x-holdfast-id"] == format_id(idempotent_id("echo", None, "say", "k"))
        assert response.headers["Retry-After"] and response.headers["Connection"] == "close"

    run(scenario)


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"POST /echo/say HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /echo/say HTTP/9.9\r\n\r\n",
        b"POST /echo/say HTTP/1.1\r\nHost: h\r\nBad Header\r\n\r\n",
        b"POST /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
        b"POST /echo/say HTTP/1.1\r\nHost: h\r\nX: " + b"y" * 20_000 + b"\r\n\r\n",
    ],
)
def test_what_is_not_http_gets_a_json_error_too(request_: bytes) -> None:
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
            b"POST http://proxy:80/echo/say HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 1\r\n\r\n1"
        )
        answer = await reader.read()
        writer.close()

        assert answer.startswith(b"HTTP/1.1 200 ")

    run(scenario)


class _Body:
    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.length: int | None = len(raw)

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.raw


segments = st.lists(
    st.sampled_from(["echo", "say", "counter", "add", "signup", "run", "send", "holdfast", "health", "invocation",
                     "workflow", "awakeables", "attach", "output", "resolve", "reject", "promises", "", "%2F", "%zz",
                     "inv_" + "0" * 32, "awk_" + "0" * 40]) | st.text(max_size=6),
    max_size=7,
)  # fmt: skip
targets = st.builds(
    lambda parts, query: "/" + "/".join(parts) + query,
    segments,
    st.sampled_from(["", "?", "?delay=1s", "?a=b&a=c", "?delay=P"]) | st.text(max_size=8).map(lambda text: "?" + text),
)
header_values = st.text(max_size=12)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(["POST", "GET", "HEAD", "DELETE", "OPTIONS", "X"]),
    target=targets | st.text(max_size=20),
    headers=st.dictionaries(st.sampled_from(["Idempotency-Key", "X-A", "Content-Type", "x-\udcff"]), header_values),
    body=st.binary(max_size=20) | st.sampled_from([b"fail", b'{"code": 1}', b"[" * 5000]),
)
def test_whatever_comes_in_an_answer_goes_out(
    caplog: pytest.LogCaptureFixture, method: str, target: str, headers: dict[str, str], body: bytes
) -> None:
    async def inside() -> None:
        partition = Partition()
        ingress = Ingress(
            Config(),
            SERVICES,
            partition,
            partition,
            lookup=partition.lookup,
            load=partition.load,
            now_ms=lambda: NOW_MS,
        )

        answer = await asyncio.wait_for(ingress.answer(method, target, headers, _Body(body)), PATIENCE_S)

        assert answer.status != 500, caplog.text
        assert answer.status in (200, 202, 400, 403, 404, 405, 418, 470)
        assert ingress.active == 0 and ingress.active_bytes == 0 and ingress.waiting == 0
        for invoke in partition.invoked.values():
            json.dumps(invoke.headers).encode()

    body = b"1" if body == b"wait" else body
    asyncio.run(inside())


SERVICES = asyncio.run(known_services())
