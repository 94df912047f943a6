"""Tokens in the state of the meta group: their roles, rotation and expiry."""

from __future__ import annotations

import pytest

from holdfast.statemachine.access import (
    ADMIN,
    APPROVE,
    INVOKE,
    OPERATE,
    READ,
    ROLES,
    TOKENS_MAX,
    CreateToken,
    NoteTokenUse,
    RevokeToken,
    RotateToken,
    Tokens,
    permits,
)

OLD, NEW = b"o" * 32, b"n" * 32
CREATE = CreateToken("t1", "ci", [INVOKE], ["trips"], OLD, created_by="t0", expires_ms=500)


def tokens() -> Tokens:
    made = Tokens()
    assert made.create(CREATE, 100).code == 0
    return made


def test_a_token_is_created_once() -> None:
    made = tokens()

    assert made.create(CREATE._replace(digest=NEW), 200).code == 409
    token = made.by_id["t1"]
    assert (token.digest, token.created_ms, token.expires_ms, token.services) == (OLD, 100, 500, ["trips"])


@pytest.mark.parametrize(
    "wrong", [CREATE._replace(roles=[]), CREATE._replace(roles=["root"]), CREATE._replace(digest=b"short")]
)
def test_a_token_needs_a_known_role_and_a_digest(wrong: CreateToken) -> None:
    made = Tokens()

    assert made.create(wrong, 1).code == 409
    assert not made.by_id


def test_the_number_of_tokens_is_bounded() -> None:
    made = Tokens()
    for number in range(TOKENS_MAX):
        assert made.create(CREATE._replace(id=f"t{number}"), 1).code == 0

    assert made.create(CREATE._replace(id="one more"), 1).code == 507


def test_the_previous_secret_of_a_rotated_token_stays_valid_for_the_requested_time() -> None:
    made = tokens()

    assert made.rotate(RotateToken("t1", NEW, old_until_ms=300), 200).code == 0
    token = made.by_id["t1"]
    assert (token.digest, token.old_digest, token.old_until_ms) == (NEW, OLD, 300)
    assert made.rotate(RotateToken("t1", NEW, old_until_ms=900), 250).code == 200
    assert made.by_id["t1"] == token


def test_a_token_rotated_at_once_forgets_its_previous_secret() -> None:
    made = tokens()

    assert made.rotate(RotateToken("t1", NEW, old_until_ms=200), 200).code == 0
    assert (made.by_id["t1"].old_digest, made.by_id["t1"].old_until_ms) == (b"", 0)


def test_an_unknown_token_can_be_neither_rotated_nor_revoked() -> None:
    made = tokens()

    assert made.revoke(RevokeToken("t1")).code == 0
    assert made.revoke(RevokeToken("t1")).code == 404
    assert made.rotate(RotateToken("t1", NEW), 1).code == 404


def test_the_last_use_only_moves_forward() -> None:
    made = tokens()

    made.note_use(NoteTokenUse({"t1": 50, "unknown": 60}))
    made.note_use(NoteTokenUse({"t1": 40}))

    assert {id_: token.used_ms for id_, token in made.by_id.items()} == {"t1": 50}


@pytest.mark.parametrize(
    ("role", "included"),
    [
        (INVOKE, {INVOKE}),
        (READ, {READ}),
        (APPROVE, {APPROVE, READ}),
        (OPERATE, {OPERATE, APPROVE, READ}),
        (ADMIN, {INVOKE, READ, APPROVE, OPERATE, ADMIN}),
    ],
)
def test_a_role_permits_what_it_includes_and_nothing_else(role: str, included: set[str]) -> None:
    assert {needed for needed in ROLES if permits([role], needed)} == included
