"""The second half of the table of routes: the cluster, its nodes, and who may use it."""

from __future__ import annotations

from typing import Final

from holdfast.cluster.admin.choices import (
    LOG_LIMIT,
    PAGE,
    PAGE_MAX,
    QUERY_LIMIT,
    QUERY_LIMIT_MAX,
    QUERY_TIMEOUT_S,
    QUERY_TIMEOUT_S_MAX,
)
from holdfast.cluster.events.logs import LIMIT_MAX
from holdfast.cluster.http.routes import NO_SUCH, NUMBER, TRUTH, Parameter, Route
from holdfast.cluster.log_level import LEVELS
from holdfast.cluster.members.operations import DRAIN_S
from holdfast.statemachine.access import ADMIN, OPERATE, READ, ROLES
from holdfast.statemachine.webhooks import EVENTS

OF_THE_CLUSTER: Final = (
    Route(
        "GET",
        "/cluster",
        "cluster",
        "Nodes, partitions, leaders, lags, snapshots; `linearizable` says which parts include every change acknowledged "
        "before; only the role admin sees why a node is not connected",
        READ,
    ),
    Route(
        "POST",
        "/cluster/nodes",
        "add_node",
        "Add a node; it gets replicas once it is connected",
        OPERATE,
        body={
            "type": "object",
            "required": ["name", "address"],
            "properties": {
                "name": {"type": "string"},
                "address": {"type": "string", "description": "host:port of its peer link, not link-local"},
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
        OPERATE,
        (
            Parameter("move", "true: also move its replicas to other nodes", TRUTH),
            Parameter("wait", f"false: answer at once; otherwise when it leads nothing, within {DRAIN_S:g} s", TRUTH),
        ),
        answers=((200, "drained, or in progress: see `leads`"), NO_SUCH),
    ),
    Route(
        "POST",
        "/cluster/nodes/{name}/undrain",
        "undrain",
        "Return a drained node to service",
        OPERATE,
        answers=((200, "the node takes part again"), NO_SUCH),
    ),
    Route(
        "POST",
        "/cluster/nodes/{name}/remove",
        "remove_node",
        "Remove a node permanently and recreate its replicas on other nodes",
        OPERATE,
        (Parameter("force", "true: even if too few nodes are left for all replicas", TRUTH),),
        answers=((200, "the removal has begun"), NO_SUCH, (409, "too few nodes would be left")),
    ),
    Route(
        "POST",
        "/cluster/partitions/{partition}/transfer",
        "transfer",
        "Transfer the leadership of a partition to another replica",
        OPERATE,
        (Parameter("to", "the new leader; any other replica if omitted"),),
        answers=((200, "the current leader"), NO_SUCH, (409, "the leadership could not be transferred, and why")),
    ),
    Route(
        "POST",
        "/cluster/partitions/{partition}/snapshot",
        "create_snapshot",
        "Take a snapshot of a partition now, on its leader",
        OPERATE,
        answers=((201, "the snapshot"), NO_SUCH, (503, "the snapshot cannot be taken now, and why")),
    ),
    Route(
        "POST",
        "/cluster/backups",
        "begin_backup",
        "Start a backup of the whole cluster on this node; "
        "a place outside the store in the setting `snapshots` needs the role admin",
        OPERATE,
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
        answers=(
            (202, "started: its progress is under its id"),
            (400, "not a place"),
            (409, "this node is already making one"),
        ),
    ),
    Route("GET", "/cluster/backups", "backups", "Backups that this node has made or started since it came up", READ),
    Route(
        "GET",
        "/cluster/backups/{id}",
        "backup",
        "The progress of a backup, whichever node makes it; only the role admin sees why it failed",
        READ,
        answers=((200, "`status`: running, succeeded, failed or cancelled"), NO_SUCH),
    ),
    Route(
        "DELETE",
        "/cluster/backups/{id}",
        "cancel_backup",
        "Cancel a backup in progress and delete its files",
        OPERATE,
        answers=((200, "the final state of the backup"), NO_SUCH),
    ),
    Route(
        "GET",
        "/snapshots",
        "snapshots",
        "Snapshots in the shared store for the partitions on this node",
        READ,
        answers=(
            (200, "the names of the snapshots"),
            (409, "there is no shared store"),
            (503, "the store does not answer, and why"),
        ),
    ),
    Route("GET", "/tokens", "tokens", "All tokens, without their secrets", ADMIN),
    Route(
        "POST",
        "/tokens",
        "create_token",
        "Create a token; the answer has its secret, which is not stored",
        ADMIN,
        body={
            "type": "object",
            "required": ["name", "roles"],
            "properties": {
                "name": {"type": "string", "description": "the person or program that gets it"},
                "roles": {"type": "array", "items": {"type": "string", "enum": list(ROLES)}},
                "services": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "the only services that the role invoke covers; none: all",
                },
                "expires_in": {"type": "string", "description": "a duration: 12h, 90d; default: it never expires"},
            },
        },
        answers=((201, "the token"),),
    ),
    Route(
        "POST",
        "/tokens/{id}/rotate",
        "rotate_token",
        "Give a token a new secret; the answer has it",
        ADMIN,
        body={
            "type": "object",
            "properties": {
                "keep_old": {"type": "string", "description": "how long the previous secret stays valid: 1h"},
            },
        },
        answers=((200, "the token"), NO_SUCH),
    ),
    Route(
        "DELETE",
        "/tokens/{id}",
        "revoke_token",
        "Revoke a token",
        ADMIN,
        answers=((200, "the token is revoked"), NO_SUCH),
    ),
    Route(
        "GET",
        "/audit",
        "audit",
        "The audit trail, newest acts first, in pages: who changed what, when, from where, and with which outcome",
        ADMIN,
        (
            Parameter("since", "at or after this time: 2026-11-18T04:00:00Z, or a duration before now: 2h"),
            Parameter("until", "before this time, or a duration before now"),
            Parameter("principal", "by the token with this id or name; `anybody` if authentication is off"),
            Parameter("action", "with this name, as in kill, register, create_token, resolve_awakeable"),
            Parameter("outcome", "done, refused (401, 403), failed, unknown (the client disconnected), or a status"),
            Parameter("limit", f"of the page, up to {PAGE_MAX}; {PAGE} if not given", NUMBER),
            Parameter("cursor", "cursor from the previous page", NUMBER),
            Parameter(
                "after", "instead of a cursor: only acts after the one with this `sequence`, oldest first", NUMBER
            ),
        ),
    ),
    Route("GET", "/identity", "identity", "The public keys by which handlers recognise this cluster", READ),
    Route(
        "POST",
        "/identity/rotate",
        "rotate_identity",
        "Create a new key that is used beside the current one, or stop using the older of two",
        ADMIN,
        body={
            "type": "object",
            "properties": {"finish": {"type": "boolean", "description": "stop using the older key"}},
        },
        answers=((200, "the public keys"), (409, "a rotation is already in progress, or there is none to finish")),
    ),
    Route(
        "POST",
        "/query",
        "query",
        "Query the cluster with SQL: see `GET /query/tables`",
        READ,
        body={
            "type": "object",
            "required": ["sql"],
            "properties": {
                "sql": {"type": "string", "description": "one SELECT statement in the dialect of SQLite"},
                "limit": {"type": "integer", "description": f"rows at most; {QUERY_LIMIT}, at most {QUERY_LIMIT_MAX}"},
                "timeout_s": {
                    "type": "number",
                    "description": f"after how many seconds to give up; {QUERY_TIMEOUT_S:g}, "
                    f"at most {QUERY_TIMEOUT_S_MAX:g}",
                },
                "fresh": {"type": "boolean", "description": "wait until the replicas have all that is acknowledged"},
            },
        },
        answers=(
            (200, "columns and rows; `more`: there are further ones"),
            (400, "the statement is wrong, and where; it is not only reading; or it took too long"),
            (413, "it needs more memory than all queries together may use, or a value is too large"),
            (503, "too many queries are running on this node"),
        ),
        reads=True,
    ),
    Route("GET", "/query/tables", "query_tables", "The tables of SQL queries, and their columns", READ),
    Route("GET", "/pauses", "pauses", "What leaders may not start, by whom, since when and why", READ),
    Route(
        "POST",
        "/pauses",
        "begin_pause",
        "Pause a key, a service or everything: no attempt of it starts until the pause is ended",
        OPERATE,
        body={
            "type": "object",
            "properties": {
                "service": {"type": "string", "description": "everything, if it is not given"},
                "key": {"type": "string", "description": "only this key of the service"},
                "reason": {"type": "string"},
                "stop": {"type": "boolean", "description": "also ask running attempts to suspend"},
            },
            "required": ["reason"],
        },
        answers=(
            (200, "it was paused before; reason changed"),
            (201, "paused"),
            (404, "no such service"),
            (507, "too many"),
        ),
    ),
    Route(
        "DELETE",
        "/pauses",
        "end_pause",
        "End the pause of a key, a service or everything",
        OPERATE,
        body={"type": "object", "properties": {"service": {"type": "string"}, "key": {"type": "string"}}},
        answers=((200, "resumed, and what is still paused"), (404, "it is not paused")),
    ),
    Route(
        "GET",
        "/webhooks",
        "webhooks",
        "Webhooks: what they are told, what waits for them, and their last error",
        OPERATE,
    ),
    Route(
        "POST",
        "/webhooks",
        "create_webhook",
        "Create a webhook: the cluster sends signed events to an address; its secret is shown only once",
        OPERATE,
        body={
            "type": "object",
            "properties": {
                "url": {"type": "string", "description": "http or https, without user and password"},
                "events": {"type": "array", "items": {"enum": [*EVENTS]}},
                "services": {"type": "array", "items": {"type": "string"}, "description": "all, if it is not given"},
            },
            "required": ["url", "events"],
        },
        answers=((201, "the webhook and its secret"), (507, "too many webhooks")),
    ),
    Route(
        "DELETE",
        "/webhooks/{id}",
        "delete_webhook",
        "Delete a webhook, and the events that wait for it",
        OPERATE,
        answers=((200, "deleted"), (404, "no such webhook")),
    ),
    Route(
        "POST",
        "/webhooks/{id}/test",
        "test_webhook",
        "Send a test event to a webhook now, from this node, once",
        OPERATE,
        answers=((200, "what the receiver answered"), (404, "no such webhook")),
    ),
    Route("GET", "/metrics", "metrics", "Metrics for Prometheus", READ, answers=((200, "text"),)),
    Route("GET", "/log-level", "log_level", "The level of the log of the node that is asked", READ),
    Route(
        "PUT",
        "/log-level",
        "set_log_level",
        "Change the level of the log of the node that is asked, while it runs",
        OPERATE,
        body={
            "type": "object",
            "required": ["level"],
            "properties": {
                "level": {
                    "type": ["string", "null"],
                    "enum": [*LEVELS, None],
                    "description": "null: the level of the setting `log_level`",
                },
                "for": {"type": "string", "description": "return to the level of the setting after this long: 10m"},
            },
        },
        answers=((200, "the current level"),),
    ),
    Route(
        "GET",
        "/logs",
        "logs",
        "The newest records of the logs of the nodes, oldest first; with `Accept: text/event-stream`, followed by new ones as "
        "server-sent events, until the client ends the stream",
        ADMIN,
        (
            Parameter("level", f"at least this level: {', '.join(LEVELS)}; info if not given"),
            Parameter("invocation", "records that name this invocation"),
            Parameter("node", "of these nodes, separated by commas; all if not given"),
            Parameter("since", "at or after this time: 2026-11-18T04:00:00Z, or a duration before now: 10m"),
            Parameter("until", "before this time, or a duration before now"),
            Parameter("limit", f"the newest, up to {LIMIT_MAX}; {LOG_LIMIT} if not given", NUMBER),
        ),
        answers=(
            (200, "`records`; `more`: older ones match; `silent`: nodes that did not answer"),
            (404, "there is no such node"),
        ),
    ),
    Route("GET", "/openapi.json", "openapi", "The OpenAPI description of this API", READ),
)
