"""The keys with which a cluster signs: creation, rotation and removal. Nothing prints a private key."""

from __future__ import annotations

import pytest

from holdfast.statemachine import meta
from holdfast.statemachine.identity import AddIdentityKey, Identity, RetireIdentityKey
from holdfast.statemachine.meta import MetaState, Proposal

PUBLIC, PRIVATE = b"p" * 32, b"PRIVATE." * 4
FIRST = AddIdentityKey("k1", PUBLIC, PRIVATE, [])
SECOND = AddIdentityKey("k2", PUBLIC, PRIVATE, ["k1"])


def identity(*commands: AddIdentityKey) -> Identity:
    made = Identity()
    for now_ms, command in enumerate(commands, 1):
        assert made.add(command, now_ms).code == 0
    return made


def test_only_one_of_two_nodes_that_make_the_first_key_at_once_succeeds() -> None:
    made = identity(FIRST)

    assert made.add(FIRST._replace(id="other"), 2).code == 409
    assert [(key.id, key.created_ms) for key in made.keys] == [("k1", 1)]


def test_at_most_two_keys_are_valid_during_a_rotation() -> None:
    made = identity(FIRST, SECOND)

    assert made.add(AddIdentityKey("k3", PUBLIC, PRIVATE, ["k1", "k2"]), 3).code == 409
    assert made.retire(RetireIdentityKey("k1")).code == 0
    assert [key.id for key in made.keys] == ["k2"]


def test_the_last_key_cannot_be_removed() -> None:
    made = identity(FIRST)

    assert made.retire(RetireIdentityKey("k1")).code == 409
    assert made.retire(RetireIdentityKey("k9")).code == 404
    assert len(made.keys) == 1


@pytest.mark.parametrize(
    "wrong", [FIRST._replace(public=b"short"), FIRST._replace(private=b"x" * 33), SECOND._replace(id="k1")]
)
def test_an_invalid_key_is_refused(wrong: AddIdentityKey) -> None:
    assert Identity().add(wrong, 1).code == 409


def test_a_private_key_never_appears_in_texts_or_backups() -> None:
    state = MetaState()
    proposal = Proposal(b"origin", 1, 1, FIRST)

    outcome = meta.apply(state, 1, meta.decode(meta.encode(proposal)).command)

    assert outcome.result.code == 0
    for shown in (FIRST, proposal, state.identity.keys, f"{FIRST}", f"{state.identity.keys[0]!s}"):
        assert "PRIVATE" not in repr(shown)
    assert PRIVATE not in meta.encode_state(state)
    assert meta.decode_state(meta.encode_state(state)).identity.keys == []
