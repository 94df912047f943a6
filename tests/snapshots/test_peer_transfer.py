"""A snapshot is sent from peer to peer in bounded pieces, over any carrier of requests and responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest

from holdfast.log.messages import GroupId
from holdfast.snapshots.cut import cut_blocking
from holdfast.snapshots.errors import Corrupted, PeerRefused, WrongSnapshot
from holdfast.snapshots.format import BLOCK_BYTES, Expected, SnapshotFile
from holdfast.snapshots.transfer import CHUNK_BYTES_MAX, Offer, PeerSource, fetch_from_peer
from holdfast.snapshots.work import Throttle
from tests.snapshots.states import GROUP, State

CHUNK = 64 << 10


class LinkBroke(Exception):
    """The error of a link when its session ends."""


class Link:
    """Carries requests to a source; each response may be corrupted."""

    def __init__(self, source: PeerSource, spoil: Callable[[int, bytes], bytes] = lambda _, answer: answer) -> None:
        self.source = source
        self.spoil = spoil
        self.questions: list[bytes] = []
        self.broken_after = 1 << 30

    async def request(self, peer: str, question: bytes) -> bytes:
        assert peer == "n2"
        if len(self.questions) >= self.broken_after:
            raise LinkBroke
        self.questions.append(question)
        number = len(self.questions)
        await asyncio.sleep(0)
        return self.spoil(number, await self.source.answer(question))


@pytest.fixture
def file(state: State, tmp_path: Path) -> SnapshotFile:
    state.apply(2000)
    return cut_blocking(state.env, state.describe, tmp_path / "serving")


@pytest.fixture
def link(file: SnapshotFile) -> Link:
    return Link(PeerSource(lambda group: file.path.parent if group == GROUP else None))


def fetch(link: Link, file: SnapshotFile, to: Path, **options: object) -> SnapshotFile:
    return asyncio.run(
        fetch_from_peer(link.request, "n2", GROUP, file.name, to, chunk_bytes=CHUNK, **options)  # type: ignore[arg-type]
    )


def test_a_snapshot_arrives_whole(link: Link, file: SnapshotFile, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    fetched = fetch(link, file, tmp_path / "fetched", progress=lambda done, total: seen.append((done, total)))

    assert fetched.path.read_bytes() == file.path.read_bytes()
    assert fetched.header == file.header
    assert seen[-1] == (file.header.file_bytes, file.header.file_bytes)
    assert len(link.questions) == 1 + -(-file.header.file_bytes // CHUNK)


def test_a_broken_link_costs_only_requests_in_flight(link: Link, file: SnapshotFile, tmp_path: Path) -> None:
    link.broken_after = 12
    with pytest.raises(LinkBroke):
        fetch(link, file, tmp_path / "fetched")
    had = (tmp_path / "fetched" / (file.name + ".part")).stat().st_size
    link.broken_after = 1 << 30
    link.questions.clear()

    fetched = fetch(link, file, tmp_path / "fetched")

    assert had >= 4 * CHUNK
    assert len(link.questions) == 1 + -(-(file.header.file_bytes - had) // CHUNK)
    assert fetched.path.read_bytes() == file.path.read_bytes()


def test_damaged_answers_are_asked_for_again(link: Link, file: SnapshotFile, tmp_path: Path) -> None:
    link.spoil = lambda number, answer: answer[:-5] + b"wrong" if number % 5 == 0 else answer

    assert fetch(link, file, tmp_path / "fetched").path.read_bytes() == file.path.read_bytes()


def test_a_peer_that_answers_nonsense_is_given_up(link: Link, file: SnapshotFile, tmp_path: Path) -> None:
    link.spoil = lambda number, answer: b"\xc1nonsense" if number > 3 else answer

    with pytest.raises(PeerRefused, match="damaged"):
        fetch(link, file, tmp_path / "fetched")


def test_a_damaged_copy_of_a_peer_is_never_accepted(link: Link, file: SnapshotFile, tmp_path: Path) -> None:
    data = bytearray(file.path.read_bytes())
    data[BLOCK_BYTES + 70_000] ^= 1
    file.path.write_bytes(data)

    with pytest.raises(Corrupted, match="checksum"):
        fetch(link, file, tmp_path / "fetched")

    assert list((tmp_path / "fetched").iterdir()) == []


def test_a_removed_snapshot_is_refused_and_the_partial_file_stays_small(
    link: Link, file: SnapshotFile, tmp_path: Path
) -> None:
    file.path.unlink()

    with pytest.raises(PeerRefused, match="no longer exists"):
        fetch(link, file, tmp_path / "fetched")


def test_a_wrong_partial_file_is_replaced(link: Link, file: SnapshotFile, tmp_path: Path) -> None:
    part = tmp_path / "fetched" / (file.name + ".part")
    part.parent.mkdir()
    part.write_bytes(b"\0" * 100_000)

    assert fetch(link, file, tmp_path / "fetched").path.read_bytes() == file.path.read_bytes()


def test_a_snapshot_of_another_cluster_is_refused(link: Link, file: SnapshotFile, tmp_path: Path) -> None:
    with pytest.raises(WrongSnapshot):
        fetch(link, file, tmp_path / "fetched", expected=Expected(cluster="other"))


def test_the_rate_is_kept(link: Link, file: SnapshotFile, tmp_path: Path) -> None:
    async def timed() -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await fetch_from_peer(
            link.request,
            "n2",
            GroupId(GROUP),
            file.name,
            tmp_path / "fetched",
            throttle=Throttle(4 * file.header.file_bytes),
        )
        return loop.time() - start

    assert asyncio.run(timed()) > 0.2


@pytest.mark.parametrize(
    "question",
    [
        b"",
        b"\xc1",
        msgpack.packb([1, 1, GROUP, "../../etc/passwd", 0, 10]),
        msgpack.packb([1, 1, GROUP, "x.snapshot", 0, 10]),
        msgpack.packb([1, 9, GROUP, "x", 0, 10]),
        msgpack.packb([2, 1]),
        msgpack.packb({"a": 1}),
    ],
)
def test_a_bad_question_gets_a_refusal(link: Link, question: bytes) -> None:
    answer = msgpack.unpackb(asyncio.run(link.source.answer(question)))

    assert answer[:2] == [1, 2]


def test_a_question_out_of_bounds_gets_a_refusal(link: Link, file: SnapshotFile) -> None:
    for group, offset, length in ((GROUP, -1, 10), (GROUP, 0, CHUNK_BYTES_MAX + 1), (GROUP, 0, 0), (99, 0, 10)):
        question = msgpack.packb([1, 1, group, file.name, offset, length])
        assert msgpack.unpackb(asyncio.run(link.source.answer(question)))[:2] == [1, 2]


def test_an_offer_survives_encoding_and_decoding(file: SnapshotFile) -> None:
    offer = Offer(file.name, file.header.file_bytes, stored=True)

    assert Offer.decode(offer.encode()) == offer
    for bad in (b"", b"\xc1", msgpack.packb([1, "../x", 5000, True]), msgpack.packb([1, file.name, 1, True])):
        with pytest.raises(PeerRefused, match="cannot be decoded"):
            Offer.decode(bad)
