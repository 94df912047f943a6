"""The life of a node in this process: it is started, and stopped in order on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.cluster.config import Config
    from holdfast.cluster.node import Node


@contextlib.asynccontextmanager
async def running(config: Config, *, closed: str = "") -> AsyncIterator[Node]:
    """A started node, stopped at the end. `closed`: why its ingress accepts no requests yet."""
    from holdfast.cluster.http.descriptors import raise_limit
    from holdfast.cluster.node import Node
    from holdfast.cluster.observe.core_dumps import forbid_core_dumps
    from holdfast.sdk.loop import calm_collector

    if config.core_dumps == "off":
        forbid_core_dumps()
    raise_limit()
    node = Node(config)
    node.closed = closed
    await node.start()
    calm_collector()
    try:
        yield node
    finally:
        await node.stop()


async def until_signalled() -> None:
    """Wait for SIGTERM or Ctrl-C."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    try:
        await told.wait()
    finally:
        # A second Ctrl-C ends the process at once: everything acknowledged is on disk.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
