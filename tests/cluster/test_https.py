"""HTTPS at the doors of a node: certificates of both sides, protocol versions, and the cost of silent clients."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from holdfast.cli.authority import Pair, make_authority, make_for_client, make_for_node
from holdfast.cluster.certificates import door_context
from holdfast.cluster.config import HostPort, build
from holdfast.cluster.http import doors
from holdfast.cluster.http.doors import Door
from holdfast.cluster.node import Node
from holdfast.sdk import Client, SyncClient
from holdfast.sdk.client import Unreachable
from holdfast.sdk.loop import new_event_loop
from tests.cluster.harness import FAST, PATIENCE_S, FakeEndpoint, eventually
from tests.cluster.serving import HANDLERS

ROOT = Path(__file__).parents[2]


class Files:
    """An authority with a certificate for one node and one for a client."""

    def __init__(self, folder: Path) -> None:
        make_authority(folder, "test")
        self.folder = folder
        self.ca = folder / "ca.pem"
        self.node = make_for_node(folder, "n1")
        self.client = make_for_client(folder, "ada")

    def renew(self) -> Pair:
        return make_for_node(self.folder, "n1", force=True)

    def trusting(self, *, with_client: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca)
        if with_client:
            context.load_cert_chain(*self.client)
        return context

    def settings(self, door: str) -> dict[str, str]:
        return {f"{door}_tls_cert": str(self.node.cert), f"{door}_tls_key": str(self.node.key)}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "certs")


# -- one door, on both loops that nodes run on ---------------------------------------------------------------------------

Scenario = Callable[[Door], Awaitable[None]]


def run(
    files: Files,
    scenario: Scenario,
    *,
    connections_max: int | None = None,
    per_address_max: int | None = None,
    client_ca: Path | None = None,
) -> None:
    async def main() -> None:
        async def answer(request: web.BaseRequest) -> web.Response:
            response = web.Response(text="hello")
            if door.leaving:
                response.force_close()
            return response

        context = door_context(files.node.cert, files.node.key, client_ca)
        door = Door(
            web.Server(answer, access_log=None),
            connections_max=connections_max,
            per_address_max=per_address_max,
            tls=lambda: context,
        )
        await door.open(HostPort("127.0.0.1", 0))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await scenario(door)
        finally:
            await door.close()

    for factory in (asyncio.new_event_loop, new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())


async def fetch(door: Door, context: ssl.SSLContext | None, scheme: str = "https") -> tuple[int, str]:
    connector = aiohttp.TCPConnector(ssl=context or True)
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.get(f"{scheme}://localhost:{door.port}/") as response,
    ):
        return response.status, await response.text()


def silent(door: Door, first: bytes = b"") -> socket.socket:
    """Connect, send only this, and stay silent."""
    connected = socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S)
    connected.sendall(first)
    return connected


async def closed(connected: socket.socket) -> None:
    def read() -> None:
        try:
            while connected.recv(65536):
                pass
        except ConnectionResetError:
            pass

    await asyncio.to_thread(read)
    connected.close()


def test_a_door_with_a_certificate_speaks_https(files: Files) -> None:
    async def scenario(door: Door) -> None:
        assert await fetch(door, files.trusting()) == (200, "hello")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await fetch(door, None)

    run(files, scenario)


def test_a_client_that_speaks_http_to_an_https_port_is_told_so(files: Files) -> None:
    async def scenario(door: Door) -> None:
        status, body = await fetch(door, None, scheme="http")

        assert status == 400
        assert json.loads(body)["message"] == "this address speaks HTTPS"
        assert json.loads(body)["hint"] == "use https:// in the URL"

    run(files, scenario)


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
def test_tls_1_2_and_1_3_are_accepted(files: Files, version: str) -> None:
    async def scenario(door: Door) -> None:
        context = files.trusting()
        context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
        assert (await fetch(door, context))[0] == 200

    run(files, scenario)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1")
def test_older_versions_are_refused(files: Files) -> None:
    def offer(port: int) -> bool:
        context = files.trusting()
        context.set_ciphers("DEFAULT:@SECLEVEL=0")  # Otherwise our own side would refuse.
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
        with socket.create_connection(("127.0.0.1", port)) as plain:
            try:
                context.wrap_socket(plain, server_hostname="localhost")
            except OSError:
                return False
        return True

    async def scenario(door: Door) -> None:
        assert not await asyncio.to_thread(offer, door.port)

    run(files, scenario)
    context = door_context(files.node.cert, files.node.key, None)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_door_with_client_certificates_admits_no_other_client(files: Files, tmp_path: Path) -> None:
    other = Files(tmp_path / "other")

    async def scenario(door: Door) -> None:
        assert (await fetch(door, files.trusting(with_client=True)))[0] == 200
        stranger = files.trusting()
        stranger.load_cert_chain(*other.client)
        for context in (files.trusting(), stranger):
            with pytest.raises((aiohttp.ClientError, OSError)):
                await fetch(door, context)
        assert door.connections == 0 or await eventually(lambda: door.connections == 0)

    run(files, scenario, client_ca=files.ca)


@pytest.mark.parametrize("first", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "a byte", "a beginning"])
def test_a_client_that_stalls_is_dropped_after_a_while(
    files: Files, first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "HANDSHAKE_S", 0.2)

    async def scenario(door: Door) -> None:
        await closed(silent(door, first))

        await eventually(lambda: door.handshakes_failed == 1 and not door._entering)
        assert await fetch(door, files.trusting()) == (200, "hello")

    run(files, scenario)


def test_silent_clients_keep_no_one_out(files: Files) -> None:
    async def scenario(door: Door) -> None:
        crowd = [silent(door) for _ in range(100)]

        for _ in range(5):
            assert await fetch(door, files.trusting()) == (200, "hello")

        assert len(door._greeting) <= 6, "the oldest made room"
        for each in crowd:
            each.close()
        await eventually(lambda: not door._greeting)

    run(files, scenario, connections_max=10)


def test_one_address_gets_at_most_its_share_of_connections_and_gets_it_back(files: Files) -> None:
    async def scenario(door: Door) -> None:
        async def get_all_three() -> None:
            """Connect three clients: a silent one, one that began a handshake, and one that sends a request."""
            crowd = [silent(door), silent(door, b"\x16\x03\x01")]
            await eventually(lambda: len(door._greeting) == 2)
            assert await fetch(door, files.trusting()) == (200, "hello")
            await eventually(lambda: door.connections == 0 and len(door._entering) == 2)
            for each in crowd:
                each.close()
            await eventually(lambda: not door._entering)

        for _ in range(3):
            await get_all_three()
        crowd = [silent(door) for _ in range(3)]
        await eventually(lambda: len(door._greeting) == 3)
        with pytest.raises((aiohttp.ClientError, OSError)):
            await fetch(door, files.trusting())
        assert door.turned_away == 1 and len(door._greeting) == 3, "nobody made room for it"
        for each in crowd:
            each.close()

    run(files, scenario, per_address_max=3)


def test_a_closing_door_answers_earlier_requests_and_does_not_wait_for_silent_clients(files: Files) -> None:
    def ask(plain: socket.socket) -> bytes:
        with files.trusting().wrap_socket(plain, server_hostname="localhost") as secured:
            secured.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            found = b""
            while piece := secured.recv(65536):
                found += piece
            return found

    async def scenario(door: Door) -> None:
        quiet, asking = silent(door), silent(door)
        began = asyncio.get_running_loop().time()
        asked = asyncio.ensure_future(asyncio.to_thread(ask, asking))

        await door.finish(30.0)

        assert (await asked).endswith(b"hello")
        assert asyncio.get_running_loop().time() - began < 10
        await closed(quiet)

    run(files, scenario)


# -- whole nodes ---------------------------------------------------------------------------------------------------------


async def started(tmp_path: Path, **settings: Any) -> tuple[Node, FakeEndpoint]:
    places = {"data": str(tmp_path / "data"), "partitions": 2, "ingress": 0, "admin": 0, "peer": 0}
    node = Node(build({**places, **settings}), timing=FAST)
    await node.start()
    endpoint = FakeEndpoint(HANDLERS)
    await endpoint.start()
    await node.ground.registry.register(endpoint.uri)
    return node, endpoint


async def test_both_clients_call_a_node_over_https(files: Files, tmp_path: Path) -> None:
    node, endpoint = await started(tmp_path, **files.settings("ingress"))
    assert node.doors.urls.ingress.startswith("https://127.0.0.1:") and node.doors.urls.admin.startswith("http://")

    def blocking() -> Any:
        with SyncClient(node.doors.urls.ingress, ca=str(files.ca)) as client:
            return client.call("counter/add", key="k")

    async with Client(node.doors.urls.ingress, ca=files.ca) as client:
        assert await client.call("counter/add", key="k") == 1
    assert await asyncio.to_thread(blocking) == 2

    async with Client(node.doors.urls.ingress) as untrusting:
        with pytest.raises(Unreachable, match=r"is not trusted: .*Client\(\.\.\., ca="):
            await untrusting.call("counter/add", key="k")
    with pytest.raises(Unreachable, match="is not trusted"):
        await asyncio.to_thread(lambda: SyncClient(node.doors.urls.ingress).call("counter/add", key="k"))
    async with Client(
        [node.doors.urls.ingress.replace("https", "http"), node.doors.urls.ingress], ca=files.ca
    ) as client:
        with pytest.raises(Exception, match="this address speaks HTTPS"):
            await client.call("counter/add", key="k")
    await node.stop()
    await endpoint.stop()


def test_a_file_without_an_authority_is_refused_when_the_client_is_made(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("hello")

    for kind in (Client, SyncClient):
        with pytest.raises(ValueError, match=r"ca: .*ca\.pem is not a certificate in PEM"):
            kind("https://localhost", ca=tmp_path / "ca.pem")
        with pytest.raises(ValueError, match=r"ca: .*none\.pem: No such file"):
            kind("https://localhost", ca=tmp_path / "none.pem")


async def test_a_new_certificate_breaks_no_connection(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.cluster.certificates.LOOK_S", 0.05)
    node, endpoint = await started(tmp_path, **files.settings("ingress"))
    assert node.doors.ingress is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", node.doors.ingress.port, ssl=files.trusting())

    async def ask() -> bytes:
        writer.write(b"GET /holdfast/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length.split(b":")[1]))
        return head.split(b"\r\n")[0]

    def shown() -> str:
        return ssl.get_server_certificate(("127.0.0.1", node.doors.ingress.port), ca_certs=str(files.ca))

    assert await ask() == b"HTTP/1.1 200 OK"
    before = await asyncio.to_thread(shown)
    files.renew()
    async with asyncio.timeout(PATIENCE_S):
        while await asyncio.to_thread(shown) == before:
            await asyncio.sleep(0.05)

    assert await ask() == b"HTTP/1.1 200 OK", "the old connection goes on"
    writer.close()
    await node.stop()
    await endpoint.stop()


async def test_health_and_metrics_announce_a_certificate_that_expires(files: Files, tmp_path: Path) -> None:
    make_for_node(files.folder, "n1", days=3, force=True)
    node, endpoint = await started(tmp_path, **files.settings("admin"), **files.settings("ingress"))
    connector = aiohttp.TCPConnector(ssl=files.trusting())

    async with aiohttp.ClientSession(connector=connector) as http:
        async with http.get(f"{node.doors.urls.admin}/health") as response:
            health = await response.json()
        async with http.get(f"{node.doors.urls.admin}/metrics") as response:
            metrics = await response.text()
        async with http.get(f"{node.doors.urls.ingress}/holdfast/health") as response:
            assert response.status == 200

    assert any("(admin) expires on" in each for each in health["warnings"])
    assert 'holdfast_certificate_expires_timestamp_seconds{use="admin"} ' in metrics
    await node.stop()
    await endpoint.stop()


async def test_the_health_check_of_the_image_works_with_and_without_https(files: Files, tmp_path: Path) -> None:
    words = re.search(r"^HEALTHCHECK .*?CMD (\[.*?\])$", (ROOT / "Dockerfile").read_text(), re.M | re.S)
    assert words is not None
    _, *arguments = json.loads(words[1])

    def check(node: Node, **environ: str) -> int:
        assert node.doors.ingress is not None
        command = [sys.executable, *(word.replace("8080", str(node.doors.ingress.port)) for word in arguments)]
        return subprocess.run(command, env={**os.environ, **environ}, check=False, capture_output=True).returncode

    for number, settings in enumerate(({}, files.settings("ingress"))):
        node, endpoint = await started(tmp_path / str(number), **settings)
        environ = {f"HOLDFAST_{name.upper()}": value for name, value in settings.items()}
        assert await asyncio.to_thread(check, node, **environ) == 0
        await node.stop()
        await endpoint.stop()


async def test_the_command_line_trusts_a_file_and_shows_a_certificate(files: Files, tmp_path: Path) -> None:
    node, endpoint = await started(tmp_path, **files.settings("admin"), admin_tls_client_ca=str(files.ca))

    def holdfast(*options: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "holdfast", *options, "services", "list", "--admin-url", node.doors.urls.admin]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    cert, key = (str(path) for path in files.client)
    trust = ("--ca-file", str(files.ca))
    code, text = await asyncio.to_thread(holdfast, *trust, "--client-cert-file", cert, "--client-key-file", key)
    assert code == 0 and "counter" in text, text
    code, text = await asyncio.to_thread(holdfast)
    assert code == 1 and "is not trusted" in text and "HOLDFAST_CA_FILE" in text
    code, text = await asyncio.to_thread(holdfast, *trust)
    assert code == 1 and "client certificate" in text and "--client-cert-file" in text, text
    code, text = await asyncio.to_thread(
        holdfast, *trust, "--client-cert-file", cert, "--client-key-file", str(files.ca)
    )
    assert code == 1 and "cannot be used" in text

    def with_profile() -> str:
        environment = {**os.environ, "HOLDFAST_PROFILES": str(tmp_path / "profiles.toml")}
        given = ["--admin-url", node.doors.urls.admin, *trust, "--client-cert-file", cert, "--client-key-file", key]
        for arguments in (["profile", "set", "p", *given], ["--profile", "p", "services", "list"]):
            command = [sys.executable, "-m", "holdfast", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return done.stdout + done.stderr

    assert "counter" in await asyncio.to_thread(with_profile)
    await node.stop()
    await endpoint.stop()


async def test_a_waiting_node_answers_over_https(files: Files, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    settings = {"peers": {"n2": "127.0.0.1:1"}, "secret_file": str(secret), **files.settings("ingress")}
    places = {"data": str(tmp_path / "data"), "ingress": 0, "admin": 0, "peer": 0}
    node = Node(build({**places, **settings}), timing=FAST)
    starting = asyncio.ensure_future(node.start())
    await eventually(lambda: len(node.not_serving.ports) == 2)

    connector = aiohttp.TCPConnector(ssl=files.trusting())
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.get(f"https://localhost:{node.not_serving.ports[1]}/holdfast/health") as response,
    ):
        assert response.status == 503
        assert "n2" in (await response.json())["message"]

    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
