"""docs/sql.md: how to query a cluster with SQL, and every table and column from its description in the code.

`python -m tests.sql_page` writes it; tests/cluster/test_sql.py reports when it is stale.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Final

from holdfast.cluster.admin.choices import QUERY_LIMIT, QUERY_LIMIT_MAX, QUERY_TIMEOUT_S, QUERY_TIMEOUT_S_MAX
from holdfast.cluster.sql.catalog import TABLES
from holdfast.cluster.sql.engine import ANSWER_BYTES_MAX, MEMORY_BYTES_MAX, SQL_BYTES_MAX, VALUE_BYTES_MAX
from holdfast.cluster.sql.queries import RUNNING_MAX

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "sql.md"
HEAD: Final = """\
# SQL

Every node answers SQL queries about the whole cluster: invocations, their journals, state, timers,
promises, deployments and nodes. Queries only read.

```
holdfast sql "select status, sum(count) from statistics group by status"
holdfast sql --csv "select id, failure_message from invocations where status = 'paused'" > paused.csv
holdfast sql                      # a prompt; \\tables lists the tables
```

`holdfast sql` prints a table, `--json` or `--csv`, and reads the statement from stdin if none is
given. The admin API has the same: `POST /query` needs the role `read`.

```
curl http://127.0.0.1:9070/query --json '{"sql": "select count(*) from invocations", "limit": 100}'
{"columns": [{"name": "count(*)", "type": "integer"}], "rows": [[3]], "more": false,
 "took_ms": 2, "rows_read": 3}
```

Blobs are `{"base64": "…"}` in the answer. `more` says that there are further rows. `rows_read` is
the number of rows that were examined in the partitions.

## The language

A query is one `SELECT` statement in the [dialect of SQLite](https://sqlite.org/lang_select.html),
with joins, aggregates, window functions, common table expressions and the
[JSON functions](https://sqlite.org/json1.html). `explain query plan` works too. Two functions are
added: `now_ms()`, the time of the query, and `ago_ms('2h')`, a time before it. A JSON function
fails on a payload that is not JSON; `json_valid(value)` tells.

```sql
-- what failed in the last hour, by kind
select service, handler, failure_kind, count(*) as failed
from invocations
where created_ms > ago_ms('1h') and end = 'failed'
group by service, handler, failure_kind order by failed desc;

-- the failures of one tenant: invocations with the tag tenant=acme
select i.id, i.service, i.failure_message
from tags t join invocations i on i.id = t.invocation
where t.name = 'tenant' and t.value = 'acme' and i.end = 'failed';

-- the slowest steps of paused invocations
select i.id, j.name, j.duration_ms
from invocations i join journal j on j.invocation = i.id
where i.status = 'paused' order by j.duration_ms desc limit 20;

-- objects by a field of their state
select key, json_extract(value, '$.total') as total
from state where service = 'cart' and name = 'cart' and total > 100;
```

## What a query costs

Conditions reach the partitions, so only matching rows and needed columns travel. These conditions
also avoid reading the other rows:

- `id = …` of `invocations`, and `invocation = …` of the tables about steps and attempts, also with
  `in (…)` and in joins.
- `name = … and value = …` of `tags`, also in joins.
- `service = … and key = …` of `objects`, `state` and `promises`. For `invocations`, they choose one
  partition.
- `created_ms > …` or `created_at > '2026-11-18T04'` of `invocations`, and
  `order by created_ms desc limit …`: it stops when it has enough rows.
- `status = …` of `invocations`: completed ones are in a table of their own.

Everything else reads the whole table, in slices and beside the work of the node: count on a few
seconds for a million invocations. `statistics` counts them without reading any.

## What a query sees

The node that answers reads its own replicas, which may lag behind the leaders by some milliseconds,
and reads other partitions at nodes that have them. With `"fresh": true` (`--fresh`) every replica
first catches up with what was acknowledged before the query. A query is not one snapshot: each
slice shows one moment, and the slices follow each other. An invocation that exists throughout the
query is found once, whatever becomes of it meanwhile.

A cluster in which a node of release 0.1 still runs can only be queried at a node that has every
partition.

"""
LIMITS: Final = f"""\
## Limits

| limit | |
|---|---|
| rows of an answer | {QUERY_LIMIT:,}, or `limit` up to {QUERY_LIMIT_MAX:,} |
| size of an answer | {ANSWER_BYTES_MAX >> 20} MiB; `more` is true then |
| time | {QUERY_TIMEOUT_S:g} s, or `timeout_s` up to {QUERY_TIMEOUT_S_MAX:g} |
| queries at a time | {RUNNING_MAX} per node; others get 503 with `Retry-After` |
| memory | {MEMORY_BYTES_MAX >> 20} MiB for all queries of a node |
| statement | {SQL_BYTES_MAX >> 10} KiB |
| one value | {VALUE_BYTES_MAX >> 10} KiB; payloads over 16 KiB are null, with their size beside |

A query also ends when its client disconnects or its node stops. Ids of awakeables are shown only to
tokens that may invoke all services, because whoever knows one can complete it.
"""


def page() -> str:
    parts = [HEAD, LIMITS, "\n## Tables\n"]
    for table in TABLES.values():
        rows = "\n".join(f"| `{each.name}` | {each.type} | {_cell(each.about)} |" for each in table.columns)
        about = fill(table.about, 100, break_on_hyphens=False)
        parts.append(f"\n### {table.name}\n\n{about}\n\n| column | type | |\n|---|---|---|\n{rows}\n")
    return "".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
