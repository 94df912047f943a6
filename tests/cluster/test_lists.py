"""Lists of invocations over real HTTP: filters on every column, both orders, pages over all partitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.sdk.journal import Op
from tests.cluster.harness import Handled
from tests.cluster.serving import Serving, run


async def calls_echo(handled: Handled) -> None:
    if handled.length == 1:
        handled.wait_for(handled.step(Op.CALL, "0/call/0", ["echo", "say", None, handled.input, {}]))
    else:
        outcome = handled.journal[1].outcome
        assert outcome is not None
        handled.output(outcome[1])


async def listed(at: Serving, query: str, limit: int = 3) -> list[dict[str, Any]]:
    return await at.listed("invocations", query, limit)


def test_pages_in_either_order_are_in_the_order_of_creation_over_all_partitions(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        for number in range(20):
            await at.call("echo/say", str(number).encode())

        newest = await listed(at, "order=newest")
        oldest = await listed(at, "order=oldest")
        _, page = await at.admin("GET", "/invocations?order=oldest&limit=3")
        wrong = await at.error("GET", f"/invocations?limit=3&cursor={page['cursor']}")

        times = [each["created_at"] for each in oldest]
        assert len(oldest) == 20 and times == sorted(times)
        assert [each["id"] for each in newest] == [each["id"] for each in reversed(oldest)]
        assert wrong[0] == 400 and "another order" in wrong[1]["message"]
        assert (await at.error("GET", "/invocations?order=random"))[0] == 400

    run(tmp_path, scenario)


def test_every_filter_selects_what_its_name_says(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        done = await at.send("counter/order-1/add")
        await at.reaches(done, "completed")
        await at.reaches(other := await at.send("counter/user-1/add"), "completed")
        await at.reaches(failing := await at.send("flaky/fail"), "backing-off")
        await at.reaches(paused := await at.send("flaky/stop"), "paused")
        await at.reaches(killed := await at.send("agent/wait"), "suspended")
        await at.admin("POST", f"/invocations/{killed}/kill")
        ended = await at.reaches(killed, "completed")

        async def ids(query: str) -> set[str]:
            return {each["id"] for each in await listed(at, query)}

        assert await ids("key_prefix=order-") == {done}
        assert await ids("failure=DATABASE%20is") == {failing}
        assert await ids("failure_code=500") == {failing, paused}
        assert await ids("failure=code%20has&failure_code=500") == {paused}
        assert await ids(f"failure_code={ended['failure']['code']}&outcome=killed") == {killed}
        assert await ids("completed_since=1h") == {done, other, killed}
        assert await ids("completed_until=1h") == set()
        assert await ids(f"completed_since={ended['completed_at']}") >= {killed}
        assert done not in await ids(f"completed_since={ended['completed_at']}")
        assert killed not in await ids(f"completed_until={ended['completed_at']}")
        assert await ids(f"parent={done}") == set()

    run(tmp_path, scenario)


def test_rows_show_completion_failure_and_parent(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        at.endpoint.add("outer/run", calls_echo)
        await at.admin("POST", "/deployments", json={"uri": at.endpoint.uri, "force": True})
        parent = await at.send("outer/run")
        await at.reaches(parent, "completed")
        await at.reaches(failing := await at.send("flaky/fail"), "backing-off")

        [child] = await listed(at, f"parent={parent}")
        [failed] = await listed(at, "status=backing-off")
        described = await at.describe(child["id"])

        assert child["parent"] == parent and child["completed_at"] >= child["created_at"] and child["failure"] is None
        assert failed["id"] == failing and failed["completed_at"] is None and failed["parent"] is None
        assert failed["failure"] == {"code": 500, "message": "the database is down", "kind": "Oops"}
        assert described["parent"] == parent

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    "query",
    [
        "failure_code=x",
        "failure_code=0",
        "parent=inv_1",
        "completed_since=yesterday",
        "key_prefix=",
        "failure=",
        "root=inv_1",
        "tag=tenant",
        "tag=",
        "tag=tenant=",
        "tag=a%20b=c",
        "tag=tenant=a&tag=tenant=b",
    ],
)
def test_a_wrong_filter_is_a_400(tmp_path: Path, query: str) -> None:
    async def scenario(at: Serving) -> None:
        assert (await at.error("GET", f"/invocations?{query}"))[0] == 400

    run(tmp_path, scenario)


async def tagged(at: Serving, target: str, tags: str, body: bytes = b"1") -> str:
    status, answer = await at.call(f"{target}/send", body, headers={"x-holdfast-tags": tags})
    assert status == 202, answer
    return str(answer["invocationId"])


def test_tags_come_with_a_request_and_find_it(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        acme = await tagged(at, "agent/wait", "tenant=acme,order=17")
        other = await tagged(at, "counter/k/add", "tenant=other, order=17")
        named = await tagged(at, "echo/say", "tenant=M%C3%BCller%2C%20Sons")
        for number in range(8):
            await at.call("echo/say", str(number).encode())
        await at.reaches(acme, "suspended")
        await at.reaches(other, "completed")

        async def ids(query: str) -> list[str]:
            return [each["id"] for each in await listed(at, query)]

        assert await ids("tag=tenant=acme") == [acme]
        assert await ids("tag=order=17") == [other, acme]
        assert await ids("tag=order=17&order=oldest") == [acme, other]
        assert await ids("tag=order=17&order=completed") == [other]
        assert await ids("tag=order=17&tag=tenant=other") == [other]
        assert await ids("tag=tenant=M%C3%BCller%2C%20Sons") == [named]
        assert await ids("tag=tenant=nobody") == []
        assert (await at.describe(acme))["tags"] == {"tenant": "acme", "order": "17"}
        _, page = await at.admin("GET", "/invocations?tag=order=17")
        assert page["looked_at"] == 2 and page["complete"] and page["cursor"] is None
        killed = await at.admin("POST", "/invocations/kill?tag=tenant=acme")
        assert killed[1]["matched"] == killed[1]["done"] == 1

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    "tags",
    [
        "tenant", "=acme", "tenant=", "a b=c", "a=1,a=2", "a=%ff", "a=%00", f"{'n' * 65}=1", f"a={'v' * 257}",
        ",".join(f"t{number}=1" for number in range(17)), ",".join(f"t{number}={'v' * 200}" for number in range(11)),
    ],
)  # fmt: skip
def test_tags_beyond_the_bounds_are_a_400(tmp_path: Path, tags: str) -> None:
    async def scenario(at: Serving) -> None:
        status, answer = await at.call("echo/say/send", b"1", headers={"x-holdfast-tags": tags})
        assert status == 400 and "tag" in answer["message"], answer

    run(tmp_path, scenario)


async def calls_with_tags(handled: Handled) -> None:
    if handled.length == 1:
        headers = {"x-holdfast-tags": handled.input.decode()}
        handled.step(Op.SEND, "0/send/0", ["echo", "say", None, b"1", {"x-holdfast-tags": "order=18"}, 0])
        handled.wait_for(handled.step(Op.CALL, "0/call/0", ["echo", "say", None, b"2", headers]))
    else:
        outcome = handled.journal[2].outcome
        assert outcome is not None
        handled.output(outcome[1] if outcome[0] == 0 else json.dumps(outcome[2]).encode())


def test_calls_and_sends_have_the_tags_that_their_headers_give_and_no_others(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        at.endpoint.add("outer/run", calls_with_tags)
        await at.admin("POST", "/deployments", json={"uri": at.endpoint.uri, "force": True})
        parent = await tagged(at, "outer/run", "tenant=acme", b"order=17")
        await at.reaches(parent, "completed")
        wrong = await at.call("outer/run", b"nothing")

        [called] = await listed(at, "tag=order=17")
        [sent] = await listed(at, f"tag=order=18&parent={parent}")

        assert called["tags"] == {"order": "17"} and sent["tags"] == {"order": "18"}
        assert {called["parent"], sent["parent"]} == {parent}
        assert "tenant=acme,order=17" in str(wrong), "the call failed, and says how tags look"

    run(tmp_path, scenario)


def test_the_order_of_completion_is_over_all_partitions(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        waiting = await at.send("agent/wait")
        done = [await at.send("counter/k/add") for _ in range(10)]
        for id_ in done:
            await at.reaches(id_, "completed")
        await at.reaches(waiting, "suspended")
        await at.admin("POST", f"/invocations/{waiting}/kill")
        await at.reaches(waiting, "completed")
        await at.reaches(await at.send("agent/wait"), "suspended")

        last = await listed(at, "order=completed")
        since = await listed(at, f"order=completed&completed_since={last[3]['completed_at']}")

        times = [each["completed_at"] for each in last]
        assert {each["id"] for each in last} == {waiting, *done} and last[0]["id"] == waiting
        assert times == sorted(times, reverse=True)
        assert since == last[: len(since)] and len(since) >= 4
        cursor = (await at.admin("GET", "/invocations?order=completed&limit=2"))[1]["cursor"]
        assert (await at.error("GET", f"/invocations?limit=2&cursor={cursor}"))[0] == 400

    run(tmp_path, scenario)


def test_a_dry_run_counts_and_changes_nothing(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        waiting = [await at.send("agent/wait") for _ in range(5)]
        for id_ in waiting:
            await at.reaches(id_, "suspended")

        all_ = await at.admin("POST", "/invocations/kill?service=agent&dry_run=true")
        some = await at.admin("POST", "/invocations/kill?service=agent&dry_run=true&limit=3")
        none = await at.error("POST", "/invocations/kill?dry_run=true")
        still = [(await at.describe(id_))["status"] for id_ in waiting]
        killed = await at.admin("POST", "/invocations/kill?service=agent&limit=3")

        assert all_ == (200, {"action": "kill", "matched": 5, "more": False})
        assert some == (200, {"action": "kill", "matched": 3, "more": True})
        assert none[0] == 400
        assert still == ["suspended"] * 5
        assert killed[1] == {
            "action": "kill", "matched": 3, "done": 3, "unchanged": 0, "failed": 0, "reasons": {}, "more": True,
        }  # fmt: skip

    run(tmp_path, scenario)
