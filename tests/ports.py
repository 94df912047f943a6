"""Ports for processes that must be told theirs before they start."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Distinct ones, free a moment ago: all are held until the last is found.

    Where the system says which ports it gives to outgoing connections, these are others. A node that is down for a moment
    would else find its port taken by somebody's connection when it comes back.
    """
    held = [_hold() for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def _hold() -> socket.socket:
    highest = _below_outgoing()
    for _ in range(1000 if highest > _LOWEST else 0):
        each = socket.socket()
        try:
            each.bind(("127.0.0.1", random.randrange(_LOWEST, highest)))
            return each
        except OSError:
            each.close()
    each = socket.socket()
    each.bind(("127.0.0.1", 0))
    return each


def _below_outgoing() -> int:
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
