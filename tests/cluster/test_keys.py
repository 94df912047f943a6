"""Keys of virtual objects and workflows over real HTTP: lists, queues, promises, and edits that expect values."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.serving import Serving, run


def test_keys_are_listed_over_all_partitions_in_pages(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        for number in range(25):
            await at.call(f"counter/user-{number}/add")
        await at.call("counter/other/add")

        seen: list[str] = []
        cursor = ""
        while True:
            status, page = await at.admin("GET", f"/services/counter/keys?prefix=user-&limit=4{cursor}")
            assert status == 200 and len(page["keys"]) <= 4
            seen += [each["key"] for each in page["keys"]]
            if page["cursor"] is None:
                break
            cursor = f"&cursor={page['cursor']}"
        _, everything = await at.admin("GET", "/services/counter/keys")

        assert sorted(seen) == sorted(f"user-{number}" for number in range(25))
        assert len(everything["keys"]) == 26
        [one] = [each for each in everything["keys"] if each["key"] == "other"]
        assert one == {"key": "other", "held_by": None, "waiting": 0, "values": 1, "bytes": one["bytes"], "promises": 0}
        assert one["bytes"] > 0

    run(tmp_path, scenario)


def test_a_queue_has_the_holder_and_who_waits_in_their_order(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        holder = await at.send("counter/k/wait")
        await at.reaches(holder, "suspended")
        waiting = []
        for _ in range(3):
            waiting.append(await at.send("counter/k/add"))
            await at.reaches(waiting[-1], "queued")

        _, found = await at.admin("GET", "/services/counter/k/queue")
        _, short = await at.admin("GET", "/services/counter/k/queue?limit=2")
        _, nothing = await at.admin("GET", "/services/counter/none/queue")

        assert found["holder"]["id"] == holder and found["holder"]["status"] == "suspended"
        assert [each["id"] for each in found["waiting"]] == waiting and not found["more"]
        assert found["waiting"][0]["handler"] == "add" and found["waiting"][0]["created_at"].endswith("Z")
        assert [each["id"] for each in short["waiting"]] == waiting[:2] and short["more"]
        assert nothing == {"holder": None, "waiting": [], "more": False}

    run(tmp_path, scenario)


def test_promises_of_a_workflow_are_shown_with_their_outcomes(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        await at.reaches(await at.send("signup/ann/run"), "suspended")
        resolve = f"{at.node.doors.urls.ingress}/holdfast/workflow/signup/ann/promises/extra/resolve"
        await at.ask("POST", resolve, data=b'{"by": "eve"}')

        _, found = await at.admin("GET", "/services/signup/ann/promises")

        assert found == {
            "promises": [
                {"name": "approved", "completed": False, "outcome": None},
                {"name": "extra", "completed": True, "outcome": {"value": {"by": "eve"}}},
            ],
            "more": False,
        }

    run(tmp_path, scenario)


def test_an_edit_takes_place_only_if_the_values_are_as_expected(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        path = "/services/counter/k/state"
        await at.admin("PUT", path, json={"values": {"count": 1, "tags": {"b": [1, 2], "a": None}}})

        async def edit(**body: object) -> int:
            status, answer = await at.admin("PUT", path, json=body)
            if status == 409:
                assert answer["source"] == "admin" and answer["hint"].startswith("read it again")
                details.append(answer["details"])
            return int(status)

        details: list[list[str]] = []
        assert await edit(values={"count": 2}, expect={"count": 3}) == 409
        assert await edit(values={"count": 2}, expect={"count": True}) == 409
        assert await edit(values={"new": 2}, expect={"count": None, "tags": {"a": None}}) == 409
        assert await edit(values={"count": 2}, expect={"count": 1, "tags": {"a": None, "b": [1, 2]}}) == 200
        assert await edit(values={"new": 1}, expect={"new": None}) == 200
        assert await edit(values={"new": 1}, expect={"new": None}) == 409
        assert await edit(remove=["new"], expect={"new": 1}) == 200
        assert details == [["count"], ["count"], ["count", "tags"], ["new"]]
        assert (await at.admin("GET", path))[1]["state"] == {"count": 2, "tags": {"b": [1, 2], "a": None}}
        assert (await at.error("PUT", path, json={"values": {"a": 1}, "expect": []}))[0] == 400

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/services/echo/keys", 400),
        ("/services/nothing/keys", 404),
        ("/services/counter/keys?cursor=AAAA", 400),
        ("/services/counter/keys?limit=0", 400),
        ("/services/echo/k/queue", 400),
        ("/services/nothing/k/queue", 404),
        ("/services/echo/k/promises", 400),
    ],
)
def test_wrong_questions_about_keys_are_refused(tmp_path: Path, path: str, status: int) -> None:
    async def scenario(at: Serving) -> None:
        assert (await at.error("GET", path))[0] == status

    run(tmp_path, scenario)
