"""SQL over the cluster, through the admin API of real nodes with scripted handlers below them."""

# ruff: noqa: S608 - statements are made of ids here

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

from holdfast.cluster.errors import BadRequest, Circumstance, TooLarge
from holdfast.cluster.peers.rpc import Refused
from holdfast.cluster.sql import engine, queries, relations, source
from holdfast.cluster.sql.catalog import TABLES
from holdfast.cluster.sql.engine import Engine
from holdfast.cluster.sql.relations import Value, Wanted
from holdfast.cluster.sql.source import Reading, Source
from holdfast.sdk.ids import PartitionNumber
from holdfast.statemachine.levels import FIRST
from tests import sql_page
from tests.cluster.harness import PATIENCE_S, eventually
from tests.cluster.load import Load
from tests.cluster.serving import Serving, serving
from tests.cluster.test_approvals import asks, name_of
from tests.cluster.test_growing import growing
from tests.cluster.test_lists import tagged
from tests.cluster.test_tokens import one

#: Pairs every row with every row, for longer than any test.
ENDLESS = "with recursive r(n) as (select 1 union all select n + 1 from r) select count(*) from r"


class Sql:
    def __init__(self, at: Serving) -> None:
        self.at = at

    async def ask(self, sql: str, **more: Any) -> dict[str, Any]:
        status, answer = await self.at.admin("POST", "/query", json={"sql": sql, **more})
        assert status == 200, answer
        found: dict[str, Any] = answer
        return found

    async def rows(self, sql: str, **more: Any) -> list[list[Any]]:
        found: list[list[Any]] = (await self.ask(sql, **more))["rows"]
        return found

    async def records(self, sql: str) -> list[dict[str, Any]]:
        answer = await self.ask(sql)
        names = [column["name"] for column in answer["columns"]]
        return [dict(zip(names, row, strict=True)) for row in answer["rows"]]

    async def refused(self, sql: str, **more: Any) -> dict[str, Any]:
        return (await self.at.error("POST", "/query", json={"sql": sql, **more}))[1]


def running(sql: Sql) -> set[Reading]:
    doors = sql.at.node._doors
    assert doors is not None
    return doors.queries.running


def sources(sql: Sql) -> Source:
    doors = sql.at.node._doors
    assert doors is not None
    return doors.queries.source


@asynccontextmanager
async def sql_of(path: Path) -> AsyncIterator[Sql]:
    async with serving(path) as at:
        yield Sql(at)


@asynccontextmanager
async def busy(path: Path) -> AsyncIterator[tuple[Sql, dict[str, str]]]:
    """A node with something in every table, and the ids of its invocations."""
    async with sql_of(path) as sql:
        at = sql.at
        at.endpoint.add("refunds/ask", asks)
        await at.admin("POST", "/deployments", json={"uri": at.endpoint.uri, "force": True})
        ids = {
            "done": await tagged(at, "trips/book", "tenant=acme,order=17", b'{"to": "Lisbon"}'),
            "awakeable": await at.send("agent/wait"),
            "failing": await at.send("flaky/fail"),
            "doubt": await at.send("payments/pay"),
            "holder": await at.send("counter/k/wait"),
            "flow": await at.send("signup/ann/run"),
            "approval": await at.send("refunds/ask", b'"refund"'),
        }
        assert (await at.call("counter/free/add"))[0] == 200
        wanted = {
            "done": "completed", "awakeable": "suspended", "failing": "backing-off", "doubt": "paused",
            "holder": "suspended", "flow": "suspended", "approval": "suspended",
        }  # fmt: skip
        for name, status in wanted.items():
            await at.reaches(ids[name], status)
        assert (await at.admin("POST", "/pauses", json={"service": "echo", "reason": "maintenance"}))[0] == 201
        ids["queued"] = await at.send("counter/k/add")
        await at.reaches(ids["queued"], "queued")
        yield sql, ids


def test_the_page_of_tables_is_fresh() -> None:
    assert sql_page.PAGE.read_text(encoding="utf-8") == sql_page.page(), "run `make sql-page`"


