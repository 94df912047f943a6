"""P6: waiting for people is free and durable, and their decision counts once."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp

from holdfast.sdk import SendHandle
from tests.promises.handlers import expires, refund
from tests.promises.processes import PATIENCE_S, Node, World
from tests.promises.test_p6_waiting import until_suspended


async def inbox(here: World, mark: str) -> list[dict[str, Any]]:
    """Approvals of this mark, as any node lists them."""
    rows = (await here.ask("GET", "/approvals?service=refunds&limit=1000"))["approvals"]
    return [row for row in rows if row["title"] == f"Refund {mark}?"]


async def in_the_inbox(here: World, mark: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        while not (rows := await inbox(here, mark)):
            await asyncio.sleep(0.02)
    [row] = rows
    return row


async def left_the_inbox(here: World, mark: str) -> None:
    """Lists show what a replica has applied, and it may be a moment behind its leader."""
    async with asyncio.timeout(PATIENCE_S):
        while await inbox(here, mark):
            await asyncio.sleep(0.02)


async def decide(node: Node, approval: str, choice: str, **more: Any) -> tuple[int, Any]:
    """The answer of this node. Without a leader it answers 503: then the same decision is sent again."""
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
        while True:
            body = {"choice": choice, **more}
            async with session.post(f"{node.admin}/approvals/{approval}", json=body) as response:
                if response.status != 503:
                    return response.status, await response.json()
            await asyncio.sleep(0.05)


async def decision_of(here: World, sent: SendHandle[Any]) -> Any:
    """What the journal has."""
    steps = (await here.ask("GET", f"/invocations/{sent.invocation_id}/journal"))["steps"]
    (step,) = (step for step in steps if step["op"] == "approval")
    return step["outcome"]["value"]


async def test_an_approval_survives_kills_and_exactly_one_of_many_decisions_counts(here: World) -> None:
    async with here.client() as client:
        mark = "P6 many"
        sent = await client.send(refund, {"mark": mark, "seconds": 3600.0, "gate": here.gate(mark)})
        await until_suspended(here, [sent])
        here.handlers.kill()
        await here.kill_leader(sent, random.Random(6))
        # No process serves the handlers: nothing but the state waits.
        row = await in_the_inbox(here, mark)
        assert row["invocation"] == sent.invocation_id and row["status"] == "waiting"

        answers = await asyncio.gather(
            *(
                decide(here.nodes[number % len(here.nodes)], row["id"], "approve", payload={"eur": number})
                for number in range(20)
            )
        )

        assert sorted(status for status, _ in answers) == [200, *[409] * 19]
        (winner,) = (answer for status, answer in answers if status == 200)
        assert all(
            "'approve' was decided by anybody at" in answer["message"] for status, answer in answers if status == 409
        )
        here.handlers.start()
        assert await client.attach(sent.invocation_id, str) == "approve by anybody"
        assert await decision_of(here, sent) == winner["decision"]
        paid = [each["eur"] for each in here.effects() if each["step"] == "refund" and each["mark"] == mark]
        assert paid == [winner["decision"]["payload"]["eur"]], "what was approved happens once"
        await left_the_inbox(here, mark)


async def test_a_decision_is_made_while_the_leader_is_down(here: World) -> None:
    async with here.client() as client:
        mark = "P6 leader"
        sent = await client.send(refund, {"mark": mark, "seconds": 3600.0, "gate": here.gate(mark)})
        await until_suspended(here, [sent])
        row = await in_the_inbox(here, mark)

        async with here.without_leader(here.partition(sent)) as survivor:
            await here.ready()
            assert (await decide(survivor, row["id"], "reject"))[0] == 200

        assert (await decide(here.node, row["id"], "approve"))[0] == 409
        assert await client.attach(sent.invocation_id, str) == "reject by anybody"
        assert here.counts(mark=mark)["late"] == 0


async def test_the_deadline_of_an_approval_holds_over_kills(here: World) -> None:
    async with here.client() as client:
        sent = await client.send(expires, {"mark": "P6 expires", "seconds": 4.0})
        await until_suspended(here, [sent])
        row = await in_the_inbox(here, "P6 expires")
        here.handlers.kill()
        await here.kill_leader(sent, random.Random(6))
        here.handlers.start()

        choice, approved, timed_out, waited = await client.attach(sent.invocation_id, list)

        assert (choice, approved, timed_out) == (None, False, True) and waited >= 4.0
        status, answer = await decide(here.node, row["id"], "approve")
        assert status == 409 and "timed out" in answer["message"]
        await left_the_inbox(here, "P6 expires")


async def test_an_approval_that_loses_its_race_leaves_the_inbox_while_the_code_goes_on(here: World) -> None:
    async with here.client() as client:
        mark = "P6 loses"
        sent = await client.send(refund, {"mark": mark, "seconds": 3.0, "gate": here.gate(mark)})
        await until_suspended(here, [sent])
        row = await in_the_inbox(here, mark)
        await here.saw("late begins", mark=mark)  # It waits for its gate: the invocation goes on.

        await left_the_inbox(here, mark)
        status, answer = await decide(here.node, row["id"], "approve")
        assert (status, answer["message"]) == (404, "the approval is gone: the code no longer waits for it")
        here.open(mark)
        assert await client.attach(sent.invocation_id, str) == "late"
        assert here.counts(mark=mark)["refund"] == 0
