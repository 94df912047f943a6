"""`GET /events`: what readers see of a node and of a cluster, and how they resume."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.admin import events as admin_events
from holdfast.cluster.events import feed as feed_module
from holdfast.cluster.partition import changes as changes_module
from holdfast.sdk.ids import format_id, partition_of
from tests.cluster.harness import PATIENCE_S, FakeEndpoint, Handled, eventually
from tests.cluster.serving import HANDLERS, Serving, run, serving
from tests.cluster.test_three_nodes import Seat, echo, three
from tests.cluster.watching import Watcher, watching


def story(found: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(each["end"] or each["status"], each["attempts"]) for each in found]


def url_of(seat: Seat) -> str:
    return f"http://127.0.0.1:{seat.node.doors.admin.port}"


# -- one node


def test_the_life_of_an_invocation_is_told_in_order(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        async with watching(at.node.doors.urls.admin, kinds="invocation") as watcher:
            id_ = await at.send("agent/wait")
            first = await watcher.invocations(id_, "suspended")
            [step] = [
                each for each in (await at.admin("GET", f"/invocations/{id_}/journal"))[1]["steps"] if each["index"]
            ]
            await at.ask(
                "POST",
                f"{at.node.doors.urls.ingress}/holdfast/awakeables/{step['argument']['id']}/resolve",
                data=b'"yes"',
            )
            rest = await watcher.invocations(id_, "completed")

            assert story(first + rest) == [("running", 1), ("suspended", 1), ("running", 2), ("succeeded", 2)]
            listed = (await at.admin("GET", "/invocations"))[1]["invocations"][0]
            shown = rest[-1]
            assert {name: listed[name] for name in shown if name != "caller"} == {
                name: value for name, value in shown.items() if name != "caller"
            }, "the same as in the list"
            assert shown["caller"] is None

    run(tmp_path, scenario)


def test_failures_pauses_and_ends_are_told(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        async with watching(at.node.doors.urls.admin, kinds="invocation") as watcher:
            failing = await at.send("flaky/fail")
            assert story(await watcher.invocations(failing, "backing-off"))[-1] == ("backing-off", 1)
            await at.admin("POST", f"/invocations/{failing}/pause")
            assert story(await watcher.invocations(failing, "paused")) == [("paused", 1)]
            await at.admin("POST", f"/invocations/{failing}/kill")
            assert story(await watcher.invocations(failing, "completed")) == [("killed", 1)]

            stopped = await at.send("flaky/stop")
            assert story(await watcher.invocations(stopped, "paused")) == [("running", 1), ("paused", 1)]
            later = (await at.call("echo/say/send?delay=1h"))[1]["invocationId"]
            assert story(await watcher.invocations(later, "scheduled")) == [("scheduled", 0)]
            await at.admin("POST", f"/invocations/{later}/cancel")
            assert story(await watcher.invocations(later, "completed")) == [("cancelled", 0)]

    run(tmp_path, scenario)


def test_a_queue_behind_a_key_is_told(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        async with watching(at.node.doors.urls.admin, service="counter") as watcher:
            holder = await at.send("counter/k/wait")
            await watcher.invocations(holder, "suspended")
            behind = await at.send("counter/k/add")
            assert story(await watcher.invocations(behind, "queued")) == [("queued", 0)]
            await at.admin("POST", f"/invocations/{holder}/kill")

            found = await watcher.invocations(behind, "completed")
            assert [each["key"] for each in found] == ["k"] * len(found)
            assert story([each for each in found if each["id"] == behind]) == [("running", 1), ("succeeded", 1)]

    run(tmp_path, scenario)


FILTERS = {
    "service": "agent",
    "handler": "wait",
    "key": "k",
    "status": "suspended,backing-off",
}


@pytest.mark.parametrize(("name", "value"), FILTERS.items())
def test_a_filter_leaves_out_other_invocations(tmp_path: Path, name: str, value: str) -> None:
    async def scenario(at: Serving) -> None:
        async with watching(at.node.doors.urls.admin, **{name: value}) as watcher:
            for path in ("echo/say", "agent/wait", "counter/k/add", "counter/k/wait", "counter/other/add"):
                await at.send(path)
            last = await at.send("counter/k/wait" if name == "key" else "agent/wait")
            await at.reaches(last, "queued" if name == "key" else "suspended")
            await watcher.invocations(last, "queued" if name == "key" else "suspended")

            found = [each.data for each in watcher.seen if each.kind == "invocation"]
            wanted = value.split(",")
            assert found and all(each[name] in wanted for each in found), found

    run(tmp_path, scenario)


def test_one_invocation_is_watched_by_its_id(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        id_ = await at.send("agent/wait")
        await at.reaches(id_, "suspended")
        async with watching(at.node.doors.urls.admin, id=id_, kinds="invocation") as watcher:
            await at.call("echo/say")
            await at.admin("POST", f"/invocations/{id_}/kill")

            [only] = await watcher.invocations(id_, "completed")
            assert only["end"] == "killed"

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("kinds=invocations", "no kind of event 'invocations'"),
        ("status=done", "no status 'done'"),
        ("id=inv_1", "an id of this kind must be"),
        ("after=x", "'x' is not the id of an event"),
        ("keys=k", "no parameter 'keys'"),
        ("service=", "must not be empty"),
    ],
)
def test_a_wrong_request_is_refused_with_the_reason(tmp_path: Path, query: str, sentence: str) -> None:
    async def scenario(at: Serving) -> None:
        status, error = await at.error("GET", f"/events?{query}")

        assert status == 400
        assert sentence in error["message"]

    run(tmp_path, scenario, register=False)


def test_changes_of_deployments_and_of_their_health_are_told(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        await at.call("echo/say")
        async with watching(at.node.doors.urls.admin, kinds="deployments") as watcher:
            other = FakeEndpoint({"late/say": HANDLERS["echo/say"]})
            await other.start()
            await at.admin("POST", "/deployments", json={"uri": other.uri})
            assert (await watcher.next()).kind == "deployments"
            await at.call("late/say")
            assert (await watcher.next()).kind == "deployments", "it is in use, and healthy"
            await other.stop()
            await at.send("late/say")
            assert (await watcher.next()).kind == "deployments", "it is down"

    run(tmp_path, scenario)


def test_a_silent_stream_shows_signs_of_life_that_move_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_events, "SIGN_OF_LIFE_S", 0.1)

    async def scenario(at: Serving) -> None:
        async with watching(at.node.doors.urls.admin, service="nobody", kinds="invocation") as watcher:
            hello = watcher.id
            await at.call("echo/say")
            reading = asyncio.ensure_future(watcher.next())
            await eventually(lambda: watcher.id != hello, "another id")
            reading.cancel()

        async with watching(at.node.doors.urls.admin, after=watcher.id, kinds="invocation") as again:
            marker = await at.send("agent/wait")
            found = await again.invocations(marker, "suspended")
            assert {each["id"] for each in found} == {marker}

    run(tmp_path, scenario)


# -- resuming


def test_a_reader_resumes_without_loss_and_without_repetition(tmp_path: Path) -> None:
    """It reconnects after every few events, in the midst of what one entry changed too."""

    async def scenario(at: Serving) -> None:
        sending = asyncio.gather(*(at.send("echo/say") for _ in range(100)))
        after: str | None = None
        ends: Counter[str] = Counter()
        states: Counter[tuple[str, str, int]] = Counter()
        async with watching(at.node.doors.urls.admin, kinds="invocation") as watcher:
            after = watcher.id
        ids = await sending
        while len(ends) < 100:
            async with watching(at.node.doors.urls.admin, after=after, kinds="invocation") as watcher:
                assert watcher.seen[0].data["resumed"] is True
                for _ in range(7):
                    seen = await watcher.next()
                    assert seen.kind == "invocation"
                    states[seen.data["id"], seen.data["status"], seen.data["attempts"]] += 1
                    if seen.data["status"] == "completed":
                        ends[seen.data["id"]] += 1
                    if len(ends) == 100:
                        break
                after = watcher.id

        assert ends == Counter(ids), "each once"
        assert set(states.values()) == {1}, "nothing twice"

    run(tmp_path, scenario)


def test_a_reader_that_comes_back_later_gets_the_newest_state_of_each(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        async with watching(at.node.doors.urls.admin) as watcher:
            pass
        ids = [await at.send("trips/book") for _ in range(5)]
        for id_ in ids:
            await at.reaches(id_, "completed")
        await eventually(lambda: not at.node.serving.feed.readers, "a feed that begins anew")

        async with watching(at.node.doors.urls.admin, after=watcher.id) as again:
            found = await again.until(lambda each: each.kind == "deployments")

        assert [each.kind for each in found] == ["invocation"] * 5 + ["cluster", "deployments"]
        assert {each.data["id"] for each in found[:5]} == {*ids}
        assert {each.data["end"] for each in found[:5]} == {"succeeded"}

    run(tmp_path, scenario)


def test_a_reader_that_comes_back_too_late_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "KEPT_MAX", 64)

    async def scenario(at: Serving) -> None:
        async with watching(at.node.doors.urls.admin) as watcher:
            pass
        for _ in range(100):
            await at.call("echo/say")

        async with watching(at.node.doors.urls.admin, after=watcher.id) as again:
            seen = await again.until(lambda each: each.kind == "reset")
            assert "has changed more often than its nodes remember" in seen[-1].data["reason"]
            marker = await at.send("agent/wait")
            await again.invocations(marker, "suspended")

    run(tmp_path, scenario)


def test_a_place_in_another_cluster_is_no_place_here(tmp_path: Path) -> None:
    async def elsewhere(at: Serving) -> None:
        async with watching(at.node.doors.urls.admin) as watcher:
            places.append(watcher.id)

    async def scenario(at: Serving) -> None:
        async with watching(at.node.doors.urls.admin, after=places[0]) as watcher:
            assert watcher.seen[0].data["resumed"] is False
            assert (await watcher.next())[:2] == ("reset", {"reason": "the last event was of another cluster"})

    places: list[str] = []
    run(tmp_path / "one", elsewhere)
    run(tmp_path / "other", scenario)


def test_a_place_before_a_restart_of_the_node_is_resumed_only_if_nothing_was_missed(tmp_path: Path) -> None:
    async def before(at: Serving) -> None:
        async with watching(at.node.doors.urls.admin) as watcher:
            places.append(watcher.id)
            await at.call("echo/say")

    async def after(at: Serving) -> None:
        async with watching(at.node.doors.urls.admin, after=places[0], kinds="invocation") as watcher:
            assert (await watcher.next()).kind == "reset"

    places: list[str] = []
    run(tmp_path, before)
    run(tmp_path, after, register=False)


def test_a_reader_that_falls_behind_the_shared_list_catches_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "LIST_MAX", 20)

    async def scenario(at: Serving) -> None:
        feed = at.node.serving.feed
        reader = await feed.open(None)
        ids = [await at.send("echo/say") for _ in range(100)]
        for id_ in ids:
            await at.reaches(id_, "completed")
        await eventually(lambda: feed.first > 0, "a list that was cut")

        ends: Counter[str] = Counter()
        async with asyncio.timeout(PATIENCE_S):
            while len(ends) < 100:
                for event in await reader.read(1.0):
                    assert event.kind != "reset", event.reason
                    if event.change is not None and event.change.shown_end:
                        ends[format_id(event.change.id)] += 1
        feed.close(reader)

        assert ends == Counter(ids)

    run(tmp_path, scenario)


def test_the_feed_works_only_while_somebody_watches(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        feed = at.node.serving.feed
        assert not feed._tasks
        async with watching(at.node.doors.urls.admin), watching(at.node.doors.urls.admin):
            assert feed._tasks and feed.readers == 2
        await eventually(lambda: not feed._tasks and not feed.readers, "nobody")

    run(tmp_path, scenario)


# -- three nodes


async def scattered(path: Path, scenario: Callable[[Any], Awaitable[None]], **settings: Any) -> None:
    async with three(path, {"echo:object/say:exclusive": echo, "hold/on": hold}, **settings) as cluster:
        await cluster.led()
        await scenario(cluster)


async def hold(handled: Handled) -> None:
    await asyncio.Event().wait()


async def test_every_node_tells_the_same_places(tmp_path: Path) -> None:
    async def scenario(cluster: Any) -> None:
        seats = cluster.up()
        async with (
            watching(url_of(seats[0]), kinds="invocation") as one,
            watching(url_of(seats[1]), kinds="invocation") as two,
        ):
            ids = {format_id(await seats[2].send("echo/say", b"x", key=f"key {number}")) for number in range(30)}

            async def told(watcher: Watcher) -> dict[tuple[str, str], Any]:
                ends: set[str] = set()
                while ends < ids:
                    seen = await watcher.next()
                    if seen.data["status"] == "completed":
                        ends.add(seen.data["id"])
                return {(each.data["id"], each.data["status"]): each.data for each in watcher.seen[1:]}

            first, second = await told(one), await told(two)
            assert first == second

    await scattered(tmp_path, scenario)


async def test_a_reader_resumes_on_another_node_after_the_leader_was_killed(tmp_path: Path) -> None:
    async def scenario(cluster: Any) -> None:
        number = partition_of(cluster.seats["n1"].node.serving.router.mint("echo", "k"), 3)
        leader = await cluster.leader(number)
        other = next(seat for seat in cluster.up() if seat is not leader)
        seen: Counter[tuple[str, str, int]] = Counter()
        async with watching(url_of(leader), kinds="invocation") as watcher:
            early = [format_id(await leader.send("echo/say", b"x", key=f"k{each}")) for each in range(20)]
            for _ in range(25):  # Somewhere in the midst.
                event = await watcher.next()
                seen[event.data["id"], event.data["status"], event.data["attempts"]] += 1
        await leader.kill()
        sending = asyncio.gather(*(other.call("echo/say", b"x", key=f"k{each}") for each in range(20)))

        async with watching(url_of(other), after=watcher.id, kinds="invocation") as again:
            assert again.seen[0].data == {"node": other.name, "resumed": True}
            await sending
            late = [format_id(await other.send("echo/say", b"x", key="last"))]
            ends: set[str] = {id_ for id_, status, _ in seen if status == "completed"}
            while not ends >= {*early, *late}:
                event = await again.next()
                assert event.kind == "invocation", event
                seen[event.data["id"], event.data["status"], event.data["attempts"]] += 1
                if event.data["status"] == "completed":
                    ends.add(event.data["id"])

        assert set(seen.values()) == {1}, "nothing twice"

    await scattered(tmp_path, scenario)


async def test_a_node_without_a_replica_follows_one_that_has_it(tmp_path: Path) -> None:
    async def scenario(cluster: Any) -> None:
        bare = next(seat for seat in cluster.up() if len(seat.node.ground.replicas.hosted) < 6)
        foreign = next(number for number in range(6) if number not in bare.node.ground.replicas.hosted)
        keys = [f"key {each}" for each in range(200)]
        mint = bare.node.serving.router.mint
        key = next(each for each in keys if partition_of(mint("echo", each), 6) == foreign)
        async with watching(url_of(bare), kinds="invocation", service="echo") as watcher:
            id_ = format_id(await bare.send("echo/say", b"x", key=key))
            assert story(await watcher.invocations(id_, "completed"))[-1] == ("succeeded", 1)
        again = format_id(await bare.send("echo/say", b"x", key=key))
        await bare.call("echo/say", b"x", key=key)
        other = next(seat for seat in cluster.up() if seat is not bare)
        for seat in (bare, other):
            async with watching(url_of(seat), after=watcher.id, kinds="invocation") as resumed:
                found = await resumed.invocations(again, "completed")
                assert again in {each["id"] for each in found} and id_ not in {each["id"] for each in found}, seat.name

    await scattered(tmp_path, scenario, partitions=6, replication=2)


async def test_a_node_that_goes_is_told_as_a_change_of_the_cluster(tmp_path: Path) -> None:
    async def scenario(cluster: Any) -> None:
        first, *_, last = cluster.up()
        async with watching(url_of(first), kinds="cluster") as watcher:
            await last.kill()
            await watcher.until(lambda each: each.kind == "cluster")

    await scattered(tmp_path, scenario)


async def test_a_restarted_node_resumes_from_what_another_one_remembers(tmp_path: Path) -> None:
    async def scenario(cluster: Any) -> None:
        first, *others = cluster.up()
        async with watching(url_of(first), kinds="invocation") as watcher:
            pass
        missed = format_id(await others[0].send("echo/say", b"x", key="k"))
        await others[0].call("echo/say", b"x", key="k")
        await first.kill()
        await first.start()
        await cluster.led()

        async with watching(url_of(first), after=watcher.id, kinds="invocation") as again:
            assert missed in {each["id"] for each in await again.invocations(missed, "completed")}
            assert "reset" not in {each.kind for each in again.seen}

    await scattered(tmp_path, scenario)


async def test_streams_are_counted_in_the_metrics(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        async with watching(at.node.doors.urls.admin):
            text = (await at.admin("GET", "/metrics"))[1].decode()

        assert 'holdfast_streams{listener="admin"} 1.0' in text
        assert 'holdfast_streams_slow_total{listener="admin"} 0.0' in text

    async with serving(tmp_path) as at:
        await scenario(at)


def test_with_too_many_partitions_for_a_header_events_have_no_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "RESUMABLE_PARTITIONS_MAX", 1)
    monkeypatch.setattr(admin_events, "SIGN_OF_LIFE_S", 0.05)

    async def scenario(at: Serving) -> None:
        async with watching(at.node.doors.urls.admin) as watcher:
            await asyncio.sleep(0.2)
            id_ = await at.send("agent/wait")
            await watcher.invocations(id_, "suspended")

            assert watcher.id == ""

    run(tmp_path, scenario)


# -- a burst


@pytest.mark.slow("two thousand invocations, watched by twenty readers")
def test_twenty_readers_miss_nothing_of_a_burst(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        async def read(ready: asyncio.Semaphore) -> Counter[str]:
            ends: Counter[str] = Counter()
            async with watching(at.node.doors.urls.admin, kinds="invocation") as watcher:
                ready.release()
                while len(ends) < 2000:
                    seen = await watcher.next()
                    assert seen.kind == "invocation", seen
                    if seen.data["status"] == "completed":
                        ends[seen.data["id"]] += 1
            return ends

        ready = asyncio.Semaphore(0)
        readers = [asyncio.ensure_future(read(ready)) for _ in range(20)]
        for _ in readers:
            await ready.acquire()
        ids: list[str] = []
        for _ in range(20):
            ids += await asyncio.gather(*(at.send("echo/say") for _ in range(100)))

        assert all(found == Counter(ids) for found in await asyncio.gather(*readers))

    run(tmp_path, scenario)
