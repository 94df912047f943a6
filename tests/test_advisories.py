"""An affected version in a lock file is found, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from tests.advisories import REQUIREMENTS, Pin, find_strays, find_vulnerable, read_advisories, read_pins

LOCK = """\
aiohttp=={aiohttp} \\
    --hash=sha256:00
urllib3==1.26.16 ; python_version < '3.8' \\
    --hash=sha256:00
idna==3.20
"""


def test_an_affected_version_in_a_lock_file_is_found(tmp_path: Path) -> None:
    lock = tmp_path / "image.txt"
    lock.write_text(LOCK.format(aiohttp="3.12.13"))

    found = find_vulnerable([lock], read_advisories())

    assert any(
        "image.txt: aiohttp 3.12.13 has CVE-2025-53643 (request smuggling through trailers)" in each for each in found
    )
    assert any("urllib3 1.26.16 has CVE-2023-43804" in each for each in found)
    assert all("make lock UPGRADE=" in each for each in found)
    assert not any("idna" in each for each in found)


@pytest.mark.parametrize(
    ("version", "affected"),
    [("2.0.5", True), ("2.0.6", False), ("1.26.16", True), ("1.26.17", False)],
)
def test_any_of_several_ranges_counts(version: str, affected: bool) -> None:
    [advisory] = [each for each in read_advisories() if each.id == "CVE-2023-43804"]

    assert advisory.concerns(Pin("urllib3", Version(version), "")) is affected
    assert not advisory.concerns(Pin("requests", Version(version), ""))


def test_what_is_locked_has_no_known_vulnerability() -> None:
    assert find_vulnerable(REQUIREMENTS.glob("*.txt"), read_advisories()) == []


def test_every_advisory_is_about_something_that_is_locked() -> None:
    locked = {pin.name for lock in REQUIREMENTS.glob("*.txt") for pin in read_pins(lock)}

    assert {each.package for each in read_advisories()} <= locked


def test_an_installed_version_other_than_the_locked_one_is_found(tmp_path: Path) -> None:
    lock = tmp_path / "dev.txt"
    lock.write_text("packaging==1.0\nnothing-of-this-name==1\nabsent==1 ; sys_platform == 'nowhere'\n")

    stray, missing = find_strays(lock)

    assert stray.startswith("packaging ") and "but dev.txt has 1.0" in stray
    assert missing.startswith("nothing-of-this-name 1 is in dev.txt and not installed")
