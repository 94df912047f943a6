"""Sends the requests of `Client`, with aiohttp."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from typing import TypeVar

import aiohttp

from holdfast.sdk.client.requests import Again, Request, Requests, seconds, timed_out, unreachable
from holdfast.sdk.client.retries import Pauses
from holdfast.sdk.client.trust import context_for, is_distrust

T = TypeVar("T")


class Transport:
    """The connections of one client. A session that the user passes in is the user's to close."""

    def __init__(
        self,
        requests: Requests,
        retry_for: float,
        ca: str | os.PathLike[str] | None,
        session: aiohttp.ClientSession | None,
    ) -> None:
        if ca is not None and session is not None:
            raise ValueError("ca is for connections that the client makes: give the session a connector that trusts it")
        self._trust = context_for(ca)
        self._requests = requests
        self._retry_for = retry_for
        self._session = session
        self._owns_session = session is None

    async def close(self) -> None:
        if self._session is not None and self._owns_session:
            await self._session.close()
            self._session = None

    async def ask(self, request: Request[T], timeout: float | timedelta | None = None) -> T:
        """The value of the answer, after as many tries as needed. Raises `CallFailed`."""
        if timeout is None:
            return await self._ask(request)
        try:
            async with asyncio.timeout(seconds(timeout)) as limit:
                return await self._ask(request)
        except TimeoutError:
            if not limit.expired():
                raise
            raise timed_out(request, timeout) from None

    async def _ask(self, request: Request[T]) -> T:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                connector=aiohttp.TCPConnector(limit=0, ssl=self._trust or True),
            )
        pauses = Pauses(self._retry_for, self._requests)
        while True:
            pauses.begin()
            address = self._requests.address
            try:
                async with self._session.request(
                    request.method,
                    address.url + request.path,
                    data=request.body or None,
                    headers=request.headers,
                    allow_redirects=False,  # The token is for this address alone, and a POST would become a GET.
                ) as response:
                    body = await response.read()
                return self._requests.answer(request, response.status, response.headers, body)
            except Again as again:
                pause = pauses.next(again.after, again.error, address if again.elsewhere else None)
            except (aiohttp.ClientError, OSError) as error:
                pause = pauses.next(0, unreachable(address, error), address, hopeless=is_distrust(error))
            await asyncio.sleep(pause)
