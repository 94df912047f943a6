"""`holdfast config check`: whether a node would start with these settings, and their effective values."""

from __future__ import annotations

from pathlib import Path

import click

from holdfast.cli.client import Failed
from holdfast.cli.output import fields, json_option, print_json


@click.group()
def config() -> None:
    """Settings of a node: node.toml and HOLDFAST_* variables."""


@config.command()
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file node.toml; HOLDFAST_* variables override it.",
)
@json_option
def check(file: Path | None, as_json: bool) -> None:
    """Check the settings as `serve` would read them, and print the result. Secrets are never printed.

    Notes name settings that are allowed but probably mistakes. The exit code is 1 if a node would not start.
    """
    from holdfast.cluster.advice import advise, find_faults
    from holdfast.cluster.config import BadConfig, describe, load
    from holdfast.cluster.http.access import find_token_faults

    try:
        settings = load(file)
    except BadConfig as error:
        raise Failed(str(error)) from None
    if faults := find_faults(settings) or find_token_faults(settings):
        raise Failed("a node cannot start with these settings on this machine", details=faults)
    advice = advise(settings)
    if as_json:
        print_json({"settings": describe(settings), "advice": advice})
        return
    fields(describe(settings).items())
    for line in advice:
        click.echo(f"{click.style('Note:', fg='yellow')} {line}", err=True)
