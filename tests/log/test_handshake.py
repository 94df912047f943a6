"""Two handshakes wired back to back, and one handshake against any input of a stranger."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.log.handshake import (
    REMOVED,
    UNPROVED_BYTES_MAX,
    Established,
    Fault,
    Handshake,
    HandshakeRefused,
    Hello,
    Identity,
    Role,
)

SECRET = b"sixteen bytes or more"
N1 = Identity(cluster="c1", node="n1", disk="disk-of-n1", incarnation=3)
N2 = Identity(cluster="c1", node="n2", disk="disk-of-n2", incarnation=7)


def dialer(
    us: Identity = N1,
    *,
    secret: bytes | None = SECRET,
    peer: str = "n2",
    certified: set[str] | None = None,
    nonce: bytes | None = None,
) -> Handshake:
    return Handshake(role=Role.DIALER, us=us, peer=peer, secret=secret, certified=certified, nonce=nonce)


def acceptor(
    us: Identity = N2,
    *,
    secret: bytes | None = SECRET,
    certified: set[str] | None = None,
    admit: Callable[[Identity], str | None] = lambda them: None,
    nonce: bytes | None = None,
) -> Handshake:
    return Handshake(role=Role.ACCEPTOR, us=us, secret=secret, certified=certified, admit=admit, nonce=nonce)


def converse(left: Handshake, right: Handshake) -> tuple[Established, Established]:
    """Carry bytes in both directions, one at a time, until both are established."""
    ends: dict[Handshake, Established] = {}
    while len(ends) < 2:
        moved = False
        for sender, receiver in ((left, right), (right, left)):
            for byte in sender.take_output():
                moved = True
                if (end := receiver.receive(bytes([byte]))) is not None:
                    ends[receiver] = end
        assert moved, "both wait for the other"
    return ends[left], ends[right]


def exchange(secret: bytes = SECRET) -> tuple[bytes, bytes, bytes, bytes]:
    """The four messages of a good handshake: hello, hello, proof, verdict."""
    left, right = dialer(secret=secret), acceptor(secret=secret)
    hello_of_dialer = left.take_output()
    right.receive(hello_of_dialer)
    hello_of_acceptor = right.take_output()
    left.receive(hello_of_acceptor)
    proof = left.take_output()
    right.receive(proof)
    return hello_of_dialer, hello_of_acceptor, proof, right.take_output()


def refusal(handshake: Handshake, data: bytes) -> HandshakeRefused:
    with pytest.raises(HandshakeRefused) as caught:
        handshake.receive(data)
    return caught.value


@pytest.mark.parametrize("secret", [SECRET, None])
def test_two_nodes_learn_each_other_s_identity(secret: bytes | None) -> None:
    at_dialer, at_acceptor = converse(dialer(secret=secret), acceptor(secret=secret))

    assert at_dialer.peer == N2
    assert at_acceptor.peer == N1


def test_each_direction_has_a_key_of_its_own_and_both_sides_agree_on_it() -> None:
    at_dialer, at_acceptor = converse(dialer(), acceptor())
    again, _ = converse(dialer(), acceptor())

    assert at_dialer.send_key == at_acceptor.receive_key
    assert at_dialer.receive_key == at_acceptor.send_key
    assert len({at_dialer.send_key, at_dialer.receive_key, again.send_key, again.receive_key, None}) == 5


def test_bytes_after_the_verdict_are_handed_on_as_they_are() -> None:
    left, right = dialer(), acceptor()
    right.receive(left.take_output())
    left.receive(right.take_output())
    right.receive(left.take_output())

    end = left.receive(right.take_output() + b"first frame")

    assert end is not None and end.rest == b"first frame"


def test_an_acceptor_silently_closes_a_dialer_with_another_secret() -> None:
    left, right = dialer(secret=b"x" * 16), acceptor()
    right.receive(left.take_output())
    left.receive(right.take_output())

    refused = refusal(right, left.take_output())

    assert refused.fault is Fault.PROOF and "'n1'" in refused.reason
    assert right.take_output() == b""
    assert "secret" in left.explain_close()


def test_a_dialer_rejects_an_acceptor_that_does_not_know_the_secret() -> None:
    _, hello, _, verdict = exchange(secret=b"y" * 16)
    left = dialer()
    left.receive(hello)

    refused = refusal(left, verdict)

    assert refused.fault is Fault.PROOF


MISFITS = pytest.mark.parametrize(
    ("left", "fault", "reason"),
    [
        (lambda secret: dialer(dataclasses.replace(N1, cluster="c2"), secret=secret), Fault.CLUSTER,
         "different cluster: 'n1' belongs to 'c2', 'n2' to 'c1'"),
        (lambda secret: dialer(dataclasses.replace(N1, cluster="c1/2"), secret=secret), Fault.CLUSTER,
         "same cluster name, but different founders or backup"),
        (lambda secret: dialer(peer="n3", secret=secret), Fault.NODE, "'n1' wanted 'n3' but reached 'n2'"),
    ],
    ids=["cluster", "founders", "address"],
)  # fmt: skip


@MISFITS
def test_a_mismatching_node_gets_the_reason_once_it_has_proved_itself(
    left: Callable[[bytes], Handshake], fault: Fault, reason: str
) -> None:
    one, right = left(SECRET), acceptor()
    right.receive(one.take_output())
    one.receive(right.take_output())

    refused = refusal(right, one.take_output())
    told = refusal(one, right.take_output())

    assert refused.fault is fault and reason in refused.reason
    assert told.fault is Fault.REFUSED_BY_PEER and reason in told.reason


@MISFITS
def test_a_mismatching_node_learns_nothing_before_it_has_proved_itself(
    left: Callable[[bytes], Handshake], fault: Fault, reason: str
) -> None:
    one, right = left(b"x" * 16), acceptor()
    hello = one.take_output()
    right.receive(hello)
    answer = right.take_output()
    one.receive(answer)

    assert N2.disk.encode() not in answer
    assert all(name in hello for name in (b"n2", b"c1") if name in answer), "it is told only what it said itself"
    assert refusal(right, one.take_output()).fault is Fault.PROOF
    assert right.take_output() == b""


def test_a_removed_node_gets_a_reason_distinct_from_other_refusals() -> None:
    left, right = dialer(), acceptor(admit=lambda them: f"{REMOVED}: for ever")
    right.receive(left.take_output())
    left.receive(right.take_output())
    refusal(right, left.take_output())

    told = refusal(left, right.take_output())

    assert told.fault is Fault.REMOVED and "removed from the cluster: for ever" in told.reason


def test_a_dialer_reports_an_answer_from_the_wrong_node() -> None:
    answer = Hello(Role.ACCEPTOR, dataclasses.replace(N2, node="n3"), "n1", 1, bytes(32)).encode()

    refused = refusal(dialer(), answer)

    assert refused.fault is Fault.NODE and "'n3'" in refused.reason and "'n2'" in refused.reason


def test_another_protocol_version_is_refused_and_named_to_both() -> None:
    left, right = dialer(), acceptor()
    hello = bytearray(left.take_output())
    hello[5] = 9

    refused = refusal(right, bytes(hello))
    answer = bytearray(right.take_output())
    answer[5] = 9  # Like a later release.
    told = refusal(left, bytes(answer))

    assert refused.fault is Fault.VERSION and "version 9" in refused.reason
    assert told.fault is Fault.VERSION and "version 9" in told.reason


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, None), (None, SECRET)])
def test_a_side_with_a_secret_and_one_without_refuse_each_other_with_the_reason(
    ours: bytes | None, theirs: bytes | None
) -> None:
    left, right = dialer(secret=theirs), acceptor(secret=ours)

    refused = refusal(right, left.take_output())
    answer = right.take_output()
    told = refusal(left, answer)

    assert refused.fault is told.fault is Fault.PROOF and "secret" in told.reason
    assert N2.disk.encode() not in answer


def test_a_recorded_dialer_cannot_be_replayed_to_an_acceptor() -> None:
    hello, _, proof, _ = exchange()
    right = acceptor()
    right.receive(hello)

    assert refusal(right, proof).fault is Fault.PROOF


def test_a_recorded_acceptor_cannot_be_replayed_to_a_dialer() -> None:
    _, hello, _, verdict = exchange()
    left = dialer()
    left.receive(hello)

    assert refusal(left, verdict).fault is Fault.PROOF


def test_the_same_recording_passes_only_where_the_nonces_are_the_same() -> None:
    """Shows that the nonces, and nothing else, stop a replay."""
    left, right = dialer(nonce=b"a" * 32), acceptor(nonce=b"b" * 32)
    hello = left.take_output()
    right.receive(hello)
    left.receive(right.take_output())
    proof = left.take_output()
    same, fresh = acceptor(nonce=b"b" * 32), acceptor(nonce=b"c" * 32)
    same.receive(hello)
    fresh.receive(hello)

    assert same.receive(proof) is not None
    assert refusal(fresh, proof).fault is Fault.PROOF


def test_a_dialers_own_hello_sent_back_is_refused() -> None:
    left = dialer()

    assert refusal(left, left.take_output()).fault is Fault.MALFORMED


def test_a_dialers_own_proof_sent_back_is_not_a_verdict() -> None:
    """An acceptor without the secret answers with the dialer's own proof."""
    left = dialer()
    left.take_output()
    left.receive(Hello(Role.ACCEPTOR, N2, "n1", 1, bytes(32)).encode())
    mac = left.take_output()[1:]

    assert refusal(left, bytes([2, 0]) + mac).fault is Fault.PROOF


