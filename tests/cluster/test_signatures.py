"""Nodes sign their requests to handlers, and endpoints with the key of their cluster obey no one else, on every server."""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from holdfast.cluster.config import describe
from holdfast.cluster.errors import EndpointFailed
from holdfast.cluster.handlers.protocols.native import connect, requests
from holdfast.cluster.handlers.protocols.native.signing import Signer
from holdfast.sdk import Client, Context, Server, Service, endpoint
from holdfast.sdk.frames import HIGHEST_HEADER, VERSION_HEADER
from holdfast.sdk.ids import DeploymentId
from holdfast.sdk.signatures import format_key
from tests.cluster.harness import World, eventually, world
from tests.sdk.test_asgi import hypercorned, uvicorned

OTHER_KEY = "ed25519:" + "A" * 43


def shop() -> Service:
    service = Service("shop")

    @service.handler
    async def buy(ctx: Context, what: str) -> str:
        return await ctx.run("buying", lambda: f"bought {what}")

    return service


@asynccontextmanager
async def served(keys: list[str] | None, **more: Any) -> AsyncIterator[str]:
    server = Server([shop()], identity_keys=keys, **more)
    await server.start(port=0)
    try:
        yield server.uri
    finally:
        await server.stop(grace=0.1)


def under_uvicorn(keys: list[str]) -> AbstractAsyncContextManager[str]:
    return uvicorned(endpoint([shop()], identity_keys=keys))


def under_hypercorn(keys: list[str]) -> AbstractAsyncContextManager[str]:
    return hypercorned(endpoint([shop()], identity_keys=keys))


SERVERS: dict[str, Callable[[list[str]], AbstractAsyncContextManager[str]]] = {
    "serve": served,
    "uvicorn": under_uvicorn,
    "hypercorn": under_hypercorn,
}


async def public_keys(it: World) -> list[str]:
    await eventually(lambda: it.node.ground.meta.state.identity.keys, "the identity")
    return [format_key(key.public) for key in it.node.ground.meta.state.identity.keys]


async def request_response(it: World, uri: str) -> DeploymentId:
    """Register the endpoint as one that offers no streams."""
    offer = await it.node.ground.protocols.discover(uri)

    async def discover(uri: str) -> Any:
        return offer._replace(modes=["request-response"])

    it.node.ground.registry._discover = discover
    return (await it.node.ground.registry.register(uri)).deployment.id


@pytest.mark.parametrize("mode", ["stream", "request-response"])
@pytest.mark.parametrize("server", SERVERS)
async def test_an_endpoint_with_the_clusters_key_serves_only_the_cluster(
    tmp_path: Path, server: str, mode: str
) -> None:
    async with (
        world(tmp_path) as it,
        SERVERS[server](await public_keys(it)) as uri,
        Client(it.node.doors.urls.ingress) as client,
    ):
        if mode == "stream":
            await it.node.ground.registry.register(uri)
        else:
            await request_response(it, uri)
        assert await client.call("shop/buy", "bread") == "bought bread"

        async with aiohttp.ClientSession() as stranger:
            for method, path in (("GET", "/discover"), ("POST", "/invoke/shop/buy"), ("GET", "/stream")):
                async with stranger.request(method, uri + path, data=b"\x90" if method == "POST" else None) as response:
                    assert response.status in ((401,) if path != "/stream" or server == "serve" else (401, 404))
                    assert "manifest" not in await response.text()
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await stranger.ws_connect(f"{uri}/stream", headers={VERSION_HEADER: "1", HIGHEST_HEADER: "2"})

        assert refused.value.status == 401
        assert "it is not signed" in refused.value.headers["WWW-Authenticate"]  # type: ignore[index]


async def test_the_key_of_another_cluster_does_not_work(tmp_path: Path) -> None:
    async with (
        world(tmp_path / "ours") as ours,
        world(tmp_path / "theirs") as theirs,
        served(await public_keys(ours)) as uri,
    ):
        await public_keys(theirs)
        await ours.node.ground.registry.register(uri)

        with pytest.raises(EndpointFailed, match="the endpoint refuses the signature of this cluster") as refused:
            await theirs.node.ground.registry.register(uri)

        assert theirs.node.ground.meta.state.identity.keys[0].id in refused.value.message
        assert refused.value.hint is not None and "holdfast identity show" in refused.value.hint


@pytest.mark.parametrize("mode", ["stream", "request-response"])
async def test_the_node_shows_that_the_endpoint_refuses_its_signature_and_loses_nothing(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (connect, requests):
        monkeypatch.setattr(module, "UNTRUSTED_S", 0.1)
    async with world(tmp_path) as it, Client(it.node.doors.urls.ingress) as client:
        keys = await public_keys(it)
        server = Server([shop()], identity_keys=keys)
        await server.start(port=0)
        port, uri = server.port, server.uri
        if mode == "stream":
            deployment = (await it.node.ground.registry.register(uri)).deployment.id
        else:
            deployment = await request_response(it, uri)
        await server.stop(grace=0.1)
        server = Server([shop()], identity_keys=[OTHER_KEY])
        await server.start(port=port)
        sent = await client.send("shop/buy", "bread")

        def says() -> str:
            reached = it.node.ground.invoker.endpoints.get(deployment)
            return reached.last_error if reached is not None else ""

        await eventually(lambda: "refuses the signature" in says(), "the reason")
        why = await _why_not_running(it, sent.invocation_id)
        await server.stop(grace=0.1)
        server = Server([shop()], identity_keys=keys)
        await server.start(port=port)

        assert "holdfast identity show" in says()
        assert "refuses the signature of this cluster" in why
        assert await client.attach(sent.invocation_id) == "bought bread"
        await server.stop(grace=0.1)


async def _why_not_running(it: World, id_: str) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{it.node.doors.urls.admin}/invocations/{id_}") as response,
    ):
        return await response.text()


