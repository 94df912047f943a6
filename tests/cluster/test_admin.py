"""The admin API over real HTTP, with a real node and scripted handlers below it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.admin.openapi import openapi, spelled_out
from holdfast.cluster.admin.routes import ROUTES
from tests.cluster.harness import PATIENCE_S, FakeEndpoint, eventually
from tests.cluster.serving import HANDLERS, Serving, run, serving, three_steps


def test_a_deployment_is_registered_shown_and_found_unchanged(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        again = await at.admin("POST", "/deployments", json={"uri": at.endpoint.uri, "metadata": {"commit": "abc"}})
        listed = await at.admin("GET", "/deployments")
        one = await at.admin("GET", f"/deployments/{again[1]['id']}")

        assert again[0] == 200
        [deployment] = listed[1]["deployments"]
        assert deployment["id"] == again[1]["id"]
        assert deployment["metadata"] == {"commit": "abc"}
        assert deployment["in_flight"] == 0
        assert {service["name"] for service in deployment["services"]} == {
            "echo", "trips", "agent", "flaky", "payments", "counter", "signup",
        }  # fmt: skip
        assert one[1]["services"][0]["handlers"][0]["name"] == "say"

    run(tmp_path, scenario)


def test_a_breaking_registration_is_a_409_with_the_difference(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        other = FakeEndpoint({"counter:object/add:shared": HANDLERS["echo/say"]})
        await other.start()
        refused = await at.error("POST", "/deployments", json={"uri": other.uri})
        forced = await at.admin("POST", "/deployments", json={"uri": other.uri, "force": True})
        await other.stop()

        assert refused[0] == 409
        assert set(refused[1]["details"]) == {"counter/add: was exclusive, is shared", "counter/wait: was removed"}
        assert forced[0] == 201

    run(tmp_path, scenario)


def test_a_deployment_is_removed_when_drained_or_by_force(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        [first] = (await at.admin("GET", "/deployments"))[1]["deployments"]
        id_ = await at.send("agent/wait")
        await at.reaches(id_, "suspended")
        other = FakeEndpoint(HANDLERS)
        await other.start()
        await at.admin("POST", "/deployments", json={"uri": other.uri})

        busy = await at.error("DELETE", f"/deployments/{first['id']}")
        await at.admin("POST", f"/invocations/{id_}/kill")
        await at.reaches(id_, "completed")
        gone = await at.admin("DELETE", f"/deployments/{first['id']}")
        missing = await at.error("DELETE", f"/deployments/{first['id']}")
        [second] = (await at.admin("GET", "/deployments"))[1]["deployments"]
        newest = await at.error("DELETE", f"/deployments/{second['id']}")
        forced = await at.admin("DELETE", f"/deployments/{second['id']}?force=true")
        await other.stop()

        assert (busy[0], gone[0], missing[0], newest[0], forced[0]) == (409, 200, 404, 409, 200)
        assert "1 invocation runs" in busy[1]["message"]
        assert (await at.call("echo/say"))[0] == 404

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "not JSON"),
        (b"[]", "JSON object"),
        (b"{}", '"uri" is missing'),
        (b'{"uri": 1}', '"uri" is missing'),
        (b'{"uri": "ftp://h"}', "not a uri"),
        (b'{"uri": "http://h", "forse": true}', "no field 'forse'"),
        (b'{"uri": "http://h", "force": 1}', '"force" must be true or false'),
        (b'{"uri": "http://h", "metadata": [1]}', '"metadata" must be an object'),
    ],
)
def test_a_wrong_registration_is_a_400_with_the_reason(tmp_path: Path, body: bytes, sentence: str) -> None:
    async def scenario(at: Serving) -> None:
        status, error = await at.error("POST", "/deployments", data=body)

        assert status == 400
        assert sentence in error["message"]

    run(tmp_path, scenario, register=False)


def test_services_show_handlers_revisions_and_counts(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        await at.call("trips/book")
        services = (await at.admin("GET", "/services"))[1]["services"]
        one = (await at.admin("GET", "/services/trips"))[1]
        missing = await at.error("GET", "/services/nothing")

        assert [service["name"] for service in services] == sorted(service["name"] for service in services)
        assert one["handlers"][0]["name"] == "book"
        assert one["revisions"][0]["revision"] == 1
        assert one["invocations"]["completed"] == 1
        assert one["totals"]["steps"] >= 3
        assert missing[0] == 404

    run(tmp_path, scenario)


def test_an_invocation_is_described_with_its_outcome_and_its_journal(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        id_ = await at.send("trips/book", b'{"to": "Lisbon"}')
        shown = await at.reaches(id_, "completed")
        journal = (await at.admin("GET", f"/invocations/{id_}/journal"))[1]
        page = (await at.admin("GET", f"/invocations/{id_}/journal?start=1&limit=2"))[1]

        assert (shown["end"], shown["outcome"], shown["steps"]) == ("succeeded", {"value": "booked"}, 4)
        assert shown["created_at"].endswith("Z") and shown["deployment"].startswith("dp_")
        assert [step["op"] for step in journal["steps"]] == ["input", "run", "run", "run"]
        assert journal["steps"][0]["outcome"] == {"value": {"to": "Lisbon"}}
        assert journal["steps"][1]["argument"] == {"name": "flight"}
        assert journal["steps"][1]["outcome"] == {"value": {"booked": "flight"}}
        assert [step["index"] for step in page["steps"]] == [1, 2] and page["next"] == 3

    run(tmp_path, scenario)


def test_the_reason_why_an_invocation_is_not_running_is_a_sentence(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        waiting = await at.reaches(await at.send("agent/wait"), "suspended")
        holder = await at.reaches(await at.send("counter/k/wait"), "suspended")
        queued = await at.reaches(await at.send("counter/k/add"), "queued")
        failing = await at.reaches(await at.send("flaky/fail"), "backing-off")
        paused = await at.reaches(await at.send("flaky/stop"), "paused")
        status, sent = await at.call("echo/say/send?delay=1h")
        scheduled = await at.describe(sent["invocationId"])

        assert "the awakeable awk_" in waiting["why_not_running"]
        assert holder["id"] in queued["why_not_running"] and "'k'" in queued["why_not_running"]
        assert "the database is down" in failing["why_not_running"]
        assert failing["next_attempt_at"][11:19] in failing["why_not_running"]
        assert failing["last_failure"]["message"] == "the database is down"
        assert "paused" in paused["why_not_running"] and "the code has changed" in paused["why_not_running"]
        assert status == 202 and scheduled["starts_at"][11:19] in scheduled["why_not_running"]

    run(tmp_path, scenario)


def test_invocations_are_listed_by_filter_in_pages(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        for number in range(5):
            await at.call("echo/say", str(number).encode())
        waiting = [await at.send("agent/wait") for _ in range(3)]
        for id_ in waiting:
            await at.reaches(id_, "suspended")
        await at.call("counter/a/add")
        await at.call("counter/b/add")

        async def found(query: str) -> list[dict[str, Any]]:
            status, answer = await at.admin("GET", f"/invocations?{query}")
            assert status == 200, answer
            listed: list[dict[str, Any]] = answer["invocations"]
            return listed

        assert len(await found("service=echo")) == 5
        assert {each["id"] for each in await found("status=suspended")} == set(waiting)
        assert {each["id"] for each in await found("status=active&handler=wait")} == set(waiting)
        assert len(await found("status=completed,suspended")) == 10
        assert [each["key"] for each in await found("service=counter&key=b")] == ["b"]
        assert await found("older_than=1h") == []
        assert len(await found("older_than=0s")) == 10
        assert await found("deployment=dp_none") == []

        seen: list[str] = []
        cursor = ""
        while True:
            _, page = await at.admin("GET", f"/invocations?limit=3{cursor}")
            assert len(page["invocations"]) <= 3
            seen += [each["id"] for each in page["invocations"]]
            if page["cursor"] is None:
                break
            cursor = f"&cursor={page['cursor']}"
        assert len(seen) == len(set(seen)) == 10

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    "path",
    [
        "/invocations?status=happy",
        "/invocations?stat=suspended",
        "/invocations?limit=0",
        "/invocations?limit=1e3",
        "/invocations?older_than=yesterday",
        "/invocations?cursor=%20",
        "/invocations?cursor=AAAA",
        "/invocations?cursor=________",
        "/invocations?service=",
        "/invocations/inv_1",
        "/invocations/inv_1/journal",
        "/invocations/inv_" + "0" * 32 + "/journal?start=-1",
        "/services/echo/k/state",
    ],
)
def test_a_wrong_question_is_a_400(tmp_path: Path, path: str) -> None:
    async def scenario(at: Serving) -> None:
        assert (await at.error("GET", path))[0] == 400

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/invocations/inv_" + "0" * 32, 404),
        ("GET", "/invocations/inv_" + "0" * 32 + "/journal", 404),
        ("POST", "/invocations/inv_" + "0" * 32 + "/kill", 404),
        ("POST", "/invocations/inv_" + "0" * 32 + "/resume?to=newest", 404),
        ("POST", "/invocations/inv_" + "0" * 32 + "/explode", 404),
        ("POST", "/invocations/explode?service=echo", 404),
        ("GET", "/deployments/dp_none", 404),
        ("GET", "/services/nothing/k/state", 404),
        ("PUT", "/invocations", 405),
        ("DELETE", "/deployments", 405),
        ("POST", "/invocations/kill", 400),
        ("POST", "/invocations/kill?service=echo&step=1", 400),
        ("POST", "/invocations/inv_" + "0" * 32 + "/cancel?step=1", 400),
        ("POST", "/invocations/inv_" + "0" * 32 + "/cancel?to=dp_1", 400),
        ("POST", "/invocations/kill?service=echo&to=dp_1", 400),
    ],
)
def test_missing_things_are_reported_as_missing(tmp_path: Path, method: str, path: str, status: int) -> None:
    async def scenario(at: Serving) -> None:
        found, answer = await at.admin(method, path)

        assert found == status, answer

    run(tmp_path, scenario)


def test_cancel_lets_the_code_end_and_kill_ends_it(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        first, second = await at.send("agent/wait"), await at.send("agent/wait")
        for id_ in (first, second):
            await at.reaches(id_, "suspended")

        cancelled = await at.admin("POST", f"/invocations/{first}/cancel")
        killed = await at.admin("POST", f"/invocations/{second}/kill")

        assert cancelled == (200, {"id": first, "status": "Cancelling"})
        assert killed == (200, {"id": second, "status": "Killed"})
        # The script answers with the text of the failure: it was informed and ended by itself.
        assert (await at.reaches(first, "completed"))["end"] == "succeeded"
        ended = await at.reaches(second, "completed")
        assert (ended["end"], ended["outcome"]["failure"]["kind"]) == ("killed", "Killed")
        assert (await at.error("POST", f"/invocations/{second}/cancel"))[0] == 409

    run(tmp_path, scenario)


def test_pause_and_resume_also_on_another_deployment(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        id_ = await at.send("flaky/stop")
        await at.reaches(id_, "paused")
        other = FakeEndpoint({**HANDLERS, "flaky/stop": three_steps})
        await other.start()
        newer = (await at.admin("POST", "/deployments", json={"uri": other.uri}))[1]["id"]

        wrong = await at.error("POST", f"/invocations/{id_}/resume?to=dp_none")
        resumed = await at.admin("POST", f"/invocations/{id_}/resume?to=newest")
        shown = await at.reaches(id_, "completed")
        await other.stop()

        assert (wrong[0], resumed[0]) == (404, 200)
        assert shown["deployment"] == newer

    run(tmp_path, scenario)


def test_an_invocation_is_restarted_from_its_beginning_or_from_a_step_and_purged(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        id_ = await at.send("trips/book", b'"x"')
        await at.reaches(id_, "completed")

        whole = (await at.admin("POST", f"/invocations/{id_}/restart"))[1]
        from_step = (await at.admin("POST", f"/invocations/{id_}/restart?step=2"))[1]
        too_far = await at.error("POST", f"/invocations/{id_}/restart?step=9")
        purged = await at.admin("POST", f"/invocations/{id_}/purge")

        assert whole["new_id"] != id_ and from_step["new_id"] != whole["new_id"]
        again = await at.reaches(whole["new_id"], "completed")
        later = await at.reaches(from_step["new_id"], "completed")
        assert (again["steps"], again["steps_copied_from"]) == (4, None)
        assert (later["steps"], later["steps_copied_from"]) == (4, id_)
        assert (too_far[0], purged[0]) == (409, 200)
        assert (await at.error("GET", f"/invocations/{id_}"))[0] == 404

    run(tmp_path, scenario)


def test_many_are_ended_by_one_filter(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        ids = [await at.send("agent/wait") for _ in range(7)]
        for id_ in ids:
            await at.reaches(id_, "suspended")
        other = await at.send("counter/k/wait")
        await at.reaches(other, "suspended")

        some = (await at.admin("POST", "/invocations/kill?service=agent&status=active&limit=5"))[1]
        rest = (await at.admin("POST", "/invocations/kill?service=agent&status=active"))[1]
        refused = (await at.admin("POST", "/invocations/restart?service=counter"))[1]

        assert (some["matched"], some["done"], some["more"]) == (5, 5, True)
        assert (rest["matched"], rest["done"], rest["more"]) == (2, 2, False)
        assert (await at.describe(other))["status"] == "suspended"
        assert (refused["matched"], refused["failed"]) == (1, 1)
        assert list(refused["reasons"]) == ["the invocation is not completed: cancel or kill it first"]

    run(tmp_path, scenario)


def test_a_run_in_doubt_is_decided_by_an_operator(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        id_ = await at.send("payments/pay")
        await at.reaches(id_, "paused")

        wrong = await at.error("POST", f"/invocations/{id_}/steps/1/decide", json={"value": 1, "again": True})
        missing = await at.error("POST", f"/invocations/{id_}/steps/7/decide", json={"value": 1})
        decided = await at.admin("POST", f"/invocations/{id_}/steps/1/decide", json={"value": {"paid": True}})

        assert (wrong[0], missing[0], decided[0]) == (400, 404, 200)
        assert (await at.reaches(id_, "completed"))["outcome"] == {"value": {"paid": True}}

    run(tmp_path, scenario)


def test_state_is_read_and_edited(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        path = "/services/counter/a%2Fb/state"
        await at.call("counter/a%2Fb/add")

        before = (await at.admin("GET", path))[1]
        edited = await at.admin("PUT", path, json={"values": {"count": 41, "raw": {"base64": "AP8="}, "no": None}})
        assert await at.call("counter/a%2Fb/add") == (200, 42)
        removed = (await at.admin("PUT", path, json={"remove": ["raw"]}))[1]
        replaced = (await at.admin("PUT", path, json={"values": {"only": "x"}, "replace": True}))[1]
        empty = (await at.admin("GET", "/services/counter/never/state"))[1]

        assert (before["state"], before["held_by"]) == ({"count": 1}, None)
        assert edited[0] == 200
        assert edited[1]["state"] == {"count": 41, "raw": {"base64": "AP8="}, "no": None}
        assert removed["state"] == {"count": 42, "no": None}
        assert replaced["state"] == {"only": "x"}
        assert empty["state"] == {}

    run(tmp_path, scenario)


def test_state_that_a_handler_holds_is_not_edited(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        id_ = await at.send("counter/k/wait")
        await at.reaches(id_, "suspended")

        status, error = await at.error("PUT", "/services/counter/k/state", json={"values": {"count": 1}})

        assert status == 409 and "holds this key" in error["message"]
        assert (await at.admin("GET", "/services/counter/k/state"))[1]["held_by"] == id_

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    "body",
    [b"{}", b'{"values": []}', b'{"values": {"": 1}}', b'{"remove": "x"}', b'{"values": {"\\ud800": 1}}', b'{"value": {}}',
     b'{"values": {"a": {"base64": "?"}}}', b'{"values": {"a": NaN}}', b'{"values": {"a": 1e999}}'],
)  # fmt: skip
def test_a_wrong_edit_of_state_is_a_400(tmp_path: Path, body: bytes) -> None:
    async def scenario(at: Serving) -> None:
        assert (await at.error("PUT", "/services/counter/k/state", data=body))[0] == 400

    run(tmp_path, scenario)


def test_the_cluster_shows_every_partition_with_its_leader(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        _, shown = await at.admin("GET", "/cluster")

        assert shown["nodes"][0]["name"] == "n1"
        assert [each["leader"] for each in shown["partitions"]] == ["n1", "n1"]
        assert shown["meta"]["role"] == "leader"

    run(tmp_path, scenario)


def test_every_route_is_described_for_programs(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        status, described = await at.admin("GET", "/openapi.json")

        assert status == 200
        assert described == openapi()
        for route in ROUTES:
            for each in spelled_out(route):
                operation = described["paths"][each.path][each.method.lower()]
                assert operation["operationId"] == each.name

    run(tmp_path, scenario)


def test_the_admin_api_answers_while_a_flood_of_calls_is_under_way(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        calls = [asyncio.ensure_future(at.call("trips/book", json.dumps(number).encode())) for number in range(300)]

        health = await at.admin("GET", "/health")
        listed = await at.admin("GET", "/invocations?limit=1000")

        assert (health[0], listed[0]) == (200, 200)
        assert [answer[0] for answer in await asyncio.gather(*calls)] == [200] * 300
        await eventually(lambda: at.exchange.active == 0)

    run(tmp_path, scenario)


def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        hostile = b'{"values": {"x": [' + b"[]," * 300_000 + b"[]]}}"
        deep = b'{"values": {"x": ' + b"[" * 500 + b"]" * 500 + b"}}"

        many = await at.error("PUT", "/services/counter/a/state", data=hostile)
        nested = await at.error("PUT", "/services/counter/a/state", data=deep)

        assert (many[0], nested[0]) == (413, 413)
        assert "elements" in many[1]["message"] and "deeper" in nested[1]["message"]

    run(tmp_path, scenario)


def test_expect_100_continue_is_answered_by_whether_the_body_is_wanted(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        async def first_answer(length: int) -> bytes:
            port = int(at.node.doors.urls.admin.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"PUT /services/counter/a/state HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"
                b"Expect: 100-continue\r\n\r\n" % length
            )
            found = await reader.readuntil(b"\r\n")
            if not found.startswith(b"HTTP/1.1 100"):
                await reader.read()  # Until it is closed.
            writer.close()
            return found

        assert (await first_answer(20)).startswith(b"HTTP/1.1 100 ")
        assert (await first_answer(10_000_000_000)).startswith(b"HTTP/1.1 413 ")

    run(tmp_path, scenario)


async def test_handlers_that_are_down_are_named_with_their_address_and_error(tmp_path: Path) -> None:
    async with serving(tmp_path) as at, asyncio.timeout(PATIENCE_S):
        await at.call("echo/say")
        [healthy] = (await at.admin("GET", "/deployments"))[1]["deployments"]
        await at.endpoint.stop()
        id_ = await at.send("echo/say")
        while (shown := await at.describe(id_))["why_not_running"] is None:
            await asyncio.sleep(0.01)
        [down] = (await at.admin("GET", "/deployments"))[1]["deployments"]

        assert healthy["health"]["status"] == "ok"
        assert down["health"]["status"] == "down"
        [seen] = down["health"]["nodes"]
        assert seen["node"] == at.node.config.node and seen["down_since"] and seen["error"]
        assert shown["why_not_running"].startswith(f"Its handlers at {at.endpoint.uri} (dp_")
        assert "cannot be reached by" in shown["why_not_running"] and " since 20" in shown["why_not_running"]


async def test_a_list_is_the_newest_over_pages_and_partitions(tmp_path: Path) -> None:
    async with serving(tmp_path) as at, asyncio.timeout(PATIENCE_S):
        sent = [await at.send("agent/wait") for _ in range(12)]
        _, failed = await at.call("agent/wait/send", headers={"Idempotency-Key": "k"})
        sent.append(failed["invocationId"])
        await at.admin("POST", f"/invocations/{sent[4]}/kill")
        await at.reaches(sent[4], "completed")
        created = {id_: (await at.describe(id_))["created_at"] for id_ in sent}

        async def listed(query: str) -> list[str]:
            found: list[str] = []
            cursor = ""
            while True:
                status, page = await at.admin("GET", f"/invocations?{query}{cursor}")
                assert status == 200, page
                found += [each["id"] for each in page["invocations"]]
                if page["cursor"] is None:
                    return found
                cursor = f"&cursor={page['cursor']}"

        newest_first = sorted(sent, key=lambda id_: created[id_], reverse=True)
        for limit in (1, 5, 13, 100):
            pages = await listed(f"limit={limit}")
            assert [created[id_] for id_ in pages] == [created[id_] for id_ in newest_first]
            assert sorted(pages) == sorted(sent)
        newest = created[newest_first[0]]
        assert (await at.admin("GET", "/invocations?limit=3"))[1]["invocations"][0]["created_at"] == newest
        assert await listed("outcome=killed") == [sent[4]]
        assert await listed("outcome=succeeded,failed") == []
        assert await listed("idempotency_key=k") == [sent[12]]
        assert await listed("since=1h&service=agent&limit=2") and await listed("until=1h") == []
        assert sorted(await listed(f"since={newest}")) == sorted(id_ for id_ in sent if created[id_] == newest)
        assert (await at.error("GET", "/invocations?outcome=lost"))[0] == 400
        assert (await at.error("GET", "/invocations?since=yesterday"))[0] == 400
        assert (await at.error("GET", "/invocations?cursor=AAAA"))[0] == 400
