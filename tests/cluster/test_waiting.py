"""What waits, over real HTTP: every kind, over all partitions, in pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.sdk.journal import Op
from tests.cluster.harness import Handled
from tests.cluster.serving import Serving, run


async def sleeps(handled: Handled) -> None:
    if handled.length == 1:
        handled.wait_for(handled.step(Op.SLEEP, "0/sleep/0", [3_600_000]))
    else:
        handled.output(b"1")


async def listed(at: Serving, query: str, limit: int = 100) -> list[dict[str, Any]]:
    return await at.listed("waiting", query, limit)


def test_everything_that_waits_is_listed_with_its_kind(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        at.endpoint.add("night/sleep", sleeps)
        await at.admin("POST", "/deployments", json={"uri": at.endpoint.uri, "force": True})
        await at.reaches(agent := await at.send("agent/wait"), "suspended")
        await at.reaches(workflow := await at.send("signup/ann/run"), "suspended")
        await at.reaches(doubt := await at.send("payments/pay"), "paused")
        await at.reaches(asleep := await at.send("night/sleep"), "suspended")
        await at.reaches(failing := await at.send("flaky/fail"), "backing-off")
        _, sent = await at.call("echo/say/send?delay=2h")

        rows = await listed(at, "")
        found = {each["invocation"]: each for each in rows}
        _, journal = await at.admin("GET", f"/invocations/{agent}/journal")
        described = await at.describe(failing)

        assert [each["kind"] for each in rows[3:]] == ["timer"] * 3
        due = [each["due_at"] for each in rows[3:]]
        assert due == sorted(due) and found[failing]["due_at"] == described["next_attempt_at"]
        assert found[agent]["kind"] == "awakeable" and found[agent]["due_at"] is None
        assert found[agent]["awakeable"] == journal["steps"][1]["argument"]["id"]
        assert found[agent]["since"] == journal["steps"][1]["journaled_at"]
        assert (found[workflow]["kind"], found[workflow]["name"]) == ("promise", "approved")
        assert found[workflow]["key"] == "ann"
        assert (found[doubt]["kind"], found[doubt]["name"], found[doubt]["step"]) == ("in-doubt", "pay", 1)
        assert found[asleep]["name"] == "sleep" and found[sent["invocationId"]]["name"] == "start"
        assert {each["invocation"] for each in await listed(at, "kind=in-doubt,promise")} == {doubt, workflow}
        assert {each["invocation"] for each in await listed(at, "kind=timer&service=night")} == {asleep}
        decided = await at.admin("POST", f"/invocations/{doubt}/steps/1/decide", json={"value": 1})
        assert decided[0] == 200 and await listed(at, "kind=in-doubt") == []

    run(tmp_path, scenario)


def test_pages_have_every_row_once(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        waiting = [await at.send("agent/wait") for _ in range(9)]
        for id_ in waiting:
            await at.reaches(id_, "suspended")
        later = [(await at.call(f"echo/say/send?delay={hour}h"))[1]["invocationId"] for hour in range(9, 0, -1)]

        for limit in (1, 2, 3, 9, 100):
            rows = [each["invocation"] for each in await listed(at, "", limit)]
            assert sorted(rows[:9]) == sorted(waiting)
            assert rows[9:] == [*reversed(later)]

        _, page = await at.admin("GET", "/waiting?kind=timer&limit=2")
        wrong = await at.error("GET", f"/waiting?kind=awakeable&cursor={page['cursor']}")
        assert wrong[0] == 400 and "another kind" in wrong[1]["message"]
        assert (await at.error("GET", "/waiting?kind=godot"))[0] == 400
        assert (await at.error("GET", "/waiting?cursor=AAAAA"))[0] == 400

    run(tmp_path, scenario)
