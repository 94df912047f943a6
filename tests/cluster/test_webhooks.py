"""Webhooks: every event arrives at least once, whatever the receiver does and whichever node leads."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from holdfast.cluster.addresses import read_addresses
from holdfast.cluster.leading import courier, notices
from holdfast.cluster.leading.courier import Courier, Line
from holdfast.sdk.frames import Output
from holdfast.sdk.ids import format_approval, format_id, partition_of
from holdfast.sdk.journal import Op
from holdfast.statemachine import queries
from holdfast.statemachine.effects import Status
from holdfast.statemachine.webhooks import (
    ASKED,
    COMPLETED,
    FAILED,
    IN_DOUBT,
    PAUSED,
    REMINDED,
    CreateWebhook,
    DeleteWebhook,
    HookId,
    name_of,
)
from tests.cluster.harness import PATIENCE_S, Handled, World, echo, eventually, world
from tests.cluster.test_three_nodes import three
from tests.cluster.test_tokens import one
from tests.ports import free_ports

A, B = HookId(b"hook a.."), HookId(b"hook b..")
ALL = FAILED | PAUSED | COMPLETED | IN_DOUBT
ASKS = ASKED | REMINDED
SECRET = "whsec_of_the_tests"

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def fine(request: web.Request) -> web.StreamResponse:
    return web.Response(status=204)


class Receiver:
    """Remembers every request, whatever it answers."""

    def __init__(self) -> None:
        self.answer: Answer = fine
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.taken: list[dict[str, Any]] = []
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.requests]

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((dict(request.headers), body))
        response = await self.answer(request)
        if response.status < 300:
            self.taken.append(json.loads(body))
        return response


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    await receiver.start()
    try:
        yield receiver
    finally:
        await receiver.stop()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed requests are repeated soon."""
    monkeypatch.setattr(courier, "BACKOFF_S", 0.02)
    monkeypatch.setattr(courier, "BACKOFF_S_MAX", 0.1)


def known(it: World, version: int) -> bool:
    """Whether the partitions that this node leads know the webhooks of a version."""
    for number, partition in it.node.serving.router.hosted.items():
        if it.node.serving.router.leads(number):
            with partition.state.read() as txn:
                if queries.meta(txn).hooks < version:
                    return False
    return True


async def create(
    it: World, url: str, events: int = ALL, *, hook: HookId = A, services: tuple[str, ...] = (), all_of: Any = ()
) -> None:
    outcome = await it.node.ground.registry.propose(CreateWebhook(hook, url, events, [*services], SECRET, "ada"))
    assert outcome.result.code == 0
    version = it.node.ground.registry.state.webhooks.version
    await eventually(lambda: all(known(each, version) for each in (it, *all_of)), "the webhook in every partition")


def left(it: World, hook: HookId = A) -> int:
    """Notices that wait in the partitions here."""
    found = 0
    for partition in it.node.serving.router.hosted.values():
        with partition.state.read() as txn:
            found += len(queries.notices(txn, hook, 100_000))
    return found


async def fail(handled: Handled) -> None:
    handled.send(Output(handled.id, handled.epoch, [1, 404, "no such item", "TerminalError"]))


async def give_up(handled: Handled) -> None:
    handled.fail("broken", pause=True)


HANDLERS: dict[str, Any] = {"echo/say": echo, "other/say": echo, "bad/fails": fail, "bad/stops": give_up}


