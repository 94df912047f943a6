"""`holdfast call`, `holdfast send` and `holdfast state ...`."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import click

from holdfast.cli import client, complete
from holdfast.cli.client import Failed, Response
from holdfast.cli.output import Function, admin_option, counted, fields, ingress_option, json_option, print_json

_TARGET_HELP = """\b
TARGET is service/handler, or service/key/handler for virtual objects and workflows.
BODY is the input, usually JSON; @file reads a file, - reads standard input."""


def request_options(command: Function) -> Function:
    for option in reversed(
        (
            click.argument("target", shell_complete=complete.handlers),
            click.argument("body", default=""),
            click.option("--key", help="The key, if it contains slashes; TARGET is then service/handler."),
            click.option(
                "--idempotency-key", help="Idempotency key: repeated requests with the same key are one invocation."
            ),
            click.option(
                "--header",
                "-H",
                "headers",
                multiple=True,
                metavar="NAME:VALUE",
                help="A header for the handler; may be repeated.",
            ),
        )
    ):
        command = option(command)
    return command


def _request(
    ingress_url: str,
    target: str,
    body: str,
    *,
    key: str | None,
    idempotency_key: str | None,
    headers: tuple[str, ...],
    send: bool = False,
    delay: str | None = None,
) -> Response:
    segments = target.strip("/").split("/")
    if key is not None:
        if len(segments) != 2:
            raise click.BadParameter("with --key, TARGET must be service/handler", param_hint="TARGET")
        segments.insert(1, key)
    if len(segments) not in (2, 3) or not all(segments):
        raise click.BadParameter(f"{target!r} is not service/handler or service/key/handler", param_hint="TARGET")
    sent = {"Content-Type": "application/json"}
    for header in headers:
        name, colon, value = header.partition(":")
        if not colon:
            raise click.BadParameter(f"{header!r} is not NAME:VALUE", param_hint="--header")
        sent[name.strip()] = value.strip()
    if idempotency_key is not None:
        sent["Idempotency-Key"] = idempotency_key
    where = client.path(*segments, *(("send",) if send else ()))
    return client.ask(
        ingress_url, "POST", where, parameters={"delay": delay}, body=_body(body), headers=sent, timeout_s=None
    )


def _body(text: str) -> bytes:
    if text == "-":
        return sys.stdin.buffer.read()
    if text.startswith("@"):
        try:
            return Path(text[1:]).read_bytes()
        except OSError as error:
            raise Failed(f"cannot read {text[1:]}: {error.strerror}") from None
    return text.encode()


@click.command(help=f"Call a handler, wait for its outcome and print it.\n\n{_TARGET_HELP}")
@request_options
@ingress_option
@json_option
def call(
    target: str,
    body: str,
    key: str | None,
    idempotency_key: str | None,
    headers: tuple[str, ...],
    ingress_url: str,
    as_json: bool,
) -> None:
    answer = _request(ingress_url, target, body, key=key, idempotency_key=idempotency_key, headers=headers)
    if as_json:
        kind = "outcome" if answer.status < 400 else "error"
        print_json({"id": answer.headers.get("x-holdfast-id"), kind: shown_body(answer.body)})
        sys.exit(0 if answer.status < 400 else 1)
    print_body(client.checked(answer).body)


def print_body(body: bytes) -> None:
    """With a final newline after text. Binary output is unchanged, unless a terminal would interpret it."""
    if sys.stdout.isatty():
        body = client.printable(body.decode(errors="replace")).encode()
    click.echo(body, nl=_is_text(body) and not body.endswith(b"\n"))


def _is_text(body: bytes) -> bool:
    try:
        return bool(body.decode())
    except UnicodeDecodeError:
        return False


def shown_body(body: bytes) -> Any:
    """JSON as JSON, text as text, anything else as {"base64": ...}."""
    try:
        return json.loads(body) if body else None
    except (ValueError, RecursionError):
        return body.decode() if _is_text(body) else {"base64": base64.b64encode(body).decode()}


@click.command(
    help=f"Send a request without waiting: once accepted, it runs independently of this command.\n\n{_TARGET_HELP}"
)
@request_options
@click.option("--delay", metavar="DURATION", help="Start the invocation after this delay: 10s, 1h30m, P1D.")
@ingress_option
@json_option
def send(
    target: str,
    body: str,
    key: str | None,
    idempotency_key: str | None,
    headers: tuple[str, ...],
    delay: str | None,
    ingress_url: str,
    as_json: bool,
) -> None:
    answer = client.checked(
        _request(
            ingress_url, target, body, key=key, idempotency_key=idempotency_key, headers=headers, send=True, delay=delay
        )
    ).json()
    if as_json:
        print_json(answer)
    elif answer["status"] == "Accepted":
        click.echo(answer["invocationId"])
    else:
        click.echo(f"{answer['invocationId']} (accepted before)")


@click.group()
def state() -> None:
    """Look at and edit the state of virtual objects and workflows."""


@state.command("get")
@click.argument("service", shell_complete=complete.services)
@click.argument("key")
@click.argument("name", required=False)
@admin_option
@json_option
def get_state(service: str, key: str, name: str | None, admin_url: str, as_json: bool) -> None:
    """Print the state of one KEY of a SERVICE, or one NAME of it."""
    shown = client.admin(admin_url, "GET", client.path("services", service, key, "state"))
    if name is not None:
        if name not in shown["state"]:
            raise Failed(f"{service}/{key} has no {name!r}", f"it has: {', '.join(shown['state']) or 'nothing'}")
        print_json(shown["state"][name])
    elif as_json:
        print_json(shown)
    elif not shown["state"]:
        click.echo(f"{service}/{key} has no state.")
    else:
        fields(shown["state"].items())
    if shown["held_by"] and not as_json:
        click.echo(
            f"{shown['held_by']} holds the key, and {counted(shown['waiting'], 'invocation')} waiting for it.", err=True
        )


@state.command("set")
@click.argument("service", shell_complete=complete.services)
@click.argument("key")
@click.argument("values", nargs=-1, metavar="[NAME=JSON]...")
@click.option("--remove", "-r", multiple=True, metavar="NAME", help="Remove this name; may be repeated.")
@click.option("--replace", is_flag=True, help="Remove all names that are not given.")
@admin_option
@json_option
def set_state(
    service: str,
    key: str,
    values: tuple[str, ...],
    remove: tuple[str, ...],
    replace: bool,
    admin_url: str,
    as_json: bool,
) -> None:
    """Edit the state of one KEY of a SERVICE while no handler holds the key.

    \b
    holdfast state set counter ann count=3 'tags=["a", "b"]'
    """
    changes: dict[str, Any] = {}
    for item in values:
        name, equals, text = item.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{item!r} is not NAME=JSON", param_hint="VALUES")
        try:
            changes[name] = json.loads(text)
        except ValueError:
            raise click.BadParameter(
                f"{text!r} is not JSON (a text needs quotes: {name}='\"{text}\"')", param_hint="VALUES"
            ) from None
    shown = client.admin(
        admin_url,
        "PUT",
        client.path("services", service, key, "state"),
        value={"values": changes, "remove": list(remove), "replace": replace},
    )
    print_json(shown) if as_json else fields(shown["state"].items())
