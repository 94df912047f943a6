"""What the settings of a node mean for its log: addresses and secrets of the links, and sizes that follow from each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from holdfast.cluster.certificates import peer_files
from holdfast.cluster.config import DEV_SECRET, Config
from holdfast.log import engine
from holdfast.log.connection import LinkLimits
from holdfast.log.environment import NodeConfig
from holdfast.log.rows import Rows
from holdfast.log.sockets import Address

#: Around a payload in a command: names, headers, numbers.
COMMAND_HEAD_BYTES: Final = 1024 * 1024
#: Of one group, on the way to one peer,
WINDOW_BYTES: Final = 2 * 1024 * 1024
#: and of all groups: a peer that comes back is sent all its windows at once, and must not be given up for it.
WINDOWS_BYTES: Final = 256 * 1024 * 1024


def command_bytes_max(config: Config) -> int:
    """The size of the largest command: one with the largest body."""
    return config.body_bytes_max + COMMAND_HEAD_BYTES


def log_settings(
    config: Config, *, cluster_id: str, peers: Mapping[str, Address], timing: engine.Timing, rows: Rows
) -> NodeConfig:
    """`cluster_id` is what nodes must agree on before they connect; `peers` are dialled first."""
    tls = peer_files(config)
    command_bytes = command_bytes_max(config)
    frame_bytes = max(LinkLimits().frame_bytes_max, 2 * command_bytes)
    return NodeConfig(
        node=config.node,
        cluster=cluster_id,
        data=config.data / "log",
        listen=Address(config.peer.host, config.peer.port),
        peers=peers,
        secret=config.secret or (DEV_SECRET if tls is None else None),
        tls=tls,
        timing=timing,
        limits=engine.Limits(command_bytes_max=command_bytes, window_bytes=WINDOW_BYTES),
        rows=rows,
        link_limits=LinkLimits(frame_bytes_max=frame_bytes, outbox_bytes_max=2 * frame_bytes + WINDOWS_BYTES),
        log_bytes_max=config.log_bytes_max,
        free_bytes_min=config.free_bytes_min,
    )
