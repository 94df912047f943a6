"""The files of the console: how they are served, and that they keep the rules of the policy that goes with them."""

from __future__ import annotations

import re
from pathlib import Path

import aiohttp
import pytest

from holdfast import console
from holdfast.cluster.admin.pages import INDEX, KEPT, TYPES, read_files, versioned
from holdfast.cluster.http.browsers import ADMIN_HEADERS
from tests.cluster.test_tokens import one

FOLDER = Path(console.__file__).parent
FILES = read_files(FOLDER)
VERSION, SERVED = versioned(FILES)
OURS = [name for name in FILES if not name.startswith("vendor/")]
JAVASCRIPT_BYTES_MAX = 250_000
LINE_MAX = 600  # as for Python


def text_of(name: str) -> str:
    return FILES[name].content.decode()


def target_of(name: str, reference: str) -> str:
    """The file that a file refers to, by its path in the folder."""
    if reference.startswith("/console/"):
        return reference.removeprefix("/console/")
    parts: list[str] = []
    for part in (*name.split("/")[:-1], *reference.split("/")):
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


REFERENCES = [
    *((INDEX, found) for found in re.findall(r'(?:src|href)="(/console/[^"]+)"', text_of(INDEX))),
    *(
        (name, found)
        for name in FILES
        if name.endswith(".js")
        for found in re.findall(r'(?:\bfrom|\bimport)\s*\(?\s*"([^"]+)"', text_of(name))
    ),
    *((name, found) for name in OURS for found in re.findall(r'"(/console/[^"]+)"', text_of(name)) if name != INDEX),
]


async def test_every_file_is_served_with_its_type_and_checked_again_each_time(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, _), aiohttp.ClientSession() as session:
        assert world.node.doors.admin is not None
        base = f"http://127.0.0.1:{world.node.doors.admin.port}"
        for name, file in SERVED.items():
            url = f"{base}/" if name == INDEX else f"{base}/console/{name}"

            async with session.get(url) as response:
                content = await response.read()
            async with session.get(url, headers={"If-None-Match": f'"other", W/{file.etag}'}) as again:
                rest = await again.read()

            assert (response.status, content) == (200, file.content), name
            assert response.headers["Content-Type"] == TYPES[Path(name).suffix]
            assert response.headers["Cache-Control"] == "no-cache" and response.headers["ETag"] == file.etag
            assert response.headers["Content-Security-Policy"] == ADMIN_HEADERS["Content-Security-Policy"]
            assert (again.status, rest) == (304, b"") and again.headers["ETag"] == file.etag


async def test_browsers_keep_files_whose_address_has_our_version_and_no_others(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, _), aiohttp.ClientSession() as session:
        assert world.node.doors.admin is not None
        base = f"http://127.0.0.1:{world.node.doors.admin.port}"
        async with session.get(f"{base}/") as response:
            first = await response.text()
        named = [each for each in re.findall(r'(?:src|href)="([^"]+)"', first) if each != "/session"]
        assert len(named) > 20 and all(each.startswith(f"/console/{VERSION}/") for each in named)
        for each in named:
            async with session.get(base + each) as response:
                assert (response.status, response.headers["Cache-Control"]) == (200, KEPT), each
            async with session.get(base + each.replace(VERSION, "0123456789abcdef")) as response:
                assert (response.status, response.headers["Cache-Control"]) == (200, "no-cache"), (
                    "a page of another release goes on working"
                )


def test_another_content_is_another_version() -> None:
    changed = {**FILES, "lib/api.js": FILES["lib/api.js"]._replace(etag='"other"')}

    assert versioned(changed)[0] != VERSION
    assert versioned(changed)[1][INDEX].etag != SERVED[INDEX].etag


