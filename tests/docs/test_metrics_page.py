"""docs/metrics.md lists the metrics that the collectors have."""

from __future__ import annotations

import asyncio
import re

from docs import generate
from tests.docs.guide import ROOT


def test_the_page_of_metrics_is_what_the_collectors_say() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()

    assert page == generate.metrics_page(asyncio.run(generate.metric_families())), "make metrics"


def test_every_metric_says_what_it_is_and_ends_in_its_unit() -> None:
    families = asyncio.run(generate.metric_families())

    assert [
        each.name for each in families if not each.documentation.endswith(".") and each.name.startswith("holdfast")
    ] == []
    assert [each.name for each in families if re.search(r"_(ms|bytes_s|kb)$", each.name)] == []
    assert len({each.name for each in families}) == len(families)
