"""The ingress as an OpenAPI document: its own routes, and one operation per handler, from the schemas of its manifest.

Clients can be generated from it. Schemas may be large, so the document is made in a thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from holdfast import __version__
from holdfast.cluster.http.routes import Parameter, Route, document, operation, paths_of
from holdfast.cluster.ingress.routes import DELAY, ROUTES
from holdfast.cluster.ingress.shapes import Accepted
from holdfast.cluster.schemas import REFERENCE, Components, schema_of
from holdfast.statemachine.access import INVOKE
from holdfast.statemachine.meta import Handler, Service

_KEY: Final = "/{key}"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")  # that a component may have
_HEADER: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "requests with the same key are one invocation",
    "schema": {"type": "string"},
}
_ID: Final = {"description": "the id of the invocation", "schema": {"type": "string"}}


def openapi(services: Iterable[Service]) -> dict[str, Any]:
    schemas = Components()
    paths = paths_of(ROUTES, schemas)
    for service in services:
        for handler in service.handlers:
            if {**service.options, **handler.options}.get("private", False):
                continue
            path = f"/{service.name}{'' if service.kind == 'service' else _KEY}/{handler.name}"
            paths[path] = {"post": _call(service, handler, path, schemas)}
            paths[f"{path}/send"] = {"post": _send(service, handler, f"{path}/send", schemas)}
    return document("Holdfast ingress", __version__, paths, schemas)


def _call(service: Service, handler: Handler, path: str, schemas: Components) -> dict[str, Any]:
    found = _begin(service, handler, path, schemas, send=False)
    schema = _schema(f"{service.name}.{handler.name}.output", handler.output_schema, schemas)
    found["responses"]["200"] = {
        "description": "the result",
        "headers": {"x-holdfast-id": _ID},
        "content": {handler.output_type: {"schema": schema}},
    }
    return found


def _send(service: Service, handler: Handler, path: str, schemas: Components) -> dict[str, Any]:
    found = _begin(service, handler, path, schemas, send=True)
    found["responses"]["202"] = {
        "description": "it is accepted",
        "headers": {"x-holdfast-id": _ID},
        "content": {"application/json": {"schema": schema_of(Accepted, schemas)}},
    }
    return found


def _begin(service: Service, handler: Handler, path: str, schemas: Components, *, send: bool) -> dict[str, Any]:
    what = f"{service.name}/{handler.name}"
    summary = f"Start {what} and do not wait" if send else f"Call {what} and wait for its result"
    delays: tuple[Parameter, ...] = (DELAY,) if send else ()
    name = f"{service.name}.{handler.name}{'.send' if send else ''}"
    found = operation(Route("POST", path, name, summary, role=INVOKE, parameters=delays), schemas)
    if handler.doc:
        found["description"] = handler.doc
    found["tags"] = [service.name]
    found["parameters"].append(_HEADER)
    schema = _schema(f"{service.name}.{handler.name}.input", handler.input_schema, schemas)
    found["requestBody"] = {"content": {handler.input_type: {"schema": schema}}}
    return found


def _schema(name: str, text: str | None, schemas: Components) -> dict[str, Any]:
    """A reference to the schema, which is added to those of the document. Its definitions become components, too, because
    generators of clients do not find them inside others. Other references inside it stay inside it."""
    if text is None:
        return {}
    found = json.loads(text)
    defined = found.get("$defs") if isinstance(found, dict) else None
    homes = {"#": REFERENCE + name}
    if isinstance(defined, dict):
        parts = {part: each for part, each in defined.items() if _NAME.fullmatch(part)}
        homes |= {f"#/$defs/{part}": f"{REFERENCE}{name}.{part}" for part in parts}
        for part, each in parts.items():
            schemas[f"{name}.{part}"] = _moved(each, homes)
        found["$defs"] = {part: each for part, each in defined.items() if part not in parts}
        if not found["$defs"]:
            del found["$defs"]
        if [*found] == ["$ref"] and found["$ref"] in homes:
            return {"$ref": homes[found["$ref"]]}
    schemas[name] = _moved(found, homes)
    return {"$ref": REFERENCE + name}


def _moved(value: Any, homes: Mapping[str, str]) -> Any:
    """With its references to the places in `homes` changed. The nesting of a manifest is bounded (`sdk.bounds`)."""
    if isinstance(value, list):
        return [_moved(each, homes) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _home(each, homes)
        if key == "$ref" and isinstance(each, str) and each.startswith("#")
        else _moved(each, homes)
        for key, each in value.items()
    }


def _home(reference: str, homes: Mapping[str, str]) -> str:
    """`#/$defs/Order/properties/name` is in the home of `#/$defs/Order`."""
    start = "/".join(reference.split("/")[:3])
    start = start if start in homes else "#"
    return homes[start] + reference.removeprefix(start)