@pytest.mark.parametrize(
    "path", ["nothing.js", "pages/nothing.js", "vendor/README.md", "vendor/LICENSE.preact", "__init__.py", "..%2fcli%2fmain.py",
             "pages/..%2f..%2fcli%2fmain.py", "vendor", "pages/", "a/b/c.js"]
)  # fmt: skip
async def test_nothing_else_of_the_folder_is_served(tmp_path: Path, path: str) -> None:
    async with one(tmp_path) as (world, _), aiohttp.ClientSession() as session:
        assert world.node.doors.admin is not None
        async with session.get(f"http://127.0.0.1:{world.node.doors.admin.port}/console/{path}") as response:
            assert response.status == 404, await response.text()


def test_every_file_that_is_referred_to_exists() -> None:
    assert len(REFERENCES) > 50
    assert [(name, each) for name, each in REFERENCES if target_of(name, each) not in FILES] == []


def test_every_file_is_used() -> None:
    used = {INDEX, *(target_of(name, each) for name, each in REFERENCES)}

    assert FILES.keys() - used == set()


def imported(module: str) -> set[str]:
    """The modules that it imports, and those that they import."""
    needed: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        for found in re.findall(r'\bfrom\s*"([^"]+)"', text_of(name)):
            if (target := target_of(name, found)) not in needed:
                needed.add(target)
                todo.append(target)
    return needed


def test_the_first_page_names_its_modules_so_that_they_load_at_once() -> None:
    """Otherwise each import of an import would wait for the one before."""
    preloaded = set(re.findall(r'modulepreload" href="/console/([^"]+)"', text_of(INDEX)))

    assert preloaded == imported("app.js")


def test_the_modules_of_a_page_are_named_so_that_they_load_with_the_first_ones() -> None:
    preloaded = set(re.findall(r'modulepreload" href="/console/([^"]+)"', text_of(INDEX)))
    parts = dict(re.findall(r'^    (\w+): "([^"]+)",$', text_of("start.js"), re.MULTILINE))
    pages = dict(re.findall(r'^  (\w+): \(\) => import\("./([^"]+)"\)', text_of("app.js"), re.MULTILINE))

    assert {name: {f"{part}.js" for part in text.split()} for name, text in parts.items()} == {
        name: (imported(page) | {page}) - preloaded for name, page in pages.items()
    }


def test_nothing_is_loaded_from_elsewhere() -> None:
    pattern = re.compile(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", re.IGNORECASE)
    examples = {"http://www.w3.org", "http://orders.internal", "https://alerts.internal"}  # a namespace, placeholders

    for name in OURS:
        assert {each for each in pattern.findall(text_of(name)) if each not in examples} == set(), name
    for name in FILES.keys() - set(OURS):
        assert not re.search(r"\b(?:fetch|import)\s*\(|\bXMLHttpRequest\b|@import|url\(", text_of(name)), name


def test_no_script_or_style_is_inline() -> None:
    """The policy forbids them: the browser would drop them without a word to the user."""
    page = text_of(INDEX)

    assert re.findall(r"<script(?![^>]*\bsrc=)[^>]*>|<style|\sstyle=|\son[a-z]+=", page) == []
    for name in OURS:
        if name.endswith(".js"):
            source = text_of(name)
            assert not re.search(r"\beval\(|new Function|\.innerHTML|insertAdjacentHTML|document\.write", source), name
            assert not re.search(r'style="|setAttribute\("style"|\sstyle=\$\{`', source), name


def test_all_javascript_together_is_small() -> None:
    assert sum(len(file.content) for name, file in FILES.items() if name.endswith(".js")) < JAVASCRIPT_BYTES_MAX


def test_each_of_our_files_fits_a_head() -> None:
    assert {name: count for name in OURS if (count := text_of(name).count("\n")) > LINE_MAX} == {}


def test_every_library_is_in_the_table_with_its_licence() -> None:
    table = (FOLDER / "vendor" / "README.md").read_text()

    for path in (FOLDER / "vendor").iterdir():
        if path.suffix in TYPES:
            row = next((line for line in table.splitlines() if line.startswith(f"| `{path.name}`")), None)
            assert row is not None, f"{path.name} is not in vendor/README.md"
            licence = re.search(r"`(LICENSE\.\w+)`", row)
            assert licence is not None and (FOLDER / "vendor" / licence[1]).read_text().strip()
