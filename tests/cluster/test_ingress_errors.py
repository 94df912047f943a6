"""Answers of the ingress to wrong requests, to refusals of the log and to defects: always a clear error."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.cluster.config import Config
from holdfast.cluster.http.exchange import Exchange
from holdfast.cluster.ingress.ingress import Ingress
from holdfast.log.errors import NotLeader, OutcomeUnknown
from holdfast.log.errors import Overloaded as LogOverloaded
from holdfast.sdk.ids import (
    InvocationId,
    format_awakeable,
)
from tests.cluster.ingress_rig import NOW_MS, Partition, Rig, known_services, run
from tests.cluster.rig import PATIENCE_S


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


def test_a_wrong_method_is_refused_with_the_right_one() -> None:
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
        awakeable = format_awakeable(InvocationId(b"\0" * 16), 1)
        rejection = await rig.error("POST", f"/holdfast/awakeables/{awakeable}/reject", data=b'{"code": 200}')
        empty = await rig.error("POST", "/echo/say", headers={"Idempotency-Key": ""})
        long = await rig.error("POST", "/echo/say", headers={"Idempotency-Key": "k" * 513})

        assert [rejection[0], empty[0], long[0]] == [400] * 3

    run(scenario)


@pytest.mark.parametrize(
    ("error", "status"),
    [(NotLeader(None), 503), (LogOverloaded("full"), 429), (OutcomeUnknown("lost"), 503), (TimeoutError(), 503)],
)
def test_a_refusal_of_the_log_becomes_an_http_error_with_the_id(error: Exception, status: int) -> None:
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


class _Body:
    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.length: int | None = len(raw)

    def whole(self) -> bytes | None:
        return None  # So that it arrives in chunks.

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


SERVICES = asyncio.run(known_services())


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(["POST", "GET", "HEAD", "DELETE", "OPTIONS", "X"]),
    target=targets | st.text(max_size=20),
    headers=st.dictionaries(st.sampled_from(["Idempotency-Key", "X-A", "Content-Type", "x-\udcff"]), header_values),
    body=st.binary(max_size=20) | st.sampled_from([b"fail", b'{"code": 1}', b"[" * 5000]),
)
def test_any_request_gets_an_answer(
    caplog: pytest.LogCaptureFixture, method: str, target: str, headers: dict[str, str], body: bytes
) -> None:
    async def inside() -> None:
        partition = Partition()
        ingress = Ingress(
            Config(),
            SERVICES,
            partition,
            partition,
            approvals=partition,
            lookup=partition.lookup,
            load=partition.load,
            now_ms=lambda: NOW_MS,
        )

        exchange = Exchange(Config(), ingress, source="ingress")
        answer = await asyncio.wait_for(exchange.answer(method, target, headers, _Body(body)), PATIENCE_S)

        assert answer.status != 500, caplog.text
        assert answer.status in (200, 202, 400, 403, 404, 405, 418, 470)
        assert exchange.active == 0 and exchange.active_bytes == 0 and ingress.waiting == 0
        for invoke in partition.invoked.values():
            json.dumps(invoke.headers).encode()

    body = b"1" if body == b"wait" else body
    asyncio.run(inside())
