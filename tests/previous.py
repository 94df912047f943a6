"""The previous release, as a tree of files beside ours, for tests with both releases."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

#: The commit (or tag) of the last release. After each release, set it to that one and run
#: tests/cluster/test_rolling_upgrade.py; from then on changes of apply have the next level (statemachine/levels.py).
PREVIOUS = "5dd77f65ef6b3172ef2a83762353366643fdb21c"
#: The level that it supports.
PREVIOUS_LEVEL = 1


def previous_release(into: Path) -> Path:
    """Its directory, which can be the working directory of its processes. Skips without the history."""
    root = Path(__file__).resolve().parents[1]
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("this is not a git repository, so there is no earlier release to run beside this one")
    found = subprocess.run(["git", "archive", "--format=tar", PREVIOUS], cwd=root, capture_output=True, check=False)
    if found.returncode != 0:
        pytest.skip(f"the history does not reach back to {PREVIOUS} (a shallow clone?): {found.stderr.decode():.200}")
    tree = into / "previous"
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(tree, filter="tar")
    return tree
