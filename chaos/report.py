"""A run as a page for people: the verdict, the figures, and a timeline drawn as SVG, in one file without anything else."""

from __future__ import annotations

import html
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.chaos.outage import Outage
from holdfast.chaos.verdict import Window
from holdfast.chaos.workloads import Ask

_Scale = Callable[[float], float]

WIDTH: Final = 1180
LEFT: Final = 104
PLOT: Final = 130
LANE: Final = 20

STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1220px; padding: 0 1em; color: #1c2733; }
h1 { font-size: 1.5em; margin: 0 } h2 { font-size: 1.1em; margin: 1.8em 0 .6em }
.head { display: flex; gap: 1em; align-items: center; flex-wrap: wrap } .sub { color: #51606e; margin: .3em 0 1em }
.verdict { padding: .3em .8em; border-radius: 4px; color: white; font-weight: 600 }
.ok { background: #1b7f4b } .bad { background: #b3261e }
.cards { display: flex; gap: .7em; flex-wrap: wrap }
.card { border: 1px solid #d5dce2; border-radius: 6px; padding: .5em .9em; min-width: 8em }
.card b { display: block; font-size: 1.3em } .card span { color: #51606e; font-size: .87em }
pre { background: #f4f6f8; padding: 1em; overflow-x: auto; white-space: pre-wrap; font-size: 13px; border-radius: 4px }
pre.bad-text { background: #fbeeed; border-left: 4px solid #b3261e }
table { border-collapse: collapse } td, th { padding: .15em .9em .15em 0; text-align: left; vertical-align: top }
th { border-bottom: 1px solid #d5dce2; font-weight: 600 } td.n, th.n { text-align: right }
.scroll { overflow-x: auto } svg text { font: 11px system-ui, sans-serif; fill: #51606e }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .4em }
summary { cursor: pointer; font-weight: 600; margin: 1.8em 0 .6em }
"""

_OUT_COLORS: Final = {
    "killed": "#b3261e",
    "stopped": "#d08700",
    "told to end": "#5b6bbf",
    "ended by itself": "#6d0f6d",
    "removed": "#c9d1d8",
}
_FAMILY_COLORS: Final = {
    "processes": "#b3261e",
    "network": "#1b5f9e",
    "handlers": "#d08700",
    "clock, disk": "#6b5b95",
    "operators": "#5b6bbf",
    "snapshots": "#00796b",
    "S3": "#8a5a00",
    "pairs": "#6d0f6d",
}
_OTHER: Final = "#7a8794"


@dataclass(frozen=True, slots=True)
class Card:
    value: str
    label: str


def page(
    *,
    title: str,
    subtitle: str,
    ok: bool,
    cards: Sequence[Card],
    summary: str,
    began: float,
    ended: float,
    asks: Sequence[Ask],
    windows: Sequence[Window],
    outages: Sequence[Outage],
    lives: Mapping[str, tuple[float, float | None]],
    violations: Mapping[str, Sequence[str]],
    gaps: Mapping[str, Mapping[str, float]],
    aimed: Mapping[str, Mapping[str, int]],
    left_out: Mapping[str, str],
) -> str:
    """`lives` says from when until when each node was a member; None: to the end."""
    count = sum(len(sentences) for sentences in violations.values())
    word = "0 violations" if ok else f"{count} violations" if count else "nothing was proved"
    shown = "".join(f"<div class=card><b>{_text(it.value)}</b><span>{_text(it.label)}</span></div>" for it in cards)
    broken = "".join(
        f"<h2>{_text(promise)}</h2><pre class=bad-text>{_text(chr(10).join(sentences[:50]))}</pre>"
        for promise, sentences in violations.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{_text(title)}</title>'
        f"<style>{STYLE}</style><div class=head><h1>{_text(title)}</h1>"
        f'<span class="verdict {"ok" if ok else "bad"}">{word}</span></div><p class=sub>{_text(subtitle)}</p>'
        f"<div class=cards>{shown}</div>"
        f"<h2>What happened when</h2><div class=scroll>{timeline(began, ended, asks, windows, outages, lives)}</div>"
        f"{broken}<h2>Gap after a fault on a leader</h2>{_gap_table(gaps)}"
        f"<h2>Faults by kind</h2>{_kinds_table(windows, aimed, left_out)}"
        f"<h2>In figures</h2><pre>{_text(summary)}</pre>"
        f"<details><summary>Every fault</summary>{_fault_table(began, windows)}</details></html>\n"
    )


def _text(text: str) -> str:
    return html.escape(text)


def _dot(color: str) -> str:
    return f'<span class=dot style="background:{color}"></span>'


def _gap_table(gaps: Mapping[str, Mapping[str, float]]) -> str:
    if not gaps:
        return "<p>No leader was hit alone.</p>"
    rows = "".join(
        f"<tr><td>leader {_text(kind)}<td class=n>{each['count']:.0f}<td class=n>{each['p50_s'] * 1000:.0f} ms"
        f"<td class=n>{each['p99_s'] * 1000:.0f} ms<td class=n>{each['worst_s'] * 1000:.0f} ms"
        for kind, each in gaps.items()
    )
    return f"<table><tr><th>fault<th class=n>partitions<th class=n>p50<th class=n>p99<th class=n>worst{rows}</table>"


def _kinds_table(windows: Sequence[Window], aimed: Mapping[str, Mapping[str, int]], left_out: Mapping[str, str]) -> str:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for window in windows:
        counts[window.family][window.name] += 1
    rows = ""
    for family in sorted(counts, key=_family_order):
        names = []
        for name, count in sorted(counts[family].items()):
            missed = aimed.get(name, {}).get("missed", 0)
            names.append(f"{_text(name)} {count}" + (f" <b>({missed} missed its moment)</b>" if missed else ""))
        total = counts[family].total()
        rows += f"<tr><td>{_dot(_FAMILY_COLORS.get(family, _OTHER))}{_text(family)}<td class=n>{total}<td>{', '.join(names)}"
    rows += "".join(f"<tr><td>{_text(name)}<td class=n>0<td>left out: {_text(why)}" for name, why in left_out.items())
    return f"<table><tr><th>about<th class=n>faults<th>which{rows}</table>"


def _fault_table(began: float, windows: Sequence[Window]) -> str:
    rows = "".join(
        f"<tr><td class=n>{window.since - began:.1f} s<td class=n>{window.until - window.since:.1f} s"
        f"<td>{_dot(_FAMILY_COLORS.get(window.family, _OTHER))}{_text(window.name)}<td>{_text(window.target)}"
        for window in windows
    )
    return f"<table><tr><th class=n>at<th class=n>for<th>kind<th>what{rows}</table>"


def _family_order(family: str) -> int:
    known = list(_FAMILY_COLORS)
    return known.index(family) if family in known else len(known)


def timeline(
    began: float,
    ended: float,
    asks: Sequence[Ask],
    windows: Sequence[Window],
    outages: Sequence[Outage],
    lives: Mapping[str, tuple[float, float | None]],
) -> str:
    """Answers per second, the slowest answer of each second; below a lane for each node, and one for each family of faults."""
    seconds = max(1, int(ended - began) + 1)
    answers, slowest = [0] * seconds, [0.0] * seconds
    for ask in asks:
        if ask.answered is not None and 0 <= ask.answered - began < seconds:
            at = int(ask.answered - began)
            answers[at] += 1
            slowest[at] = max(slowest[at], ask.took_s)
    nodes = sorted(lives, key=lambda name: (lives[name][0], name))
    families = sorted({window.family for window in windows}, key=_family_order)
    lanes_top = 2 * PLOT + 64
    bottom = lanes_top + (len(nodes) + len(families)) * LANE + 10
    height = bottom + 44

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT - 10) * min(max(at / seconds, 0.0), 1.0)

    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" font-size="11">']
    step = next((it for it in (5, 10, 30, 60, 120, 300, 600, 1800) if seconds / it <= 14), 3600)
    for at in range(0, seconds + 1, step):
        parts.append(f'<line x1="{x(at):.1f}" y1="10" x2="{x(at):.1f}" y2="{bottom}" stroke="#e6ebef"/>')
    for window in windows:
        left, right = x(window.since - began), x(window.until - began)
        color = _FAMILY_COLORS.get(window.family, _OTHER)
        parts.append(
            f'<rect x="{left:.1f}" y="10" width="{max(right - left, 1):.1f}" height="{lanes_top - 20}" fill="{color}" '
            f'opacity=".1"><title>{_text(f"{window.name}: {window.target}")}</title></rect>'
        )
    parts += _plot(answers, x, top=10, color="#1b5f9e", label="answers per second")
    parts += _plot(slowest, x, top=PLOT + 44, color="#8a5a00", label="slowest answer, seconds")
    for number, name in enumerate(nodes):
        y = lanes_top + number * LANE
        since, until = lives[name]
        parts.append(_lane(x, name, y, since - began, (ended if until is None else until) - began))
        for outage in outages:
            if outage.node == name and outage.why != "removed":
                color = _OUT_COLORS.get(outage.why, _OTHER)
                gone = min(it for it in (outage.until, until, ended) if it is not None)
                parts.append(_bar(x, outage.since - began, gone - began, y, color, outage.why))
    for number, name in enumerate(families, start=len(nodes)):
        y = lanes_top + number * LANE
        parts.append(_lane(x, name, y, 0.0, ended - began))
        color = _FAMILY_COLORS.get(name, _OTHER)
        parts += [
            _bar(x, it.since - began, it.until - began, y, color, f"{it.name}: {it.target}")
            for it in windows
            if it.family == name
        ]
    for at in range(0, seconds + 1, step):
        parts.append(f'<text x="{x(at):.1f}" y="{bottom + 14}" text-anchor="middle">{at} s</text>')
    parts += _legend(bottom + 34)
    parts.append("</svg>")
    return "".join(parts)


def _legend(y: float) -> list[str]:
    """What the colours of the nodes' lanes mean."""
    parts = [f'<text x="{LEFT}" y="{y}">A node is out until it answers again, because it was</text>']
    for number, why in enumerate(("killed", "stopped", "told to end", "ended by itself")):
        left = LEFT + 320 + 120 * number
        parts.append(f'<rect x="{left}" y="{y - 9}" width="12" height="9" rx="2" fill="{_OUT_COLORS[why]}"/>')
        parts.append(f'<text x="{left + 18}" y="{y}">{why}</text>')
    return parts


def _lane(x: _Scale, name: str, y: float, since: float, until: float) -> str:
    return (
        f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{_text(name)}</text>'
        f'<line x1="{x(since):.1f}" y1="{y + 8}" x2="{x(until):.1f}" y2="{y + 8}" stroke="#c9d1d8"/>'
    )


def _bar(x: _Scale, since: float, until: float, y: float, color: str, why: str) -> str:
    left, right = x(since), x(until)
    return (
        f'<rect x="{left:.1f}" y="{y + 2}" width="{max(right - left, 2):.1f}" height="12" rx="2" fill="{color}">'
        f"<title>{_text(why)}, {until - since:.2f} s</title></rect>"
    )


def _plot(values: Sequence[float], x: _Scale, *, top: int, color: str, label: str) -> list[str]:
    most = max([*values, 0.001])
    bottom = top + PLOT
    points = " ".join(f"{x(at + 0.5):.1f},{bottom - value / most * (PLOT - 12):.1f}" for at, value in enumerate(values))
    area = f"{x(0.5):.1f},{bottom} {points} {x(len(values) - 0.5):.1f},{bottom}"
    return [
        f'<line x1="{LEFT}" y1="{bottom}" x2="{WIDTH - 10}" y2="{bottom}" stroke="#c9d1d8"/>',
        f'<text x="{LEFT - 8}" y="{top + 16}" text-anchor="end">{most:.3g}</text>',
        f'<text x="{LEFT - 8}" y="{bottom}" text-anchor="end">0</text>',
        f'<text x="{LEFT + 6}" y="{top + 4}" font-weight="600">{_text(label)}</text>',
        f'<polygon points="{area}" fill="{color}" opacity=".12"/>',
        f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>',
    ]
