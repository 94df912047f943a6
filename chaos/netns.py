"""Nodes in network namespaces of their own, joined by a bridge: cuts made by the kernel instead of by a proxy.

Needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN), the command `ip`, and a firewall that lets packets cross a bridge; where that
is not given, `NotPermitted` says so. The firewall is tried out, because nothing else tells: a Docker daemon sets the policy
for forwarded packets to DROP and filters bridges too, and then namespaces can be made in which nobody hears anybody.
Everything stays inside this machine: the bridge joins no real interface and the addresses are private ones that no
other route here uses. All that was made bears one prefix and is removed at the end, also after an error.

A silent cut gives the sender a wrong hardware address for the receiver: packets leave and nobody takes them, so TCP
resends and recovers as after a pulled cable. A blackhole route would instead fail `connect` at once with an error.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import secrets
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from holdfast.chaos.proxy import Blackhole, Cut, Direction, Mode, Pass

NOWHERE = "02:00:00:00:00:01"  # A locally administered hardware address that no interface of ours has.
DEVICE = "net0"
PROBE_S: Final = 3.0  # Time for the kernel to resend, on a machine that is busy.
CLONE_NEWNET: Final = 0x40000000


class NotPermitted(Exception):
    """This machine does not let us make network namespaces, or lets no packets pass between them."""


class Route:
    """The link over which `a` dials `b`. Accepts the modes that routes can express."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.current: Mode = Pass()

    def mode(self, mode: Mode) -> None:
        if not isinstance(mode, Pass | Cut | Blackhole):
            raise ValueError(f"{type(mode).__name__} needs a proxy: routes pass, cut or swallow")
        self.current = mode
        self._network.apply()


