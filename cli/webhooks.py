"""`holdfast webhooks ...`: addresses that the cluster tells about failed, paused and completed invocations."""

from __future__ import annotations

from typing import Any

import click

from holdfast.cli import client, complete
from holdfast.cli.output import admin_option, age, json_option, print_json, table


@click.group()
def webhooks() -> None:
    """Create, list, test and delete webhooks.

    The cluster sends a signed request for each event, again and again until the receiver has taken it.
    """


@webhooks.command()
@click.argument("url")
@click.option(
    "--event",
    "events",
    multiple=True,
    required=True,
    type=click.Choice(["failed", "paused", "completed", "in-doubt", "approval-requested", "approval-reminder"]),
    help="An event to tell it about; repeat the option for several.",
)
@click.option(
    "--service",
    "services",
    multiple=True,
    shell_complete=complete.services,
    help="Only invocations of this service; may be repeated.",
)
@admin_option
@json_option
def create(url: str, events: tuple[str, ...], services: tuple[str, ...], admin_url: str, as_json: bool) -> None:
    """Tell URL about events. Prints the secret by which the receiver verifies them; it is not shown again."""
    value: dict[str, Any] = {"url": url, "events": list(events), "services": list(services)}
    made = client.admin(admin_url, "POST", "/webhooks", value=value)
    if as_json:
        print_json(made)
        return
    click.echo(made["secret"])
    click.echo(f"Created {made['id']}. Keep the secret: it is not shown again.", err=True)


@webhooks.command("list")
@admin_option
@json_option
def list_(admin_url: str, as_json: bool) -> None:
    """Show webhooks, what waits for them, and how their receivers answered."""
    shown = client.admin(admin_url, "GET", "/webhooks")
    if as_json:
        print_json(shown)
        return
    table(
        ("WEBHOOK", "URL", "EVENTS", "SERVICES", "WAITING", "DROPPED", "LAST SUCCESS", "NOTE"),
        (
            (
                hook["id"],
                hook["url"],
                ", ".join(hook["events"]),
                ", ".join(hook["services"]) or "all",
                hook["pending"],
                hook["dropped"],
                f"{age(hook['last_success_at'])} ago" if hook["last_success_at"] else "never",
                f"fails since {hook['failing_since']}: {hook['last_error']}" if hook["failing_since"] else "",
            )
            for hook in shown["webhooks"]
        ),
        empty="There are no webhooks.",
    )


@webhooks.command()
@click.argument("webhook", shell_complete=complete.webhooks)
@admin_option
@json_option
def delete(webhook: str, admin_url: str, as_json: bool) -> None:
    """Delete WEBHOOK, and the events that wait for it."""
    done = client.admin(admin_url, "DELETE", client.path("webhooks", webhook))
    if as_json:
        print_json(done)
        return
    click.echo(f"Deleted {done['id']}.")


@webhooks.command()
@click.argument("webhook", shell_complete=complete.webhooks)
@admin_option
@json_option
def test(webhook: str, admin_url: str, as_json: bool) -> None:
    """Send one test event to WEBHOOK now. Exit code 1 if the receiver does not take it."""
    sent = client.admin(admin_url, "POST", client.path("webhooks", webhook, "test"))
    if as_json:
        print_json(sent)
    if not sent["taken"]:
        raise client.Failed(f"{webhook} did not take the event: {sent['error']}")
    if not as_json:
        click.echo(f"{webhook} took the event ({sent['status']}).")
