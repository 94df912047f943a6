"""Registration of deployments: discovery over real HTTP, invalid manifests of every kind, revisions and removals."""

from __future__ import annotations

import asyncio
import copy
import json
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster.errors import (
    BadManifest,
    BadRequest,
    Conflict,
    EndpointFailed,
    NotFound,
    UnknownHandler,
    UnknownService,
)
from holdfast.cluster.handlers.protocols.native import protocol as protocol_module
from holdfast.cluster.handlers.protocols.native.manifest import read_manifest
from holdfast.cluster.registry.machine import RETENTION_MS, Options
from holdfast.cluster.registry.registry import normalize_uri
from holdfast.sdk.ids import DeploymentId
from holdfast.statemachine.commands import Mode, Retry
from tests.cluster.rig import EVERY_KIND, endpoint, handler, manifest, registry, service


def test_a_registered_deployment_answers_lookups() -> None:
    async def scenario() -> None:
        async with endpoint() as (_, uri):
            known = registry()

            registered = await known.register(uri, metadata={"commit": "abc"})

            assert registered.created
            target = known.resolve("counter", "add")
            assert (target.mode, target.kind, target.deployment) == (Mode.EXCLUSIVE, "object", registered.deployment.id)
            assert known.resolve("signup", "run").mode == Mode.WORKFLOW
            assert known.resolve("echo", "raw").output_type == "text/plain"
            assert known.target(registered.deployment.id, "counter", "read") is not None
            assert known.deployment(registered.deployment.id) == registered.deployment
            assert registered.deployment.metadata == {"commit": "abc"}

    asyncio.run(scenario())


def test_registering_the_same_again_finds_the_first() -> None:
    async def scenario() -> None:
        async with endpoint() as (_, uri):
            known = registry()
            first = await known.register(uri)

            second = await known.register(uri + "/")

            assert not second.created
            assert second.deployment.id == first.deployment.id

    asyncio.run(scenario())


def test_a_changed_manifest_at_the_same_uri_needs_force() -> None:
    async def scenario() -> None:
        async with endpoint() as (static, uri):
            known = registry()
            first = await known.register(uri)
            static.body = manifest(*EVERY_KIND["services"], service("more"))

            with pytest.raises(Conflict) as caught:
                await known.register(uri)
            forced = await known.register(uri, force=True)

            assert caught.value.details == ("more: was added",)
            assert caught.value.hint is not None and "new uri" in caught.value.hint
            assert forced.deployment.id == first.deployment.id
            assert known.resolve("more", "run").deployment == first.deployment.id

    asyncio.run(scenario())


def test_a_deployment_that_would_break_callers_is_refused_with_the_difference() -> None:
    async def scenario() -> None:
        less = manifest(service("counter", handler("add", "shared"), kind="object"))
        async with endpoint() as (_, uri), endpoint(less) as (_, other):
            known = registry()
            await known.register(uri)

            with pytest.raises(Conflict) as caught:
                await known.register(other)

            assert set(caught.value.details) == {
                "counter/add: was exclusive, is shared",
                "counter/read: was removed",
            }

    asyncio.run(scenario())


def test_an_invocation_finds_the_handler_of_its_own_deployment() -> None:
    async def scenario() -> None:
        fast = manifest(service("a", handler("run", options={"retry": {"initial_ms": 7}})))
        async with endpoint(manifest(service("a"))) as (_, uri), endpoint(fast) as (_, other):
            known = registry()
            old = (await known.register(uri)).deployment.id
            new = (await known.register(other)).deployment.id

            before, after = known.target(old, "a", "run"), known.target(new, "a", "run")

            assert before is not None and before.options == Options()
            assert after is not None and after.options.retry == Retry(initial_ms=7)
            assert known.resolve("a", "run") == after
            assert known.target(DeploymentId("dp_gone"), "a", "run") is None

    asyncio.run(scenario())


