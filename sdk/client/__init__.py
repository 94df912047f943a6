"""A client of the ingress: call, send, attach and resolve from programs that are not handlers.

Every call and send carries an idempotency key, a random one if the caller gives none. A retry after a broken connection
or from a busy node therefore finds the first request instead of starting a second invocation.

`requests` builds requests and interprets answers, without I/O. `asynchronous` has `Client`, and `synchronous` has
`SyncClient`, which is generated from it. Each sends through a transport of its own.
"""

from holdfast.sdk.client.asynchronous import Client
from holdfast.sdk.client.errors import CallFailed, CallTimedOut, InvocationPaused, NotReady, Unreachable
from holdfast.sdk.client.requests import SendHandle
from holdfast.sdk.client.synchronous import SyncClient

__all__ = [
    "CallFailed",
    "CallTimedOut",
    "Client",
    "InvocationPaused",
    "NotReady",
    "SendHandle",
    "SyncClient",
    "Unreachable",
]
