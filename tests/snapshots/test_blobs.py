"""Large payloads: the same bytes once, never the wrong bytes, and collected only when nothing can refer to them."""

from __future__ import annotations

import pytest

from holdfast.snapshots.blobs import DAY_MS, Blobs, Ref
from holdfast.snapshots.errors import Corrupted, NotFound
from holdfast.snapshots.stores import Store

NOW = 20_000 * DAY_MS + 5


def test_the_bytes_come_back(store: Store) -> None:
    blobs = Blobs(store)

    ref = blobs.put(b"a large value", now_ms=NOW)

    assert blobs.get(Ref.decode(ref.encode())) == b"a large value"
    assert blobs.exists(ref)


def test_the_same_bytes_are_kept_once_a_day(store: Store) -> None:
    blobs = Blobs(store)

    refs = {blobs.put(b"same", now_ms=NOW + hour * 3_600_000) for hour in range(4)}
    later = blobs.put(b"same", now_ms=NOW + DAY_MS)

    assert len(refs) == 1
    assert later not in refs
    assert len(store.list("blobs/")) == 2


def test_an_empty_value_is_a_value(store: Store) -> None:
    assert Blobs(store).get(Blobs(store).put(b"", now_ms=NOW)) == b""


def test_a_half_written_blob_is_written_again(store: Store) -> None:
    blobs = Blobs(store)
    ref = blobs.put(b"0123456789", now_ms=NOW)
    store.put_bytes(b"01234", "blobs/" + ref.name)

    assert not blobs.exists(ref)
    assert blobs.get(blobs.put(b"0123456789", now_ms=NOW)) == b"0123456789"


def test_other_bytes_under_the_name_are_never_returned(store: Store) -> None:
    blobs = Blobs(store)
    ref = blobs.put(b"0123456789", now_ms=NOW)
    store.put_bytes(b"0123456780", "blobs/" + ref.name)

    with pytest.raises(Corrupted, match="do not match"):
        blobs.get(ref)


def test_what_was_never_put_is_not_found(store: Store) -> None:
    with pytest.raises(NotFound):
        Blobs(store).get(Ref(20_000, b"\x11" * 32, 3))


def test_the_sweep_removes_what_is_old_and_not_referred_to(store: Store) -> None:
    blobs = Blobs(store)
    old_kept, old_gone = (blobs.put(data, now_ms=NOW) for data in (b"kept", b"gone"))
    yesterday = blobs.put(b"yesterday", now_ms=NOW + 9 * DAY_MS)
    today = blobs.put(b"today", now_ms=NOW + 10 * DAY_MS)
    store.put_bytes(b"?", "blobs/stranger")

    swept = blobs.sweep(lambda: [old_kept], now_ms=NOW + 10 * DAY_MS)

    assert swept == (1, len(b"gone"), 4)
    assert [blobs.exists(ref) for ref in (old_kept, old_gone, yesterday, today)] == [True, False, True, True]
    assert store.read("blobs/stranger") == b"?"


def test_a_blob_found_while_the_sweep_looks_is_not_removed(store: Store) -> None:
    """The race of every collector: an old unreferenced blob is wanted again between the listing and the removal."""
    blobs = Blobs(store)
    blobs.put(b"again", now_ms=NOW)
    wanted: list[Ref] = []

    def mark() -> list[Ref]:
        wanted.append(blobs.put(b"again", now_ms=NOW + 10 * DAY_MS))  # Its reference is not committed yet.
        return []

    blobs.sweep(mark, now_ms=NOW + 10 * DAY_MS)

    assert blobs.get(wanted[0]) == b"again"


def test_too_little_grace_and_broken_references_are_refused(store: Store) -> None:
    with pytest.raises(ValueError):
        Blobs(store, grace_days=1)
    with pytest.raises(ValueError):
        Ref.decode(b"short")
