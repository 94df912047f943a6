"""Every route of the admin API in one table: its parameters, its answers, and the method that serves it."""

from __future__ import annotations

from typing import Final

from holdfast.cluster.admin.choices import (
    BULK,
    BULK_MAX,
    FAILURE_CODE_MAX,
    FILE_TYPES,
    ORDERS,
    PAGE,
    PAGE_MAX,
    PARTS,
    STEP_MAX,
    STEPS_PAGE,
    WAITING,
)
from holdfast.cluster.admin.parameters import END_BY_NAME, STATUS_BY_NAME
from holdfast.cluster.admin.routes_of_approvals import OF_APPROVALS
from holdfast.cluster.admin.routes_of_cluster import OF_THE_CLUSTER
from holdfast.cluster.admin.shapes.access import Session, SignedOut, SignIn
from holdfast.cluster.admin.shapes.deployments import (
    Deployment,
    DeploymentRemoved,
    Deployments,
    Registration,
    Service,
    Services,
)
from holdfast.cluster.admin.shapes.invocations import (
    ActionDone,
    BulkDone,
    Decided,
    Decision,
    Invocation,
    InvocationPage,
    Journal,
    NewInvocation,
    Statistics,
    Tree,
    WaitPage,
)
from holdfast.cluster.admin.shapes.objects import KeyPage, Promises, Queue, State, StateEdit
from holdfast.cluster.admin.shapes.webhooks import Hello, Notice
from holdfast.cluster.http.routes import NO_SUCH, PUBLIC, TRUTH, EventStream, Parameter, Raw, Route, number
from holdfast.cluster.http.shapes import Health
from holdfast.cluster.ingress.shapes import Accepted
from holdfast.cluster.partition.views import Event
from holdfast.cluster.registry.views import ShownPreview
from holdfast.statemachine.access import APPROVE, INVOKE, OPERATE, READ

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
    Parameter(
        "failure_code",
        "ended with a failure of this code, or active with it as the last failure",
        number(1, FAILURE_CODE_MAX),
    ),
    Parameter("failure", "this text is in the message or kind of that failure, in upper or lower case"),
    Parameter("parent", "called or sent by the invocation with this id"),
    Parameter("root", "the invocation with this id, and all that were called or sent below it"),
    Parameter("tag", "with this tag: tenant=acme; several of them, each as a parameter of its own, must all be there"),
    Parameter("completed_since", "completed at or after this time, or a duration before now"),
    Parameter("completed_until", "completed before this time, or a duration before now"),
)
_RESTART: Final = (
    Parameter("step", "restart: keep the steps before this one; 0 keeps only the input", number(0, STEP_MAX)),
    Parameter("to", "resume, restart: continue on this deployment; `newest` is the one that receives new invocations"),
)
_VALUE: Final = (
    Raw("application/json", "the value, if it is JSON"),
    Raw("application/octet-stream", "any other value", {"type": "string", "format": "binary"}),
)
_FILE: Final = tuple(Raw(kind, schema={"type": "string"}) for kind in FILE_TYPES)
_EVENTS: Final = EventStream({
    "hello": Hello,
    "invocation": Event,
    "cluster": Notice,
    "deployments": Notice,
    "approvals": Notice,
    "reset": Notice,
})  # fmt: skip
ROUTES: Final = (
    Route(
        "GET",
        "/",
        "page",
        "The web console",
        PUBLIC,
        answers=((200, "HTML", Raw("text/html", schema={"type": "string"})), (304, "it has not changed")),
    ),
    Route(
        "GET",
        "/console/{name}",
        "console_file",
        "A file of the console",
        PUBLIC,
        answers=((200, "the file", _FILE), (304, "it has not changed"), NO_SUCH),
    ),
    Route(
        "GET",
        "/console/{folder}/{name}",
        "console_folder",
        "A file of the console in a folder",
        PUBLIC,
        answers=((200, "the file", _FILE), (304, "it has not changed"), NO_SUCH),
    ),
    Route(
        "GET",
        "/session",
        "session",
        "Who sends this request, by token or by cookie",
        PUBLIC,
        answers=((200, "the sender, and what it may do", Session),),
    ),
    Route(
        "GET",
        "/console/{version}/{folder}/{name}",
        "console_version",
        "A file of the console, which browsers keep: its address changes with its content",
        PUBLIC,
        answers=((200, "the file", _FILE), (304, "it has not changed"), NO_SUCH),
    ),
    Route(
        "POST",
        "/session",
        "sign_in",
        "Sign in: the answer sets a cookie that stands for the token until it expires",
        PUBLIC,
        body=SignIn,
        answers=((200, "signed in", Session), (401, "the token is not valid"), (409, "this node asks for no tokens")),
    ),
    Route(
        "DELETE",
        "/session",
        "sign_out",
        "Sign out: the cookie is not accepted any more",
        PUBLIC,
        answers=((200, "signed out", SignedOut),),
    ),
    Route(
        "GET",
        "/health",
        "health",
        "Whether this node can serve requests",
        PUBLIC,
        answers=(
            (200, "the node can serve requests; `warnings` if there are any", Health),
            (503, "the node cannot serve requests; the body has the reason"),
        ),
    ),
    Route(
        "POST",
        "/deployments",
        "register",
        "Register the endpoint at a URI and discover its services",
        OPERATE,
        body=Registration,
        answers=(
            (201, "registered", Deployment),
            (
                200,
                "it is already registered with this manifest; or the differences, of a dry run",
                (Deployment, ShownPreview),
            ),
            (400, "the manifest is wrong, and where; or the nodes may not connect to that address"),
            (409, "it would break callers or change a deployment: `details` says how"),
            (502, "no endpoint answers there; only a token with the role admin is told why"),
        ),
    ),
    Route(
        "GET",
        "/deployments",
        "deployments",
        "All deployments, with the invocations in flight on each",
        READ,
        answers=((200, "the deployments, the newest first", Deployments),),
    ),
    Route(
        "GET",
        "/deployments/{id}",
        "deployment",
        "One deployment with its handlers",
        READ,
        answers=((200, "the deployment", Deployment), NO_SUCH),
    ),
    Route(
        "DELETE",
        "/deployments/{id}",
        "remove",
        "Remove a drained deployment, or any deployment by force",
        OPERATE,
        (Parameter("force", "even if invocations run on it", TRUTH),),
        answers=(
            (200, "the deployment is removed", DeploymentRemoved),
            NO_SUCH,
            (409, "the deployment is in use: by what"),
        ),
    ),
    Route(
        "GET",
        "/services",
        "services",
        "All services, as their newest deployment offers them",
        READ,
        answers=((200, "the services", Services),),
    ),
    Route(
        "GET",
        "/services/{name}",
        "service",
        "One service with its handlers",
        READ,
        answers=((200, "the service", Service), NO_SUCH),
    ),
    Route(
        "GET",
        "/services/{name}/{key}/state",
        "state",
        "The state of one key",
        READ,
        answers=((200, "the state of the key", State), NO_SUCH),
    ),
    Route(
        "PUT",
        "/services/{name}/{key}/state",
        "set_state",
        "Edit the state of a key while no handler holds it",
        OPERATE,
        body=StateEdit,
        answers=(
            (200, "the current state", State),
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
            Parameter("limit", "rows of the page", number(1, PAGE_MAX, PAGE)),
            Parameter("cursor", "cursor from the previous page"),
        ),
        answers=((200, "keys; a page with a cursor may be short", KeyPage), NO_SUCH),
    ),
    Route(
        "GET",
        "/services/{name}/{key}/queue",
        "queue",
        "The invocation that holds a key, and those that wait for it, in their order",
        READ,
        (Parameter("limit", "how many that wait", number(1, PAGE_MAX, PAGE)),),
        answers=((200, "them; `more`: there are others behind them", Queue), NO_SUCH),
    ),
    Route(
        "GET",
        "/services/{name}/{key}/promises",
        "promises",
        "The promises of a workflow with their outcomes",
        READ,
        answers=((200, "up to 1000; `more`: there are others", Promises), NO_SUCH),
    ),
    Route(
        "GET",
        "/statistics",
        "statistics",
        "Counts of invocations by service and status, and totals since the start; from counters, without a scan",
        READ,
        answers=((200, "the counts", Statistics),),
    ),
    Route(
        "GET",
        "/invocations",
        "invocations",
        "Invocations that match every filter, in pages; a page with a cursor may be short, and `looked_at` is how many it "
        "examined",
        READ,
        (
            *FILTERS,
            Parameter(
                "order",
                "newest (first, the default) or oldest by creation; or completed: completed ones alone, the last one first",
                {"type": "string", "enum": list(ORDERS)},
            ),
            Parameter("limit", "rows of the page", number(1, PAGE_MAX, PAGE)),
            Parameter("cursor", "cursor from the previous page"),
        ),
        answers=((200, "the page", InvocationPage),),
    ),
    Route(
        "POST",
        "/invocations",
        "invoke",
        "Start an invocation without waiting for it, as /send of the ingress does",
        INVOKE,
        body=NewInvocation,
        answers=(
            (202, "it is accepted", Accepted),
            (403, "the handler is private, or the token is for other services"),
            (404, "there is no such service or handler"),
            (422, "the idempotency key was used for another input"),
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
            Parameter("limit", "rows of the page", number(1, PAGE_MAX, PAGE)),
            Parameter("cursor", "cursor from the previous page"),
        ),
        answers=((200, "rows; the ids of awakeables are for tokens that may invoke all services", WaitPage),),
    ),
    *OF_APPROVALS,
    Route(
        "GET",
        "/invocations/{id}",
        "invocation",
        "One invocation: its record, why it is not running, its outcome",
        READ,
        answers=((200, "the invocation", Invocation), NO_SUCH),
    ),
    Route(
        "GET",
        "/invocations/{id}/journal",
        "journal",
        "The journal of an invocation, decoded",
        READ,
        (
            Parameter("start", "the first step", number(0, STEP_MAX, 0)),
            Parameter("limit", "steps of the page", number(1, STEPS_PAGE, STEPS_PAGE)),
        ),
        answers=((200, "the steps", Journal), NO_SUCH),
    ),
    Route(
        "GET",
        "/invocations/{id}/tree",
        "tree",
        "The tree of calls and sends that an invocation belongs to, with its callers",
        READ,
        answers=((200, "up to 1000 invocations; `complete`: these are all", Tree), NO_SUCH),
    ),
    Route(
        "GET",
        "/invocations/{id}/steps/{step}/value",
        "step_value",
        "The whole value of a step, or of the outcome of the invocation (step `outcome`), up to 32 MiB",
        READ,
        (Parameter("part", "output (the default), or input", {"type": "string", "enum": list(PARTS)}),),
        answers=(
            (200, "its bytes: application/json if they are JSON", _VALUE),
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
        body=Decision,
        answers=((200, "decided", Decided), NO_SUCH, (409, "it is not in doubt")),
    ),
    Route(
        "POST",
        "/invocations/{id}/{action}",
        "act",
        "Act on an invocation",
        OPERATE,
        _RESTART,
        answers=((200, "done, or nothing to change", ActionDone), NO_SUCH, (409, "its state does not allow it")),
    ),
    Route(
        "POST",
        "/invocations/{action}",
        "act_on_many",
        "Act on all invocations that match; at least one filter is needed",
        OPERATE,
        (
            *FILTERS,
            *_RESTART,
            Parameter("limit", "at most this many", number(1, BULK_MAX, BULK)),
            Parameter("dry_run", "only count the invocations that match, and change nothing", TRUTH),
        ),
        answers=(
            (200, "how many invocations matched and changed; `more`: there may be others, so send it again", BulkDone),
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
            (200, "text/event-stream, without an end", _EVENTS),
            (503, "too many streams are open on this node, or it is stopping"),
        ),
    ),
    *OF_THE_CLUSTER,
)
FILTER_NAMES: Final = tuple(parameter.name for parameter in FILTERS)
