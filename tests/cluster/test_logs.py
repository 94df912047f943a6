"""What the nodes keep of their logs, and `GET /logs`."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from holdfast.cluster import log_ring
from holdfast.cluster.admin import logs as admin_logs
from holdfast.cluster.errors import BadRequest
from holdfast.cluster.events.logs import AllLogs
from holdfast.cluster.log_ring import LogRing, Place, Wanted
from holdfast.cluster.peers.rpc import Refused
from holdfast.sdk.ids import InvocationId, format_id
from tests.cluster.harness import PATIENCE_S, Handled, eventually
from tests.cluster.serving import Serving, run
from tests.cluster.test_health import net
from tests.cluster.test_tokens import one
from tests.cluster.watching import Watcher

ID = format_id(InvocationId(bytes(range(16))))
INFO, DEBUG, WARNING = Wanted(logging.INFO, ""), Wanted(logging.DEBUG, ""), Wanted(logging.WARNING, "")
logger = logging.getLogger("holdfast.cluster.of_this_test")


def write(ring: LogRing, message: str, level: int = logging.INFO, at_s: float = 1.0, **extra: Any) -> None:
    record = logging.makeLogRecord({"name": "holdfast.x", "levelno": level, "levelname": logging.getLevelName(level)})
    record.msg, record.created = message, at_s
    vars(record).update(extra)
    ring.handle(record)


def messages(ring: LogRing, wanted: Wanted = INFO, limit: int = 100, after: Place | None = None) -> list[str]:
    return [json.loads(each.line)["message"] for each in ring.read(wanted, limit, after).records]


# -- of one node


def test_a_ring_keeps_the_newest_records_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_ring, "RECORDS_MAX", 3)
    ring = LogRing("n1", 1)
    for number in range(5):
        write(ring, str(number))
    assert messages(ring) == ["2", "3", "4"]

    monkeypatch.setattr(log_ring, "RING_BYTES_MAX", 1000)
    write(ring, "x" * 900)
    assert messages(ring) == ["x" * 900]


def test_debug_records_do_not_displace_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_ring, "RECORDS_MAX", 2)
    ring = LogRing("n1", 1)
    write(ring, "a warning", logging.WARNING)
    for number in range(9):
        write(ring, str(number), logging.DEBUG)
    write(ring, "the last")

    assert messages(ring) == ["a warning", "the last"]
    assert messages(ring, DEBUG) == ["a warning", "7", "8", "the last"]
    assert messages(ring, WARNING) == ["a warning"]


def test_records_are_found_by_invocation_and_time() -> None:
    ring = LogRing("n1", 1)
    write(ring, "of another", invocation_id=format_id(InvocationId(bytes(16))))
    write(ring, "with a field", invocation_id=ID, at_s=2.0)
    write(ring, f"{ID} in the text", at_s=3.0)

    assert messages(ring, Wanted(logging.INFO, ID)) == ["with a field", f"{ID} in the text"]
    assert messages(ring, Wanted(logging.INFO, ID, since_ms=3000)) == [f"{ID} in the text"]
    assert messages(ring, Wanted(logging.INFO, "", since_ms=1000, until_ms=2000)) == ["of another"]


def test_a_reader_goes_on_where_it_was_and_hears_of_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_ring, "RECORDS_MAX", 4)
    ring = LogRing("n1", 7)
    write(ring, "0")
    first = ring.read(INFO, 10, None)
    for number in (1, 2, 3):
        write(ring, str(number))

    second = ring.read(INFO, 2, first.place)
    third = ring.read(INFO, 2, second.place)

    assert [json.loads(each.line)["message"] for each in (*second.records, *third.records)] == ["1", "2", "3"]
    assert (second.rest, third.rest, second.lost, third.lost) == (True, False, False, False)
    for number in range(9):
        write(ring, str(number))
    assert ring.read(INFO, 10, third.place).lost
    assert messages(ring, after=Place(6, 1000)) == ["5", "6", "7", "8"], "of an earlier run: all of this one is new"


def test_an_answer_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_ring, "ANSWER_BYTES_MAX", 1000)
    ring = LogRing("n1", 1)
    for number in range(3):
        write(ring, str(number) * 400)

    page = ring.read(INFO, 10, None)

    assert [json.loads(each.line)["message"][0] for each in page.records] == ["2"] and page.rest


def test_a_record_that_cannot_be_formatted_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    ring = LogRing("n1", 1)
    record = logging.makeLogRecord(
        {"name": "x", "levelno": logging.INFO, "levelname": "INFO", "msg": "%d", "args": ("no",)}
    )

    ring.handle(record)
    write(ring, "half of a pair: \ud800")

    assert messages(ring) == ["half of a pair: ?"]
    assert "Logging error" in capsys.readouterr().err


# -- of all nodes


def test_the_logs_of_all_nodes_are_one_list_in_the_order_of_time() -> None:
    async def scenario() -> None:
        rpcs = net("n1", "n2", "older")
        rings = {name: LogRing(name, 1) for name in ("n1", "n2")}
        known = ["n1", "n2", "older", "gone"]
        logs = [
            AllLogs(name, ring, rpcs[name], members=lambda: known, connected=lambda: ["n2", "older"])
            for name, ring in rings.items()
        ]
        for number, name in enumerate(("n2", "n1", "n2")):
            write(rings[name], str(number), at_s=1.0 + number)

        found = await logs[0].read(INFO, 10, nodes=known)
        again = await logs[0].read(
            INFO, 10, nodes=known, after={name: page.place for name, page in found.pages.items()}
        )
        write(rings["n2"], "new")
        new = await logs[0].read(INFO, 10, nodes=["n2"], after={"n2": found.pages["n2"].place})

        rows = [(name, json.loads(record.line)["message"]) for name, record in found.records()]
        assert rows == [("n2", "0"), ("n1", "1"), ("n2", "2")] and found.silent == ["gone", "older"]
        assert again.records() == []
        assert [json.loads(record.line)["message"] for _, record in new.records()] == ["new"]

    asyncio.run(scenario())


@pytest.mark.parametrize("argument", [None, 1, [1], [20, "", 0, 0, 1, [1]], ["x", "", 0, 0, 1, None]])
def test_a_request_that_cannot_be_read_is_refused(argument: object) -> None:
    async def scenario() -> None:
        rpcs = net("n1", "n2")
        AllLogs("n1", LogRing("n1", 1), rpcs["n1"], members=list, connected=list)
        with pytest.raises(Refused, match="cannot decode"):
            await rpcs["n2"].ask("n1", "logs", argument)

    asyncio.run(scenario())


# -- over HTTP


def test_a_node_shows_what_it_logs(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        logger.warning("a disk is slow", extra={"invocation_id": ID})
        try:
            raise ValueError("a bug")
        except ValueError:
            logger.exception("it broke")

        status, shown = await at.admin("GET", "/logs?level=warning&since=1m")
        of_one = (await at.admin("GET", f"/logs?invocation={ID}"))[1]
        newest = (await at.admin("GET", "/logs?level=warning&limit=1"))[1]

        assert status == 200 and shown["silent"] == [] and not shown["more"]
        mine = [each for each in shown["records"] if each["logger"] == logger.name]
        assert [(each["level"], each["node"], each["message"]) for each in mine] == [
            ("warning", "n1", "a disk is slow"), ("error", "n1", "it broke"),
        ]  # fmt: skip
        assert "ValueError: a bug" in mine[1]["error"]
        assert [each["message"] for each in of_one["records"]] == ["a disk is slow"]
        assert newest["more"] and [each["message"] for each in newest["records"]] == ["it broke"]

    run(tmp_path, scenario)


def test_a_lost_attempt_is_in_the_log_of_its_invocation_at_level_debug(tmp_path: Path) -> None:
    async def hangs(handled: Handled) -> None:
        await asyncio.Event().wait()

    async def scenario(at: Serving) -> None:
        await at.admin("PUT", "/log-level", json={"level": "debug"})
        at.endpoint.handlers["agent", "wait"] = hangs
        id_, other = [await at.send("agent/wait") for _ in range(2)]
        await eventually(lambda: len(at.endpoint.starts) == 2)
        for socket in list(at.endpoint.sockets):
            await socket.close()

        async def found(level: str, id_: str) -> list[dict[str, Any]]:
            records: list[dict[str, Any]] = (await at.admin("GET", f"/logs?level={level}&invocation={id_}"))[1][
                "records"
            ]
            return records

        async with asyncio.timeout(PATIENCE_S):
            while not (records := await found("debug", id_)) or not await found("debug", other):
                await asyncio.sleep(0.01)
        assert {each["invocation"] for each in records} == {id_} and "lost an attempt" in records[0]["message"]
        assert await found("info", id_) == []

        failing = await at.send("flaky/fail")
        await at.reaches(failing, "backing-off")
        [record] = await found("debug", failing)
        assert record["message"].startswith(f"{failing} failed an attempt: 500")
        assert "the database is down" not in record["message"], "what a handler says may be secret"

    run(tmp_path, scenario)


def test_a_stream_goes_on_and_resumes_after_its_last_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_logs, "LOOK_S", 0.01)

    async def scenario(at: Serving) -> None:
        async def watch(after: str | None = None) -> tuple[aiohttp.ClientResponse, Watcher]:
            headers = {"Accept": "text/event-stream", **({"Last-Event-ID": after} if after else {})}
            response = await at.http.get(f"{at.node.doors.urls.admin}/logs?level=error", headers=headers)
            assert response.status == 200 and response.content_type == "text/event-stream"
            watcher = Watcher(response)
            assert (await watcher.next()).kind == "hello"
            return response, watcher

        async def seen(watcher: Watcher, message: str) -> list[str]:
            found = await watcher.until(lambda each: each.kind == "record" and each.data["message"] == message)
            return [each.data["message"] for each in found]

        logger.error("before")
        first, watcher = await watch()
        assert (await seen(watcher, "before"))[-1] == "before"
        logger.error("one")
        logger.info("of a lower level")
        assert await seen(watcher, "one") == ["one"]
        first.close()
        logger.error("two")
        logger.error("three")

        second, watcher = await watch(watcher.id)
        assert await seen(watcher, "three") == ["two", "three"], "none is missing, and none comes twice"
        second.close()

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("query", "status", "said"),
    [
        ("level=loud", 400, "there is no level"),
        ("invocation=none", 400, ""),
        ("node=n9", 404, "there is no node 'n9'"),
        ("limit=0", 400, "a whole number"),
        ("since=soon", 400, "neither a time nor a duration"),
        ("nodes=n1", 400, "there is no parameter"),
    ],
)
def test_a_wrong_request_is_refused(tmp_path: Path, query: str, status: int, said: str) -> None:
    async def scenario(at: Serving) -> None:
        answered, error = await at.error("GET", f"/logs?{query}")
        assert answered == status and said in error["message"]

    run(tmp_path, scenario)


@pytest.mark.parametrize("id_", ["x", "n1:1", "n1:a:b", "n1:1:2,", "n1:1:2" * 9000])
def test_an_id_that_no_event_has_is_refused(id_: str) -> None:
    with pytest.raises(BadRequest):
        admin_logs._read_places(id_)


async def test_the_log_is_for_administrators(tmp_path: Path) -> None:
    async with one(tmp_path) as (_, doors):
        for role, expected in (("read", 403), ("operate", 403), ("admin", 200)):
            token = (await doors.create(role))["token"]
            assert (await doors.ask("GET", "/logs", token))[0] == expected, role


def test_a_node_that_stops_keeps_nothing_more(tmp_path: Path) -> None:
    before = list(logging.getLogger().handlers)

    async def scenario(at: Serving) -> None:
        assert at.node.log_ring in logging.getLogger().handlers

    run(tmp_path, scenario)

    assert logging.getLogger().handlers == before
