"""A large frame is taken in many turns of the loop: what follows waits, in order, and nothing more is read meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.log.links import SECRET, Expected, Node, Run, certificates, connected


class Slow(Node):
    """Takes frames of more than a kilobyte in steps."""

    steps = 50

    def _frame(self, peer: str, session: int, payload: bytes) -> Iterator[None] | None:  # type: ignore[override]
        if len(payload) <= 1024:
            super()._frame(peer, session, payload)
            return None
        return self._take(peer, session, payload)

    def _take(self, peer: str, session: int, payload: bytes) -> Iterator[None]:
        for _ in range(self.steps):
            yield
        super()._frame(peer, session, payload)


@pytest.mark.parametrize("by", ["secret", "nothing", "tls"])
def test_what_follows_a_large_frame_waits_and_arrives_in_order(run: Run, tmp_path: Path, by: str) -> None:
    async def scenario() -> None:
        files = certificates(tmp_path, "a", "b") if by == "tls" else {"a": None, "b": None}
        secret = SECRET if by == "secret" else None
        a, b = Node("a", secret=secret, tls=files["a"]), Slow("b", secret=secret, tls=files["b"])
        frames = [b"%d" % number * (1 if number % 7 else 100_000) for number in range(200)]
        async with connected(a, b):
            for frame in frames:
                assert a.send("b", frame)
            await b.until(lambda: len(b.frames) == len(frames))

            assert b.frames == frames and b.late == []

    run(scenario())


def test_a_session_that_ends_within_a_large_frame_hears_no_more_of_it(run: Run) -> None:
    async def scenario() -> None:
        a, b = Node("a"), Slow("b")
        b.steps = 10_000_000
        async with connected(a, b):
            session = b.live["a"]
            assert a.send("b", bytes(100_000)) and a.send("b", b"behind it")
            a.links.set_peers({})
            await a.until(lambda: not a.live)
            b.links.refuse("a", session, "enough")
            await b.until(lambda: not b.live)

            assert b.frames == []

    run(scenario())


def test_a_frame_whose_rest_raises_ends_the_session_and_is_reported(run: Run) -> None:
    class Wrong(Slow):
        def _take(self, peer: str, session: int, payload: bytes) -> Iterator[None]:
            yield
            raise Expected("a bug")

    async def scenario() -> None:
        a, b = Node("a"), Wrong("b")
        async with connected(a, b):
            session = b.live["a"]
            assert a.send("b", bytes(100_000))
            await b.until(lambda: b.live.get("a") != session)

            assert [str(error) for error in b.fatal] == ["a bug"]

    run(scenario())