@pytest.mark.parametrize("message", range(4))
def test_no_bit_of_any_message_can_be_changed(message: int) -> None:
    size = len(exchange()[message])
    for offset in range(size):
        left, right = dialer(), acceptor()
        ends: list[Established | None] = []
        with pytest.raises((HandshakeRefused, AssertionError)) as caught:
            sender, receiver = left, right
            for number in range(4):
                data = bytearray(sender.take_output())
                if number == message:
                    data[offset] ^= 1
                ends.append(receiver.receive(bytes(data)))
                sender, receiver = receiver, sender
            # A changed length makes the receiver wait for bytes that never arrive, so it does not finish.
            assert ends[-1] is not None, "the dialer still waits"

        assert caught.type is HandshakeRefused or "still waits" in str(caught.value)


def test_a_handshake_cut_short_anywhere_is_neither_established_nor_refused() -> None:
    hello = dialer().take_output()
    for length in range(len(hello)):
        right = acceptor()

        assert right.receive(hello[:length]) is None
        assert right.take_output() == b""


def test_an_oversized_hello_is_refused_by_its_announced_length() -> None:
    head = dialer().take_output()[:6] + (303).to_bytes(2, "big")

    refused = refusal(acceptor(), head)

    assert refused.fault is Fault.MALFORMED and "303" in refused.reason


