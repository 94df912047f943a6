"""The ingress as an OpenAPI document: its own routes, and one operation per handler, from the schemas of its manifest.

Clients can be generated from it. Schemas may be large, so the document is made in a thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from holdfast import __version__
from holdfast.cluster.http.routes import Parameter, Route, document, operation, paths_of
from holdfast.cluster.ingress.routes import DELAY, ROUTES
from holdfast.sdk.tags import TAGS_HEADER
from holdfast.statemachine.access import INVOKE
from holdfast.statemachine.meta import Handler, Service

_KEY: Final = "/{key}"
_HEADER: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "requests with the same key are one invocation",
    "schema": {"type": "string"},
}
_TAGS: Final = {
    "name": TAGS_HEADER,
    "in": "header",
    "description": "tags by which the invocation is found: tenant=acme,order=17, with percent-encoded values",
    "schema": {"type": "string"},
}
_ACCEPTED: Final = {
    "type": "object",
    "required": ["invocationId", "status"],
    "properties": {
        "invocationId": {"type": "string"},
        "status": {"type": "string", "enum": ["Accepted", "PreviouslyAccepted"]},
    },
}
_ID: Final = {"description": "the id of the invocation", "schema": {"type": "string"}}


def openapi(services: Iterable[Service]) -> dict[str, Any]:
    paths, schemas = paths_of(ROUTES), dict[str, Any]()
    for service in services:
        for handler in service.handlers:
            if {**service.options, **handler.options}.get("private", False):
                continue
            path = f"/{service.name}{'' if service.kind == 'service' else _KEY}/{handler.name}"
            paths[path] = {"post": _call(service, handler, path, schemas)}
            paths[f"{path}/send"] = {"post": _send(service, handler, f"{path}/send", schemas)}
    return document("Holdfast ingress", __version__, paths, schemas)


def _call(service: Service, handler: Handler, path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    found = _begin(service, handler, path, schemas, send=False)
    schema = _schema(f"{service.name}.{handler.name}.output", handler.output_schema, schemas)
    found["responses"]["200"] = {
        "description": "the result",
        "headers": {"x-holdfast-id": _ID},
        "content": {handler.output_type: {"schema": schema}},
    }
    return found


def _send(service: Service, handler: Handler, path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    found = _begin(service, handler, path, schemas, send=True)
    del found["responses"]["200"]
    found["responses"]["202"] = {
        "description": "it is accepted",
        "headers": {"x-holdfast-id": _ID},
        "content": {"application/json": {"schema": _ACCEPTED}},
    }
    return found


def _begin(service: Service, handler: Handler, path: str, schemas: dict[str, Any], *, send: bool) -> dict[str, Any]:
    what = f"{service.name}/{handler.name}"
    summary = f"Start {what} and do not wait" if send else f"Call {what} and wait for its result"
    delays: tuple[Parameter, ...] = (DELAY,) if send else ()
    name = f"{service.name}.{handler.name}{'.send' if send else ''}"
    found = operation(Route("POST", path, name, summary, role=INVOKE, parameters=delays))
    if handler.doc:
        found["description"] = handler.doc
    found["tags"] = [service.name]
    found["parameters"] += [_HEADER, _TAGS]
    schema = _schema(f"{service.name}.{handler.name}.input", handler.input_schema, schemas)
    found["requestBody"] = {"content": {handler.input_type: {"schema": schema}}}
    return found


def _schema(name: str, text: str | None, schemas: dict[str, Any]) -> dict[str, Any]:
    """A reference to the schema, which is added to those of the document. References inside it stay inside it."""
    if text is None:
        return {}
    if name not in schemas:
        schemas[name] = _moved(json.loads(text), f"#/components/schemas/{name}")
    return {"$ref": f"#/components/schemas/{name}"}


def _moved(value: Any, to: str) -> Any:
    """The nesting of a manifest is bounded (`sdk.bounds`)."""
    if isinstance(value, list):
        return [_moved(each, to) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: to + each.removeprefix("#")
        if key == "$ref" and isinstance(each, str) and each.startswith("#")
        else _moved(each, to)
        for key, each in value.items()
    }
