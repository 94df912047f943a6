"""`holdfast token ...`: the tokens and roles of people and programs."""

from __future__ import annotations

from typing import Any

import click

from holdfast.cli import client, complete
from holdfast.cli.output import admin_option, age, json_option, print_json, table

ROLES = ("invoke", "read", "approve", "operate", "admin")


@click.group()
def token() -> None:
    """Create, list, rotate and revoke tokens.

    \b
    invoke    start invocations and fetch their results, for all services or some
    read      see everything, change nothing
    approve   decide about approvals and steps in doubt, and read
    operate   change invocations, deployments and nodes, and approve
    admin     everything, and tokens

    On the machine of a node, the node's own admin token makes the first one:

    \b
    holdfast --token-file DATA/admin-token token create ops --role admin
    """


@token.command()
@click.argument("name")
@click.option("--role", "roles", type=click.Choice(ROLES), multiple=True, required=True, help="May be repeated.")
@click.option(
    "--service",
    "services",
    multiple=True,
    shell_complete=complete.services,
    help="For the roles invoke and approve: allow only this service; may be repeated. Default: all.",
)
@click.option("--expires", metavar="DURATION", help="The token expires after this time: 12h, 90d. Default: never.")
@admin_option
@json_option
def create(
    name: str, roles: tuple[str, ...], services: tuple[str, ...], expires: str | None, admin_url: str, as_json: bool
) -> None:
    """Create a token for NAME, a person or a program, and print it. It is shown only now.

    \b
    umask 077   # --token-file refuses a file that others can read
    holdfast token create ada --role operate > ada.token
    """
    body = {"name": name, "roles": list(roles), "services": list(services)}
    if expires is not None:
        body["expires_in"] = expires
    _show_secret(client.admin(admin_url, "POST", "/tokens", value=body), as_json)


@token.command("list")
@admin_option
@json_option
def list_tokens(admin_url: str, as_json: bool) -> None:
    """List tokens, oldest first. Their secrets are not stored."""
    shown = client.admin(admin_url, "GET", "/tokens")
    if as_json:
        print_json(shown)
        return
    table(
        ("ID", "NAME", "ROLES", "SERVICES", "CREATED", "EXPIRES", "LAST USED"),
        (
            (
                each["id"],
                each["name"],
                ", ".join(each["roles"]),
                ", ".join(each["services"]) or "all",
                age(each["created_at"]),
                ("expired " if each["expired"] else "") + (each["expires_at"] or "never"),
                each["last_used_at"] or "never",
            )
            for each in shown["tokens"]
        ),
        empty="No tokens. Create one: holdfast token create NAME --role operate",
    )


@token.command()
@click.argument("id_", metavar="ID", shell_complete=complete.tokens)
@click.option(
    "--keep-old",
    metavar="DURATION",
    default="0s",
    show_default=True,
    help="How long the previous secret stays valid: 1h.",
)
@admin_option
@json_option
def rotate(id_: str, keep_old: str, admin_url: str, as_json: bool) -> None:
    """Give a token a new secret, and print it. It is shown only now."""
    _show_secret(
        client.admin(admin_url, "POST", client.path("tokens", id_, "rotate"), value={"keep_old": keep_old}), as_json
    )


@token.command()
@click.argument("id_", metavar="ID", shell_complete=complete.tokens)
@admin_option
@json_option
def revoke(id_: str, admin_url: str, as_json: bool) -> None:
    """Revoke a token. Every node refuses it within a second."""
    shown = client.admin(admin_url, "DELETE", client.path("tokens", id_))
    print_json(shown) if as_json else click.echo(f"Revoked {id_}")


def _show_secret(shown: dict[str, Any], as_json: bool) -> None:
    """Print only the token on standard output, so that a script can redirect it to a file."""
    if as_json:
        print_json(shown)
        return
    click.echo(shown["token"])
    click.echo(f"The token {shown['id']} is shown only now: keep it in a file that only its user can read.", err=True)