async def test_every_kind_of_event_arrives_signed_and_with_the_facts_of_its_invocation(tmp_path: Path) -> None:
    async with world(tmp_path) as it, receiving() as receiver:
        await it.register(HANDLERS)
        await create(it, receiver.url)

        done, failed, stopped = [await it.send(path, b"1") for path in ("echo/say", "bad/fails", "bad/stops")]
        await eventually(lambda: len(receiver.taken) == 3, "three events")

        by_id = {event["invocation"]["id"]: event for event in receiver.taken}
        assert by_id[format_id(done)]["event"] == "completed" and by_id[format_id(done)]["failure"] is None
        assert by_id[format_id(failed)]["event"] == "failed"
        assert by_id[format_id(failed)]["failure"] == {"code": 404, "message": "no such item", "kind": "TerminalError"}
        assert by_id[format_id(stopped)]["event"] == "paused"
        assert by_id[format_id(stopped)]["invocation"]["status"] == "paused"
        assert by_id[format_id(stopped)]["failure"]["message"] == "broken"
        for headers, body in receiver.requests:
            time_, _, digest = headers["X-Holdfast-Signature"].partition(",v1=")
            signed = time_.removeprefix("t=").encode() + b"." + body
            assert hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest() == digest
            assert headers["X-Holdfast-Event-Id"] == json.loads(body)["id"]
            assert headers["X-Holdfast-Webhook"] == name_of(A)
        await eventually(lambda: left(it) == 0, "no notice left")


async def test_a_webhook_gets_only_what_it_wants(tmp_path: Path) -> None:
    async with world(tmp_path) as it, receiving() as receiver:
        await it.register(HANDLERS)
        await create(it, receiver.url, FAILED | COMPLETED, services=("other", "bad"))

        await it.call("echo/say")
        await it.reaches(await it.send("bad/stops"), Status.PAUSED)
        await it.call("bad/fails")
        await it.call("other/say")
        await eventually(lambda: len(receiver.taken) == 2, "two events")
        await eventually(lambda: left(it) == 0, "no notice left")

        assert sorted(event["event"] for event in receiver.events) == ["completed", "failed"]


