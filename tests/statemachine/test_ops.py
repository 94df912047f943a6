"""One row per operation holds everything a node knows about it, and the rows agree with docs/protocol.md."""

import re

import pytest

from holdfast.cluster.admin.views import show_step
from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import AWAITED, DIGESTED, OP_NAMES, SIGNATURES, By, Kind, Op, Step
from holdfast.statemachine import explain
from holdfast.statemachine.ops import ROWS, Brings, Row, those
from tests.statemachine.rig import Rig
from tests.structure import ROOT

ID = InvocationId(bytes(range(16)))


def test_every_operation_has_one_signature_and_one_row() -> None:
    assert [*SIGNATURES] == [*ROWS] == [*Op]
    assert all(row.signature is SIGNATURES[op] for op, row in ROWS.items())


def test_the_protocol_page_lists_the_operations_with_their_numbers_and_arguments() -> None:
    page = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (\d+)²? \| ([A-Z_]+) \| `\[(.*?)\]`[^|]*\|[^|]*\| ([^|]*) \|$", page, re.MULTILINE)

    assert [(int(number), name) for number, name, _, _ in listed] == [(op.value, op.name) for op in Op]
    for number, name, argument, by in listed:
        signature = SIGNATURES[int(number)]
        assert len(argument.split(", ")) == signature.parts_min or not argument, name
        assert ("**endpoint**" in by) == (signature.by is By.ENDPOINT or signature.eager), name


@pytest.mark.parametrize("row", ROWS.values(), ids=OP_NAMES.get)
def test_a_row_does_not_contradict_itself(row: Row) -> None:
    assert row.keyed or not row.writes, "what writes state needs a key"
    assert row.waits is not None or not row.cancellable, "people are told what they wait for"
    assert (row.accepts is None) == (row.by in (By.ENDPOINT, By.CALLER)), (
        "what nobody else completes brings its outcome"
    )
    assert not (row.writes and row.signature.awaited)
    optional = [part.optional for part in row.signature.parts]
    assert optional == sorted(optional), "optional parts are at the end"


def test_a_cancellation_completes_the_operations_that_wait_for_the_outside() -> None:
    assert those(lambda row: row.cancellable) == {
        Op.SLEEP, Op.CALL, Op.PROMISE, Op.AWAKEABLE, Op.ATTACH, Op.APPROVAL
    }  # fmt: skip
    assert {*AWAITED} - those(lambda row: row.cancellable) == {Op.GET, Op.KEYS, Op.PEEK, Op.RESOLVE}


def test_the_journal_keeps_a_digest_of_arguments_sent_to_others() -> None:
    assert DIGESTED == {Op.CALL: 3, Op.SEND: 3, Op.RESOLVE: 1, Op.RESOLVE_AWAKEABLE: 2}
    assert those(lambda row: row.invokes) == {Op.CALL, Op.SEND}
    assert those(lambda row: row.resolves) == {Op.RESOLVE, Op.RESOLVE_AWAKEABLE}
    assert SIGNATURES[Op.SET].offset_of(Kind.VALUE) == 1 and Op.SET not in DIGESTED


def test_a_step_carries_its_outcome_if_the_endpoint_made_it() -> None:
    assert those(lambda row: row.brings is Brings.ALWAYS) == {Op.RUN, Op.VALUE}
    assert those(lambda row: row.brings is Brings.IF_KNOWN) == {Op.GET, Op.SET, Op.CLEAR, Op.CLEAR_ALL, Op.KEYS}


@pytest.mark.parametrize(
    ("op", "argument", "shown"),
    [
        (Op.INPUT, [{"a": "b"}], {"headers": {"a": "b"}}),
        (Op.RUN, ["pay"], {"name": "pay"}),
        (
            Op.RUN,
            ["pay", 2, 1000, "no", 0, ["shop.py:1"]],
            {
                "name": "pay",
                "failures": 2,
                "next_try_at": "1970-01-01T00:00:01.000Z",
                "last_error": "no",
                "failing_since": None,
                "trace": ["shop.py:1"],
            },
        ),
        (Op.SLEEP, [5, 1005], {"milliseconds": 5, "due_at": "1970-01-01T00:00:01.005Z"}),
        (
            Op.CALL,
            ["shop", "pay", "k", b"d" * 16, None, ID],
            {"invocation": "inv_" + ID.hex(), "service": "shop", "handler": "pay", "key": "k"},
        ),
        (
            Op.SEND,
            ["shop", "pay", None, b"d" * 16, None, 70, "once", ID],
            {"invocation": "inv_" + ID.hex(), "service": "shop", "handler": "pay", "key": None},
        ),
        (Op.GET, ["n"], {"name": "n"}),
        (Op.SET, ["n", b"1"], {"name": "n", "value": 1}),
        (Op.CLEAR_ALL, [], {}),
        (Op.RESOLVE, ["p", b"d" * 16], {"name": "p"}),
        (Op.AWAKEABLE, [], {"id": "awk_" + ID.hex() + "00000003"}),
        (Op.RESOLVE_AWAKEABLE, [ID, 4, b"d" * 16], {"invocation": "inv_" + ID.hex(), "step": 4}),
        (Op.ATTACH, [ID], {"invocation": "inv_" + ID.hex()}),
        (Op.VALUE, ["now"], {"name": "now"}),
        (
            Op.APPROVAL,
            ["Refund?", b'{"eur":240}', ["yes", "no"], None, 0, 0, True, b"8 bytes!", 5, 0, 0],
            {
                "title": "Refund?",
                "payload": {"eur": 240},
                "choices": ["yes", "no"],
                "assignee": None,
                "timeout_ms": 0,
                "remind_after_ms": 0,
                "editable": True,
                "since": "1970-01-01T00:00:00.005Z",
                "due_at": None,
                "remind_at": None,
            },
        ),
        (99, ["of a later release"], {}),
    ],
)
def test_the_parts_of_an_argument_are_shown_under_their_names(
    op: int, argument: list[object], shown: dict[str, object]
) -> None:
    assert show_step(ID, 3, Step(op, "k", argument, 1, 1, None))["argument"] == shown


@pytest.mark.parametrize("op", [Op.GET, Op.PEEK])
def test_an_optional_value_is_shown_without_its_marker(op: Op) -> None:
    there, absent = ([0, b"\x017"], [0, b""])

    assert show_step(ID, 1, Step(op, "k", ["n"], 1, 1, there))["outcome"] == {"value": 7}
    assert show_step(ID, 1, Step(op, "k", ["n"], 1, 1, absent))["outcome"] == {"value": None}


def test_an_unknown_invocation_is_explained_too() -> None:
    assert explain.why_not_running(Rig().txn, ID) == "It is not known here."
