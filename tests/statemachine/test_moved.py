"""Every change of an invocation's status or attempt is noted, and the same ones on every replica."""

from random import Random

import pytest

from holdfast.sdk.ids import InvocationId
from holdfast.statemachine import queries
from holdfast.statemachine.commands import Command
from holdfast.statemachine.machine import apply
from holdfast.statemachine.memory import Memory
from holdfast.statemachine.records import Invocation, unpack_completed, unpack_invocation
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import ACTIVE, COMPLETED, after
from tests.statemachine.randomly import random_command
from tests.statemachine.rig import T0, Rig

Shown = tuple[int, int, int]  # Status, attempt, end.


def shown(record: Invocation) -> Shown:
    return queries.shown_status(record), record.epoch, record.end


def everything(txn: Memory) -> dict[InvocationId, Shown]:
    found = {}
    for table, unpack in ((ACTIVE, unpack_invocation), (COMPLETED, unpack_completed)):
        for key, raw in txn.scan(table, after(table)):
            ident = InvocationId(key[1:])
            found[ident] = shown(unpack(ident, raw))
    return found


def told(commands: list[tuple[int, Command]], slice_size: int) -> list[dict[InvocationId, Shown]]:
    """What is noted for each command, if that many share a transaction."""
    txn, state = Memory(), State(0, 2)
    found = []
    for begin in range(0, len(commands), slice_size):
        state.begin(txn)
        for now_ms, command in commands[begin : begin + slice_size]:
            apply(state, now_ms, command)
            found.append({ident: shown(record) for ident, record in state.take_moved().items()})
        state.flush()
        state.take_effects()
    return found


@pytest.mark.parametrize("seed", range(30))
def test_whatever_changes_is_noted_however_transactions_are_cut(seed: int) -> None:
    txn, state, random = Memory(), State(0, 2), Random(seed)
    now_ms, commands, changes = T0, [], 0
    before: dict[InvocationId, Shown] = {}
    for _ in range(500):
        now_ms += random.choice([0, 0, 1, 50, 1000, 60_000, -20])
        command = random_command(random, txn)
        commands.append((now_ms, command))
        state.begin(txn)
        apply(state, now_ms, command)
        noted = {ident: shown(record) for ident, record in state.take_moved().items()}
        state.flush()
        state.take_effects()
        now = everything(txn)
        for ident in now:
            if now[ident] != before.get(ident):
                changes += 1
                assert noted.get(ident) == now[ident], command
        before = now

    assert changes > 10
    assert told(commands, 1) == told(commands, 7) == told(commands, 500)
    assert [[*each] for each in told(commands, 1)] == [[*each] for each in told(commands, 500)], "in the same order"


def test_a_step_is_no_change() -> None:
    rig = Rig()
    which = rig.invoke("a")
    rig.state.begin(rig.txn)
    rig.state.flush()

    rig.step(which, 1, ["work"], [0, b"done"])

    assert not rig.state.moved


def test_what_an_aborted_transaction_changed_is_forgotten() -> None:
    rig = Rig()
    which = rig.invoke("a")
    rig.state.begin(rig.txn)
    record = rig.state.load(which)
    assert record is not None
    rig.state.moved[which] = record

    rig.state.forget()

    assert not rig.state.take_moved()
