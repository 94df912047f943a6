"""Listens in place of a node that cannot serve yet, and reports the reason to clients, operators and health probes.

A node that waits for its founders, or to be added, may wait for long. Until it can serve, every request is answered 503
with the reason, except that the admin port serves the metrics that exist already; then the real doors open in the same places.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, TypeAlias

from aiohttp import web

from holdfast.cluster.certificates import Certificates
from holdfast.cluster.config import Config
from holdfast.cluster.errors import Circumstance, error_body
from holdfast.cluster.http import descriptors
from holdfast.cluster.http.browsers import ADMIN, INGRESS, Browsers
from holdfast.cluster.http.doors import Door

ANSWER_S: Final = 1.0
Scrape: TypeAlias = Callable[[Mapping[str, str]], Awaitable[tuple[bytes, str]]]


class NotServing:
    def __init__(self, config: Config, certificates: Certificates, why: Callable[[], str], scrape: Scrape) -> None:
        """`scrape` answers a request for metrics with these headers."""
        self._scrape = scrape
        self._config = config
        self._certificates = certificates
        self._why = why
        self._doors: dict[str, Door] = {}

    async def start(self) -> None:
        most = descriptors.for_admin()
        share = descriptors.for_one_address(most, self._config.connections_per_address_max)
        for name, place in ((ADMIN, self._config.admin), (INGRESS, self._config.ingress)):
            server = web.Server(partial(self._answer, Browsers(self._config, name), name), access_log=None)
            tls = self._certificates.door(name)
            door = Door(server, connections_max=most, per_address_max=share, tls=tls)
            with suppress(OSError):  # The real door will report the error.
                await door.open(place)
                self._doors[name] = door

    @property
    def ports(self) -> list[int]:
        return [door.port for door in self._doors.values()]

    def relieve(self, name: str) -> list[socket.socket]:
        """The listening sockets of a door, for the real door: the address is never closed in between."""
        door = self._doors.get(name)
        if door is None:
            return []
        sockets = door.pass_on()
        door.leave()
        return sockets

    async def stop(self) -> None:
        """Every accepted connection gets an answer."""
        doors, self._doors = self._doors, {}
        await asyncio.gather(*(door.finish(ANSWER_S) for door in doors.values()))
        for door in doors.values():
            await door.close()

    async def _answer(self, browsers: Browsers, door: str, request: web.BaseRequest) -> web.Response:
        headers = {**browsers.headers, "Retry-After": "1"}
        status, why, hint = 503, "", "try another node, or retry later"
        try:
            browsers.check(request.method, request.raw_path, request.headers)
            if door == ADMIN and request.method == "GET" and request.path == "/metrics":
                text, content_type = await self._scrape(request.headers)
                found = web.Response(body=text, headers={**browsers.headers, "Content-Type": content_type})
                found.force_close()
                return found
            why = self._why()
        except Circumstance as error:
            status, why, hint = error.status, error.message, error.hint or ""
        body = error_body(status, why, source="node", hint=hint or None)
        response = web.Response(status=status, body=body, content_type="application/json", headers=headers)
        response.force_close()
        return response
