"""Searches for messages that cost a node far more than their size: `make fuzz`, or `python -m holdfast.chaos.fuzz`.

Every reader of external bytes gets messages designed to be expensive: many elements, deep nesting, headers that claim
more than there is, endless valid frames. Each is measured twice: the longest time that the event loop was blocked, and
the peak memory. A message that is worse than all before is mutated further. The report lists the worst one per reader.

The run fails if memory exceeds both a constant and `ALLOWED_TIMES` times the size of the message. Time is processor
time, so that it does not depend on the load of the machine. It is reported, but not judged.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import msgpack

from holdfast.cluster.admin import parameters
from holdfast.cluster.admin.views import SHOWN_BYTES_MAX, read_payload, show_payload
from holdfast.cluster.errors import Circumstance
from holdfast.cluster.handlers.protocols.native.manifest import MANIFEST_BYTES_MAX, read_manifest
from holdfast.cluster.ingress import ingress
from holdfast.cluster.peers.rpc import Rpc
from holdfast.log.messages import APP_BYTES_MAX, SLICED_BYTES, Malformed, slices
from holdfast.log.messages import decode as decode_messages
from holdfast.sdk.bounds import load_json
from holdfast.sdk.frames import (
    BATCH_BYTES_MAX,
    NUMBERS,
    TO_NODE,
    Credit,
    Intent,
    StepFrame,
    Waiting,
    decode_slices,
)
from holdfast.sdk.journal import ProtocolError
from holdfast.snapshots.errors import PeerRefused
from holdfast.snapshots.transfer import Offer

MIB: Final = 1024 * 1024
#: Memory that a message may take: a multiple of its size, and a constant for small ones.
ALLOWED_TIMES: Final = 4
ALLOWED_BYTES: Final = 16 * MIB
GOAL_MS: Final = 50.0

#: Reads a message in steps, each of which runs on the event loop without interruption.
Reader = Callable[[bytes], Iterator[None]]


class Decoder(NamedTuple):
    name: str
    reader: Reader
    bytes_max: int
    is_json: bool


def _frames(raw: bytes) -> Iterator[None]:
    for _ in decode_slices(raw, TO_NODE):
        yield


def _peer(raw: bytes) -> Iterator[None]:
    if len(raw) <= SLICED_BYTES:
        decode_messages(raw)
        return
    for part in slices(raw):
        decode_messages(part)
        yield


def _rpc(raw: bytes) -> Iterator[None]:
    Rpc(lambda peer, payload: True).receive("peer", raw)
    yield


def _offer(raw: bytes) -> Iterator[None]:
    Offer.decode(raw)
    yield


def _manifest(raw: bytes) -> Iterator[None]:
    read_manifest(raw)
    yield


def _admin(raw: bytes) -> Iterator[None]:
    read_payload(load_json(raw, parameters.BODY_ELEMENTS_MAX))
    yield


def _rejection(raw: bytes) -> Iterator[None]:
    load_json(raw, ingress.REJECTION_ELEMENTS_MAX)
    yield


def _shown(raw: bytes) -> Iterator[None]:
    json.dumps(show_payload(raw))
    yield


DECODERS: Final = (
    Decoder("frames of a handler", _frames, BATCH_BYTES_MAX, is_json=False),
    Decoder("messages of a peer", _peer, 32 * MIB, is_json=False),
    Decoder("questions of a peer", _rpc, APP_BYTES_MAX, is_json=False),
    Decoder("offer of a snapshot", _offer, 64 * 1024, is_json=False),
    Decoder("manifest of an endpoint", _manifest, MANIFEST_BYTES_MAX, is_json=True),
    Decoder("body at the admin API", _admin, parameters.BODY_BYTES_MAX, is_json=True),
    Decoder("rejection at the ingress", _rejection, ingress.REJECTION_BYTES_MAX, is_json=True),
    Decoder("payload that is shown", _shown, SHOWN_BYTES_MAX, is_json=True),
)
_REFUSALS: Final = (ProtocolError, Malformed, Circumstance, PeerRefused, ValueError)


class Cost(NamedTuple):
    size: int
    held_ms: float  # the longest step
    peak_bytes: int  # beside the message

    @property
    def is_allowed(self) -> bool:
        return self.peak_bytes <= max(ALLOWED_TIMES * self.size, ALLOWED_BYTES)


def cost_of(reader: Reader, raw: bytes, *, timed: bool = True) -> Cost:
    """Measure a message. Of two times, the shorter one was disturbed less."""
    held_s = min(_longest(reader, raw), _longest(reader, raw)) if timed else 0.0
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        _longest(reader, raw)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    return Cost(len(raw), held_s * 1000, peak)


def _longest(reader: Reader, raw: bytes) -> float:
    longest = 0.0
    steps = reader(raw)
    while True:
        began = time.thread_time()
        try:
            next(steps)
        except StopIteration:
            return max(longest, time.thread_time() - began)
        except _REFUSALS:
            return max(longest, time.thread_time() - began)
        longest = max(longest, time.thread_time() - began)


# -- messages ----------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """A message: head, a unit again and again until it has its size, tail."""

    head: bytes
    unit: bytes
    tail: bytes
    share: float  # of the most that the reader takes

    def message(self, bytes_max: int) -> bytes:
        room = max(0, int(bytes_max * self.share) - len(self.head) - len(self.tail))
        return self.head + self.unit * (room // max(1, len(self.unit))) + self.tail


_ID: Final = b"i" * 16


def _frame(kind: type, *fields: Any) -> bytes:
    packed: bytes = msgpack.packb([NUMBERS[kind], *fields])
    return packed


#: One element each, of every kind that takes memory.
_MSGPACK_UNITS: Final = (
    b"\x90", b"\x80", b"\x91\x90", b"\x91\x91\x91\x90", b"\x81\xa1k\x90", b"\x81\xa1k\x80", b"\x00", b"\xc0", b"\xcd\x01\x00",
    b"\xcf" + b"\xff" * 8, b"\xcb" + b"\x40" * 8, b"\xa2ab", b"\xc4\x02ab", b"\xa4\xf0\x9f\x98\x80",
    b"\xdc\xff\xff", b"\xdd\x7f\xff\xff\xff",
    b"\xde\xff\xff", b"\xdc\x10\x00" + b"\x90" * 4096, b"\xdc\x7f\xff" + b"\x00" * 32767, b"\xd4\x01\x00", b"\xc1",
    _frame(Credit, 1), _frame(Intent, _ID, 1, 1, "0/x/1", "x"), _frame(Waiting, _ID, 1, list(range(300, 340))),
    _frame(StepFrame, _ID, 1, 1, 1, "0/x/1", ["x"], [0, b"x"]), _frame(StepFrame, _ID, 1, 1, 1, "0/x/1", [[[]]] * 8, None),
    _frame(StepFrame, _ID, 1, 1, 1, "k" * 600, ["x"], [1, 500, "m" * 9000, "k"]),
    _frame(Waiting, _ID, 1, [1 << 20] * 32_000), _frame(StepFrame, _ID, 1, 1, 1, "0/x/1", [[]] * 32_000, None),
)  # fmt: skip
_MSGPACK_HEADS: Final = (
    b"", b"\x91", b"\xdc\xff\xff", b"\xdd\x00\x03\xff\xff", b"\xdd\x02\x60\x00\x00", b"\xdd\x7f\xff\xff\xff",
    b"\x94\x00\x01\xa4read",
    b"\x91\x98\x00\x01\x01\x01\x00\x00\x00\xdd\x00\x0f\x00\x00", b"\x91\x94\x12\x01\x01\xdd\x00\x0f\x00\x00",
    b"\xdc\xea\x60" * 1000, b"\x91\x98\x10\xc4\x10" + _ID + b"\x01\x01\x01\xa50/x/1", b"\xdb\x02\x00\x00\x00\xf0\x9f\x98\x80",
    b"\xc6\x02\x00\x00\x00", b"\x9f" * 15,
)  # fmt: skip
_JSON_UNITS: Final = (
    b"[],", b"{},", b'"",', b"1,", b'{"":[]},', b'"a":1,', b"[", b'{"a":', b'"\\"",', b"\\\\", b"x", b"\xf0\x9f\x98\x80",
    b"1" * 4000 + b",", b"1" * 128 + b",", b'"\xf0\x9f\x98\x80' + b"x" * 100_000 + b'",',
    b"0." + b"1" * 4000 + b",", b"[[[[]]]],", b"1e9,", b'"\\ud83d\\ude00",', b",", b":", b'"', b"null,", b"\x00", b" ",
)  # fmt: skip
_JSON_HEADS: Final = (
    b"", b"[", b"{", b'{"services":[', b'"', b'{"values":{"x":[', b'["\\"', b"[" * 60,
    b'{"protocol":{"min":1,"max":2},"services":[',
    b"\xef\xbb\xbf[", b"[1,", b'{"message":"',
)  # fmt: skip
_JSON_TAILS: Final = (b"", b"1]", b"]", b'"', b'"]', b"1]}}", b'"a":1}', b"]]]]]]")
_MSGPACK_TAILS: Final = (b"", b"\xc0", b"\x00" * 70_000, b"\x90" * 100)
_SHARES: Final = (1.0, 0.5, 0.1, 0.01, 0.0015)


def shapes(decoder: Decoder) -> Iterator[Shape]:
    """Shapes that are known to be hard on parsers, each in several sizes."""
    heads, units, tails = _parts(decoder)
    for unit in units:
        for head in heads:
            for share in (1.0, 0.01):
                yield Shape(head, unit, tails[1], share)


def _parts(decoder: Decoder) -> tuple[tuple[bytes, ...], tuple[bytes, ...], tuple[bytes, ...]]:
    if decoder.is_json:
        return _JSON_HEADS, _JSON_UNITS, _JSON_TAILS
    return _MSGPACK_HEADS, _MSGPACK_UNITS, _MSGPACK_TAILS


def changed(shape: Shape, decoder: Decoder, rng: random.Random) -> Shape:
    heads, units, tails = _parts(decoder)
    head, unit, tail, share = shape
    match rng.randrange(7):
        case 0:
            head = rng.choice(heads)
        case 1:
            head += rng.choice(heads)[:64]
        case 2:
            unit = rng.choice(units)
        case 3:
            unit = (unit + rng.choice(units))[:100_000]
        case 4:
            tail = rng.choice(tails)
        case 5:
            share = rng.choice(_SHARES)
        case _:
            edited = bytearray(unit)
            edited[rng.randrange(len(edited))] = rng.randrange(256)
            unit = bytes(edited)
    return Shape(head[:4096], unit, tail, share)


# -- the search --------------------------------------------------------------------------------------------------------


class Worst(NamedTuple):
    decoder: str
    tried: int
    slowest: Cost
    slowest_begins: bytes
    largest: Cost  # by how much of what it may take it took
    largest_begins: bytes


def search(
    decoder: Decoder, rng: random.Random, *, bytes_max: int, go_on: Callable[[int], bool], timed: bool = True
) -> Worst:
    known = list(shapes(decoder))
    rng.shuffle(known)
    tried = 0
    best: dict[str, tuple[float, Cost, Shape, bytes]] = {}
    while go_on(tried):
        old = tried < len(known)
        shape = known[tried] if old else changed(rng.choice([each[2] for each in best.values()]), decoder, rng)
        raw = shape.message(min(decoder.bytes_max, bytes_max))
        cost = cost_of(decoder.reader, raw, timed=timed)
        tried += 1
        for kind, figure in (("slowest", cost.held_ms), ("largest", _share(cost))):
            if kind not in best or figure > best[kind][0]:
                best[kind] = figure, cost, shape, raw[:40]
    slowest, largest = best["slowest"], best["largest"]
    return Worst(decoder.name, tried, slowest[1], slowest[3], largest[1], largest[3])


def _share(cost: Cost) -> float:
    return cost.peak_bytes / max(ALLOWED_TIMES * cost.size, ALLOWED_BYTES)


def report(found: list[Worst]) -> str:
    lines = [
        f"{'reader':26} {'tried':>6}  {'longest hold':>12} {'of bytes':>10}  {'most memory':>11} {'of bytes':>10}  begins with"
    ]
    for each in found:
        over = "  OVER" if not each.largest.is_allowed else ""
        slow = f"  above {GOAL_MS:.0f} ms" if each.slowest.held_ms > GOAL_MS else ""
        lines.append(
            f"{each.decoder:26} {each.tried:6}  {each.slowest.held_ms:9.1f} ms {each.slowest.size:10}  "
            f"{each.largest.peak_bytes / MIB:7.1f} MiB {each.largest.size:10}  "
            f"{each.slowest_begins[:16]!r}, {each.largest_begins[:16]!r}{over}{slow}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Look for bytes that cost a node more than they may.")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all readers together")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--bytes", type=int, default=BATCH_BYTES_MAX, help="of a message, at most")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}, {given.seconds:.0f} s, messages of at most {given.bytes} bytes")
    logging.disable()
    found = []
    for decoder in DECODERS:
        until = time.monotonic() + given.seconds / len(DECODERS)
        rng = random.Random(f"{seed} {decoder.name}")
        found.append(
            search(decoder, rng, bytes_max=given.bytes, go_on=lambda tried: not tried or time.monotonic() < until)  # noqa: B023
        )
    print(report(found))
    if not all(each.largest.is_allowed for each in found):
        sys.exit(f"a message took more than {ALLOWED_TIMES} times its size, and more than {ALLOWED_BYTES // MIB} MiB")


if __name__ == "__main__":
    main()
