"""The quick tests on every supported Python on this machine: `make test-pythons`.

Each Python gets an environment of its own (.venv-3.12, ...) with the packages of the lock file, kept for the next run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ("requirements/build.txt", "requirements/dev.txt")
CLASSIFIER = re.compile(r"Programming Language :: Python :: (3\.\d+)")


def supported() -> list[str]:
    """The versions that pyproject.toml names in its classifiers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [found[1] for line in project["classifiers"] if (found := CLASSIFIER.fullmatch(line))]


def interpreter(version: str) -> str | None:
    """An interpreter of this version that can create virtual environments: on PATH, or installed by pyenv."""
    candidates = [shutil.which(f"python{version}"), *map(str, of_pyenv(version))]
    probe = f"import sys, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
    for candidate in candidates:
        # pyenv puts shims for inactive versions on PATH, which fail.
        if candidate and subprocess.run([candidate, "-c", probe], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def of_pyenv(version: str) -> Iterator[Path]:
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True)


def environment(version: str, found: str) -> Path:
    """The Python of an environment with everything installed. Recreated if the lock files are newer."""
    folder = ROOT / f".venv-{version}"
    python, stamp = folder / "bin" / "python", folder / ".installed"
    made = stamp.stat().st_mtime if stamp.exists() else 0.0
    if all((ROOT / name).stat().st_mtime <= made for name in ("pyproject.toml", *LOCKS)):
        return python
    if not python.exists():
        subprocess.run([found, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation"]
    for lock in LOCKS:
        subprocess.run([*pip, "--require-hashes", "-r", lock], cwd=ROOT, check=True)
    subprocess.run([*pip, "--no-deps", "-e", "."], cwd=ROOT, check=True)
    stamp.touch()
    return python


def main() -> int:
    failed = []
    tried = 0
    for version in supported():
        found = interpreter(version)
        if found is None:
            print(f"==> Python {version}: skipped, it is not on this machine", flush=True)
            continue
        tried += 1
        print(f"==> Python {version}: quick tests", flush=True)
        ours = sys.version_info[:2] == tuple(map(int, version.split(".")))  # Runs in .venv, which has everything.
        python = Path(sys.executable) if ours else environment(version, found)
        if subprocess.call([str(python), "-m", "tests", "--quick"], cwd=ROOT):
            failed.append(version)
    if failed:
        print(f"==> failed on Python {', '.join(failed)}", flush=True)
    return 1 if failed or not tried else 0


if __name__ == "__main__":
    sys.exit(main())
