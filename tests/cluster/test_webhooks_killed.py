"""Webhooks of real processes: the receiver kills the node that sends to it, in the middle of its request."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from holdfast.sdk import Client
from tests.cluster.fleet import Counting, fleet
from tests.cluster.test_webhooks import receiving
from tests.promises.handlers import add
from tests.promises.processes import eventually

KILLS = 3


@pytest.mark.slow("three nodes are killed and restarted under load, with real processes")
async def test_every_event_arrives_although_leaders_are_killed_between_a_delivery_and_its_record(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as here, receiving() as receiver, aiohttp.ClientSession() as http:
        value = {"url": receiver.url, "events": ["completed", "failed"]}
        async with http.post(f"{here.running[0].admin}/webhooks", json=value) as response:
            assert response.status == 201, await response.text()
        seen: set[str] = set()
        async with Client(here.running[0].url) as client:
            for number in range(10_000):  # Until the leaders of all partitions know the webhook.
                await client.call(add, f"probe {number}", key=f"probe {number}", idempotency_key=f"probe {number}")
                seen |= {event["id"].split("_")[2] for event in receiver.taken}
                if len(seen) == here.partitions:
                    break
        assert len(seen) == here.partitions

        killed: list[str] = []
        ready = True

        async def kill_the_sender(request: web.Request) -> web.StreamResponse:
            """It may answer after that: nobody hears it."""
            nonlocal ready
            if ready and len(killed) < KILLS:
                ready = False
                event = json.loads(await request.read())
                leader = await here.leader(int(event["id"].split("_")[2]))
                leader.kill()
                killed.append(leader.name)
            return web.Response(status=204)

        async with Counting(here) as counting:
            await counting.more(20)
            receiver.answer = kill_the_sender
            for number in range(KILLS):
                await eventually(lambda number=number: len(killed) > number, "a killed leader")  # type: ignore[misc]
                await counting.more(20)
                here.nodes[killed[-1]].start()
                await here.until(
                    lambda shown: all(node["connected"] for node in shown["nodes"]), "the killed node to be back"
                )
                ready = True
            await counting.more(20)
        await counting.check()

        def told() -> set[str]:
            about = [event["invocation"] for event in receiver.taken]
            keys = {each["idempotency_key"] for each in about if each["handler"] == "add"}
            return {key for key in keys if not key.startswith("probe")}

        await eventually(lambda: len(told()) >= counting.done, "an event of each invocation")
        bodies = defaultdict(set)
        for headers, body in receiver.requests:
            bodies[headers["X-Holdfast-Event-Id"]].add(body)
        assert len(told()) == counting.done
        assert all(len(each) == 1 for each in bodies.values()), "a repeated event is the same event"
        ids = [event["id"] for event in receiver.taken]
        assert len(ids) > len({*ids}), "the killed leaders could not record what they had delivered"
