"""The ingress over real HTTP: calling handlers, following invocations, and completing promises and awakeables.

Below it is a partition in memory that answers like the state machine; test_node.py has whole nodes.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from holdfast.cluster.config import BadConfig, build
from holdfast.cluster.redaction import read_header_names
from holdfast.sdk.ids import (
    format_awakeable,
    format_id,
    idempotent_id,
    workflow_id,
)
from holdfast.statemachine.commands import CompletePromise, CompleteStep
from holdfast.statemachine.effects import Result
from tests.cluster.ingress_rig import NOW_MS, Rig, run


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


SECRETS = {
    "Authorization": "Bearer x", "Cookie": "a=b", "Set-Cookie": "a=b", "Proxy-Authorization": "Basic x", "X-API-Key": "x",
    "Api-Key": "x", "X-Auth-Token": "x", "X-Amz-Security-Token": "x",
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "reach"),
    [
        ({}, {"x-acme-secret", "x-acme-internal-id", "x-acme-inter", "x-tenant"}),
        (
            {"redact_headers": read_header_names("X-Acme-Secret, x-acme-internal-*")},
            {"x-acme-inter", "x-tenant", "x-api-key", "api-key", "x-auth-token", "x-amz-security-token", "set-cookie"},
        ),
        ({"redact_headers": read_header_names(["*"])}, set()),
        (
            {"redact_headers": ()},
            {
                "x-acme-secret", "x-acme-internal-id", "x-acme-inter", "x-tenant", "x-api-key", "api-key", "x-auth-token",
                "x-amz-security-token", "set-cookie",
            },
        ),
    ],
    ids=["default", "a list", "all", "none"],
)  # fmt: skip
def test_headers_with_secrets_are_not_journaled(settings: dict[str, Any], reach: set[str]) -> None:
    async def scenario(rig: Rig) -> None:
        own = {"X-Acme-Secret": "x", "X-Acme-Internal-Id": "x", "X-Acme-Inter": "x", "X-Tenant": "t1"}

        await rig.ask("POST", "/echo/say", data=b"1", headers={**SECRETS, **own})

        [invoke] = rig.partition.invoked.values()
        assert set(invoke.headers) - {"content-type"} == reach

    run(scenario, **settings)


@pytest.mark.parametrize("value", ["x api", "x:y", "a**", ["x-*-y"], 7, [7], ["a" * 200], ["é"]])
def test_what_names_no_header_is_refused(value: Any) -> None:
    with pytest.raises(BadConfig, match="redact_headers: "):
        build({"redact_headers": value})


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


def test_a_handler_named_send_is_distinguished_from_a_send() -> None:
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


def test_health_is_for_load_balancers() -> None:
    async def scenario(rig: Rig) -> None:
        well = await rig.ask("GET", "/holdfast/health")
        head = await rig.ask("HEAD", "/holdfast/health")
        rig.ingress._unhealthy = lambda: "partition 3 has no leader"
        ill = await rig.error("GET", "/holdfast/health")

        assert (well[0], head[0]) == (200, 200)
        assert (ill[0], ill[1]["message"]) == (503, "partition 3 has no leader")

    run(scenario)
