"""The built-in server: discovery, streams, request/response, shutdown."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from holdfast.sdk import Context, Server, Service
from tests.sdk.fake_node import FakeNode

ROOT = Path(__file__).resolve().parent.parent.parent


def greeter() -> Service:
    greeter = Service("greeter", doc="Says hello.")

    @greeter.handler
    async def greet(ctx: Context, name: str) -> str:
        """Greets one person."""
        return await ctx.run("greeting", lambda: f"hello {name}")

    return greeter


def test_a_node_reaches_the_handlers_over_a_web_socket() -> None:
    async def main() -> None:
        server = Server([greeter()])
        await server.start(port=0)
        node = FakeNode()
        await node.connect_uri(server.uri)

        assert await node.call("greeter", "greet", b'"Ada"') == b'"hello Ada"'

        await node.crash()
        await server.stop()

    asyncio.run(main())


def test_the_manifest_lists_services_and_handlers() -> None:
    async def main() -> None:
        server = Server([greeter()])
        await server.start(port=0)
        async with aiohttp.ClientSession() as session, session.get(f"{server.uri}/discover") as response:
            manifest = await response.json()
        await server.stop()

        assert manifest["protocol"] == {"min": 1, "max": 2}
        assert manifest["modes"] == ["stream", "request-response"]
        (service,) = manifest["services"]
        assert (service["name"], service["kind"], service["doc"]) == ("greeter", "service", "Says hello.")
        assert service["handlers"] == [
            {
                "name": "greet",
                "mode": "plain",
                "doc": "Greets one person.",
                "input": {"content_type": "application/json", "schema": {"type": "string"}},
                "output": {"content_type": "application/json", "schema": {"type": "string"}},
                "options": {},
            }
        ]

    asyncio.run(main())


PROGRAM = """
import asyncio
from holdfast.sdk import Context, Service, serve

slow = Service("slow")

@slow.handler
async def work(ctx: Context) -> str:
    await ctx.run("work", asyncio.sleep, 0.5)
    return "finished"

serve([slow], port={port})
"""


def test_sigterm_lets_running_attempts_finish(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(port=port))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, str(program)], env=environment)

    async def main() -> None:
        node = FakeNode()
        async with asyncio.timeout(60):
            while node.link is None:
                try:
                    await node.connect_uri(f"http://127.0.0.1:{port}")
                except aiohttp.ClientError:
                    await asyncio.sleep(0.05)
            invocation = node.invoke("slow", "work")
            while not node.credit:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            process.send_signal(signal.SIGTERM)

            assert await node.result(invocation) == b'"finished"'
            assert node.goaway
            await node.crash()

    try:
        asyncio.run(main())
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


async def check_pages_are_refused(uri: str, *, streams_refused_with: int) -> None:
    """Whatever a page sends, no handler runs, and nothing can be read."""
    pages = [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": uri},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-origin"},
    ]
    async with aiohttp.ClientSession() as session:
        for headers in pages:
            async with session.get(f"{uri}/discover", headers=headers) as response:
                assert response.status == 403
            async with session.post(f"{uri}/invoke/greeter/greet", data=b"", headers=headers) as response:
                assert response.status == 403 and "web pages" in await response.text()
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await session.ws_connect(f"{uri}/stream", headers=headers)
            assert refused.value.status == streams_refused_with
        async with session.get(f"{uri}/discover", headers={"Sec-Fetch-Site": "none"}) as response:
            assert response.status == 200, "somebody typed the address"


async def status_under(uri: str, host: str | None, **headers: str) -> int:
    """Of GET /discover, with this Host."""
    async with aiohttp.ClientSession() as session:
        sent = {**headers, **({"Host": host} if host is not None else {})}
        async with session.get(f"{uri}/discover", headers=sent) as response:
            assert response.status == 200 or "Host" in await response.text()
            return response.status


def test_an_endpoint_on_loopback_answers_under_no_other_name() -> None:
    """After DNS rebinding, a page's requests look like those of a program, but for their Host."""

    async def main() -> None:
        server = Server([greeter()])
        await server.start(port=0)
        for host in (f"evil.example:{server.port}", "evil.example", "10.0.0.1", "localhost.evil.example", "a:b:c"):
            assert await status_under(server.uri, host) == 403, host
        for host in ("localhost", f"LocalHost.:{server.port}", "127.8.8.8", "[::1]:80", "trips.localhost"):
            assert await status_under(server.uri, host) == 200, host
        assert await status_under(server.uri, None) == 200, "as nodes ask"
        with pytest.raises(aiohttp.WSServerHandshakeError):
            async with aiohttp.ClientSession() as session:
                await session.ws_connect(f"{server.uri}/stream", headers={"Host": "evil.example"})
        await server.stop()

    asyncio.run(main())


def test_an_endpoint_on_another_address_may_have_any_name() -> None:
    async def main() -> None:
        server = Server([greeter()])
        await server.start(host="0.0.0.0", port=0)
        assert await status_under(f"http://127.0.0.1:{server.port}", "handlers.internal:9080") == 200
        await server.stop()

    asyncio.run(main())


def test_requests_of_web_pages_are_refused() -> None:
    async def main() -> None:
        server = Server([greeter()])
        await server.start(port=0)
        await check_pages_are_refused(server.uri, streams_refused_with=403)
        await server.stop()

    asyncio.run(main())
