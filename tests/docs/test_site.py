"""The site builds without a warning, loads nothing from elsewhere, and its reference pages are complete."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from docs import generate
from holdfast import sdk
from holdfast.cli.main import main as command_line
from holdfast.cluster.admin.openapi import openapi
from holdfast.cluster.config import Config

ROOT = Path(__file__).resolve().parents[2]
WIDTH_MAX = 100


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-d", str(target / "doctrees")]
    return subprocess.run([*command, str(source), str(target)], cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About ten seconds, because Sphinx reads and writes every page: only the whole site shows a broken link."""
    target = tmp_path_factory.mktemp("site")
    built = build(ROOT / "docs", target)
    assert built.returncode == 0, built.stderr
    return target


def test_every_link_and_anchor_of_the_docs_leads_somewhere(site: Path) -> None:
    assert (site / "index.html").exists() and (site / "guide" / "getting-started.html").exists()


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pattern = re.compile(
        r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*\"|@import|url\((?:https?:)?//"
    )
    files = [*site.rglob("*.html"), *site.rglob("*.css")]

    assert [found[0] for file in files for found in pattern.finditer(file.read_text())] == []


def test_a_broken_link_or_anchor_fails(tmp_path: Path) -> None:
    (tmp_path / "conf.py").write_text("extensions = ['myst_parser']\nmyst_heading_anchors = 4\nnitpicky = True\n")
    (tmp_path / "index.md").write_text("# A page\n\n[a](nowhere.md) [b](index.md#nobody) [c](#nothing)\n")

    built = build(tmp_path, tmp_path / "site")

    assert built.returncode != 0
    assert all(name in built.stderr for name in ("nowhere", "nobody", "nothing")), built.stderr


def test_the_reference_has_every_public_name_of_the_sdk() -> None:
    page = generate.sdk_page()

    assert [name for name in sdk.__all__ if f"\n### {name}\n" not in page] == []
    assert "object at 0x" not in page


def test_the_reference_has_every_setting_with_its_meaning() -> None:
    page = generate.settings_page()
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", page, re.MULTILINE))

    assert {*rows} == {each.name for each in fields(Config)} - {"secret"}
    assert [name for name, meaning in rows.items() if not meaning.strip()] == []


def test_the_reference_has_every_command_and_option() -> None:
    page = generate.cli_page()

    def walk(path: str, command: click.Command) -> None:
        assert re.search(rf"^#+ {path}$", page, re.MULTILINE), path
        for name, each in command.commands.items() if isinstance(command, click.Group) else ():
            walk(f"{path} {name}", each)

    walk("holdfast", command_line)
    assert "--handlers-port" in page and "\b" not in page


def test_the_reference_of_the_admin_api_has_the_fields_of_every_body() -> None:
    page = generate.admin_page(openapi())

    assert "The body of the request is [Registration](#body-registration)." in page
    assert "([Deployment](#body-deployment) or [ShownPreview](#body-shownpreview))" in page
    assert "`hello`: [Hello](#body-hello)" in page
    assert "| `limit` | query | rows of the page, 1 to 1000; 100 if not given |" in page
    assert "(body-invocationpage)=\n### InvocationPage" in page
    assert "| `invocations` | list of [InvocationRow](#body-invocationrow) |  |" in page
    assert "| `awakeable` (optional) | string | the id that completes it;" in page
    assert "| `outcome` | [Outcome](#body-outcome) or null | null: it has not completed |" in page


@pytest.mark.parametrize(
    ("read", "given", "expected"),
    [
        (
            generate.markdown,
            "Text::\n\nx = 1\n\ny = 2\n\nMore text.",
            "Text:\n\n```python\nx = 1\n\ny = 2\n```\n\nMore text.\n",
        ),
        (
            generate.markdown,
            "Text::\n\n    for x in y: ...\n\nMore.",
            "Text:\n\n```python\nfor x in y: ...\n```\n\nMore.\n",
        ),
        (generate.markdown, "One.\n\nTwo.", "One.\n\nTwo.\n"),
    ],
)
def test_docstrings_become_markdown(read: Callable[[str], Any], given: str, expected: str) -> None:
    assert "\n".join(read(given)) == expected


def prose() -> list[Path]:
    """Pages of the repository. The changelog has a line for each change."""
    reference = ROOT / "docs" / "reference"  # generated, not in the repository
    pages = {page for page in (ROOT / "docs").rglob("*.md") if reference not in page.parents}
    return sorted({*pages, *ROOT.glob("*.md")} - {ROOT / "CHANGELOG.md"})


@pytest.mark.parametrize("page", prose(), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_wrapped(page: Path) -> None:
    """Tables, code and addresses cannot be wrapped."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^<!--.*?-->$", "", text, flags=re.DOTALL | re.MULTILINE)
    long = [line for line in text.splitlines() if len(line) > WIDTH_MAX and " " in line and not line.startswith("|")]

    assert long == []


def test_the_architecture_fits_on_200_lines() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 200
