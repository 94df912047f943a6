"""The tables that a node knows as a whole: deployments, services, handlers, nodes and partitions.

They have few rows. A query gets all of them when it first reads the table.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.cluster.admin.healths import Healths
from holdfast.cluster.handlers.views import show_health
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.routing.reader import Reader
from holdfast.cluster.sql.relations import INTEGER, TEXT, Column, Table, Value, times

Rows: TypeAlias = list[dict[str, Any]]


def _column(name: str, type_: str, about: str) -> Column:
    return Column(name, type_, about, lambda row: row.get(name))


def _texts(**columns: str) -> tuple[Column, ...]:
    return tuple(_column(name, TEXT, about) for name, about in columns.items())


def _numbers(**columns: str) -> tuple[Column, ...]:
    return tuple(_column(name, INTEGER, about) for name, about in columns.items())


DEPLOYMENTS: Final = Table(
    "deployments",
    "Registered endpoints.",
    (
        *_texts(id="its id: dp_…", uri="where nodes reach it", sdk="the release of its SDK"),
        *times("created", "when it was registered", lambda row: row["created"]),
        *_numbers(
            in_flight="incomplete invocations that are pinned to it",
            is_current="1 if it receives new invocations of one of its services",
        ),
        *_texts(
            services="its services, as a JSON list",
            health="ok, idle, down, stalled or crashing: see `GET /deployments`",
            error="why a node cannot reach it",
            metadata="what was given when it was registered, as a JSON object",
        ),
    ),
)
SERVICES: Final = Table(
    "services",
    "Services as their newest deployment offers them, with totals since they were first invoked.",
    (
        *_texts(
            name="its name",
            kind="service, object or workflow",
            deployment="the deployment that receives new invocations",
            doc="its documentation",
        ),
        *_numbers(
            revision="its newest revision",
            is_private="1 if only handlers may call it",
            invocations="invocations now, completed ones included",
            invoked="invocations that began",
            succeeded="invocations that succeeded",
            failed="invocations that failed",
            cancelled="invocations that were cancelled",
            killed="invocations that were killed",
            attempts="attempts",
            attempts_failed="attempts that failed",
            steps="steps",
        ),
    ),
)
HANDLERS: Final = Table(
    "handlers",
    "Handlers as the newest deployment of their service offers them.",
    (
        *_texts(
            service="its service",
            name="its name",
            mode="plain, exclusive, shared or main",
            doc="its documentation",
            input_type="the content type of its input",
            input_schema="the JSON schema of its input",
            output_type="the content type of its output",
            output_schema="the JSON schema of its output",
            options="its options, as a JSON object",
        ),
    ),
)
NODES: Final = Table(
    "nodes",
    "The nodes of the cluster, as the node that answers sees them.",
    (
        *_texts(
            name="its name",
            state="its state as a member",
            condition="ok, or what is the matter with it, as `GET /cluster` shows it",
            zone="its zone",
            address="where other nodes reach it",
            ingress_url="its ingress",
            admin_url="its admin API",
            version="its release",
        ),
        *_numbers(
            level="the highest level that it supports",
            is_connected="1 if the node that answers has a link to it",
            is_disk_full="1 if it has no room",
            replicas="partitions that it holds",
            leads="partitions that it leads",
            uptime_s="seconds since it started; null if it does not answer, like the rest",
            disk_free="free bytes where its data is",
            disk_bytes="size of that disk",
            memory_bytes="its resident memory",
            loop_lag_ms="how late its event loop was last",
        ),
    ),
)
PARTITIONS: Final = Table(
    "partitions",
    "The partitions, as the node that answers sees them. What only a replica knows is null if it has none.",
    (
        *_numbers(partition="its number"),
        *_texts(leader="the node that leads it", members="the nodes that hold it, as a JSON list"),
        *_numbers(epoch="how often its members changed", is_here="1 if the node that answers has a replica"),
        *_texts(role="of that replica: leader, follower or candidate"),
        *_numbers(
            term="its term",
            commit_index="its newest committed entry",
            applied_index="its newest applied entry",
            apply_lag="committed entries that are not applied",
        ),
    ),
)
PAUSES: Final = Table(
    "pauses",
    "What leaders may not start: a key, a service or everything. Rows appear with `POST /pauses`.",
    (
        *_texts(
            service="the paused service; null: everything",
            key="the paused key; null: the whole service",
            paused_by="who paused it",
            reason="why",
        ),
        *times("since", "since when", lambda row: row["since"]),
        *_numbers(stop="1 if running attempts are asked to suspend"),
    ),
)
OVERVIEWS: Final = (DEPLOYMENTS, SERVICES, HANDLERS, NODES, PARTITIONS, PAUSES)


class Overviews(NamedTuple):
    """Gives the rows of these tables. Runs on the event loop."""

    registry: Registry
    reader: Reader
    healths: Healths
    cluster: Callable[[], Awaitable[Mapping[str, Any]]]  # as `GET /cluster` shows it

    async def rows(self, name: str) -> list[list[Value]]:
        table = next(table for table in OVERVIEWS if table.name == name)
        found: Rows = await getattr(self, f"_{name}")()
        return [[column.get(row) for column in table.columns] for row in found]

    async def _deployments(self) -> Rows:
        in_flight = (await self.reader.statistics()).deployments
        state, healths = self.registry.state, await self.healths.for_all(None)
        rows = []
        for each in state.deployments.values():
            shown = show_health([health for health in healths if health.deployment == each.id])
            rows.append(
                {
                    "id": each.id,
                    "uri": each.uri,
                    "sdk": each.sdk,
                    "created": each.created_ms,
                    "in_flight": in_flight.get(each.id, 0),
                    "is_current": int(any(offers[-1:] == [each.id] for offers in state.offers.values())),
                    "services": _json(sorted(service.name for service in each.services)),
                    "health": shown["status"],
                    "error": next((node["error"] for node in shown["nodes"] if node["error"]), None),
                    "metadata": _json(each.metadata),
                }
            )
        return rows

    async def _services(self) -> Rows:
        figures = (await self.reader.statistics()).services
        rows = []
        for name in sorted(self.registry.state.offers):
            found = self.registry.service(name)
            if found is None:
                continue
            service, deployment = found
            row: dict[str, Any] = {
                "name": name,
                "kind": service.kind,
                "deployment": deployment.id,
                "doc": service.doc,
                "revision": deployment.revisions[name],
                "is_private": int(bool(service.options.get("private", False))),
                "invocations": 0,
            }
            if name in figures:
                counts = figures[name]._asdict()
                row |= {"invocations": sum(counts.pop("by_status").values()), **counts}
            rows.append(row)
        return rows

    async def _handlers(self) -> Rows:
        rows = []
        for name in sorted(self.registry.state.offers):
            found = self.registry.service(name)
            for handler in found[0].handlers if found is not None else ():
                rows.append({"service": name, **handler._asdict(), "options": _json(handler.options)})
        return rows

    async def _nodes(self) -> Rows:
        return [
            {
                **{column.name: each.get(column.name) for column in NODES.columns},
                "is_connected": int(bool(each.get("connected"))),
                "is_disk_full": int(bool(each.get("disk_full"))),
                "disk_free": (each["disk"] or {}).get("free"),
                "disk_bytes": (each["disk"] or {}).get("total"),
            }
            for each in (await self.cluster())["nodes"]
        ]

    async def _partitions(self) -> Rows:
        return [
            {
                "partition": each["partition"],
                "leader": each["leader"],
                "members": _json(each["members"]),
                "epoch": each["epoch"],
                "is_here": int(each["here"]),
                "role": each.get("role"),
                "term": each.get("term"),
                "commit_index": each.get("commit"),
                "applied_index": each.get("applied"),
                "apply_lag": each.get("apply_lag"),
            }
            for each in (await self.cluster())["partitions"]
        ]

    async def _pauses(self) -> Rows:
        return [
            {
                "service": standing.scope[0] or None,
                "key": standing.scope[1],
                "paused_by": standing.by,
                "reason": standing.reason,
                "since": standing.since_ms,
                "stop": int(standing.recall),
            }
            for standing in self.registry.state.pauses.by_scope.values()
        ]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
