"""How a command talks to a node: one request, one answer, and errors that say what to do.

Blocking and from the standard library, because a command that asks one question should start fast.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import click

ADMIN_URL: Final = "http://127.0.0.1:9070"
INGRESS_URL: Final = "http://127.0.0.1:8080"


class Failed(click.ClickException):
    """What went wrong, the details if there are any, and a hint. Exit code 1."""

    def __init__(self, message: str, hint: str | None = None, details: list[str] | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.details = details or []

    def show(self, file: Any = None) -> None:
        click.echo(f"{click.style('Error:', fg='red', bold=True)} {self.message}", err=True)
        for detail in self.details:
            click.echo(f"  - {detail}", err=True)
        if self.hint:
            click.echo(f"{click.style('Hint:', fg='yellow')} {self.hint}", err=True)


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            raise Failed(
                f"the answer (status {self.status}) is not JSON", "is there a Holdfast node at this address?"
            ) from None


def path(*segments: str) -> str:
    return "/" + "/".join(quote(segment, safe="") for segment in segments)


def ask(
    url: str,
    method: str,
    where: str,
    *,
    parameters: Mapping[str, Any] | None = None,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float | None = 60.0,
) -> Answer:
    """The answer, whatever its status. Raises Failed if there is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Failed(f"{url!r} is not the address of a node", "for example http://127.0.0.1:9070")
    given = {name: value for name, value in (parameters or {}).items() if value is not None}
    full = url.rstrip("/") + where + (f"?{urlencode(given)}" if given else "")
    request = urllib.request.Request(full, data=body, method=method, headers=dict(headers or {}))
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            return Answer(response.status, dict(response.headers), response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, dict(error.headers), error.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Failed(
            f"no node answers at {url}: {reason}",
            "is it running (holdfast dev)? Another address: --admin-url and --ingress-url, "
            "or HOLDFAST_ADMIN_URL and HOLDFAST_INGRESS_URL",
        ) from None


# A proxy of the environment is for the world outside; nodes are inside.
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def checked(answer: Answer) -> Answer:
    """The answer if it is a success; else what the node says, as an error of the command."""
    if answer.status < 400:
        return answer
    try:
        error = json.loads(answer.body)
        raise Failed(f"{error['message']} ({answer.status})", error.get("hint"), error.get("details"))
    except (ValueError, KeyError, TypeError):
        raise Failed(f"status {answer.status}: {answer.body[:300].decode(errors='replace')}") from None


def admin(url: str, method: str, where: str, *, parameters: Mapping[str, Any] | None = None, value: Any = None) -> Any:
    """JSON in, JSON out."""
    body = json.dumps(value).encode() if value is not None else (b"" if method in ("POST", "PUT") else None)
    headers = {"Content-Type": "application/json"} if value is not None else None
    return checked(ask(url, method, where, parameters=parameters, body=body, headers=headers)).json()
