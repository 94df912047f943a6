"""Awakeables over HTTP: knowing the id of an invocation is not enough to complete one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from holdfast.sdk.ids import format_awakeable, parse_id
from holdfast.sdk.journal import Op
from tests.cluster.harness import Handled
from tests.cluster.test_tokens import Doors, one

SECRET = b"8 bytes!"


async def asks(handled: Handled) -> None:
    """Like an SDK: the first attempt draws a secret, if the node takes one. The input says whether it knows of secrets."""
    if handled.length == 1:
        knows = handled.start.secrets and handled.input != b'"old"'
        handled.wait_for(handled.step(Op.AWAKEABLE, "awakeable", [SECRET] if knows else []))
    else:
        outcome = handled.journal[1].outcome
        assert outcome is not None
        handled.output(outcome[1])


async def waiting(doors: Doors, path: str, token: str, value: str) -> str:
    status, sent = await doors.ask("POST", f"{path}/send", token, door="ingress", value=value)
    assert status == 202
    async with asyncio.timeout(30):
        while (await doors.ask("GET", f"/invocations/{sent['invocationId']}", doors.root))[1]["status"] != "suspended":
            await asyncio.sleep(0.01)
    text: str = sent["invocationId"]
    return text


async def resolve(doors: Doors, awakeable: str, token: str | None) -> int:
    path = f"/holdfast/awakeables/{awakeable}/resolve"
    return (await doors.ask("POST", path, token, door="ingress", value="yes"))[0]


async def test_an_awakeable_is_resolved_by_those_who_have_its_id_and_a_token(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors):
        await world.register({"approvals/ask": asks})
        token = (await doors.create("invoke"))["token"]
        text = await waiting(doors, "/approvals/ask", token, "new")
        invocation = parse_id(text)

        for secret in (b"", b"8 others", bytes(8)):
            assert await resolve(doors, format_awakeable(invocation, 1, secret), token) == 404
        assert await resolve(doors, format_awakeable(invocation, 1, SECRET), None) == 401
        assert await resolve(doors, format_awakeable(invocation, 1, SECRET), token) == 200

        status, outcome = await doors.ask("GET", f"/holdfast/invocation/{text}/attach", token, door="ingress")
        assert (status, outcome) == (200, "yes")
        assert await resolve(doors, format_awakeable(invocation, 1, SECRET), token) == 200, (
            "the answer may have been lost"
        )


async def test_an_awakeable_of_an_older_sdk_is_resolved_by_its_id_of_40_digits(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors):
        await world.register({"approvals/ask": asks})
        token = (await doors.create("invoke"))["token"]
        invocation = parse_id(await waiting(doors, "/approvals/ask", token, "old"))

        assert await resolve(doors, format_awakeable(invocation, 1, SECRET), token) == 404
        assert await resolve(doors, format_awakeable(invocation, 1), token) == 200


async def test_the_journal_shows_the_id_of_an_awakeable_to_those_who_may_complete_it(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors):
        await world.register({"approvals/ask": asks})
        text = await waiting(doors, "/approvals/ask", doors.root, "new")
        whole = format_awakeable(parse_id(text), 1, SECRET)
        tokens = {
            "reads": await doors.create("read"),
            "invokes some": await doors.create("read", "invoke", services=("approvals",)),
            "invokes all": await doors.create("read", "invoke"),
            "admin": {"token": doors.root},
        }

        shown = {}
        for name, token in tokens.items():
            _, journal = await doors.ask("GET", f"/invocations/{text}/journal", token["token"])
            _, described = await doors.ask("GET", f"/invocations/{text}", token["token"])
            shown[name] = journal["steps"][1]["argument"]
            assert SECRET.hex() not in str(described) and "an awakeable (step 1)" in described["why_not_running"]

        assert shown == {"reads": {}, "invokes some": {}, "invokes all": {"id": whole}, "admin": {"id": whole}}
