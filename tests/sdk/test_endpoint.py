"""Where the attempts of all nodes meet, and how their messages are put together."""

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
from holdfast.sdk.journal import ProtocolError
from tests.sdk.fake_node import FakeNode, Invocation, MemoryLink

suspicious = Service("suspicious")
GATE: list[asyncio.Event] = []


@suspicious.handler
async def work(ctx: Context, name: str) -> str:
    await ctx.run("work", GATE[0].wait)
    return name


class Nodes:
    """Two of them, at one endpoint; their attempts are suspects."""

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


def test_suspects_of_all_nodes_wait_for_one_another_and_tell_when_they_begin() -> None:
    async def main() -> None:
        it = Nodes()
        one, two = it.nodes
        first, second = it.start(one, "first", 1), it.start(two, "second", 1)
        plain = it.start(two, "plain", 0)
        await it.settle()

        assert it.began(one) == [first.id] and it.began(two) == []
        assert len(it.endpoint.attempts) == 3 and list(it.endpoint.held) == [it.endpoint.attempts[second.id]]
        GATE[0].set()
        await it.settle()
        assert it.began(two) == [second.id]
        ended = {frame.invocation for node in it.nodes for frame in node.frames if isinstance(frame, Output)}
        assert ended == {first.id, second.id, plain.id}
        assert not it.endpoint.suspects and not it.endpoint.held

    asyncio.run(main())


def test_as_many_suspects_run_as_the_most_suspicious_of_them_allows() -> None:
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


def test_nobody_waits_for_ever_for_a_suspect_whose_step_does_not_end() -> None:
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
        batch = encode_batch([Abort(b"x" * 16, 1, "y" * size), Credit(7)])

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
def test_pieces_that_are_no_batch_end_the_stream(messages: list[list[Any]], why: str) -> None:
    async def main() -> None:
        stream = Stream(Endpoint([suspicious]), _nowhere)
        with pytest.raises(ProtocolError, match=re.escape(why)):
            for frames in messages:
                stream.receive(encode_batch(frames))

    asyncio.run(main())


async def _nowhere(message: bytes) -> None: ...
