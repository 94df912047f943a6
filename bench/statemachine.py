"""The cost of applying: microseconds per command on a real LMDB environment, as every replica pays it.

    python -m bench.statemachine [--invocations N] [--profile]

An invocation of the workload is an Invoke, three RUN steps and a Complete. Invocations proceed in lockstep by slices,
so that each of their commands is in another transaction, as in a cluster. The transaction is not synced (the log is the
durable copy), and the encoding of batches is left out, because it belongs to the log.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from hashlib import blake2b

import lmdb

from holdfast.cluster.partition.changes import Changes, rows_of
from holdfast.sdk.ids import DeploymentId, new_id
from holdfast.sdk.journal import Op
from holdfast.statemachine.commands import (
    Announce,
    Command,
    Complete,
    Invoke,
    Mode,
    RecordStep,
    decode_command,
    encode_command,
)
from holdfast.statemachine.machine import apply
from holdfast.statemachine.state import State

DP_1 = DeploymentId("dp_1")

SLICE = 64  # Commands of one transaction: about as many as in a busy turn.


class LmdbTxn:
    """A write transaction with the methods of LMDB's own, and a scan."""

    def __init__(self, txn: lmdb.Transaction[bytes]) -> None:
        self.get: Callable[[bytes], bytes | None] = txn.get
        self.put = txn.put
        self.delete = txn.delete
        self._txn = txn

    def scan(self, first: bytes, end: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        with self._txn.cursor() as cursor:
            if not cursor.set_range(first):
                return
            for key, value in cursor:
                if key >= end:
                    return
                yield key, value


def workload(name: str, invocations: int) -> Iterator[list[Command]]:
    for begin in range(0, invocations, SLICE):
        numbers = range(begin, min(begin + SLICE, invocations))
        keys = [f"k{number % 500}" if name == "keyed" else None for number in numbers]
        idents = [
            new_id("greeter", key, blake2b(number.to_bytes(4, "big"), digest_size=16).digest())
            for number, key in zip(numbers, keys, strict=True)
        ]
        mode = Mode.EXCLUSIVE if name == "keyed" else Mode.PLAIN
        yield [
            Invoke(ident, "greeter", "greet", key, mode, b"x" * 100, {}, 0, None, -1, 86_400_000)
            for ident, key in zip(idents, keys, strict=True)
        ]
        for step in (1, 2, 3):
            if name == "keyed":
                yield [RecordStep(i, 1, step, Op.SET, f"/{step}", ["n", b"y" * 20], None, DP_1) for i in idents]
            else:
                yield [RecordStep(i, 1, step, Op.RUN, f"/{step}", ["work"], [0, b"y" * 100], DP_1) for i in idents]
        yield [Complete(ident, 1, [0, b"z" * 100], DP_1) for ident in idents]


def measure(name: str, invocations: int, profile: cProfile.Profile | None) -> None:
    spent: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    with tempfile.TemporaryDirectory() as folder:
        env = lmdb.open(folder, map_size=4 << 30, sync=False, metasync=False, writemap=False)
        state = State(0, 1)
        changes = Changes(0, partitions=8)
        slices: list[list[Command]] = [[Announce(1, "n1")], *workload(name, invocations)]
        decoded = [[decode_command(encode_command(command)) for command in commands] for commands in slices]
        gc.collect()
        gc.freeze()  # The commands of the workload are no part of a replica.
        now_ms = 1_700_000_000_000
        for index, commands in enumerate(decoded, 1):
            now_ms += 1
            begin = time.process_time()
            if profile is not None:
                profile.enable()
            with env.begin(write=True) as txn:
                state.begin(LmdbTxn(txn))
                for command in commands:
                    result = apply(state, now_ms, command)
                    assert result.code == 0, result
                rows = rows_of(state.take_moved().values())
                state.flush()
            changes.extend(index, [(index, rows)] if rows else [])
            state.take_effects()
            if profile is not None:
                profile.disable()
            kind = type(commands[0]).__name__
            spent[kind] += time.process_time() - begin
            count[kind] += len(commands)
        env.close()
    figures = ", ".join(f"{kind} {spent[kind] / count[kind] * 1e6:.1f}" for kind in spent if kind != "Announce")
    print(f"{name}: {sum(spent.values()) / sum(count.values()) * 1e6:.1f} µs per command ({figures})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--invocations", type=int, default=20_000)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    profile = cProfile.Profile() if options.profile else None
    for name in ("plain", "keyed"):
        measure(name, options.invocations, profile)
    if profile is not None:
        profile.print_stats("tottime")


if __name__ == "__main__":
    main()
