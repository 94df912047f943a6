"""The cost of encoding and decoding frames, commands and records: msgpack with our own checks, compared to msgspec.

    pip install msgspec && python -m bench.codecs [--rounds N]

msgspec is not a dependency of Holdfast; ADR 12 gives the reasons. Its structs are derived from our own classes, so both
sides read and write the same fields, and their bytes are compared first. They take turns within each round. The ratio
is msgspec's time over ours, the median of the rounds: below 1.00, msgspec is faster.

A batch of frames is decoded by msgspec in two ways. *At once* is its fastest, but one wrong frame spoils the batch.
*One by one* keeps the promise that a wrong frame costs only the invocation that sent it, as `sdk.frames.decode_batch`
does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from typing import Any, NewType, Union, get_args, get_type_hints

from holdfast.sdk import frames, journal
from holdfast.sdk.ids import DeploymentId, InvocationId
from holdfast.sdk.journal import Op
from holdfast.statemachine import commands, records
from holdfast.statemachine.commands import Ref
from holdfast.statemachine.effects import Status

DP_1 = DeploymentId("dp_1")

try:
    import msgspec  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    raise SystemExit("bench.codecs compares with msgspec, which is not installed: pip install msgspec") from None

CALLS = 200  # Calls of each function in a round.
STEPS = 32  # Frames, or commands, of one busy turn.


def plain(hint: Any) -> Any:
    """A type that msgspec supports: references to large values are an extension type, which it cannot name in a union."""
    if hint is Ref:
        return bytes
    if isinstance(hint, NewType):
        return plain(hint.__supertype__)
    if isinstance(hint, types.UnionType):
        return Union[tuple(plain(each) for each in get_args(hint))]  # noqa: UP007 - made from a tuple
    return hint


def struct_of(kind: type[Any], number: int | None) -> Any:
    """The msgspec struct with the fields of a NamedTuple or a dataclass, as an array that begins with its number."""
    hints = {name: plain(hint) for name, hint in get_type_hints(kind).items()}
    if issubclass(kind, tuple):
        defaults = kind._field_defaults  # type: ignore[attr-defined]
        names = kind._fields  # type: ignore[attr-defined]
    else:
        names = tuple(field.name for field in fields(kind))[1:]  # The first is the key of the table: not packed.
        defaults = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    rows = [(name, hints[name], defaults[name]) if name in defaults else (name, hints[name]) for name in names]
    return msgspec.defstruct(kind.__name__, rows, array_like=True, tag=number, tag_field="kind" if number else None)


class Codec:
    """Structs for a family of our classes, and one decoder for all of them."""

    def __init__(self, numbers: dict[type[Any], int], family: Iterable[type[Any]]) -> None:
        self.structs = {kind: struct_of(kind, numbers[kind]) for kind in family}
        every: Any = Union[tuple(self.structs.values())]  # noqa: UP007 - made from a tuple
        self.one = msgspec.msgpack.Decoder(every)
        self.many = msgspec.msgpack.Decoder(types.GenericAlias(list, (every,)))

    def translated(self, values: Iterable[Any]) -> list[Any]:
        return [self.structs[type(value)](*value) for value in values]


def sample_frames() -> list[frames.Frame]:
    """The frames of a busy endpoint in one turn: a step of many attempts, and the output of some."""
    found: list[frames.Frame] = []
    for number in range(STEPS):
        ident = InvocationId(os.urandom(16))
        payload = b'{"flight": "LH 400", "seat": "12A", "price": %d}' % number
        found.append(frames.StepFrame(ident, 1, 1, Op.RUN, "0/flight/0", ["flight"], [0, payload], 1_790_000_000_000))
        if number % 4 == 0:
            found.append(frames.Output(ident, 1, [0, payload]))
    return found


def sample_commands() -> list[commands.Command]:
    found: list[commands.Command] = []
    for number in range(STEPS):
        ident, payload = InvocationId(os.urandom(16)), b'{"flight": "LH 400", "seat": "12A", "price": %d}' % number
        if number % 4 == 0:
            found.append(
                commands.Invoke(
                    ident, "trips", "book", None, 0, payload, {}, 0, None, -1, 86_400_000, "key", b"h" * 16, ["a/b"]
                )
            )
        else:
            found.append(
                commands.RecordStep(
                    ident,
                    1,
                    number,
                    Op.RUN,
                    "0/flight/0",
                    ["flight"],
                    [0, payload],
                    DP_1,
                    None,
                    b"d" * 16,
                    1,
                )
            )
    return found


def sample_record() -> records.Invocation:
    return records.Invocation(
        InvocationId(os.urandom(16)), Status.RUNNING, 3, "trips", "book", None, 0, records.NO_OBJECT,
        1_790_000_000_000, 1_790_000_000_500, 86_400_000, None, -1, None,
        length=4, size=312, order=7, deployment=DP_1, lapses=1, chain=["a/b"],
    )  # fmt: skip


def pairs() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Name of a task -> our implementation, and msgspec's."""
    spoken, wanted, record = sample_frames(), sample_commands(), sample_record()
    of_frames = Codec(frames.NUMBERS, frames.TO_NODE)
    of_commands = Codec(commands.NUMBERS, {type(each) for each in wanted})
    invocation = struct_of(records.Invocation, None)
    encode = msgspec.msgpack.Encoder().encode
    their_frames, their_commands = of_frames.translated(spoken), of_commands.translated(wanted)
    their_record = invocation(*[getattr(record, field.name) for field in fields(record)][1:])

    batch = frames.encode_batch(spoken)
    rows = [commands.encode_command(each) for each in wanted]
    stored = records.pack_invocation(record)
    assert batch == encode(their_frames), "both write the same frames"
    assert rows == [encode(each) for each in their_commands], "both write the same commands"
    assert stored == encode(their_record), "both write the same records"

    raw_rows = msgspec.msgpack.Decoder(list[msgspec.Raw])
    record_decoder = msgspec.msgpack.Decoder(invocation)
    one_frame, one_command = of_frames.one.decode, of_commands.one.decode
    step = journal.pack_step(journal.Step(Op.RUN, "0/flight/0", ["flight"], 1, 2, [0, b"x" * 60]))
    step_struct = struct_of(journal.Step, None)
    step_decoder = msgspec.msgpack.Decoder(step_struct)

    def one_by_one() -> list[Any]:
        return [one_frame(row) for row in raw_rows.decode(batch)]

    return {
        "frames, encode": (lambda: frames.encode_batch(spoken), lambda: encode(their_frames)),
        "frames, decode at once": (
            lambda: frames.decode_batch(batch, frames.TO_NODE), lambda: of_frames.many.decode(batch),
        ),
        "frames, decode one by one": (lambda: frames.decode_batch(batch, frames.TO_NODE), one_by_one),
        "commands, encode": (
            lambda: [commands.encode_command(each) for each in wanted], lambda: [encode(each) for each in their_commands],
        ),
        "commands, decode": (
            lambda: [commands.decode_command(row) for row in rows], lambda: [one_command(row) for row in rows],
        ),
        "record, encode": (lambda: records.pack_invocation(record), lambda: encode(their_record)),
        "record, decode": (
            lambda: records.unpack_invocation(record.id, stored), lambda: record_decoder.decode(stored),
        ),
        "step, decode": (lambda: journal.unpack_step(step), lambda: step_decoder.decode(step)),
    }  # fmt: skip


def microseconds(function: Callable[[], object]) -> float:
    begin = time.process_time_ns()
    for _ in range(CALLS):
        function()
    return (time.process_time_ns() - begin) / 1000 / CALLS


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.codecs", description="msgpack with our checks, and msgspec.")
    parser.add_argument("--rounds", type=int, default=40, help="how often each pair is measured (default: %(default)s)")
    rounds = parser.parse_args(arguments).rounds
    if rounds < 1:
        parser.error("--rounds must be at least 1")
    print(f"{'':28}{'msgpack and checks':>20}{'msgspec':>12}{'ratio':>8}")
    for name, (ours, theirs) in pairs().items():
        measured = [(microseconds(ours), microseconds(theirs)) for _ in range(rounds)]
        ratio = statistics.median(their / our for our, their in measured)
        our, their = (statistics.median(column) for column in zip(*measured, strict=True))
        print(f"{name:28}{our:17.1f} µs{their:9.1f} µs{ratio:8.2f}")


if __name__ == "__main__":
    main()
