"""`holdfast invocations ...`: show what runs and why something does not, and act on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

import click
from rich.table import Table

from holdfast.cli import client, complete
from holdfast.cli.client import Failed
from holdfast.cli.journals import print_journal, short
from holdfast.cli.output import (
    Function,
    admin_option,
    age,
    counted,
    fields,
    json_option,
    made_table,
    print_json,
    size,
    table,
)
from holdfast.cli.settling import UNTIL, act_on_all_and_wait, act_on_each_and_wait
from holdfast.cli.trees import print_tree, value
from holdfast.cli.waits import wait_options
from holdfast.cli.watch import keep_current
from holdfast.cluster.durations import format_duration_ms

_FILTERS = (
    "status", "service", "handler", "key", "deployment", "older_than", "outcome", "since", "until", "idempotency_key",
    "key_prefix", "failure_code", "failure", "parent", "completed_since", "completed_until",
)  # fmt: skip


def filters(command: Function) -> Function:
    """The options that select invocations."""
    for option in reversed(
        (
            click.option(
                "--status",
                help="Invocations with one of these statuses, separated by commas: running, suspended, paused, ..., or active.",
            ),
            click.option("--service", shell_complete=complete.services, help="Invocations of this service."),
            click.option("--handler", help="Invocations of this handler."),
            click.option("--key", help="Invocations of this key of a virtual object or workflow."),
            click.option(
                "--deployment", shell_complete=complete.deployments, help="Invocations pinned to this deployment."
            ),
            click.option("--older-than", metavar="DURATION", help="Created longer ago than this: 10m, 2h, 1d."),
            click.option(
                "--outcome",
                help="Completed with one of these outcomes, separated by commas: succeeded, failed, cancelled, killed.",
            ),
            click.option("--since", metavar="TIME", help="Created at or after: 2h (ago), 2026-11-18T04:00:00Z."),
            click.option("--until", metavar="TIME", help="Created before: 2h (ago), 2026-11-18T04:00:00Z."),
            click.option("--idempotency-key", help="Created with this Idempotency-Key."),
            click.option("--key-prefix", help="With a key that begins with this text."),
            click.option("--failure-code", metavar="CODE", help="Failed with this code, finally or last."),
            click.option("--failure", metavar="TEXT", help="This text is in the message or kind of that failure."),
            click.option(
                "--parent", metavar="ID", shell_complete=complete.invocations, help="Called or sent by this invocation."
            ),
            click.option(
                "--completed-since", metavar="TIME", help="Completed at or after: 2h (ago), 2026-11-18T04:00:00Z."
            ),
            click.option("--completed-until", metavar="TIME", help="Completed before: 2h (ago), 2026-11-18T04:00:00Z."),
        )
    ):
        command = option(command)
    return command


_COLUMNS = ("ID", "TARGET", "STATUS", "AGE", "STEPS", "FAILURES", "LAST FAILURE")


@click.group()
def invocations() -> None:
    """Look at invocations, and cancel, kill, pause, resume, restart or purge them."""


@invocations.command("list")
@filters
@click.option(
    "--order", type=click.Choice(("newest", "oldest")), default="newest", show_default=True, help="Which first."
)
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, 100_000), help="Show at most this many.")
@click.option("--watch", "-w", is_flag=True, help="Keep the list current, until you interrupt it.")
@admin_option
@json_option
def list_invocations(order: str, limit: int, watch: bool, admin_url: str, as_json: bool, **chosen: str | None) -> None:
    """List the invocations that match every given option, newest first.

    \b
    holdfast invocations list --status active
    holdfast invocations list --outcome failed --since 1h
    holdfast invocations list --status paused,backing-off --service trips --older-than 10m
    holdfast invocations list --status active --watch
    holdfast invocations list --failure "connection refused" --completed-since 1d --order oldest
    """
    if watch:
        if as_json:
            raise click.UsageError("--watch and --json exclude each other: for a script, use `holdfast events --json`")
        events = {name: chosen[name] for name in ("service", "handler", "key")}

        def read(most: int) -> Table:
            return made_table(_COLUMNS, _rows(_read(admin_url, chosen, order, min(limit, most))[0]))

        keep_current(admin_url, events, read)
        return
    found, more = _read(admin_url, chosen, order, limit)
    if as_json:
        print_json({"invocations": found, "more": more})
        return
    table(_COLUMNS, _rows(found), empty="No invocations match." if any(chosen.values()) else "No invocations.")
    if more:
        click.echo(f"There are more than these {len(found)}: see --limit, or narrow the filter.", err=True)


def _read(
    admin_url: str, chosen: Mapping[str, str | None], order: str, limit: int
) -> tuple[list[dict[str, Any]], bool]:
    """Invocations that match, and whether there are more."""
    found: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        parameters = {**chosen, "limit": min(limit - len(found), 1000), "cursor": cursor}
        if order != "newest":  # An older node knows no other order.
            parameters["order"] = order
        page = client.admin(admin_url, "GET", "/invocations", parameters=parameters)
        found += page["invocations"]
        cursor = page["cursor"]
        if cursor is None or len(found) >= limit:
            return found, cursor is not None


def _rows(found: list[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for each in found:
        failure = each.get("failure")
        yield (
            each["id"], _target(each), each["end"] or each["status"], age(each["created_at"]), each["steps"],
            each["failures"] + (each.get("lost_streams") or 0) or None, short(failure["message"]) if failure else None,
        )  # fmt: skip


def _target(each: dict[str, Any]) -> str:
    key = f"/{each['key']}" if each["key"] is not None else ""
    return f"{each['service']}{key}/{each['handler']}"


@invocations.command()
@click.argument("id_", metavar="ID", shell_complete=complete.invocations)
@click.option(
    "--tree", "as_tree", is_flag=True, help="Show the whole tree of callers, calls and sends, with their steps."
)
@admin_option
@json_option
def describe(id_: str, as_tree: bool, admin_url: str, as_json: bool) -> None:
    """Show one invocation: its status, why it is not running, and its steps, or the tree that it belongs to."""
    if as_tree:
        tree = client.admin(admin_url, "GET", client.path("invocations", id_, "tree"))
        print_json(tree) if as_json else print_tree(tree, id_, admin_url)
        return
    shown = client.admin(admin_url, "GET", client.path("invocations", id_))
    journal = client.admin(admin_url, "GET", client.path("invocations", id_, "journal"))
    if as_json:
        print_json({**shown, "journal": journal["steps"], "journal_next": journal["next"]})
        return
    failure = shown["last_failure"]
    fields(
        (
            ("id", shown["id"]),
            ("target", _target(shown)),
            ("status", shown["end"] or shown["status"]),
            ("why not running", shown["why_not_running"] if shown["status"] != "completed" else None),
            ("begun", f"{shown['created_at']} ({age(shown['created_at'])} ago)"),
            ("in this status", age(shown["since"])),
            ("attempts", shown["attempts"]),
            (
                "last failure",
                f"{failure['message']} (attempt {failure['attempt']}, {failure['at']})" if failure else None,
            ),
            ("  at", _frames(failure)),
            ("deployment", shown["deployment"]),
            ("called by", _caller(shown)),
            ("calls and sends", shown.get("children") or None),  # Older nodes do not count them.
            ("steps copied from", shown["steps_copied_from"]),
            ("idempotency key", shown["idempotency_key"]),
            ("size", _sizes(shown)),
            ("outcome", shown["outcome"]),
        )
    )
    click.echo()
    print_journal(journal)
    history = shown.get("attempt_history")  # Older nodes do not report it.
    if history:
        click.echo("\nFailed or lost attempts, newest last:")
        table(
            ("ATTEMPT", "STARTED", "LASTED", "ENDED", "NODE", "DEPLOYMENT", "ERROR"),
            (
                (each["attempt"], each["started_at"], _lasted(each["started_at"], each["ended_at"]), each["how"],
                 each["node"], each["deployment"], each["error"] and each["error"]["message"])
                for each in history
            ),
            empty="",
        )  # fmt: skip


def _frames(failure: dict[str, Any] | None) -> str | None:
    """The traceback of an exception, the innermost frame first."""
    return ", ".join(reversed(failure["trace"])) if failure and failure.get("trace") else None


def _lasted(began: str | None, ended: str | None) -> str:
    if began is None or ended is None:
        return ""
    seconds = (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()
    return format_duration_ms(max(round(seconds * 1000), 0))


def _caller(shown: dict[str, Any]) -> str | None:
    caller, depth = shown["called_by"], shown.get("call_depth", 0)  # An older node does not tell the depth.
    if not caller:
        return None
    step = f", step {caller['step']}" if caller["step"] >= 0 else ", which sent it"
    return f"{caller['id']}{step}" + (f" ({depth} calls deep)" if depth > 1 else "")


def _sizes(shown: dict[str, Any]) -> str:
    journal = f"{size(shown['journal_bytes'])} of journal"
    large = shown.get("large_values", 0)  # Older nodes do not report it.
    return f"{journal}, {size(shown['large_bytes'])} in {counted(large, 'large value')}" if large else journal


@invocations.command()
@click.argument("id_", metavar="ID", shell_complete=complete.invocations)
@click.option("--start", default=0, type=click.IntRange(0), help="The first step to show.")
@admin_option
@json_option
def journal(id_: str, start: int, admin_url: str, as_json: bool) -> None:
    """Show the steps of an invocation."""
    shown = client.admin(admin_url, "GET", client.path("invocations", id_, "journal"), parameters={"start": start})
    print_json(shown) if as_json else print_journal(shown)


invocations.add_command(value)


def _action(name: str, text: str, *options: Callable[[Any], Any]) -> None:
    """Add a command for one action, on the given ids, or on all invocations that the filters select."""

    @filters
    @click.option("--yes", "-y", is_flag=True, help="Skip the confirmation before acting on all matches.")
    @click.option("--dry-run", is_flag=True, help="Only count the invocations that match, and change nothing.")
    @click.option(
        "--limit", default=1000, show_default=True, type=click.IntRange(1, 100_000), help="Act on at most this many."
    )
    @admin_option
    @json_option
    def command(
        ids: tuple[str, ...], yes: bool, dry_run: bool, limit: int, admin_url: str, as_json: bool,
        wait: bool = False, timeout: float | None = None, **given: Any,
    ) -> None:  # fmt: skip
        chosen = {field: given.pop(field) for field in _FILTERS}
        extra = {field: value for field, value in given.items() if value is not None}
        if ids and any(chosen.values()):
            raise click.UsageError("give either ids or a filter, not both")
        if not ids and not any(chosen.values()):
            raise click.UsageError(
                f"no invocations selected: give ids, or a filter: --{', --'.join(_FILTERS).replace('_', '-')}"
            )
        if ids and dry_run:
            raise click.UsageError("--dry-run counts what a filter selects: give no ids with it")
        if ids and wait:
            act_on_each_and_wait(name, ids, extra, admin_url, timeout_s=timeout, as_json=as_json)
        elif ids:
            _on_each(name, ids, extra, admin_url, as_json=as_json)
        elif dry_run:
            _count(name, chosen, limit, admin_url, as_json=as_json)
        elif wait:
            if not yes:
                _confirm(name, chosen)
            # The work that is waited for is exactly what matches now.
            found, more = _read(admin_url, chosen, "newest", limit)
            matched = [each["id"] for each in found]
            act_on_all_and_wait(name, matched, extra, admin_url, more=more, timeout_s=timeout, as_json=as_json)
        else:
            _on_all(name, chosen, extra, limit=limit, admin_url=admin_url, yes=yes, as_json=as_json)

    command.__doc__ = text
    if name in UNTIL:
        command = wait_options(UNTIL[name])(command)
    for option in options:
        command = option(command)
    command = click.argument("ids", metavar="[ID]...", nargs=-1, shell_complete=complete.invocations)(command)
    invocations.command(name)(command)


def _on_each(name: str, ids: tuple[str, ...], extra: dict[str, Any], admin_url: str, *, as_json: bool) -> None:
    done, failed = [], False
    for id_ in ids:
        try:
            answer = client.admin(admin_url, "POST", client.path("invocations", id_, name), parameters=extra)
        except Failed as error:
            failed = True
            if as_json:
                done.append({"id": id_, "error": error.message})
            else:
                Failed(f"{id_}: {error.message}", error.hint, error.details).show()
            continue
        done.append(answer)
        if not as_json:
            new = f" as {answer['new_id']}" if "new_id" in answer else ""
            more = f" ({answer['message']})" if answer.get("message") else ""
            click.echo(client.printable(f"{answer['status']} {id_}{new}{more}"))
    if as_json:
        print_json(done)
    if failed:
        raise click.exceptions.Exit(1)


def _on_all(
    name: str, chosen: dict[str, Any], extra: dict[str, Any], *, limit: int, admin_url: str, yes: bool, as_json: bool
) -> None:
    if not yes:
        _confirm(name, chosen)
    answer = client.admin(
        admin_url, "POST", client.path("invocations", name), parameters={**chosen, **extra, "limit": limit}
    )
    if as_json:
        print_json(answer)
        return
    click.echo(f"{name}: {answer['done']} of {answer['matched']} done, {answer['unchanged']} unchanged")
    for reason, count in answer["reasons"].items():
        click.echo(client.printable(f"  {count} not: {reason}"))
    if answer["more"]:
        click.echo("There may be more: run it again.")


def _confirm(name: str, chosen: dict[str, Any]) -> None:
    click.confirm(f"{name.capitalize()} all invocations with {_words(chosen)}?", abort=True)


def _words(chosen: dict[str, Any]) -> str:
    return ", ".join(f"{field.replace('_', ' ')} {value}" for field, value in chosen.items() if value)


def _count(name: str, chosen: dict[str, Any], limit: int, admin_url: str, *, as_json: bool) -> None:
    answer = client.admin(
        admin_url, "POST", client.path("invocations", name), parameters={**chosen, "limit": limit, "dry_run": "true"}
    )
    if as_json:
        print_json(answer)
        return
    found = f"{answer['matched']}{' or more' if answer['more'] else ''}"
    click.echo(client.printable(f"{name} would act on {found} invocations with {_words(chosen)}. Nothing was changed."))


_to = click.option(
    "--to",
    metavar="DEPLOYMENT",
    shell_complete=complete.deployments_or_newest,
    help="Continue on this deployment; `newest` is the one that receives new invocations.",
)
_step = click.option("--step", type=click.IntRange(0), help="Keep the steps before this one; 0 keeps only the input.")

_action(
    "cancel",
    "Cancel: the operation that the code waits for fails as cancelled, so that it can compensate. Also cancels its calls.",
)
_action("kill", "Kill: end it now, without informing the code. Also kills its calls. Nothing is undone.")
_action("pause", "Pause: stop the running attempt, and start no other until it is resumed.")
_action("resume", "Resume now: end a pause or a backoff.", _to)
_action("restart", "Restart a completed invocation as a new one with the same input.", _step, _to)
_action("purge", "Purge a completed invocation: delete its record, journal and outcome.")
