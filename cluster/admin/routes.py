"""Every route of the admin API in one table: its parameters, its answers, and the method that serves it."""

from __future__ import annotations

from typing import Final

from holdfast.cluster.admin.parameters import END_BY_NAME, STATUS_BY_NAME
from holdfast.cluster.http.routes import NUMBER, PUBLIC, Parameter, Route
from holdfast.cluster.log_level import LEVELS
from holdfast.statemachine.access import ADMIN, APPROVE, OPERATE, READ, ROLES
from holdfast.statemachine.survey import AWAKEABLE, IN_DOUBT, PROMISED, TIMED
from holdfast.statemachine.webhooks import EVENTS

PAGE: Final = 100
PAGE_MAX: Final = 1000
BULK: Final = 1000
BULK_MAX: Final = 100_000
STEPS_PAGE: Final = 1000
QUERY_LIMIT: Final = 1000
QUERY_LIMIT_MAX: Final = 10_000
QUERY_TIMEOUT_S: Final = 30.0
QUERY_TIMEOUT_S_MAX: Final = 120.0
OLDEST: Final = "oldest"
ORDERS: Final = ("newest", OLDEST)
PARTS: Final = ("output", "input")  # of a step that was given a value
WAITING: Final = (AWAKEABLE, PROMISED, IN_DOUBT, TIMED)
ACTIONS: Final = ("cancel", "kill", "pause", "resume", "restart", "purge")

