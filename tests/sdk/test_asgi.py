"""The ASGI application under real servers: uvicorn, hypercorn, and mounted in FastAPI."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import fastapi
import hypercorn.asyncio
import hypercorn.config
import pytest
import uvicorn

from holdfast.sdk import Context, Service, endpoint
from holdfast.sdk.frames import TO_NODE, VERSION, VERSION_HEADER, StepFrame, Waiting, decode_batch, encode_batch
from holdfast.sdk.ids import InvocationId
from tests.sdk.fake_node import FakeNode
from tests.sdk.test_server import check_pages_are_refused, status_under


def app() -> Any:
    greeter = Service("greeter")

    @greeter.handler
    async def greet(ctx: Context, name: str) -> str:
        await ctx.sleep(0.05)
        return await ctx.run("greeting", lambda: f"hello {name}")

    return endpoint([greeter], suspend_after=0.05)


def mounted() -> Any:
    outer = fastapi.FastAPI()

    @outer.get("/health")
    def health() -> str:
        return "well"

    outer.mount("/durable", app())
    return outer


@asynccontextmanager
async def uvicorned(application: Any) -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(application, port=0, log_level="warning"))
    task = asyncio.ensure_future(server.serve())
    async with asyncio.timeout(30):
        while not server.started:
            await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def hypercorned(application: Any) -> AsyncIterator[str]:
    config = hypercorn.config.Config()
    config.bind = ["127.0.0.1:0"]
    config.loglevel = "warning"
    sockets = config.create_sockets()
    port = sockets.insecure_sockets[0].getsockname()[1]
    config.bind = [f"fd://{sockets.insecure_sockets[0].fileno()}"]
    stop = asyncio.Event()
    task = asyncio.ensure_future(hypercorn.asyncio.serve(application, config, shutdown_trigger=stop.wait))
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                break
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        stop.set()
        await task


@pytest.mark.parametrize("server", [uvicorned, hypercorned])
@pytest.mark.parametrize(("make", "prefix"), [(app, ""), (mounted, "/durable")])
def test_a_node_reaches_the_handlers(server: Any, make: Any, prefix: str) -> None:
    async def main() -> None:
        async with server(make()) as uri, aiohttp.ClientSession() as session:
            async with asyncio.timeout(30), session.get(f"{uri}{prefix}/discover") as response:
                manifest = await response.json()
            assert [service["name"] for service in manifest["services"]] == ["greeter"]
            node = FakeNode(speed=1.0)
            await node.connect_uri(uri + prefix)

            assert await node.call("greeter", "greet", b'"Ada"') == b'"hello Ada"'

            start = node.start_frame(node.invoke("greeter", "greet", b'"Bob"'))
            start = start._replace(invocation=InvocationId(b"x" * 16))
            url = f"{uri}{prefix}/invoke/greeter/greet"
            newest = {VERSION_HEADER: str(VERSION)}
            async with session.post(url, data=encode_batch([start]), headers=newest) as response:
                frames = decode_batch(await response.read(), TO_NODE)
            assert [type(frame) for frame in frames] == [StepFrame, Waiting]
            async with session.post(url, data=b"nonsense") as response:
                assert response.status == 400
            async with session.get(url) as response:
                assert response.status == 405
            async with session.get(f"{uri}{prefix}/nothing") as response:
                assert response.status == 404
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await session.ws_connect(f"{uri}{prefix}/stream", headers={"x-holdfast-protocol": "7"})
            for version in (1, 2):
                other = FakeNode(version=version)
                await other.connect_uri(uri + prefix)
                assert other.link is not None and other.link.version == version
                assert await other.call("greeter", "greet", b'"Ada"') == b'"hello Ada"'
                await other.crash()
            socket = await session.ws_connect(f"{uri}{prefix}/stream")
            await socket.receive_bytes()
            await socket.send_bytes(b"nonsense")
            message = await socket.receive()
            assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
            await socket.close()
            await node.crash()

    asyncio.run(main())


def test_the_rest_of_a_fastapi_application_keeps_working() -> None:
    async def main() -> None:
        async with (
            uvicorned(mounted()) as uri,
            aiohttp.ClientSession() as session,
            session.get(f"{uri}/health") as response,
        ):
            assert await response.json() == "well"

    asyncio.run(main())


async def test_requests_of_web_pages_are_refused_under_asgi_too() -> None:
    async with uvicorned(app()) as uri:
        await check_pages_are_refused(uri, streams_refused_with=403)


@pytest.mark.parametrize("running", [uvicorned, hypercorned])
async def test_a_browser_that_took_another_name_for_loopback_is_refused_and_a_proxy_is_not(running: Any) -> None:
    page = {"Accept-Language": "", "User-Agent": "python"}  # What a page can do about its headers.
    async with running(app()) as uri:
        assert await status_under(uri, "evil.example", **page) == 403
        assert await status_under(uri, "evil.example", **{"User-Agent": "Mozilla/5.0"}) == 403
        assert await status_under(uri, "localhost", **page) == 200
        assert await status_under(uri, "handlers.internal") == 200, "a node, through a proxy on this machine"
