"""The admin API as an OpenAPI document, made from the table of routes."""

from __future__ import annotations

from typing import Any

from holdfast import __version__
from holdfast.cluster.admin.routes import ACTIONS, NUMBER, PUBLIC, ROUTES


def openapi() -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        in_path = [part.strip("{}") for part in route.path.split("/") if part.startswith("{")]
        operation: dict[str, Any] = {
            "operationId": route.name,
            "summary": route.summary,
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": _path_schema(name)} for name in in_path
            ]
            + [
                {"name": each.name, "in": "query", "description": each.description, "schema": dict(each.schema)}
                for each in route.parameters
            ],
            "responses": {str(status): {"description": text} for status, text in route.answers}
            | {"default": {"$ref": "#/components/responses/Error"}},
        }
        if route.role != PUBLIC:
            operation["x-holdfast-role"] = route.role
            operation["security"] = [{"token": []}]
        if route.body is not None:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": route.body}}}
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    error = {
        "type": "object",
        "required": ["code", "message", "source"],
        "properties": {
            "code": NUMBER,
            "message": {"type": "string"},
            "source": {"type": "string"},
            "hint": {"type": ["string", "null"]},
            "details": {"type": "array", "items": {"type": "string"}},
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Holdfast admin API", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": error},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "responses": {
                "Error": {
                    "description": "what is wrong, and what to do about it",
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                }
            },
        },
    }


def _path_schema(name: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(ACTIONS)} if name == "action" else {"type": "string"}
