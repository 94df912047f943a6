"""Every route of the admin API in one table: its parameters, its answers, and the method that serves it."""

from __future__ import annotations

from typing import Final

from holdfast.cluster.admin.choices import ACTIONS, BULK, BULK_MAX, ORDERS, PAGE, PAGE_MAX, PARTS, STEPS_PAGE, WAITING
from holdfast.cluster.admin.parameters import END_BY_NAME, STATUS_BY_NAME
from holdfast.cluster.admin.routes_of_approvals import OF_APPROVALS
from holdfast.cluster.admin.routes_of_cluster import OF_THE_CLUSTER
from holdfast.cluster.http.routes import NO_SUCH, NUMBER, PUBLIC, TRUTH, Parameter, Route
from holdfast.statemachine.access import APPROVE, OPERATE, READ

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
ROUTES: Final = (
    Route("GET", "/", "page", "The web console", PUBLIC, answers=((200, "HTML"),)),
    Route(
        "GET",
        "/console/{name}",
        "console_file",
        "A file of the console",
        PUBLIC,
        answers=((200, "the file"), (304, "it has not changed"), NO_SUCH),
    ),
    Route(
        "GET",
        "/console/{folder}/{name}",
        "console_folder",
        "A file of the console in a folder",
        PUBLIC,
        answers=((200, "the file"), (304, "it has not changed"), NO_SUCH),
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
        answers=((200, "the deployment"), NO_SUCH),
    ),
    Route(
        "DELETE",
        "/deployments/{id}",
        "remove",
        "Remove a drained deployment, or any deployment by force",
        OPERATE,
        (Parameter("force", "even if invocations run on it", TRUTH),),
        answers=((200, "the deployment is removed"), NO_SUCH, (409, "the deployment is in use: by what")),
    ),
    Route("GET", "/services", "services", "All services, as their newest deployment offers them", READ),
    Route(
        "GET",
        "/services/{name}",
        "service",
        "One service with its handlers",
        READ,
        answers=((200, "the service"), NO_SUCH),
    ),
    Route(
        "GET",
        "/services/{name}/{key}/state",
        "state",
        "The state of one key",
        READ,
        answers=((200, "the state of the key"), NO_SUCH),
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
            NO_SUCH,
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
        answers=((200, "keys; a page with a cursor may be short"), NO_SUCH),
    ),
    Route(
        "GET",
        "/services/{name}/{key}/queue",
        "queue",
        "The invocation that holds a key, and those that wait for it, in their order",
        READ,
        (Parameter("limit", f"how many that wait, up to {PAGE_MAX}; {PAGE} if not given", NUMBER),),
        answers=((200, "them; `more`: there are others behind them"), NO_SUCH),
    ),
    Route(
        "GET",
        "/services/{name}/{key}/promises",
        "promises",
        "The promises of a workflow with their outcomes",
        READ,
        answers=((200, "up to 1000; `more`: there are others"), NO_SUCH),
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
    *OF_APPROVALS,
    Route(
        "GET",
        "/invocations/{id}",
        "invocation",
        "One invocation: its record, why it is not running, its outcome",
        READ,
        answers=((200, "the invocation"), NO_SUCH),
    ),
    Route(
        "GET",
        "/invocations/{id}/journal",
        "journal",
        "The journal of an invocation, decoded",
        READ,
        (Parameter("start", "the first step", NUMBER), Parameter("limit", f"up to {STEPS_PAGE}", NUMBER)),
        answers=((200, "the steps"), NO_SUCH),
    ),
    Route(
        "GET",
        "/invocations/{id}/tree",
        "tree",
        "The tree of calls and sends that an invocation belongs to, with its callers",
        READ,
        answers=((200, "up to 1000 invocations; `complete`: these are all"), NO_SUCH),
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
        answers=((200, "decided"), NO_SUCH, (409, "it is not in doubt")),
    ),
    Route(
        "POST",
        "/invocations/{id}/{action}",
        "act",
        f"Act on an invocation: {', '.join(ACTIONS)}",
        OPERATE,
        _RESTART,
        answers=((200, "done, or nothing to change"), NO_SUCH, (409, "its state does not allow it")),
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
            Parameter("dry_run", "only count the invocations that match, and change nothing", TRUTH),
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
        "Changes of invocations, cluster, deployments and approvals as they happen: server-sent events, which can be resumed",
        READ,
        (
            Parameter(
                "kinds", "of events, separated by commas: invocation, cluster, deployments, approvals; all if not given"
            ),
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
    *OF_THE_CLUSTER,
)
FILTER_NAMES: Final = tuple(parameter.name for parameter in FILTERS)
