"""Incident mode: leaders start nothing that is paused, whichever node leads, and lose nothing of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from holdfast.cluster.handlers import pauses
from holdfast.sdk.frames import Suspend
from holdfast.sdk.ids import format_id, partition_of
from holdfast.sdk.journal import Op
from holdfast.statemachine.effects import Status
from holdfast.statemachine.pauses import EVERYTHING, Halt, Release
from tests.cluster.harness import Handled, World, echo, eventually, world
from tests.cluster.test_three_nodes import three
from tests.cluster.test_tokens import one

ALL = Halt("", None, "ada", "incident")
HANDLERS: dict[str, Any] = {"echo/say": echo, "other/say": echo, "box:object/put:exclusive": echo}


async def propose(it: World, *commands: Halt | Release) -> None:
    for command in commands:
        outcome = await it.node.ground.registry.propose(command)
        assert outcome.result.code == 0, outcome


async def withheld(it: World, count: int) -> None:
    await eventually(lambda: len(it.node.ground.invoker.pauses) == count, f"{count} withheld attempts")


async def test_while_everything_is_paused_nothing_starts_and_then_everything_does(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        endpoint = await it.register(HANDLERS)
        assert await it.call("echo/say", b"before") == [0, b"before"]

        await propose(it, ALL)
        idents = [await it.send("echo/say", b"%d" % number) for number in range(50)]
        idents.append(await it.send("box/put", b"one", key="k"))
        idents.append(await it.send("box/put", b"two", key="k"))
        await withheld(it, 51)
        assert len(endpoint.starts) == 1, "only the one from before"

        await propose(it, Release("", None))
        outcomes = [await it.completed(ident) for ident in idents]

        assert outcomes == [*([0, b"%d" % number] for number in range(50)), [0, b"one"], [0, b"two"]]
        assert [start.epoch for start in endpoint.starts] == [1] * 53, "no attempt was counted that did not run"
        await withheld(it, 0)


async def test_a_pause_covers_its_service_or_key_and_nothing_else(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.register(HANDLERS)
        await propose(it, Halt("echo", None, "ada", "broken"), Halt("box", "k", "ada", "broken"))

        waiting = [await it.send("echo/say"), await it.send("box/put", key="k")]
        assert await it.call("other/say", b"1") == [0, b"1"]
        assert await it.call("box/put", b"2", key="other") == [0, b"2"]
        await withheld(it, 2)

        await propose(it, Release("box", "k"))
        await it.completed(waiting[1])
        await withheld(it, 1)
        await propose(it, Release("echo", None))
        await it.completed(waiting[0])


async def test_timers_and_retries_start_nothing_during_a_pause(tmp_path: Path) -> None:
    failed = asyncio.Event()

    async def fails_once(handled: Handled) -> None:
        if handled.epoch == 1:
            handled.fail(retry_after_ms=50)
            failed.set()
        else:
            handled.output(b"retried")

    async def sleeps(handled: Handled) -> None:
        if handled.length == 1:
            handled.wait_for(handled.step(Op.SLEEP, "0/sleep/1", [300]))
        else:
            handled.output(b"awake")

    async with world(tmp_path) as it:
        endpoint = await it.register({"a/fails": fails_once, "a/sleeps": sleeps})
        retrying, sleeping = await it.send("a/fails"), await it.send("a/sleeps")
        await failed.wait()
        await it.reaches(sleeping, Status.SUSPENDED)
        await propose(it, ALL)

        await it.reaches(sleeping, Status.RUNNING)
        await it.reaches(retrying, Status.RUNNING)
        assert len(endpoint.starts) == 2

        await propose(it, Release("", None))
        assert await it.completed(retrying) == [0, b"retried"]
        assert await it.completed(sleeping) == [0, b"awake"]


async def test_an_attempt_that_runs_goes_on_unless_it_is_asked_to_stop(tmp_path: Path) -> None:
    asked, hold = asyncio.Event(), asyncio.Event()

    async def runs(handled: Handled) -> None:
        if handled.epoch == 1:
            while type(await handled.receive()) is not Suspend:
                pass
            asked.set()
            handled.wait_for()
        else:
            handled.output(b"again")

    async def stays(handled: Handled) -> None:
        await hold.wait()
        handled.output(b"stayed")

    async with world(tmp_path) as it:
        endpoint = await it.register({"a/runs": runs, "b/stays": stays})
        stopped, going_on = await it.send("a/runs"), await it.send("b/stays")
        await eventually(lambda: len(endpoint.starts) == 2)
        await propose(it, ALL)
        assert not asked.is_set()
        await propose(it, Halt("a", None, "ada", "stop", recall=True))

        await asyncio.wait_for(asked.wait(), 60)
        hold.set()
        assert await it.completed(going_on) == [0, b"stayed"]
        await withheld(it, 1)
        assert len(endpoint.starts) == 2
        await propose(it, Release("", None), Release("a", None))

        assert await it.completed(stopped) == [0, b"again"]


async def test_what_waited_for_its_endpoint_when_the_pause_began_does_not_start(tmp_path: Path) -> None:
    hold = asyncio.Event()

    async def held(handled: Handled) -> None:
        await hold.wait()
        handled.output(b"")

    async with world(tmp_path, attempts_max=2) as it:
        endpoint = await it.register({"a/held": held})
        idents = [await it.send("a/held") for _ in range(10)]
        await eventually(lambda: len(endpoint.starts) == 2)

        await propose(it, ALL)
        hold.set()
        await withheld(it, 8)
        assert len(endpoint.starts) == 2
        await propose(it, Release("", None))

        for ident in idents:
            await it.completed(ident)


async def test_more_than_the_bound_is_found_in_the_state_when_the_pause_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "WITHHELD_MAX", 5)
    async with world(tmp_path) as it:
        endpoint = await it.register(HANDLERS)
        await propose(it, ALL)
        idents = [await it.send("echo/say", b"%d" % number) for number in range(30)]
        await withheld(it, 5)
        assert not endpoint.starts

        await propose(it, Release("", None))

        assert [await it.completed(ident) for ident in idents] == [[0, b"%d" % number] for number in range(30)]


async def test_a_pause_survives_a_restart(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        endpoint = await it.register(HANDLERS)
        await propose(it, ALL)
        ident = await it.send("echo/say", b"1")
        await withheld(it, 1)

        await it.restart()
        later = await it.send("echo/say", b"2")
        await withheld(it, 1)  # The other one is found in the state when the pause ends.
        assert not endpoint.starts

        await propose(it, Release("", None))
        assert await it.completed(ident) == [0, b"1"]
        assert await it.completed(later) == [0, b"2"]


async def test_nothing_starts_when_the_leader_is_killed_during_a_pause(tmp_path: Path) -> None:
    async with three(tmp_path, {"box:object/put:exclusive": echo}) as cluster:
        await cluster.led()
        number = partition_of(cluster.seats["n1"].node.serving.router.mint("box", "k"), 3)
        leader = await cluster.leader(number)
        await propose(leader, ALL)
        await eventually(
            lambda: all(seat.node.ground.registry.state.pauses.by_scope for seat in cluster.up()),
            "the pause on every node",
        )
        idents = [await leader.send("box/put", b"%d" % each, key="k") for each in range(5)]
        await eventually(lambda: len(leader.node.ground.invoker.pauses) >= 1, "a withheld attempt")

        await leader.kill()
        await cluster.leader(number)
        await cluster.led()
        other = cluster.up()[0]
        more = await other.send("box/put", b"more", key="another")
        await leader.start()
        await cluster.led()
        assert not cluster.endpoint.starts
        assert leader.node.ground.registry.state.pauses.by_scope.keys() == {EVERYTHING}

        await propose(other, Release("", None))
        assert [await other.completed(ident) for ident in idents] == [[0, b"%d" % each] for each in range(5)]
        assert await other.completed(more) == [0, b"more"]
        assert len(cluster.endpoint.starts) == 6, "each runs once"


async def test_the_api_pauses_explains_and_resumes(tmp_path: Path) -> None:
    async with one(tmp_path) as (it, doors):
        operator = (await doors.create("operate"))["token"]
        reader = (await doors.create("read"))["token"]

        async def ask(method: str, value: Any, token: str = operator) -> tuple[int, Any]:
            return await doors.ask(method, "/pauses", token, value=value)

        refused = [
            (await ask("POST", {"reason": "x"}, reader))[0],
            (await ask("POST", {}))[0],
            (await ask("POST", {"reason": " "}))[0],
            (await ask("POST", {"reason": "x" * 501}))[0],
            (await ask("POST", {"reason": "x", "service": "none"}))[0],
            (await ask("POST", {"reason": "x", "service": ""}))[0],
            (await ask("POST", {"reason": "x", "key": "k"}))[0],
            (await ask("POST", {"reason": "x", "service": "echo", "key": "k"}))[0],
            (await ask("POST", {"reason": "x", "stop": "yes"}))[0],
            (await ask("DELETE", {}))[0],
        ]
        assert refused == [403, 400, 400, 400, 404, 400, 400, 400, 400, 404]
        assert not it.node.ground.registry.state.pauses.by_scope

        first, made = await ask("POST", {"service": "flow", "key": "k", "reason": "odd"})
        again, _ = await ask("POST", {"service": "flow", "key": "k", "reason": "odder"})
        everything, _ = await ask("POST", {"reason": "incident 4711"})
        assert (first, again, everything) == (201, 200, 201)
        assert made["by"] == "tests" and made["service"] == "flow" and made["key"] == "k"
        shown = (await ask("GET", None, reader))[1]
        assert shown["all"]["reason"] == "incident 4711" and shown["services"] == []
        assert [each["reason"] for each in shown["keys"]] == ["odder"]

        ident = await it.send("echo/say", b"1")
        described = (await doors.ask("GET", f"/invocations/{format_id(ident)}", reader))[1]
        why = described["why_not_running"]
        assert why.startswith("Paused by tests since 2") and "(everything): incident 4711; resume with" in why
        assert "`holdfast resume --all`" in why
        warnings = (await doors.ask("GET", "/health"))[1]["warnings"]
        assert len(warnings) == 2 and "key 'k' of flow is paused by tests" in warnings[0]
        assert len((await doors.ask("GET", "/cluster", reader))[1]["pauses"]) == 2
        metrics = (await doors.ask("GET", "/metrics", reader))[1]
        assert "\nholdfast_pauses 2.0" in metrics and "\nholdfast_attempts_withheld 1.0" in metrics

        resumed, done = await ask("DELETE", {})
        assert resumed == 200 and done["resumed"] == "everything" and len(done["still_paused"]["keys"]) == 1
        assert await it.completed(ident) == [0, b"1"]
        begun = (await doors.ask("GET", "/audit?action=begin_pause&outcome=done", doors.root))[1]["acts"]
        ended = (await doors.ask("GET", "/audit?action=end_pause&outcome=done", doors.root))[1]["acts"]
        assert (len(begun), len(ended)) == (3, 1)
        assert begun[0]["targets"]["scope"] == "everything" and begun[0]["targets"]["reason"] == "incident 4711"


async def test_the_answer_names_the_nodes_that_have_not_confirmed_the_pause(tmp_path: Path) -> None:
    async with three(tmp_path, HANDLERS) as cluster, aiohttp.ClientSession() as session:
        await cluster.led()

        async def pause(reason: str) -> Any:
            admin = cluster.seats["n1"].node.doors.admin
            async with session.post(f"http://127.0.0.1:{admin.port}/pauses", json={"reason": reason}) as response:
                assert response.status < 300, await response.text()
                return await response.json()

        shown = await pause("all nodes are up")
        obeyed = [seat.name for seat in cluster.up() if seat.node.ground.registry.state.pauses.by_scope]
        await cluster.seats["n3"].kill()
        await cluster.led()
        without = await pause("one is down")

        assert (shown["not_confirmed"], without["not_confirmed"]) == ([], ["n3"])
        assert obeyed == ["n1", "n2", "n3"], "without waiting"
