"""Cuts by the kernel: between real processes in network namespaces. Skipped, with the reason, where not permitted."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.chaos.netns import Network, NotPermitted
from holdfast.chaos.proxy import Blackhole, Cut, Delay, Direction, Pass

PORT = 4000  # Free, because the namespaces are ours.
PATIENCE_S = 20.0
ROOT = Path(__file__).resolve().parents[2]

# Echoes every connection's bytes back to it.
SERVER = f"""
import asyncio, sys
async def serve(reader, writer):
    try:
        while chunk := await reader.read(100):
            writer.write(chunk)
    except OSError:
        pass
async def main():
    server = await asyncio.start_server(serve, "0.0.0.0", {PORT})
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""

# Connects, then for each line of input sends it and prints the echo; prints an error's name instead.
CLIENT = f"""
import socket, sys
try:
    link = socket.create_connection((sys.argv[1], {PORT}), timeout=float(sys.argv[2]))
    print("connected", flush=True)
    for line in sys.stdin:
        link.sendall(line.encode())
        print(link.recv(100).decode().strip(), flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network(["n1", "n2"]).__enter__()
    except NotPermitted as error:
        pytest.skip(str(error))
    try:
        yield made
    finally:
        made.__exit__(None, None, None)


@pytest.fixture
def server(network: Network) -> Iterator[Network]:
    """A server on n2."""
    command = network.command("n2", [sys.executable, "-c", SERVER])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield network
        process.kill()


class Client:
    """A client process on n1 with one connection to n2."""

    def __init__(self, network: Network, timeout_s: float = PATIENCE_S) -> None:
        argv = [sys.executable, "-c", CLIENT, network.address["n2"], str(timeout_s)]
        self._process = subprocess.Popen(
            network.command("n1", argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def things_named(prefix: str) -> list[str]:
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in (links + spaces).splitlines() if prefix in line]


def test_nodes_reach_each_other_and_we_reach_them(server: Network) -> None:
    with Client(server) as client:
        assert client.hear() == "connected"
        client.send("hello")
        assert client.hear() == "hello"

    with socket.create_connection((server.address["n2"], PORT), timeout=PATIENCE_S) as ours:
        ours.sendall(b"us")
        assert ours.recv(100) == b"us"


@pytest.mark.parametrize("direction", Direction)
def test_a_silent_cut_of_either_direction_holds_messages_until_it_heals(server: Network, direction: Direction) -> None:
    with Client(server) as client:
        assert client.hear() == "connected"

        server.proxies["n1", "n2"].mode(Blackhole(frozenset({direction})))
        client.send("into the void")
        with Client(server, timeout_s=0.5) as another:
            assert another.hear() == "TimeoutError"

        server.proxies["n1", "n2"].mode(Pass())
        assert client.hear() == "into the void"


def test_a_cut_refuses_new_connections(server: Network) -> None:
    server.proxies["n1", "n2"].mode(Cut())
    with Client(server) as client:
        assert client.hear() == "OSError"

    server.proxies["n1", "n2"].mode(Pass())
    with Client(server) as client:
        assert client.hear() == "connected"


def test_two_modes_of_one_pair_do_not_undo_each_other(server: Network) -> None:
    server.proxies["n1", "n2"].mode(Blackhole())
    server.proxies["n2", "n1"].mode(Blackhole())
    server.proxies["n1", "n2"].mode(Pass())

    with Client(server, timeout_s=0.5) as client:
        assert client.hear() == "TimeoutError"


def test_a_pulled_cable_silences_the_node_until_it_is_plugged_in(server: Network) -> None:
    with Client(server) as client:
        assert client.hear() == "connected"

        server.down("n2")
        client.send("hello")
        with pytest.raises(TimeoutError):
            socket.create_connection((server.address["n2"], PORT), timeout=0.5)

        server.up("n2")
        assert client.hear() == "hello"


def test_a_mode_that_routes_cannot_express_is_refused(network: Network) -> None:
    with pytest.raises(ValueError, match="proxy"):
        network.proxies["n1", "n2"].mode(Delay(10))


def test_a_network_that_swallows_packets_is_noticed(network: Network) -> None:
    network.probe()

    for direction in Direction:
        network.proxies["n1", "n2"].mode(Blackhole(frozenset({direction})))
        with pytest.raises(
            NotPermitted, match=r"packets do not pass between network namespaces: n[12] could not connect"
        ):
            network.probe(patience_s=0.2)

    network.proxies["n1", "n2"].mode(Pass())
    network.probe()


def test_under_the_firewall_of_a_docker_daemon_no_network_is_made_and_the_reason_is_given(network: Network) -> None:
    """In its own network namespace: the policy of this machine stays unchanged."""
    if shutil.which("iptables") is None:
        pytest.skip("the command `iptables` is not there")
    if not Path("/proc/sys/net/bridge/bridge-nf-call-iptables").exists():
        pytest.skip("this kernel does not filter bridges: the module br_netfilter is not loaded")
    program = "from holdfast.chaos.netns import Network; Network(['n1', 'n2']).__enter__()"
    script = (
        "mount -t tmpfs none /run/netns && echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables"
        ' && iptables -P FORWARD DROP && exec "$@"'
    )

    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE_S * 3,
    )

    assert "NotPermitted: packets do not pass between network namespaces" in done.stderr
    assert "left behind" not in done.stderr


def test_nothing_is_left_behind() -> None:
    network = Network(["n1", "n2", "n3"])
    prefix = network.command("n1", [])[3].split("-")[0]
    try:
        with network:
            assert len(things_named(prefix)) >= 7, "a bridge, three ports, three namespaces"
    except NotPermitted as error:
        pytest.skip(str(error))

    assert things_named(prefix) == []


def test_a_half_made_network_is_removed() -> None:
    network = Network(["n1", "n/2"])  # No file system takes this name for a namespace.
    prefix = network.command("n1", [])[3].split("-")[0]

    with pytest.raises(NotPermitted):
        network.__enter__()

    assert things_named(prefix) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_without_root_the_error_names_the_requirement() -> None:
    program = "import os; from holdfast.chaos.netns import Network; os.setuid(65534); Network(['n1']).__enter__()"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)

    assert "NotPermitted: network namespaces need root" in done.stderr
