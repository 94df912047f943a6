"""Facts about partitions that are on other nodes: every node answers alike, and tells nodes of the previous release no more
than they know."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from holdfast.cluster.errors import Unavailable
from holdfast.cluster.routing.reader import FIRST_DESCRIPTION, FIRST_FILTERS, Reader
from holdfast.cluster.routing.surveys import Surveys
from holdfast.sdk.ids import InvocationId, partition_of
from holdfast.statemachine.lists import Order
from holdfast.statemachine.queries import Filter
from tests.cluster.harness import PATIENCE_S
from tests.cluster.serving import HANDLERS
from tests.cluster.test_three_nodes import NAMES, three
from tests.cluster.test_trees import calls_below

#: Whatever differs from one node or moment to the next.
QUESTIONS = (
    "/statistics", "/invocations?limit=7", "/invocations?order=oldest&limit=7", "/invocations?failure=database",
    "/invocations?order=completed&limit=7", "/invocations?tag=of=counter&limit=7",
    "/waiting", "/services/counter/keys", "/services/counter/k1/queue", "/services/signup/k2/promises",
)  # fmt: skip


async def test_every_node_answers_alike_wherever_the_partitions_are(tmp_path: Path) -> None:
    handlers = {**HANDLERS, "family/have": calls_below}
    async with three(tmp_path, handlers, partitions=6, replication=1) as cluster, aiohttp.ClientSession() as http:
        await cluster.led()
        nodes = {name: cluster.seats[name].node for name in NAMES}

        async def get(name: str, path: str) -> Any:
            async with http.get(nodes[name].doors.urls.admin + path) as answer:
                found = await answer.json()
                assert answer.status == 200, (path, found)
                return found

        async def send(path: str, body: str) -> str:
            url, tags = f"{nodes['n1'].doors.urls.ingress}/{path}/send", {"x-holdfast-tags": f"of={path.split('/')[0]}"}
            async with http.post(url, data=body, headers=tags) as answer:
                return str((await answer.json())["invocationId"])

        async def reaches(id_: str, status: str) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while (await get("n2", f"/invocations/{id_}"))["status"] != status:
                    await asyncio.sleep(0.02)

        for number in range(8):
            await reaches(await send(f"counter/k{number}/wait", "1"), "suspended")
            await reaches(await send(f"counter/k{number}/add", "1"), "queued")
            await reaches(await send(f"signup/k{number}/run", "1"), "suspended")
            await reaches(await send("echo/say", "1"), "completed")
            await reaches(await send("flaky/fail", "1"), "backing-off")
        root = await send("family/have", "3")
        await reaches(root, "completed")
        tree = await get("n1", f"/invocations/{root}/tree")
        for each in tree["nodes"]:
            await reaches(each["id"], "completed")

        assert any(len(node.serving.router.hosted) < 6 for node in nodes.values()), "some partitions are elsewhere"
        child = next(each["id"] for each in tree["nodes"] if each["service"] == "family" and each["parent"])
        for path in (
            *QUESTIONS,
            f"/invocations/{root}/tree",
            f"/invocations?parent={root}",
            f"/invocations?root={root}&limit=5",
            f"/invocations/{child}",
        ):
            answers = [await get(name, path) for name in NAMES]
            for answer in answers:
                answer.pop("at", None)
            assert json.dumps(answers[0]) == json.dumps(answers[1]) == json.dumps(answers[2]), path
        assert len((await get("n3", "/invocations?failure=database"))["invocations"]) == 8
        tagged = await get("n3", "/invocations?tag=of=counter&order=oldest")
        assert tagged["looked_at"] == len(tagged["invocations"]) == 16
        assert [each["created_at"] for each in tagged["invocations"]] == sorted(
            each["created_at"] for each in tagged["invocations"]
        )
        assert len((await get("n3", "/services/counter/keys"))["keys"]) == 8
        assert len((await get("n3", "/waiting?kind=promise"))["waiting"]) == 8


class Old:
    """The answers of a node of the previous release."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Sequence[Any]]] = []

    async def answer(self, number: int, method: str, argument: Any) -> Any:
        _, question, arguments, _ = argument
        assert question == "slice", f"it knows nothing of {question}"
        self.asked.append((question, arguments))
        return [], None


def reader(old: Old) -> Reader:
    async def fresh(number: int) -> None: ...

    unused: Any = None
    return Reader(2, {}, fresh=fresh, elsewhere=old.answer, objects=unused, level=lambda: 1)


async def test_a_node_of_the_previous_release_is_sent_only_what_it_knows() -> None:
    old = Old()

    page = await reader(old).page(Filter(service="a", completed_since_ms=5, key_prefix="b"), None, 10, Order.OLDEST)

    assert page.records == [] and page.cursor is None
    assert [len(arguments[0]) for _, arguments in old.asked] == [FIRST_FILTERS] * 2


async def test_what_the_previous_release_does_not_know_is_refused_until_the_upgrade_is_done() -> None:
    old = Old()

    with pytest.raises(Unavailable, match="failures"):
        await reader(old).page(Filter(failure="boom"), None, 10)
    with pytest.raises(Unavailable, match="a release that does not answer this"):
        await Surveys(reader(old)).keys("a", "", None, 10)
    with pytest.raises(Unavailable):
        await Surveys(reader(old)).waits(("timer",), None, None, 10)


async def test_a_description_for_the_previous_release_has_the_fields_that_it_knows(tmp_path: Path) -> None:
    async with three(tmp_path, HANDLERS) as cluster:
        await cluster.led()
        seat = cluster.seats["n1"]
        id_: InvocationId = await seat.send("flaky/fail")
        serving = seat.node.serving.reader
        asked = (partition_of(id_, 3), "describe", (id_,), True)

        assert len(await serving.serve("n2", asked)) > FIRST_DESCRIPTION
        serving._level = lambda: 1
        assert len(await serving.serve("n2", asked)) == FIRST_DESCRIPTION
