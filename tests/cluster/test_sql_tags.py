"""The table `tags` of SQL queries."""

# ruff: noqa: S608 - statements are made of ids here

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.sql import source
from tests.cluster.test_lists import tagged
from tests.cluster.test_sql import sql_of


async def test_tags_are_joined_without_reading_other_invocations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "SLICE_FIRST", 2)
    async with sql_of(tmp_path) as sql:
        for _ in range(20):
            await sql.at.call("echo/say")
        ours = [await tagged(sql.at, "agent/wait", f"tenant=acme,order={number}") for number in range(6)]
        other = await tagged(sql.at, "agent/wait", "tenant=other,order=1")
        for each in (*ours, other):
            await sql.at.reaches(each, "suspended")

        async def read(query: str) -> tuple[list[Any], int]:
            answer = await sql.ask(query)
            return [row[0] for row in answer["rows"]], answer["rows_read"]

        joined = "from tags t join invocations i on i.id = t.invocation where t.name = 'tenant' and t.value = 'acme'"
        found, examined = await read(f"select i.id {joined} order by i.created_ms")
        assert found == ours and examined == 2 * len(ours)
        assert await read("select invocation from tags where name = 'order' and value = '1' order by created_ms") == (
            [ours[1], other],
            2,
        )
        assert sorted((await read("select value from tags where name = 'order'"))[0]) == [
            "0",
            "1",
            "1",
            "2",
            "3",
            "4",
            "5",
        ]
        assert (await read("select name from tags"))[1] == 14
        assert await sql.rows(f"select name, value from tags where invocation = '{other}' order by name") == [
            ["order", "1"],
            ["tenant", "other"],
        ]
        assert await sql.rows(f"select tags ->> '$.tenant' from invocations where id = '{other}'") == [["other"]]
        counted = "select value, count(*) from tags where name = 'tenant' group by value order by value"
        assert await sql.rows(counted) == [["acme", 6], ["other", 1]]
