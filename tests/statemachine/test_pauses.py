"""Pauses of the meta group: what they cover, that each is ended by itself, and their bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.statemachine import meta
from holdfast.statemachine.meta import MetaCommand, MetaState, Proposal
from holdfast.statemachine.pauses import EVERYTHING, PAUSES_MAX, Halt, Pauses, Release, resume_command, why_paused

ALL = Halt("", None, "ada", "incident")
SHOP = Halt("shop", None, "ben", "")
KEY = Halt("shop", "k", "cid", "this one")


def pauses(*commands: Halt) -> Pauses:
    made = Pauses()
    for now_ms, command in enumerate(commands, 1):
        assert made.halt(command, now_ms).code == 0
    return made


def test_the_widest_pause_covers_an_invocation() -> None:
    made = pauses(KEY, SHOP, ALL)

    everything, of_shop = made.by_scope[EVERYTHING], made.by_scope["shop", None]
    assert made.covering("shop", "k") == made.covering("other", None) == everything
    made.release(Release("", None))
    assert made.covering("shop", "k") == made.covering("shop", None) == of_shop
    assert made.covering("other", "k") is None
    made.release(Release("shop", None))
    assert made.covering("shop", "k") == made.by_scope["shop", "k"]
    assert made.covering("shop", "other") is None and made.covering("shop", None) is None


def test_what_is_not_paused_cannot_be_resumed() -> None:
    made = pauses(KEY)

    assert made.release(Release("shop", None)).code == 404
    assert made.release(Release("", None)).code == 404
    assert made.release(Release("shop", "k")).code == 0
    assert made.release(Release("shop", "k")).code == 404


def test_a_second_pause_changes_the_reason_and_keeps_the_beginning() -> None:
    made = pauses(ALL)

    again = made.halt(ALL._replace(by="ben", reason="worse", recall=True), 99)

    assert again.code == 200
    assert made.by_scope[EVERYTHING] == (EVERYTHING, "ben", "worse", 1, True)


def test_the_number_of_pauses_is_bounded() -> None:
    made = pauses(*(KEY._replace(key=str(number)) for number in range(PAUSES_MAX)))

    assert made.halt(ALL, 1).code == 507
    assert made.halt(KEY._replace(key="0", reason="new"), 1).code == 200


def test_a_key_without_a_service_is_refused() -> None:
    assert Pauses().halt(Halt("", "k", "ada", ""), 1).code == 409


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (ALL, "holdfast resume --all"),
        (SHOP, "holdfast resume --service shop"),
        (KEY._replace(key="o'k; rm"), """holdfast resume --service shop --key 'o'"'"'k; rm'"""),
    ],
)
def test_the_command_that_resumes_can_be_pasted(command: Halt, wanted: str) -> None:
    (standing,) = pauses(command).by_scope.values()

    assert resume_command(standing.scope) == wanted
    assert why_paused(standing).endswith(f"resume with `{wanted}`.")


def test_a_pause_survives_the_log() -> None:
    state = MetaState()
    log: list[MetaCommand] = [SHOP, KEY, Release("shop", None)]

    for number, command in enumerate(log):
        raw = meta.encode(Proposal(b"origin", number, 5 + number, command))
        meta.apply(state, 5 + number, meta.decode(raw).command)

    assert [standing.scope for standing in state.pauses.by_scope.values()] == [("shop", "k")]
    assert state.pauses.by_scope["shop", "k"].since_ms == 6


services, keys = st.sampled_from(["a", "b"]), st.sampled_from([None, "", "1", "2"])
scopes = st.one_of(st.just(("", None)), st.tuples(services, keys))


@given(st.lists(st.tuples(st.booleans(), scopes), max_size=20), services, keys)
def test_an_invocation_is_covered_as_long_as_any_pause_names_it(
    log: list[tuple[bool, tuple[str, str | None]]], service: str, key: str | None
) -> None:
    made, naive = Pauses(), set()
    for begins, scope in log:
        if begins:
            made.halt(Halt(*scope, by="ada", reason=""), 1)
            naive.add(scope)
        else:
            assert (made.release(Release(*scope)).code == 0) is (scope in naive)
            naive.discard(scope)

    covers = {("", None), (service, None), (service, key)}
    assert (made.covering(service, key) is not None) is bool(naive & covers)
