"""Stands at the doors of a node that cannot serve yet, and says why: to clients, to operators, to whoever probes its health.

A node that waits for its founders, or for being added, may wait for long. Until it can serve, every request is answered 503
with the reason; then the real doors open in the same places.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from aiohttp import web

from holdfast.cluster.config import Config
from holdfast.cluster.errors import error_body
from holdfast.cluster.http import descriptors
from holdfast.cluster.http.doors import Door

ANSWER_S: Final = 1.0


class Doorman:
    def __init__(self, config: Config, why: Callable[[], str]) -> None:
        self._config = config
        self._why = why
        self._doors: dict[str, Door] = {}
        self._server: web.Server | None = None

    async def start(self) -> None:
        self._server = web.Server(self._answer, access_log=None)
        for name, place in (("admin", self._config.admin), ("ingress", self._config.ingress)):
            door = Door(self._server, connections_max=descriptors.for_admin())
            with suppress(OSError):  # Whoever opens the door in earnest finds out, and says it.
                await door.open(place)
                self._doors[name] = door

    @property
    def ports(self) -> list[int]:
        return [door.port for door in self._doors.values()]

    def relieve(self, name: str) -> list[socket.socket]:
        """The sockets that listen at a door, for whoever takes it over: nobody finds it closed in between."""
        door = self._doors.get(name)
        if door is None:
            return []
        sockets = door.pass_on()
        door.leave()
        return sockets

    async def stop(self) -> None:
        """Whoever was let in here gets an answer."""
        doors, self._doors = self._doors, {}
        await asyncio.gather(*(door.finish(ANSWER_S) for door in doors.values()))
        for door in doors.values():
            await door.close()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        body = error_body(503, self._why(), source="node", hint="try another node, or again in a while")
        response = web.Response(status=503, body=body, content_type="application/json", headers={"Retry-After": "1"})
        response.force_close()
        return response
