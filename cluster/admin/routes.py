"""Every route of the admin API in one table: what it takes, what it answers, and who serves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from holdfast.cluster.admin.parameters import END_BY_NAME, STATUS_BY_NAME

PAGE: Final = 100
PAGE_MAX: Final = 1000
BULK: Final = 1000
BULK_MAX: Final = 100_000
STEPS_PAGE: Final = 1000
ACTIONS: Final = ("cancel", "kill", "pause", "resume", "restart", "purge")


class Parameter(NamedTuple):
    name: str
    description: str
    schema: Mapping[str, Any] = {"type": "string"}


class Route(NamedTuple):
    method: str
    path: str
    name: str  # of the method of Admin that answers
    summary: str
    parameters: tuple[Parameter, ...] = ()
    body: Mapping[str, Any] | None = None
    answers: tuple[tuple[int, str], ...] = ((200, "as asked"),)


_TRUTH: Final = {"type": "boolean"}
NUMBER: Final = {"type": "integer"}
FILTERS: Final = (
    Parameter(
        "status", f"one or more of {', '.join(STATUS_BY_NAME)}, separated by commas; `active`: all but completed"
    ),
    Parameter("service", "of this service"),
    Parameter("handler", "of this handler"),
    Parameter("key", "of this key of a virtual object or workflow"),
    Parameter("deployment", "pinned to this deployment"),
    Parameter("older_than", "created longer ago than this duration: 10m, 2h, 1d, PT10M"),
    Parameter("outcome", f"completed, with one or more of {', '.join(END_BY_NAME)}, separated by commas"),
    Parameter("since", "created at or after this time: 2026-11-18T04:00:00Z, or a duration before now: 2h"),
    Parameter("until", "created before this time, or a duration before now"),
    Parameter("idempotency_key", "created with this Idempotency-Key"),
)
_RESTART: Final = (
    Parameter("step", "restart: keep the steps before this one; 0 keeps only the input", NUMBER),
    Parameter("to", "resume, restart: continue on this deployment; `newest` is the one that gets new invocations"),
)
_NOT_FOUND: Final = (404, "there is none")
ROUTES: Final = (
    Route("GET", "/", "page", "An overview page for people", answers=((200, "HTML"),)),
    Route(
        "GET",
        "/health",
        "health",
        "Whether this node can take requests",
        answers=((200, "it can; with warnings, if there are any"), (503, "why not")),
    ),
    Route(
        "POST",
        "/deployments",
        "register",
        "Register the endpoint at a URI and discover its services",
        body={
            "type": "object",
            "required": ["uri"],
            "properties": {
                "uri": {"type": "string", "description": "where nodes reach the endpoint"},
                "force": {"type": "boolean", "description": "even if callers break or a manifest changes in place"},
                "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
            },
        },
        answers=(
            (201, "registered"),
            (200, "it was registered with this manifest before"),
            (400, "the manifest is wrong, and where"),
            (409, "it would break callers or change a deployment: `details` says how"),
            (502, "the endpoint cannot be asked"),
        ),
    ),
    Route("GET", "/deployments", "deployments", "All deployments, with the invocations in flight on each"),
    Route(
        "GET", "/deployments/{id}", "deployment", "One deployment with its handlers", answers=((200, "it"), _NOT_FOUND)
    ),
    Route(
        "DELETE",
        "/deployments/{id}",
        "remove",
        "Remove a drained deployment, or any deployment by force",
        (Parameter("force", "even if invocations run on it", _TRUTH),),
        answers=((200, "removed"), _NOT_FOUND, (409, "it is in use: how")),
    ),
    Route("GET", "/services", "services", "All services, as their newest deployment offers them"),
    Route("GET", "/services/{name}", "service", "One service with its handlers", answers=((200, "it"), _NOT_FOUND)),
    Route("GET", "/services/{name}/{key}/state", "state", "The state of one key", answers=((200, "it"), _NOT_FOUND)),
    Route(
        "PUT",
        "/services/{name}/{key}/state",
        "set_state",
        "Edit the state of a key while no handler holds it",
        body={
            "type": "object",
            "properties": {
                "values": {"type": "object", "description": 'by name: any JSON value, or {"base64": "..."} for bytes'},
                "remove": {"type": "array", "items": {"type": "string"}},
                "replace": {"type": "boolean", "description": "remove whatever is not in `values`"},
            },
        },
        answers=((200, "the state as it is now"), _NOT_FOUND, (409, "an invocation holds the key")),
    ),
    Route(
        "GET",
        "/invocations",
        "invocations",
        "Invocations that match every filter, newest first, in pages",
        (
            *FILTERS,
            Parameter("limit", f"of the page, up to {PAGE_MAX}; {PAGE} if not given", NUMBER),
            Parameter("cursor", "cursor from the previous page"),
        ),
    ),
    Route(
        "GET",
        "/invocations/{id}",
        "invocation",
        "One invocation: its record, why it is not running, its outcome",
        answers=((200, "it"), _NOT_FOUND),
    ),
    Route(
        "GET",
        "/invocations/{id}/journal",
        "journal",
        "The journal of an invocation, decoded",
        (Parameter("start", "the first step", NUMBER), Parameter("limit", f"up to {STEPS_PAGE}", NUMBER)),
        answers=((200, "the steps"), _NOT_FOUND),
    ),
    Route(
        "POST",
        "/invocations/{id}/steps/{step}/decide",
        "decide",
        "Decide the outcome of a step that is in doubt",
        body={
            "type": "object",
            "properties": {
                "value": {"description": "it succeeded with this result"},
                "failure": {"type": "object", "properties": {"message": {"type": "string"}, "code": NUMBER}},
                "again": {"type": "boolean", "description": "it did not happen: run it again"},
            },
        },
        answers=((200, "decided"), _NOT_FOUND, (409, "it is not in doubt")),
    ),
    Route(
        "POST",
        "/invocations/{id}/{action}",
        "act",
        f"{', '.join(ACTIONS)}",
        _RESTART,
        answers=((200, "done, or already so"), _NOT_FOUND, (409, "its state does not allow it")),
    ),
    Route(
        "POST",
        "/invocations/{action}",
        "act_on_many",
        f"{', '.join(ACTIONS)}: all invocations that match; at least one filter is needed",
        (
            *FILTERS,
            *_RESTART,
            Parameter("limit", f"at most this many, up to {BULK_MAX}; {BULK} if not given", NUMBER),
        ),
        answers=((200, "how many"), (400, "no filter")),
    ),
    Route(
        "GET",
        "/cluster",
        "cluster",
        "Nodes, partitions, leaders, lags, snapshots; `linearizable` says what of it includes every change acknowledged before",
    ),
    Route(
        "POST",
        "/cluster/nodes",
        "add_node",
        "Add a node; it gets replicas once it is connected",
        body={
            "type": "object",
            "required": ["name", "address"],
            "properties": {
                "name": {"type": "string"},
                "address": {"type": "string", "description": "host:port of its peer link"},
                "zone": {"type": "string"},
            },
        },
        answers=((200, "it may join"), (409, "the name was removed before")),
    ),
    Route(
        "POST",
        "/cluster/nodes/{name}/drain",
        "drain",
        "Drain a node: move its leaderships to other nodes",
        (Parameter("move", "true: also move its replicas to other nodes", _TRUTH),),
        answers=((200, "drained, or under way: `leads` says"), _NOT_FOUND),
    ),
    Route(
        "POST",
        "/cluster/nodes/{name}/undrain",
        "undrain",
        "Return a drained node to service",
        answers=((200, "done"), _NOT_FOUND),
    ),
    Route(
        "POST",
        "/cluster/nodes/{name}/remove",
        "remove_node",
        "Remove a node permanently and recreate its replicas on other nodes",
        (Parameter("force", "true: even if too few nodes are left for all replicas", _TRUTH),),
        answers=((200, "under way"), _NOT_FOUND, (409, "too few would be left")),
    ),
    Route(
        "POST",
        "/cluster/partitions/{partition}/transfer",
        "transfer",
        "Transfer the leadership of a partition to another replica",
        (Parameter("to", "the node that is to lead; any other replica if omitted"),),
        answers=((200, "who leads it now"), _NOT_FOUND, (409, "why it stays")),
    ),
    Route(
        "POST",
        "/cluster/partitions/{partition}/snapshot",
        "create_snapshot",
        "Take a snapshot of a partition now, on its leader",
        answers=((201, "it"), _NOT_FOUND, (503, "it cannot be cut now: why")),
    ),
    Route(
        "POST",
        "/cluster/backups",
        "begin_backup",
        "Start a backup of the whole cluster on this node",
        body={
            "type": "object",
            "required": ["to"],
            "properties": {
                "to": {
                    "type": "string",
                    "description": "s3://bucket/prefix?..., or a directory that all nodes share, as the nodes see it",
                },
            },
        },
        answers=((202, "begun: ask for its id"), (400, "not a place"), (409, "this node is making one already")),
    ),
    Route("GET", "/cluster/backups", "backups", "Backups that this node has made or started since it came up"),
    Route(
        "GET",
        "/cluster/backups/{id}",
        "backup",
        "The progress of a backup, whichever node makes it",
        answers=((200, "`status`: running, succeeded, failed or cancelled"), _NOT_FOUND),
    ),
    Route(
        "DELETE",
        "/cluster/backups/{id}",
        "cancel_backup",
        "Cancel a backup in progress and delete what it wrote",
        answers=((200, "as it ended"), _NOT_FOUND),
    ),
    Route(
        "GET",
        "/snapshots",
        "snapshots",
        "Snapshots in the shared store for the partitions on this node",
        answers=((200, "names"), (409, "there is no shared store"), (503, "the store does not answer: why")),
    ),
    Route("GET", "/metrics", "metrics", "Metrics for Prometheus", answers=((200, "text"),)),
    Route("GET", "/openapi.json", "openapi", "The OpenAPI description of this API"),
)
FILTER_NAMES: Final = tuple(parameter.name for parameter in FILTERS)