async def test_an_event_is_repeated_until_the_receiver_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails, hangs, breaks off, redirects, and is down."""
    monkeypatch.setattr(courier, "ANSWER_S", 0.2)

    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    async def break_off(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response(status=500)

    async def redirect(request: web.Request) -> web.StreamResponse:
        assert request.path == "/hook", "a redirect is not followed"
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503)

    kinds = [refuse, hang, break_off, redirect, refuse]
    asked = 0

    async def in_turn(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return await (kinds[asked - 1] if asked <= len(kinds) else fine)(request)

    async with receiving() as receiver, world(tmp_path) as it:
        receiver.answer = in_turn
        await it.register(HANDLERS)
        await create(it, receiver.url)

        await it.call("echo/say")
        await eventually(lambda: receiver.taken, "the event")
        await eventually(lambda: left(it) == 0, "no notice left")
        port = receiver.port
        await receiver.stop()
        await it.call("echo/say")
        await eventually(lambda: it.node.serving.courier.lines[A].failures >= 2, "failures")
        assert "cannot connect to 127.0.0.1" in it.node.serving.courier.lines[A].last_error
        await receiver.start(port)
        await eventually(lambda: len(receiver.taken) == 2, "the second event")

        assert len({event["id"] for event in receiver.events[:6]}) == 1, "one event, six times"
        assert len({body for _, body in receiver.requests[:6]}) == 1, "and the same body"
        assert it.node.serving.courier.lines[A].failures == 0


async def test_a_dead_receiver_does_not_hold_up_another_one(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.Response(status=500)

    async with receiving() as dead, receiving() as well, world(tmp_path) as it:
        dead.answer = hang
        await it.register(HANDLERS)
        await create(it, dead.url, hook=A)
        await create(it, well.url, hook=B)

        for _ in range(20):
            await it.call("echo/say")
        await eventually(lambda: len(well.taken) == 20 and left(it, B) == 0, "all events at the other one")

        assert left(it, A) == 20 and 1 <= len(dead.requests) <= courier.AT_A_TIME
        release.set()


async def test_events_of_a_partition_arrive_in_order(tmp_path: Path) -> None:
    async with receiving() as receiver, world(tmp_path, partitions=1) as it:
        await it.register(HANDLERS)
        await create(it, receiver.url)
        await asyncio.gather(*(it.call("echo/say") for _ in range(5)))
        await eventually(lambda: left(it) == 0)
        sequences = [int(event["id"].rpartition("_")[2]) for event in receiver.taken]
        assert sequences == sorted(sequences) == [1, 2, 3, 4, 5]


async def test_an_event_that_is_refused_again_and_again_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "REFUSALS_MAX", 3)

    async def refuse_failures(request: web.Request) -> web.StreamResponse:
        return web.Response(status=400 if json.loads(await request.read())["event"] == "failed" else 204)

    async with receiving() as receiver, world(tmp_path, partitions=1) as it:
        receiver.answer = refuse_failures
        await it.register(HANDLERS)
        await create(it, receiver.url)

        await it.call("bad/fails")
        await it.call("echo/say")
        await eventually(lambda: receiver.taken and left(it) == 0, "the next event")

        assert Counter(event["event"] for event in receiver.events) == {"failed": 3, "completed": 1}
        assert it.node.serving.farings.here()[A].dropped == 1
        assert any("did not get 1 events" in warning for warning in it.node.serving.health.warnings())


async def test_an_event_that_is_too_old_is_dropped_without_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503)

    async with receiving() as receiver, world(tmp_path, partitions=1) as it:
        receiver.answer = refuse
        await it.register(HANDLERS)
        await create(it, receiver.url)
        await it.call("echo/say")
        await eventually(lambda: receiver.requests)

        monkeypatch.setattr(notices, "AGE_MS_MAX", -1000)
        await eventually(lambda: left(it) == 0, "dropped")

        assert it.node.serving.farings.here()[A].dropped == 1 and not receiver.taken


async def test_what_waits_survives_a_restart_and_a_deleted_webhook_drops_it(tmp_path: Path) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503)

    async with receiving() as receiver, world(tmp_path) as it:
        receiver.answer = refuse
        await it.register(HANDLERS)
        await create(it, receiver.url)
        for _ in range(4):
            await it.call("echo/say")
        await eventually(lambda: left(it) == 4)

        await it.restart()
        receiver.answer = fine
        await eventually(lambda: len(receiver.taken) == 4 and left(it) == 0, "delivery after the restart")
        receiver.answer = refuse
        for _ in range(4):
            await it.call("echo/say")
        assert left(it) == 4
        await it.node.ground.registry.propose(DeleteWebhook(A))
        await eventually(lambda: left(it) == 0, "no notice left")

        def rows() -> list[Any]:
            found = []
            for partition in it.node.partitions:
                with partition.state.read() as txn:
                    found += queries.hooks(txn)
            return found

        await eventually(lambda: not rows(), "no hook left")
        assert not it.node.serving.farings.here()


async def test_an_event_survives_the_leader_that_sent_it_and_could_not_record_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader is killed between the delivery and its record: the next one delivers the same event again."""
    async with receiving() as receiver, three(tmp_path, {"box:object/put:exclusive": echo}) as cluster:
        await cluster.led()
        number = partition_of(cluster.seats["n1"].node.serving.router.mint("box", "k"), 3)
        await create(cluster.up()[0], receiver.url, all_of=cluster.up())
        leader = await cluster.leader(number)

        delivered, hold = asyncio.Event(), asyncio.Event()
        forget = notices.Notices._forget

        async def forget_later(self: Any, hook: HookId, sequences: list[int], **more: Any) -> None:
            delivered.set()
            await hold.wait()  # The first leader never comes to this.
            await forget(self, hook, sequences, **more)

        monkeypatch.setattr(notices.Notices, "_forget", forget_later)
        other = next(seat for seat in cluster.up() if seat is not leader)
        await other.call("box/put", b"1", key="k")
        await delivered.wait()
        assert len(receiver.taken) == 1
        await leader.kill()
        hold.set()

        await cluster.leader(number)
        await eventually(lambda: len(receiver.taken) >= 2, "the repetition")
        await eventually(lambda: all(left(seat) == 0 for seat in cluster.up()), "no notice left")

        assert len({event["id"] for event in receiver.taken}) == 1
        assert len({body for _, body in receiver.requests}) == 1
        await leader.start()
        await cluster.led()
        assert await leader.call("box/put", b"2", key="k") == [0, b"2"]
        await eventually(lambda: len({event["id"] for event in receiver.taken}) == 2, "later events")


