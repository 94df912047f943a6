"""Runs one query: SQLite in memory, with the tables of the catalog as virtual tables.

SQLite only reads here: an authorizer refuses everything but SELECT. Its memory, the size of statements and values, the
time, the rows and the bytes of the answer are bounded.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from math import isfinite
from typing import Any, Final, NamedTuple

import apsw

from holdfast.cluster.durations import parse_duration_ms
from holdfast.cluster.errors import BadRequest, Circumstance, Stopping, TooLarge
from holdfast.cluster.sql.catalog import TABLES
from holdfast.cluster.sql.relations import INTEGER, TEXT, Column, Condition, Table, Value, Wanted
from holdfast.cluster.sql.source import Ended, Reading

SQL_BYTES_MAX: Final = 64 * 1024
ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024
#: A larger one would let a single call of instr() or replace() take many seconds, which nothing interrupts.
VALUE_BYTES_MAX: Final = 512 * 1024
#: Of all queries of this process. SQLite counts its own memory, and nothing else of this process uses SQLite.
MEMORY_BYTES_MAX: Final = 128 * 1024 * 1024
FEW_ACTIVE: Final = 20_000  # Active invocations that are sorted rather than searched among the completed ones.
_STEPS: Final = 2000  # of SQLite's machine, between two looks at the clock

_LIMITS: Final = {
    apsw.SQLITE_LIMIT_LENGTH: VALUE_BYTES_MAX,
    apsw.SQLITE_LIMIT_SQL_LENGTH: SQL_BYTES_MAX,
    apsw.SQLITE_LIMIT_COLUMN: 200,
    apsw.SQLITE_LIMIT_EXPR_DEPTH: 100,
    apsw.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    apsw.SQLITE_LIMIT_VDBE_OP: 50_000,
    apsw.SQLITE_LIMIT_FUNCTION_ARG: 100,
    apsw.SQLITE_LIMIT_ATTACHED: 0,
    apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 256,
    apsw.SQLITE_LIMIT_VARIABLE_NUMBER: 0,
    apsw.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    apsw.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_READABLE: Final = frozenset({*TABLES, "json_each", "json_tree"})
#: SQLite's own tables that exist without being created. They would tell about this process, not about the cluster.
_INTERNAL: Final = re.compile(r"(sqlite_|pragma_|fts|rtree|geopoly|dbstat|bytecode|tables_used)", re.I)
_REFUSED_FUNCTIONS: Final = frozenset({"load_extension", "fts3_tokenizer", "fts5"})
#: Spaces and comments. Both patterns are possessive: on any text, they look at each character a few times at most.
_SPACE: Final = r"\s++|--[^\n]*+|(?>/\*.*?\*/)"
_READING: Final = re.compile(rf"(?:{_SPACE})*+(?:select|with|values|explain)\b", re.I | re.S)
_NOTHING: Final = re.compile(rf"(?:;|{_SPACE})*+", re.S)
#: The beginning of a time as text, cut between two fields: it compares with other times as the times do.
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d(T\d\d(:\d\d(:\d\d(\.\d{3}Z?)?)?)?)?")
_HOWS: Final = {
    apsw.SQLITE_INDEX_CONSTRAINT_EQ: "in",
    apsw.SQLITE_INDEX_CONSTRAINT_LT: "lt",
    apsw.SQLITE_INDEX_CONSTRAINT_LE: "le",
    apsw.SQLITE_INDEX_CONSTRAINT_GT: "gt",
    apsw.SQLITE_INDEX_CONSTRAINT_GE: "ge",
}
HINT: Final = f"tables: {', '.join(TABLES)}; their columns: GET /query/tables, or `holdfast sql --tables`"


class Result(NamedTuple):
    columns: list[tuple[str, str]]  # name and type
    rows: list[Sequence[Value]]
    more: bool

    def encode(self, **figures: int) -> bytes:
        """As JSON, one row at a time: in a thread, and other threads get their turns."""
        head = {
            "columns": [{"name": name, "type": type_} for name, type_ in self.columns],
            "more": self.more,
            **figures,
        }
        rows = ",".join([json.dumps(_show_row(row)) for row in self.rows])
        return f'{json.dumps(head)[:-1]}, "rows": [{rows}]}}'.encode()


def _show_row(row: Sequence[Value]) -> list[Any]:
    return [value if type(value) in (str, int) or value is None else _show(value) for value in row]


def _show(value: Value) -> Any:
    """Blobs, and numbers that JSON does not have."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return value if not isinstance(value, float) or isfinite(value) else str(value)


