"""Invocations that are started over the admin API: the same ones as over the ingress, for those who may start them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from msgpack import unpackb

from tests.cluster.serving import Serving, run
from tests.cluster.test_audit import acts
from tests.cluster.test_tokens import one


async def start(at: Serving, **body: Any) -> tuple[int, Any]:
    return await at.admin("POST", "/invocations", json=body)


def test_an_invocation_is_started_and_completes(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        status, answer = await start(at, service="echo", handler="say", input={"hello": ["world", 1.5]})
        shown = await at.reaches(answer["invocationId"], "completed")

        assert (status, answer["status"]) == (202, "Accepted")
        assert shown["outcome"] == {"value": {"hello": ["world", 1.5]}}
        assert at.ingress.accepted == 1, "the ingress started it"

    run(tmp_path, scenario)


def test_keys_headers_and_bytes_reach_the_handler_as_over_the_ingress(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        by_hand = {"X-Tenant": "acme", "Authorization": "Bearer hush", "X-Api-Key": "hush"}
        raw = base64.b64encode(b"\xff\x00").decode()
        _, given = await start(at, service="counter", handler="add", key="a/b", input=1, headers=by_hand)
        _, echoed = await start(at, service="echo", handler="say", input={"base64": raw})
        for answer in (given, echoed):
            await at.reaches(answer["invocationId"], "completed")
        _, state = await at.admin("GET", "/services/counter/a%2Fb/state")

        started = {each.handler: each for each in at.endpoint.starts}
        assert started["add"].key == "a/b" and state["state"] == {"count": 1}
        headers = unpackb(started["add"].journal[0])[2][0]
        assert headers == {"x-tenant": "acme", "content-type": "application/json"}
        assert (await at.describe(echoed["invocationId"]))["outcome"] == {"value": {"base64": raw}}

    run(tmp_path, scenario)


def test_an_idempotency_key_finds_the_invocation_of_the_ingress(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        _, first = await at.call("echo/say/send", b'{"n":1}', headers={"Idempotency-Key": "order 7"})
        again = await start(at, service="echo", handler="say", input={"n": 1}, idempotency_key="order 7")
        other = await at.error(
            "POST", "/invocations", json={"service": "echo", "handler": "say", "input": 2, "idempotency_key": "order 7"}
        )

        assert again == (202, {"invocationId": first["invocationId"], "status": "PreviouslyAccepted"})
        assert other[0] == 422

    run(tmp_path, scenario)


def test_tags_come_in_the_header_as_over_the_ingress(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        _, answer = await start(at, service="echo", handler="say", headers={"X-Holdfast-Tags": "tenant=acme"})
        wrong = await start(at, service="echo", handler="say", headers={"x-holdfast-tags": "tenant"})

        found = await at.listed("invocations", "tag=tenant=acme", 5)
        assert [each["id"] for each in found] == [answer["invocationId"]]
        assert wrong[0] == 400 and "tenant=acme,order=17" in wrong[1]["message"]

    run(tmp_path, scenario)


def test_a_delayed_invocation_is_scheduled(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        _, answer = await start(at, service="echo", handler="say", input=1, delay="1h")

        assert (await at.reaches(answer["invocationId"], "scheduled"))["attempts"] == 0

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"handler": "say"}, 400, "are needed"),
        ({"service": "echo", "handler": "say", "inputs": 1}, 400, "there is no field"),
        ({"service": "nobody", "handler": "say"}, 404, "nobody"),
        ({"service": "echo", "handler": "shout"}, 404, "shout"),
        ({"service": "echo", "handler": "say", "key": "k"}, 400, "has no keys"),
        ({"service": "counter", "handler": "add"}, 400, "needs a key"),
        ({"service": "counter", "handler": "add", "key": ""}, 400, "not empty"),
        ({"service": "counter", "handler": "add", "key": "k" * 2000}, 400, "a key has"),
        ({"service": "counter", "handler": "add", "key": "\ud800"}, 400, "valid Unicode"),
        ({"service": "echo", "handler": "say", "delay": "soon"}, 400, "delay"),
        ({"service": "echo", "handler": "say", "idempotency_key": "k" * 600}, 400, "Idempotency-Key"),
        ({"service": "echo", "handler": "say", "headers": {"a b": "c"}}, 400, "not the name of a header"),
        ({"service": "echo", "handler": "say", "headers": {"a": "b\r\nc: d"}}, 400, "without line breaks"),
        ({"service": "echo", "handler": "say", "headers": {"a": "\x85"}}, 400, "control characters"),
        ({"service": "echo", "handler": "say", "headers": {"X-A": "1", "x-a": "2"}}, 400, "is given twice"),
        ({"service": "echo", "handler": "say", "headers": {"a": 1}}, 400, "headers"),
        ({"service": "echo", "handler": "say", "headers": {"idempotency-key": "k"}}, 400, "idempotency_key"),
        ({"service": "echo", "handler": "say", "headers": {"a": "b" * 20_000}}, 400, "too large"),
        ({"service": "echo", "handler": "say", "input": {"base64": "?"}}, 400, "base64"),
        ({"service": "echo", "handler": "say", "input": "i" * 2000}, 413, "larger than 1024 bytes"),
    ],
)
def test_a_wrong_request_starts_nothing_and_says_why(
    tmp_path: Path, body: dict[str, Any], status: int, says: str
) -> None:
    async def scenario(at: Serving) -> None:
        found, answer = await at.error("POST", "/invocations", json=body)

        assert found == status and says in answer["message"], answer
        assert at.ingress.accepted == 0

    run(tmp_path, scenario, body_bytes_max=1024)


async def test_a_token_starts_only_what_it_may_and_the_trail_names_it(tmp_path: Path) -> None:
    async with one(tmp_path) as (_, doors):
        for_echo = (await doors.create("invoke", services=("echo",)))["token"]
        operator = (await doors.create("operate"))["token"]

        async def status(token: str, service: str) -> int:
            body = {"service": service, "handler": "say", "input": "PAYLOAD"}
            return (await doors.ask("POST", "/invocations", token, value=body))[0]

        assert [await status(for_echo, "echo"), await status(for_echo, "other"), await status(for_echo, "x")] == [
            202,
            403,
            403,
        ]
        assert await status(operator, "echo") == 403
        found = [each for each in await acts(doors) if each["action"] == "invoke"]
        refused = {(each["targets"].get("service"), each["outcome"]) for each in found[:-1]}
        assert refused == {("other", "refused"), ("x", "refused"), (None, "refused")}
        assert found[-1]["outcome"] == "done" and set(found[-1]["targets"]) == {"service", "handler", "id"}
        assert "PAYLOAD" not in json.dumps(found)
