"""`holdfast dev` and `holdfast serve`: run a node until it receives a signal."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sys
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from holdfast import __version__
from holdfast.cli.client import Failed
from holdfast.cli.lifecycle import running, until_signalled
from holdfast.sdk.json_lines import JsonFormatter

if TYPE_CHECKING:
    from holdfast.cluster.config import Config


#: EX_CONFIG of sysexits.h: another start will not help. For RestartPreventExitStatus of systemd.
REMOVED_EXIT_CODE: Final = 78


class _Removed(Failed):
    exit_code = REMOVED_EXIT_CODE


@click.command()
@click.option("--app", metavar="MODULE:VARIABLE", help="Run these handlers too: a service, or a list of services.")
@click.option("--port", show_default="8080", type=click.IntRange(0, 65535), help="Port of the ingress.")
@click.option("--admin-port", show_default="9070", type=click.IntRange(0, 65535), help="Port of the admin API.")
@click.option(
    "--handlers-port",
    default=9080,
    show_default=True,
    type=click.IntRange(1, 65535),
    help="Port of the handlers of --app.",
)
@click.option("--host", show_default="127.0.0.1", help="Listen address of ingress and admin API.")
@click.option(
    "--data",
    show_default=".holdfast",
    type=click.Path(path_type=Path),
    help="Data directory, kept across restarts.",
)
@click.option(
    "--partitions", show_default="4", type=click.IntRange(1, 1024), help="Number of partitions of a new data directory."
)
@click.option("--reload/--no-reload", default=True, show_default=True, help="Restart the handlers when a file changes.")
@click.option("--verbose", "-v", is_flag=True, help="Show the node's log.")
def dev(
    app: str | None,
    port: int | None,
    admin_port: int | None,
    handlers_port: int,
    host: str | None,
    data: Path | None,
    partitions: int | None,
    reload: bool,
    verbose: bool,
) -> None:
    """Run one node for development and, with --app, your handlers.

    The node keeps its log and state in .holdfast/, so it continues after a restart. The handlers run in a process of
    their own: kill that process in the middle of an invocation, and watch the work continue at the right step. The
    ingress answers 503 until the handlers are registered.

    Every setting of a node can be given as a HOLDFAST_* variable, as for `serve`; the options here override them.

    \b
    holdfast dev --app examples.trips:app
    """
    from holdfast.cli.develop import develop
    from holdfast.cluster.config import BadConfig

    try:
        config = _dev_config(host=host, port=port, admin_port=admin_port, data=data, partitions=partitions)
    except BadConfig as error:
        raise Failed(str(error)) from None
    _refuse_open_doors(config)
    if verbose and config.log_level in ("warning", "error"):
        config = replace(config, log_level="info")
    _log(config)
    if app is not None and ":" not in app:
        raise click.BadParameter(f"{app!r} is not MODULE:VARIABLE, as in examples.trips:app", param_hint="--app")
    _run(develop(config, app=app, handlers_port=handlers_port, reload=reload), config)


def _dev_config(
    *, host: str | None, port: int | None, admin_port: int | None, data: Path | None, partitions: int | None
) -> Config:
    """Settings for development, overridden by HOLDFAST_* variables, and those by the given options."""
    from holdfast.cluster.config import DEV_PARTITIONS, BadConfig, HostPort, load

    defaults = {
        "node": "dev",
        "cluster": "dev",
        "peer": "127.0.0.1:0",
        "partitions": DEV_PARTITIONS,
        "log_level": "warning",
    }
    config = load(None, defaults=defaults)
    if config.peers or config.founders not in ((), (config.node,)):
        raise BadConfig(
            "HOLDFAST_PEERS, HOLDFAST_FOUNDERS: holdfast dev runs a single node: unset them, "
            "or run a node of a cluster with holdfast serve"
        )

    def place(of: HostPort, port: int | None) -> HostPort:
        return HostPort(of.host if host is None else host, of.port if port is None else port)

    return replace(
        config,
        ingress=place(config.ingress, port),
        admin=place(config.admin, admin_port),
        data=config.data if data is None else data,
        partitions=config.partitions if partitions is None else partitions,
    )


@click.command()
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file node.toml; HOLDFAST_* variables override it.",
)
def serve(file: Path | None) -> None:
    """Run one node of a cluster, as its configuration says.

    \b
    # node.toml
    node = "n1"
    data = "/var/lib/holdfast"
    ingress = "0.0.0.0:8080"
    admin = "127.0.0.1:9070"
    auth = "tokens"
    """
    from holdfast.cluster.config import BadConfig, load

    try:
        config = load(file)
    except BadConfig as error:
        raise Failed(str(error)) from None
    _refuse_open_doors(config)
    _log(config)
    os.umask(0o077)  # Files of a node are readable by its user only.
    _run(_serve(config), config)


def _refuse_open_doors(config: Config) -> None:
    """Refuse to open a node to other machines by the mere omission of a setting."""
    from holdfast.cluster.advice import find_open_doors

    if (reason := find_open_doors(config)) is not None:
        raise Failed(reason, "docs/security.md explains tokens; as a variable the setting is HOLDFAST_AUTH")


async def _serve(config: Config) -> None:
    """Run until a signal arrives, which may be during the start: SIGTERM right after the first answer must not kill the
    node."""
    told = asyncio.ensure_future(until_signalled())
    serving = asyncio.ensure_future(_serve_until_removed(config))
    try:
        await asyncio.wait({told, serving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()
        await asyncio.gather(told, return_exceptions=True)
    if not serving.done():
        serving.cancel()
        await asyncio.wait({serving})
    if not serving.cancelled():
        serving.result()


async def _serve_until_removed(config: Config) -> None:
    from holdfast.cluster.members.founding import NodeRemoved

    async with running(config) as node:
        click.echo(
            f"Holdfast {__version__}: node {config.node} of cluster {config.cluster}, data in {config.data}, "
            f"ingress {node.doors.urls.ingress}, admin {node.doors.urls.admin}"
        )
        await node.until_removed()
    raise NodeRemoved(config.node)


def _addresses(config: Config) -> str:
    """The addresses that a node listens on, for people."""
    found = {"ingress": config.ingress, "admin": config.admin, "peer": config.peer if config.peers else None}
    return ", ".join(f"{name} {at}" for name, at in {**found, "health": config.health}.items() if at is not None)


def _run(program: Coroutine[Any, Any, None], config: Config) -> None:
    """Run it on the fast loop, and report in one sentence why it cannot run."""
    from holdfast.cluster.config import BadConfig
    from holdfast.cluster.members.founding import NodeRemoved
    from holdfast.log.errors import StorageError
    from holdfast.sdk.loop import new_event_loop

    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(program)
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None
    except BadConfig as error:
        raise Failed(str(error), "holdfast config check explains the settings") from None
    except NodeRemoved as error:
        raise _Removed(str(error), error.advice) from None
    except StorageError as error:
        raise Failed(f"cannot use the data directory: {error}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Failed(
                f"a port is already in use: {error.strerror or error}",
                f"is another node running? This one needs {_addresses(config)}; "
                "choose others (dev: --port, --admin-port, --handlers-port)",
            ) from None
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Failed(
                f"the disk of {config.data} is full: a node cannot start there",
                "free some space and start the node again: nothing is lost",
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EROFS, errno.EADDRNOTAVAIL):
            raise Failed(f"{error.strerror}: {error.filename or error}") from None
        raise


def _log(config: Config) -> None:
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter(config.node) if config.log_format == "json" else text)
    # Libraries say nothing below warnings that an operator could use.
    logging.basicConfig(
        level=max(logging.getLevelNamesMapping()[config.log_level.upper()], logging.INFO), handlers=[handler]
    )
    logging.getLogger("holdfast").setLevel(config.log_level.upper())
