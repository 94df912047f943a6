"""What `holdfast dev` does besides running a node: it runs the handlers, and restarts them.

The handlers run in a process of their own. A changed file, a crash or a `kill -9` costs only that process: a new one is
started, and the node sends it the unfinished work. Registration is forced, because in development the code at one
address changes all the time; in production a deployment never changes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from holdfast import __version__
from holdfast.cli.client import Failed
from holdfast.cli.failures import Reporter
from holdfast.cli.lifecycle import running, until_signalled
from holdfast.cluster.errors import Circumstance, EndpointFailed
from holdfast.cluster.http.access import ROOT_FILE

if TYPE_CHECKING:
    from holdfast.cluster.config import Config
    from holdfast.cluster.node import Node
    from holdfast.statemachine.meta import Deployment

LOOK_S: Final = 0.4
RESTART_S: Final = 0.3
FILES_MAX: Final = 5000
STOP_S: Final = 5.0
_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"})
NOT_IMPORTED: Final = 3  # The exit code of `python -m holdfast.sdk` when the module is broken.


async def develop(config: Config, *, app: str | None, handlers_port: int, reload: bool) -> None:
    if app is not None:
        await _check_free(handlers_port)
    closed = f"the handlers of {app} are not registered yet: holdfast dev is starting them" if app is not None else ""
    async with running(config, closed=closed) as node:
        handlers = Handlers(node, app, handlers_port, reload=reload) if app is not None else None
        _greet(node, handlers)
        node.observe(Reporter())
        tasks = [asyncio.create_task(until_signalled())]
        if handlers is not None:
            tasks.append(asyncio.create_task(handlers.run()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            click.echo("\nStopping. Accepted invocations are in the log and continue at the next start.")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _check_free(port: int) -> None:
    """Checked before anything is started: the handlers' own error would come from another process."""
    try:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", port, reuse_address=True)
    except OSError:
        raise Failed(
            f"port {port}, where the handlers should listen, is in use",
            "stop the process that listens there, or use --handlers-port",
        ) from None
    server.close()
    await server.wait_closed()


def _greet(node: Node, handlers: Handlers | None) -> None:
    click.echo(f"Holdfast {__version__}: one node, data in {node.config.data}/\n")
    click.echo(f"  ingress    {node.doors.urls.ingress}   requests to your services")
    click.echo(f"  admin      {node.doors.urls.admin}   also: holdfast invocations list")
    if handlers is None:
        click.echo("\nRegister your handlers:  holdfast deployments register http://127.0.0.1:9080")
        click.echo("or run them here:        holdfast dev --app examples.trips:app")
    else:
        again = ", again when a file changes" if handlers.reload else ""
        click.echo(f"  handlers   {handlers.uri}   {handlers.app}{again}")
    click.echo("\nCtrl-C stops it.")


