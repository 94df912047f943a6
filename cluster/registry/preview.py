"""What registering an endpoint would change, in sentences, before anything does.

Apply decides about a registration (`statemachine.meta`), and knows what breaks callers. Here everything else that changes is
described too, because people want to see it before they deploy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from holdfast.cluster.registry.offer import Offer
from holdfast.sdk.ids import DeploymentId
from holdfast.statemachine.meta import (
    MetaState,
    RegisterDeployment,
    Service,
    breaking_changes,
    manifest_differences,
)

CHANGES_MAX: Final = 1000
_VALUE_CHARS_MAX: Final = 60


class Preview(NamedTuple):
    id: DeploymentId | None  # None: a new deployment would get a new id
    created: bool
    changes: list[str]
    breaks: list[str]  # why it would be refused without force
    services: list[tuple[Service, int]]  # with the revision that each would get


def preview(state: MetaState, uri: str, offer: Offer) -> Preview:
    """Changes are those between the newest revision of each service and what the endpoint offers."""
    there = state.at(uri)
    command = RegisterDeployment(id=DeploymentId(""), uri=uri, **offer._asdict(), metadata={}, force=False)
    if there is not None and there.same_manifest(command, state.level):
        services = [(service, there.revisions[service.name]) for service in offer.services]
        return Preview(id=there.id, created=False, changes=[], breaks=[], services=services)
    if there is not None:
        differences = manifest_differences(there.services, offer.services) or ["the way to reach it changed"]
        breaks = [f"{uri} is registered as {there.id} with another manifest: {each}" for each in differences]
    else:
        breaks = [text for service in offer.services for text in breaking_changes(state, service)]
    changes = [text for service in offer.services for text in _changes_of(state, service)]
    if there is not None:
        offered = {service.name for service in offer.services}
        changes += [f"{name}: {there.id} no longer offers it" for name in there.revisions if name not in offered]
    return Preview(
        id=there.id if there is not None else None,
        created=there is None,
        changes=changes[:CHANGES_MAX],
        breaks=breaks[:CHANGES_MAX],
        services=[(service, state.revisions.get(service.name, 0) + 1) for service in offer.services],
    )


def _changes_of(state: MetaState, new: Service) -> Iterator[str]:
    deployment = state.current(new.name)
    old = deployment.service(new.name) if deployment is not None else None
    if old is None:
        names = ", ".join(handler.name for handler in new.handlers)
        yield f"{new.name}: new {new.kind} with {names}"
        return
    assert deployment is not None
    found = list(_differences(old, new))
    yield from found
    if not found:
        yield f"{new.name}: unchanged, moves here from {deployment.id}"


def _differences(old: Service, new: Service) -> Iterator[str]:
    if old.kind != new.kind:
        yield f"{new.name}: kind {old.kind} → {new.kind}"
    if old.doc != new.doc:
        yield f"{new.name}: new description"
    yield from _of_options(new.name, old.options, new.options)
    for was in old.handlers:
        if new.handler(was.name) is None:
            yield f"{new.name}/{was.name}: removed"
    for now in new.handlers:
        path, known = f"{new.name}/{now.name}", old.handler(now.name)
        if known is None:
            yield f"{path}: new {now.mode} handler"
            continue
        if known.mode != now.mode:
            yield f"{path}: mode {known.mode} → {now.mode}"
        if known.doc != now.doc:
            yield f"{path}: new description"
        yield from _of_options(path, known.options, now.options)
        if known.input_type != now.input_type:
            yield f"{path}: input type {known.input_type} → {now.input_type}"
        if known.output_type != now.output_type:
            yield f"{path}: output type {known.output_type} → {now.output_type}"
        yield from _of_schemas(f"{path}: input", known.input_schema, now.input_schema)
        yield from _of_schemas(f"{path}: output", known.output_schema, now.output_schema)


def _of_options(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield f"{path}: {name} {_text(old.get(name))} → {_text(new.get(name))}"


def _of_schemas(what: str, old: str | None, new: str | None) -> Iterator[str]:
    """Fields that came, went or changed, if both are schemas of objects; otherwise only that they differ."""
    if old == new:
        return
    was, now = _fields(old), _fields(new)
    if was is None or now is None:
        change = "has a schema now" if old is None else "has no schema any more" if new is None else "schema changed"
        yield f"{what} {change}"
        return
    changed = []
    for name in sorted({*was, *now}):
        if name not in was:
            changed.append(f"field {name} added" + (", required" if now[name][1] else ""))
        elif name not in now:
            changed.append(f"field {name} removed")
        elif was[name] != now[name]:
            required = "required now" if now[name][1] > was[name][1] else "optional now"
            changed.append(f"field {name} " + (required if was[name][0] == now[name][0] else "has another type"))
    yield f"{what}: {'; '.join(changed)}" if changed else f"{what} schema changed"


def _fields(schema: str | None) -> dict[str, tuple[Any, bool]] | None:
    """The fields of an object, each with its schema and whether it is required."""
    found = json.loads(schema) if schema is not None else None
    properties = found.get("properties") if isinstance(found, dict) else None
    required = found.get("required", []) if isinstance(found, dict) else []
    if not isinstance(properties, dict) or not isinstance(required, list):
        return None
    return {name: (field, name in required) for name, field in properties.items()}


def _text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if value is not None else "(default)"
    return text if len(text) <= _VALUE_CHARS_MAX else text[: _VALUE_CHARS_MAX - 1] + "…"