async def test_endpoints_follow_a_rotation_in_any_order(tmp_path: Path) -> None:
    async with world(tmp_path) as it, Client(it.node.doors.urls.ingress) as client:
        (old,) = await public_keys(it)
        await it.node.serving.identity.begin_rotation()
        both = await public_keys(it)
        assert len(both) == 2 and both[0] == old
        async with served([old]) as late, served([both[1]]) as early:
            await it.node.ground.registry.register(late)
            assert await client.call("shop/buy", "bread") == "bought bread"
            await it.node.ground.registry.register(early, force=True)
            assert await client.call("shop/buy", "milk") == "bought milk"

            await it.node.serving.identity.finish_rotation()

            await it.node.ground.protocols.discover(early)
            with pytest.raises(EndpointFailed, match="refuses the signature"):
                await it.node.ground.protocols.discover(late)


async def test_a_signature_for_one_endpoint_is_not_accepted_by_another(tmp_path: Path) -> None:
    """A hostile endpoint of the same cluster forwards the requests that it receives."""
    async with world(tmp_path) as it:
        keys = await public_keys(it)
        async with served(keys, identity_audience=["http://127.0.0.1:1"]) as uri:
            with pytest.raises(EndpointFailed, match=r"it was signed for http://127\.0\.0\.1:"):
                await it.node.ground.registry.register(uri)


async def test_an_intercepted_request_cannot_be_replayed(tmp_path: Path) -> None:
    async with world(tmp_path) as it, served(await public_keys(it)) as uri:
        signer = Signer(lambda: it.node.ground.meta.state.identity.keys)
        overheard = signer.headers("GET", uri, "/discover")
        statuses = []
        async with aiohttp.ClientSession() as stranger:
            for _ in range(2):
                async with stranger.get(f"{uri}/discover", headers=overheard) as response:
                    statuses.append(response.status)

        assert statuses == [200, 401]


async def test_an_endpoint_without_keys_ignores_signatures(tmp_path: Path) -> None:
    async with world(tmp_path) as it, served(None) as uri, Client(it.node.doors.urls.ingress) as client:
        await public_keys(it)
        await it.node.ground.registry.register(uri)

        assert await client.call("shop/buy", "bread") == "bought bread"


async def test_an_older_endpoint_gets_the_headers_and_ignores_them(tmp_path: Path) -> None:
    async def held(handled: Any) -> None:
        handled.output(b"fine")

    async with world(tmp_path) as it:
        await public_keys(it)
        await it.register({"old/go": held}, highest=1)

        assert await it.call("old/go") == [0, b"fine"]


async def test_no_secret_is_shown_logged_or_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret, shown = b"the secret of these tests", []
    with caplog.at_level(logging.DEBUG):
        async with world(tmp_path, secret=secret, auth="tokens") as it:
            token = (it.node.config.data / "admin-token").read_text().strip()
            keys = await public_keys(it)
            (private,) = (key.private for key in it.node.ground.meta.state.identity.keys)
            authorized = {"Authorization": f"Bearer {token}"}
            async with (
                Client(it.node.doors.urls.ingress, token=token) as client,
                served(keys) as uri,
                served([OTHER_KEY]) as closed,
                aiohttp.ClientSession(headers=authorized) as session,
            ):
                await it.node.ground.registry.register(uri)
                await client.call("shop/buy", "bread")
                with pytest.raises(EndpointFailed) as refused:
                    await it.node.ground.registry.register(closed)
                shown += [str(refused.value), repr(refused.value), refused.value.detail, str(refused.value.hint)]
                for path in ("/identity", "/cluster", "/metrics", "/deployments", "/audit", "/openapi.json", "/tokens"):
                    async with session.get(it.node.doors.urls.admin + path) as response:
                        assert response.status == 200
                        shown.append(await response.text())
            shown += [
                str(describe(it.node.config)),
                repr(it.node.config),
                repr(it.node.ground.meta.state.identity.keys),
            ]
    shown.append("\n".join(f"{record.getMessage()} {record.args!r}" for record in caplog.records))

    assert any("shop" in text for text in shown)
    for spelling in _spellings(private) | _spellings(secret) | {token, token.rpartition("_")[2]}:
        assert not any(spelling in text for text in shown)


def _spellings(secret: bytes) -> set[str]:
    encoded = {base64.b64encode(secret), base64.urlsafe_b64encode(secret)}
    return {secret.hex(), repr(secret)[2:-1], *(each.decode().rstrip("=") for each in encoded)}
