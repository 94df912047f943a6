"""SQL queries and their answers."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict

from holdfast.cluster.admin.choices import QUERY_LIMIT, QUERY_LIMIT_MAX, QUERY_TIMEOUT_S, QUERY_TIMEOUT_S_MAX
from holdfast.cluster.schemas import Keywords


class Query(TypedDict):
    sql: Annotated[str, "one SELECT statement in the dialect of SQLite", Keywords(minLength=1)]
    limit: NotRequired[
        Annotated[int, "rows at most", Keywords(minimum=1, maximum=QUERY_LIMIT_MAX, default=QUERY_LIMIT)]
    ]
    timeout_s: NotRequired[
        Annotated[
            float,
            "after how many seconds to give up",
            Keywords(exclusiveMinimum=0, maximum=QUERY_TIMEOUT_S_MAX, default=QUERY_TIMEOUT_S),
        ]
    ]
    fresh: NotRequired[Annotated[bool, "wait until the replicas have all that is acknowledged"]]


class QueryColumn(TypedDict):
    name: str
    type: Annotated[str, "as its table declares it; empty: it is an expression"]


class QueryResult(TypedDict):
    columns: list[QueryColumn]
    more: Annotated[bool, "there are further rows"]
    took_ms: int
    rows_read: Annotated[int, "rows that were examined"]
    rows: Annotated[list[list[Any]], 'one list of values for each row; bytes are {"base64"}']


class TableColumn(TypedDict):
    name: str
    type: str
    about: str


class Table(TypedDict):
    name: str
    about: str
    columns: list[TableColumn]


class Tables(TypedDict):
    tables: list[Table]
