"""`holdfast deployments ...` and `holdfast services ...`."""

from __future__ import annotations

import json
from typing import Any

import click

from holdfast.cli import client, complete
from holdfast.cli.client import Failed
from holdfast.cli.output import admin_option, age, counted, fields, json_option, print_json, table
from holdfast.cli.waits import Look, wait_options, wait_until
from holdfast.cluster.origins import NO_CREDENTIALS


@click.group()
def deployments() -> None:
    """Register and show deployments: the endpoints that run your handlers."""


@deployments.command()
@click.argument("uri")
@click.option("--force", is_flag=True, help="Register even if it breaks callers or changes a deployment in place.")
@click.option(
    "--metadata",
    "-m",
    multiple=True,
    metavar="NAME=VALUE",
    help="Metadata to keep with the deployment; may be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would change. Exit code 1: it would be refused.")
@admin_option
@json_option
def register(uri: str, force: bool, metadata: tuple[str, ...], dry_run: bool, admin_url: str, as_json: bool) -> None:
    """Register the endpoint at URI: the node asks it which services it offers.

    A deployment never changes, so that a suspended invocation continues with the code that it began with: run new code
    at a new address and register that. New invocations go to the newest deployment.

    \b
    holdfast deployments register http://127.0.0.1:9080
    """
    client.refuse_credentials(uri, NO_CREDENTIALS)
    pairs = dict(_pair(item) for item in metadata)
    body = {"uri": uri, "force": force, "metadata": pairs, **({"dry_run": True} if dry_run else {})}
    answer = client.ask(
        admin_url, "POST", "/deployments", body=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        client.checked(answer)
    except Failed as error:
        raise _with_flag(error) from None
    shown = answer.json()
    refused = dry_run and bool(shown["breaks"]) and not force
    if as_json:
        print_json(shown)
    elif dry_run:
        _print_preview(shown)
    else:
        _print_registered(shown, created=answer.status == 201)
    if refused:
        raise click.exceptions.Exit(1)


def _print_preview(shown: dict[str, Any]) -> None:
    if not shown["created"] and not shown["changes"] and not shown["breaks"]:
        click.echo(f"{shown['id']} is registered with this manifest already: nothing would change.")
        return
    what = "A new deployment" if shown["created"] else f"{shown['id']}, overwritten in place,"
    click.echo(client.printable(f"{what} would change:" if shown["changes"] else f"{what} would change nothing."))
    for line in shown["changes"]:
        click.echo(client.printable(f"  {line}"))
    if shown["breaks"]:
        click.echo("It would be refused without --force:")
        for line in shown["breaks"]:
            click.echo(client.printable(f"  {line}"))
    click.echo("Nothing was registered.")


def _print_registered(shown: dict[str, Any], *, created: bool) -> None:
    done = "Registered" if created else "Unchanged:"
    click.echo(f"{done} {shown['id']} at {shown['uri']}")
    _print_services(shown)


def _with_flag(error: Failed) -> Failed:
    """The node's hint names the parameter of the API; a user of the terminal needs the option."""
    hint = error.hint.replace("force=true", "--force") if error.hint else None
    return Failed(error.message, hint, error.details)


def _pair(item: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{item!r} is not NAME=VALUE", param_hint="--metadata")
    return name, value


def _print_services(deployment: dict[str, Any]) -> None:
    table(
        ("SERVICE", "KIND", "REVISION", "HANDLERS"),
        (
            (
                service["name"],
                service["kind"],
                f"{service['revision']}{'' if service['current'] else ' (superseded)'}",
                ", ".join(handler["name"] for handler in service["handlers"]),
            )
            for service in deployment["services"]
        ),
        empty="It offers no services.",
    )


@deployments.command("list")
@admin_option
@json_option
def list_deployments(admin_url: str, as_json: bool) -> None:
    """List deployments, newest first, with the invocations in flight on each."""
    shown = client.admin(admin_url, "GET", "/deployments")
    if as_json:
        print_json(shown)
        return
    table(
        ("ID", "URI", "HEALTH", "SERVICES", "IN FLIGHT", "AGE"),
        (
            (
                each["id"],
                each["uri"],
                health_of(each),
                ", ".join(f"{service['name']}{'' if service['current'] else '*'}" for service in each["services"]),
                each["in_flight"],
                age(each["created_at"]),
            )
            for each in shown["deployments"]
        ),
        empty="No deployments. Register one: holdfast deployments register http://127.0.0.1:9080",
    )
    if any(not service["current"] for each in shown["deployments"] for service in each["services"]):
        click.echo("* a newer deployment offers it")


def health_of(deployment: dict[str, Any]) -> str | None:
    """`ok`, or why the deployment is down or does not respond and for how long, or why attempts are held back; `idle` if no
    node has had anything for it yet."""
    health = deployment.get("health")  # Older nodes do not report it.
    if health is not None and health["status"] == "idle":
        return "idle"
    if health is None:
        return None
    down = [each for each in health["nodes"] if each["down_since"]]
    if not down:
        stalled = [each for each in health["nodes"] if each.get("stalled_since")]
        if stalled:
            return f"stalled for {age(stalled[0]['stalled_since'])}: {stalled[0]['stall']}"
        held = next((each["restraint"] for each in health["nodes"] if each["restraint"]), "")
        return f"crashing: {held}" if health["status"] == "crashing" else "ok"
    nodes = ", ".join(each["node"] for each in down)
    return f"down for {age(down[0]['down_since'])} ({nodes}): {down[0]['error']}"


@deployments.command()
@click.argument("id_", metavar="ID", shell_complete=complete.deployments)
@admin_option
@json_option
def describe(id_: str, admin_url: str, as_json: bool) -> None:
    """Show one deployment with its services and handlers."""
    shown = client.admin(admin_url, "GET", client.path("deployments", id_))
    if as_json:
        print_json(shown)
        return
    fields(
        (
            ("id", shown["id"]),
            ("uri", shown["uri"]),
            ("health", health_of(shown)),
            ("in flight", shown["in_flight"]),
            ("reached by", ", ".join(shown["modes"])),
            ("sdk", shown["sdk"]),
            ("created", shown["created_at"]),
            *((f"  {name}", value) for name, value in shown["metadata"].items()),
        )
    )
    _print_services(shown)


@deployments.command()
@click.argument("id_", metavar="ID", shell_complete=complete.deployments)
@click.option(
    "--force",
    is_flag=True,
    help="Remove it even if invocations run on it. They pause until they are resumed on another deployment.",
)
@wait_options("no invocations run on it, and then remove it", leaves="it registered")
@admin_option
@json_option
def remove(id_: str, force: bool, wait: bool, timeout: float | None, admin_url: str, as_json: bool) -> None:
    """Remove a drained deployment: no invocations run on it, and newer deployments offer its services.

    \b
    holdfast deployments remove dp_0c86ac4a7ac7dd14 --wait --timeout 1h
    """
    if wait and force:
        raise click.UsageError("--force does not wait for invocations: leave out --wait")
    if wait:
        _check_superseded(id_, admin_url)
        work = f"waiting for {id_} to drain"
        wait_until(lambda: _drained(id_, admin_url), work=work, timeout_s=timeout, goes_on=f"{id_} is not removed")
    parameters = {"force": "true"} if force else None
    try:
        shown = client.admin(admin_url, "DELETE", client.path("deployments", id_), parameters=parameters)
    except Failed as error:
        raise _with_flag(error) from None
    print_json(shown) if as_json else click.echo(f"Removed {id_}")


def _check_superseded(id_: str, admin_url: str) -> None:
    """What receives new invocations never drains."""
    shown = client.admin(admin_url, "GET", client.path("deployments", id_))
    if current := [each["name"] for each in shown["services"] if each["current"]]:
        raise Failed(
            f"new invocations of {', '.join(current)} go to {id_}, so it does not drain",
            "register a newer deployment that offers the same services first",
        )


def _drained(id_: str, admin_url: str) -> Look:
    running = client.admin(admin_url, "GET", client.path("deployments", id_))["in_flight"]
    return Look(not running, f"{counted(running, 'invocation')} on it")


@click.group()
def services() -> None:
    """Show services and their handlers."""


@services.command("list")
@admin_option
@json_option
def list_services(admin_url: str, as_json: bool) -> None:
    """List services as their newest deployment offers them."""
    shown = client.admin(admin_url, "GET", "/services")
    if as_json:
        print_json(shown)
        return
    table(
        ("NAME", "KIND", "HANDLERS", "ACTIVE", "REVISION", "DEPLOYMENT"),
        (
            (
                each["name"],
                each["kind"] + (" (private)" if each["private"] else ""),
                ", ".join(each["handlers"]),
                sum(count for status, count in each["invocations"].items() if status != "completed"),
                each["revision"],
                each["deployment"],
            )
            for each in shown["services"]
        ),
        empty="No services. Register a deployment: holdfast deployments register http://127.0.0.1:9080",
    )


@services.command("describe")
@click.argument("name", shell_complete=complete.services)
@admin_option
@json_option
def describe_service(name: str, admin_url: str, as_json: bool) -> None:
    """Show one service with its handlers and revisions."""
    shown = client.admin(admin_url, "GET", client.path("services", name))
    if as_json:
        print_json(shown)
        return
    fields(
        (
            ("name", shown["name"]),
            ("kind", shown["kind"]),
            ("doc", shown["doc"]),
            ("deployment", f"{shown['deployment']} at {shown['uri']}"),
            ("revision", shown["revision"]),
            ("now", ", ".join(f"{count} {status}" for status, count in shown["invocations"].items() if count)),
            ("options", shown["options"]),
        )
    )
    table(
        ("HANDLER", "MODE", "DOC", "INPUT"),
        (
            (each["name"], each["mode"], each["doc"], each["input"]["schema"] or each["input"]["content_type"])
            for each in shown["handlers"]
        ),
        empty="",
    )
