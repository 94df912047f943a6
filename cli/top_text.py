"""A frame of `holdfast top` as lines of text, for any width from 60 columns up.

Lines consist of pieces, each with a style. A table leaves out its less important columns when they do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from rich.cells import cell_len, set_cell_size

from holdfast.cli.client import printable
from holdfast.cli.output import counted, size
from holdfast.cluster.durations import format_duration_ms

WIDTH_MIN: Final = 60
#: Of the names in a table, before columns are left out for them.
NAME_WIDTH: Final = 32

PLAIN, BOLD, DIM, BAD, WARN = "", "1", "2", "31", "33"

Piece: TypeAlias = tuple[str, str]
Line: TypeAlias = list[Piece]


class Cell(NamedTuple):
    text: str
    style: str = PLAIN


class Column(NamedTuple):
    """`rank`: columns with the highest rank are left out first; those of rank 0 stay."""

    title: str
    rank: int = 0
    right: bool = False


def draw(frame: Mapping[str, Any], width: int, height: int | None, sort: str) -> list[Line]:
    """At most `height` lines; None: all. Lines are not longer than `width`."""
    width = max(width, WIDTH_MIN)
    lines = [
        *_head(frame),
        [],
        *_nodes(frame, width),
        *_partitions(frame),
        [],
        *_invocations(frame),
        *_attention(frame),
    ]
    lines += [*_endpoints(frame), []]
    services = list(_services(frame, width, sort))
    if height is not None and len(lines) + len(services) > height:
        services = _shortened(services, max(height - len(lines), 0))
    found = lines + services
    return [cut(line, width) for line in (found if height is None else found[:height])]


def cut(line: Line, width: int) -> Line:
    made: Line = []
    left = width
    for text, style in line:
        text = printable(text).replace("\n", " ").replace("\t", " ")
        wide = cell_len(text)
        if wide > left:
            text = set_cell_size(text, max(left - 1, 0)) + "…" if left else ""
        if text:
            made.append((text, style))
        left -= min(wide, left)
        if not left:
            break
    return made


def plain(line: Line) -> str:
    return "".join(text for text, _ in line).rstrip()


def styled(line: Line) -> str:
    return "".join(f"\x1b[{style}m{text}\x1b[0m" if style else text for text, style in line)


def _shortened(rows: list[Line], room: int) -> list[Line]:
    """The head of a table and as many rows as fit, and how many do not."""
    if room < 3:
        return []
    return [*rows[: room - 1], [(f"and {len(rows) - room + 1} more", DIM)]]


def _table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int) -> list[Line]:
    widths = [max(cell_len(it.title), *(cell_len(row[at].text) for row in rows)) for at, it in enumerate(columns)]
    shown = list(range(len(columns)))
    # A long name is cut rather than that it hides the figures of all rows.
    needed = [min(widths[0], NAME_WIDTH), *widths[1:]]
    while len(shown) > 1 and sum(needed[at] + 2 for at in shown) - 2 > width:
        last = max(shown, key=lambda at: (columns[at].rank, at))
        if not columns[last].rank:
            break
        shown.remove(last)
    widest = max(shown, key=lambda at: widths[at])
    widths[widest] = max(min(widths[widest], width - sum(widths[at] + 2 for at in shown if at != widest)), 8)

    def line(cells: Sequence[Cell]) -> Line:
        made: Line = []
        for at in shown:
            text = cells[at].text if cell_len(cells[at].text) <= widths[at] else plain(cut([cells[at]], widths[at]))
            pad = " " * (widths[at] - cell_len(text))
            made += [(pad + text if columns[at].right else text + pad, cells[at].style), ("  ", PLAIN)]
        return made[:-1]

    return [line([Cell(column.title, BOLD) for column in columns]), *(line(row) for row in rows)]


# -- the sections


def _head(frame: Mapping[str, Any]) -> Iterator[Line]:
    at = frame["at"].removesuffix("Z").partition("T")[2]
    yield [
        ("Holdfast ", BOLD), (f"{frame['cluster']}", BOLD), (f"  {at} UTC  asking {frame['asked']}", PLAIN),
    ]  # fmt: skip
    for note in frame["notes"]:
        yield [(note, WARN)]


def _nodes(frame: Mapping[str, Any], width: int) -> list[Line]:
    columns = (
        Column("NODE"), Column("STATE"), Column("CPU", 1, right=True), Column("MEMORY", 2, right=True),
        Column("DISK FREE", 3, right=True), Column("LAG", 1, right=True), Column("LEADS", right=True),
        Column("REPLICAS", 4, right=True), Column("UP", 5, right=True), Column("VERSION", 6), Column("NOTE", 7),
    )  # fmt: skip
    rows = []
    for node in frame["nodes"]:
        disk, lag, cpu, memory = (node[name] for name in ("disk", "loop_lag_ms", "cpu_percent", "memory_bytes"))
        is_short = bool(disk and disk["total"]) and disk["free"] * 20 < disk["total"]
        rows.append(
            (
                Cell(printable(node["name"])),
                Cell(node["condition"], _condition_style(node["condition"])),
                Cell("" if cpu is None else f"{cpu:.0f}%"),
                Cell("" if memory is None else size(memory)),
                Cell(f"{size(disk['free'])} ({100 * disk['free'] // disk['total']}%)" if disk and disk["total"] else "",
                     BAD if is_short else PLAIN),
                Cell("" if lag is None else f"{lag} ms", WARN if lag is not None and lag >= 100 else PLAIN),
                Cell(str(node["leads"])),
                Cell(str(node["replicas"])),
                Cell("" if node["uptime_s"] is None else format_duration_ms(node["uptime_s"] * 1000)),
                Cell(node["version"] or ""),
                Cell(printable(node["error"] or ""), WARN),
            )
        )  # fmt: skip
    return _table(columns, rows, width)


def _condition_style(condition: str) -> str:
    if condition in ("ok", "active"):
        return PLAIN
    return BAD if condition in ("unreachable", "disk full") else WARN


def _partitions(frame: Mapping[str, Any]) -> Iterator[Line]:
    problems, count = frame["partitions"]["problems"], frame["partitions"]["count"]
    if not problems:
        yield [("Partitions   ", BOLD), (f"{count}, all in order", PLAIN)]
        return
    for place, each in enumerate(problems):
        numbers = each["partitions"]
        which = (
            "all" if len(numbers) == count else f"{', '.join(map(str, numbers[:8]))}{', …' if len(numbers) > 8 else ''}"
        )
        yield [("Partitions   " if not place else " " * 13, BOLD), (f"{which}: {each['problem']}", BAD)]


def _invocations(frame: Mapping[str, Any]) -> Iterator[Line]:
    statuses = frame["invocations"]
    if statuses is None:
        yield [("Invocations  ", BOLD), ("unknown", WARN)]
        return
    line: Line = [("Invocations  ", BOLD)]
    for name in ("running", "queued", "suspended", "scheduled", "backing-off", "paused"):
        style = {"paused": BAD, "backing-off": WARN}.get(name, PLAIN) if statuses[name] else PLAIN
        line.append((f"{name} {statuses[name]}  ", style))
    yield line
    rates = frame["throughput"]
    if rates is not None:
        text = f"started {rates['started_per_s']:.1f}  completed {rates['completed_per_s']:.1f}  "
        failed = (f"failed {rates['failed_per_s']:.1f}", BAD if rates["failed_per_s"] else PLAIN)
        yield [("Per second   ", BOLD), (text, PLAIN), failed, (f"  steps {rates['steps_per_s']:.1f}", PLAIN)]
    latency = frame["latency"]
    if latency is not None:
        parts = [f"{name} {_span(each)}" for name, each in latency.items()]
        yield [("Latency      ", BOLD), ("   ".join(parts), PLAIN)]


def _span(each: Mapping[str, Any]) -> str:
    if each["p50_ms"] is None:
        return "-"
    return f"p50 {_ms(each['p50_ms'])} p99 {_ms(each['p99_ms'])}"


def _ms(value: float) -> str:
    return f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms" if value < 10_000 else f"{value / 1000:.0f} s"


def _attention(frame: Mapping[str, Any]) -> Iterator[Line]:
    found = frame["attention"]
    rows: list[Piece] = []
    if found["nodes"]:
        rows.append(
            (f"{', '.join(found['nodes'])} failing: holdfast cluster status, holdfast logs --level warning", BAD)
        )
    if found["deployments"]:
        rows.append((f"{counted(len(found['deployments']), 'endpoint')} failing: holdfast deployments list", BAD))
    if found["paused"]:
        rows.append((f"{found['paused']} paused: holdfast invocations list --status paused", BAD))
    if found["in_doubt"]:
        more = " or more" if found["more_in_doubt"] else ""
        rows.append((f"{found['in_doubt']}{more} in doubt: holdfast waiting --kind in-doubt", BAD))
    if found["approvals"]:
        more = " or more" if found["more_approvals"] else ""
        waits = "approval waits" if found["approvals"] == 1 and not more else "approvals wait"
        rows.append((f"{found['approvals']}{more} {waits}: holdfast approvals list", WARN))
    if found["backing_off"]:
        rows.append((f"{found['backing_off']} retry later: holdfast invocations list --status backing-off", WARN))
    for each in found["pauses"]:
        rows.append((f"paused {_scope(each)} by {each['by']}: {each['reason']}", WARN))
    rows += [(text, BAD) for text in found["warnings"]]
    if found["changing"]:
        rows.append((f"now: {found['changing']}", PLAIN))
    if not rows:
        yield [("Attention    ", BOLD), ("nothing needs you", PLAIN)]
    for place, row in enumerate(rows):
        yield [("Attention    " if not place else " " * 13, BOLD), row]


def _scope(pause: Mapping[str, Any]) -> str:
    if pause["service"] is None:
        return "everything"
    return pause["service"] if pause["key"] is None else f"{pause['service']}/{pause['key']}"


def _endpoints(frame: Mapping[str, Any]) -> Iterator[Line]:
    rows = frame["endpoints"]
    if rows is None:
        yield [("Endpoints    ", BOLD), ("unknown", WARN)]
        return
    bad = [each for each in rows if each["problem"]]
    well = len(rows) - len(bad)
    head: Line = [("Endpoints    ", BOLD)]
    if well or not rows:
        yield [*head, (f"{well} well" if rows else "none: holdfast deployments register URL", PLAIN)]
        head = [(" " * 13, BOLD)]
    for each in bad:
        yield [*head, (f"{each['uri']} ({each['in_flight']} in flight) {each['problem']}", BAD)]
        head = [(" " * 13, BOLD)]


_Key: TypeAlias = Callable[[Mapping[str, Any]], Any]

#: How services can be sorted: busiest first, and so on.
SORTS: Final[dict[str, _Key]] = {
    "busiest": lambda row: (-(row["started_per_s"] or 0) - (row["completed_per_s"] or 0), -row["active"], row["name"]),
    "active": lambda row: (-row["active"], row["name"]),
    "failing": lambda row: (-(row["failed_per_s"] or 0), -row["paused"], -row["backing_off"], row["name"]),
    "name": lambda row: row["name"],
}


def _services(frame: Mapping[str, Any], width: int, sort: str) -> list[Line]:
    rows = frame["services"]
    if not rows:
        return [[("No services have been called." if rows is not None else "Services: unknown", PLAIN)]]
    columns = (
        Column("SERVICE"), Column("ACTIVE", right=True), Column("RUNNING", 2, right=True), Column("QUEUED", 3, right=True),
        Column("BACKING OFF", 4, right=True), Column("PAUSED", 1, right=True), Column("STARTED/S", right=True),
        Column("DONE/S", right=True), Column("FAILED/S", 1, right=True),
    )  # fmt: skip
    return _table(
        columns,
        [
            (
                Cell(printable(row["name"])), Cell(str(row["active"])), Cell(str(row["running"])), Cell(str(row["queued"])),
                Cell(str(row["backing_off"]), WARN if row["backing_off"] else PLAIN),
                Cell(str(row["paused"]), BAD if row["paused"] else PLAIN), Cell(_rate(row["started_per_s"])),
                Cell(_rate(row["completed_per_s"])),
                Cell(_rate(row["failed_per_s"]), BAD if row["failed_per_s"] else PLAIN),
            )
            for row in sorted(rows, key=SORTS[sort])
        ],
        width,
    )  # fmt: skip


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
