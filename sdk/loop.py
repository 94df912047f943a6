"""The event loop and garbage collector of our processes: uvloop if it is installed, with a workaround for one of its
defects, and a garbage collector that rarely interrupts.

uvloop's `create_connection(sock=...)` uses the socket's descriptor at once, but detaches the socket object from its
owner only after announcing the connection. If the other side resets the connection in between (as a proxy whose backend
is down does), libuv closes the descriptor, and the socket object closes it a second time when it is collected. By then
the number may belong to another connection, whose answers then go to the wrong client. Found by `make demo`: a client
received another client's answer. https://github.com/MagicStack/uvloop/issues/738 is related.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

try:
    import uvloop
except ImportError:  # Not on every platform.
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
else:

    class _Loop(uvloop.Loop):
        async def create_connection(self, *args: Any, sock: Any = None, **options: Any) -> Any:
            if sock is None:
                return await super().create_connection(*args, **options)
            made: Any = await super().create_connection(*args, sock=sock, **options)
            transport, protocol = made
            if transport.is_closing():
                sock.detach()  # libuv has closed it or will close it. A second close would hit another connection.
            return transport, protocol

    new_event_loop = _Loop


#: (10,000 containers more than before, five young collections, twenty older ones.) Python's default collects after
#: every 700 containers. Parsing a message of 60,000 lists takes 20 ms with the default and 14 ms with this.
COLLECTOR_THRESHOLDS = (10_000, 5, 20)


def calm_collector() -> None:
    """Call it once, after the process has loaded and opened everything.

    Existing objects are exempt from collection from then on. The 55,000 containers of a node's modules took 57 ms of
    every full collection (Python 3.11, a slow core), which blocks everything else; frozen, they take none. A million
    containers created later take 120 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
