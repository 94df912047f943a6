"""The state of a partition on disk: when it is trusted, and when it is rebuilt."""

from __future__ import annotations

import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import lmdb
import pytest

from holdfast.cluster.partition.state import State

OWNER = "a log"


def fill(path: Path, *, boot: str = "boot 1", index: int = 7) -> State:
    state = State.open(path, owner=OWNER, boot=boot)
    txn = state.begin()
    for number in range(500):
        txn.put(b"k%04d" % number, b"value" * 20)
    state.commit(txn, (index, 2))
    return state


def kill(state: State) -> None:
    """What a killed process leaves: pages in the kernel, and no clean close."""
    state._env.close()


def test_a_killed_process_finds_its_state_again(tmp_path: Path) -> None:
    kill(fill(tmp_path / "p"))

    again = State.open(tmp_path / "p", owner=OWNER, boot="boot 1")

    assert again.applied == (7, 2)
    with again.read() as txn:
        assert txn.get(b"k0003") == b"value" * 20
        assert [key for key, _ in txn.scan(b"k0498", b"l")] == [b"k0498", b"k0499"]
    again.close()


def test_a_machine_that_ended_without_closing_it_builds_the_state_again(tmp_path: Path) -> None:
    kill(fill(tmp_path / "p"))

    again = State.open(tmp_path / "p", owner=OWNER, boot="boot 2")

    assert again.applied == (0, 0)
    with again.read() as txn:
        assert txn.get(b"k0003") is None
    again.close()


def test_a_clean_close_outlives_a_restart_of_the_machine(tmp_path: Path) -> None:
    fill(tmp_path / "p").close()

    again = State.open(tmp_path / "p", owner=OWNER, boot="boot 2")

    assert again.applied == (7, 2)
    again.close()


def test_a_clean_close_is_believed_once(tmp_path: Path) -> None:
    fill(tmp_path / "p").close()
    kill(State.open(tmp_path / "p", owner=OWNER, boot="boot 2"))

    again = State.open(tmp_path / "p", owner=OWNER, boot="boot 3")

    assert again.applied == (0, 0)
    again.close()


def test_the_state_of_another_log_is_not_gone_on_with(tmp_path: Path) -> None:
    fill(tmp_path / "p").close()

    again = State.open(tmp_path / "p", owner="another log", boot="boot 1")

    assert again.applied == (0, 0)
    again.close()


@pytest.mark.parametrize("seed", range(20))
def test_power_loss_in_the_middle_of_anything_never_leaves_a_state_that_is_believed(tmp_path: Path, seed: int) -> None:
    """The disk keeps any mixture of old and new pages, torn and stale files: all of it is discarded."""
    rng = random.Random(seed)
    path = tmp_path / "p"
    fill(path).close()
    old = (path / "data.mdb").read_bytes()
    state = fill(path, index=9)
    kill(state)
    new = bytearray((path / "data.mdb").read_bytes())
    for page in range(0, len(new), 4096):
        if rng.random() < 0.5:
            new[page : page + 4096] = old[page : page + 4096].ljust(4096, b"\0")
    damage = bytes(new)[: rng.randrange(len(new))] if rng.random() < 0.3 else bytes(new)
    (path / "data.mdb").write_bytes(damage)
    if rng.random() < 0.2:
        (path / "MARK").unlink()
    elif rng.random() < 0.2:
        (path / "MARK").write_bytes(os.urandom(rng.randrange(40)))

    again = State.open(path, owner=OWNER, boot="the next boot")

    assert again.applied == (0, 0)
    again.close()


def test_a_torn_file_is_refused_before_it_is_mapped(tmp_path: Path) -> None:
    kill(fill(tmp_path / "p"))
    file = tmp_path / "p" / "data.mdb"
    file.write_bytes(file.read_bytes()[:20000])

    again = State.open(tmp_path / "p", owner=OWNER, boot="boot 1")

    assert again.applied == (0, 0)
    again.close()


def test_a_file_that_is_none_is_replaced(tmp_path: Path) -> None:
    kill(fill(tmp_path / "p"))
    (tmp_path / "p" / "data.mdb").write_bytes(b"not a database" * 1000)

    again = State.open(tmp_path / "p", owner=OWNER, boot="boot 1")

    assert again.applied == (0, 0)
    again.close()


def test_a_copy_of_the_directory_is_as_good_as_the_directory(tmp_path: Path) -> None:
    fill(tmp_path / "p").close()
    shutil.copytree(tmp_path / "p", tmp_path / "q")

    again = State.open(tmp_path / "q", owner=OWNER, boot="boot 1")

    assert again.applied == (7, 2)
    again.close()


def test_a_full_map_grows_and_nothing_is_half_written(tmp_path: Path) -> None:
    state = State.open(tmp_path / "p", owner=OWNER, boot="boot 1", map_bytes=256 * 1024)
    txn = state.begin()
    with pytest.raises(lmdb.MapFullError):
        for number in range(1000):
            txn.put(b"k%04d" % number, b"v" * 2000)
    state.abort(txn)
    for _ in range(5):
        state.grow()

    txn = state.begin()
    assert txn.get(b"k0000") is None
    for number in range(1000):
        txn.put(b"k%04d" % number, b"v" * 2000)
    state.commit(txn, (1, 1))

    with state.read() as view:
        assert view.get(b"k0999") == b"v" * 2000
    state.close()


def test_nobody_borrows_the_environment_while_it_is_replaced(tmp_path: Path) -> None:
    """A reader of the old map would crash the process."""
    state = fill(tmp_path / "p")
    borrowed, tried = threading.Event(), threading.Event()

    def borrow() -> None:
        tried.set()
        with state.lend(lambda: None) as env, env.begin() as txn:
            assert txn.get(b"k0003") == b"value" * 20
            borrowed.set()

    class Slow:
        def swap(self) -> None:
            thread.start()
            assert tried.wait(10.0)
            assert not borrowed.wait(0.2), "the environment is closed now"

    thread = threading.Thread(target=borrow)
    slow: Any = Slow()
    state.swap(slow)
    thread.join()

    assert borrowed.is_set()
    kill(state)
