"""SQL in the admin API."""

from __future__ import annotations

from typing import Final

from holdfast.cluster.admin.choices import QUERY_LIMIT, QUERY_LIMIT_MAX, QUERY_TIMEOUT_S, QUERY_TIMEOUT_S_MAX
from holdfast.cluster.admin.parameters import AdminRequest, json_answer, read_body
from holdfast.cluster.admin.shapes.queries import Query, Tables
from holdfast.cluster.errors import BadRequest, Unavailable
from holdfast.cluster.http.exchange import Answer
from holdfast.cluster.sql.catalog import show_tables
from holdfast.cluster.sql.queries import Queries

ROOM_S: Final = 5.0  # How long an answer waits for its room.


class SqlAdmin:
    def __init__(self, queries: Queries) -> None:
        self._queries = queries

    async def on_query(self, request: AdminRequest) -> Answer:
        given = await read_body(request, Query)
        sql, fresh = given.get("sql"), given.get("fresh", False)
        if not isinstance(sql, str):
            raise BadRequest('"sql" is missing', 'send JSON as in {"sql": "select count(*) from invocations"}')
        if type(fresh) is not bool:
            raise BadRequest('"fresh" must be true or false')
        limit = given.get("limit", QUERY_LIMIT)
        if type(limit) is not int or not 1 <= limit <= QUERY_LIMIT_MAX:
            raise BadRequest(f'"limit" must be a whole number from 1 to {QUERY_LIMIT_MAX}')
        timeout_s = given.get("timeout_s", QUERY_TIMEOUT_S)
        if type(timeout_s) not in (int, float) or not 0 < timeout_s <= QUERY_TIMEOUT_S_MAX:
            raise BadRequest(f'"timeout_s" must be a number of seconds up to {QUERY_TIMEOUT_S_MAX}')
        body = await self._queries.run(
            sql,
            limit=limit,
            timeout_s=float(timeout_s),
            fresh=fresh,
            with_ids=request.request.principal.may_invoke_all,
            gone=request.request.gone,
        )
        if not await request.request.hold(len(body), ROOM_S):
            raise Unavailable("the bodies of the requests in progress have reached the limit of this node")
        return Answer(200, body, held=len(body))

    async def on_query_tables(self, request: AdminRequest) -> Answer:
        shown: Tables = {"tables": show_tables()}
        return json_answer(200, shown)
