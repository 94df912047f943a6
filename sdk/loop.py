"""The event loop of our processes: uvloop if it is there, with one of its defects repaired.

uvloop's `create_connection(sock=...)` takes the socket's descriptor at once, but takes the socket object out of its owner's
hands only after the connection was announced. If the other side resets the connection in between (a proxy whose backend is
down does just that), libuv closes the descriptor, and the socket object, when it is collected, closes it a second time. By then
the number may belong to somebody else's connection, whose answers then go to a stranger. Found by `make demo`:
a client was given another client's answer. https://github.com/MagicStack/uvloop/issues/738 is a part of it.
"""

from __future__ import annotations

import asyncio
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
                sock.detach()  # libuv has closed it, or will; nobody else may.
            return transport, protocol

    new_event_loop = _Loop