class Handlers:
    """The process that runs the user's module."""

    def __init__(self, node: Node, app: str, port: int, *, reload: bool) -> None:
        self.node = node
        self.app = app
        self.port = port
        self.reload = reload
        self.uri = f"http://127.0.0.1:{port}"
        self._greeted = False
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Keep the process running, until this task is cancelled."""
        # The child ends when this pipe closes, however this process ends.
        reading, writing = os.pipe()
        try:
            while True:
                seen = await asyncio.to_thread(snapshot, Path.cwd())
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "holdfast.sdk", self.app, "--port", str(self.port), "--lifeline", str(reading),
                    pass_fds=(reading,), env={**os.environ, "PYTHONPATH": _python_path()}, start_new_session=True,
                )  # fmt: skip
                self._process = process
                ended = asyncio.create_task(process.wait())
                changed = asyncio.create_task(self._change(seen))
                registered = asyncio.create_task(self._register(process))
                try:
                    await asyncio.wait({ended, changed}, return_when=asyncio.FIRST_COMPLETED)
                    if ended.done():
                        await self._after_end(process, changed)
                    else:
                        click.echo(f"\n{changed.result()} changed: starting the handlers again.")
                finally:
                    for task in (changed, registered, ended):
                        task.cancel()
                    await asyncio.gather(changed, registered, ended, return_exceptions=True)
                    await self._stop(process)
        finally:
            os.close(writing)
            os.close(reading)

    async def _after_end(self, process: asyncio.subprocess.Process, changed: asyncio.Task[str]) -> None:
        code = process.returncode or 0
        if code == NOT_IMPORTED:
            if not self.reload:
                raise Failed(f"{self.app} cannot run (see above)")
            click.echo("Waiting for one of its files to change.")
            self._still_closed(f"{self.app} cannot run: the output of holdfast dev says why")
            await changed
            return
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        click.echo(f"\nThe handlers' process {process.pid} ended {how}: starting it again.")
        await asyncio.sleep(RESTART_S)

    async def _change(self, seen: dict[str, int]) -> str:
        """Wait for a changed file, and return it."""
        if not self.reload:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(LOOK_S)
            now = await asyncio.to_thread(snapshot, Path.cwd())
            if now != seen:
                return next(iter(sorted(set(now.items()) ^ set(seen.items()))))[0]

    async def _register(self, process: asyncio.subprocess.Process) -> None:
        """Register the handlers as soon as they answer."""
        while True:
            try:
                registered = await self.node.ground.registry.register(self.uri, force=True, metadata={"app": self.app})
                break
            except EndpointFailed:
                await asyncio.sleep(0.1)  # The process is still starting. If it ends instead, `run` notices.
            except Circumstance as error:
                click.echo(f"{self.app} cannot be registered: {error.message}", err=True)
                self._still_closed(f"{self.app} cannot be registered: {error.message}")
                if error.hint:
                    click.echo(error.hint, err=True)
                return
        self.node.closed = ""
        deployment = registered.deployment
        names = ", ".join(f"{service.name} ({service.kind})" for service in deployment.services)
        click.echo(f"\nProcess {process.pid} serves {names}.")
        if not self._greeted:
            self._greeted = True
            click.echo(f"Try:  {example(self.node.doors.urls.ingress, deployment, _credentials(self.node.config))}")

    def _still_closed(self, reason: str) -> None:
        """Why the ingress is closed until the handlers are registered. Handlers registered earlier answer once they run
        again."""
        if self.node.closed:
            self.node.closed = reason

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()


def _python_path() -> str:
    """Find the module from the directory in which the command was started."""
    known = os.environ.get("PYTHONPATH")
    return os.pathsep.join(part for part in (os.getcwd(), known) if part)


def snapshot(root: Path) -> dict[str, int]:
    """Python files below a folder and their modification times. Bounded: a home directory is not a project."""
    found = {}
    for number, path in enumerate(_python_files(root)):
        if number >= FILES_MAX:
            break
        try:
            found[str(path.relative_to(root))] = path.stat().st_mtime_ns
        except OSError:
            continue
    return found


def _python_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
        for name in files:
            if name.endswith(".py"):
                yield Path(folder, name)


def _credentials(config: Config) -> str:
    """The options with which curl reaches the ingress of this node. The token itself stays out of the terminal."""
    options = ""
    if config.ingress_tls_cert is not None:
        options += f" --cacert {shlex.quote(str(config.ingress_tls_cert.resolve()))}"
    if config.auth == "tokens":
        file = config.admin_token_file or config.data / ROOT_FILE
        options += f' -H "Authorization: Bearer $(cat {shlex.quote(str(file.resolve()))})"'
    return options


def example(ingress_url: str, deployment: Deployment, options: str = "") -> str:
    """A command to try: the first public handler, with an input that fits its schema."""
    for service in deployment.services:
        for handler in service.handlers:
            if service.options.get("private") or handler.options.get("private"):
                continue
            key = "" if service.kind == "service" else "/my-key"
            schema = json.loads(handler.input_schema) if handler.input_schema is not None else None
            value = sample(schema, schema) if isinstance(schema, dict) else None
            data = f" -d {shlex.quote(json.dumps(value))}" if value is not None else " -X POST"
            return f"curl{options} {ingress_url}/{service.name}{key}/{handler.name}{data}"
    return f"curl{options} {ingress_url}/holdfast/health"


def sample(schema: Any, root: Any, depth: int = 0) -> Any:
    """A value that a JSON schema might accept; None if no input is needed."""
    if not isinstance(schema, dict) or depth > 8:
        return "..."
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part, {}) if isinstance(target, dict) else {}
        return sample(target, root, depth + 1)
    for key in ("examples", "enum"):
        if isinstance(schema.get(key), list) and schema[key]:
            return schema[key][0]
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return sample(schema[key][0], root, depth + 1)
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "object":
            properties = schema.get("properties", {})
            names = schema.get("required") or list(properties)
            return {name: sample(properties.get(name), root, depth + 1) for name in names}
        case "array":
            return [sample(schema["items"], root, depth + 1)] if "items" in schema else []
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return True
        case "null":
            return None
        case "string":
            return "..."
        case _:
            return {} if depth == 0 else "..."
