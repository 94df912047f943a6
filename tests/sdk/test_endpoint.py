"""The attempts of all nodes at one endpoint, and the assembly of their messages."""

import asyncio
import re
from typing import Any

import pytest

from holdfast.sdk import Context, Service
from holdfast.sdk.endpoint import Endpoint, Stream
from holdfast.sdk.frames import (
    BATCH_BYTES_MAX,
    Abort,
    Began,
    Credit,
    Output,
    Piece,
    Suspend,
    Waiting,
    encode_batch,
    encode_pieces,
)
from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import ProtocolError
from tests.sdk.fake_links import MemoryLink
from tests.sdk.fake_node import FakeNode, Invocation

suspicious = Service("suspicious")
GATE: list[asyncio.Event] = []


@suspicious.handler
async def work(ctx: Context, name: str) -> str:
    await ctx.run("work", GATE[0].wait)
    return name


class Nodes:
    """Two nodes at one endpoint; their attempts are suspects."""

    def __init__(self) -> None:
        GATE[:] = [asyncio.Event()]
        self.nodes = FakeNode(), FakeNode()
        self.endpoint = Endpoint([suspicious])
        for node in self.nodes:
            node.connect(self.endpoint)

    def start(self, node: FakeNode, name: str, suspects_max: int) -> Invocation:
        return node.invoke("suspicious", "work", b'"%s"' % name.encode(), suspects_max=suspects_max)

    async def settle(self) -> None:
        for _ in range(100):
            await asyncio.sleep(0)

    def began(self, node: FakeNode) -> list[bytes]:
        return [frame.invocation for frame in node.frames if isinstance(frame, Began)]


def test_suspects_of_all_nodes_wait_for_each_other_and_report_when_they_begin() -> None:
    async def main() -> None:
        it = Nodes()
        one, two = it.nodes
        first, second = it.start(one, "first", 2), it.start(one, "second", 2)
        third = it.start(two, "third", 2)
        plain = it.start(two, "plain", 0)
        await it.settle()

        assert it.began(one) == [first.id, second.id] and it.began(two) == []
        assert len(it.endpoint.attempts) == 4 and list(it.endpoint.held) == [it.endpoint.attempts[third.id]]
        GATE[0].set()
        await it.settle()
        assert it.began(two) == [third.id]
        ended = {frame.invocation for node in it.nodes for frame in node.frames if isinstance(frame, Output)}
        assert ended == {first.id, second.id, third.id, plain.id}
        assert not it.endpoint.suspects and not it.endpoint.held

    asyncio.run(main())


def test_a_suspect_that_must_run_alone_waits_for_running_attempts_and_later_ones_wait_for_it() -> None:
    async def main() -> None:
        it = Nodes()
        one, two = it.nodes
        before = it.start(one, "before", 0)
        await it.settle()
        alone, after = it.start(two, "alone", 1), it.start(one, "after", 0)
        await it.settle()
        held = [attempt.id for attempt in it.endpoint.held]
        assert held == [alone.id, after.id] and not it.began(two)

        gate, GATE[0] = GATE[0], asyncio.Event()
        gate.set()
        await it.settle()
        assert [frame.invocation for frame in one.frames if isinstance(frame, Output)] == [before.id]
        assert it.began(two) == [alone.id] and [attempt.id for attempt in it.endpoint.held] == [after.id]

        GATE[0].set()
        await it.settle()
        assert [frame.invocation for frame in one.frames if isinstance(frame, Output)] == [before.id, after.id]
        assert [frame.invocation for frame in two.frames if isinstance(frame, Output)] == [alone.id]

    asyncio.run(main())


def test_a_suspect_that_must_run_alone_does_not_wait_for_long_running_attempts() -> None:
    async def main() -> None:
        it = Nodes()
        it.endpoint.suspicion_s = 1.0
        one, two = it.nodes
        it.start(one, "for hours", 0)
        await it.settle()
        alone = it.start(two, "alone", 1)
        await it.settle()
        assert not it.began(two)

        async with asyncio.timeout(60):
            while not it.began(two):
                await asyncio.sleep(0.01)

        assert it.began(two) == [alone.id]
        GATE[0].set()
        await it.endpoint.stop()

    asyncio.run(main())


