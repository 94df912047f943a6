"""Changes of the members of the meta group, as its leader decides them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from holdfast.cluster.members.controller import Controller
from holdfast.cluster.peers.rpc import Rpc
from holdfast.log.errors import NotLeader
from holdfast.sdk.ids import NodeId
from holdfast.statemachine.members import ACTIVE, REMOVED, Member, Membership

N3 = NodeId("n3")


class Meta:
    """The meta group with two members, which lets a test decide when the new one has caught up."""

    def __init__(self) -> None:
        self.is_leader = True
        self.leader = "n1"
        self.last = self.applied = 7
        self.members: tuple[str, ...] = ("n1", "n2")
        self.ready: Callable[[], None] = lambda: None

    def status(self) -> Any:
        return SimpleNamespace(members=self.members, last=self.last, applied=self.applied)

    async def change_members(self, members: tuple[str, ...], timeout_s: float, may_seal: Callable[[], bool]) -> None:
        self.ready()
        if not may_seal():
            raise NotLeader("the change is not allowed")
        self.members = members


def controller(meta: Any, membership: Membership) -> Controller:
    nobody: Any = None
    return Controller(
        NodeId("n1"),
        {},
        Rpc(lambda *_: False),
        nobody,
        meta_group=lambda: meta,
        membership=lambda: membership,
        connected=lambda: {NodeId("n2"), N3},
        leader=lambda _: None,
        propose=nobody,
    )


def three_nodes() -> Membership:
    membership = Membership()
    for name in ("n1", "n2", "n3"):
        membership.nodes[NodeId(name)] = Member(NodeId(name), "", f"{name}:1", state=ACTIVE)
    return membership


async def test_a_new_node_becomes_a_member_of_the_meta_group() -> None:
    meta = Meta()

    assert await controller(meta, three_nodes())._change_meta()

    assert list(meta.members) == ["n1", "n2", "n3"]


async def test_a_node_that_was_removed_while_it_caught_up_gets_no_vote() -> None:
    """An operator who saw it without replicas and without a vote may have stopped it by now."""
    meta, membership = Meta(), three_nodes()

    def removed() -> None:
        membership.nodes[N3] = membership.nodes[N3]._replace(state=REMOVED)

    meta.ready = removed

    assert await controller(meta, membership)._change_meta()

    assert list(meta.members) == ["n1", "n2"]


async def test_a_new_node_gets_no_vote_while_an_entry_that_may_remove_it_is_not_applied() -> None:
    meta = Meta()
    meta.ready = lambda: setattr(meta, "last", meta.last + 1)

    assert await controller(meta, three_nodes())._change_meta()

    assert list(meta.members) == ["n1", "n2"]


async def test_a_member_that_was_removed_leaves_though_entries_are_not_applied() -> None:
    meta, membership = Meta(), three_nodes()
    meta.members = ("n1", "n2", "n3")
    membership.nodes[N3] = membership.nodes[N3]._replace(state=REMOVED)
    meta.last += 1

    assert await controller(meta, membership)._change_meta()

    assert list(meta.members) == ["n1", "n2"]
