"""`holdfast pause` and `holdfast resume`: keep the cluster from starting anything of a key, a service, or at all."""

from __future__ import annotations

from typing import Any, Final

import click

from holdfast.cli import client, complete
from holdfast.cli.output import admin_option, age, json_option, print_json, table
from holdfast.cli.waits import Look, wait_options, wait_until

_RUNNING_MAX: Final = 100


@click.command()
@click.option("--all", "everything", is_flag=True, help="Pause everything.")
@click.option("--service", shell_complete=complete.services, help="Pause this service.")
@click.option("--key", help="Pause only this key of the service.")
@click.option("--reason", help="Why, for those who ask what is going on.")
@click.option("--stop", is_flag=True, help="Also ask running attempts to suspend.")
@click.option("--list", "listed", is_flag=True, help="Show what is paused.")
@wait_options("every node obeys, and with --stop until nothing of it runs")
@admin_option
@json_option
def pause(
    everything: bool,
    service: str | None,
    key: str | None,
    reason: str | None,
    stop: bool,
    listed: bool,
    wait: bool,
    timeout: float | None,
    admin_url: str,
    as_json: bool,
) -> None:
    """Start no attempts of a key, a service or everything, until `holdfast resume`.

    Requests are accepted and wait; nothing is lost. Attempts that run go on until they suspend or end.

    \b
    holdfast pause --service shop --reason "the payment provider is down"
    holdfast pause --all --stop --reason "incident 4711"
    """
    if listed:
        if everything or service is not None or key is not None or reason is not None or stop or wait:
            raise click.UsageError("--list takes no other options")
        _list(admin_url, as_json)
        return
    scope = _scope(everything, service, key)
    if reason is None:
        raise click.UsageError(
            '--reason is missing: it tells others why nothing starts, as in --reason "incident 4711"'
        )
    value = {**scope, "reason": reason, **({"stop": True} if stop else {})}
    shown = client.admin(admin_url, "POST", "/pauses", value=value)
    if wait:
        seen = dict(shown)
        work = f"pausing {_name(shown)}"
        wait_until(
            lambda: _obeyed(admin_url, value, seen), work=work, timeout_s=timeout, goes_on="the pause is in force"
        )
        shown = seen
    if as_json:
        print_json(shown)
        return
    for node in shown.get("not_confirmed", ()):
        click.echo(f"{node} has not confirmed it yet: it obeys as soon as it reaches the others.", err=True)
    click.echo(
        f"Paused {_name(shown)}. Requests are accepted and wait. `holdfast resume` with the same options ends it."
    )


@click.command()
@click.option("--all", "everything", is_flag=True, help="End the pause of everything.")
@click.option("--service", shell_complete=complete.services, help="End the pause of this service.")
@click.option("--key", help="End the pause of this key of the service.")
@admin_option
@json_option
def resume(everything: bool, service: str | None, key: str | None, admin_url: str, as_json: bool) -> None:
    """End a pause. What waited starts at once, unless another pause covers it.

    A pause of everything, one of a service and one of a key are three: each is ended by itself.
    """
    done = client.admin(admin_url, "DELETE", "/pauses", value=_scope(everything, service, key))
    if as_json:
        print_json(done)
        return
    click.echo(f"Resumed {done['resumed']}.")
    left = _rows(done["still_paused"])
    if left:
        click.echo(
            f"Still paused: {', '.join(_name(each) for each in left[:10])}{' and more' if len(left) > 10 else ''}."
        )


def _scope(everything: bool, service: str | None, key: str | None) -> dict[str, str]:
    if everything == (service is not None):
        raise click.UsageError("say what: either --all, or --service NAME (and --key KEY for one key of it)")
    if everything and key is not None:
        raise click.UsageError("--key needs --service: keys belong to services")
    return {name: value for name, value in (("service", service), ("key", key)) if value is not None}


def _obeyed(admin_url: str, value: dict[str, Any], seen: dict[str, Any]) -> Look:
    """Whether every node has confirmed a pause, and with `stop` nothing of it runs. `seen` is kept current."""
    if seen.get("not_confirmed"):
        seen.update(
            client.admin(admin_url, "POST", "/pauses", value=value)
        )  # The same again, which asks the nodes again.
    if missing := seen.get("not_confirmed"):
        return Look(False, f"{', '.join(missing)} has not confirmed it")
    if not value.get("stop"):
        return Look(True)
    scope = {name: value.get(name) for name in ("service", "key")}
    parameters = {**scope, "status": "running", "limit": _RUNNING_MAX}
    running = len(client.admin(admin_url, "GET", "/invocations", parameters=parameters)["invocations"])
    more = " or more" if running == _RUNNING_MAX else ""
    return Look(not running, f"{running}{more} still running: a handler that never waits is not interrupted")


def _list(admin_url: str, as_json: bool) -> None:
    shown = client.admin(admin_url, "GET", "/pauses")
    if as_json:
        print_json(shown)
        return
    table(
        ("PAUSED", "BY", "FOR", "REASON"),
        ((_name(each), each["by"], age(each["since"]), each["reason"]) for each in _rows(shown)),
        empty="Nothing is paused.",
    )


def _rows(shown: Any) -> list[Any]:
    return [*([shown["all"]] if shown["all"] else []), *shown["services"], *shown["keys"]]


def _name(shown: Any) -> str:
    if shown["service"] is None:
        return "everything"
    return f"service {shown['service']}" if shown["key"] is None else f"key {shown['key']!r} of {shown['service']}"
