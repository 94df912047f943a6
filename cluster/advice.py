"""The findings of `holdfast config check` about valid settings: why a node could not start with them on this machine, and
which of them are probably mistakes.
"""

from __future__ import annotations

import os

from holdfast.cluster.certificates import find_certificate_faults
from holdfast.cluster.config import Config, HostPort, founders_of
from holdfast.cluster.origins import is_loopback
from holdfast.cluster.private import find_exposure, find_foreign_exposure, find_foreign_owner, secret_files


def find_faults(config: Config) -> list[str]:
    """Reasons why a node with these settings cannot start on this machine, as far as they can be found without starting it."""
    if (open_doors := find_open_doors(config)) is not None:
        return [open_doors]
    path = config.data.absolute()
    # Not Path.exists: it raises where we may not look.
    there = next(each for each in (path, *path.parents) if os.path.exists(each))
    if not there.is_dir():
        return [f"data: {there} is not a directory; name another place, or move it away"]
    if not os.access(there, os.W_OK | os.X_OK):
        return [
            f"data: {there} cannot be written to by user {os.geteuid()}; make it writable (chown, chmod, "
            "or remount the file system), or name another place"
        ]
    if (foreign := find_foreign_owner(config.data)) is not None:
        return [foreign]
    exposed = [f"{name}: {found}" for name, path in secret_files(config) if (found := find_exposure(path)) is not None]
    return exposed or find_certificate_faults(config)


def public_doors(config: Config) -> list[tuple[str, HostPort]]:
    """Where other machines may reach this node, by setting."""
    doors = (("ingress", config.ingress), ("admin", config.admin))
    return [(name, place) for name, place in doors if not is_loopback(place.host)]


def find_open_doors(config: Config) -> str | None:
    """Why other machines could do everything to a node with these settings, if no setting says that they may."""
    doors = [f"{name} {place}" for name, place in public_doors(config)]
    if config.auth or not doors:
        return None
    return (
        f"auth: other machines can reach this node ({', '.join(doors)}), and anyone who can reach it could do "
        'everything; set auth = "tokens", let it listen on 127.0.0.1, or write auth = "off" if that is what you want'
    )


def advise(config: Config) -> list[str]:
    """Settings that are allowed but probably mistakes."""
    found = []
    founders = founders_of(config)
    for name, path in secret_files(config):
        exposed = find_exposure(path, anywhere=True) or find_foreign_exposure(path)
        if exposed is not None:
            found.append(f"{name}: {exposed}")
    if config.auth == "off":
        found += [
            f"auth: other machines can reach {name} at {place}, and anyone who can reach it may do everything; "
            'set auth = "tokens", or let it listen on 127.0.0.1'
            for name, place in public_doors(config)
        ]
    nodes = {*founders, *config.peers, config.node}
    if config.replication > len(nodes) and (len(nodes) > 1 or config.replication != Config.replication):
        found.append(
            f"replication: {config.replication} replicas of each partition are wanted, and the settings name "
            f"{len(nodes)} node{'s' * (len(nodes) > 1)}: there are fewer replicas until nodes are added; "
            "lower it, or add nodes"
        )
    absent = [name for name in founders if name != config.node and name not in config.peers]
    if absent:
        found.append(
            f"peers: has no address of {', '.join(absent)}, founders of the cluster; the cluster cannot form without them"
        )
    if len(founders) == 2:
        found.append("founders: a cluster of two nodes stops when either node stops; use one node, or at least three")
    elif len(founders) % 2 == 0:
        found.append(f"founders: {len(founders)} nodes tolerate no more failures than {len(founders) - 1} do")
    if config.peers and not config.founders:
        found.append(
            "founders: not set, so they are this node and its peers; name them before another node is added to peers"
        )
    if config.node not in founders:
        found.append(f"founders: {config.node} is not among them: it waits until it is added (holdfast cluster add)")
    if config.peers and (config.advertise or config.peer).host in ("127.0.0.1", "::1", "localhost"):
        elsewhere = [
            name for name, place in config.peers.items() if place.host not in ("127.0.0.1", "::1", "localhost")
        ]
        if elsewhere:
            found.append(f"peer: {', '.join(elsewhere)} cannot reach {config.advertise or config.peer}")
    return found
