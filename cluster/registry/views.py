"""What a registration would change, in the admin API."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from holdfast.cluster.registry.offer import MODES_BY_KIND
from holdfast.cluster.registry.preview import Preview
from holdfast.cluster.schemas import one_of


class PreviewedService(TypedDict):
    name: str
    kind: Annotated[str, one_of(MODES_BY_KIND)]
    revision: Annotated[int, "that it would get"]
    handlers: Annotated[list[str], "their names"]


class ShownPreview(TypedDict):
    """What a registration would change: the answer to a dry run."""

    dry_run: Literal[True]
    id: Annotated[str | None, "null: a new deployment would get a new id"]
    created: Annotated[bool, "there would be a new deployment"]
    changes: Annotated[list[str], "one sentence for each"]
    breaks: Annotated[list[str], "why it would be refused without force"]
    services: list[PreviewedService]


def show_preview(found: Preview) -> ShownPreview:
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
