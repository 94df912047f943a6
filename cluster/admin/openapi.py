"""The admin API as an OpenAPI document, made from the table of routes."""

from __future__ import annotations

from typing import Any

from holdfast import __version__
from holdfast.cluster.admin.choices import ACTIONS
from holdfast.cluster.admin.routes import ROUTES
from holdfast.cluster.http.routes import document, paths_of


def openapi() -> dict[str, Any]:
    paths = paths_of(ROUTES, {"action": {"type": "string", "enum": list(ACTIONS)}})
    return document("Holdfast admin API", __version__, paths, {})
