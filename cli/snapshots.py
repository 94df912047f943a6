"""`holdfast snapshot ...`: list snapshots, take one now, verify one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from holdfast.cli import client, complete
from holdfast.cli.client import Failed
from holdfast.cli.output import admin_option, console, fields, json_option, print_json, table


@click.group()
def snapshot() -> None:
    """Snapshots of partitions: the state that a node starts from when the log no longer has the older entries."""


@snapshot.command("list")
@click.option(
    "--stored", is_flag=True, help="List the snapshots in the shared store instead of the newest on the node."
)
@admin_option
@json_option
def list_snapshots(stored: bool, admin_url: str, as_json: bool) -> None:
    """List the newest snapshot of each partition on a node, and any errors."""
    if stored:
        found = client.admin(admin_url, "GET", "/snapshots")
        if as_json:
            print_json(found)
            return
        table(
            ("PARTITION", "INDEX", "TERM", "SIZE", "NAME"),
            (
                (each["partition"], each["index"], each["term"], each["bytes"], each["name"])
                for each in found["snapshots"]
            ),
            empty=f"{found['store']} has no snapshots yet.",
        )
        return
    cluster = client.admin(admin_url, "GET", "/cluster")
    shown = [{"partition": each["partition"], **each["snapshot"]} for each in cluster["partitions"] if each["here"]]
    if as_json:
        print_json({**cluster["snapshots"], "partitions": shown})
        return
    table(
        ("PARTITION", "INDEX", "AGE", "SIZE", "STORED", "DOING", "ERROR"),
        (
            (
                each["partition"], each["index"], _age(each["age_s"]), each["bytes"],
                "yes" if each["stored"] else "no", each["doing"], each["error"],
            )
            for each in shown
        ),
        empty="There are no partitions on this node.",
    )  # fmt: skip
    if cluster["snapshots"]["error"]:
        raise Failed(f"the shared store: {cluster['snapshots']['error']}")


def _age(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.0f} s"


@snapshot.command()
@click.argument("partitions", nargs=-1, type=int, shell_complete=complete.partitions)
@admin_option
@json_option
def create(partitions: tuple[int, ...], admin_url: str, as_json: bool) -> None:
    """Take a snapshot of these PARTITIONS, or of all, each on its leader. It returns when they are taken."""
    if not partitions:
        cluster = client.admin(admin_url, "GET", "/cluster")
        partitions = tuple(each["partition"] for each in cluster["partitions"])
    made: list[dict[str, Any]] = []
    try:
        with Progress(console=console(), transient=True) as bar:
            for partition in bar.track(partitions, description="Cutting"):
                answer = client.ask(
                    admin_url, "POST", f"/cluster/partitions/{partition}/snapshot", body=b"", timeout_s=None
                )
                made.append(client.checked(answer).json())
    except KeyboardInterrupt:
        click.echo(
            f"Interrupted: {len(made)} of {len(partitions)} are taken, and the one in progress goes on.", err=True
        )
        raise click.exceptions.Exit(130) from None
    if as_json:
        print_json(made)
        return
    table(
        ("PARTITION", "NODE", "INDEX", "SIZE", "NAME"),
        ((each["partition"], each["node"], each["index"], each["bytes"], each["name"]) for each in made),
        empty="There are no partitions to take a snapshot of.",
    )


@snapshot.command()
@click.argument("file")
@click.option("--store", help="The store that contains FILE: s3://bucket/prefix?..., or a directory.")
@json_option
def verify(file: str, store: str | None, as_json: bool) -> None:
    """Verify every checksum of a snapshot FILE. Needs no node. Exits with 1 if the file is damaged."""
    from holdfast.snapshots.errors import SnapshotError
    from holdfast.snapshots.format import verify as verify_file
    from holdfast.snapshots.opening import open_store
    from holdfast.snapshots.transfer import fetch_blocking
    from holdfast.snapshots.work import Work

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console(), transient=True) as bar, tempfile.TemporaryDirectory() as scratch:
            task = bar.add_task("reading", total=None)
            work = Work(lambda done, total: bar.update(task, completed=done, total=total or None))
            if store is None:
                found = verify_file(Path(file), work=work)
            else:
                found = fetch_blocking(open_store(store), file, Path(scratch), work=work)
    except (SnapshotError, OSError, ValueError) as error:
        raise Failed(str(error)) from None
    header, meta = found.header, found.header.meta
    shown = {
        "name": found.name, "cluster": meta.cluster, "group": meta.group, "index": meta.index, "term": meta.term,
        "epoch": meta.epoch, "members": list(meta.members), "schema": meta.schema, "cut_by": meta.node,
        "created_ms": header.created_ms, "bytes": header.file_bytes, "sha256": header.sha256,
    }  # fmt: skip
    if as_json:
        print_json(shown)
        return
    fields(shown.items())
    click.echo("Sound.")
