"""`holdfast identity ...`: the keys by which handlers recognise requests of this cluster."""

from __future__ import annotations

from typing import Any

import click

from holdfast.cli import client
from holdfast.cli.output import admin_option, age, json_option, print_json


@click.group()
def identity() -> None:
    """Show and rotate the keys by which handlers recognise this cluster.

    The cluster signs its requests to handlers. An endpoint that is given the public key accepts requests of this cluster and of
    nobody else:

    \b
    export HOLDFAST_IDENTITY_KEYS=$(holdfast identity show)
    python -m holdfast.sdk shop:app
    """


@identity.command()
@admin_option
@json_option
def show(admin_url: str, as_json: bool) -> None:
    """Print the public keys, separated by commas: one, or two during a rotation."""
    shown = client.admin(admin_url, "GET", "/identity")
    if as_json:
        print_json(shown)
        return
    if not shown["keys"]:
        raise client.Failed(
            "the cluster has no key yet",
            "it makes one when every node runs this release: `holdfast cluster status` shows their versions",
        )
    click.echo(",".join(key["public_key"] for key in shown["keys"]))
    for key in shown["keys"]:
        click.echo(f"key {key['id']}, made {age(key['created_at'])} ago", err=True)
    if shown["rotating"]:
        click.echo("A rotation is under way: give all endpoints the new key, then `rotate --finish`.", err=True)


@identity.command()
@click.option("--finish", is_flag=True, help="Stop using the older key.")
@admin_option
@json_option
def rotate(finish: bool, admin_url: str, as_json: bool) -> None:
    """Make a new key, in two steps.

    The first makes a key that is used beside the present one: requests are signed with both, and endpoints
    may know either. Give all endpoints the new key. Then --finish ends the use of the older one.
    """
    shown: dict[str, Any] = client.admin(admin_url, "POST", "/identity/rotate", value={"finish": finish})
    if as_json:
        print_json(shown)
        return
    click.echo(shown["keys"][-1]["public_key"])
    if finish:
        click.echo("The older key is not used any more.", err=True)
    else:
        click.echo(
            "Both keys are used. Give all endpoints the new one, then run: holdfast identity rotate --finish", err=True
        )
