"""A node in another thread, and commands that run against it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from click.testing import CliRunner, Result

from holdfast.cli.main import main
from tests.cluster.harness import PATIENCE_S, echo
from tests.cluster.serving import Serving, serving
from tests.cluster.test_three_nodes import Three, three

T = TypeVar("T")


class Cli:
    """Commands run in this thread, the node in another."""

    def __init__(self, at: Serving, loop: asyncio.AbstractEventLoop) -> None:
        self.at = at
        self.loop = loop
        self.environ = {
            "HOLDFAST_ADMIN_URL": at.node.doors.urls.admin,
            "HOLDFAST_INGRESS_URL": at.node.doors.urls.ingress,
        }

    def run(self, *arguments: str, input: str | None = None, token: str = "") -> Result:
        environ = {**self.environ, "HOLDFAST_TOKEN": token}
        return CliRunner().invoke(main, arguments, env=environ, input=input)

    def ok(self, *arguments: str, input: str | None = None, token: str = "") -> str:
        result = self.run(*arguments, input=input, token=token)
        assert result.exit_code == 0, result.output
        return result.stdout

    def json(self, *arguments: str, token: str = "") -> Any:
        return json.loads(self.ok(*arguments, "--json", token=token))

    def reaches(self, id_: str, status: str) -> None:
        asyncio.run_coroutine_threadsafe(self.at.reaches(id_, status), self.loop).result(PATIENCE_S)


@contextmanager
def in_thread(make: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[tuple[T, asyncio.AbstractEventLoop]]:
    """What an async context manager yields, in another thread, with the loop of that thread."""
    ready: list[tuple[T, asyncio.AbstractEventLoop]] = []
    started, over = threading.Event(), threading.Event()

    async def serve() -> None:
        try:
            async with make() as made:
                ready.append((made, asyncio.get_running_loop()))
                started.set()
                await asyncio.to_thread(over.wait)
        finally:
            started.set()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait()
    try:
        yield ready[0]
    finally:
        over.set()
        thread.join()


@contextmanager
def running(path: Path, **settings: Any) -> Iterator[Cli]:
    with in_thread(lambda: serving(path, **settings)) as (at, loop):
        yield Cli(at, loop)


@contextmanager
def three_nodes(path: Path) -> Iterator[tuple[Three, asyncio.AbstractEventLoop]]:
    with in_thread(lambda: three(path, {"echo/say": echo})) as made:
        yield made
