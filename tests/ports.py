"""Ports for processes that must know theirs before they start."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Distinct ports that were free a moment ago: all are held until the last is found.

    If the system names the range of ports for outgoing connections, these are outside of it. Otherwise a node that is
    down for a moment could find its port in use by another connection when it restarts.
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