class Network:
    """Use as `with Network(["n1", "n2", "n3"]) as network`; start nodes by `network.command(name, argv)`."""

    def __init__(self, names: Sequence[str]) -> None:
        assert 0 < len(names) < 200, "one address of 254 for each node and one for us"
        self._prefix = f"hf{secrets.token_hex(3)}"
        self._names = list(names)
        self._made: list[list[str]] = []  # The commands that remove what was made, in order of making.
        self._hardware: dict[str, str] = {}
        self._applied: dict[tuple[str, str], str] = {}
        self._routes = {pair: Route(self) for pair in permutations(self._names, 2)}
        self.address: dict[str, str] = {}
        self.host_address = ""

    @property
    def proxies(self) -> Mapping[tuple[str, str], Route]:
        return self._routes

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def command(self, name: str, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` inside a node's namespace, under the same pid."""
        return ["ip", "netns", "exec", self._namespace(name), *argv]

    def down(self, name: str) -> None:
        """Pull the node's cable: cut it off from all others, including clients."""
        _ip("link", "set", self._port(name), "down")

    def up(self, name: str) -> None:
        _ip("link", "set", self._port(name), "up")

    def probe(self, patience_s: float = PROBE_S) -> None:
        """Connect from each node to each other one, and from here to each; raise `NotPermitted` if one cannot.

        The kernel completes the connections, so sockets are enough: no process is started.
        """
        sockets: list[socket.socket] = []
        try:
            for name in self._names:
                listening = self._socket_of(name, sockets)
                listening.bind((self.address[name], 0))
                listening.listen(len(self._names) + 1)
                for dialling in [None, *(other for other in self._names if other != name)]:
                    link = self._socket_of(dialling, sockets)
                    link.settimeout(patience_s)
                    try:
                        link.connect(listening.getsockname())
                    except OSError as error:
                        raise NotPermitted(
                            f"packets do not pass between network namespaces: {dialling or 'this process'} could not connect "
                            f"to {name} within {patience_s:g} s ({error}). A firewall drops them; a Docker daemon, for one, "
                            "sets the FORWARD policy of iptables to DROP"
                        ) from error
        finally:
            for each in sockets:
                each.close()

    def _socket_of(self, name: str | None, sockets: list[socket.socket]) -> socket.socket:
        """A socket in a node's namespace, or here. A thread enters the namespace, and ends there."""
        failures: list[OSError] = []

        def make() -> None:
            try:
                if name is not None:
                    _enter(Path("/run/netns") / self._namespace(name))
                sockets.append(socket.socket())
            except OSError as error:
                failures.append(error)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if failures:
            raise NotPermitted(f"the namespace of {name} cannot be entered: {failures[0]}")
        return sockets[-1]

    def apply(self) -> None:
        """Make the kernel's tables say what the routes' modes say."""
        for a, b in permutations(self._names, 2):
            there, back = self._routes[a, b].current, self._routes[b, a].current
            if isinstance(there, Cut) or isinstance(back, Cut):
                wanted = "cut"
            elif _swallows(there, Direction.FORWARD) or _swallows(back, Direction.BACKWARD):
                wanted = "silent"
            else:
                wanted = "pass"
            if wanted != self._applied[a, b]:
                self._bend(a, b, wanted)
                self._applied[a, b] = wanted

    def _bend(self, a: str, b: str, wanted: str) -> None:
        """Set what happens to packets from a to b."""
        hardware = NOWHERE if wanted == "silent" else self._hardware[b]
        within = ("-n", self._namespace(a))
        _ip(*within, "neigh", "replace", self.address[b], "lladdr", hardware, "dev", DEVICE, "nud", "permanent")
        if wanted == "cut":
            _ip(*within, "route", "replace", "unreachable", f"{self.address[b]}/32")
        elif self._applied.get((a, b)) == "cut":
            _ip(*within, "route", "del", "unreachable", f"{self.address[b]}/32")

    def _make(self) -> None:
        if os.geteuid() != 0:
            raise NotPermitted("network namespaces need root")
        addresses = _free_network().hosts()
        bridge = self._prefix
        self._ip_made(["link", "add", bridge, "type", "bridge"], ["link", "del", bridge])
        self.host_address = str(next(addresses))
        _ip("addr", "add", f"{self.host_address}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for name in self._names:
            namespace, port = self._namespace(name), self._port(name)
            within = ("-n", namespace)
            self.address[name] = str(next(addresses))
            self._ip_made(["netns", "add", namespace], ["netns", "del", namespace])
            self._ip_made(
                ["link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", namespace], ["link", "del", port]
            )
            _ip("link", "set", port, "master", bridge, "up")
            _ip(*within, "addr", "add", f"{self.address[name]}/24", "dev", DEVICE)
            _ip(*within, "link", "set", "lo", "up")
            _ip(*within, "link", "set", DEVICE, "up")
            self._hardware[name] = json.loads(_ip(*within, "-j", "link", "show", DEVICE))[0]["address"]
        for a, b in permutations(self._names, 2):
            self._bend(a, b, "pass")
            self._applied[a, b] = "pass"
        self.probe()

    def _ip_made(self, make: list[str], remove: list[str]) -> None:
        _ip(*make)
        self._made.append(remove)

    def _remove(self) -> None:
        failures = []
        while self._made:
            try:
                _ip(*self._made.pop())
            except NotPermitted as error:
                failures.append(str(error))
        if failures:
            raise NotPermitted("left behind: " + "; ".join(failures))

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _port(self, name: str) -> str:
        return f"{self._prefix}p{self._names.index(name)}"


def _swallows(mode: Mode, direction: Direction) -> bool:
    return isinstance(mode, Blackhole) and direction in mode.directions


def _enter(namespace: Path) -> None:
    """Move the calling thread, alone, into a network namespace."""
    with namespace.open("rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(namespace))


def _free_network() -> ipaddress.IPv4Network:
    """A private network of 254 addresses that no route of this machine leads into, save the default one."""
    routes = json.loads(_ip("-j", "-4", "route", "show", "table", "all"))
    used = [ipaddress.ip_network(it["dst"], strict=False) for it in routes if it["dst"][0].isdigit()]
    for third in range(256):
        network = ipaddress.IPv4Network(f"10.213.{third}.0/24")
        if not any(network.overlaps(it) for it in used if isinstance(it, ipaddress.IPv4Network)):
            return network
    raise NotPermitted("every network of 10.213.0.0/16 is in use")


def _ip(*arguments: str) -> str:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
    except FileNotFoundError as error:
        raise NotPermitted("the command `ip` (iproute2) is not installed") from error
    if done.returncode != 0:
        raise NotPermitted(f"`ip {' '.join(arguments)}` was refused: {done.stderr.strip()}")
    return done.stdout
