"""The `holdfast` command: the one place that knows the words an operator types.

A command here parses, calls a room below and prints. It decides nothing itself, so whatever the
terminal can do, a program can do too.
"""

import platform

import click
from rich.console import Console

from holdfast import __version__
from holdfast.cli.backup import backup, restore
from holdfast.cli.calls import call, send, state
from holdfast.cli.cluster import cluster
from holdfast.cli.config import config
from holdfast.cli.deployments import deployments, services
from holdfast.cli.invocations import invocations
from holdfast.cli.output import json_option, print_json
from holdfast.cli.run import dev, serve
from holdfast.cli.snapshots import snapshot


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="holdfast", message="%(prog)s %(version)s")
def main() -> None:
    """Holdfast, a durable orchestrator.

    \b
    holdfast dev --app examples.trips:app        a node and your handlers, for development
    holdfast call trips/book '{"to": "Lisbon"}'  call a handler
    holdfast invocations list                    what runs, and why something does not

    Every command that ends takes --json. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted;
    78 from `serve` if the cluster has removed the node, so that starting it again does not help.
    """


@main.command()
@json_option
def version(as_json: bool) -> None:
    """Print the version, and what it runs on: the first lines of a useful bug report."""
    if as_json:
        machine = {"system": platform.system(), "machine": platform.machine()}
        print_json({"holdfast": __version__, "python": platform.python_version(), **machine})
        return
    console = Console(highlight=False)
    console.print(f"holdfast {__version__}")
    console.print(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")


for command in (
    dev,
    serve,
    deployments,
    services,
    call,
    send,
    invocations,
    state,
    cluster,
    config,
    snapshot,
    backup,
    restore,
):
    main.add_command(command)
