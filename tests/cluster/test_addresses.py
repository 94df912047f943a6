"""Addresses of handlers: which are allowed, and that nodes connect to no others, however a name resolves."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster.addresses import GUARDED, AddressRefused, parse_ip, read_addresses
from holdfast.cluster.config import BadConfig, build, describe
from holdfast.cluster.errors import BadRequest, EndpointFailed
from holdfast.cluster.handlers.protocols.interface import Means
from holdfast.cluster.handlers.protocols.native.protocol import Native
from tests.cluster.harness import Handled, eventually, world
from tests.cluster.rig import endpoint
from tests.cluster.test_tokens import one

METADATA = "169.254.169.254"


@pytest.mark.parametrize(
    "address",
    [
        METADATA,
        "169.254.170.2",
        "100.100.100.200",
        "168.63.129.16",
        "fe80::1",
        "fe80::a9fe:a9fe%1",
        "fd00:ec2::254",
        "fd20:ce::254",
        f"::ffff:{METADATA}",
        f"::{METADATA}",
        f"64:ff9b::{METADATA}",
        f"64:ff9b:1::{METADATA}",
        "2002:a9fe:a9fe::1",
        "2001:0:a9fe:a9fe::1",
        "::ffff:a9fe:a9fe",
    ],
)
@pytest.mark.parametrize("setting", ["", "0.0.0.0/0, ::/0, *", "168.0.0.0/5, fd00::/8, fe00::/7, *.internal"])
def test_link_local_and_metadata_addresses_are_refused_unless_named(address: str, setting: str) -> None:
    addresses = read_addresses(setting)

    for named in (False, True):
        with pytest.raises(AddressRefused, match="link-local or metadata"):
            addresses.check(address, 80, named=named)


def test_a_listed_guarded_address_is_allowed_at_the_listed_ports() -> None:
    addresses = read_addresses("169.254.10.0/24:9080, [fe80::/64]:9080-9081")

    addresses.check("169.254.10.7", 9080)
    addresses.check("fe80::7", 9081)

    for address, port in (("169.254.10.7", 80), ("169.254.11.7", 9080), ("fe80::7", 9082), ("10.0.0.1", 9080)):
        with pytest.raises(AddressRefused):
            addresses.check(address, port)


@pytest.mark.parametrize(
    ("setting", "address", "port", "allowed"),
    [
        ("", "127.0.0.1", 9080, True),
        ("", "10.1.2.3", 22, True),
        ("10.0.0.0/8", "10.1.2.3", 22, True),
        ("10.0.0.0/8", "::ffff:10.1.2.3", 22, True),
        ("10.0.0.0/8", "64:ff9b::10.1.2.3", 22, False),
        ("10.0.0.0/8", "11.1.2.3", 22, False),
        ("10.0.0.0/8:9080", "10.1.2.3", 9080, True),
        ("10.0.0.0/8:9080", "10.1.2.3", 9081, False),
        ("10.1.2.3:9080-9090", "10.1.2.3", 9090, True),
        ("[fd12::/16]:9080", "fd12::1", 9080, True),
        ("fd12::/16", "fd13::1", 9080, False),
        ("handlers.internal", "10.1.2.3", 9080, False),
    ],
)
def test_networks_and_ports_are_checked(setting: str, address: str, port: int, allowed: bool) -> None:
    addresses = read_addresses(setting)

    if allowed:
        addresses.check(address, port)
    else:
        with pytest.raises(AddressRefused, match="not among the allowed ones"):
            addresses.check(address, port)


@pytest.mark.parametrize(
    ("setting", "host", "port", "allowed"),
    [
        ("handlers.internal", "handlers.internal", 80, True),
        ("handlers.internal", "Handlers.Internal.", 80, True),
        ("handlers.internal", "x.handlers.internal", 80, False),
        ("handlers.internal:9080", "handlers.internal", 80, False),
        ("*.internal", "a.b.internal", 80, True),
        ("*.internal", "internal", 80, False),
        ("*.internal", "evilinternal", 80, False),
        ("*.internal", "a.internal.evil.example", 80, False),
        ("*", "anything", 80, True),
        ("*", METADATA, 80, False),
        ("bücher.example", "xn--bcher-kva.example", 443, True),
    ],
)
def test_names_are_compared_whole(setting: str, host: str, port: int, allowed: bool) -> None:
    assert read_addresses(setting).allows_name(host, port) is allowed


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("10.0.0.1/8", "'10.0.0.1/8' is not a network: did you mean 10.0.0.0/8?"),
        ("10.0.0.0/8:0", "'0' is not a port"),
        ("10.0.0.0/8:90-80", "'90-80' is not a port"),
        ("h:http", "'http' is not a port"),
        ("*internal", "is not a network, an address or a name"),
        ("a.*.internal", "is not a network, an address or a name"),
        ("http://h", "is not"),
        ("h/path", "is not a network, an address or a name"),
        ("300.1.1.1", "is not a network, an address or a name"),
        ("0xa9fea9fe", "is not a network, an address or a name"),
        ("[fd12::/16", "is not a network, an address or a name"),
        (7, "a list expected"),
        ([7], "a list expected"),
    ],
)
def test_an_invalid_setting_says_what_is_expected(value: Any, sentence: str) -> None:
    with pytest.raises(BadConfig) as caught:
        build({"deployment_addresses": value}, {"deployment_addresses": "node.toml: deployment_addresses"})

    assert str(caught.value).startswith("node.toml: deployment_addresses: ")
    assert sentence in str(caught.value)


def test_the_setting_can_be_a_list_or_a_text_and_is_shown() -> None:
    listed = build({"deployment_addresses": ["10.0.0.0/8", "*.internal:9080"]})
    texted = build({"deployment_addresses": "10.0.0.0/8,*.internal:9080"})

    assert listed == texted
    assert describe(listed)["deployment_addresses"] == "10.0.0.0/8, *.internal:9080"
    assert "link-local" in describe(build({}))["deployment_addresses"]


@given(st.ip_addresses(), st.integers(1, 65535), st.booleans())
def test_no_setting_of_large_networks_reaches_a_guarded_address(address: Any, port: int, named: bool) -> None:
    try:
        read_addresses("0.0.0.0/0, ::/0, *").check(str(address), port, named=named)
    except AddressRefused:
        return
    assert not any(address.version == network.version and address in network for network in GUARDED)


@given(st.text(max_size=40) | st.lists(st.text(max_size=20), max_size=3))
def test_any_text_is_a_valid_setting_or_a_value_error(value: Any) -> None:
    try:
        addresses = read_addresses(value)
    except ValueError:
        return
    assert all(0 < port <= 65535 for entry in addresses.entries for port in (entry.ports[0], entry.ports[-1]))


# -- connecting ------------------------------------------------------------------------------------------------------


class Names:
    """A name server that the test controls: the addresses of `handlers.test`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses = ["127.0.0.1"]
        self.asked: list[str] = []
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name and parse_ip(name.partition("%")[0]) is None and name != "localhost":
            self.asked.append(name)
            found = [each for one in self.addresses for each in self._real(one, port, 0, socket.SOCK_STREAM)]
            return [(*each[:3], "", each[4]) for each in found]
        return self._real(host, port, *args, **kwargs)


