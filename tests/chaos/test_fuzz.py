"""No message uses more memory than allowed, and a reader that does is found. Time is not checked here."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import msgpack
import pytest

from holdfast.chaos.fuzz import ALLOWED_BYTES, ALLOWED_TIMES, DECODERS, MIB, Cost, Decoder, cost_of, search

TRIES = 40


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)
def test_no_message_takes_more_memory_than_it_may(decoder: Decoder) -> None:
    logging.disable()
    try:
        worst = search(decoder, random.Random(7), bytes_max=MIB // 2, go_on=lambda tried: tried < TRIES, timed=False)
    finally:
        logging.disable(logging.NOTSET)

    assert worst.tried == TRIES
    assert worst.largest.is_allowed, worst


def test_a_reader_that_parses_before_it_counts_is_found() -> None:
    def careless(raw: bytes) -> Iterator[None]:
        msgpack.unpackb(raw)
        yield

    decoder = Decoder("careless", careless, 40 * MIB, is_json=False)

    worst = search(decoder, random.Random(7), bytes_max=MIB // 2, go_on=lambda tried: tried < TRIES, timed=False)

    assert not worst.largest.is_allowed, worst


def test_the_allowed_cost_is_a_constant_plus_a_share_of_the_size() -> None:
    assert Cost(10, 0.0, ALLOWED_BYTES).is_allowed and not Cost(10, 0.0, ALLOWED_BYTES + 1).is_allowed
    assert Cost(40 * MIB, 0.0, ALLOWED_TIMES * 40 * MIB).is_allowed
    assert not Cost(40 * MIB, 0.0, ALLOWED_TIMES * 40 * MIB + 1).is_allowed


def test_memory_is_measured_at_its_peak() -> None:
    def wasteful(raw: bytes) -> Iterator[None]:
        yield
        _ = bytearray(3 * MIB)
        yield

    assert 3 * MIB <= cost_of(wasteful, b"x").peak_bytes < 4 * MIB
