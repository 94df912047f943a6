"""The socket of the admin API."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final

from aiohttp import web

from holdfast.cluster.admin.app import Admin
from holdfast.cluster.config import Config
from holdfast.cluster.http import descriptors
from holdfast.cluster.http.doors import Door

ANSWER_S: Final = 2.0  # How long clients of a node that stops get to take their last answers.


class AdminServer:
    def __init__(self, config: Config, admin: Admin) -> None:
        self._config = config
        self._admin = admin
        self._runner: web.AppRunner | None = None
        self._door: Door | None = None

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """At the configured place, or through sockets that listen there already."""
        app = self._admin.application()
        app.on_response_prepare.append(self._last_answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=ANSWER_S, auto_decompress=False)
        await self._runner.setup()
        assert self._runner.server is not None
        door = Door(self._runner.server, connections_max=descriptors.for_admin(), source="admin")
        await door.open(self._config.admin, sockets)
        self._door = door

    async def _last_answer(self, request: web.Request, response: web.StreamResponse) -> None:
        if self._door is None or self._door.leaving:
            response.force_close()

    @property
    def port(self) -> int:
        assert self._door is not None, "started"
        return self._door.port

    def leave(self) -> None:
        """Close connections after their next answer, or when nothing comes from them. New ones are still let in."""
        if self._door is not None:
            self._door.leave()

    async def stop(self) -> None:
        """Nothing to do if it never started."""
        if self._door is not None:
            await self._door.finish(ANSWER_S)
        if self._runner is not None:
            if self._door is not None:
                await self._door.close(self._runner.cleanup)
            else:
                await self._runner.cleanup()
