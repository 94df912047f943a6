"""The meta group's state machine: tables of command and outcome, and the same bytes for the same log."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sdk.ids import DeploymentId, NodeId
from holdfast.statemachine import meta
from holdfast.statemachine.access import ROLES, CreateToken, NoteTokenUse, RevokeToken, RotateToken
from holdfast.statemachine.audit import Act, RecordActs
from holdfast.statemachine.effects import Result
from holdfast.statemachine.identity import AddIdentityKey, RetireIdentityKey
from holdfast.statemachine.levels import FIRST, LEVEL
from holdfast.statemachine.members import STATES, AssignPartition, PutNode, SetNodeState
from holdfast.statemachine.meta import (
    FoundCluster,
    Handler,
    MetaCommand,
    MetaState,
    Outcome,
    Proposal,
    RaiseLevel,
    RegisterDeployment,
    RemoveDeployment,
    Service,
)
from holdfast.statemachine.pauses import Halt, Release
from holdfast.statemachine.webhooks import CreateWebhook, DeleteWebhook

M1, N1 = map(NodeId, ("m1", "n1"))

DP_1 = DeploymentId("dp_1")
DP_2 = DeploymentId("dp_2")

OLD, NEW = "http://old:9080", "http://new:9080"


def service(name: str = "trips", *handlers: Handler, kind: str = "service") -> Service:
    return Service(name, kind, list(handlers or (Handler("book", "plain"),)))


def register(
    uri: str, *services: Service, id_: str = "", force: bool = False, metadata: dict[str, str] | None = None
) -> RegisterDeployment:
    return RegisterDeployment(
        DeploymentId(id_ or f"dp_{uri}"),
        uri,
        list(services or (service(),)),
        "sdk/1",
        ["stream"],
        [1, 1],
        metadata or {},
        force,
    )


def state_after(*commands: MetaCommand) -> MetaState:
    state = MetaState()
    for now_ms, command in enumerate(commands, 1000):
        assert meta.apply(state, now_ms, command).result.code in (0, 200), command
    return state


def test_only_the_first_founding_counts() -> None:
    state = state_after(FoundCluster("demo", 8))

    outcome = meta.apply(state, 2, FoundCluster("other", 64))

    assert outcome.result.code == 200
    assert (state.cluster, state.partitions) == ("demo", 8)


def test_a_cluster_made_from_another_knows_its_deployments_and_none_of_its_nodes() -> None:
    old = state_after(
        FoundCluster("old", 2, [N1], 1),
        RaiseLevel(2),
        PutNode(N1, "", "10.0.0.1:1"),
        register(OLD),
        register(NEW, metadata={"a": "b"}),
        register("http://third:1", service("other")),
    )
    commands = meta.restored(
        meta.decode_state(meta.encode_state(old)),
        cluster="new",
        placement=[[NodeId("m2"), M1], [NodeId("m3")]],
        replication=2,
    )

    new = state_after(PutNode(M1, "rack", "10.0.0.2:1"), *(copied(command) for command in commands))

    assert (new.deployments, new.offers, new.revisions) == (old.deployments, old.offers, old.revisions)
    assert (new.cluster, new.partitions, new.membership.replication, new.level) == ("new", 2, 2, 2)
    assert new.membership.first == {0: ("m1", "m2"), 1: ("m3",)} and list(new.membership.nodes) == ["m1"]
    meta.apply(new, 5000, register("http://fourth:1"))
    assert new.revisions["trips"] == 3 and old.revisions["trips"] == 2


def copied(command: MetaCommand) -> MetaCommand:
    """The command as it arrives through the log."""
    return meta.decode(meta.encode(Proposal(b"origin", 1, 1000, command))).command


def test_a_cluster_is_restored_once_and_only_with_its_deployments() -> None:
    *deployments, cluster = meta.restored(
        state_after(register(OLD), register(NEW)), cluster="new", placement=[[M1]], replication=1
    )
    state = MetaState()

    assert meta.apply(state, 1, deployments[0]).result.code == 0
    assert meta.apply(state, 2, cluster).result == (409, f"deployments are missing: dp_{NEW}", None)
    assert state.partitions == 0
    for command in (*deployments, cluster):
        assert meta.apply(state, 3, command).result.code == 0

    before = meta.encode_state(state)
    for command in (*deployments, cluster, FoundCluster("other", 5)):
        assert meta.apply(state, 3, command).result.code == 200
    assert meta.encode_state(state) == before


def test_new_invocations_go_to_the_newest_deployment() -> None:
    state = state_after(register(OLD), register(NEW))

    current = state.current("trips")

    assert current is not None and current.uri == NEW
    assert current.revisions == {"trips": 2}
    assert state.deployments[DeploymentId(f"dp_{OLD}")].revisions == {"trips": 1}


def test_the_same_uri_and_manifest_change_nothing() -> None:
    state = state_after(register(OLD, id_="dp_1"))

    outcome = meta.apply(state, 2, register(OLD, id_="dp_2"))

    assert (outcome.result.code, outcome.deployment) == (200, "dp_1")
    assert list(state.deployments) == ["dp_1"]


def upgraded(protocol: list[int], level: int = 2) -> tuple[MetaState, meta.Outcome]:
    """Register a deployment again after an upgrade of its SDK, with the same services."""
    state = state_after(register(OLD, id_="dp_1")._replace(protocol=[1, 2]))
    state.level = level
    return state, meta.apply(state, 2, register(OLD, id_="dp_2")._replace(sdk="sdk/2", protocol=protocol))


@pytest.mark.parametrize("protocol", [[1, 2], [1, 3]], ids=["the same versions", "a further version"])
def test_an_upgraded_sdk_with_the_same_manifest_is_the_same_deployment(protocol: list[int]) -> None:
    state, outcome = upgraded(protocol)

    assert outcome == (Result(200, "unchanged"), "dp_1", ())
    there = state.deployments[DP_1]
    assert (there.sdk, there.protocol, there.revisions) == ("sdk/2", protocol, {"trips": 1})


@pytest.mark.parametrize("protocol", [[2, 3], [1, 1]], ids=["without the oldest", "without the newest"])
def test_an_sdk_that_dropped_a_protocol_version_has_another_manifest(protocol: list[int]) -> None:
    state, outcome = upgraded(protocol)

    assert (outcome.result.code, outcome.differences) == (409, ("the way to reach it changed",))
    assert state.deployments[DP_1].sdk == "sdk/1"


def test_at_level_1_an_upgraded_sdk_has_another_manifest_as_in_that_release() -> None:
    state, outcome = upgraded([1, 2], level=1)

    assert outcome.result.code == 409 and state.deployments[DP_1].sdk == "sdk/1"


def test_registering_an_older_deployment_again_does_not_bring_it_back_unless_forced() -> None:
    state = state_after(register(OLD), register(NEW), register(OLD))
    assert (current := state.current("trips")) is not None and current.uri == NEW

    meta.apply(state, 9, register(OLD, force=True))

    assert (current := state.current("trips")) is not None and current.uri == OLD


def test_a_deployment_keeps_the_name_of_its_protocol() -> None:
    state = state_after(FoundCluster("demo", 8), register(OLD)._replace(protocol_name="another"))

    outcome = meta.apply(state, 2, register(OLD))

    assert outcome.result.code == 409, "one place does not speak two protocols"
    assert outcome.differences == ("the way to reach it changed",)
    (kept,) = meta.decode_state(meta.encode_state(state)).deployments.values()
    assert kept.protocol_name == "another"
    (command, _) = meta.restored(state, cluster="new", placement=[[N1]] * 8, replication=1)
    sent = meta.decode(meta.encode(meta.Proposal(b"o", 1, 1, command))).command
    assert sent == command and isinstance(sent, meta.RestoreDeployment) and sent.protocol_name == "another"


def test_the_own_protocol_is_left_out_of_what_is_written() -> None:
    """The previous release reads these bytes."""
    state = state_after(FoundCluster("demo", 8), register(OLD))
    command = register(OLD)

    assert len(msgpack.unpackb(meta.encode(meta.Proposal(b"o", 1, 1, command)))[3]) == 1 + 8
    assert [len(row) for row in msgpack.unpackb(meta.encode_state(state))[2]] == [9]


def test_a_deployment_never_changes_unless_forced() -> None:
    state = state_after(register(OLD, id_="dp_1"))
    changed = service("trips", Handler("book", "plain"), Handler("cancel", "plain"))

    refused = meta.apply(state, 5, register(OLD, changed))
    forced = meta.apply(state, 6, register(OLD, changed, force=True))

    assert refused.result.code == 409
    assert refused.differences == ("trips/cancel: was added",)
    assert (forced.result.code, forced.deployment) == (0, "dp_1")
    assert state.deployments[DP_1].services == [changed]
    assert state.deployments[DP_1].revisions == {"trips": 2}
    assert state.deployments[DP_1].created_ms == 1000


def test_a_changed_schema_or_option_is_named_in_the_difference() -> None:
    state = state_after(register(OLD))

    schema = meta.apply(state, 5, register(OLD, service("trips", Handler("book", "plain", input_schema="{}"))))
    option = meta.apply(state, 5, register(OLD, service()._replace(options={"retention_ms": 1})))

    assert schema.differences == ("trips/book: its description, schema or options changed",)
    assert option.differences == ("trips: its description or options changed",)


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        (service("a", Handler("x", "plain"), Handler("y", "plain")), service("a", Handler("x", "plain")),
         "a/y: was removed"),
        (service("a", Handler("x", "exclusive"), kind="object"), service("a", Handler("x", "plain")),
         "a: was of kind object, is of kind service"),
        (service("a", Handler("x", "exclusive"), kind="object"), service("a", Handler("x", "shared"), kind="object"),
         "a/x: was exclusive, is shared"),
        (service("a", Handler("x", "plain")), service("a", Handler("x", "plain", options={"private": True})),
         "a/x: was public, is private"),
    ],
)  # fmt: skip
def test_a_registration_that_breaks_callers_is_refused_with_the_difference(
    before: Service, after: Service, difference: str
) -> None:
    state = state_after(register(OLD, before))

    refused = meta.apply(state, 2, register(NEW, after))
    forced = meta.apply(state, 3, register(NEW, after, force=True))

    assert refused.result.code == 409
    assert difference in refused.differences
    assert forced.result.code == 0


def test_a_new_handler_and_an_unrelated_service_break_no_caller() -> None:
    state = state_after(register(OLD, service("a"), service("b")))

    outcome = meta.apply(
        state, 2, register(NEW, service("a", Handler("book", "plain"), Handler("more", "plain")), service("c"))
    )

    assert outcome.result.code == 0
    assert (current := state.current("b")) is not None and current.uri == OLD


def test_the_newest_deployment_of_a_service_is_removed_only_by_force() -> None:
    state = state_after(register(OLD, id_="dp_1"), register(NEW, id_="dp_2"))

    refused = meta.apply(state, 2, RemoveDeployment(DP_2, force=False))
    older = meta.apply(state, 3, RemoveDeployment(DP_1, force=False))
    forced = meta.apply(state, 4, RemoveDeployment(DP_2, force=True))

    assert refused.result.code == 409 and "trips" in refused.result.message
    assert older.result.code == forced.result.code == 0
    assert state.current("trips") is None and state.offers == {}


def test_after_a_forced_removal_the_previous_revision_is_current_and_numbers_continue() -> None:
    state = state_after(register(OLD, id_="dp_1"), register(NEW, id_="dp_2"), RemoveDeployment(DP_2, force=True))
    assert (current := state.current("trips")) is not None and current.id == "dp_1"

    meta.apply(state, 9, register("http://third", id_="dp_3"))

    assert state.deployments[DeploymentId("dp_3")].revisions == {"trips": 3}


def test_removing_an_unknown_deployment_is_a_404() -> None:
    assert meta.apply(MetaState(), 1, RemoveDeployment(DeploymentId("dp_9"), force=True)).result.code == 404


def test_deployments_are_bounded() -> None:
    state = state_after(*(register(f"http://h{number}") for number in range(meta.DEPLOYMENTS_MAX)))

    assert meta.apply(state, 1, register(NEW)).result.code == 507
    assert meta.apply(state, 2, register("http://h1")).result.code == 200


uris = st.sampled_from(["http://a", "http://b", "http://c"])
names = st.sampled_from(["x", "y", "z"])
options = st.sampled_from([{}, {"private": True}, {"retry": {"initial_ms": 5}}])
handlers = st.builds(
    Handler, name=names, mode=st.sampled_from(["plain", "shared"]), doc=st.none() | st.text(max_size=5), options=options
)
services = st.builds(
    Service,
    name=names,
    kind=st.sampled_from(["service", "object"]),
    handlers=st.lists(handlers, min_size=1, max_size=3),
    options=options,
)
commands: st.SearchStrategy[MetaCommand] = st.one_of(
    st.builds(
        FoundCluster,
        cluster=names,
        partitions=st.integers(1, 9),
        founders=st.lists(names, max_size=4),
        replication=st.integers(1, 7),
        level=st.integers(FIRST, LEVEL),
    ),
    st.builds(RaiseLevel, level=st.integers(0, LEVEL)),
    st.builds(PutNode, name=names, zone=names, address=names, ingress_url=names, admin_url=names),
    st.builds(SetNodeState, name=names, state=st.sampled_from([*STATES, "none"])),
    st.builds(
        AssignPartition,
        partition=st.integers(-1, 9),
        members=st.lists(names, min_size=1, max_size=3, unique=True),
        epoch=st.integers(0, 9),
    ),
    st.builds(
        RegisterDeployment,
        id=st.uuids().map(str),
        uri=uris,
        services=st.lists(services, min_size=1, max_size=3, unique_by=lambda each: each.name),
        sdk=st.just("sdk"),
        modes=st.just(["stream"]),
        protocol=st.just([1, 1]),
        protocol_name=st.sampled_from([meta.NATIVE, "another"]),
        metadata=st.dictionaries(names, names, max_size=2),
        force=st.booleans(),
    ),
    st.builds(RemoveDeployment, id=st.just("dp"), force=st.booleans()),
    st.builds(
        CreateToken,
        id=names,
        name=names,
        roles=st.lists(st.sampled_from([*ROLES, "none"]), max_size=3),
        services=st.lists(names, max_size=2),
        digest=st.binary(min_size=31, max_size=32),
        created_by=names,
        expires_ms=st.integers(0, 30),
    ),
    st.builds(RotateToken, id=names, digest=st.binary(min_size=31, max_size=32), old_until_ms=st.integers(0, 30)),
    st.builds(RevokeToken, id=names),
    st.builds(
        RecordActs,
        batch=st.binary(min_size=1, max_size=1),
        acts=st.lists(
            st.builds(
                Act,
                *(st.integers(0, 30), names, names, names, names, names, names, names),
                targets=st.dictionaries(names, names, max_size=2),
                status=st.integers(0, 599),
                error=names,
                unrecorded=st.integers(0, 3),
            ),
            min_size=1,
            max_size=3,
        ),
    ),
    st.builds(NoteTokenUse, used_ms=st.dictionaries(names, st.integers(0, 30), max_size=3)),
    st.builds(
        AddIdentityKey,
        id=st.sampled_from(["k1", "k2", "k3"]),
        public=st.just(b"p" * 32),
        private=st.binary(min_size=31, max_size=32),
        known=st.lists(st.sampled_from(["k1", "k2", "k3"]), max_size=2),
    ),
    st.builds(RetireIdentityKey, id=st.sampled_from(["k1", "k2", "k3"])),
    st.builds(Halt, names, st.none() | names, by=names, reason=names, recall=st.booleans()),
    st.builds(Release, names, st.none() | names),
    st.builds(
        CreateWebhook,
        id=st.sampled_from([b"8 bytes!", b"others..", b"short"]),
        url=names,
        events=st.integers(0, 15),
        services=st.lists(names, max_size=2),
        secret=names,
        by=names,
    ),
    st.builds(DeleteWebhook, id=st.sampled_from([b"8 bytes!", b"others.."])),
)


@given(st.lists(commands, max_size=20), st.integers(0, 19))
def test_any_log_gives_the_same_state_live_from_bytes_and_from_a_snapshot(
    log: list[MetaCommand], copied_at: int
) -> None:
    live, replayed = MetaState(), MetaState()
    for number, command in enumerate(log):
        if isinstance(command, RemoveDeployment) and live.deployments:
            command = command._replace(id=min(live.deployments))
        raw = meta.encode(Proposal(b"origin", number, number, command))
        if number == copied_at:
            left_out = replayed
            replayed = meta.decode_state(meta.encode_state(replayed))
            replayed.tokens, replayed.trail = left_out.tokens, left_out.trail
            replayed.identity, replayed.pauses = left_out.identity, left_out.pauses
            replayed.webhooks = left_out.webhooks

        first: Outcome = meta.apply(live, number, command)
        second = meta.apply(replayed, number, meta.decode(raw).command)

        assert first == second
        assert live.tokens.by_id == replayed.tokens.by_id
        assert live.trail.newest_first() == replayed.trail.newest_first()
        assert live.identity.keys == replayed.identity.keys
        assert live.pauses.by_scope == replayed.pauses.by_scope
        assert live.webhooks.by_id == replayed.webhooks.by_id
        assert live.webhooks.version == replayed.webhooks.version
        assert meta.encode_state(live) == meta.encode_state(replayed)
        for name, offers in live.offers.items():
            assert offers and len(set(offers)) == len(offers)
            assert all(name in live.deployments[offer].revisions for offer in offers)
        assert len({deployment.uri for deployment in live.deployments.values()}) == len(live.deployments)
