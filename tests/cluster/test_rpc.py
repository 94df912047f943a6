"""Requests between nodes: answered, refused, or with a known unknown outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from holdfast.cluster.peers import rpc
from holdfast.cluster.peers.rpc import Refused, Rpc, Unanswered
from holdfast.log.messages import APP_BYTES_MAX


class Wire:
    """Two nodes and the link between them, below the real code."""

    def __init__(self, leader: Callable[[int], str | None] = lambda _: None) -> None:
        self.up = True
        self.sent: list[tuple[str, bytes]] = []
        self.a = Rpc(self._to("b", lambda: self.b, "a"), leader=leader)
        self.b = Rpc(self._to("a", lambda: self.a, "b"))

    def _to(self, name: str, receiver: Callable[[], Rpc], sender: str) -> Callable[[str, bytes], bool]:
        def send(peer: str, payload: bytes) -> bool:
            assert peer == name
            if self.up:
                self.sent.append((sender, payload))
                asyncio.get_running_loop().call_soon(self._arrive, receiver(), sender, payload)
            return self.up

        return send

    def _arrive(self, receiver: Rpc, sender: str, payload: bytes) -> None:
        if self.up:
            receiver.receive(sender, payload)

    def cut(self) -> None:
        self.up = False
        self.a.peer_down("b")
        self.b.peer_down("a")


async def test_a_question_gets_the_answer_of_its_handler() -> None:
    wire = Wire()

    async def add(peer: str, argument: Any) -> Any:
        return [peer, sum(argument)]

    wire.b.serve("add", add)

    one, two = await asyncio.gather(wire.a.ask("b", "add", [1, 2]), wire.a.ask("b", "add", [3]))

    assert (one, two) == (["a", 3], ["a", 3])


async def test_a_refusal_keeps_its_kind_text_and_detail() -> None:
    wire = Wire()

    async def refuse(peer: str, argument: Any) -> Any:
        raise Refused("not-leader", "n3 leads", "n3")

    wire.b.serve("write", refuse)

    with pytest.raises(Refused) as refused:
        await wire.a.ask("b", "write", None)
    assert (refused.value.kind, refused.value.message, refused.value.detail) == ("not-leader", "n3 leads", "n3")


async def test_a_failing_handler_is_logged_and_reported_to_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire()

    async def broken(peer: str, argument: Any) -> Any:
        raise KeyError("x")

    wire.b.serve("broken", broken)

    with pytest.raises(Refused, match="KeyError") as refused:
        await wire.a.ask("b", "broken", None)
    assert refused.value.kind == "internal"
    assert "a call from a failed" in caplog.text


async def test_an_unknown_question_is_refused() -> None:
    wire = Wire()

    with pytest.raises(Refused, match="older release") as refused:
        await wire.a.ask("b", "levitate", None)
    assert refused.value.kind == "unknown"


async def test_without_a_link_nothing_was_sent() -> None:
    wire = Wire()
    wire.cut()

    with pytest.raises(Unanswered) as unanswered:
        await wire.a.ask("b", "add", [1])
    assert not unanswered.value.sent


async def test_a_broken_link_leaves_the_question_open_and_ends_the_work_on_it() -> None:
    wire = Wire()
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow(peer: str, argument: Any) -> Any:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    wire.b.serve("slow", slow)
    asking = asyncio.ensure_future(wire.a.ask("b", "slow", None))
    await begun.wait()
    wire.cut()

    with pytest.raises(Unanswered) as unanswered:
        await asking
    assert unanswered.value.sent
    await ended.wait()


async def test_the_other_side_forgets_a_caller_that_stopped_waiting() -> None:
    wire = Wire()
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow(peer: str, argument: Any) -> Any:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    wire.b.serve("slow", slow)
    asking = asyncio.ensure_future(wire.a.ask("b", "slow", None))
    await begun.wait()
    asking.cancel()

    await ended.wait()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_too_many_open_questions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "OPEN_MAX", 1)
    wire = Wire()
    release = asyncio.Event()

    async def slow(peer: str, argument: Any) -> Any:
        await release.wait()
        return argument

    wire.b.serve("slow", slow)
    first = asyncio.ensure_future(wire.a.ask("b", "slow", 1))
    await asyncio.sleep(0)

    with pytest.raises(Refused) as refused:
        await wire.a.ask("b", "slow", 2)
    assert refused.value.kind == "overloaded"
    release.set()
    assert await first == 1
    assert await wire.a.ask("b", "slow", 3) == 3


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", msgpack.packb([]), msgpack.packb([9, 1]), msgpack.packb([0, 1]), b"\x01"]
)
async def test_invalid_messages_are_dropped(payload: bytes) -> None:
    wire = Wire()

    wire.b.receive("a", payload)

    assert wire.sent == []


async def test_a_silent_leader_is_awaited_until_another_node_leads() -> None:
    leaders: dict[int, str | None] = {1: "b", 2: "b"}
    wire = Wire(leaders.get)
    wire.b.serve("submit", lambda peer, argument: asyncio.get_running_loop().create_future())
    moved = asyncio.ensure_future(wire.a.ask("b", "submit", None, about=1))
    stays = asyncio.ensure_future(wire.a.ask("b", "submit", None, about=2))
    nobody = asyncio.ensure_future(wire.a.ask("b", "submit", None))
    leaders[1] = None  # An election: the old leader may still win it.
    await asyncio.sleep(3 * rpc.FOLLOW_S)
    assert not moved.done()

    leaders[1] = "c"
    with pytest.raises(Unanswered) as raised:
        await asyncio.wait_for(moved, 60)

    assert raised.value.sent
    assert not stays.done() and not nobody.done()
    for question in (stays, nobody):
        question.cancel()
    await asyncio.gather(stays, nobody, return_exceptions=True)
    await asyncio.gather(wire.a.stop(), wire.b.stop())


async def test_an_answer_that_no_link_would_carry_is_refused_and_the_link_stays() -> None:
    wire = Wire()

    async def much(peer: str, argument: Any) -> Any:
        return bytes(argument)

    wire.b.serve("much", much)

    with pytest.raises(Refused, match="the limit"):
        await wire.a.ask("b", "much", APP_BYTES_MAX)
    assert await wire.a.ask("b", "much", 3) == bytes(3)


async def test_an_answer_or_question_of_too_many_elements_is_refused_unread() -> None:
    wire = Wire()

    async def answer(peer: str, argument: Any) -> Any:
        return [[]] * 300_000 if argument is None else len(argument)

    wire.b.serve("lists", answer)

    with pytest.raises(Refused) as of_answer:
        await wire.a.ask("b", "lists", None)
    with pytest.raises(Refused) as of_question:
        await wire.a.ask("b", "lists", [[]] * 300_000)

    assert (of_answer.value.kind, of_question.value.kind) == ("TooLarge", "TooLarge")
    assert "elements" in of_answer.value.message
    assert await wire.a.ask("b", "lists", [1, 2]) == 2
