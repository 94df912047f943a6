"""No dependency has a known vulnerability, and the environment is what the lock file says. Works without a network.

`python -m tests.advisories`, as in `make check`, compares the lock files with requirements/advisories.toml, and the installed
packages with requirements/dev.txt. `make audit` asks the public databases for what is new.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from packaging.markers import Marker
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT: Final = Path(__file__).resolve().parent.parent
REQUIREMENTS: Final = ROOT / "requirements"
PIN: Final = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;\\]+)(?: *; *(?P<marker>[^\\]+?))? *\\?$")


class Pin(NamedTuple):
    name: str
    version: Version
    marker: str

    @property
    def is_for_us(self) -> bool:
        return not self.marker or Marker(self.marker).evaluate()


class Advisory(NamedTuple):
    id: str
    package: str
    affected: tuple[SpecifierSet, ...]
    summary: str

    def concerns(self, pin: Pin) -> bool:
        return pin.name == self.package and any(each.contains(pin.version, prereleases=True) for each in self.affected)


def read_pins(lock: Path) -> Iterator[Pin]:
    for line in lock.read_text().splitlines():
        if found := PIN.match(line):
            yield Pin(canonicalize_name(found["name"]), Version(found["version"]), found["marker"] or "")


def read_advisories(path: Path = REQUIREMENTS / "advisories.toml") -> list[Advisory]:
    """Raises KeyError, InvalidSpecifier."""
    return [
        Advisory(id_, canonicalize_name(package), tuple(map(SpecifierSet, entry["affected"])), entry["summary"])
        for package, entries in tomllib.loads(path.read_text()).items()
        for id_, entry in entries.items()
    ]


def find_vulnerable(locks: Iterable[Path], advisories: Iterable[Advisory]) -> list[str]:
    known = list(advisories)
    return [
        f"{lock.name}: {pin.name} {pin.version} has {advisory.id} ({advisory.summary}): run make lock UPGRADE={pin.name}"
        for lock in locks
        for pin in read_pins(lock)
        for advisory in known
        if advisory.concerns(pin)
    ]


def find_strays(lock: Path) -> list[str]:
    """Packages that are installed in another version than the lock file has."""
    found = []
    for pin in read_pins(lock):
        if not pin.is_for_us:
            continue
        try:
            installed = Version(metadata.version(pin.name))
        except metadata.PackageNotFoundError:
            found.append(f"{pin.name} {pin.version} is in {lock.name} and not installed: run make clean setup")
            continue
        if installed != pin.version:
            found.append(
                f"{pin.name} {installed} is installed, but {lock.name} has {pin.version}: run make clean setup"
            )
    return found


def main() -> int:
    locks = sorted(REQUIREMENTS.glob("*.txt"))
    faults = find_vulnerable(locks, read_advisories()) + find_strays(REQUIREMENTS / "dev.txt")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
