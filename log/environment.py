"""The configuration of a log node, and its environment: disk, links, writer thread and random numbers.

A simulator hands in an `Environment` of its own. Nothing else of the log is replaced there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from holdfast.log.connection import LinkLimits
from holdfast.log.engine import Limits, Timing
from holdfast.log.link import Links
from holdfast.log.rows import Rows
from holdfast.log.sockets import Address, TlsFiles
from holdfast.log.store import LmdbStore
from holdfast.log.writer import Writer


@dataclass(frozen=True)
class NodeConfig:
    """Names, addresses, files and bounds of one node."""

    node: str
    cluster: str
    data: Path
    listen: Address
    peers: Mapping[str, Address] = field(default_factory=dict)
    secret: bytes | None = None
    tls: TlsFiles | None = None
    timing: Timing = field(default_factory=Timing)
    limits: Limits = field(default_factory=Limits)
    link_limits: LinkLimits = field(default_factory=LinkLimits)
    rows: Rows = field(default_factory=Rows)
    log_bytes_max: int = 16 << 30
    free_bytes_min: int = 64 << 20


@dataclass(frozen=True)
class LinkEvents:
    """Whom the links tell of sessions with peers: peer, session and disk; peer and session; peer, session and frame."""

    up: Callable[[str, int, str], None]
    down: Callable[[str, int], None]
    frame: Callable[[str, int, bytes], Iterator[None] | None]
    fatal: Callable[[BaseException], None]
    removed: Callable[[str, str], None]


class Environment:
    """That of a real machine."""

    def open_store(self, config: NodeConfig) -> LmdbStore:
        return LmdbStore.open(
            config.data,
            node=config.node,
            cluster=config.cluster,
            bytes_max=config.log_bytes_max,
            free_bytes_min=config.free_bytes_min,
        )

    def open_links(self, config: NodeConfig, store: LmdbStore, events: LinkEvents) -> Links:
        return Links(
            cluster=config.cluster,
            node=config.node,
            disk=store.disk,
            incarnation=store.incarnation,
            listen=config.listen,
            secret=config.secret,
            tls=config.tls,
            on_up=events.up,
            on_down=events.down,
            on_frame=events.frame,
            on_fatal=events.fatal,
            on_removed=events.removed,
            limits=config.link_limits,
        )

    def start_writer(
        self,
        store: LmdbStore,
        *,
        on_committed: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
        on_no_space: Callable[[], None],
    ) -> Writer:
        return Writer(
            store,
            asyncio.get_running_loop(),
            on_done=on_committed,
            on_fatal=on_fatal,
            on_no_space=on_no_space,
        )

    def random(self) -> Random:
        return Random()