async def test_every_table_has_its_documented_columns_and_rows(tmp_path: Path) -> None:
    async with busy(tmp_path) as (sql, _):
        listed = (await sql.at.admin("GET", "/query/tables"))[1]["tables"]

        assert [table["name"] for table in listed] == [*TABLES]
        for table in listed:
            answer = await sql.ask(f"select * from {table['name']}")
            assert [column["name"] for column in answer["columns"]] == [each["name"] for each in table["columns"]]
            assert answer["rows"] and answer["more"] is False, table["name"]
            for offset, column in enumerate(table["columns"]):
                assert column["about"] and column["type"], column
                types = {type(row[offset]) for row in answer["rows"]} - {type(None)}
                assert types <= ({int} if column["type"] == "integer" else {str}), (table["name"], column)


async def test_a_row_says_what_the_admin_api_says(tmp_path: Path) -> None:
    async with busy(tmp_path) as (sql, ids):
        for name, id_ in ids.items():
            shown = await sql.at.describe(id_)
            [row] = await sql.records(f"select * from invocations where id = '{id_}'")
            for field in (
                "service",
                "handler",
                "key",
                "status",
                "end",
                "deployment",
                "created_at",
                "attempts",
                "steps",
            ):
                assert row[field] == shown[field], (name, field)
        [failing] = await sql.records(f"select * from invocations where id = '{ids['failing']}'")
        assert (failing["failure_code"], failing["failure_message"]) == (500, "the database is down")
        assert failing["due_ms"] > failing["created_ms"]
        assert await sql.rows(f"select output from invocations where id = '{ids['done']}'") == [['"booked"']]

        [step] = await sql.records(f"select * from journal where invocation = '{ids['done']}' and step = 1")
        assert (step["op"], step["name"], step["outcome"]) == ("run", "flight", "value")
        assert json.loads(step["output"]) == {"booked": "flight"} and step["output_bytes"] == 20
        assert json.loads(step["input"]) == {"name": "flight"}
        assert await sql.rows("select service, key, name, value, bytes from state") == [
            ["counter", "free", "count", "1", 1]
        ]
        assert await sql.rows("select key, holder, waiting from objects where waiting > 0") == [["k", ids["holder"], 1]]
        assert await sql.rows("select service, key, name, outcome, waiting from promises") == [
            ["signup", "ann", "approved", None, 1]
        ]
        assert await sql.rows("select id, title, assignee, choices, payload, service from approvals") == [
            [name_of(ids["approval"]), "refund", "finance", '["approve", "reject"]', '{"eur":240}', "refunds"]
        ]
        assert await sql.rows("select invocation, name, key from in_doubt") == [[ids["doubt"], "pay", None]]
        assert await sql.rows(f"select how, failure_message from attempts where invocation = '{ids['failing']}'") == [
            ["failed", "the database is down"]
        ]
        assert await sql.rows(f"select kind, service from timers where invocation = '{ids['failing']}'") == [
            ["invocation", "flaky"]
        ]
        blind = Reading(sources(sql), asyncio.get_running_loop(), deadline_s=PATIENCE_S, with_ids=False, fresh=False)
        seen = await asyncio.to_thread(Engine(blind, now_ms=0).run, "select count(*), count(id) from awakeables", 10)
        assert seen.rows == [(2, 0)], "ids are for those who may resolve awakeables"
        assert await sql.rows("select service, key, reason from pauses") == [["echo", None, "maintenance"]]
        assert await sql.rows("select condition, disk_free > 0, memory_bytes > 0 from nodes") == [["ok", 1, 1]]
        [[awakeable]] = await sql.rows(f"select id from awakeables where invocation = '{ids['awakeable']}'")
        status, _ = await sql.at.ask(
            "POST", f"{sql.at.node.doors.urls.ingress}/holdfast/awakeables/{awakeable}/resolve", data=b'"go"'
        )
        assert status in (200, 202)
        await sql.at.reaches(ids["awakeable"], "completed")


async def test_joins_groups_windows_and_json_work(tmp_path: Path) -> None:
    async with busy(tmp_path) as (sql, ids):
        joined = await sql.rows(
            "select i.id, j.name, json_extract(j.output, '$.booked') from invocations i "
            "join journal j on j.invocation = i.id where i.service = 'trips' and j.op = 'run' order by j.step"
        )
        assert joined == [[ids["done"], name, name] for name in ("flight", "hotel", "car")]

        counted = await sql.rows("select status, count(*) from invocations group by status")
        known = {row[0]: row[1] for row in await sql.rows("select status, sum(count) from statistics group by status")}
        assert dict(counted) == known == {
            "completed": 2, "suspended": 4, "backing-off": 1, "paused": 1, "queued": 1,
        }  # fmt: skip
        assert await sql.rows("select d.uri = e.uri from deployments d, deployments e") == [[1]]
        newest = await sql.rows("select id, row_number() over (order by created_ms desc) as n from invocations limit 1")
        assert newest == [[ids["queued"], 1]]
        assert await sql.rows("select count(*) from invocations where created_ms > ago_ms('1h')") == [[9]]
        assert await sql.rows("select count(*) from invocations where created_ms > now_ms()") == [[0]]


