"""`holdfast backup ...` and `holdfast restore`: copy the whole cluster to a store, and from there to new nodes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from holdfast.cli import client, complete
from holdfast.cli.client import Failed
from holdfast.cli.output import admin_option, console, counted, fields, json_option, print_json, table
from holdfast.cli.waits import Look, wait_options, wait_until

if TYPE_CHECKING:
    from holdfast.snapshots.backups import Manifest
    from holdfast.snapshots.work import Work

POLL_S: Final = 0.3
SILENT_S: Final = 60.0

_from_option = click.option(
    "--from",
    "place",
    required=True,
    metavar="PLACE",
    help="The location of the backups: s3://bucket/prefix?endpoint_url=...&region=..., or a directory.",
)


@click.group(invoke_without_command=True)
@click.option(
    "--to",
    metavar="PLACE",
    help="s3://bucket/prefix?endpoint_url=...&region=..., or a directory that all nodes share, as the nodes see it.",
)
@click.option("--no-wait", is_flag=True, help="Print the id and end: `holdfast backup status ID` shows the progress.")
@admin_option
@json_option
@click.pass_context
def backup(context: click.Context, to: str | None, no_wait: bool, admin_url: str, as_json: bool) -> None:
    """Back up the whole running cluster to PLACE, at one point in time for all partitions.

    The leader of each partition sends it to PLACE, with its node's credentials. Only a finished backup counts as a
    backup. The command waits for it. Ctrl-C cancels it and removes what it wrote, except with --no-wait.

    \b
    holdfast backup --to s3://backups/orders?region=eu-central-1
    holdfast backup list --from s3://backups/orders?region=eu-central-1
    holdfast restore --from s3://backups/orders?region=eu-central-1 --config node.toml
    """
    if context.invoked_subcommand is not None:
        if to is not None or no_wait:
            raise click.UsageError("--to and --no-wait are for making a backup; list, verify and delete take --from")
        return
    if to is None:
        raise click.UsageError("name the place with --to: a directory, or s3://bucket/prefix (holdfast backup --help)")
    _refuse_credentials(to)
    place = to if "://" in to else os.path.abspath(to)
    if no_wait:
        begun = client.admin(admin_url, "POST", "/cluster/backups", value={"to": place})
        print_json(begun) if as_json else click.echo(begun["id"])
        return
    _print_finished(_make(place, admin_url, quiet=as_json), as_json)


def _print_finished(job: dict[str, Any], as_json: bool) -> None:
    """Raises Failed if it did not succeed."""
    if as_json:
        print_json(job)
    if job["status"] != "succeeded":
        raise Failed(
            f"the backup {job['status']}: {job['error'] or 'it was cancelled'}",
            "there is no partial backup to mistake for a complete one",
        )
    if not as_json:
        again = f", at the {job['rounds']}. try" if job["rounds"] > 1 else ""
        click.echo(f"{job['id']}: {_size(job['bytes'])} in {len(job['partitions'])} partitions{again}")
        click.echo(f"Messages between partitions were held for {job['held_ms']:.0f} ms.")


def _make(to: str, admin_url: str, *, quiet: bool) -> dict[str, Any]:
    """The backup job after its end. Ctrl-C cancels it."""
    job: dict[str, Any] = client.admin(admin_url, "POST", "/cluster/backups", value={"to": to})
    where = client.path("cluster", "backups", job["id"])
    try:
        with _bars(quiet) as (bars, tasks):
            heard_at = time.monotonic()
            while job["status"] == "running":
                _show(job, bars, tasks)
                time.sleep(POLL_S)
                try:
                    job = client.admin(admin_url, "GET", where)
                    heard_at = time.monotonic()
                except Failed as error:
                    if "(404)" in error.message or time.monotonic() > heard_at + SILENT_S:
                        raise Failed(
                            f"the node that was making {job['id']} does not answer: {error.message}",
                            "run it again: only a finished backup counts as a backup",
                        ) from None
            _show(job, bars, tasks)
    except KeyboardInterrupt:
        click.echo("Cancelling the backup...", err=True)
        job = client.admin(admin_url, "DELETE", where)
        if job["status"] == "cancelled":
            click.echo(f"{job['id']} was cancelled, and its files were removed.", err=True)
            raise click.exceptions.Exit(130) from None
    return job


@contextmanager
def _bars(quiet: bool) -> Iterator[tuple[Progress, dict[int, TaskID]]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[doing]}"),
    )
    screen = console()
    with Progress(*columns, console=screen, transient=True, disable=quiet or not screen.is_terminal) as bars:
        yield bars, {}


def _show(job: dict[str, Any], bars: Progress, tasks: dict[int, TaskID]) -> None:
    for row in job["partitions"]:
        number = row["partition"]
        if number not in tasks:
            tasks[number] = bars.add_task(f"partition {number}", total=None, doing="")
        bars.update(
            tasks[number],
            completed=row["bytes"],
            total=row["of_bytes"] or None,
            doing=f"{row['doing']} at {row['node'] or 'nobody'}{': ' + row['note'] if row['note'] else ''}",
        )


@backup.command()
@click.argument("id_", metavar="ID", shell_complete=complete.backups)
@wait_options("it has succeeded or failed")
@admin_option
@json_option
def status(id_: str, wait: bool, timeout: float | None, admin_url: str, as_json: bool) -> None:
    """Show the progress of a backup that was begun with --no-wait. Exit code 1 if it failed."""
    where = client.path("cluster", "backups", id_)
    job: dict[str, Any] = client.admin(admin_url, "GET", where)

    def look() -> Look:
        job.update(client.admin(admin_url, "GET", where))
        return Look(job["status"] != "running", _progress(job))

    if wait and job["status"] == "running":
        wait_until(look, work=f"making {id_}", timeout_s=timeout)
    if job["status"] != "running":
        _print_finished(job, as_json)
    elif as_json:
        print_json(job)
    else:
        click.echo(f"{id_} is running: {_progress(job)}")


def _progress(job: dict[str, Any]) -> str:
    done, total = (sum(row[name] or 0 for row in job["partitions"]) for name in ("bytes", "of_bytes"))
    return f"{_size(done)} of {_size(total)}" if total else f"{_size(done)} so far"


@backup.command("list")
@_from_option
@json_option
def list_backups(place: str, as_json: bool) -> None:
    """List the backups in PLACE, newest first. No node is needed."""
    from holdfast.snapshots import backups
    from holdfast.statemachine.tables import SCHEMA

    with _errors():
        found = backups.list_backups(_open(place), schema_max=SCHEMA)
    rows = []
    for each in found:
        if isinstance(each, backups.Manifest):
            rows.append(_described(each))
        elif isinstance(each, backups.Interrupted):
            rows.append({"id": each.id, "note": "not finished: in progress, or interrupted"})
        else:
            rows.append({"id": None, "note": str(each)})
    if as_json:
        print_json(rows)
        return
    table(
        ("ID", "CLUSTER", "MADE", "PARTITIONS", "SIZE", "RELEASE", "NOTE"),
        (
            (
                row["id"],
                row.get("cluster"),
                row.get("created"),
                row.get("partitions"),
                _size(row["bytes"]) if "bytes" in row else "",
                row.get("release"),
                row.get("note"),
            )
            for row in rows
        ),
        empty=f"{place} has no backups.",
    )


@backup.command()
@click.argument("id_", metavar="[ID]", required=False)
@_from_option
@click.option(
    "--scratch",
    type=click.Path(path_type=Path, file_okay=False),
    help="A directory with room for the largest partition, twice. Default: a temporary one.",
)
@json_option
def verify(id_: str | None, place: str, scratch: Path | None, as_json: bool) -> None:
    """Verify a backup (the newest, or ID): every checksum, and that its partitions are consistent.

    No node is needed. The exit code is 1 if the backup is damaged.
    """
    from holdfast.cluster.groups import FIRST_PARTITION_GROUP
    from holdfast.snapshots import backups
    from holdfast.statemachine.tables import SCHEMA

    with _errors(), tempfile.TemporaryDirectory(dir=scratch) as room, _bars(as_json) as (bars, tasks):
        store = _open(place)
        manifest = backups.find_backup(store, id_, schema_max=SCHEMA)
        backups.verify_backup(
            store,
            manifest,
            Path(room),
            first_group=FIRST_PARTITION_GROUP,
            schema_max=SCHEMA,
            work=_works(bars, tasks, "reading"),
        )
    if as_json:
        print_json(_described(manifest))
        return
    fields(_described(manifest).items())
    click.echo("The backup is intact: every checksum matches, and the partitions are consistent.")


@backup.command()
@click.argument("id_", metavar="ID")
@_from_option
@json_option
def delete(id_: str, place: str, as_json: bool) -> None:
    """Delete a backup, or the files of an interrupted one."""
    from holdfast.snapshots import backups

    with _errors():
        count = backups.delete_backup(_open(place), id_)
    if as_json:
        print_json({"id": id_, "objects": count})
        return
    click.echo(f"{id_} is deleted: {counted(count, 'object')}.")


@click.command()
@_from_option
@click.option("--backup", "id_", metavar="ID", help="The id of the backup; the newest if omitted.")
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The node's file node.toml; HOLDFAST_* variables override it.",
)
@json_option
def restore(place: str, id_: str | None, file: Path | None, as_json: bool) -> None:
    """Make the data directory of a node from a backup, before its first start.

    Run it on every founder of the new cluster, with the same backup, and then start them. The nodes may differ in
    number and names from the old ones; the number of partitions is that of the backup. Nothing is overwritten: the
    directory must be empty. If it is interrupted, run it again.

    \b
    holdfast restore --from s3://backups/orders?region=eu-central-1 --config node.toml
    holdfast serve --config node.toml
    """
    from holdfast.cluster.backup.restoring import restore as make
    from holdfast.cluster.config import BadConfig, founders_of, load
    from holdfast.log.errors import StorageError
    from holdfast.snapshots import backups
    from holdfast.statemachine.tables import SCHEMA

    _refuse_credentials(place)
    with _errors():
        try:
            config = load(file)
            store = _open(place)
            manifest = backups.find_backup(store, id_, schema_max=SCHEMA)
            with _bars(as_json) as (bars, tasks):
                made = make(config, store, manifest, work=_works(bars, tasks, "fetching"))
        except BadConfig as error:
            raise Failed(str(error), "holdfast config check explains the settings") from None
        except StorageError as error:
            raise Failed(str(error)) from None
        except KeyboardInterrupt:
            click.echo("Interrupted. Run it again: it continues where it stopped.", err=True)
            raise click.exceptions.Exit(130) from None
    others = [name for name in founders_of(config) if name != config.node]
    if as_json:
        print_json(
            {
                "backup": _described(manifest),
                "node": config.node,
                "data": str(config.data),
                "restored": made.founding.restored,
                "partitions": list(made.partitions),
                "others": others,
            }
        )
        return
    before = (
        "was already restored but has not been started" if made.already else f"has {len(made.partitions)} partitions"
    )
    click.echo(f"{config.data}: node {config.node} of cluster {config.cluster} {before}, from {manifest.id}.")
    if others:
        click.echo(f"Restore {', '.join(others)} as well, each on its own machine, with --backup {manifest.id};")
        click.echo("then start all of them: the cluster forms once they have connected to each other.")
    else:
        click.echo("Start it: holdfast serve" + (f" --config {file}" if file is not None else ""))
    click.echo(f'Nodes that join later need the setting: restored = "{made.founding.restored}"')
    click.echo("If the old cluster still runs, stop it first: both would drive the same handlers.")


def _works(bars: Progress, tasks: dict[int, TaskID], doing: str) -> Callable[[int], Work]:
    """A bar for each partition in progress."""
    from holdfast.snapshots.work import Work

    def work(number: int) -> Work:
        tasks[number] = task = bars.add_task(f"partition {number}", total=None, doing=doing)
        return Work(lambda done, total: bars.update(task, completed=done, total=total or None))

    return work


def _open(place: str) -> Any:
    from holdfast.snapshots.opening import open_store

    return open_store(place)


def _refuse_credentials(place: str) -> None:
    """Before anything else happens. A store has more credentials in its URL than other URLs: those of its options."""
    from holdfast.snapshots.stores import refuse_credentials

    with _errors():
        refuse_credentials(place)


@contextmanager
def _errors() -> Iterator[None]:
    from holdfast.snapshots.errors import SnapshotError

    try:
        yield
    except (SnapshotError, OSError) as error:
        raise Failed(str(error)) from None


def _described(manifest: Manifest) -> dict[str, Any]:
    return {
        "id": manifest.id,
        "cluster": manifest.cluster,
        "created": datetime.fromtimestamp(manifest.created_ms / 1000, UTC).isoformat(timespec="seconds"),
        "partitions": manifest.partitions,
        "bytes": manifest.bytes,
        "release": manifest.release,
        "schema": manifest.schema,
        "sha256": manifest.digest,
    }


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
