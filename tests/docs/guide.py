"""Runs the pages of docs/guide, and docs/agents.md: every Python block, every console block, in the order of the page.

A page is one session. Its Python blocks share a namespace, as if they were typed one after the other, and whatever
services they define are served to a node. A comment in front of a block says what the text does not show:

    <!-- setup: shop                            run tests/docs/setups/shop.py first
    POST /shop/buy {"item": "tea"} -> "paid"    after the block, make this request and compare the answer
    check: receipt.total == 5                   after the block, this expression is true
    not run: needs Docker                       the block is only parsed, for this reason
    -->

In expected answers and output, `...` stands for anything. A Python block that begins with `# name.py` is a file: it is
written to the folder in which the console blocks run. A console command that ends in ` &` stays in the background, and
the page goes on when it has printed what the page shows, or, if that is nothing, when it listens on port 9080. The ports
8080, 9070 and 9080 are those of this run.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from holdfast.sdk import Server, Service, VirtualObject, Workflow
from tests.ports import free_ports

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
PAGES: Final = DOCS / "guide"
AGENTS: Final = DOCS / "agents.md"
SETUPS: Final = Path(__file__).parent / "setups"
PATIENCE_S: Final = 60.0

_BLOCK: Final = re.compile(
    r"(?:^<!--(?P<comment>(?:(?!-->).)*)-->\n+)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_REQUEST: Final = re.compile(r"(?P<method>GET|POST) (?P<path>\S+)(?: (?P<body>.*?))?(?: -> (?P<expected>.*))?\Z")
_FILE: Final = re.compile(r"# (?P<name>\w+\.py)\n")
_ANYTHING: Final = "..."


class Broken(AssertionError):
    """A block of a page does not do what the page says."""


@dataclass
class Block:
    language: str
    text: str
    line: int
    setups: list[str] = field(default_factory=list)
    requests: list[re.Match[str]] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    not_run: str = ""


class Command(NamedTuple):
    text: str
    output: str


def blocks(page: str) -> Iterator[Block]:
    """The Python and console blocks of a page, with their comments."""
    for found in _BLOCK.finditer(page):
        if found["language"] not in ("python", "console", "sh"):
            continue
        line = page.count("\n", 0, found.start("text")) + 1
        block = Block(found["language"], found["text"], line)
        for instruction in (found["comment"] or "").strip().splitlines():
            word, _, rest = instruction.strip().partition(": ")
            match word:
                case "setup":
                    block.setups += rest.split()
                case "check":
                    block.checks.append(rest)
                case "not run" if rest:
                    block.not_run = rest
                case _:
                    request = _REQUEST.match(instruction.strip())
                    if request is None:
                        raise Broken(f"line {line}: the comment in front of this block says {instruction!r}")
                    block.requests.append(request)
        yield block


def commands(text: str) -> Iterator[Command]:
    """The commands of a console block, each with its output."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        length = next((number for number, line in enumerate(lines, 1) if not line.endswith("\\")), len(lines))
        yield Command("\n".join(lines[:length]), "\n".join(lines[length:]).strip())


def agrees(expected: Any, found: Any) -> bool:
    """Whether an answer matches the page. For objects, only the fields on the page count."""
    if expected == _ANYTHING:
        return True
    if isinstance(expected, dict) and isinstance(found, dict):
        return all(name in found and agrees(value, found[name]) for name, value in expected.items())
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(map(agrees, expected, found))
    if isinstance(expected, str) and isinstance(found, str):
        return matches(expected, found)
    return bool(expected == found)


def matches(expected: str, found: str) -> bool:
    """Text with `...` for any text. Lines count, the number of spaces between words does not."""
    pattern = r"[\s\S]*?".join(
        r"[ \t]+".join(map(re.escape, re.split(r"[ \t]+", part))) for part in expected.split(_ANYTHING)
    )
    found = "\n".join(line.rstrip() for line in found.strip().splitlines())
    return re.fullmatch(pattern, found) is not None


