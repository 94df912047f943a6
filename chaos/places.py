"""Where the processes of a chaos run listen, and the links between their nodes."""

from __future__ import annotations

import contextlib
import platform
import secrets
import socket
from dataclasses import dataclass, field
from typing import Final

from holdfast.chaos.proxy import Delay, Mode, Pass, Proxy, Throttle

PORTS: Final = {"peer": 7000, "ingress": 8080, "admin": 9070, "handlers": 9080, "s3": 9000}


@dataclass(slots=True)
class KnownLink:
    """A proxy that remembers its mode."""

    proxy: Proxy
    current: Mode = field(default_factory=Pass)

    def mode(self, mode: Mode) -> None:
        self.current = mode
        self.proxy.mode(mode)

    @property
    def is_open(self) -> bool:
        return isinstance(self.current, Pass | Delay | Throttle)


class Places:
    """Allocates listening addresses for processes: port name -> address."""

    def __init__(self) -> None:
        self._second, self._third = secrets.randbelow(200) + 20, secrets.randbelow(250) + 1
        self._given = 0

    def place(self) -> dict[str, tuple[str, int]]:
        self._given += 1
        if platform.system() == "Linux":
            # A private network within loopback: no other process takes a port while its owner is down.
            return {door: (f"127.{self._second}.{self._third}.{self._given}", port) for door, port in PORTS.items()}
        # On other systems loopback is one address. Ports that were just free are likely to stay free.
        with contextlib.ExitStack() as stack:
            return {door: _free_address(stack) for door in PORTS}


def _free_address(stack: contextlib.ExitStack) -> tuple[str, int]:
    bound = stack.enter_context(socket.socket())
    bound.bind(("127.0.0.1", 0))
    host, port = bound.getsockname()
    return host, port
