"""Directories and files exist completely after a power loss, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from holdfast.snapshots import files
from holdfast.snapshots.files import make_directory, sync_path


def test_a_directory_that_could_not_be_made_durable_is_not_found_the_next_time(tmp_path: Path) -> None:
    with (
        patch.object(files, "sync_directory", side_effect=OSError(errno.ENOSPC, "full")),
        pytest.raises(OSError, match="full"),
    ):
        make_directory(tmp_path / "a" / "b")

    assert not (tmp_path / "a").exists()

    make_directory(tmp_path / "a" / "b")

    assert (tmp_path / "a" / "b").is_dir()


def test_every_name_on_the_way_to_a_directory_is_synced_from_above(tmp_path: Path) -> None:
    deep = tmp_path / "data" / "snapshots" / "disk" / "group"
    deep.mkdir(parents=True)
    synced: list[Path] = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    with patch.object(os, "fsync", watched):
        sync_path(tmp_path / "data", deep)

    assert synced == [tmp_path / "data", *reversed(deep.parents[:2]), deep]


def test_directories_that_are_not_there_are_not_missed(tmp_path: Path) -> None:
    sync_path(tmp_path, tmp_path / "nothing" / "here")

    assert not list(tmp_path.iterdir())
