"""Measures queries over many stored invocations: lists, counts and SQL on three nodes, and what they cost the nodes.

    python -m bench.queries [--invocations n] [--nodes 1|3] [--rounds n]

First it fills the cluster with completed invocations of an empty handler, and with a thousand that wait. Then it asks one node,
through the admin API, once while nothing else happens and once under a load of calls. For each query it prints the time of the
answer (the middle and the worst of the rounds), and the longest pause of the event loop of any node meanwhile: in total, and
without the time in which its thread was ready but had no core, which is what the query is to blame for at most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import aiohttp
import uvloop

from bench import e2e

WAITING: Final = 1000
FILL_IN_FLIGHT: Final = 128

_LIST: Final = "select id, created_at from invocations where status = 'suspended' and service = 'bench' limit 50"
_NEWEST: Final = "select id, status from invocations order by created_ms desc limit 50"
_COUNT: Final = "select status, count(*) from invocations group by status"
_STATISTICS: Final = "select status, sum(count) from statistics group by status"
#: (name, path, SQL statement or None)
QUERIES: Final[tuple[tuple[str, str, str | None], ...]] = (
    ("newest 50", "/invocations?limit=50", None),
    ("newest 50 of a service that wait", "/invocations?limit=50&service=bench&status=suspended", None),
    ("newest 50 that failed", "/invocations?limit=50&outcome=failed", None),
    ("counts", "/statistics", None),
    ("SQL: filtered list", "/query", _LIST),
    ("SQL: newest 50", "/query", _NEWEST),
    ("SQL: count(*) group by status", "/query", _COUNT),
    ("SQL: the same from statistics", "/query", _STATISTICS),
)  # fmt: skip


async def _fill(cluster: e2e.Cluster, invocations: int) -> None:
    ports = ",".join(map(str, cluster.ports))
    for work, count in (("wait/send", WAITING), ("empty/send", invocations)):
        began = time.perf_counter()
        load = await e2e.Child.spawn("--load", ports, work, str(FILL_IN_FLIGHT), str(count))
        accepted = await load.hear(patience_s=count / 50 + 60)
        await load.end()
        print(f"{accepted} of {work}: {time.perf_counter() - began:.0f} s", flush=True)


async def _ask(session: aiohttp.ClientSession, admin: int, path: str, sql: str | None) -> Any:
    url = f"http://127.0.0.1:{admin}{path}"
    request = session.get(url) if sql is None else session.post(url, json={"sql": sql, "timeout_s": 120})
    async with request as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


async def _settled(session: aiohttp.ClientSession, admin: int, invocations: int) -> None:
    """Until nothing runs any more."""
    while True:
        answer = await _ask(session, admin, "/query", _STATISTICS)
        counts = dict(answer["rows"])
        if counts.get("completed", 0) >= invocations and counts.get("suspended", 0) >= WAITING:
            print("stored: " + ", ".join(f"{count} {status}" for status, count in counts.items() if count), flush=True)
            return
        await asyncio.sleep(1)


async def _measure(cluster: e2e.Cluster, session: aiohttp.ClientSession, admin: int, rounds: int, title: str) -> None:
    print(f"\n{title}\n{'query':36}{'median ms':>11}{'worst ms':>10}{'loop ms':>9}{'ours ms':>9}")
    for node in cluster.nodes:
        await node.ask("watch")
    for name, path, sql in QUERIES:
        took: list[float] = []
        for node in cluster.nodes:
            await node.ask("pauses")
        for _ in range(rounds):
            began = time.perf_counter()
            await _ask(session, admin, path, sql)
            took.append((time.perf_counter() - began) * 1000)
        pauses = [await node.ask("pauses") for node in cluster.nodes]
        loop, ours = (max(pause[which] for pause in pauses) * 1000 for which in (0, 1))
        print(f"{name:36}{statistics.median(took):11.1f}{max(took):10.1f}{loop:9.1f}{ours:9.1f}", flush=True)


async def run(arguments: argparse.Namespace) -> None:
    data = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=arguments.data))
    names = [f"n{number + 1}" for number in range(arguments.nodes)]
    places = json.dumps(dict(zip(names, e2e.free_ports(len(names)), strict=True)))
    nodes = [await e2e.Child.spawn("--node", str(data), name, "4", places) for name in names]
    cluster = e2e.Cluster(nodes, await e2e.Child.spawn("--endpoint"), [])
    try:
        await e2e.start(cluster, names)
        print(f"{os.cpu_count()} cores, {len(nodes)} nodes, load average {os.getloadavg()[0]:.1f}", flush=True)
        await _fill(cluster, arguments.invocations)
        admin = await nodes[0].ask("admin")
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=150)) as session:
            await _settled(session, admin, arguments.invocations)
            await _measure(cluster, session, admin, arguments.rounds, "nothing else to do")
            load = await e2e.Child.spawn("--load", ",".join(map(str, cluster.ports)), "empty", "16", "1000000")
            await load.hear()
            await _measure(cluster, session, admin, arguments.rounds, "16 calls in flight")
            load.kill()
    finally:
        await asyncio.gather(*(child.end() for child in (*nodes, cluster.endpoint)))
        shutil.rmtree(data, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--invocations", type=e2e.positive, default=1_000_000)
    parser.add_argument("--nodes", type=int, default=3, choices=(1, 3))
    parser.add_argument("--rounds", type=e2e.positive, default=5)
    parser.add_argument("--data", help="parent of the nodes' directories")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
