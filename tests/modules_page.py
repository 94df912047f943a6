"""docs/modules.md: one line per module, from the first sentence of its docstring.

`python -m tests.modules_page` writes it; tests/test_structure.py reports when it is stale.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Final

from tests.structure import files_of

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "modules.md"
ROOMS: Final = ("sdk", "statemachine", "log", "snapshots", "cluster", "cli", "console", "ext", "chaos")
HEAD: Final = """\
# Modules

Which file to open, room by room. [ARCHITECTURE.md](../ARCHITECTURE.md) says what each room
promises. This page is generated from the first sentence of each module's docstring: `make modules`.
"""
WIDTH: Final = 100


def first_sentence(path: Path) -> str:
    paragraph = docstrings(path.relative_to(ROOT).parts[0])[path.relative_to(ROOT).as_posix()].split("\n\n")[0]
    text = " ".join(paragraph.split())
    return re.split(r"(?<=[.?!]) (?=[A-Z`])", text, maxsplit=1)[0]


@cache
def docstrings(room: str) -> dict[str, str]:
    return {module.path: ast.get_docstring(module.tree) or "" for module in files_of(room)}


def wrapped(text: str, indent: str = "") -> str:
    return fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def rows(folder: Path) -> Iterator[str]:
    """The modules of a folder, then the packages below it, each under its own heading."""
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield wrapped(f"- `{path.name}`: {first_sentence(path)}", indent="  ")
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        about = wrapped(first_sentence(package / "__init__.py"))
        yield f"\n### {package.relative_to(ROOT).as_posix()}/\n\n{about}\n"
        yield from rows(package)


def page() -> str:
    parts = [HEAD]
    for room in ROOMS:
        about = wrapped(first_sentence(ROOT / room / "__init__.py"))
        parts.append(f"\n## {room}/\n\n{about}\n")
        parts += [*rows(ROOT / room)]
    return "\n".join(parts).replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