async def test_the_examples_of_the_page_work(tmp_path: Path) -> None:
    [block] = re.findall(r"```sql\n(.*?)```", sql_page.HEAD, re.DOTALL)
    shell = re.findall(r'holdfast sql (?:--csv )?"(.*?)"', sql_page.HEAD)
    async with busy(tmp_path) as (sql, _):
        assert (await sql.at.call("counter/cart/add"))[0] == 200
        for statement in [*filter(str.strip, block.split(";\n")), *shell]:
            assert (await sql.ask(statement))["columns"], statement


async def test_conditions_read_only_what_they_need(tmp_path: Path) -> None:
    async with sql_of(tmp_path) as sql:
        for _ in range(40):
            await sql.at.call("echo/say")
        for number in range(20):
            await sql.at.call(f"counter/k{number}/add")
        waiting = await sql.at.send("agent/wait")
        await sql.at.reaches(waiting, "suspended")

        async def read(query: str) -> tuple[int, int]:
            answer = await sql.ask(query)
            return len(answer["rows"]), answer["rows_read"]

        everything = 61
        assert await read("select id from invocations") == (everything, everything)
        assert await read(f"select * from invocations where id = '{waiting}'") == (1, 1)
        assert await read(f"select * from invocations where id in ('{waiting}', 'inv_', 'x')") == (1, 1)
        assert await read("select * from invocations where id = 'nonsense'") == (0, 0)
        assert await read("select * from invocations where status = 'suspended'") == (1, 1)
        assert (await read("select * from invocations where status = 'completed'"))[1] == everything - 1
        assert await read(f"select * from journal where invocation = '{waiting}'") == (2, 2)
        assert await read(f"select * from journal where invocation = '{waiting}' and step = 1") == (1, 1)
        assert await read("select * from state where service = 'counter' and key = 'k7'") == (1, 1)
        assert await read("select * from objects where service = 'counter' and key in ('k7', 'k8')") == (2, 2)
        rows, joined = await read(
            "select * from invocations i join journal j on j.invocation = i.id where i.status = 'suspended'"
        )
        assert (rows, joined) == (2, 3)
        [[created]] = await sql.rows(f"select created_ms from invocations where id = '{waiting}'")
        assert await read(f"select id from invocations where created_ms >= {created}") == (1, 1)
        [[text]] = await sql.rows(f"select created_at from invocations where id = '{waiting}'")
        rows, examined = await read(f"select id from invocations where created_at >= '{text}'")
        assert rows == 1 and examined < 10
        # Conditions that only SQLite can check still find their rows.
        assert (await read("select id from invocations where service = 'AGENT' collate nocase"))[0] == 1
        assert (await read("select id from invocations where service like 'age%'"))[0] == 1


async def test_the_newest_are_found_without_reading_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "SLICE_FIRST", 4)
    async with sql_of(tmp_path) as sql:
        ids = []
        for _ in range(60):
            ids.append(await sql.at.send("echo/say"))
        for id_ in ids:
            await sql.at.reaches(id_, "completed")

        ordered = await sql.rows("select id, created_ms from invocations order by created_ms desc, id")
        answer = await sql.ask("select id, created_at from invocations order by created_ms desc limit 5")

        assert {row[0] for row in ordered} == {*ids}
        assert ordered == sorted(ordered, key=lambda row: (-row[1], row[0]))
        assert [row[0] for row in answer["rows"]] == [row[0] for row in ordered[:5]]
        assert answer["rows_read"] <= 30, "two partitions, in slices of 4, 8 and so on"
        several = "status in ('completed', 'paused') and service in ('echo', 'x')"
        found = await sql.rows(f"select id from invocations where {several} order by created_ms desc limit 7")
        assert [row[0] for row in found] == [row[0] for row in ordered[:7]]