async def test_all_nodes_together_know_how_a_webhook_fares(tmp_path: Path) -> None:
    async with receiving() as receiver, three(tmp_path, {"box:object/put:exclusive": echo}) as cluster:
        await cluster.led()
        await create(cluster.up()[0], receiver.url, all_of=cluster.up())
        for number in range(12):
            await cluster.up()[number % 3].call("box/put", b"1", key=f"key {number}")
        await eventually(lambda: len(receiver.taken) >= 12, "all events")

        for seat in cluster.up():
            # A leader counts a delivery when the receiver has answered, which is after the receiver has counted it.
            async with asyncio.timeout(PATIENCE_S):
                while (shown := (await seat.node.serving.farings.everywhere()).get(A)) is None or shown.delivered < 12:
                    await asyncio.sleep(0.01)
            assert shown.delivered == 12 and shown.last_success_ms and not shown.failing_since_ms


async def test_the_api_creates_lists_tests_and_deletes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(10)
    async with one(tmp_path) as (it, doors), receiving() as receiver:
        operator = (await doors.create("operate"))["token"]
        reader = (await doors.create("read"))["token"]

        async def ask(method: str, path: str = "", value: Any = None, token: str = operator) -> tuple[int, Any]:
            return await doors.ask(method, f"/webhooks{path}", token, value=value)

        valid = {"url": receiver.url, "events": ["failed", "completed"]}
        wrong: list[Any] = [
            {},
            {**valid, "url": 5},
            {**valid, "url": ""},
            {**valid, "url": "ftp://a.example/"},
            {**valid, "url": "https://"},
            {**valid, "url": "https://a.example:99999/"},
            {**valid, "url": "https://a.example/ x"},
            {**valid, "url": "https://ä.example/"},
            {**valid, "url": "https://user:hunter2@a.example/"},
            {**valid, "url": "http://169.254.169.254/latest"},
            {**valid, "url": "http://[fe80::1]/"},
            {**valid, "url": f"http://a.example/{'x' * 2048}"},
            {**valid, "events": []},
            {**valid, "events": ["failed", "other"]},
            {**valid, "events": "failed"},
            {**valid, "services": [""]},
            {**valid, "services": "echo"},
            {**valid, "secret": "mine"},
        ]
        for value in wrong:
            status, said = await ask("POST", value=value)
            assert status == 400, (value, said)
            assert "hunter2" not in str(said)
        assert (await ask("GET", token=reader))[0] == (await ask("POST", value=valid, token=reader))[0] == 403
        assert not it.node.ground.registry.state.webhooks.by_id

        created, made = await ask("POST", value=valid)
        assert created == 201 and made["secret"].startswith("whsec_") and made["events"] == ["failed", "completed"]
        secret = made["secret"]
        status, tested = await ask("POST", f"/{made['id']}/test")
        assert (status, tested["taken"], tested["status"]) == (200, True, 204)
        assert receiver.events[0]["event"] == "test"
        await eventually(lambda: known(it, it.node.ground.registry.state.webhooks.version))
        await it.call("echo/say", b"1")
        await eventually(lambda: len(receiver.taken) == 2)
        [shown] = (await ask("GET"))[1]["webhooks"]
        assert shown["id"] == made["id"] and "secret" not in shown and shown["last_success_at"]
        assert shown["created_by"] == "tests" and shown["delivered"] == 1
        metrics = (await doors.ask("GET", "/metrics", reader))[1]
        assert f'holdfast_webhook_delivered_total{{webhook="{made["id"]}"}} 1.0' in metrics

        await receiver.stop()
        status, tested = await ask("POST", f"/{made['id']}/test")
        assert (status, tested["taken"]) == (200, False) and "cannot connect" in tested["error"]
        assert (await ask("DELETE", f"/{made['id']}"))[0] == 200
        assert (await ask("DELETE", f"/{made['id']}"))[0] == 404
        assert (await ask("POST", f"/{made['id']}/test"))[0] == 404
        assert (await ask("DELETE", "/wh_x"))[0] == 404
        assert (await ask("GET"))[1] == {"webhooks": []}
        acts = (await doors.ask("GET", "/audit", doors.root))[1]
        assert "create_webhook" in str(acts) and secret not in str(acts) and secret not in caplog.text
        assert secret not in str(await doors.ask("GET", "/cluster", doors.root))


