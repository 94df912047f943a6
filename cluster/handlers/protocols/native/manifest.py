"""Parses and checks the manifest of an endpoint.

An error names the place in the manifest, and says what belongs there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from holdfast.cluster.errors import BadManifest
from holdfast.cluster.registry.offer import (
    HANDLERS_MAX,
    INTERVAL_MS_MAX,
    MODES_BY_KIND,
    NAME,
    RESERVED,
    RETENTION_MS_MAX,
    SERVICES_MAX,
    Offer,
)
from holdfast.sdk.bounds import load_json
from holdfast.sdk.frames import choose_version
from holdfast.sdk.journal import NAME_BYTES_MAX, ProtocolError
from holdfast.statemachine import meta
from holdfast.statemachine.meta import (
    Handler,
    Service,
)

MANIFEST_BYTES_MAX: Final = 512 * 1024
MANIFEST_ELEMENTS_MAX: Final = 64 * 1024  # values in it, those of schemas included


class NotAManifest(BadManifest):
    """The answer does not come from a Holdfast endpoint."""


def read_manifest(raw: bytes) -> Offer:
    """Total: any bytes give an offer or a BadManifest that names the place."""
    try:
        value = load_json(raw, MANIFEST_ELEMENTS_MAX)
    except ValueError as error:
        raise NotAManifest("$", f"it is not JSON ({error})", "does the uri point at a Holdfast endpoint?") from None
    manifest = _Reader("$", value)
    if not isinstance(value, dict):
        raise NotAManifest("$", f"an object expected, {json.dumps(value):.60} found")
    if "protocol" not in value:
        raise NotAManifest("$.protocol", "it is missing", "does the uri point at a Holdfast endpoint?")
    spoken = manifest.field("protocol").object()
    low = spoken.field("min").integer(1, 2**31)
    high = spoken.field("max").integer(low, 2**31)
    try:
        choose_version(low, high)
    except ProtocolError as error:
        raise BadManifest("$.protocol", str(error), "use a release of the SDK that fits the node") from None
    modes = manifest.field("modes").items(16)
    known = [mode.choice(("stream", "request-response")) for mode in modes]
    if not known:
        raise BadManifest("$.modes", "it is empty: nodes could not reach the endpoint")
    sdk = manifest.optional("sdk")
    services = [_read_service(item) for item in manifest.field("services").items(SERVICES_MAX)]
    if not services:
        raise BadManifest("$.services", "it is empty: there is nothing to register", "add a service to the endpoint")
    _check_unique("$.services", [service.name for service in services])
    return Offer(services, sdk.text(200) if sdk is not None else "", sorted(set(known)), [low, high])


def _read_service(reader: _Reader) -> Service:
    service = reader.object()
    name = service.field("name").name()
    if name in RESERVED:
        raise BadManifest(f"{reader.path}.name", f"{name} is reserved: its paths belong to the ingress")
    kind = service.field("kind").choice(meta.KINDS_OF_SERVICE)
    handlers = [_read_handler(item, kind) for item in service.field("handlers").items(HANDLERS_MAX)]
    if not handlers:
        raise BadManifest(f"{reader.path}.handlers", f"service {name} has no handlers")
    _check_unique(f"{reader.path}.handlers", [handler.name for handler in handlers])
    mains = [handler.name for handler in handlers if handler.mode == "main"]
    if kind == "workflow" and len(mains) != 1:
        raise BadManifest(f"{reader.path}.handlers", f"a workflow has one main handler, {name} has {len(mains)}")
    return Service(name=name, kind=kind, handlers=handlers, doc=_read_doc(service), options=_read_options(service))


def _read_handler(reader: _Reader, kind: str) -> Handler:
    handler = reader.object()
    name = handler.field("name").name()
    mode = handler.field("mode").choice(MODES_BY_KIND[kind])
    input_type, input_schema = _read_payload(handler, "input")
    output_type, output_schema = _read_payload(handler, "output")
    return Handler(
        name=name,
        mode=mode,
        doc=_read_doc(handler),
        input_type=input_type,
        input_schema=input_schema,
        output_type=output_type,
        output_schema=output_schema,
        options=_read_options(handler),
    )


def _read_payload(handler: _Reader, which: str) -> tuple[str, str | None]:
    found = handler.optional(which)
    if found is None:
        return "application/json", None
    payload = found.object()
    content_type = payload.optional("content_type")
    schema = payload.optional("schema")
    text = None
    if schema is not None:
        if not isinstance(schema.value, dict | bool):
            raise schema.wrong("a JSON schema")
        text = json.dumps(schema.value, separators=(",", ":"))
    return (content_type.content_type() if content_type is not None else "application/json"), text


def _read_doc(reader: _Reader) -> str | None:
    doc = reader.optional("doc")
    return doc.text(10_000) if doc is not None else None


def _read_options(reader: _Reader) -> dict[str, Any]:
    found = reader.optional("options")
    if found is None:
        return {}
    given = found.object()
    options: dict[str, Any] = {}
    for name, low, high in (
        ("inactivity_timeout_ms", 1, INTERVAL_MS_MAX),
        ("abort_timeout_ms", 1, INTERVAL_MS_MAX),
        ("retention_ms", 0, RETENTION_MS_MAX),
    ):
        option = given.optional(name)
        if option is not None:
            options[name] = option.integer(low, high)
    private = given.optional("private")
    if private is not None:
        options["private"] = private.boolean()
    retry = given.optional("retry")
    if retry is not None:
        options["retry"] = _read_retry(retry.object())
    unknown = sorted(set(given.value) - {*options, "inactivity_timeout_ms", "abort_timeout_ms", "retention_ms",
                                         "private", "retry"})  # fmt: skip
    if unknown:
        raise BadManifest(
            f"{given.path}.{unknown[0]:.100}", "there is no such option", "is the SDK newer than the node?"
        )
    return options


def _read_retry(retry: _Reader) -> dict[str, int]:
    bounds = {
        "initial_ms": (1, INTERVAL_MS_MAX),
        "factor_permille": (1000, 1_000_000),
        "max_interval_ms": (1, INTERVAL_MS_MAX),
        "max_attempts": (0, 2**31),
        "max_duration_ms": (0, RETENTION_MS_MAX),
        "jitter_permille": (0, 1000),
    }
    unknown = sorted(set(retry.value) - set(bounds))
    if unknown:
        raise BadManifest(f"{retry.path}.{unknown[0]:.100}", f"there is no such field; known are {', '.join(bounds)}")
    found = {}
    for name, (low, high) in bounds.items():
        field = retry.optional(name)
        if field is not None:
            found[name] = field.integer(low, high)
    return found


def _check_unique(path: str, names: list[str]) -> None:
    for offset, name in enumerate(names):
        if name in names[:offset]:
            raise BadManifest(f"{path}[{offset}].name", f"duplicate name {name}")


class _Reader:
    """A value and its place in the manifest."""

    def __init__(self, path: str, value: Any) -> None:
        self.path = path
        self.value = value

    def wrong(self, expected: str) -> BadManifest:
        found = "nothing" if self.value is None else f"{json.dumps(self.value):.60}"
        return BadManifest(self.path, f"{expected} expected, {found} found")

    def object(self) -> _Reader:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return self

    def field(self, name: str) -> _Reader:
        if name not in self.value:
            raise BadManifest(f"{self.path}.{name}", "it is missing")
        return _Reader(f"{self.path}.{name}", self.value[name])

    def optional(self, name: str) -> _Reader | None:
        return None if self.value.get(name) is None else self.field(name)

    def items(self, most: int) -> list[_Reader]:
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        if len(self.value) > most:
            raise BadManifest(self.path, f"at most {most} items are allowed, {len(self.value)} found")
        return [_Reader(f"{self.path}[{offset}]", item) for offset, item in enumerate(self.value)]

    def text(self, bytes_max: int) -> str:
        if not isinstance(self.value, str) or not _encodable(self.value):
            raise self.wrong("a text")
        if len(self.value.encode()) > bytes_max:
            raise BadManifest(self.path, f"at most {bytes_max} bytes are allowed")
        return self.value

    def name(self) -> str:
        name = self.text(NAME_BYTES_MAX)
        if NAME.fullmatch(name) is None:
            raise BadManifest(
                self.path,
                f"{name!r} is not a name",
                "letters, digits, _ - and . are allowed, and the first is a letter or _",
            )
        return name

    def content_type(self) -> str:
        text = self.text(200)
        if not text or not text.isascii() or not text.isprintable():
            raise self.wrong("a content type")
        return text

    def choice(self, choices: Sequence[str]) -> str:
        if self.value not in choices:
            raise self.wrong(" or ".join(f'"{choice}"' for choice in choices))
        return str(self.value)

    def integer(self, low: int, high: int) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            raise self.wrong(f"a whole number from {low} to {high}")
        return self.value

    def boolean(self) -> bool:
        if type(self.value) is not bool:
            raise self.wrong("true or false")
        return self.value


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
