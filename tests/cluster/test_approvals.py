"""Approvals over HTTP: who sees them, who decides, and what those are told who come too late."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from holdfast.sdk.ids import format_approval, parse_id
from holdfast.sdk.journal import Op, unpack_decided
from tests.cluster.harness import Handled
from tests.cluster.test_tokens import Doors, one
from tests.cluster.watching import watching

SECRET = b"8 bytes!"


async def asks(handled: Handled) -> None:
    """The input says what is asked. Completes with the choice, and the payload if it was edited."""
    if handled.length == 1:
        payload, choices, timeout_ms = b'{"eur":240}', ["approve", "reject"], 1 if handled.input == b'"short"' else 0
        if handled.input == b'"long"':
            payload = b'{"eur":240,"order":12345678901234567891}'
        title, editable = json.loads(handled.input), handled.input != b'"fixed"'
        argument = [title, payload, choices, "finance", timeout_ms, 0, editable, SECRET]
        handled.wait_for(handled.step(Op.APPROVAL, "approval", argument))
        return
    outcome = handled.journal[1].outcome
    assert outcome is not None
    decided = unpack_decided(outcome[1])
    handled.output(f'["{decided.choice}", {(decided.payload or b"null").decode()}]'.encode())


async def asked(doors: Doors, title: str, *, service: str = "refunds", status: str = "suspended") -> str:
    """The id of an invocation that asks, once it has this status."""
    sent = (await doors.ask("POST", f"/{service}/ask/send", doors.root, door="ingress", value=title))[1]
    text: str = sent["invocationId"]
    async with asyncio.timeout(30):
        while (await doors.ask("GET", f"/invocations/{text}", doors.root))[1]["status"] != status:
            await asyncio.sleep(0.01)
    return text


def name_of(invocation: str) -> str:
    return format_approval(parse_id(invocation), 1)


def id_of(invocation: str) -> str:
    return format_approval(parse_id(invocation), 1, SECRET)


async def outcome(doors: Doors, invocation: str) -> Any:
    return (await doors.ask("GET", f"/holdfast/invocation/{invocation}/attach", doors.root, door="ingress"))[1]


async def decide(doors: Doors, id_: str, token: str | None, **value: Any) -> tuple[int, Any]:
    status, answer = await doors.ask("POST", f"/approvals/{id_}", token, value=value)
    return status, answer


async def test_an_approval_is_listed_shown_decided_and_remembered(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors):
        await world.register({"refunds/ask": asks})
        invocation = await asked(doors, "Refund order 17?")
        token = await doors.create("approve", name="ann")

        status, page = await doors.ask("GET", "/approvals?assignee=finance&service=refunds", token["token"])
        [row] = page["approvals"]
        assert (status, page["cursor"]) == (200, None)
        assert row["id"] == name_of(invocation) and row["invocation"] == invocation
        assert (row["title"], row["payload"], row["choices"]) == (
            "Refund order 17?",
            {"eur": 240},
            ["approve", "reject"],
        )
        assert (row["status"], row["decision"], row["assignee"]) == ("waiting", None, "finance")
        assert (await doors.ask("GET", f"/approvals/{row['id']}", token["token"]))[1] == row
        for query in ("assignee=legal", "service=other", "key=k", "older_than=1h", "due_within=1d"):
            assert (await doors.ask("GET", f"/approvals?{query}", token["token"]))[1]["approvals"] == []

        status, answer = await decide(
            doors, row["id"], token["token"], choice="approve", comment="fine", payload={"eur": 200}
        )

        assert status == 200 and answer["status"] == "Decided"
        decision = answer["decision"]
        assert decision["by"] == {"id": token["id"], "name": "ann"} and decision["payload"] == {"eur": 200}
        assert await outcome(doors, invocation) == ["approve", {"eur": 200}]
        assert (await doors.ask("GET", "/approvals", token["token"]))[1]["approvals"] == []
        _, journal = await doors.ask("GET", f"/invocations/{invocation}/journal", doors.root)
        assert journal["steps"][1]["outcome"]["value"] == decision
        assert SECRET.hex() not in str(journal) and "secret" not in journal["steps"][1]["argument"]
        shown = (await doors.ask("GET", f"/approvals/{row['id']}", token["token"]))[1]
        assert (shown["status"], shown["decision"]) == ("decided", decision)


async def test_those_who_come_too_late_are_told_who_decided_what(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors):
        await world.register({"refunds/ask": asks})
        invocation = await asked(doors, "Refund?")
        ann, bob = [(await doors.create("approve", name=name))["token"] for name in ("ann", "bob")]
        id_ = name_of(invocation)

        first = await decide(doors, id_, ann, choice="reject", comment="too much")
        again = await decide(doors, id_, ann, choice="reject", comment="too much")
        other = await decide(doors, id_, bob, choice="approve")

        assert first[0] == 200 and again == (200, {**first[1], "status": "AlreadyDecided"})
        assert other[0] == 409 and "'reject' was decided by ann at " in other[1]["message"]
        assert other[1]["details"] == ["comment: too much"]


async def test_a_decision_that_the_approval_does_not_offer_is_refused(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors):
        await world.register({"refunds/ask": asks})
        invocation, fixed = await asked(doors, "Refund?"), await asked(doors, "fixed")
        id_ = name_of(invocation)

        for value, says in (
            ({"choice": "maybe"}, "choose approve or reject"),
            ({}, '"choice" must be'),
            ({"choice": 7}, '"choice" must be'),
            ({"choice": "approve", "comment": 7}, '"comment" must be'),
            ({"choice": "approve", "note": "x"}, "there is no field"),
        ):
            status, answer = await decide(doors, id_, doors.root, **value)
            assert status == 400 and says in answer["message"], answer
        assert (await decide(doors, id_, doors.root, choice="approve", comment="x" * 5000))[0] == 413
        assert (await decide(doors, id_, doors.root, choice="approve", payload="x" * 65_536))[0] == 413
        status, answer = await decide(doors, name_of(fixed), doors.root, choice="approve", payload=1)
        assert status == 400 and "must not be edited" in answer["message"]
        assert (await decide(doors, "apr_12", doors.root, choice="approve"))[0] == 400
        status, answer = await decide(doors, f"{id_}?choice=reject", doors.root, choice="approve")
        assert status == 400 and "there is no parameter" in answer["message"]
        assert (await decide(doors, name_of(invocation)[:-1] + "9", doors.root, choice="approve"))[0] == 404
        assert (await decide(doors, id_of(invocation)[:-1] + "0", doors.root, choice="approve"))[0] == 404


async def test_an_approval_that_is_gone_or_timed_out_says_why(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors):
        await world.register({"refunds/ask": asks})
        cancelled, killed = await asked(doors, "Refund?"), await asked(doors, "Refund?")
        short = await asked(doors, "short", status="completed")
        await doors.ask("POST", f"/invocations/{killed}/kill", doors.root)
        await doors.ask("POST", f"/invocations/{cancelled}/cancel", doors.root)

        found = {}
        for name, invocation in (("cancelled", cancelled), ("killed", killed), ("short", short)):
            status, answer = await decide(doors, name_of(invocation), doors.root, choice="approve")
            shown = (await doors.ask("GET", f"/approvals/{name_of(invocation)}", doors.root))[1]["status"]
            found[name] = (status, answer["message"].partition(" at ")[0], shown)

        assert found == {
            "cancelled": (
                404,
                "the approval is gone: its invocation was cancelled before anybody decided",
                "cancelled",
            ),
            "killed": (404, "the approval is gone: its invocation ended (killed) before anybody decided", "gone"),
            "short": (409, "the approval timed out", "timed-out"),
        }
        assert await outcome(doors, short) == ["None", None]
        assert (await doors.ask("GET", "/approvals", doors.root))[1]["approvals"] == []


async def test_the_ingress_takes_a_decision_from_holders_of_the_whole_id_alone(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors):
        await world.register({"refunds/ask": asks})
        invocation = await asked(doors, "Refund?")
        token = (await doors.create("invoke", name="shop"))["token"]
        elsewhere = (await doors.create("invoke", services=("other",)))["token"]
        approver = (await doors.create("approve"))["token"]

        async def send(id_: str, token: str | None, **value: Any) -> tuple[int, Any]:
            return await doors.ask("POST", f"/holdfast/approvals/{id_}", token, door="ingress", value=value)

        wrong = format_approval(parse_id(invocation), 1, b"8 others")
        assert [(await send(id_, token, choice="approve"))[0] for id_ in (name_of(invocation), wrong)] == [404, 404]
        assert (await send("apr_12", token, choice="approve"))[0] == 400
        assert (await send(id_of(invocation), None, choice="approve"))[0] == 401
        assert (await send(id_of(invocation), elsewhere, choice="approve"))[0] == 403
        assert (await send(id_of(invocation), approver, choice="approve"))[0] == 403
        assert (await send(id_of(invocation), token, choice="approve", more=1))[0] == 400
        assert (await send(id_of(invocation), token, choice="?"))[0] == 400
        assert await send(id_of(invocation), token, choice="approve", payload=[1]) == (
            200,
            {"status": "Decided", "choice": "approve"},
        )
        assert (await send(id_of(invocation), token, choice="approve", payload=[1]))[1]["status"] == "AlreadyDecided"
        assert (await send(id_of(invocation), token, choice="reject"))[0] == 409
        assert await outcome(doors, invocation) == ["approve", [1]]


async def test_a_token_that_decides_for_some_services_does_not_decide_for_others(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors):
        await world.register({"refunds/ask": asks, "loans/ask": asks})
        refund, loan = await asked(doors, "Refund?"), await asked(doors, "Loan?", service="loans")
        token = (await doors.create("approve", services=("refunds",)))["token"]
        reader = (await doors.create("read"))["token"]

        status, answer = await decide(doors, name_of(loan), token, choice="approve")
        assert status == 403 and "may decide for refunds, but not for loans" in answer["message"]
        assert (await decide(doors, name_of(refund), reader, choice="approve"))[0] == 403
        assert (await decide(doors, name_of(refund), token, choice="approve"))[0] == 200
        operator = (await doors.create("operate", "invoke", services=("refunds",)))["token"]
        assert (await decide(doors, name_of(loan), operator, choice="approve"))[0] == 200, "services restrict invoke"


async def test_the_audit_trail_says_who_decided_and_no_log_has_the_secret(tmp_path: Path, caplog: Any) -> None:
    async with one(tmp_path) as (world, doors):
        await world.register({"refunds/ask": asks})
        first, second = await asked(doors, "Refund?"), await asked(doors, "Refund?")
        ann = (await doors.create("approve", name="ann"))["token"]
        shop = (await doors.create("invoke", name="shop"))["token"]

        await decide(doors, id_of(first), ann, choice="approve", comment="COMMENT")
        await doors.ask(
            "POST", f"/holdfast/approvals/{id_of(second)}", shop, door="ingress", value={"choice": "reject"}
        )

        acts = (await doors.ask("GET", "/audit?action=decide_approval", doors.root))[1]["acts"]
        by = {act["principal"]["name"]: act for act in acts}
        assert by["ann"]["targets"] == {
            "id": name_of(first), "service": "refunds", "title": "Refund?", "choice": "approve"
        }  # fmt: skip
        assert by["shop"]["targets"] == {"invocation": second, "step": "1", "choice": "reject"}
        assert {act["outcome"] for act in acts} == {"done"}
        for secret in (SECRET.hex(), "COMMENT"):
            assert secret not in caplog.text and secret not in str(acts)


async def test_approvals_appear_among_what_waits_in_statistics_metrics_and_explanations(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors):
        await world.register({"refunds/ask": asks})
        invocation = await asked(doors, "Refund order 17?")

        [row] = (await doors.ask("GET", "/waiting?kind=approval", doors.root))[1]["waiting"]
        shown = (await doors.ask("GET", f"/invocations/{invocation}", doors.root))[1]
        statistics = (await doors.ask("GET", "/statistics", doors.root))[1]
        _, metrics = await doors.ask("GET", "/metrics", doors.root)

        assert (row["name"], row["approval"], row["invocation"]) == (
            "Refund order 17?",
            name_of(invocation),
            invocation,
        )
        assert shown["why_not_running"].startswith("It waits for an approval of 'Refund order 17?' by finance since 20")
        assert statistics["approvals"] == {"waiting": 1, "oldest_since": row["since"]}
        assert 'holdfast_approvals_waiting{service="refunds"} 1.0' in str(metrics)
        assert 'holdfast_approvals_oldest_seconds{service="refunds"}' in str(metrics)


async def test_pages_of_approvals_are_in_the_order_of_time_over_all_partitions(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors):
        await world.register({"refunds/ask": asks})
        invocations = [await asked(doors, f"Refund {number}?") for number in range(7)]

        for limit in (1, 3, 7, 100):
            titles: list[str] = []
            cursor = ""
            while True:
                page = (await doors.ask("GET", f"/approvals?limit={limit}{cursor}", doors.root))[1]
                titles += [row["title"] for row in page["approvals"]]
                if page["cursor"] is None:
                    break
                cursor = f"&cursor={page['cursor']}"
            assert titles == [f"Refund {number}?" for number in range(7)]
        assert (await doors.ask("GET", "/approvals?cursor=AAAA", doors.root))[0] == 400
        assert len({*invocations}) == 7


async def test_whoever_watches_is_told_that_the_inbox_has_changed(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors):
        await world.register({"refunds/ask": asks})
        assert world.node.doors.admin is not None
        url = f"http://127.0.0.1:{world.node.doors.admin.port}"
        async with watching(url, token=doors.root, kinds="approvals") as watcher:
            invocation = await asked(doors, "Refund?")
            assert (await watcher.next()).kind == "approvals"
            await decide(doors, name_of(invocation), doors.root, choice="approve")
            assert await watcher.next() == ("approvals", {}, watcher.id)
