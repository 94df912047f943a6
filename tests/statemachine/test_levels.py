"""Two releases apply one log to the same bytes, and a level is raised at one entry on every replica."""

from __future__ import annotations

import gzip
from pathlib import Path
from random import Random

import msgpack
import pytest

from holdfast.statemachine import queries
from holdfast.statemachine.commands import Announce, RaiseLevel, decode_batch, decode_command, encode_command
from holdfast.statemachine.levels import FIRST, LEVEL, TooNew, schema_of, trimmed
from holdfast.statemachine.machine import apply
from holdfast.statemachine.memory import Memory
from holdfast.statemachine.records import Meta, pack_meta, unpack_meta
from holdfast.statemachine.state import State
from tests.statemachine import invariants
from tests.statemachine.randomly import random_command
from tests.statemachine.rig import T0
from tests.statemachine.test_total import seeds_of, step

#: (partition, partitions, batches, final digest): logs of random commands and of whole programs, written and applied by the
#: last release before there were levels.
LOGS = msgpack.unpackb(gzip.decompress((Path(__file__).parents[1] / "data" / "level-1.logs.gz").read_bytes()))


@pytest.mark.parametrize("offset", range(len(LOGS)))
def test_a_log_from_before_levels_gives_the_same_bytes_as_then(offset: int) -> None:
    partition, partitions, log, digest = LOGS[offset]
    txn, state = Memory(), State(partition, partitions, level=FIRST)

    for begin in range(0, len(log), 50):
        state.begin(txn)
        for raw in log[begin : begin + 50]:
            batch = decode_batch(raw)
            for command in batch.commands:
                apply(state, batch.now_ms, command)
        state.flush()
        state.take_effects()

    assert queries.digest(txn) == digest


@pytest.mark.parametrize("seed", range(10))
def test_every_replica_raises_the_level_at_the_same_entry(seed: int) -> None:
    txn, state = Memory(), State(0, 2, level=FIRST)
    now_ms, log = T0, []
    for offset, each in enumerate(seeds_of(seed, 400)):
        random = Random(each)
        now_ms += random.choice([0, 1, 50, 1000, 60_000])
        command = RaiseLevel(LEVEL) if offset == 200 else random_command(random, txn)
        log.append((now_ms, command))
        step(state, txn, [(now_ms, command)])
    invariants.check(txn)
    again = Memory()
    replica = State(0, 2, level=FIRST)

    for begin in range(0, len(log), 37):
        step(replica, again, log[begin : begin + 37])
        if begin % 5 == 0:
            replica.forget()

    assert state.level == LEVEL
    assert queries.digest(again) == queries.digest(txn)


def test_a_level_never_falls_and_a_later_one_stops_the_node() -> None:
    txn, state = Memory(), State(0, 1)
    state.begin(txn)

    assert apply(state, T0, RaiseLevel(FIRST)).code == 200
    assert state.level == LEVEL
    with pytest.raises(TooNew, match=f"needs level {LEVEL + 1}"):
        apply(state, T0, RaiseLevel(LEVEL + 1))


def test_a_command_of_a_later_release_stops_the_node_with_the_reason() -> None:
    with pytest.raises(TooNew, match="command 99"):
        decode_command(msgpack.packb((99, "what", 1)))
    with pytest.raises(TooNew, match="Announce of 3 fields"):
        decode_command(
            encode_command(Announce(1, "n1"))[:1].replace(b"\x93", b"\x94")
            + msgpack.packb(1)
            + msgpack.packb(1)
            + msgpack.packb("n1")
            + msgpack.packb("new")
        )


def test_only_trailing_fields_with_their_default_are_left_out() -> None:
    assert trimmed((1, 2, 0, None), (0, None)) == (1, 2)
    assert trimmed((1, 2, 0, 5), (0, None)) == (1, 2, 0, 5)
    assert trimmed((1, 2, 7, None), (0, None)) == (1, 2, 7)


def test_the_record_of_a_partition_at_level_1_keeps_its_bytes() -> None:
    assert len(msgpack.unpackb(pack_meta(Meta()))) == 15
    assert unpack_meta(pack_meta(Meta(level=LEVEL))).level == LEVEL
    assert schema_of(FIRST) == 3