_TRUTH: Final = {"type": "boolean"}
FILTERS: Final = (
    Parameter(
        "status",
        f"with one of these statuses, separated by commas: {', '.join(STATUS_BY_NAME)}; `active`: all but completed",
    ),
    Parameter("service", "invocations of this service"),
    Parameter("handler", "invocations of this handler"),
    Parameter("key", "invocations of this key of a virtual object or workflow"),
    Parameter("deployment", "invocations pinned to this deployment"),
    Parameter("older_than", "created longer ago than this duration: 10m, 2h, 1d, PT10M"),
    Parameter("outcome", f"completed, with one or more of {', '.join(END_BY_NAME)}, separated by commas"),
    Parameter("since", "created at or after this time: 2026-11-18T04:00:00Z, or a duration before now: 2h"),
    Parameter("until", "created before this time, or a duration before now"),
    Parameter("idempotency_key", "created with this Idempotency-Key"),
    Parameter("key_prefix", "with a key that begins with this text"),
    Parameter("failure_code", "ended with a failure of this code, or active with it as the last failure", NUMBER),
    Parameter("failure", "this text is in the message or kind of that failure, in upper or lower case"),
    Parameter("parent", "called or sent by the invocation with this id"),
    Parameter("completed_since", "completed at or after this time, or a duration before now"),
    Parameter("completed_until", "completed before this time, or a duration before now"),
)
_RESTART: Final = (
    Parameter("step", "restart: keep the steps before this one; 0 keeps only the input", NUMBER),
    Parameter("to", "resume, restart: continue on this deployment; `newest` is the one that receives new invocations"),
)
_NOT_FOUND: Final = (404, "there is no such object")
ROUTES: Final = (
    Route("GET", "/", "page", "The web console", PUBLIC, answers=((200, "HTML"),)),
    Route(
        "GET",
        "/console/{name}",
        "console_file",
        "A file of the console",
        PUBLIC,
        answers=((200, "the file"), (304, "it has not changed"), _NOT_FOUND),
    ),
    Route(
        "GET",
        "/console/{folder}/{name}",
        "console_folder",
        "A file of the console in a folder",
        PUBLIC,
        answers=((200, "the file"), (304, "it has not changed"), _NOT_FOUND),
    ),
    Route("GET", "/session", "session", "Who sends this request, by token or by cookie", PUBLIC),
    Route(
        "POST",
        "/session",
        "sign_in",
        "Sign in: the answer sets a cookie that stands for the token until it expires",
        PUBLIC,
        body={"type": "object", "required": ["token"], "properties": {"token": {"type": "string"}}},
        answers=((200, "signed in"), (401, "the token is not valid"), (409, "this node asks for no tokens")),
    ),
    Route("DELETE", "/session", "sign_out", "Sign out: the cookie is not accepted any more", PUBLIC),
    Route(
        "GET",
        "/health",
        "health",
        "Whether this node can serve requests",
        PUBLIC,
        answers=(
            (200, "the node can serve requests; `warnings` if there are any"),
            (503, "the node cannot serve requests; the body has the reason"),
        ),
    ),
    Route(
        "POST",
        "/deployments",
        "register",
        "Register the endpoint at a URI and discover its services",
        OPERATE,
        body={
            "type": "object",
            "required": ["uri"],
            "properties": {
                "uri": {"type": "string", "description": "where nodes reach the endpoint"},
                "force": {"type": "boolean", "description": "even if callers break or a manifest changes in place"},
                "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
                "dry_run": {"type": "boolean", "description": "only say what would change, and change nothing"},
            },
        },
        answers=(
            (201, "registered"),
            (200, "it is already registered with this manifest; or the differences, of a dry run"),
            (400, "the manifest is wrong, and where; or the nodes may not connect to that address"),
            (409, "it would break callers or change a deployment: `details` says how"),
            (502, "no endpoint answers there; only a token with the role admin is told why"),
        ),
    ),
    Route("GET", "/deployments", "deployments", "All deployments, with the invocations in flight on each", READ),
    Route(
        "GET",
        "/deployments/{id}",
        "deployment",
        "One deployment with its handlers",
        READ,
        answers=((200, "the deployment"), _NOT_FOUND),
    ),
    Route(
        "DELETE",
        "/deployments/{id}",
        "remove",
        "Remove a drained deployment, or any deployment by force",
        OPERATE,
        (Parameter("force", "even if invocations run on it", _TRUTH),),
        answers=((200, "the deployment is removed"), _NOT_FOUND, (409, "the deployment is in use: by what")),
    ),
    Route("GET", "/services", "services", "All services, as their newest deployment offers them", READ),
    Route(
        "GET",
        "/services/{name}",
        "service",
        "One service with its handlers",
        READ,
        answers=((200, "the service"), _NOT_FOUND),
    ),
    Route(
        "GET",
        "/services/{name}/{key}/state",
        "state",
        "The state of one key",
        READ,
        answers=((200, "the state of the key"), _NOT_FOUND),
    ),
    Route(
        "PUT",
        "/services/{name}/{key}/state",
        "set_state",
        "Edit the state of a key while no handler holds it",
        OPERATE,
        body={
            "type": "object",
            "properties": {
                "values": {"type": "object", "description": 'by name: any JSON value, or {"base64": "..."} for bytes'},
                "remove": {"type": "array", "items": {"type": "string"}},
                "replace": {"type": "boolean", "description": "remove all names that are not in `values`"},
                "expect": {
                    "type": "object",
                    "description": "by name: the value that must still be there, or null for none; otherwise nothing changes",
                },
            },
        },
        answers=(
            (200, "the current state"),
            _NOT_FOUND,
            (409, "an invocation holds the key, or values differ from `expect`: `details` names them"),
        ),
    ),
    Route(
        "GET",
        "/services/{name}/keys",
        "keys",
        "Keys of a virtual object or workflow that have a holder, state or promises, in pages, in no particular order",
        READ,
        (
            Parameter("prefix", "keys that begin with this text"),
            Parameter("limit", f"of the page, up to {PAGE_MAX}; {PAGE} if not given", NUMBER),
            Parameter("cursor", "cursor from the previous page"),
        ),
        answers=((200, "keys; a page with a cursor may be short"), _NOT_FOUND),
    ),
    Route(
        "GET",
        "/services/{name}/{key}/queue",
        "queue",
        "The invocation that holds a key, and those that wait for it, in their order",
        READ,
        (Parameter("limit", f"how many that wait, up to {PAGE_MAX}; {PAGE} if not given", NUMBER),),
        answers=((200, "them; `more`: there are others behind them"), _NOT_FOUND),
    ),
    Route(
        "GET",
        "/services/{name}/{key}/promises",
        "promises",
        "The promises of a workflow with their outcomes",
        READ,
        answers=((200, "up to 1000; `more`: there are others"), _NOT_FOUND),
    ),
    Route(
        "GET",
        "/statistics",
        "statistics",
        "Counts of invocations by service and status, and totals since the start; from counters, without a scan",
        READ,
    ),
    Route(
        "GET",
        "/invocations",
        "invocations",
        "Invocations that match every filter, by the time they were created, in pages; a page with a cursor may be short",
        READ,
        (
            *FILTERS,
            Parameter("order", "newest (first, the default) or oldest", {"type": "string", "enum": list(ORDERS)}),
            Parameter("limit", f"of the page, up to {PAGE_MAX}; {PAGE} if not given", NUMBER),
            Parameter("cursor", "cursor from the previous page"),
        ),
    ),
    Route(
        "GET",
        "/waiting",
        "waiting",
        "Steps that wait for somebody, and what timers will start, earliest first, in pages; a page with a cursor may be short",
        READ,
        (
            Parameter("kind", f"one or more of {', '.join(WAITING)}, separated by commas; all if not given"),
            Parameter("service", "of invocations of this service"),
            Parameter("limit", f"of the page, up to {PAGE_MAX}; {PAGE} if not given", NUMBER),
            Parameter("cursor", "cursor from the previous page"),
        ),
        answers=((200, "rows; the ids of awakeables are for tokens that may invoke all services"),),
    ),
    Route(
        "GET",
        "/invocations/{id}",
        "invocation",
        "One invocation: its record, why it is not running, its outcome",
        READ,
        answers=((200, "the invocation"), _NOT_FOUND),
    ),
    Route(
        "GET",
        "/invocations/{id}/journal",
        "journal",
        "The journal of an invocation, decoded",
        READ,
        (Parameter("start", "the first step", NUMBER), Parameter("limit", f"up to {STEPS_PAGE}", NUMBER)),
        answers=((200, "the steps"), _NOT_FOUND),
    ),
    Route(
        "GET",
        "/invocations/{id}/tree",
        "tree",
        "The tree of calls and sends that an invocation belongs to, with its callers",
        READ,
        answers=((200, "up to 1000 invocations; `complete`: these are all"), _NOT_FOUND),
    ),
    Route(
        "GET",
        "/invocations/{id}/steps/{step}/value",
        "step_value",
        "The whole value of a step, or of the outcome of the invocation (step `outcome`), up to 32 MiB",
        READ,
        (Parameter("part", "output (the default), or input", {"type": "string", "enum": list(PARTS)}),),
        answers=(
            (200, "its bytes: application/json if they are JSON"),
            (404, "there is no such value"),
            (413, "too large"),
        ),
    ),
    Route(
        "POST",
        "/invocations/{id}/steps/{step}/decide",
        "decide",
        "Decide the outcome of a step that is in doubt",
        APPROVE,
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
        f"Act on an invocation: {', '.join(ACTIONS)}",
        OPERATE,
        _RESTART,
        answers=((200, "done, or nothing to change"), _NOT_FOUND, (409, "its state does not allow it")),
    ),
    Route(
        "POST",
        "/invocations/{action}",
        "act_on_many",
        f"Act on all invocations that match ({', '.join(ACTIONS)}); at least one filter is needed",
        OPERATE,
        (
            *FILTERS,
            *_RESTART,
            Parameter("limit", f"at most this many, up to {BULK_MAX}; {BULK} if not given", NUMBER),
            Parameter("dry_run", "only count the invocations that match, and change nothing", _TRUTH),
        ),
        answers=(
            (200, "how many invocations matched and changed; `more`: there may be others, so send it again"),
            (400, "the request has no filter"),
        ),
    ),
    Route(
        "GET",
        "/events",
        "events",
        "Changes of invocations, cluster and deployments as they happen: server-sent events, which can be resumed",
        READ,
        (
            Parameter("kinds", "of events, separated by commas: invocation, cluster, deployments; all if not given"),
            Parameter("service", "events of invocations of this service"),
            Parameter("handler", "events of invocations of this handler"),
            Parameter("key", "events of invocations of this key of a virtual object or workflow"),
            Parameter("id", "events of this invocation"),
            Parameter(
                "status",
                "events of invocations that came to one of these statuses, separated by commas, as in /invocations",
            ),
            Parameter("after", "continue after the event with this id, on any node; so does the header Last-Event-ID"),
        ),
        answers=(
            (200, "text/event-stream, without an end"),
            (503, "too many streams are open on this node, or it is stopping"),
        ),
    ),
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
        (Parameter("move", "true: also move its replicas to other nodes", _TRUTH),),
        answers=((200, "drained, or in progress: see `leads`"), _NOT_FOUND),
    ),
    Route(
        "POST",
        "/cluster/nodes/{name}/undrain",
        "undrain",
        "Return a drained node to service",
        OPERATE,
        answers=((200, "the node takes part again"), _NOT_FOUND),
    ),
    Route(
        "POST",
        "/cluster/nodes/{name}/remove",
        "remove_node",
        "Remove a node permanently and recreate its replicas on other nodes",
        OPERATE,
        (Parameter("force", "true: even if too few nodes are left for all replicas", _TRUTH),),
        answers=((200, "the removal has begun"), _NOT_FOUND, (409, "too few nodes would be left")),
    ),
    Route(
        "POST",
        "/cluster/partitions/{partition}/transfer",
        "transfer",
        "Transfer the leadership of a partition to another replica",
        OPERATE,
        (Parameter("to", "the new leader; any other replica if omitted"),),
        answers=((200, "the current leader"), _NOT_FOUND, (409, "the leadership could not be transferred, and why")),
    ),
    Route(
        "POST",
        "/cluster/partitions/{partition}/snapshot",
        "create_snapshot",
        "Take a snapshot of a partition now, on its leader",
        OPERATE,
        answers=((201, "the snapshot"), _NOT_FOUND, (503, "the snapshot cannot be taken now, and why")),
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
        answers=((200, "`status`: running, succeeded, failed or cancelled"), _NOT_FOUND),
    ),
    Route(
        "DELETE",
        "/cluster/backups/{id}",
        "cancel_backup",
        "Cancel a backup in progress and delete its files",
        OPERATE,
        answers=((200, "the final state of the backup"), _NOT_FOUND),
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
        answers=((200, "the token"), _NOT_FOUND),
    ),
    Route(
        "DELETE",
        "/tokens/{id}",
        "revoke_token",
        "Revoke a token",
        ADMIN,
        answers=((200, "the token is revoked"), _NOT_FOUND),
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
    Route("GET", "/openapi.json", "openapi", "The OpenAPI description of this API", READ),
)
FILTER_NAMES: Final = tuple(parameter.name for parameter in FILTERS)
