"""Sends the requests of `SyncClient`, with http.client and without an event loop."""

from __future__ import annotations

import http.client
import os
import ssl
import threading
import time
from datetime import timedelta
from typing import Any, TypeVar

from holdfast.sdk.client.requests import Address, Again, Request, Requests, seconds, timed_out, unreachable
from holdfast.sdk.client.retries import Pauses
from holdfast.sdk.client.trust import context_for, is_distrust

T = TypeVar("T")


class Transport:
    """The connections of one client. Threads may share it: each request takes a connection for itself."""

    def __init__(self, requests: Requests, retry_for: float, ca: str | os.PathLike[str] | None) -> None:
        self._trust = context_for(ca)
        self._requests = requests
        self._retry_for = retry_for
        self._idle: list[tuple[Address, http.client.HTTPConnection]] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def ask(self, request: Request[T], timeout: float | timedelta | None = None) -> T:
        """The value of the answer, after as many tries as needed. Raises `CallFailed`."""
        pauses = Pauses(self._retry_for, self._requests)
        deadline = None if timeout is None else time.monotonic() + seconds(timeout)
        while True:
            pauses.begin()
            address = self._requests.address
            try:
                status, headers, body = self._exchange(address, request, deadline)
                return self._requests.answer(request, status, headers, body)
            except Again as again:
                pause = pauses.next(again.after, again.error, address if again.elsewhere else None)
            except (http.client.HTTPException, OSError) as error:
                if deadline is not None and time.monotonic() >= deadline:
                    raise timed_out(request, timeout) from None
                pause = pauses.next(0, unreachable(address, error), address, hopeless=is_distrust(error))
            if deadline is not None and time.monotonic() + pause >= deadline:
                time.sleep(max(deadline - time.monotonic(), 0))
                raise timed_out(request, timeout)
            time.sleep(pause)

    def _exchange(
        self, address: Address, request: Request[Any], deadline: float | None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Status, headers and body of the answer. The connection is used again unless the exchange failed."""
        connection = self._take(address)
        try:
            _limit(connection, deadline)
            connection.request(
                request.method,
                address.prefix + request.path,
                body=request.body or None,
                headers={**request.headers, **({} if request.body else {"Content-Length": "0"})},
            )
            response = connection.getresponse()
            body = response.read()
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append((address, connection))
        return response.status, response.headers, body

    def _take(self, address: Address) -> http.client.HTTPConnection:
        with self._lock:
            for offset, (where, connection) in enumerate(self._idle):
                if where is address:
                    del self._idle[offset]
                    return connection
        if address.scheme == "https":
            with self._lock:
                if self._trust is None:
                    self._trust = ssl.create_default_context()
            return http.client.HTTPSConnection(address.host, address.port, context=self._trust)
        return http.client.HTTPConnection(address.host, address.port)


def _limit(connection: http.client.HTTPConnection, deadline: float | None) -> None:
    """Set the time limit of the connection to `deadline`. None removes the limit of an earlier request."""
    left = None if deadline is None else max(deadline - time.monotonic(), 0.001)
    connection.timeout = left
    if connection.sock is not None:
        connection.sock.settimeout(left)
