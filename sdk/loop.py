"""What our processes run on: uvloop if it is there, with one of its defects repaired; and a garbage collector that keeps out of
the way.

uvloop's `create_connection(sock=...)` takes the socket's descriptor at once, but takes the socket object out of its owner's
hands only after the connection was announced. If the other side resets the connection in between (a proxy whose backend is
down does just that), libuv closes the descriptor, and the socket object, when it is collected, closes it a second time. By then
the number may belong to another connection, whose answers then go to the wrong client. Found by `make demo`:
a client was given another client's answer. https://github.com/MagicStack/uvloop/issues/738 is a part of it.
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
                sock.detach()  # libuv has closed it or will. A second close would hit another connection.
            return transport, protocol

    new_event_loop = _Loop


#: (10,000 containers more than before, five young collections, twenty older ones.) Python's default looks after each 700
#: containers, and a message of 60,000 lists is parsed in 20 ms with it, in 14 ms with this.
COLLECTOR_THRESHOLDS = (10_000, 5, 20)


def calm_collector() -> None:
    """Call it once, when the process has loaded and opened everything.

    What is there by then stays for good. The 55,000 containers of a node's modules took 57 ms of every full collection (Python
    3.11, a slow core), in which nothing else happens; frozen, they take none. A million containers that come later take 120 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