class Connections:
    """Every address that this process tried to connect to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tried: list[tuple[str, int]] = []
        real = asyncio.SelectorEventLoop.sock_connect

        async def connect(loop: Any, sock: socket.socket, address: Any) -> None:
            self.tried.append(address[:2])
            await real(loop, sock, address)

        monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", connect)


async def discover(setting: str, uri: str) -> Any:
    protocol = Native(Means(read_addresses(setting)))
    try:
        return await protocol.discover(uri)
    finally:
        await protocol.close()


@pytest.mark.parametrize(
    "host",
    [
        METADATA,
        f"[::ffff:{METADATA}]",
        "[::ffff:a9fe:a9fe]",
        "[fe80::a9fe:a9fe]",
        "[fd00:ec2::254]",
        f"{METADATA}.",
        "2852039166",
        "0xA9FEA9FE",
        "0251.0376.0251.0376",
        "169.16689662",
    ],
)
def test_no_spelling_of_a_guarded_address_gets_a_connection(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connections = Connections(monkeypatch)

    with pytest.raises((BadRequest, EndpointFailed)):
        asyncio.run(discover("", f"http://{host}"))

    assert connections.tried == []


@pytest.mark.parametrize("setting", ["", "0.0.0.0/0, ::/0", "*.test", "*.test, 127.0.0.1"])
def test_a_name_that_resolves_to_a_guarded_address_is_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names, connections = Names(monkeypatch), Connections(monkeypatch)
    names.addresses = [METADATA, "fd00:ec2::254"]

    with pytest.raises(BadRequest, match="link-local or metadata address") as caught:
        asyncio.run(discover(setting, "http://handlers.test"))

    assert "deployment_addresses" in str(caught.value)
    assert connections.tried == []


def test_only_the_allowed_addresses_of_a_name_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    names, connections = Names(monkeypatch), Connections(monkeypatch)
    names.addresses = [METADATA, "127.0.0.9", "127.0.0.1"]

    async def scenario() -> None:
        async with endpoint() as (_, uri):
            port = uri.rpartition(":")[2]
            await discover(f"127.0.0.1:{port}", f"http://handlers.test:{port}")

    asyncio.run(scenario())

    assert {host for host, _ in connections.tried} == {"127.0.0.1"}


def test_a_name_is_not_resolved_if_only_other_names_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)

    with pytest.raises(BadRequest, match="its name is not among the allowed ones"):
        asyncio.run(discover("*.internal", "http://handlers.test"))

    assert names.asked == []


def test_another_port_or_network_is_refused_with_what_to_do() -> None:
    async def scenario() -> None:
        async with endpoint() as (static, uri):
            port = int(uri.rpartition(":")[2])
            await discover(f"127.0.0.0/8:{port}", uri)
            for setting in (f"127.0.0.0/8:{port % 65535 + 1}", "10.0.0.0/8"):
                with pytest.raises(BadRequest, match="deployment_addresses does not allow it") as caught:
                    await discover(setting, uri)
                assert caught.value.hint is not None and "deployment_addresses" in caught.value.hint
            assert static.asked == 1

    asyncio.run(scenario())


async def held(handled: Handled) -> None:
    """Hold a stream open without sending anything."""


@pytest.mark.parametrize("mode", ["stream", "request-response"])
def test_a_name_that_is_rebound_after_registration_is_not_followed(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams and requests check the address of every connection, as discovery does."""
    names = Names(monkeypatch)

    async def run() -> None:
        async with world(tmp_path, deployment_addresses=read_addresses("127.0.0.1")) as it:
            served = await it.register({"greeter/go": held}, modes=(mode,))
            registered = await it.node.ground.registry.register(f"http://handlers.test:{served.port}", force=True)
            names.addresses = ["127.0.0.2"]
            connections = Connections(monkeypatch)
            # aiohttp may cache the resolved address for some seconds; a new address is always checked.
            await it.node.ground.protocols.close()

            await it.send("greeter/go")
            reached = it.node.ground.invoker.endpoints
            await eventually(lambda: (one := reached.get(registered.deployment.id)) is not None and one.failures > 1)

            assert "deployment_addresses does not allow it: its address" in reached[registered.deployment.id].last_error
            assert not any(host == "127.0.0.2" for host, _ in connections.tried)
            assert served.starts == []

    asyncio.run(run())


