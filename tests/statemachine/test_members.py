"""The placement of partitions: the first one, and that single changes lead to the right one."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from holdfast.sdk.ids import NodeId, PartitionNumber
from holdfast.statemachine import meta
from holdfast.statemachine.members import (
    ACTIVE,
    DRAINING,
    LEAVING,
    REMOVED,
    AssignPartition,
    Membership,
    PutNode,
    SetNodeState,
    next_change,
)
from holdfast.statemachine.meta import FoundCluster, MetaState

N1, N2, N3, N4, N5 = map(NodeId, ("n1", "n2", "n3", "n4", "n5"))


def founded(zones: dict[str, str], partitions: int = 8, replication: int = 3) -> Membership:
    membership = Membership()
    for name, zone in zones.items():
        assert membership.put(PutNode(NodeId(name), zone, f"{name}:1")).code == 0
    membership.found(partitions=partitions, founders=[NodeId(name) for name in zones], replication=replication)
    return membership


def settle(membership: Membership, ready: set[NodeId] | None = None, present: set[NodeId] | None = None) -> int:
    """Carry out changes until none is left, and return their number."""
    names = {name for name, node in membership.nodes.items() if node.state != REMOVED} if ready is None else ready
    for count in range(1000):
        for number, replicas in membership.table.items():
            after = next_change(membership, number, ready=names, present=names if present is None else present)
            if after is not None:
                assert after and len({*after} - {*replicas.members}) <= 1 and len({*replicas.members} - {*after}) <= 1
                assert {*after} & {*replicas.members}, "whoever leads the change is there after it"
                assert membership.assign(AssignPartition(number, list(after), replicas.epoch + 1)).code == 0
                break
        else:
            return count
    raise AssertionError("the changes have no end")


def loads(membership: Membership) -> Counter[str]:
    return Counter(name for replicas in membership.table.values() for name in replicas.members)


def test_with_three_nodes_each_holds_every_partition() -> None:
    membership = founded({"n1": "", "n2": "", "n3": ""})

    assert {replicas.members for replicas in membership.table.values()} == {("n1", "n2", "n3")}
    assert settle(membership) == 0


def test_a_partition_with_one_replica_has_two_while_it_moves() -> None:
    membership = founded({"n1": "", "n2": ""}, partitions=2, replication=1)
    assert loads(membership) == {"n1": 1, "n2": 1}
    membership.set_state(SetNodeState(N2, LEAVING))

    assert settle(membership) == 2
    assert loads(membership) == {"n1": 2}


def test_five_nodes_share_the_partitions_evenly() -> None:
    membership = founded({f"n{number}": "" for number in range(1, 6)}, partitions=10)

    assert set(loads(membership).values()) == {6}
    assert settle(membership) == 0


def test_the_replicas_of_a_partition_are_in_different_zones() -> None:
    membership = founded({"a1": "a", "a2": "a", "b1": "b", "b2": "b", "c1": "c", "c2": "c"}, partitions=12)

    for replicas in membership.table.values():
        assert {name[0] for name in replicas.members} == {"a", "b", "c"}


def test_new_nodes_get_their_share_of_the_partitions() -> None:
    membership = founded({"n1": "", "n2": "", "n3": ""}, partitions=10)
    membership.put(PutNode(N4, "", "n4:1"))
    membership.put(PutNode(N5, "", "n5:1"))

    assert settle(membership) == 12, "no more moves than are needed"
    assert max(loads(membership).values()) - min(loads(membership).values()) <= 1


def test_a_node_that_is_not_ready_gets_no_replicas() -> None:
    membership = founded({"n1": "", "n2": "", "n3": ""})
    membership.put(PutNode(N4, "", "n4:1"))

    assert settle(membership, ready={N1, N2, N3}) == 0


def test_a_live_replica_is_not_moved_to_a_new_node_while_another_is_dead() -> None:
    membership = founded({"n1": "", "n2": "", "n3": ""})
    membership.put(PutNode(N4, "", "n4:1"))
    present = {N1, N2, N4}

    assert settle(membership, ready=present, present=present) == 0, "two live copies are not made one for balance"

    membership.set_state(SetNodeState(N3, REMOVED))
    settle(membership, ready=present, present=present)
    assert {replicas.members for replicas in membership.table.values()} == {("n1", "n2", "n4")}


def test_a_new_node_gets_its_share_when_the_dead_one_is_back() -> None:
    membership = founded({"n1": "", "n2": "", "n3": ""})
    membership.put(PutNode(N4, "", "n4:1"))
    assert settle(membership, ready={N4}, present={N1, N2, N4}) == 0

    settle(membership, ready={N1, N2, N3, N4})

    assert set(loads(membership).values()) == {6}


def test_a_partition_short_of_replicas_gets_one_although_another_is_dead() -> None:
    membership = founded({"n1": "", "n2": ""}, partitions=1, replication=3)
    membership.put(PutNode(N3, "", "n3:1"))

    after = next_change(membership, PartitionNumber(0), ready={N3}, present={N1, N3})

    assert after == ("n1", "n2", "n3")


def test_a_dead_replica_is_removed_first_if_there_are_too_many_or_several_leave() -> None:
    membership = founded({"n1": "", "n2": "", "n3": "", "n4": ""}, partitions=1, replication=4)
    membership.replication = 3
    assert next_change(membership, PartitionNumber(0), ready=(), present={N1, N2, N4}) == ("n1", "n2", "n4")

    membership = founded({f"n{number}": "" for number in range(1, 6)}, partitions=1)
    members = membership.table[PartitionNumber(0)].members
    for name in members[:2]:
        membership.set_state(SetNodeState(name, LEAVING))
    after = next_change(membership, PartitionNumber(0), ready={N4}, present={members[0], members[2], N4})
    assert after == (members[0], members[2], "n4")


def test_a_removed_node_is_replaced_or_dropped_if_there_is_no_replacement() -> None:
    membership = founded({"n1": "", "n2": "", "n3": "", "n4": ""})
    membership.set_state(SetNodeState(N2, REMOVED))
    settle(membership)
    assert {replicas.members for replicas in membership.table.values()} == {("n1", "n3", "n4")}

    membership.set_state(SetNodeState(N3, LEAVING))
    settle(membership)
    assert {replicas.members for replicas in membership.table.values()} == {("n1", "n4")}

    membership.put(PutNode(N5, "", "n5:1"))
    settle(membership)
    assert {replicas.members for replicas in membership.table.values()} == {("n1", "n4", "n5")}


def test_a_draining_node_keeps_its_replicas_and_gets_no_more() -> None:
    membership = founded({"n1": "", "n2": "", "n3": ""})
    membership.set_state(SetNodeState(N1, DRAINING))
    assert settle(membership) == 0

    membership.put(PutNode(N4, "", "n4:1"))
    settle(membership)
    assert loads(membership)["n1"] <= 8


def test_a_replica_moves_to_a_better_zone() -> None:
    membership = founded({"a1": "a", "a2": "a", "a3": "a"}, partitions=4)
    membership.put(PutNode(NodeId("b1"), "b", "b1:1"))
    membership.put(PutNode(NodeId("c1"), "c", "c1:1"))

    settle(membership)

    for replicas in membership.table.values():
        assert {name[0] for name in replicas.members} == {"a", "b", "c"}


def test_the_last_node_cannot_be_removed_and_a_removed_name_is_not_reused() -> None:
    membership = founded({"n1": "", "n2": ""})
    assert membership.set_state(SetNodeState(N1, REMOVED)).code == 0

    assert membership.set_state(SetNodeState(N2, LEAVING)).code == 409
    assert membership.set_state(SetNodeState(N1, ACTIVE)).code == 409
    assert membership.put(PutNode(N1, "", "x:1")).code == 409
    assert membership.set_state(SetNodeState(NodeId("n9"), DRAINING)).code == 404


def test_late_reports_of_a_partition_change_nothing() -> None:
    membership = founded({"n1": "", "n2": "", "n3": ""})
    assert membership.assign(AssignPartition(PartitionNumber(0), [N3, N1], 2)).code == 0

    assert membership.assign(AssignPartition(PartitionNumber(0), [N1, N2, N3], 1)).code == 200
    assert membership.assign(AssignPartition(PartitionNumber(99), [N1], 1)).code == 404

    assert membership.table[PartitionNumber(0)].members == ("n1", "n3")


@given(st.data())
def test_changes_of_members_always_finish(data: st.DataObject) -> None:
    zones = data.draw(st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(["", "x", "y", "z"]), min_size=1))
    membership = founded(zones, partitions=5, replication=data.draw(st.integers(1, 5)))
    for _ in range(data.draw(st.integers(0, 6))):
        name = data.draw(st.sampled_from("abcdefgh"))
        if data.draw(st.booleans()):
            membership.put(PutNode(NodeId(name), data.draw(st.sampled_from(["", "x", "y"])), "h:1"))
        else:
            membership.set_state(
                SetNodeState(NodeId(name), data.draw(st.sampled_from([ACTIVE, DRAINING, LEAVING, REMOVED])))
            )

        settle(membership)

    again = Membership.unpack(membership.pack())
    assert (again.nodes, again.table, again.first) == (membership.nodes, membership.table, membership.first)
    staying = [node for node in membership.nodes.values() if node.state in (ACTIVE, DRAINING)]
    for replicas in membership.table.values():
        assert 1 <= len(replicas.members) <= max(membership.replication, 1)
        if all(node.state == ACTIVE for node in staying):
            assert {*replicas.members} <= {node.name for node in staying}


def test_the_state_of_the_meta_group_holds_the_members() -> None:
    state = MetaState()
    for command in (PutNode(N1, "a", "h:1", "http://i", "http://a"), FoundCluster("c", 2, [N1], 3)):
        assert (
            meta.apply(state, 1, meta.decode(meta.encode(meta.Proposal(b"", 1, 1, command))).command).result.code == 0
        )

    again = meta.decode_state(meta.encode_state(state))

    assert again.membership.nodes == state.membership.nodes
    assert again.membership.table == {0: (("n1",), 0), 1: (("n1",), 0)}
