"""`holdfast backup` against a real node: backups are made, listed, verified, cancelled and deleted."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.running import Cli
from tests.cli.test_commands import cli

__all__ = ["cli"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "place"
    made.mkdir()
    return made


def test_a_backup_is_made_listed_verified_and_deleted(cli: Cli, place: Path) -> None:
    cli.ok("call", "counter/backed-up/add")

    said = cli.ok("backup", "--to", str(place))

    (listed,) = cli.json("backup", "list", "--from", str(place))
    assert said.startswith(listed["id"]) and "Messages between partitions were held for" in said
    assert listed["partitions"] == 2 and listed["bytes"] > 0 and listed["cluster"] == "holdfast"
    assert listed["id"] in cli.ok("backup", "list", "--from", str(place))
    assert "The backup is intact: every checksum matches" in cli.ok("backup", "verify", "--from", str(place))
    assert cli.json("backup", "verify", listed["id"], "--from", str(place)) == listed
    assert "is deleted" in cli.ok("backup", "delete", listed["id"], "--from", str(place))
    assert "has no backups" in cli.ok("backup", "list", "--from", str(place))
    assert [path for path in place.rglob("*") if path.is_file()] == []


def test_a_backup_can_be_made_for_scripts(cli: Cli, place: Path) -> None:
    made = cli.json("backup", "--to", str(place))

    assert made["status"] == "succeeded" and {row["doing"] for row in made["partitions"]} == {"done"}


def test_a_damaged_backup_is_not_sound(cli: Cli, place: Path) -> None:
    made = cli.json("backup", "--to", str(place))
    snapshot = next((place / made["id"]).rglob("*.snapshot"))
    raw = bytearray(snapshot.read_bytes())
    raw[-7] ^= 1
    snapshot.write_bytes(raw)

    result = cli.run("backup", "verify", "--from", str(place))

    assert result.exit_code == 1 and "its data is damaged" in result.stderr


def test_ctrl_c_cancels_a_backup_and_removes_its_files(cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def forever(*_: Any) -> Any:
        import asyncio

        await asyncio.Event().wait()

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.at.node.serving.backups, "_sent", forever)
    # Not the sleep of all threads.
    here = SimpleNamespace(sleep=interrupt, monotonic=time.monotonic)
    monkeypatch.setattr("holdfast.cli.backup.time", here)

    result = cli.run("backup", "--to", str(place))

    assert result.exit_code == 130 and "was cancelled, and its files were removed" in result.stderr
    assert [path for path in place.rglob("*") if path.is_file()] == []


def test_a_wrong_place_is_refused_with_a_hint(cli: Cli, tmp_path: Path) -> None:
    missing = cli.run("backup", "--to", str(tmp_path / "missing"))
    assert missing.exit_code == 1 and "the directory does not exist. Create it" in missing.stderr

    assert "unknown kind of store 'ftp'" in cli.run("backup", "--to", "ftp://x").stderr
    assert "does not exist" in cli.run("backup", "list", "--from", str(tmp_path / "missing")).stderr
    assert cli.run("backup").exit_code == 2
    os.mkdir(tmp_path / "empty")
    for command in (("verify",), ("delete", "backup-20260101-000000-abcdef"), ("verify", "nonsense")):
        result = cli.run("backup", *command, "--from", str(tmp_path / "empty"))
        assert result.exit_code == 1 and "there is no" in result.stderr, result.stderr


def test_an_interrupted_backup_is_shown_as_such(cli: Cli, place: Path) -> None:
    made = cli.json("backup", "--to", str(place))
    (place / made["id"] / "manifest.json").unlink()

    (listed,) = cli.json("backup", "list", "--from", str(place))

    assert listed == {"id": made["id"], "note": "not finished: in progress, or interrupted"}
    assert cli.run("backup", "verify", "--from", str(place)).exit_code == 1


def test_a_data_directory_is_created_from_a_backup(
    cli: Cli, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cli.json("backup", "--to", str(place))
    monkeypatch.setattr(cli, "environ", {**cli.environ, "HOLDFAST_DATA": str(tmp_path / "new"), "HOLDFAST_NODE": "m1"})

    said = cli.ok("restore", "--from", str(place))

    assert f"node m1 of cluster holdfast has 2 partitions, from {made['id']}." in said
    assert "Start it: holdfast serve" in said and 'Nodes that join later need the setting: restored = "backup-' in said
    assert "was already restored but has not been started" in cli.ok(
        "restore", "--from", str(place), "--backup", made["id"]
    )
    shown = cli.json("restore", "--from", str(place))
    assert shown["restored"].startswith(made["id"]) and shown["partitions"] == [0, 1] and shown["others"] == []


def test_a_restore_names_the_commands_for_the_other_nodes(cli: Cli, place: Path, tmp_path: Path) -> None:
    made = cli.json("backup", "--to", str(place))
    (tmp_path / "secret").write_text("a secret of the tests")
    config = tmp_path / "node.toml"
    config.write_text(
        f'data = "{tmp_path / "new"}"\nnode = "m2"\nsecret_file = "{tmp_path / "secret"}"\n'
        'founders = ["m1", "m2"]\n[peers]\nm1 = "10.0.0.1:5122"\n'
    )

    said = cli.ok("restore", "--from", str(place), "--config", str(config))

    assert f"Restore m1 as well, each on its own machine, with --backup {made['id']};" in said


def test_an_impossible_restore_is_refused_with_the_reason(
    cli: Cli, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "environ", {**cli.environ, "HOLDFAST_DATA": str(tmp_path / "full")})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    nothing = cli.run("restore", "--from", str(place))
    assert nothing.exit_code == 1 and "there is no backup" in nothing.stderr

    cli.ok("backup", "--to", str(place))
    full = cli.run("restore", "--from", str(place))
    assert full.exit_code == 1 and "not empty (it holds thesis.txt)" in full.stderr and "Move it away" in full.stderr
