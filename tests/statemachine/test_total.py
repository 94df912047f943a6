"""`apply` is total and deterministic: any command, in any state, leaves consistent tables, and the same ones everywhere."""

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.statemachine import queries
from holdfast.statemachine.commands import Command, decode_command, encode_command
from holdfast.statemachine.machine import apply
from holdfast.statemachine.memory import Memory
from holdfast.statemachine.state import State
from tests.statemachine import invariants
from tests.statemachine.randomly import random_command
from tests.statemachine.rig import T0

PARTITIONS = 2

Timed = tuple[int, Command]


def history(seeds: list[int], *, check: bool = False) -> tuple[list[Timed], bytes]:
    """Apply one command per seed, so that a failing history can be shrunk, and return the commands and the digest.

    Each command is a transaction. The clock is not always monotonic.
    """
    txn, state = Memory(), State(0, PARTITIONS)
    now_ms, commands = T0, []
    for seed in seeds:
        random = Random(seed)
        now_ms += random.choice([0, 0, 1, 50, 1000, 60_000, -20])
        command = random_command(random, txn)
        commands.append((now_ms, command))
        step(state, txn, [(now_ms, command)])
        if check:
            invariants.check(txn)
    return commands, queries.digest(txn)


def step(state: State, txn: Memory, commands: list[Timed]) -> None:
    state.begin(txn)
    for now_ms, command in commands:
        apply(state, now_ms, decode_command(encode_command(command)))
    state.flush()
    state.take_effects()


def replay(commands: list[Timed], slice_size: int) -> bytes:
    """The final digest if that many commands share a transaction."""
    txn, state = Memory(), State(0, PARTITIONS)
    for begin in range(0, len(commands), slice_size):
        step(state, txn, commands[begin : begin + slice_size])
    return queries.digest(txn)


def seeds_of(seed: int, count: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(2**32) for _ in range(count)]


@given(st.lists(st.integers(0, 2**32), max_size=60))
@settings(max_examples=150)
def test_any_history_of_commands_leaves_consistent_tables(seeds: list[int]) -> None:
    history(seeds, check=True)


@pytest.mark.parametrize("seed", range(40))
def test_long_histories_leave_consistent_tables_and_equal_ones_however_they_are_sliced(seed: int) -> None:
    commands, digest = history(seeds_of(seed, 400), check=True)

    assert [replay(commands, size) for size in (7, 64, 400)] == [digest] * 3


def test_a_state_that_drops_its_decoded_records_continues_unchanged() -> None:
    commands, digest = history(seeds_of(7, 300))
    txn, state = Memory(), State(0, PARTITIONS)
    for timed in commands:
        step(state, txn, [timed])
        state.forget()

    assert queries.digest(txn) == digest


def test_the_digest_does_not_depend_on_the_hash_seed() -> None:
    script = "from tests.statemachine.test_total import history, seeds_of; print(history(seeds_of(1, 1500))[1].hex())"
    root = Path(__file__).resolve().parents[2]

    digests = [
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    ]

    assert len(set(digests)) == 1 and len(digests[0]) == 33
