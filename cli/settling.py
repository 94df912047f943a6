"""`holdfast invocations cancel --wait`, and the like: act on invocations, and wait until each has come to what was wanted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import click

from holdfast.cli import client
from holdfast.cli.client import Failed
from holdfast.cli.output import counted, print_json
from holdfast.cli.waits import Look, wait_until

#: What --wait waits for, by action.
UNTIL: Final = {
    "cancel": "they are completed",
    "kill": "they are completed",
    "pause": "they are paused",
    "resume": "they are completed or paused again; exit code 1 unless all succeeded",
    "restart": "the new ones are completed or paused; exit code 1 unless all succeeded",
}
_DOING: Final = {
    "cancel": "cancelling", "kill": "killing", "pause": "pausing", "resume": "resuming", "restart": "restarting",
}  # fmt: skip
#: Actions after which the work goes on, so that the exit code says how it ended.
_GOES_ON: Final = ("resume", "restart")
_GONE: Final = "purged"


class _Watched(NamedTuple):
    """`id` is what the user named. `watched` is what to wait for: of a restarted invocation, the new one."""

    id: str
    watched: str
    answer: Mapping[str, Any]


def act_on_each_and_wait(
    name: str, ids: Sequence[str], extra: Mapping[str, Any], admin_url: str, *, timeout_s: float | None, as_json: bool
) -> None:
    """Each with its own line."""
    watched, failed = _act(name, ids, extra, admin_url)
    if not as_json:
        for each in watched:
            new = f" as {each.watched}" if each.watched != each.id else ""
            click.echo(f"{each.answer['status']} {each.id}{new}")
        for id_, error in failed.items():
            Failed(f"{id_}: {error.message}", error.hint, error.details).show()
    ends = _wait(name, watched, admin_url, timeout_s)
    if as_json:
        rows = [{**each.answer, "settled": ends[each.watched]} for each in watched]
        print_json([*rows, *({"id": id_, "error": error.message} for id_, error in failed.items())])
    else:
        for each in watched:
            click.echo(f"{each.watched} {ends[each.watched]}")
    _exit(name, ends, failed=bool(failed))


def act_on_all_and_wait(
    name: str,
    ids: Sequence[str],
    extra: Mapping[str, Any],
    admin_url: str,
    *,
    more: bool,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    """Those that a filter selected, with one summary. `more`: further ones match."""
    watched, failed = _act(name, ids, extra, admin_url)
    ends = _wait(name, watched, admin_url, timeout_s)
    unchanged = sum(each.answer["status"] == "Unchanged" for each in watched)
    settled = Counter(ends.values())
    reasons = Counter(error.message for error in failed.values())
    if as_json:
        print_json(
            {
                "action": name, "matched": len(ids), "done": len(watched) - unchanged, "unchanged": unchanged,
                "failed": len(failed), "reasons": reasons, "more": more, "settled": settled,
            }
        )  # fmt: skip
    else:
        click.echo(f"{name}: {len(watched) - unchanged} of {len(ids)} done, {unchanged} unchanged")
        for reason, count in reasons.items():
            click.echo(client.printable(f"  {count} not: {reason}"))
        for end, count in sorted(settled.items()):
            click.echo(f"  {count} {end}")
        if more:
            click.echo("There are more: run it again.")
    _exit(name, ends, failed=bool(failed))


def _act(
    name: str, ids: Sequence[str], extra: Mapping[str, Any], admin_url: str
) -> tuple[list[_Watched], dict[str, Failed]]:
    watched: list[_Watched] = []
    failed: dict[str, Failed] = {}
    try:
        for id_ in ids:
            try:
                answer = client.admin(admin_url, "POST", client.path("invocations", id_, name), parameters=extra)
            except Failed as error:
                failed[id_] = error
            else:
                watched.append(_Watched(id_, answer.get("new_id", id_), answer))
    except KeyboardInterrupt:
        done = len(watched) + len(failed)
        click.echo(f"Interrupted: {name} was asked of {done} of {counted(len(ids), 'invocation')}.", err=True)
        raise click.exceptions.Exit(130) from None
    return watched, failed


def _wait(name: str, watched: Sequence[_Watched], admin_url: str, timeout_s: float | None) -> dict[str, str]:
    """How each ended, or its status if it is paused."""
    ends: dict[str, str] = {}
    pending = [each.watched for each in watched]

    def look() -> Look:
        while pending:
            status, end = _status(admin_url, pending[0])
            if not _is_settled(name, status):
                after = f", {len(pending) - 1} after it" if len(pending) > 1 else ""
                return Look(False, f"{pending[0]} is {status}{after}")
            ends[pending.pop(0)] = end or status
        return Look(True)

    wait_until(look, work=f"{_DOING[name]} {counted(len(watched), 'invocation')}", timeout_s=timeout_s)
    return ends


def _is_settled(name: str, status: str) -> bool:
    return status in ("completed", _GONE) or (name in ("pause", *_GOES_ON) and status == "paused")


def _status(admin_url: str, id_: str) -> tuple[str, str | None]:
    answer = client.ask(admin_url, "GET", client.path("invocations", id_))
    if answer.status == 404:
        return _GONE, None
    shown = client.checked(answer).json()
    return shown["status"], shown["end"]


def _exit(name: str, ends: Mapping[str, str], *, failed: bool) -> None:
    if failed or (name in _GOES_ON and any(end != "succeeded" for end in ends.values())):
        raise click.exceptions.Exit(1)