# -- virtual tables --------------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    columns: list[int]
    conditions: list[tuple[str, str]]  # column and how; their values come with each scan
    newest_first: bool


class _Module:
    """One table of the catalog. Its class has the methods that apsw calls."""

    def __init__(self, table: Table, reading: Reading) -> None:
        self.table = table
        self.reading = reading

    def Connect(self, connection: apsw.Connection, *names: Any) -> tuple[str, Any]:  # noqa: N802
        columns = ", ".join(
            f'"{column.name}" {column.type if column.type in (TEXT, INTEGER) else ""}' for column in self.table.columns
        )
        return f"create table rows ({columns})", _VirtualTable(self.table, self.reading)

    Create = Connect


class _VirtualTable:
    def __init__(self, table: Table, reading: Reading) -> None:
        self.table = table
        self.reading = reading
        self.plans: list[_Plan] = []

    def BestIndexObject(self, info: apsw.IndexInfo) -> bool:  # noqa: N802
        conditions: list[tuple[str, str]] = []
        constants: dict[str, Any] = {}
        for which in range(info.nConstraint):
            column = self._condition(info, which)
            if column is None:
                continue
            how = _HOWS[info.get_aConstraint_op(which)]
            conditions.append((column.name, how))
            info.set_aConstraintUsage_argvIndex(which, len(conditions))
            if how == "in":
                if info.get_aConstraintUsage_in(which):
                    info.set_aConstraintUsage_in(which, True)
                else:
                    constants[column.name] = info.get_aConstraint_rhs(which)
        compared = {name for name, how in conditions if how == "in"}
        newest_first = self._is_newest_first(info) and not self._are_few(constants)
        info.orderByConsumed = newest_first
        info.estimatedCost, info.estimatedRows = self._estimate(compared, newest_first=newest_first)
        info.idxNum = len(self.plans)
        self.plans.append(_Plan(sorted(info.colUsed), conditions, newest_first))
        return True

    def _condition(self, info: apsw.IndexInfo, which: int) -> Column | None:
        """The column of a condition that a slice can check."""
        offset = info.get_aConstraint_iColumn(which)
        if not info.get_aConstraint_usable(which) or offset < 0 or info.get_aConstraint_op(which) not in _HOWS:
            return None
        column = self.table.columns[offset]
        is_plain = info.get_aConstraint_collation(which) == "BINARY"
        return column if column.filters and is_plain and self.table.scan is not None else None

    def _is_newest_first(self, info: apsw.IndexInfo) -> bool:
        if not self.table.newest_first or not 1 <= info.nOrderBy <= 2:
            return False
        order = [
            (self.table.columns[info.get_aOrderBy_iColumn(which)].name, info.get_aOrderBy_desc(which))
            for which in range(info.nOrderBy)
            if info.get_aOrderBy_iColumn(which) >= 0
        ]
        return order in ([("created_ms", True)], [("created_at", True)], [("created_ms", True), ("id", False)])

    def _are_few(self, constants: dict[str, Any]) -> bool:
        """Whether the rows are so few that sorting them is cheaper than looking for them in order."""
        if "id" in constants:
            return True
        status = constants.get("status")
        return status not in (None, "completed") and self.reading.active() <= FEW_ACTIVE

    def _estimate(self, compared: set[str], *, newest_first: bool) -> tuple[float, int]:
        if self.table.scan is None:
            return 100.0, 100
        for columns in self.table.keys:
            if compared.issuperset(columns):
                return 10.0 * len(self.table.keys), 20 if columns[0] == "invocation" else 1
        rows = max(100_000 >> 4 * len(compared), 100)
        return (200_000.0 if newest_first else 1_000_000.0) / (1 + len(compared)), rows

    def Open(self) -> _Cursor:  # noqa: N802
        return _Cursor(self)

    def Disconnect(self) -> None: ...  # noqa: N802

    Destroy = Disconnect


