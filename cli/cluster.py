"""`holdfast cluster ...`: the nodes, the leaders of partitions, and adding and removing nodes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from holdfast.cli import client, complete
from holdfast.cli.output import admin_option, json_option, print_json, size, table
from holdfast.cluster.durations import format_duration_ms


@click.group()
def cluster() -> None:
    """Show the cluster, drain nodes, add and remove them, transfer leaderships."""


@cluster.command()
@admin_option
@json_option
def status(admin_url: str, as_json: bool) -> None:
    """Show nodes, partitions, leaders and lags.

    Nodes and members include every change acknowledged before; leaders and lags are those known to the answering node.
    """
    shown = client.admin(admin_url, "GET", "/cluster")
    if as_json:
        print_json(shown)
        return
    leads = Counter(partition["leader"] for partition in shown["partitions"])
    table(
        (
            "NODE",
            "VERSION",
            "STATE",
            "ZONE",
            "ADDRESS",
            "UP",
            "DISK FREE",
            "MEMORY",
            "LOOP LAG",
            "REPLICAS",
            "LEADS",
            "NOTE",
        ),
        (
            (
                node["name"],
                node.get("version") or "unknown",
                _condition(node),
                node["zone"] or "",
                node["address"],
                *_vitals(node),
                node["replicas"],
                leads[node["name"]],
                node["error"],
            )
            for node in shown["nodes"]
        ),
        empty="There are no nodes.",
    )
    click.echo()
    table(
        ("PARTITION", "LEADER", "MEMBERS", "EPOCH", "TERM", "COMMIT", "BEHIND"),
        (
            (
                partition["partition"],
                partition["leader"] or "none",
                ", ".join(partition["members"]),
                partition["epoch"],
                partition.get("term", ""),
                partition.get("commit", ""),
                ", ".join(f"{name} {lag}" for name, lag in (partition.get("follower_lag") or {}).items() if lag),
            )
            for partition in shown["partitions"]
        ),
        empty="There are no partitions.",
    )
    for each in shown.get("pauses") or ():
        where = "everything" if each["service"] is None else f"service {each['service']}"
        where = where if each["key"] is None else f"key {each['key']!r} of {each['service']}"
        click.echo(f"\nPaused: {where}, by {each['by']} since {each['since']}: {each['reason']}")
    behind = _behind(shown)
    if behind:
        click.echo(f"\n{behind}")
    if shown["changing"]:
        click.echo(f"\nNow: {shown['changing']}")
    if not shown["linearizable"]["nodes"]:
        click.echo("\nThe meta group has no leader: nodes and members may be out of date.", err=True)


def _condition(node: dict[str, Any]) -> str:
    """In a word. An older node knows only the state of membership, and whether it is connected."""
    condition = node.get("condition") or ("ok" if node["connected"] else "unreachable")
    return str(node["state"] if condition == "ok" else condition)


def _vitals(node: dict[str, Any]) -> tuple[str, str, str, str]:
    """Empty for a node that did not answer."""
    up, disk, memory, lag = (node.get(name) for name in ("uptime_s", "disk", "memory_bytes", "loop_lag_ms"))
    return (
        format_duration_ms(up * 1000) if up is not None else "",
        f"{size(disk['free'])} ({100 * disk['free'] // disk['total']}%)" if disk and disk["total"] else "",
        size(memory) if memory is not None else "",
        f"{lag} ms" if lag is not None else "",
    )


def _behind(shown: Any) -> str | None:
    """Why the cluster cannot use all features of its newest release."""
    level, nodes = shown.get("level"), [node for node in shown["nodes"] if node["state"] != "removed"]
    newest = max((node.get("level") or 0 for node in nodes), default=0)
    if level is None or level >= newest:
        return None
    older = [node["name"] for node in nodes if (node.get("level") or 0) < newest]
    waits = f": waits for {', '.join(older)}" if older else ""
    return f"Level {level} of {newest}, which rises when every node is connected and supports it{waits}."


@cluster.command()
@click.argument("node", shell_complete=complete.nodes)
@click.option("--move", is_flag=True, help="Also move its replicas to other nodes.")
@click.option("--undo", is_flag=True, help="Take the node back.")
@admin_option
@json_option
def drain(node: str, move: bool, undo: bool, admin_url: str, as_json: bool) -> None:
    """Move all leaderships away from NODE, so that stopping it disturbs no client.

    A node that is stopped (SIGTERM) drains by itself, for as long as it is stopped.
    """
    if undo and move:
        raise click.UsageError("--undo returns the node to service, --move moves its replicas away: use one of them")
    _drain(node, "undrain" if undo else "drain", {"move": "true"} if move else {}, admin_url, as_json)
    if move and not as_json:
        click.echo("Its replicas are moving. The node is empty when `holdfast cluster status` shows 0 replicas.")


@cluster.command()
@click.argument("node", shell_complete=complete.nodes)
@admin_option
@json_option
def undrain(node: str, admin_url: str, as_json: bool) -> None:
    """Return NODE to service: the same as drain --undo."""
    _drain(node, "undrain", {}, admin_url, as_json)


def _drain(node: str, action: str, parameters: dict[str, str], admin_url: str, as_json: bool) -> None:
    _print_node(
        client.admin(admin_url, "POST", client.path("cluster", "nodes", node, action), parameters=parameters), as_json
    )


@cluster.command()
@click.argument("node")
@click.argument("address", metavar="HOST:PORT")
@click.option("--zone", help="Address of the node. The node announces it when it starts.")
@admin_option
@json_option
def add(node: str, address: str, zone: str | None, admin_url: str, as_json: bool) -> None:
    """Add NODE, whose peer address is HOST:PORT, to the cluster.

    Start it with the same `founders` as the others and with the address of at least one of them in `peers`. It receives
    its share of the partitions once it is connected.
    """
    value = {"name": node, "address": address, "zone": zone or ""}
    _print_node(client.admin(admin_url, "POST", "/cluster/nodes", value=value), as_json)
    if not as_json:
        click.echo(
            "Start it now, unless it is running. It receives its share of the partitions: holdfast cluster status"
        )


@cluster.command()
@click.argument("node", shell_complete=complete.nodes)
@click.option("--force", is_flag=True, help="Remove even if too few nodes are left for all replicas.")
@admin_option
@json_option
def remove(node: str, force: bool, admin_url: str, as_json: bool) -> None:
    """Remove NODE permanently, alive or dead. Other nodes take over its replicas; its name cannot be used again."""
    parameters = {"force": "true"} if force else {}
    _print_node(
        client.admin(admin_url, "POST", client.path("cluster", "nodes", node, "remove"), parameters=parameters), as_json
    )
    if not as_json:
        click.echo(
            "Its data is being copied to other nodes. Its vote in the meta group counts as a replica until it is removed: "
            "stop it when `holdfast cluster status` shows 0 replicas, and delete its directory."
        )


@cluster.command()
@click.argument("partition", type=click.IntRange(0, 999_999), shell_complete=complete.partitions)
@click.option(
    "--to", metavar="NODE", shell_complete=complete.nodes, help="The new leader; any other replica if omitted."
)
@admin_option
@json_option
def transfer(partition: int, to: str | None, admin_url: str, as_json: bool) -> None:
    """Transfer the leadership of PARTITION to another replica."""
    where = client.path("cluster", "partitions", str(partition), "transfer")
    shown = client.admin(admin_url, "POST", where, parameters={"to": to})
    if as_json:
        print_json(shown)
    else:
        click.echo(f"Partition {shown['partition']} is led by {shown['leader']}")


def _print_node(node: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(node)
        return
    leads = node["leads"] if node["leads"] is not None else "unknown"
    click.echo(f"{node['name']}: {node['state']}, replicas {node['replicas']}, leads {leads}")
