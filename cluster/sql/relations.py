"""Tables as queries see them: columns with their documentation, and how the rows of one partition are found.

A partition's table is read in slices. A slice reads one view of the state, examines a bounded number of rows, applies the
conditions that the query engine pushed down, and returns only the columns that the query needs. The engine checks every
condition again, so a slice may return too many rows, but never too few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.cluster.times import show_time
from holdfast.sdk.ids import BadId, InvocationId, ObjectId, PartitionNumber, format_id, parse_id
from holdfast.statemachine import queries, refs
from holdfast.statemachine.commands import Payload
from holdfast.statemachine.records import Invocation, Object, unpack_object
from holdfast.statemachine.tables import OBJECT
from holdfast.statemachine.txn import ReadTxn

Value: TypeAlias = str | int | float | bytes | None
#: A condition on a column: `in` with a list of values, or `lt`, `le`, `gt`, `ge` with one value.
Condition: TypeAlias = tuple[str, str, Any]

TEXT: Final = "text"
INTEGER: Final = "integer"
#: Text that is usually JSON, or a blob if it is not text.
PAYLOAD: Final = "text or blob"
SHOWN_BYTES_MAX: Final = 16 * 1024  # of one payload; a longer one is null, because half of a JSON text is none
SLICE_BYTES: Final = 256 * 1024
LOOK_ROWS: Final = 16  # between two looks at whether a slice is over


class Column(NamedTuple):
    name: str
    type: str
    about: str
    get: Callable[[Any], Value]
    filters: bool = True  # Cheap enough for conditions inside a slice.


class Table(NamedTuple):
    """A table whose rows are in the partitions, or (without `scan`) one that a node knows as a whole."""

    name: str
    about: str
    columns: tuple[Column, ...]
    #: (position, item) of every row after a position, in the order of positions.
    scan: Callable[[View, Wanted], Iterator[tuple[bytes, Any]]] | None = None
    #: The partitions that can have matching rows; None: all of them.
    route: Callable[[Wanted, int], set[PartitionNumber] | None] = lambda wanted, count: None
    #: Columns that find rows without a scan: the first applies whose columns are all compared with values.
    keys: tuple[tuple[str, ...], ...] = ()
    #: Whether the scan is in order of `created_ms`, newest first, if it is asked to be.
    newest_first: bool = False

    def column(self, name: str) -> Column:
        """Raises KeyError."""
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)


class View(NamedTuple):
    """What a scan reads."""

    txn: ReadTxn
    partition: PartitionNumber
    with_ids: bool  # Whether the query may see ids of awakeables, which let their holder complete them.
    objects: dict[ObjectId, Object | None]

    def load_object(self, oid: ObjectId) -> Object | None:
        """Cached for this slice, because neighbouring rows often belong to one object."""
        if oid not in self.objects:
            raw = self.txn.get(OBJECT + oid)
            self.objects[oid] = None if raw is None else unpack_object(oid, raw)
        return self.objects[oid]

    def load(self, ident: InvocationId) -> Invocation | None:
        return queries.load(self.txn, ident)


class Wanted(NamedTuple):
    """Which rows and columns of one partition. It travels between nodes of several releases, so its fields are plain values
    and names. New fields go to the end, with a default."""

    table: str
    columns: Sequence[str]
    conditions: Sequence[Condition]
    position: bytes = b""  # after which to continue
    newest_first: bool = False
    with_ids: bool = False
    fresh: bool = False

    def values(self, name: str) -> list[Any] | None:
        """The values that this column may have; None: any."""
        for column, how, value in self.conditions:
            if column == name and how == "in":
                return list(value)
        return None

    def ids(self, name: str) -> list[InvocationId] | None:
        """The ids that this column may have, in order; None: any."""
        texts = self.values(name)
        if texts is None:
            return None
        found = set()
        for text in texts:
            try:
                if format_id(ident := parse_id(text)) == text:
                    found.add(ident)
            except BadId:
                continue
        return sorted(found)

    def lowest(self, name: str) -> int | None:
        """No row with a smaller whole number in this column matches."""
        found = [value for column, how, value in self.conditions if column == name and how in ("ge", "gt")]
        return math.floor(max(found)) if found else None

    def highest(self, name: str) -> int | None:
        found = [value for column, how, value in self.conditions if column == name and how in ("le", "lt")]
        return math.ceil(min(found)) if found else None


class Slice(NamedTuple):
    rows: list[list[Value]]
    positions: list[bytes]  # of each row, if they are in order; otherwise empty
    next: bytes | None  # None: there are no more
    examined: int


_COMPARE: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "lt": lambda value, bound: bool(value < bound),
    "le": lambda value, bound: bool(value <= bound),
    "gt": lambda value, bound: bool(value > bound),
    "ge": lambda value, bound: bool(value >= bound),
}


def _check(column: Column, how: str, value: Any) -> Callable[[Any], bool]:
    get = column.get
    if how == "in":
        wanted = frozenset(value)
        return lambda item: get(item) in wanted
    compare = _COMPARE[how]

    def check(item: Any) -> bool:
        found = get(item)
        return found is not None and compare(found, value)

    return check


def read_slice(table: Table, wanted: Wanted, view: View, limit: int, *, is_over: Callable[[], bool]) -> Slice:
    """Examine at most `limit` rows, and few more once it `is_over`."""
    assert table.scan is not None
    getters = [table.column(name).get for name in wanted.columns]
    checks = [_check(table.column(name), how, value) for name, how, value in wanted.conditions]
    rows: list[list[Value]] = []
    positions: list[bytes] = []
    examined = size = 0
    for position, item in table.scan(view, wanted):
        examined += 1
        for check in checks:
            if not check(item):
                break
        else:
            row = [get(item) for get in getters]
            rows.append(row)
            if wanted.newest_first:
                positions.append(position)
            for value in row:
                if type(value) is str or type(value) is bytes:
                    size += len(value)
        if examined >= limit or size >= SLICE_BYTES or (examined % LOOK_ROWS == 0 and is_over()):
            return Slice(rows, positions, position, examined)
    return Slice(rows, positions, None, examined)


# -- columns ---------------------------------------------------------------------------------------------------------


def times(name: str, about: str, get: Callable[[Any], int | None]) -> tuple[Column, Column]:
    """A time as milliseconds since 1970 and as text. No time is null."""

    def milliseconds(item: Any) -> Value:
        return get(item) or None

    def text(item: Any) -> Value:
        found = get(item)
        return show_time(found) if found else None

    return (
        Column(f"{name}_ms", INTEGER, f"{about}, in milliseconds since 1970 (UTC)", milliseconds),
        Column(f"{name}_at", TEXT, f"{about}, as 2026-11-18T04:00:00.000Z", text),
    )


def payload(value: Payload | None) -> Value:
    """JSON and other text as text, anything else as a blob. Null if it is large."""
    if not isinstance(value, bytes) or len(value) > SHOWN_BYTES_MAX or not value:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def payload_bytes(value: Payload | None) -> int | None:
    return None if value is None else refs.size_of(value)


def show_id(ident: InvocationId | None) -> str | None:
    return format_id(ident) if ident else None