class _Cursor:
    def __init__(self, table: _VirtualTable) -> None:
        self._table = table
        self._rows: Iterator[list[Value]] = iter(())
        self._row: list[Value] | None = None
        self._offsets: dict[int, int] = {}
        self._number = 0

    def Filter(self, number: int, name: str | None, values: Sequence[Any] | None) -> None:  # noqa: N802
        plan = self._table.plans[number]
        self._offsets = {column: offset for offset, column in enumerate(plan.columns)}
        table = self._table.table
        conditions: list[Condition] = []
        for (column, how), value in zip(plan.conditions, values or (), strict=True):
            conditions += _conditions(table, column, how, value)
        names = [table.columns[offset].name for offset in plan.columns]
        wanted = Wanted(table.name, names, conditions, newest_first=plan.newest_first)
        self.Close()
        self._rows = self._table.reading.rows(table, wanted)
        self._number = 0
        self.Next()

    def Next(self) -> None:  # noqa: N802
        self._number += 1
        self._row = next(self._rows, None)

    def Eof(self) -> bool:  # noqa: N802
        return self._row is None

    def Column(self, number: int) -> Value:  # noqa: N802
        if number < 0:
            return self._number
        assert self._row is not None, "SQLite asks for rows that exist"
        return self._row[self._offsets[number]]

    def Rowid(self) -> int:  # noqa: N802
        return self._number

    def Close(self) -> None:  # noqa: N802
        close = getattr(self._rows, "close", None)
        if close is not None:
            close()


def _conditions(table: Table, name: str, how: str, value: Any) -> list[Condition]:
    """A condition as slices check it. SQLite compares values of different types by rules of its own: those are left to it."""
    column = table.column(name)
    values = list(value) if isinstance(value, set | frozenset) else [value]
    if how == "in":
        values = [each for each in values if each is not None]  # Nothing equals null.
    right = (str,) if column.type == TEXT else (int, float)
    if not all(isinstance(each, right) and (not isinstance(each, float) or isfinite(each)) for each in values):
        return []
    if how == "in":
        return [(name, how, values)]
    found = [(name, how, values[0])]
    if name == "created_at" and (created_ms := _read_time(values[0])) is not None:
        slack = -1 if how in ("gt", "ge") else 1
        found.append(("created_ms", "ge" if slack < 0 else "le", created_ms + slack))
    return found