# -- answers to clients with the role operate ------------------------------------------------------------------------


async def _answer_nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)
    writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
    writer.close()


def test_the_role_operate_learns_nothing_about_other_addresses(tmp_path: Path) -> None:
    async def run() -> None:
        async with (
            one(tmp_path) as (_, doors),
            endpoint({"name": "internal API"}) as (_, http),
            endpoint() as (down, busy),
        ):
            down.status = 503
            other = await asyncio.start_server(_answer_nonsense, "127.0.0.1", 0)
            with socket.socket() as bound:
                bound.bind(("127.0.0.1", 0))
                closed = f"http://127.0.0.1:{bound.getsockname()[1]}"
                raw = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
                everywhere = (closed, raw, http, busy, "http://nowhere.invalid")
                answers = {}
                for role in ("operate", "admin"):
                    token = (await doors.create(role))["token"]
                    for uri in everywhere:
                        status, body = await doors.ask("POST", "/deployments", token, value={"uri": uri})
                        answers[role, uri] = status, body["message"].replace(uri, "URI"), body["hint"]
            other.close()

            assert len({answers["operate", uri] for uri in everywhere}) == 1
            assert answers["operate", closed][:2] == (502, "no Holdfast endpoint answers at URI")
            assert len({answers["admin", uri] for uri in everywhere}) == len(everywhere)

    asyncio.run(run())
