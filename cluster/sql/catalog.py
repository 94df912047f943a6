"""All tables, in the order of the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from holdfast.cluster.admin.shapes import queries
from holdfast.cluster.sql.invocations import ATTEMPTS, INVOCATIONS, STATISTICS, TAGS
from holdfast.cluster.sql.journals import APPROVALS, AWAKEABLES, IN_DOUBT, JOURNAL_TABLE
from holdfast.cluster.sql.objects import OBJECTS, PROMISES, STATE, TIMERS
from holdfast.cluster.sql.overviews import OVERVIEWS
from holdfast.cluster.sql.relations import Table

TABLES: Final[Mapping[str, Table]] = {
    table.name: table
    for table in (
        INVOCATIONS,
        TAGS,
        STATISTICS,
        JOURNAL_TABLE,
        ATTEMPTS,
        AWAKEABLES,
        APPROVALS,
        IN_DOUBT,
        OBJECTS,
        STATE,
        PROMISES,
        TIMERS,
        *OVERVIEWS,
    )
}


def show_tables() -> list[queries.Table]:
    return [
        {
            "name": table.name,
            "about": table.about,
            "columns": [{"name": each.name, "type": each.type, "about": each.about} for each in table.columns],
        }
        for table in TABLES.values()
    ]