def _read_time(text: str) -> int | None:
    if _TIME.fullmatch(text) is None:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return round((time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp() * 1000)


# -- one query -------------------------------------------------------------------------------------------------------


class Engine:
    """One query."""

    def __init__(self, reading: Reading, *, now_ms: int) -> None:
        self._reading = reading
        self._now_ms = now_ms
        self._statements = 0
        self._columns: list[tuple[str, str]] = []

    def run(self, sql: str, limit: int) -> Result:
        """In a thread. Raises circumstances and ProposalErrors."""
        try:
            connection = self._open()
            try:
                return self._fetch(connection, sql, limit)
            finally:
                connection.close(True)
        except (Ended, apsw.InterruptError):
            raise self._ended() from None
        except apsw.AuthError as error:
            raise BadRequest(f"only reading is possible: {error}", HINT) from None
        except (apsw.NoMemError, MemoryError):
            limit_mib = MEMORY_BYTES_MAX >> 20
            raise TooLarge(
                f"the query needs more than the {limit_mib} MiB that all queries of a node may use",
                "select fewer columns or rows, or group by fewer values",
            ) from None
        except apsw.TooBigError as error:
            raise TooLarge(f"{error}: a value has at most {VALUE_BYTES_MAX} bytes, a query {SQL_BYTES_MAX}") from None
        except apsw.Error as error:
            raise self._wrong(sql, error) from None
        except UnicodeError:
            raise BadRequest("a text in the result is not UTF-8", "select it with hex(…)") from None

    def _open(self) -> apsw.Connection:
        apsw.hard_heap_limit(MEMORY_BYTES_MAX)
        connection = apsw.Connection(":memory:")
        connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
        connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
        connection.pragma("temp_store", "memory")  # Never write a file.
        for which, most in _LIMITS.items():
            connection.limit(which, most)
        for table in TABLES.values():
            module: Any = _Module(table, self._reading)
            connection.create_module(table.name, module, use_bestindex_object=True, eponymous_only=True, read_only=True)
        connection.create_scalar_function("now_ms", lambda *_: self._now_ms, 0, deterministic=True)
        connection.create_scalar_function("ago_ms", self._ago_ms, 1, deterministic=True)
        connection.set_authorizer(_authorize)
        connection.set_progress_handler(self._reading.must_end, _STEPS)
        connection.set_exec_trace(self._begin)
        return connection

    def _ago_ms(self, *durations: Any) -> int:
        try:
            return self._now_ms - parse_duration_ms(str(durations[0]))
        except ValueError as error:
            raise BadRequest(f"ago_ms: {error}", "for example created_ms > ago_ms('2h')") from None

    def _begin(self, cursor: apsw.Cursor, sql: str, bindings: Any) -> bool:
        """Before each statement."""
        if _NOTHING.fullmatch(sql):
            return True
        self._statements += 1
        if self._statements > 1:
            raise BadRequest("a query must be one statement")
        if _READING.match(sql) is None or not cursor.is_readonly:
            raise BadRequest("a query must begin with select, with, values or explain: only reading is possible", HINT)
        self._columns = [(name, str(type_ or "").lower()) for name, type_ in cursor.get_description()]
        return True

    def _fetch(self, connection: apsw.Connection, sql: str, limit: int) -> Result:
        if len(sql.encode(errors="replace")) > SQL_BYTES_MAX:
            raise TooLarge(f"the query is longer than {SQL_BYTES_MAX} bytes")
        if "\0" in sql:
            raise BadRequest("a query must not contain the character U+0000")
        if _NOTHING.fullmatch(sql):
            raise BadRequest("the query is empty", HINT)
        rows: list[Sequence[Value]] = []
        size = 0
        cursor = connection.cursor()
        for row in cursor.execute(sql):
            size += sum(8 if type(value) in (int, float) else len(value or b"") for value in row)
            if len(rows) == limit or size > ANSWER_BYTES_MAX:
                return Result(self._typed(rows), rows, True)
            rows.append(row)
        return Result(self._typed(rows), rows, False)

    def _typed(self, rows: list[Sequence[Value]]) -> list[tuple[str, str]]:
        """The columns with their types: as declared, or else that of the first value."""
        found = []
        for offset, (name, type_) in enumerate(self._columns):
            if not type_:
                first = next((row[offset] for row in rows if row[offset] is not None), None)
                type_ = _TYPES[type(first)]
            found.append((name, type_))
        return found

    def _ended(self) -> Circumstance:
        if self._reading.cancelled:
            return Stopping(self._reading.cancelled)
        return BadRequest(
            f"the query took longer than allowed; it had examined {self._reading.examined} rows",
            "give a condition on id, service and key, or created_ms; count with the table `statistics`; or a longer timeout",
        )

    def _wrong(self, sql: str, error: apsw.Error) -> BadRequest:
        offset = getattr(error, "error_offset", -1)
        where = ""
        if isinstance(offset, int) and 0 <= offset <= len(sql.encode()):
            before = sql.encode()[:offset].decode(errors="ignore")
            line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
            where = f" (line {line}, column {column})"
        message = str(error).removeprefix(f"{type(error).__name__}: ")  # Older apsw has the name in front.
        return BadRequest(f"{message}{where}", HINT)


_TYPES: Final = {type(None): "null", str: TEXT, int: INTEGER, float: "real", bytes: "blob"}


def _authorize(action: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
    if action in (apsw.SQLITE_SELECT, apsw.SQLITE_RECURSIVE):
        return int(apsw.SQLITE_OK)
    if action == apsw.SQLITE_READ:
        # A recursive query counts as a table without columns.
        is_own = (first or "").lower() in _READABLE or (second == "" and _INTERNAL.match(first or "") is None)
        return int(apsw.SQLITE_OK if is_own else apsw.SQLITE_DENY)
    if action == apsw.SQLITE_FUNCTION and (second or "").lower() not in _REFUSED_FUNCTIONS:
        return int(apsw.SQLITE_OK)
    return int(apsw.SQLITE_DENY)
