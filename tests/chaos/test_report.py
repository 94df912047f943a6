"""The page of a run: its content, and that no log line of a node can break it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from holdfast.chaos.outage import Outage
from holdfast.chaos.report import Card, page, timeline
from holdfast.chaos.verdict import Window
from holdfast.chaos.workloads import Ask

ASKS = [Ask("flow", f"flow-{at}", "n1", float(at), answered=at + 0.25) for at in range(100, 130)]
WINDOWS = [
    Window("kill leader", "SIGKILL n1", 105.0, 107.0, family="processes"),
    Window("S3 silent", "S3 does <not> answer", 110.0, 114.0, excuses=False, family="S3"),
]
OUTAGES = [Outage("n1", "killed", 105.0, 108.0), Outage("n1", "removed", 120.0)]
LIVES = {"n1": (100.0, 120.0), "n2": (100.0, None), "m99": (112.0, None)}


def test_the_timeline_has_a_lane_for_each_node_and_each_family_of_faults() -> None:
    drawing = ElementTree.fromstring(timeline(100.0, 130.0, ASKS, WINDOWS, OUTAGES, LIVES))

    texts = [element.text for element in drawing.iter("text")]
    assert [text for text in texts if text in {*LIVES, "processes", "S3"}] == ["n1", "n2", "m99", "processes", "S3"]
    titles = [element.text for element in drawing.iter("title")]
    assert "S3 silent: S3 does <not> answer, 4.00 s" in titles and "killed, 3.00 s" in titles


def test_the_page_shows_the_verdict_and_missed_and_omitted_faults() -> None:
    made = page(
        title="Chaos run, seed 7",
        subtitle="3 nodes",
        ok=False,
        cards=[Card("1,234", "operations")],
        summary="the <figures>",
        began=100.0,
        ended=130.0,
        asks=ASKS,
        windows=[*WINDOWS, Window("kill in cut", "SIGKILL n2", 121.0, 122.0, family="snapshots")],
        outages=OUTAGES,
        lives=LIVES,
        violations={"one writer per key": ["a < b"]},
        gaps={"kill": {"count": 3, "p50_s": 0.1, "p99_s": 0.2, "worst_s": 0.3}},
        aimed={"kill in cut": {"missed": 1}},
        left_out={"full disk": "it takes root"},
    )

    assert "1 violations" in made and "a &lt; b" in made and "the &lt;figures&gt;" in made
    assert "1 missed its moment" in made and "left out: it takes root" in made
    assert "300 ms" in made and "1,234" in made