async def test_rows_and_bytes_of_an_answer_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "ANSWER_BYTES_MAX", 10_000)
    numbers = "with recursive r(n) as (select 1 union all select n + 1 from r limit 20000) select n"
    async with sql_of(tmp_path) as sql:
        first = await sql.ask(f"{numbers} from r", limit=10)
        usual = await sql.ask(f"{numbers} from r where n < 1200", limit=1200)
        wide = await sql.ask(f"{numbers}, printf('%0900d', n) from r")

        assert (len(first["rows"]), first["more"]) == (10, True)
        assert (len(usual["rows"]), usual["more"]) == (1199, False)
        assert 5 < len(wide["rows"]) < 12 and wide["more"] is True
        for limit in (0, 10_001, "5", 1.5, True):
            assert "whole number" in (await sql.refused("select 1", limit=limit))["message"]
        for timeout in (0, 1000, "5"):
            assert "timeout_s" in (await sql.refused("select 1", timeout_s=timeout))["message"]


@pytest.mark.parametrize(
    "statement",
    [
        "attach database '/tmp/x.db' as x",
        "attach ':memory:' as x",
        "detach main",
        "pragma table_info(invocations)",
        "pragma writable_schema = 1",
        "select * from pragma_table_info('invocations')",
        "select * from sqlite_master",
        "select * from dbstat",
        "insert into invocations (id) values ('x')",
        "update invocations set status = 'paused'",
        "delete from invocations",
        "create table x (a)",
        "create temp table x (a)",
        "create virtual table x using fts5(a)",
        "create view x as select 1",
        "drop table invocations",
        "vacuum",
        "vacuum into '/tmp/x.db'",
        "begin",
        "savepoint x",
        "reindex",
        "analyze",
        "select load_extension('x')",
        "select writefile('/tmp/x', 'y')",
        "select readfile('/etc/passwd')",
        "with x as (select 1) delete from invocations",
        "explain delete from invocations",
        "select 1; delete from invocations",
        "select 1; select 2",
        "select ?1",
        "selct 1",
        "select id from invocation",
        "select idd from invocations",
        "",
        " ; -- nothing",
        "select 1\0",
        "/**/" * 16_000 + "x",
        "/*" * 32_000,
        "-" * 64_000 + "\nx",
        "select " + "+".join(["1"] * 200),
        "select " + "abs(" * 200 + "1" + ")" * 200,
        " union ".join(["select 1"] * 100),
        "select 'x" + "y" * 70_000 + "'",
        "select zeroblob(100000000)",
        "select replace(hex(zeroblob(400000)), '0', 'aaaaaaaaaa')",
        "select 'aaaa' like '" + "%a" * 500 + "'",
        "select cast(x'ff' as text)",
        "select ago_ms('yesterday')",
    ],
)
async def test_hostile_and_wrong_statements_are_refused_with_a_reason(statement: str) -> None:
    """No node is needed for this."""

    async def nothing(table: str) -> list[list[Value]]:
        return []

    one_ = Source(1, {}, fresh=_never, elsewhere=_never, overview=nothing, level=lambda: FIRST)
    reading = Reading(one_, asyncio.get_running_loop(), deadline_s=PATIENCE_S, with_ids=True, fresh=False)

    with pytest.raises((BadRequest, TooLarge)) as refused:
        await asyncio.to_thread(Engine(reading, now_ms=0).run, statement, 10)

    assert refused.value.message and reading.examined == 0
    one_.stop()


async def _never(*_: Any) -> Any:
    raise AssertionError("nobody is asked")


async def test_an_error_says_where_and_what_there_is(tmp_path: Path) -> None:
    async with sql_of(tmp_path) as sql:
        wrong = await sql.refused("select id,\n       statuss from invocations")
        missing = await sql.refused("select * from workflows")

        assert wrong["message"] == "no such column: statuss (line 2, column 8)"
        assert "invocations, tags, statistics, journal" in missing["hint"]
        for body in ({}, {"sql": 1}, {"sql": "select 1", "params": []}, {"sql": "select 1", "fresh": 1}):
            assert (await sql.at.error("POST", "/query", json=body))[0] == 400


async def test_values_of_every_type_survive_json(tmp_path: Path) -> None:
    async with sql_of(tmp_path) as sql:
        answer = await sql.ask(
            "select 1 as a, 9007199254740993 as b, 1.5 as c, 'é' as d, x'00ff' as e, null as f, 9e999"
        )

        assert answer["rows"] == [[1, 9007199254740993, 1.5, "é", {"base64": "AP8="}, None, "inf"]]
        types = ["integer", "integer", "real", "text", "blob", "null", "real"]
        assert [column["type"] for column in answer["columns"]] == types
        assert await sql.rows("-- comments\nselect 1; -- are ignored") == [[1]]


