"""The `holdfast` command: all its subcommands and global options.

A command here parses its arguments, calls a room below and prints. It decides nothing itself, so a program can do
everything that the terminal can do.
"""

import platform
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from holdfast import __version__
from holdfast.cli import client, profiles
from holdfast.cli.approvals import approvals
from holdfast.cli.audit import audit
from holdfast.cli.backup import backup, restore
from holdfast.cli.calls import call, send
from holdfast.cli.cert import cert
from holdfast.cli.cluster import cluster
from holdfast.cli.completion import completion
from holdfast.cli.config import config
from holdfast.cli.deployments import deployments, services
from holdfast.cli.events import events
from holdfast.cli.identity import identity
from holdfast.cli.invocations import invocations
from holdfast.cli.log_level import log_level
from holdfast.cli.logs import logs
from holdfast.cli.objects import state
from holdfast.cli.output import json_option, print_json, write_anything
from holdfast.cli.pauses import pause, resume
from holdfast.cli.run import dev, serve
from holdfast.cli.snapshots import snapshot
from holdfast.cli.sql import sql
from holdfast.cli.statistics import statistics
from holdfast.cli.tokens import token
from holdfast.cli.top import top
from holdfast.cli.waiting import waiting
from holdfast.cli.waits import INTERRUPTED_EXIT_CODE
from holdfast.cli.webhooks import webhooks


class _Commands(click.Group):
    def invoke(self, context: click.Context) -> Any:
        """Commands expect the answers of a node. Other JSON comes from a server that is not a node."""
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            click.echo(err=True)  # Behind the ^C of the terminal.
            raise click.exceptions.Exit(INTERRUPTED_EXIT_CODE) from None
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            url = client.answered()
            if url is None:
                raise
            which = "ingress" if context.invoked_subcommand in ("call", "send") else "admin API"
            option = "--ingress-url" if which == "ingress" else "--admin-url"
            raise client.Failed(
                f"{url} is not the {which} of a Holdfast node: its answer has another form",
                f"check {option}; if it is one, use the command line of its release",
            ) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="holdfast", message="%(prog)s %(version)s")
@click.option(
    "--token-file",
    envvar="HOLDFAST_TOKEN_FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file with the token for the cluster. Alternatives: HOLDFAST_TOKEN_FILE, or the token itself in HOLDFAST_TOKEN.",
)
@click.option(
    "--profile",
    "name",
    envvar="HOLDFAST_PROFILE",
    shell_complete=profiles.complete_name,
    help="Addresses and token of a cluster: `holdfast profile`.",
)
@click.option(
    "--ca-file",
    envvar="HOLDFAST_CA_FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file with the authority that signed the nodes' certificates, for https:// addresses. Also HOLDFAST_CA_FILE.",
)
@click.option(
    "--client-cert-file",
    envvar="HOLDFAST_CLIENT_CERT_FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A certificate to show to an admin API that wants one. Also HOLDFAST_CLIENT_CERT_FILE.",
)
@click.option(
    "--client-key-file",
    envvar="HOLDFAST_CLIENT_KEY_FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Its private key, unless it is in the same file. Also HOLDFAST_CLIENT_KEY_FILE.",
)
@click.pass_context
def main(
    context: click.Context,
    token_file: Path | None,
    name: str | None,
    ca_file: Path | None,
    client_cert_file: Path | None,
    client_key_file: Path | None,
) -> None:
    """Holdfast, a durable orchestrator.

    \b
    holdfast dev --app examples.trips:app        a node and your handlers, for development
    holdfast call trips/book '{"to": "Lisbon"}'  call a handler
    holdfast invocations list                    what runs, and why something does not
    holdfast top                                 the cluster at a glance, kept current

    Every command that ends takes --json. Exit codes: 0 done, 1 failed, 2 wrong usage, 124 not done within
    --timeout, 130 interrupted; 78 from `serve` if the cluster has removed the node, so that starting it again does not help.
    """
    write_anything()
    client.use_token(token_file)
    client.use_certificates(ca_file, client_cert_file, client_key_file)
    if context.invoked_subcommand not in _WITHOUT_PROFILE:
        _use_profile(context, name)


#: Commands that ask no node, or change the profiles: a file that cannot be used must not stop them.
_WITHOUT_PROFILE: Final = frozenset({"profile", "version", "config", "cert", "dev", "serve", "completion"})


def _use_profile(context: click.Context, name: str | None) -> None:
    """Options and variables win over what the profile says, which wins over the defaults."""
    chosen = profiles.choose(name)
    if chosen is None:
        return
    values = {key: url for key, url in (("admin_url", chosen.admin_url), ("ingress_url", chosen.ingress_url)) if url}
    context.default_map = _everywhere(main, values)
    profiles.offer(chosen)


def _everywhere(group: click.Group, values: dict[str, str]) -> dict[str, Any]:
    """These defaults for the options of every command below a group."""
    below = {
        name: _everywhere(command, values) if isinstance(command, click.Group) else values
        for name, command in group.commands.items()
    }
    return {**values, **below}


@main.command()
@json_option
def version(as_json: bool) -> None:
    """Print the versions of Holdfast and of its platform, for bug reports."""
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
    statistics,
    top,
    waiting,
    approvals,
    events,
    state,
    sql,
    cluster,
    config,
    snapshot,
    token,
    identity,
    pause,
    resume,
    log_level,
    logs,
    webhooks,
    profiles.profile,
    audit,
    cert,
    backup,
    restore,
    completion,
):
    main.add_command(command)
