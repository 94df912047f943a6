"""What a store refuses to open: directories of others, other formats, damaged files."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import lmdb
import pytest

from holdfast.log import lmdb_file
from holdfast.log.errors import Corrupt, DirectoryInUse, DiskFailed, WrongDirectory, WrongVersion
from holdfast.log.lmdb_file import FORMAT, FORMATS_READ
from holdfast.log.store import Cut, Op, Put
from tests.log.stores import WAIT_S, child, close_after, key, next_line, open_store, refusal, scan_all, write

# The directory


def test_a_new_directory_is_made_with_its_parents_and_keeps_its_disk_id(tmp_path: Path) -> None:
    path = tmp_path / "some" / "deep" / "data"
    store = open_store(path)
    disk = store.disk
    assert len(bytes.fromhex(disk)) == 16 and store.incarnation == 1
    store.close()

    store = open_store(path)

    assert (store.disk, store.incarnation) == (disk, 2)
    store.close()
    other = open_store(tmp_path / "other")
    assert other.disk != disk
    other.close()


HOLDER = """
import sys
from pathlib import Path
from holdfast.log.store import LmdbStore
store = LmdbStore.open(Path(sys.argv[1]), node="n1", cluster="c1")
print("holding", flush=True)
sys.stdin.read()
"""


def test_a_directory_held_by_another_process_is_refused_by_its_pid(tmp_path: Path) -> None:
    with child(HOLDER, os.fspath(tmp_path)) as holder:
        assert next_line(holder) == "holding"

        with pytest.raises(DirectoryInUse) as caught:
            open_store(tmp_path)

        assert caught.value.pid == holder.pid
        assert str(tmp_path) in str(caught.value) and str(holder.pid) in str(caught.value)
        holder.kill()
        holder.wait(WAIT_S)
    store = open_store(tmp_path)
    with pytest.raises(DirectoryInUse):
        open_store(tmp_path)
    store.close()


@pytest.mark.parametrize("who", [{"node": "n2"}, {"cluster": "c2"}])
@pytest.mark.parametrize("lost", ["nothing", "IDENTITY", "data.mdb"])
def test_the_directory_of_another_node_or_cluster_is_refused_and_left_alone(
    tmp_path: Path, who: dict[str, str], lost: str
) -> None:
    close_after(tmp_path, Put("log", b"k", b"v"))
    (tmp_path / lost).unlink(missing_ok=True)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.name != "LOCK"}

    with pytest.raises(WrongDirectory) as caught:
        open_store(tmp_path, **who)

    (wrong,) = who.values()
    for word in ("'n1'", "'c1'", repr(wrong), str(tmp_path)):
        assert word in str(caught.value)
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.name != "LOCK"}


def test_a_directory_with_files_of_someone_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")

    with pytest.raises(WrongDirectory, match=r"thesis\.txt"):
        open_store(tmp_path)

    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_an_empty_file_system_is_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()

    open_store(tmp_path).close()


def test_the_journal_file_of_another_disk_is_refused(tmp_path: Path) -> None:
    close_after(tmp_path / "one", Put("log", b"k", b"v"))
    close_after(tmp_path / "two", Put("log", b"k", b"v"))
    shutil.copy(tmp_path / "two" / "data.mdb", tmp_path / "one" / "data.mdb")

    with pytest.raises(WrongDirectory, match="replaced"):
        open_store(tmp_path / "one")


@pytest.mark.parametrize("other", [min(FORMATS_READ) - 1, FORMAT + 1])
def test_an_older_or_newer_format_is_refused_by_both_records(tmp_path: Path, other: int) -> None:
    close_after(tmp_path, Put("log", b"k", b"v"))
    marker = tmp_path / "IDENTITY"
    foreign = json.dumps({**json.loads(marker.read_text()), "format": other}).encode()

    original = marker.read_bytes()
    marker.write_bytes(foreign)
    with pytest.raises(WrongVersion) as caught:
        open_store(tmp_path)
    assert f"format {other}" in str(caught.value) and f"format {FORMAT}" in str(caught.value)

    marker.write_bytes(original)
    env = lmdb.open(os.fspath(tmp_path), max_dbs=8, lock=False, lib_version=0)
    with env.begin(write=True) as txn:
        txn.put(b"identity", foreign, db=env.open_db(b"node", txn=txn))
    env.close()
    with pytest.raises(WrongVersion) as caught:
        open_store(tmp_path)
    assert str(tmp_path / "data.mdb") in str(caught.value)


@pytest.mark.parametrize("crash", [False, True])
def test_a_directory_of_the_previous_format_is_converted_and_then_refused_by_the_older_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, crash: bool
) -> None:
    with monkeypatch.context() as before:
        before.setattr(lmdb_file, "FORMAT", FORMAT - 1)
        close_after(tmp_path, Put("log", b"k", b"v"))
    if crash:  # Between the two records of the directory's owner.
        old = (tmp_path / "IDENTITY").read_bytes()
        open_store(tmp_path).close()
        (tmp_path / "IDENTITY").write_bytes(old)

    store = open_store(tmp_path)
    assert store.get("log", b"k") == b"v"
    store.close()

    assert json.loads((tmp_path / "IDENTITY").read_text())["format"] == FORMAT
    monkeypatch.setattr(lmdb_file, "FORMAT", FORMAT - 1)
    monkeypatch.setattr(lmdb_file, "FORMATS_READ", (FORMAT - 1,))
    with pytest.raises(WrongVersion, match=f"format {FORMAT}, this release understands format {FORMAT - 1}"):
        open_store(tmp_path)


def test_a_crash_while_the_directory_is_made_is_made_good(tmp_path: Path) -> None:
    # Stopped before the file was complete: nothing was ever acknowledged, so it starts from scratch.
    first = tmp_path / "first"
    (first / "creating").mkdir(parents=True)
    (first / "creating" / "data.mdb").write_bytes(b"half")
    open_store(first).close()
    # Stopped before the marker was written.
    second = tmp_path / "second"
    close_after(second, Put("log", b"k", b"v"))
    (second / "IDENTITY").rename(second / "IDENTITY.new")

    store = open_store(second)

    assert store.get("log", b"k") == b"v"
    store.close()
    for path in (first, second):
        assert sorted(os.listdir(path)) == ["IDENTITY", "LOCK", "data.mdb"]


# Damage


def damaged(path: Path, ops: Sequence[Op] = ()) -> Path:
    close_after(path, *(ops or [Put("log", key(i), bytes(500)) for i in range(200)]))
    return path / "data.mdb"


def test_a_missing_journal_file_is_not_a_new_start(tmp_path: Path) -> None:
    damaged(tmp_path).unlink()

    assert f"{tmp_path / 'data.mdb'}: the journal file is missing" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0, 100, 4096, 4200, 8192, 40_000, -4096, -1])
def test_a_torn_journal_file_is_refused_with_its_name(tmp_path: Path, keep: int) -> None:
    file = damaged(tmp_path)
    size = file.stat().st_size
    os.truncate(file, keep if keep >= 0 else size + keep)

    text = refusal(tmp_path)

    assert f"{file}: the file is torn" in text


def shortened(path: Path) -> Path:
    """An intact file that ends before the last page LMDB counted: pages used and freed in one transaction are never
    written."""
    file = damaged(path)
    store = open_store(path)
    for _ in range(3):
        write(store, Cut("log", key(0), key(50)), Put("log", key(1), bytes(9000)))
        write(
            store, Put("log", key(2), b"small"), Put("log", key(999), bytes(3_000_000)), Cut("log", key(999), key(1000))
        )
    store.close()
    env = lmdb.open(os.fspath(path), max_dbs=8, lock=False, lib_version=0)
    last_page = env.info()["last_pgno"]
    env.close()
    assert file.stat().st_size < last_page * resource.getpagesize(), "the file is not as short as it was meant to be"
    return file


def test_a_file_that_ends_before_unused_pages_is_intact(tmp_path: Path) -> None:
    shortened(tmp_path)

    store = open_store(tmp_path)

    assert store.get("log", key(2)) == b"small"
    write(store, *(Put("more", key(i), bytes(3000)) for i in range(2000)))
    assert store.count("more") == 2000
    store.close()
    open_store(tmp_path).close()


READER = """
import sys
from pathlib import Path
from holdfast.log.errors import Corrupt
from holdfast.log.store import LmdbStore
for line in sys.stdin:
    try:
        store = LmdbStore.open(Path(line.strip()), node="n1", cluster="c1")
    except Corrupt:
        print("refused", flush=True)
    else:
        items = store.scan("log", b"", b"\\xff" * 9, bytes_max=1 << 40, count_max=1 << 40)
        print(len(items), sum(len(v) for _, v in items), flush=True)
        store.close()