async def test_a_query_ends_with_its_time(tmp_path: Path) -> None:
    async with sql_of(tmp_path) as sql:
        late = await sql.refused(ENDLESS, timeout_s=0.2)

        assert late["code"] == 400 and "took longer than allowed" in late["message"]
        assert await sql.rows("select 1") == [[1]]


async def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MEMORY_BYTES_MAX", 8 << 20)
    many = "with recursive r(n) as (select 1 union all select n + 1 from r limit 1000000)"
    async with sql_of(tmp_path) as sql:
        status, refused = await sql.at.error(
            "POST", "/query", json={"sql": f"{many} select n, hex(randomblob(50)) as x from r order by x"}
        )

        assert status == 413 and "8 MiB" in refused["message"]
        assert await sql.rows(f"{many} select count(*) from r") == [[1000000]]


async def test_queries_at_a_time_are_bounded_and_end_when_their_clients_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "_LOOK_S", 0.02)
    async with sql_of(tmp_path) as sql:
        waiting = [asyncio.ensure_future(sql.rows(ENDLESS, timeout_s=120)) for _ in range(queries.RUNNING_MAX)]

        await eventually(lambda: len(running(sql)) == queries.RUNNING_MAX, "both of them running")
        async with sql.at.http.post(f"{sql.at.node.doors.urls.admin}/query", json={"sql": "select 1"}) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            assert "which is the limit" in await refused.text()

        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

        await eventually(lambda: not running(sql), "the end of both")
        assert await sql.rows("select 1") == [[1]]


async def test_a_query_ends_when_its_node_stops(tmp_path: Path) -> None:
    async with sql_of(tmp_path) as sql:
        waiting = asyncio.ensure_future(sql.refused(ENDLESS, timeout_s=120))
        [reading] = await eventually(lambda: [*running(sql)], "the query running")
        await asyncio.wait_for(sql.at.node.stop(), PATIENCE_S)
        answer = await waiting

        assert answer["code"] == 503 and "shutting down" in answer["message"]
        assert reading.cancelled == "this node is shutting down", "and not only when its client was given up"


async def test_only_tokens_that_may_invoke_see_ids_of_awakeables(tmp_path: Path) -> None:
    async with one(tmp_path) as (_, doors):
        reader = (await doors.create("read"))["token"]
        caller = (await doors.create("read", "invoke"))["token"]
        invoker = (await doors.create("invoke"))["token"]
        ask = {"sql": "select count(*), count(id) from awakeables"}

        assert (await doors.ask("POST", "/query", None, value=ask))[0] == 401
        assert (await doors.ask("POST", "/query", invoker, value=ask))[0] == 403
        for token in (reader, caller):
            assert (await doors.ask("POST", "/query", token, value=ask))[0] == 200
        acts = (await doors.ask("GET", "/audit", doors.root))[1]["acts"]
        assert not [act for act in acts if act["action"] == "query" and act["outcome"] == "done"]


@pytest.mark.slow("two nodes with two partitions each, and a load that creates their rows")
async def test_a_node_answers_for_partitions_that_it_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "SLICE_FIRST", 4)
    monkeypatch.setattr(source, "SLICE_MAX", 8)
    async with growing(tmp_path, ("n1", "n2"), replication=1) as cluster:
        async with Load(cluster.urls) as load:
            await load.more(60)
        assert load.errors == []
        assert all(len(seat.node.ground.replicas.hosted) == 2 for seat in cluster.up())

        for fresh in (False, True):
            for name in ("n1", "n2"):

                async def rows(query: str, at: str = name, fresh: bool = fresh) -> list[list[Any]]:
                    answer = await cluster.admin("POST", "/query", at=at, json={"sql": query, "fresh": fresh})
                    found: list[list[Any]] = answer["rows"]
                    return found

                assert await rows("select count(*), count(distinct id) from invocations") == [[load.done, load.done]]
                assert await rows("select sum(count) from statistics") == [[load.done]]
                values = {key: int(value) for key, value in await rows("select key, value from state")}
                assert values == {key: total for key, total in load.totals.items() if total}
                ordered = await rows("select created_ms, id from invocations order by created_ms desc limit 30")
                assert ordered == sorted(ordered, key=lambda row: (-row[0], row[1]))
                assert len(await rows("select distinct partition from invocations")) > 2
                joined = await rows("select count(*) from invocations i join journal j on j.invocation = i.id")
                assert joined == [[4 * load.done]]


