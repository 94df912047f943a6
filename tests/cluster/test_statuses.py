"""Callers of an invocation that waits for an operator get an answer instead of hanging for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

from holdfast.sdk import Client, InvocationPaused
from holdfast.sdk.ids import PartitionNumber
from tests.cluster.harness import PATIENCE_S
from tests.cluster.serving import serving


async def test_a_caller_of_a_paused_invocation_gets_the_reason_and_the_next_command(tmp_path: Path) -> None:
    async with serving(tmp_path, paused_answer_after=0.0) as at, asyncio.timeout(PATIENCE_S):
        async with at.http.post(f"{at.node.doors.urls.ingress}/flaky/stop", data=b"1") as response:
            answer = await response.json()
            id_ = response.headers["x-holdfast-id"]

        assert response.status == 503
        assert response.headers["x-holdfast-status"] == "paused"
        assert "Retry-After" not in response.headers
        assert answer["message"].startswith(f"{id_} is paused: ") and "the code has changed" in answer["message"]
        assert f"holdfast invocations resume {id_}" in answer["hint"]
        attached, same = await at.ask("GET", f"{at.node.doors.urls.ingress}/holdfast/invocation/{id_}/attach")
        assert (attached, same["message"]) == (503, answer["message"])
        assert (await at.describe(id_))["status"] == "paused"


async def test_a_client_raises_a_typed_error_and_can_attach_after_the_operator_resumed(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, paused_answer_after=0.0) as at,
        Client(at.node.doors.urls.ingress) as client,
        asyncio.timeout(PATIENCE_S),
    ):
        calling = asyncio.create_task(client.call("agent/wait", idempotency_key="k"))
        _, sent = await at.call("agent/wait/send", headers={"Idempotency-Key": "k"}, data=b"")
        id_ = sent["invocationId"]
        await at.reaches(id_, "suspended")
        assert (await at.admin("POST", f"/invocations/{id_}/pause"))[0] == 200

        try:
            await calling
            raise AssertionError("the caller of a paused invocation got an outcome")
        except InvocationPaused as error:
            assert error.invocation_id == id_
            assert "by an operator" in error.message

        awakeable = (await at.admin("GET", f"/invocations/{id_}/journal"))[1]["steps"][1]["argument"]["id"]
        await client.resolve_awakeable(awakeable, "done")
        assert (await at.admin("POST", f"/invocations/{id_}/resume"))[0] == 200
        assert await client.attach(id_) == "done"


async def test_a_caller_is_not_informed_of_a_pause_too_early(tmp_path: Path) -> None:
    async with serving(tmp_path, paused_answer_after=3600.0) as at:
        calling = asyncio.create_task(at.call("flaky/stop"))
        while not at.node.ground.replies.waiting():
            await asyncio.sleep(0.01)
        [id_] = at.node.ground.replies.waiting()
        while (
            await at.node.serving.reader.paused(PartitionNumber(0), [id_])
            == await at.node.serving.reader.paused(PartitionNumber(1), [id_])
            == []
        ):
            await asyncio.sleep(0.01)

        for _ in range(3):
            await at.node.serving.statuses.look()

        assert not calling.done()
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
