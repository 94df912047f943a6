"""Start an invocation over the admin API: what the ingress does at /send, for the console, which may not reach the ingress.

A browser lets a page of the admin API send requests only to the admin API. Nothing is decided here: the ingress checks the
target, mints the id and proposes, so both ways have the same bounds and errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from holdfast.cluster.admin.parameters import AdminRequest, Parameters, read_body, read_size
from holdfast.cluster.admin.shapes.invocations import NewInvocation
from holdfast.cluster.admin.views import read_payload
from holdfast.cluster.errors import BadRequest
from holdfast.cluster.http.exchange import JSON, Answer
from holdfast.cluster.ingress.ingress import Ingress
from holdfast.cluster.ingress.requests import Sent

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE: Final = re.compile(r"[\t -~\xa0-\U0010ffff]*")
_IDEMPOTENCY_KEY: Final = "Idempotency-Key"


class InvokingAdmin:
    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress

    async def on_invoke(self, request: AdminRequest) -> Answer:
        Parameters(request)
        given = await read_body(request, NewInvocation, payloads=True)
        sent = _read(given)
        request.note(service=sent.service, handler=sent.handler, **({} if sent.key is None else {"key": sent.key}))
        try:
            return await self._ingress.send(request.request, sent)
        finally:
            if request.request.id is not None:
                request.note(id=request.request.id)


def _read(given: Mapping[str, Any]) -> Sent:
    service, handler = (_text(given, name) for name in ("service", "handler"))
    if service is None or handler is None:
        raise BadRequest(
            '"service" and "handler" are needed',
            'send JSON as in {"service": "greeter", "handler": "greet", "input": 1}',
        )
    has_input = "input" in given
    headers = _headers(given.get("headers", {}))
    if has_input:
        headers.setdefault("content-type", JSON)
    idempotency_key = _text(given, "idempotency_key")
    if idempotency_key is not None:
        headers[_IDEMPOTENCY_KEY] = idempotency_key
    payload = read_payload(given["input"]) if has_input else b""
    return Sent(
        service=service,
        handler=handler,
        key=_text(given, "key"),
        payload=payload,
        headers=headers,
        delay=_text(given, "delay"),
    )


def _text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not read_size(value):
        raise BadRequest(f'"{name}" must be a text of valid Unicode that is not empty')
    return value


def _headers(given: Any) -> dict[str, str]:
    """By their names in lower case."""
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise BadRequest('"headers" must be an object of texts')
    headers: dict[str, str] = {}
    for name, value in given.items():
        if not _HEADER_NAME.fullmatch(name):
            raise BadRequest(f"{json.dumps(name):.60} is not the name of a header of HTTP")
        if not _HEADER_VALUE.fullmatch(value) or not read_size(value + "."):
            raise BadRequest(
                f"the value of header {json.dumps(name):.60} must be valid Unicode without line breaks and control characters"
            )
        if name.lower() == _IDEMPOTENCY_KEY.lower():
            raise BadRequest('give the Idempotency-Key as "idempotency_key"')
        if name.lower() in headers:
            raise BadRequest(f"header {json.dumps(name):.60} is given twice", "names differ by more than their case")
        headers[name.lower()] = value
    return headers