def test_a_deployment_goes_when_it_is_drained_and_superseded_or_by_force() -> None:
    async def scenario() -> None:
        async with endpoint(manifest(service("a"))) as (_, uri), endpoint(manifest(service("a"))) as (_, other):
            known = registry()
            running = {"count": 1}

            async def in_flight(deployment: str) -> int:
                return running["count"]

            old = (await known.register(uri)).deployment.id
            with pytest.raises(Conflict, match="1 invocation runs on"):
                await known.remove(old, in_flight=in_flight)
            running["count"] = 0
            with pytest.raises(Conflict, match="where new invocations of a go"):
                await known.remove(old, in_flight=in_flight)
            new = (await known.register(other)).deployment.id

            await known.remove(old, in_flight=in_flight)
            running["count"] = 5
            await known.remove(new, force=True, in_flight=in_flight)

            with pytest.raises(NotFound):
                await known.remove(new)
            with pytest.raises(UnknownService):
                known.resolve("a", "run")

    asyncio.run(scenario())


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    async def scenario() -> None:
        async with endpoint() as (_, uri):
            known = registry()
            with pytest.raises(UnknownService, match="no service 'echo'"):
                known.resolve("echo", "say")
            await known.register(uri)

            with pytest.raises(UnknownHandler, match="has no handler 'shout'") as caught:
                known.resolve("echo", "shout")

            assert caught.value.hint == "its handlers are: raw, say, send"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (404, {}, "answered 404"),
        (302, {}, "answered 302"),
        (200, b"<html>", "wrong at $: it is not JSON"),
        (200, b"[" * 100_000, "wrong at $: it is not JSON"),
        (200, b" " * 600_000, "larger than"),
        (200, [], "an object expected, [] found"),
    ],
)
def test_an_endpoint_that_is_none_gives_a_clear_error(status: int, body: object, sentence: str) -> None:
    async def scenario() -> None:
        async with endpoint(body) as (static, uri):
            static.status = status
            known = registry()

            with pytest.raises(EndpointFailed) as caught:
                await known.register(uri)

            assert sentence in caught.value.detail
            assert str(caught.value) == f"no Holdfast endpoint answers at {uri}"
            assert known.state.deployments == {}

    asyncio.run(scenario())


def test_an_endpoint_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(protocol_module, "DISCOVER_TIMEOUT_S", 0.2)
        async with endpoint() as (static, uri):
            static.delay_s = 3600
            known = registry()

            with pytest.raises(EndpointFailed) as caught:
                await known.register(uri)

            assert "no answer within" in caught.value.detail
            assert str(caught.value) == f"no Holdfast endpoint answers at {uri}"

    asyncio.run(scenario())


def test_a_closed_port_is_a_clear_error() -> None:
    async def scenario() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            known = registry()

            uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(EndpointFailed) as caught:
                await known.register(uri)

            assert "refused" in caught.value.detail or "Connect call failed" in caught.value.detail
            assert str(caught.value) == f"no Holdfast endpoint answers at {uri}"
            assert caught.value.hint is not None and "running" in caught.value.hint

    asyncio.run(scenario())


def broken(change: str, value: Any) -> bytes:
    """EVERY_KIND with one place changed, given as `services.0.kind`; `...` removes it."""
    copied: Any = copy.deepcopy(EVERY_KIND)
    where = copied
    *path, last = change.split(".")
    for part in path:
        where = where[int(part)] if isinstance(where, list) else where[part]
    if value is ...:
        del where[last]
    else:
        where[int(last) if isinstance(where, list) else last] = value
    return json.dumps(copied).encode()