"""


def trimmed(path: Path) -> Path:
    """A file whose last pages are in use while the list of free pages is near its beginning."""
    file = damaged(path)
    store = open_store(path)
    write(store, Cut("log", key(0), key(48)))
    for number in range(6):
        write(store, Put("other", b"k", b"%d" % number))
    store.close()
    return file


@pytest.mark.parametrize("make", [shortened, trimmed])
def test_a_file_torn_anywhere_is_refused_or_lost_nothing(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    file = make(tmp_path / "whole")
    size = file.stat().st_size
    answers = []

    # In a separate process, because a wrong answer is SIGBUS.
    with child(READER) as reader:
        assert reader.stdin is not None
        for lost in range(size // resource.getpagesize()):
            path = tmp_path / str(lost)
            shutil.copytree(file.parent, path)
            os.truncate(path / "data.mdb", size - lost * resource.getpagesize())
            reader.stdin.write(f"{path}\n")
            reader.stdin.flush()
            answers.append(next_line(reader))
            shutil.rmtree(path)

    assert set(answers) == {answers[0], "refused"}
    assert answers[0].split()[0] == "152"
    assert answers == sorted(answers), "a file that lost more is not better than one that lost less"


@pytest.mark.parametrize("header", [0, 1])
@pytest.mark.parametrize(
    ("field", "offset"),
    [("page number", 0), ("kind", 10), ("magic", 16), ("layout", 20), ("size of a page", 40), ("transaction", 144)],
)
def test_a_flipped_bit_in_a_header_is_refused(tmp_path: Path, header: int, field: str, offset: int) -> None:
    file = damaged(tmp_path)
    flip(file, header * resource.getpagesize() + offset, bit=3)

    assert str(file) in refusal(tmp_path)


def test_a_header_that_looks_newer_does_not_roll_the_journal_back(tmp_path: Path) -> None:
    """LMDB alone would open the older snapshot and forget the last commit."""
    file = damaged(tmp_path)
    content = file.read_bytes()
    size = resource.getpagesize()
    older = min((0, 1), key=lambda number: content[number * size + 144 : number * size + 152][::-1])
    flip(file, older * size + 149, bit=0)

    assert "contradict" in refusal(tmp_path)


def test_overwritten_pages_are_damage_and_never_an_error_of_lmdb(tmp_path: Path) -> None:
    file = damaged(tmp_path)
    size = resource.getpagesize()
    with file.open("r+b") as stream:
        stream.seek(2 * size)
        stream.write(bytes(file.stat().st_size - 2 * size))

    assert str(file) in refusal(tmp_path)


def test_a_damaged_page_met_while_reading_is_named(tmp_path: Path) -> None:
    file = damaged(tmp_path, [Put("log", key(i), b"findme" * 50) for i in range(2000)])
    content = bytearray(file.read_bytes())
    size = resource.getpagesize()
    for start in range(2 * size, len(content), size):
        items = (int.from_bytes(content[start + 12 : start + 14], sys.byteorder) - 16) // 2
        if items > 5 and content.count(b"findme", start, start + size) > 100:
            content[start : start + size] = bytes(size)
            break
    file.write_bytes(content)
    store = open_store(tmp_path)

    for _ in range(2):
        with pytest.raises(Corrupt) as caught:
            scan_all(store, "log")
        assert str(file) in str(caught.value)

    store.close()


def test_a_damaged_identity_is_refused(tmp_path: Path) -> None:
    damaged(tmp_path)
    for text in (b"", b"{", b"[1]", b'{"format": %d, "node": 5}' % FORMAT, b"\xff\xfe"):
        (tmp_path / "IDENTITY").write_bytes(text)
        assert str(tmp_path / "IDENTITY") in refusal(tmp_path)


def test_a_path_that_cannot_be_used_is_a_failure_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(DiskFailed, match="Not a directory"):
        open_store(tmp_path / "file" / "data")


def flip(file: Path, offset: int, *, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1 << bit]))
