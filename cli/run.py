"""`holdfast dev` and `holdfast serve`: run a node until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast import __version__
from holdfast.cli.client import Failed

if TYPE_CHECKING:
    from holdfast.cluster.config import Config
    from holdfast.cluster.node import Node


@click.command()
@click.option("--app", metavar="MODULE:VARIABLE", help="Run these handlers too: a service, or a list of services.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65535), help="Of the ingress.")
@click.option("--admin-port", default=9070, show_default=True, type=click.IntRange(0, 65535), help="Of the admin API.")
@click.option("--handlers-port", default=9080, show_default=True, type=click.IntRange(1, 65535), help="Of --app.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where both listen.")
@click.option(
    "--data", default=".holdfast", show_default=True, type=click.Path(path_type=Path), help="Kept over restarts."
)
@click.option("--partitions", default=4, show_default=True, type=click.IntRange(1, 1024), help="Counts for new data.")
@click.option("--reload/--no-reload", default=True, show_default=True, help="Restart the handlers when a file changes.")
@click.option("--verbose", "-v", is_flag=True, help="Show the node's log.")
def dev(
    app: str | None,
    port: int,
    admin_port: int,
    handlers_port: int,
    host: str,
    data: Path,
    partitions: int,
    reload: bool,
    verbose: bool,
) -> None:
    """Run one node for development, with --app also your handlers.

    The node keeps its log and state in .holdfast/, so a restart goes on where it stopped. The handlers run in a process
    of their own beside it: kill that process in the middle of something, and see the work go on at the right step.

    \b
    holdfast dev --app examples.trips:app
    """
    from holdfast.cli.develop import develop
    from holdfast.cluster.config import Config, Endpoint

    config = Config(
        node="dev",
        cluster="dev",
        data=data,
        partitions=partitions,
        ingress=Endpoint(host, port),
        admin=Endpoint(host, admin_port),
        peer=Endpoint("127.0.0.1", 0),
    )
    _log(verbose)
    if app is not None and ":" not in app:
        raise click.BadParameter(f"{app!r} is not MODULE:VARIABLE, as in examples.trips:app", param_hint="--app")
    _run(develop(config, app=app, handlers_port=handlers_port, reload=reload), config)


@click.command()
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file node.toml; HOLDFAST_* variables win.",
)
def serve(file: Path | None) -> None:
    """Run one node of a cluster, as its configuration says.

    \b
    # node.toml
    node = "n1"
    data = "/var/lib/holdfast"
    ingress = "0.0.0.0:8080"
    admin = "127.0.0.1:9070"
    """
    from holdfast.cluster.config import BadConfig, load

    try:
        config = load(file)
    except BadConfig as error:
        raise Failed(str(error)) from None
    _log(verbose=True)
    _run(_serve(config), config)


async def _serve(config: Config) -> None:
    async with running(config) as node:
        click.echo(
            f"Holdfast {__version__}: node {config.node} of cluster {config.cluster}, data in {config.data}, "
            f"ingress {node.ingress_url}, admin {node.admin_url}"
        )
        await until_told()


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[Node]:
    """A started node, stopped at the end."""
    from holdfast.cluster.node import Node

    node = Node(config)
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


async def until_told() -> None:
    """Until SIGTERM or Ctrl-C."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    try:
        await told.wait()
    finally:
        # A second Ctrl-C ends the process at once: whatever is acknowledged is on disk anyway.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _run(program: Coroutine[Any, Any, None], config: Config) -> None:
    """Run it on the fast loop, and say in a sentence what keeps it from running."""
    from holdfast.cluster.config import BadConfig
    from holdfast.log.errors import StorageError
    from holdfast.sdk.loop import new_event_loop

    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(program)
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None
    except BadConfig as error:
        raise Failed(str(error), "holdfast config check explains the settings") from None
    except StorageError as error:
        raise Failed(f"the data directory cannot be used: {error}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Failed(
                f"a port is taken: {error.strerror or error}",
                f"is another node running? This one wants {config.ingress} and {config.admin}; "
                "choose others (dev: --port, --admin-port, --handlers-port)",
            ) from None
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Failed(
                f"the disk of {config.data} is full: a node cannot start there",
                "free space on it and start the node again: nothing is lost",
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EROFS, errno.EADDRNOTAVAIL):
            raise Failed(f"{error.strerror}: {error.filename or error}") from None
        raise


def _log(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        stream=sys.stderr,
    )
