"""Counts of invocations over real HTTP."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.serving import Serving, run


def test_statistics_count_every_service_and_sum_them(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        for _ in range(3):
            await at.call("echo/say")
        await at.reaches(await at.send("agent/wait"), "suspended")
        await at.reaches(await at.send("flaky/stop"), "paused")
        killed = await at.send("agent/wait")
        await at.reaches(killed, "suspended")
        await at.admin("POST", f"/invocations/{killed}/kill")
        await at.reaches(killed, "completed")

        status, shown = await at.admin("GET", "/statistics")

        assert status == 200 and shown["at"].endswith("Z")
        assert shown["services"]["echo"]["by_status"]["completed"] == shown["services"]["echo"]["succeeded"] == 3
        assert shown["services"]["agent"]["by_status"]["suspended"] == shown["services"]["agent"]["killed"] == 1
        assert shown["services"]["flaky"]["by_status"]["paused"] == shown["services"]["flaky"]["attempts_failed"] == 1
        totals = shown["totals"]
        assert totals.keys() == shown["services"]["echo"].keys()
        assert (totals["invoked"], totals["succeeded"], totals["killed"]) == (6, 3, 1)
        assert totals["by_status"]["completed"] == 4 and sum(totals["by_status"].values()) == 6

    run(tmp_path, scenario)


def test_statistics_of_a_new_cluster_are_zero(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        _, shown = await at.admin("GET", "/statistics")

        assert shown["services"] == {}
        assert shown["totals"]["invoked"] == 0 and {*shown["totals"]["by_status"].values()} == {0}
        assert (await at.error("GET", "/statistics?service=echo"))[0] == 400

    run(tmp_path, scenario)