def test_the_longest_ids_pass_and_longer_ones_cannot_be_configured() -> None:
    long = "ä" * 32
    us, them = Identity(long, "a" * 64, long, 2**64 - 1), Identity(long, "b" * 64, long, 0)

    _, at_acceptor = converse(dialer(us, peer="b" * 64), acceptor(them))

    assert at_acceptor.peer == us
    for bad in ("", "ä" * 33, "line\nbreak", "\ud800"):
        with pytest.raises(ValueError):
            Identity("c1", bad, "d", 0)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="16"):
        dialer(secret=b"fifteen bytes..")


def test_a_known_peer_that_is_not_admitted_gets_the_reason_under_a_mac() -> None:
    left, right = dialer(), acceptor(admit=lambda them: f"no {them.node} here")
    right.receive(left.take_output())
    left.receive(right.take_output())

    at_acceptor = refusal(right, left.take_output())
    verdict = right.take_output()
    at_dialer = refusal(left, verdict)

    assert at_acceptor.fault is Fault.NOT_ADMITTED
    assert at_dialer.fault is Fault.REFUSED_BY_PEER and "no n1 here" in at_dialer.reason


def test_admission_is_not_checked_before_the_peer_has_proved_itself() -> None:
    asked: list[Identity] = []
    left, right = dialer(secret=b"z" * 16), acceptor(admit=lambda them: asked.append(them))
    right.receive(left.take_output())
    left.receive(right.take_output())

    refusal(right, left.take_output())

    assert asked == []


def test_a_certificate_must_name_the_node_that_speaks() -> None:
    converse(dialer(secret=None, certified={"n2", "x"}), acceptor(secret=None, certified={"n1"}))
    left, right = dialer(secret=None, certified={"n2"}), acceptor(secret=None, certified={"n9"})
    right.receive(left.take_output())
    hello = right.take_output()
    left.receive(hello)

    assert refusal(right, left.take_output()).fault is Fault.NOT_ADMITTED
    assert "n9" in refusal(left, right.take_output()).reason
    assert refusal(dialer(secret=None, certified={"n9"}), hello).fault is Fault.NODE


def test_a_tls_client_at_a_plain_acceptor_is_recognised() -> None:
    assert "TLS" in refusal(acceptor(), b"\x16\x03\x01\x02\x00\x01\x00\x01").reason


HANDSHAKES = st.sampled_from([dialer, acceptor])


@given(HANDSHAKES, st.lists(st.binary(max_size=400), max_size=8))
def test_garbage_is_refused_or_incomplete(make: Callable[[], Handshake], pieces: list[bytes]) -> None:
    handshake = make()
    for piece in pieces:
        try:
            assert handshake.receive(piece) is None
        except HandshakeRefused:
            return


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_hello_never_raises_anything_but_a_refusal(data: st.DataObject) -> None:
    hello = bytearray(dialer().take_output())
    for offset in data.draw(st.lists(st.integers(0, len(hello) - 1), max_size=4)):
        hello[offset] = data.draw(st.integers(0, 255))
    right = acceptor()

    try:
        assert right.receive(bytes(hello)) is None
    except HandshakeRefused:
        assert N2.disk.encode() not in right.take_output()


@given(st.integers(0, 3), st.data())
def test_a_stranger_never_exceeds_the_bound_on_memory(head: int, data: st.DataObject) -> None:
    """With any input, the handshake ends before the bound is exceeded."""
    good = b"".join((*exchange()[:1], exchange()[2]))
    stream = good[: data.draw(st.integers(0, len(good)))] + bytes([head]) * (UNPROVED_BYTES_MAX + 1)
    right = acceptor()

    with pytest.raises(HandshakeRefused):
        for byte in stream:
            right.receive(bytes([byte]))
