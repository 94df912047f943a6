"""The SDK, which runs in a user's process: services and their context, the endpoint that nodes connect to, and a
client.

It imports no other room. The names below are public; docs/protocol.md specifies the protocol between node and SDK.
"""

from holdfast.sdk.approvals import Approval, Decision
from holdfast.sdk.asgi import endpoint
from holdfast.sdk.attempt import Operation
from holdfast.sdk.client import (
    CallFailed,
    CallTimedOut,
    Client,
    InvocationPaused,
    NotReady,
    SendHandle,
    SyncClient,
    Unreachable,
)
from holdfast.sdk.combinators import Selected, Settled
from holdfast.sdk.context import Awakeable, Context, Sent
from holdfast.sdk.definition import ServiceRef
from holdfast.sdk.errors import (
    AttemptEnded,
    BadDefinition,
    BadPayload,
    HoldfastError,
    InvocationCancelled,
    JournalTooLong,
    MisusedContext,
    NonDeterminismError,
    RetriesExhausted,
    RetryableError,
    RunAgain,
    TerminalError,
)
from holdfast.sdk.here import current_context
from holdfast.sdk.keyed import ObjectContext, WorkflowContext
from holdfast.sdk.policy import RetryPolicy
from holdfast.sdk.promises import DurablePromise
from holdfast.sdk.run import current_step
from holdfast.sdk.serde import RAW_JSON, JsonSerde, Serde, TypeSerde
from holdfast.sdk.server import Server, serve, serve_async
from holdfast.sdk.service import Service, VirtualObject, Workflow
from holdfast.sdk.tools import durable_tool

assert __name__ == "holdfast.sdk", f"import holdfast.sdk, not {__name__}"

__all__ = [
    "RAW_JSON", "Approval", "AttemptEnded", "Awakeable", "BadDefinition", "BadPayload", "CallFailed", "CallTimedOut",
    "Client", "Context", "Decision", "DurablePromise", "HoldfastError", "InvocationCancelled", "InvocationPaused",
    "JournalTooLong", "JsonSerde", "MisusedContext", "NonDeterminismError", "NotReady", "ObjectContext", "Operation",
    "RetriesExhausted", "RetryPolicy", "RetryableError", "RunAgain", "Selected", "SendHandle", "Sent", "Serde",
    "Server", "Service", "ServiceRef", "Settled", "SyncClient", "TerminalError", "TypeSerde", "Unreachable",
    "VirtualObject", "Workflow", "WorkflowContext", "current_context", "current_step", "durable_tool", "endpoint",
    "serve", "serve_async",
]  # fmt: skip
