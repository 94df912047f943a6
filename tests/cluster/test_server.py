"""A whole node: requests through ingress, log, state machine and invoker to scripted handlers, and back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from holdfast.cluster.config import Config, HostPort
from holdfast.cluster.node import Node
from tests.cluster.harness import PATIENCE_S, eventually
from tests.cluster.serving import Serving, run, serving


def test_a_call_goes_to_the_handler_and_back(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        assert await at.call("trips/book", b'{"to": "Lisbon"}') == (200, "booked")
        assert await at.call("counter/k/add") == (200, 1)
        assert await at.call("counter/k/add") == (200, 2)
        assert await at.call("counter/other/add") == (200, 1)

    run(tmp_path, scenario)


def test_double_clicks_run_once_and_both_get_the_answer(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        headers = {"Idempotency-Key": "click"}

        answers = await asyncio.gather(*(at.call("counter/k/add", headers=headers) for _ in range(20)))

        assert answers == [(200, 1)] * 20
        assert await at.call("counter/k/add") == (200, 2)

    run(tmp_path, scenario)


def test_an_idempotency_key_with_another_body_is_refused_while_it_runs_and_afterwards(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        headers = {"Idempotency-Key": "order 7"}
        first = await at.call("agent/wait/send", b'"five"', headers=headers)
        running = [
            await at.call(path, b'"six"', headers=headers) for path in ("agent/wait", "agent/wait/send", "agent/wait")
        ]
        await at.admin("POST", f"/invocations/{first[1]['invocationId']}/kill")
        completed = await at.call("agent/wait/send", b'"six"', headers=headers)

        for status, refusal in (*running, completed):
            assert (status, refusal["code"], refusal["source"]) == (422, 422, "ingress")
            assert "this Idempotency-Key was used before, with another body" in refusal["message"]
        again = await at.call("agent/wait/send", b'"five"', headers={**headers, "traceparent": "another"})
        assert again == (202, {"invocationId": first[1]["invocationId"], "status": "PreviouslyAccepted"})
        elsewhere = await at.call("trips/book/send", b'"six"', headers=headers)
        assert elsewhere[1]["status"] == "Accepted", "the key of another handler"
        assert len(at.endpoint.starts) <= 2

    run(tmp_path, scenario)


def test_an_awakeable_is_resolved_over_http(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        call = asyncio.ensure_future(at.call("agent/wait", headers={"Idempotency-Key": "one"}))
        await eventually(lambda: at.endpoint.starts)
        [listed] = (await at.admin("GET", "/invocations"))[1]["invocations"]
        await at.reaches(listed["id"], "suspended")
        [_, step] = (await at.admin("GET", f"/invocations/{listed['id']}/journal"))[1]["steps"]
        url = f"{at.node.doors.urls.ingress}/holdfast/awakeables/{step['argument']['id']}"

        resolved = await at.ask("POST", f"{url}/resolve", data=b'"approved"')
        again = await at.ask("POST", f"{url}/reject", data=b"no")

        assert resolved == (200, {"status": "Resolved"})
        assert await call == (200, "approved")
        assert again[0] == 409

    run(tmp_path, scenario)


def test_a_workflow_runs_once_and_its_promise_is_resolved_over_http(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        calls = [asyncio.ensure_future(at.call("signup/ann/run")) for _ in range(3)]
        await eventually(lambda: at.ingress.waiting == 3 and at.endpoint.starts)
        url = f"{at.node.doors.urls.ingress}/holdfast/workflow/signup/ann"
        early = await at.ask("GET", f"{url}/output")

        promised = await at.ask("POST", f"{url}/promises/approved/resolve", data=b'{"by": "bob"}')

        assert (early[0], promised[0]) == (470, 200)
        assert [await call for call in calls] == [(200, {"by": "bob"})] * 3
        assert await at.ask("GET", f"{url}/attach") == (200, {"by": "bob"})
        assert len({start.invocation for start in at.endpoint.starts}) == 1

    run(tmp_path, scenario)


def test_a_delayed_send_starts_when_it_is_due(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        id_ = (await at.call("echo/say/send?delay=200ms", b"7"))[1]["invocationId"]

        async with asyncio.timeout(PATIENCE_S):
            answer = await at.ask("GET", f"{at.node.doors.urls.ingress}/holdfast/invocation/{id_}/attach")

        assert answer == (200, 7)

    run(tmp_path, scenario)


def test_a_large_body_comes_through_and_a_larger_one_is_refused(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        fits = json.dumps("x" * 3_900_000).encode()

        status, answer = await at.call("echo/say", fits)

        assert status == 200 and len(answer) == 3_900_000
        assert (await at.call("echo/say", b"x" * 5_000_000))[0] == 413

    run(tmp_path, scenario)


def test_accepted_requests_and_deployments_survive_a_restart(tmp_path: Path) -> None:
    async def inside() -> None:
        async with serving(tmp_path) as at:
            waiting = await at.send("agent/wait")
            await at.reaches(waiting, "suspended")
            done = await at.send("trips/book")
            await at.reaches(done, "completed")
        async with serving(tmp_path, register=False) as at:
            assert (await at.describe(waiting))["status"] == "suspended"
            assert (await at.describe(done))["outcome"] == {"value": "booked"}
            assert len((await at.admin("GET", "/deployments"))[1]["deployments"]) == 1

    asyncio.run(inside())


def test_a_flood_beyond_the_bound_is_refused_and_nothing_accepted_is_lost(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        async def one(number: int) -> int:
            async with at.http.post(f"{at.node.doors.urls.ingress}/counter/k{number % 5}/add", data=b"1") as response:
                if response.status != 200:
                    assert response.status in (429, 503) and response.headers["Retry-After"]
                return response.status

        answers = await asyncio.gather(*(one(number) for number in range(400)))
        accepted = answers.count(200)

        assert 429 in answers and accepted >= 16
        counts = [(await at.admin("GET", f"/services/counter/k{key}/state"))[1]["state"] for key in range(5)]
        assert sum(count.get("count", 0) for count in counts) == accepted

    run(tmp_path, scenario, requests_max=16)


def test_a_port_in_use_is_an_error_that_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        free = HostPort("127.0.0.1", 0)
        taken = HostPort("127.0.0.1", int(at.node.doors.urls.ingress.rpartition(":")[2]))
        config = Config(data=tmp_path / "other", partitions=1, ingress=taken, admin=free, peer=free)

        with pytest.raises(OSError, match="in use"):
            await Node(config).start()
        node = Node(Config(data=tmp_path / "other", partitions=1, ingress=free, admin=free, peer=free))
        await node.start()
        await node.stop()

    run(tmp_path, scenario)


def test_a_stopping_server_answers_waiting_clients(tmp_path: Path) -> None:
    async def inside() -> None:
        async with aiohttp.ClientSession() as http:
            async with serving(tmp_path) as at:
                url = at.node.doors.urls.ingress
                call = asyncio.ensure_future(http.post(f"{url}/agent/wait", data=b"1"))
                await eventually(lambda: at.ingress.waiting == 1)
            response = await call
            assert response.status == 503 and response.headers["x-holdfast-id"]

    asyncio.run(inside())