async def test_a_node_connects_to_no_guarded_address_whatever_a_name_resolves_to(tmp_path: Path) -> None:
    """The check is made for each connection: a name may resolve to something else than when the webhook was created."""
    (port,) = free_ports(1)
    async with world(tmp_path, webhook_addresses=read_addresses("10.0.0.0/8")) as it:
        await create(it, f"http://127.0.0.1:{port}/")
        hook = it.node.ground.registry.state.webhooks.by_id[A]
        sender: Courier = it.node.serving.courier

        sent = await sender.send(hook, "evt", b"{}")
        guarded = await sender.send(hook._replace(url="http://169.254.169.254/"), "evt", b"{}")

        assert "webhook_addresses does not allow its address" in sent.error
        assert "link-local or metadata" in guarded.error


async def test_pauses_grow_and_respect_retry_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier, "BACKOFF_S", 1.0)
    monkeypatch.setattr(courier, "BACKOFF_S_MAX", 300.0)

    class At:
        def now_ms(self) -> int:
            return 1_000_000

    line = Line("n1", A, At())  # type: ignore[arg-type]
    tries = []
    for _ in range(12):
        line.note(courier.Sent(500, "no"))
        tries.append((line.next_try_ms - 1_000_000) / 1000)

    for number, seconds in enumerate(tries):
        assert 0.75 * min(2**number, 300) <= seconds <= min(1.25 * 2**number, 300)
    line.note(courier.Sent(200, ""))
    assert line.is_open and not line.failing_since_ms
    line.note(courier.Sent(429, "slow down", 60.0))
    assert line.next_try_ms == 1_060_000
    line.note(courier.Sent(429, "slow down", 86_400.0))
    assert line.next_try_ms == 1_300_000, "an event waits for no longer than the longest pause"


async def test_an_approval_is_told_when_it_is_requested_and_again_when_it_has_waited(tmp_path: Path) -> None:
    async def asks(handled: Handled) -> None:
        if handled.length == 1:
            argument = ["Refund order 17?", b"{}", ["approve", "reject"], "finance", 3_600_000, 50, True, b"8 bytes!"]
            handled.wait_for(handled.step(Op.APPROVAL, "approval", argument))

    async with world(tmp_path) as it, receiving() as receiver:
        await it.register({"refunds/ask": asks})
        await create(it, receiver.url, ASKS)
        id_ = await it.send("refunds/ask")
        await eventually(lambda: len(receiver.taken) == 2, "both events")

        requested, reminder = receiver.taken
        assert [requested["event"], reminder["event"]] == ["approval-requested", "approval-reminder"]
        approval = requested["approval"]
        assert approval == reminder["approval"] and requested["invocation"]["id"] == format_id(id_)
        assert approval["id"] == format_approval(id_, 1), "without the secret"
        assert (approval["title"], approval["assignee"]) == ("Refund order 17?", "finance")
        assert approval["choices"] == ["approve", "reject"] and approval["due_at"].endswith("Z")
        assert b"8 bytes!".hex() not in str(receiver.requests)