class Handlers:
    """Serves the services of all pages from a thread, so that blocks may block."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._servers: list[Server] = []

    def serve(self, services: list[Any]) -> str:
        server = Server(services, suspend_after=0.2)
        asyncio.run_coroutine_threadsafe(server.start(port=0), self._loop).result(PATIENCE_S)
        self._servers.append(server)
        return server.uri

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        await asyncio.gather(*(server.stop(grace=0.1) for server in self._servers))


class Node:
    """A node for all pages, run like `holdfast dev` does."""

    def __init__(self, folder: Path) -> None:
        self.ingress, self.admin = free_ports(2)
        with (folder / "node.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdfast", "dev", "--port", str(self.ingress), "--admin-port", str(self.admin),
                 "--data", str(folder / "data"), "--partitions", "2"],
                stdout=log, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        self.handlers = Handlers()
        self.wait()

    def wait(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert self._process.poll() is None, "the node ended"
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.ingress}/holdfast/health", timeout=5).close()
                return
            assert time.monotonic() < deadline, "the node does not answer"
            time.sleep(0.05)

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(PATIENCE_S)
        self.handlers.close()


class Session:
    """One page, from its first block to its last."""

    def __init__(self, page: Path, folder: Path, node: Node) -> None:
        self._page = page
        self._folder = folder
        self._ports = {"8080": node.ingress, "9070": node.admin, "9080": free_ports(1)[0]}
        self._module = ModuleType(f"guide_{page.stem.replace('-', '_')}")
        self._handlers = node.handlers
        self._runner = asyncio.Runner()
        self._background: list[subprocess.Popen[bytes]] = []
        self._served: frozenset[str] = frozenset()

    def __enter__(self) -> Session:
        sys.modules[self._module.__name__] = self._module  # Where type hints and dataclasses are looked up.
        return self

    def __exit__(self, *_: object) -> None:
        del sys.modules[self._module.__name__]
        self._runner.close()
        for process in self._background:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)

    def run(self) -> int:
        """The number of blocks that ran."""
        count = 0
        for block in blocks(self._page.read_text()):
            try:
                count += self._run(block)
            except Exception as error:
                raise Broken(f"{self._page.name}:{block.line}: {type(error).__name__}: {error}") from error
        return count

    def _run(self, block: Block) -> bool:
        if block.language == "python":
            ast.parse(block.text)
        if block.not_run:
            return False
        for name in block.setups:
            self._execute((SETUPS / f"{name}.py").read_text(), f"{name}.py")
        if block.language != "python":
            for command in commands(block.text) if block.language == "console" else [Command(block.text, "")]:
                self._type(command)
        elif file := _FILE.match(block.text):
            (self._folder / file["name"]).write_text(self._here(block.text))
        else:
            self._execute(block.text, f"{self._page.name}:{block.line}")
            self._serve(asked=bool(block.requests))
        for request in block.requests:
            self._ask(request)
        for check in block.checks:
            if not eval(check, self._module.__dict__):  # noqa: S307 - our own text
                raise Broken(f"not true: {check}")
        return True

    def _here(self, text: str) -> str:
        """The text with the ports of this run."""
        return re.sub(r"(?<=[:= ])(8080|9070|9080)\b", lambda found: str(self._ports[found[1]]), text)

    def _execute(self, text: str, name: str) -> None:
        code = compile(self._here(text), name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        if code.co_flags & inspect.CO_COROUTINE:
            self._runner.run(eval(code, self._module.__dict__))  # noqa: S307 - our own text
        else:
            exec(code, self._module.__dict__)  # noqa: S102 - our own text

    def _serve(self, *, asked: bool) -> None:
        kinds = (Service, VirtualObject, Workflow)
        services = {id(each): each for each in vars(self._module).values() if isinstance(each, kinds) and each.handlers}
        found = frozenset(f"{id(handler)}" for each in services.values() for handler in each.handlers.values())
        if found == self._served:
            return
        if not asked:
            raise Broken("this block defines a handler, and no request in its comment calls it")
        self._served = found
        registration = {"uri": self._handlers.serve(list(services.values())), "force": True}
        status, answer = self._request("POST", self._ports["9070"], "/deployments", json.dumps(registration))
        if status != 201:
            raise Broken(f"not registered: {status} {answer}")

    def _ask(self, request: re.Match[str]) -> None:
        status, answer = self._request(request["method"], self._ports["8080"], request["path"], request["body"] or "")
        wanted, body = _expected(request)
        if status != wanted or not agrees(body, answer):
            raise Broken(f"{request[0]}\n  the answer was {status} {answer!r}")

    def _request(self, method: str, port: int, path: str, body: str) -> tuple[int, Any]:
        data = body.encode() if method == "POST" else None
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                status, raw = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            return status, json.loads(raw) if raw else None
        except ValueError:
            return status, raw.decode()

    def _type(self, command: Command) -> None:
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOLDFAST_INGRESS_URL": f"http://127.0.0.1:{self._ports['8080']}",
            "HOLDFAST_ADMIN_URL": f"http://127.0.0.1:{self._ports['9070']}",
            "COLUMNS": "120",
        }
        text = self._here(command.text)
        if text.endswith(" &"):
            self._start(text.removesuffix(" &"), environment, command.output)
            return
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text], cwd=self._folder, env=environment, capture_output=True, text=True,
            timeout=PATIENCE_S,
        )  # fmt: skip
        if done.returncode:
            raise Broken(f"{text}\n  ended with code {done.returncode}\n{done.stdout}{done.stderr}")
        if command.output and not matches(self._here(command.output), done.stdout):
            raise Broken(f"{text}\n  printed\n{done.stdout}\n  and not\n{command.output}")

    def _start(self, text: str, environment: dict[str, str], output: str) -> None:
        """A background process, until it has printed the output on the page."""
        path = self._folder / f"background-{len(self._background)}.log"
        if text.startswith("holdfast dev"):
            ingress, admin, handlers = free_ports(3)
            self._ports = {"8080": ingress, "9070": admin, "9080": handlers}
            text += f" --port {ingress} --admin-port {admin} --handlers-port {handlers}"
        with path.open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {text}"], cwd=self._folder, env=environment, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self._background.append(process)
        deadline = time.monotonic() + PATIENCE_S
        while not (matches(f"{self._here(output)}...", path.read_text()) if output else self._handlers_listen()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise Broken(f"{text}\n  printed\n{path.read_text()}\n  and not\n{output}")
            time.sleep(0.05)

    def _handlers_listen(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._ports["9080"])) == 0


def _expected(request: re.Match[str]) -> tuple[int, Any]:
    """`-> 409 {...}`, `-> "Hello"`; without an expectation: 200 or 202, with any answer."""
    text = request["expected"]
    if text is None:
        return (202 if "/send" in request["path"] else 200), _ANYTHING
    status = re.match(r"(\d{3}) ", text)
    return (int(status[1]), json.loads(text[4:])) if status else (200, json.loads(text))
