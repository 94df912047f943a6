"""`holdfast cluster ...`: the nodes, the leaders of partitions, and adding and removing nodes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from holdfast.cli import client, complete
from holdfast.cli.client import Unanswered
from holdfast.cli.output import admin_option, counted, json_option, print_json, size, table
from holdfast.cli.waits import Look, node_of, wait_options, wait_until
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
@wait_options("the node leads no partitions, and with --move also has no replicas")
@admin_option
@json_option
def drain(
    node: str, move: bool, undo: bool, wait: bool, timeout: float | None, admin_url: str, as_json: bool
) -> None:  # fmt: skip
    """Move all leaderships away from NODE, so that stopping it disturbs no client.

    A node that is stopped (SIGTERM) drains by itself, for as long as it is stopped.

    \b
    holdfast cluster drain n2 --wait --timeout 1m && systemctl stop holdfast
    """
    if undo and (move or wait):
        raise click.UsageError("--undo returns the node to service at once: it takes neither --move nor --wait")
    action = "undrain" if undo else "drain"
    parameters = {**({"move": "true"} if move else {}), **({"wait": "false"} if wait else {})}
    shown = client.admin(admin_url, "POST", client.path("cluster", "nodes", node, action), parameters=parameters)
    if wait:
        wait_until(lambda: _emptied(admin_url, node, move), work=f"draining {node}", timeout_s=timeout)
        shown = node_of(client.admin(admin_url, "GET", "/cluster"), node)
    _print_node(shown, as_json)
    if move and not wait and not as_json:
        click.echo("Its replicas are moving. The node is empty when `holdfast cluster status` shows 0 replicas.")


@cluster.command()
@click.argument("node", shell_complete=complete.nodes)
@admin_option
@json_option
def undrain(node: str, admin_url: str, as_json: bool) -> None:
    """Return NODE to service: the same as drain --undo."""
    _print_node(client.admin(admin_url, "POST", client.path("cluster", "nodes", node, "undrain")), as_json)


def _emptied(admin_url: str, name: str, with_replicas: bool) -> Look:
    """Whether a node leads nothing, and has no replicas if those are to go as well."""
    shown = client.admin(admin_url, "GET", "/cluster")
    node = node_of(shown, name)
    # Two sources: what the node says about itself, and what the one that is asked has heard of leaders.
    leads = max(node["leads"] or 0, sum(each["leader"] == name for each in shown["partitions"]))
    replicas = node["replicas"] if with_replicas else 0
    left = [counted(leads, "leadership")] if leads else []
    left += [counted(replicas, "replica")] if replicas else []
    return Look(not left, f"{' and '.join(left)} left")


@cluster.command()
@click.argument("node")
@click.argument("address", metavar="HOST:PORT")
@click.option("--zone", help="The zone of the node. Default: the one that the node announces when it starts.")
@wait_options("the node is connected and has received replicas")
@admin_option
@json_option
def add(
    node: str, address: str, zone: str | None, wait: bool, timeout: float | None, admin_url: str, as_json: bool
) -> None:  # fmt: skip
    """Add NODE, whose peer address is HOST:PORT, to the cluster.

    Start it with the same `founders` as the others and with the address of at least one of them in `peers`. It receives
    its share of the partitions once it is connected.
    """
    value = {"name": node, "address": address, "zone": zone or ""}
    shown = client.admin(admin_url, "POST", "/cluster/nodes", value=value)
    if wait:
        wait_until(lambda: _joined(admin_url, node), work=f"adding {node}", timeout_s=timeout)
        shown = node_of(client.admin(admin_url, "GET", "/cluster"), node)
    _print_node(shown, as_json)
    if not wait and not as_json:
        click.echo(
            "Start it now, unless it is running. It receives its share of the partitions: holdfast cluster status"
        )


def _joined(admin_url: str, name: str) -> Look:
    shown = client.admin(admin_url, "GET", "/cluster")
    node = node_of(shown, name)
    if not node["connected"]:
        return Look(False, "it has not connected yet")
    if not node["replicas"]:
        return Look(False, "it has no replicas yet")
    return Look(not shown["changing"], str(shown["changing"]))


@cluster.command()
@click.argument("node", shell_complete=complete.nodes)
@click.option("--force", is_flag=True, help="Remove even if too few nodes are left for all replicas.")
@wait_options("the node holds nothing, so that it can be stopped")
@admin_option
@json_option
def remove(
    node: str, force: bool, wait: bool, timeout: float | None, admin_url: str, as_json: bool
) -> None:  # fmt: skip
    """Remove NODE permanently, alive or dead. Other nodes take over its replicas; its name cannot be used again."""
    parameters = {"force": "true"} if force else {}
    where = client.path("cluster", "nodes", node, "remove")
    shown = client.admin(admin_url, "POST", where, parameters=parameters)
    if wait:
        seen = dict(shown)
        wait_until(lambda: _let_go(admin_url, node, seen), work=f"removing {node}", timeout_s=timeout)
        shown = seen
    _print_node(shown, as_json)
    if wait and not as_json:
        click.echo("It holds nothing any more: stop it, and delete its directory.")
    elif not as_json:
        click.echo(
            "Its data is being copied to other nodes. Its vote in the meta group counts as a replica until it is removed: "
            "stop it when `holdfast cluster status` shows 0 replicas, and delete its directory."
        )


def _let_go(admin_url: str, name: str, seen: dict[str, Any]) -> Look:
    """Whether a removed node holds nothing. `seen` is kept current."""
    try:
        seen.update(node_of(client.admin(admin_url, "GET", "/cluster"), name))
    except Unanswered as error:
        if "was removed from the cluster" not in error.message:
            raise
        seen["replicas"] = 0  # It is the node that is asked, which says this once it holds nothing.
    left = seen["replicas"]
    return Look(not left, f"{counted(left, 'replica')} left")


@cluster.command()
@click.argument("partition", type=click.IntRange(0, 999_999), shell_complete=complete.partitions)
@click.option(
    "--to", metavar="NODE", shell_complete=complete.nodes, help="The new leader; any other replica if omitted."
)
@admin_option
@json_option
def transfer(partition: int, to: str | None, admin_url: str, as_json: bool) -> None:
    """Transfer the leadership of PARTITION to another replica. It returns when the other one leads."""
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
