"""What a registration would change, in the admin API."""

from __future__ import annotations

from typing import Any

from holdfast.cluster.registry.preview import Preview


def show_preview(found: Preview) -> dict[str, Any]:
    return {
        "dry_run": True,
        "id": found.id,
        "created": found.created,
        "changes": found.changes,
        "breaks": found.breaks,
        "services": [
            {
                "name": service.name,
                "kind": service.kind,
                "revision": revision,
                "handlers": [handler.name for handler in service.handlers],
            }
            for service, revision in found.services
        ],
    }
