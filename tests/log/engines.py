"""Shared by the tests of the engine."""

from __future__ import annotations

from holdfast.log.engine import Limits
from holdfast.log.messages import COMMANDS, Entry, Heartbeat, Message, NodeId
from tests.log.cluster import Cluster

SMALL = Limits(append_bytes_max=40, entry_bytes_max=40, window_messages=4)


def entry(index: int, term: int, text: bytes = b"x") -> Entry:
    return bytes([COMMANDS]) + b"\x91\xc4" + bytes([len(text)]) + text, index, term


def pick(messages: list[Message], kind: type) -> list[Message]:
    return [message for message in messages if type(message) is kind]


def lone_follower() -> Cluster:
    """`a` follows in term 1 with an empty log; its peers are played by the test."""
    c = Cluster()
    c.inject("b", "a", Heartbeat(1, 0, 1))
    c.fsync("a")
    for peer in "bc":
        c.lose("a", peer)
    return c


def answers(c: Cluster, to: str = "b", name: str = "a") -> list[Message]:
    """The messages from `name` to `to` once its disk has answered."""
    c.turn(name)
    while c.members[NodeId(name)].committing:
        c.fsync(name)
    return c.lose(name, to)


def everywhere(c: Cluster, command: bytes, names: str) -> bool:
    return all(command in c.applied(name) for name in names)