async def test_a_partition_on_a_node_of_the_previous_release_is_refused_with_the_reason() -> None:
    """Before every node has this release, no node knows whether another one serves rows."""

    async def nothing(table: str) -> list[list[Value]]:
        return []

    older = Source(1, {}, fresh=_never, elsewhere=_never, overview=nothing, level=lambda: FIRST)
    reading = Reading(older, asyncio.get_running_loop(), deadline_s=PATIENCE_S, with_ids=True, fresh=False)

    with pytest.raises(Circumstance, match="nodes of the previous release") as refused:
        await asyncio.to_thread(Engine(reading, now_ms=0).run, "select * from invocations", 10)

    assert refused.value.status == 409 and "upgrade" in (refused.value.hint or "")
    older.stop()


@pytest.mark.parametrize(
    "argument",
    [
        None,
        [],
        [0, [], 1],
        [0, ["invocations"], 1],
        [0, ["nodes", ["name"], []], 1],
        [0, ["invocations", ["later"], []], 1],
        [0, ["invocations", ["id"], [["later", "in", []]]], 1],
        [0, ["nothing", ["id"], []], 1],
        [0, ["invocations", ["id"], [], b"", False, False, False, 1], 1],
        [0, ["invocations", ["id"], []], "many"],
    ],
)
async def test_a_malformed_question_of_a_peer_is_refused(argument: Any) -> None:
    one_ = Source(1, {}, fresh=_never, elsewhere=_never, overview=_never, level=lambda: FIRST)

    with pytest.raises(Refused, match="cannot answer a query of n2"):
        await one_.serve("n2", argument)
    one_.stop()


async def test_a_slice_ends_when_its_partition_wants_the_state_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on where it was, and finds every row once."""
    monkeypatch.setattr(source, "SLICE_S", 0.0)
    monkeypatch.setattr(relations, "LOOK_ROWS", 1)
    async with sql_of(tmp_path) as sql:
        for _ in range(30):
            await sql.at.call("echo/say")

        first = await asyncio.to_thread(sources(sql).read, PartitionNumber(0), Wanted("invocations", ["id"], []), 1000)

        assert first.examined == 1 and first.next is not None
        assert await sql.rows("select count(*), count(distinct id) from invocations") == [[30, 30]]
        assert await sql.rows("select count(*) from journal") == [[30]]


class Closing:
    """A partition whose state closes when it is read."""

    def __init__(self, hosted: dict[PartitionNumber, Any]) -> None:
        self._hosted = hosted
        self.state = self

    def lend(self, stop: Callable[[], None]) -> Any:
        self._hosted.clear()
        raise lmdb.Error("the environment is closed")


async def test_a_partition_that_moves_away_is_read_where_it_is(tmp_path: Path) -> None:
    """Between two slices of a query."""
    async with sql_of(tmp_path) as sql:
        for _ in range(10):
            await sql.at.call("echo/say")
        hosted = dict(sql.at.node.serving.router.hosted)
        here: dict[PartitionNumber, Any] = dict(hosted)
        there = Source(2, hosted, fresh=_never, elsewhere=_never, overview=_never, level=lambda: 2)

        async def elsewhere(number: int, method: str, argument: Any) -> Any:
            assert method == source.METHOD
            return await there.serve("n1", argument)

        moving = Source(2, here, fresh=_never, elsewhere=elsewhere, overview=_never, level=lambda: 2)
        loop = asyncio.get_running_loop()

        def read() -> list[Any]:
            found = []
            reading = Reading(moving, loop, deadline_s=PATIENCE_S, with_ids=True, fresh=False)
            for row in reading.rows(TABLES["invocations"], Wanted("invocations", ["id"], [])):
                found.append(row[0])
                here.clear()
            return found

        ids = await asyncio.to_thread(read)
        here.update(dict.fromkeys(hosted, Closing(here)))
        again = await asyncio.to_thread(read)
        there.stop()
        moving.stop()

        assert len(ids) == len({*ids}) == 10
        assert again == ids
