"""The guide works as written: its programs run, and its commands print the output on the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.guide import AGENTS, DOCS, PAGES, Broken, Node, Session, agrees, blocks, commands, matches

GREETER = """
```python
from holdfast.sdk import Context, Service

greeter = Service("greeter")


@greeter.handler
async def greet(ctx: Context, name: str) -> str:
    return f"Hello, {name}!"
```
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("node"))
    yield node
    node.close()


@pytest.mark.parametrize("page", [*sorted(PAGES.rglob("*.md")), AGENTS], ids=lambda page: str(page.relative_to(DOCS)))
def test_every_block_of_the_guide_works_as_described(page: Path, node: Node, tmp_path: Path) -> None:
    with Session(page, tmp_path, node) as session:
        session.run()


def test_every_block_of_getting_started_runs() -> None:
    skipped = [block.text for block in blocks((PAGES / "getting-started.md").read_text()) if block.not_run]

    assert all("make" in text or "kill" in text for text in skipped), "only what installs, and what needs two terminals"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        pytest.param("```python\n1 / 0\n```\n", "ZeroDivisionError", id="raises"),
        pytest.param("```python\nawait asyncio.sleep(0)\n```\n", "NameError", id="raises in a coroutine"),
        pytest.param("```python\nif:\n```\n", "SyntaxError", id="not Python"),
        pytest.param("<!-- not run: no Temporal here -->\n```python\nif:\n```\n", "SyntaxError", id="skipped"),
        pytest.param(GREETER, "no request in its comment calls it", id="not called"),
        pytest.param(f'<!-- POST /greeter/greet "Ann" -> "Bye" -->{GREETER}', "Hello, Ann!", id="another answer"),
        pytest.param(f"<!-- POST /greeter/leave -->{GREETER}", "the answer was 404", id="another status"),
        pytest.param("<!-- check: 1 > 2 -->\n```python\nx = 1\n```\n", "not true: 1 > 2", id="check"),
        pytest.param("<!-- please run it -->\n```python\nx = 1\n```\n", "the comment", id="unknown comment"),
        pytest.param("<!-- setup: nowhere -->\n```python\nx = 1\n```\n", "nowhere.py", id="unknown setup"),
        pytest.param("```console\n$ false\n```\n", "ended with code 1", id="command fails"),
        pytest.param("```console\n$ echo one\ntwo\n```\n", "and not", id="command prints something else"),
        pytest.param("```console\n$ false &\nready\n```\n", "and not", id="background ends"),
        pytest.param("```sh\nholdfast nonsense\n```\n", "No such command", id="wrong command"),
    ],
)
def test_a_page_with_a_broken_block_fails(page: str, message: str, node: Node, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(page)

    with Session(path, tmp_path, node) as session, pytest.raises(Broken, match=message):
        session.run()


def test_a_page_that_keeps_its_word_passes(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f'<!-- POST /greeter/greet "Ann" -> "Hello, Ann!" -->{GREETER}')

    with Session(path, tmp_path, node) as session:
        assert session.run() == 1


def test_three_dots_stand_for_anything() -> None:
    assert matches("a ... c", "a b\nb   c") and not matches("a ... c", "a b")
    assert agrees({"id": "...", "n": [1]}, {"id": "x", "n": [1], "more": 2}) and not agrees({"n": [1]}, {"n": [2]})


def test_a_console_block_is_commands_and_their_output() -> None:
    assert list(commands("$ curl a \\\n  -d b\nok\n$ ls\n")) == [("curl a \\\n  -d b", "ok"), ("ls", "")]