def test_the_smallest_limit_among_the_suspects_applies() -> None:
    async def main() -> None:
        it = Nodes()
        one, two = it.nodes
        for number in range(4):
            it.start(one, f"n{number}", 3)
        await it.settle()
        assert len(it.began(one)) == 3
        it.start(two, "alone", 1)
        await it.settle()
        assert it.began(two) == []

        GATE[0].set()
        await it.settle()

        assert len(it.began(one)) == 4 and len(it.began(two)) == 1

    asyncio.run(main())


def test_a_suspect_whose_step_does_not_end_delays_others_only_for_a_while() -> None:
    async def main() -> None:
        it = Nodes()
        it.endpoint.suspicion_s = 0.05
        one, two = it.nodes
        it.start(one, "hangs", 1)
        await it.settle()
        second, third = it.start(two, "second", 1), it.start(one, "third", 1)
        await it.settle()
        assert it.began(two) == []

        async with asyncio.timeout(60):
            while len(it.began(one)) < 2 or not it.began(two):
                await asyncio.sleep(0.01)

        assert it.began(two) == [second.id] and it.began(one)[1:] == [third.id]
        assert not it.endpoint.held and len(it.endpoint.attempts) == 3
        GATE[0].set()
        await it.endpoint.stop()

    asyncio.run(main())


def test_a_suspect_that_is_held_can_be_ended_or_handed_back() -> None:
    async def main() -> None:
        it = Nodes()
        one, two = it.nodes
        it.start(one, "first", 1)
        ended, asked_back, left = (it.start(two, name, 1) for name in ("ended", "asked back", "left"))
        await it.settle()

        two.send(Abort(ended.id, ended.epoch, "it is over"))
        two.send(Suspend(asked_back.id, asked_back.epoch))
        await it.settle()

        assert [frame for frame in two.frames if isinstance(frame, Waiting)] == [Waiting(asked_back.id, 1, [])]
        assert isinstance(one.link, MemoryLink)
        await one.link.drop()
        await it.settle()
        assert it.began(two) == [left.id]
        GATE[0].set()
        await it.endpoint.stop()

    asyncio.run(main())


@pytest.mark.parametrize("size", [1, 1000, 100_000, 100_001, 1_000_000])
def test_a_batch_that_comes_in_pieces_is_one_batch(size: int) -> None:
    async def main() -> None:
        stream = Stream(Endpoint([suspicious]), _nowhere)
        batch = encode_batch([Abort(InvocationId(b"x" * 16), 1, "y" * size), Credit(7)])

        messages = list(encode_pieces(batch, 100_000))
        for message in messages:
            assert len(message) <= 100_000
            stream.receive(message)

        assert stream.credit == 7 and len(messages) == -(-len(batch) // (100_000 - 16))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([[Piece(b"a", True)], [Credit(1)]], "between the pieces"),
        ([[Piece(b"a", True), Piece(b"b", False)]], "between the pieces"),
        ([[Piece(b"", True)]], f"must have 1 to {BATCH_BYTES_MAX} bytes"),
        ([[Piece(b"x" * (BATCH_BYTES_MAX // 4), True)]] * 5, f"must have 1 to {BATCH_BYTES_MAX} bytes"),
        ([[Piece(encode_batch([Piece(b"a", False)]), False)]], "unknown frame 34"),
    ],
)
def test_invalid_pieces_end_the_stream(messages: list[list[Any]], why: str) -> None:
    async def main() -> None:
        stream = Stream(Endpoint([suspicious]), _nowhere)
        with pytest.raises(ProtocolError, match=re.escape(why)):
            for frames in messages:
                stream.receive(encode_batch(frames))

    asyncio.run(main())


async def _nowhere(message: bytes) -> None: ...