@pytest.mark.parametrize(
    ("change", "value", "path"),
    [
        ("protocol", ..., "$.protocol"),
        ("protocol.min", 2, "$.protocol.max"),
        ("protocol.max", "1", "$.protocol.max"),
        ("protocol", {"min": 7, "max": 9}, "$.protocol"),
        ("modes", [], "$.modes"),
        ("modes", ["carrier pigeon"], "$.modes[0]"),
        ("services", ..., "$.services"),
        ("services", [], "$.services"),
        ("services", {}, "$.services"),
        ("services.0", "echo", "$.services[0]"),
        ("services.0.name", "a/b", "$.services[0].name"),
        ("services.0.name", "", "$.services[0].name"),
        ("services.0.name", "x" * 200, "$.services[0].name"),
        ("services.0.name", "holdfast", "$.services[0].name"),
        ("services.0.name", "\ud800", "$.services[0].name"),
        ("services.1.name", "echo", "$.services[1].name"),
        ("services.0.kind", "actor", "$.services[0].kind"),
        ("services.0.handlers", [], "$.services[0].handlers"),
        ("services.0.handlers.1.name", "say", "$.services[0].handlers[1].name"),
        ("services.0.handlers.0.mode", "exclusive", "$.services[0].handlers[0].mode"),
        ("services.3.handlers.0.mode", "shared", "$.services[3].handlers"),
        ("services.0.handlers.0.doc", 3, "$.services[0].handlers[0].doc"),
        ("services.0.handlers.0.input", [], "$.services[0].handlers[0].input"),
        ("services.0.handlers.0.input", {"schema": "no"}, "$.services[0].handlers[0].input.schema"),
        ("services.0.handlers.0.output", {"content_type": "a\r\nb"}, "$.services[0].handlers[0].output.content_type"),
        ("services.0.options", {"retention": 1}, "$.services[0].options.retention"),
        ("services.0.options", {"retention_ms": -1}, "$.services[0].options.retention_ms"),
        ("services.0.options", {"private": "yes"}, "$.services[0].options.private"),
        ("services.0.options", {"retry": {"initial_ms": 1.5}}, "$.services[0].options.retry.initial_ms"),
        ("services.0.options", {"retry": {"max": 1}}, "$.services[0].options.retry.max"),
    ],
)
def test_a_wrong_manifest_names_the_place(change: str, value: Any, path: str) -> None:
    with pytest.raises(BadManifest) as caught:
        read_manifest(broken(change, value))

    assert caught.value.path == path


def test_options_of_a_handler_win_over_those_of_its_service() -> None:
    async def scenario() -> None:
        both = manifest(
            service(
                "a",
                handler("run", options={"retention_ms": 5}),
                handler("other"),
                options={"retention_ms": 9, "inactivity_timeout_ms": 3, "private": True},
            )
        )
        async with endpoint(both) as (_, uri):
            known = registry()
            await known.register(uri)

            assert known.resolve("a", "run").options == Options(retention_ms=5, inactivity_ms=3, private=True)
            assert known.resolve("a", "other").options.retention_ms == 9
            assert RETENTION_MS == 24 * 3600 * 1000

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("given_uri", "normal"),
    [
        ("http://Host:9080/", "http://host:9080"),
        ("HTTPS://h/a/b//", "https://h/a/b"),
        ("http://[::1]:80", "http://[::1]:80"),
        ("http://bücher.example", "http://xn--bcher-kva.example"),
    ],
)
def test_one_place_has_one_spelling(given_uri: str, normal: str) -> None:
    assert normalize_uri(given_uri) == normal


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "localhost:9080",
        "ftp://h",
        "http://",
        "http://u:p@h",
        "http://h?q=1",
        "http://h:x",
        "http://a b",
        "http://a/\u009b2J",
        "http://a/\u0085",
        "http://a/\u2028",
        "x" * 9999,
    ],
)
def test_an_invalid_uri_is_refused(uri: str) -> None:
    with pytest.raises(BadRequest):
        normalize_uri(uri)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
places = st.sampled_from(
    [
        "protocol", "protocol.min", "modes", "modes.0", "sdk", "services", "services.0", "services.0.name",
        "services.0.kind", "services.0.doc", "services.0.options", "services.0.handlers", "services.2.handlers.0",
        "services.2.handlers.0.mode", "services.0.handlers.2.output", "services.0.handlers.2.output.content_type",
    ]
)  # fmt: skip


@given(places, anything)
def test_any_manifest_is_read_or_refused_in_a_sentence(place: str, value: Any) -> None:
    try:
        services, *_ = read_manifest(broken(place, value))
    except BadManifest as error:
        assert error.path.startswith("$")
    else:
        assert services


@given(st.binary(max_size=50) | st.text(max_size=50).map(str.encode))
def test_any_bytes_are_a_manifest_or_refused(raw: bytes) -> None:
    with pytest.raises(BadManifest):
        read_manifest(raw)


@given(st.text(max_size=40).map(lambda text: "http://" + text))
def test_any_text_is_a_uri_or_refused(text: str) -> None:
    try:
        once = normalize_uri(text)
    except BadRequest:
        return
    assert normalize_uri(once) == once
