"""What the shell offers for a word: names and ids that the cluster knows, if it answers within a second.

A shell waits for this at each press of Tab, so silence, refusals and nodes of another release all mean that there is nothing
to offer. Words with characters that a shell interprets are not offered.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeAlias

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from holdfast.cli import client, profiles

ANSWER_S: Final = 1.0
IDS_MAX: Final = 100
_SAFE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")

Completer: TypeAlias = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
_Words: TypeAlias = Iterable[tuple[str, str]]


def _asking(where: str, words: Callable[[Any], _Words], parameters: dict[str, Any] | None = None) -> Completer:
    """Offers what `words` finds in the answer of a node: each with a text that explains it."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        try:
            url = _reach(context)
            answer = client.ask(url, "GET", where, parameters=parameters, timeout_s=ANSWER_S)
            found = list(words(client.checked(answer).json()))
        except Exception:
            return []  # Whatever it is, an error would end up in the middle of the line that somebody types.
        return offered(found, incomplete)

    return complete


def offered(words: _Words, incomplete: str) -> list[CompletionItem]:
    return [
        CompletionItem(word, help=client.printable(about).replace("\n", " ")[:80] or None)
        for word, about in words
        if word.startswith(incomplete) and _SAFE.fullmatch(word)
    ]


def _reach(context: click.Context) -> str:
    """The address that the command would use, with its token. While a shell completes, no command runs that sets them."""
    given = context.find_root().params

    def path(name: str) -> Path | None:
        return Path(given[name]) if given.get(name) else None

    client.use_token(path("token_file"))
    client.use_certificates(path("ca_file"), path("client_cert_file"), path("client_key_file"))
    profile = profiles.choose(given.get("name"))
    if profile is not None:
        profiles.offer(profile)
    if context.get_parameter_source("admin_url") in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT):
        return str(context.params["admin_url"])
    # A command that asks the ingress has no such option.
    return (
        os.environ.get("HOLDFAST_ADMIN_URL") or (profile.admin_url if profile is not None else "") or client.ADMIN_URL
    )


def _services(shown: Any) -> _Words:
    return [(each["name"], each["kind"]) for each in shown["services"]]


def _deployments(shown: Any) -> _Words:
    return [(each["id"], each["uri"]) for each in shown["deployments"]]


def _invocations(shown: Any) -> _Words:
    for each in shown["invocations"]:
        key = f"/{each['key']}" if each["key"] is not None else ""
        yield each["id"], f"{each['service']}{key}/{each['handler']} {each['end'] or each['status']}"


def _handlers(shown: Any) -> _Words:
    for each in shown["services"]:
        for handler in each["handlers"]:
            # Between service and handler, those of virtual objects and workflows have a key that nobody can guess.
            yield f"{each['name']}/{'' if each['kind'] != 'service' else handler}", each["kind"]


services: Final = _asking("/services", _services)
deployments: Final = _asking("/deployments", _deployments)
#: Where a word of its own stands for the newest.
deployments_or_newest: Final = _asking("/deployments", lambda shown: [("newest", ""), *_deployments(shown)])
invocations: Final = _asking("/invocations", _invocations, {"limit": IDS_MAX})
handlers: Final = _asking("/services", lambda shown: dict.fromkeys(_handlers(shown)))
nodes: Final = _asking(
    "/cluster",
    lambda shown: [(each["name"], each["address"]) for each in shown["nodes"] if each["state"] != "removed"],
)
partitions: Final = _asking(
    "/cluster", lambda shown: [(str(each["partition"]), f"led by {each['leader']}") for each in shown["partitions"]]
)
tokens: Final = _asking("/tokens", lambda shown: [(each["id"], each["name"]) for each in shown["tokens"]])
backups: Final = _asking("/cluster/backups", lambda shown: [(each["id"], each["status"]) for each in shown["backups"]])
approvals: Final = _asking(
    "/approvals",
    lambda shown: [(each["id"], each["title"]) for each in shown["approvals"]],
    {"limit": IDS_MAX},
)
webhooks: Final = _asking("/webhooks", lambda shown: [(each["id"], each["url"]) for each in shown["webhooks"]])
