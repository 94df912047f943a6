"""What `holdfast top` shows, as data: two readings of the cluster, one after the other, and what follows from them.

Nodes count; rates and percentiles are the differences between two readings. A node that was started in between has begun to
count anew, and is left out for once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from holdfast.cli.deployments import health_of
from holdfast.cli.top_readings import COUNTED_MAX, Reading

#: Entries that a follower may lack without being a problem.
BEHIND: Final = 1000
_EVER: Final = ("succeeded", "failed", "cancelled", "killed")
_NOW: Final = ("running", "queued", "suspended", "scheduled", "backing-off", "paused")
#: Names of histograms that nodes tell, and what they are called here.
LATENCIES: Final = {"accept": "accept", "handler": "handler"}


def make_frame(before: Reading | None, now: Reading) -> dict[str, Any]:
    """`before` None: there are no rates yet."""
    seconds = now.at_s - before.at_s if before is not None else None
    cluster = now.cluster
    return {
        "at": now.at,
        "cluster": cluster["cluster"],
        "asked": cluster["answered_by"],
        "interval_s": round(seconds, 3) if seconds is not None else None,
        "notes": now.notes,
        "nodes": _nodes(before.cluster if before is not None else None, cluster, seconds),
        "partitions": {"count": len(cluster["partitions"]), "problems": _problems(cluster)},
        "invocations": now.statistics and now.statistics["totals"]["by_status"],
        "throughput": _throughput(before, now, seconds),
        "latency": _latency(before.cluster if before is not None else None, cluster),
        "attention": _attention(now),
        "endpoints": _endpoints(now.deployments),
        "services": _services(before, now, seconds),
    }


def _nodes(before: Mapping[str, Any] | None, cluster: Mapping[str, Any], seconds: float | None) -> list[dict[str, Any]]:
    old = {node["name"]: node for node in before["nodes"]} if before is not None else {}
    leads = [each["leader"] for each in cluster["partitions"]]
    return [
        {
            "name": node["name"],
            "condition": condition(node),
            "version": node.get("version"),
            "uptime_s": node.get("uptime_s"),
            "cpu_percent": _cpu(old.get(node["name"]), node, seconds),
            "disk": node.get("disk"),
            "memory_bytes": node.get("memory_bytes"),
            "loop_lag_ms": node.get("loop_lag_ms"),
            "leads": leads.count(node["name"]),
            "replicas": node["replicas"],
            "error": node["error"],
        }
        for node in cluster["nodes"]
        if node["state"] != "removed" or node["replicas"]
    ]


def condition(node: Mapping[str, Any]) -> str:
    """In a word. An older node knows only the state of membership, and whether it is connected."""
    found = node.get("condition") or ("ok" if node["connected"] else "unreachable")
    return str(node["state"] if found == "ok" else found)


def _cpu(before: Mapping[str, Any] | None, node: Mapping[str, Any], seconds: float | None) -> float | None:
    """In percent of one processor."""
    spent, earlier = node.get("cpu_ms"), before and before.get("cpu_ms")
    if not seconds or spent is None or earlier is None or spent < earlier:
        return None
    return round(float(spent - earlier) / seconds / 10, 1)


def _problems(cluster: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each problem once, with its partitions."""
    up = {node["name"] for node in cluster["nodes"] if node["connected"]}
    wanted = min(cluster["replication"], sum(node["state"] in ("active", "draining") for node in cluster["nodes"]))
    found: dict[str, list[int]] = {}
    for partition in cluster["partitions"]:
        for problem in _problems_of(partition, up, wanted):
            found.setdefault(problem, []).append(partition["partition"])
    return [{"problem": problem, "partitions": numbers} for problem, numbers in found.items()]


def _problems_of(partition: Mapping[str, Any], up: set[str], wanted: int) -> Iterable[str]:
    leader = partition["leader"]
    if leader is None:
        yield "no leader"
    elif leader not in up:
        yield f"the leader {leader} does not answer, and there is no other yet"
    members = partition["members"]
    if gone := [name for name in members if name not in up]:
        yield f"{len(members) - len(gone)} of {len(members)} replicas answer: not that of {', '.join(gone)}"
    if len(members) < wanted:
        yield f"{len(members)} of {wanted} replicas"
    lags = {name: lag for name, lag in (partition.get("follower_lag") or {}).items() if lag > BEHIND and name in up}
    if lags:
        yield f"{', '.join(sorted(lags))} lacks more than {BEHIND} entries"
    if partition.get("apply_lag", 0) > BEHIND:
        yield f"more than {BEHIND} committed entries wait to be applied"
    if error := (partition.get("snapshot") or {}).get("error"):
        yield f"snapshot: {error}"


def _rates(before: Mapping[str, Any], now: Mapping[str, Any], seconds: float) -> dict[str, float]:
    def per_s(*names: str) -> float:
        more = float(sum(now[name] - before.get(name, 0) for name in names))
        return round(max(more, 0.0) / seconds, 2)

    return {
        "started_per_s": per_s("invoked"),
        "completed_per_s": per_s(*_EVER),
        "succeeded_per_s": per_s("succeeded"),
        "failed_per_s": per_s("failed"),
        "attempts_per_s": per_s("attempts"),
        "steps_per_s": per_s("steps"),
    }


def _throughput(before: Reading | None, now: Reading, seconds: float | None) -> dict[str, float] | None:
    if before is None or before.statistics is None or now.statistics is None or not seconds:
        return None
    return _rates(before.statistics["totals"], now.statistics["totals"], seconds)


def _services(before: Reading | None, now: Reading, seconds: float | None) -> list[dict[str, Any]] | None:
    if now.statistics is None:
        return None
    old = before.statistics["services"] if before is not None and before.statistics is not None else None
    rows = []
    for name, figures in now.statistics["services"].items():
        statuses = figures["by_status"]
        rates = _rates(old.get(name, {}), figures, seconds) if old is not None and seconds else None
        rows.append(
            {
                "name": name,
                "active": sum(statuses[each] for each in _NOW),
                **{each.replace("-", "_"): statuses[each] for each in _NOW},
                "started_per_s": rates and rates["started_per_s"],
                "completed_per_s": rates and rates["completed_per_s"],
                "failed_per_s": rates and rates["failed_per_s"],
            }
        )
    return rows


# -- latency


def _latency(before: Mapping[str, Any] | None, cluster: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of all nodes together, between the two readings."""
    if before is None:
        return None
    old = {node["name"]: node.get("latency") or {} for node in before["nodes"]}
    found: dict[str, Any] = {}
    for name, shown in LATENCIES.items():
        bounds: Sequence[float] = ()
        counts: list[int] = []
        for node in cluster["nodes"]:
            histogram = (node.get("latency") or {}).get(name)
            earlier = old.get(node["name"], {}).get(name)
            if histogram is None or earlier is None or earlier["bounds_s"] != histogram["bounds_s"]:
                continue
            new = [late - early for late, early in zip(histogram["counts"], earlier["counts"], strict=True)]
            if min(new) < 0 or (counts and list(bounds) != histogram["bounds_s"]):
                continue
            bounds = histogram["bounds_s"]
            counts = [one + other for one, other in zip(counts or [0] * len(new), new, strict=True)]
        found[shown] = {
            "count": sum(counts),
            "p50_ms": percentile_ms(bounds, counts, 0.5),
            "p99_ms": percentile_ms(bounds, counts, 0.99),
        }
    return found


def percentile_ms(bounds_s: Sequence[float], counts: Sequence[int], part: float) -> float | None:
    """As if observations were spread evenly in their bucket. Above all bounds, the last bound is the most that is known."""
    total = sum(counts)
    if not total:
        return None
    wanted, below, low = part * total, 0, 0.0
    for bound, count in zip(bounds_s, counts, strict=False):
        if count and below + count >= wanted:
            return round(1000 * (low + (bound - low) * (wanted - below) / count), 2)
        below += count
        low = bound
    return round(1000 * low, 2)


# -- what needs a human


def _attention(now: Reading) -> dict[str, Any]:
    statuses = now.statistics["totals"]["by_status"] if now.statistics is not None else {}
    return {
        "nodes": [each["name"] for each in now.cluster["nodes"] if condition(each) in ("unreachable", "disk full")],
        "deployments": [each["id"] for each in _endpoints(now.deployments) or () if each["problem"]],
        "paused": statuses.get("paused"),
        "backing_off": statuses.get("backing-off"),
        "in_doubt": now.in_doubt,
        "more_in_doubt": now.in_doubt is not None and now.in_doubt >= COUNTED_MAX,
        "approvals": now.approvals,
        "more_approvals": now.approvals is not None and now.approvals >= COUNTED_MAX,
        "pauses": now.cluster.get("pauses") or [],
        "changing": now.cluster.get("changing"),
        # Pauses are shown by themselves.
        "warnings": [each for each in now.warnings if "`holdfast resume" not in each],
    }


def _endpoints(deployments: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if deployments is None:
        return None
    return [
        {
            "id": each["id"],
            "uri": each["uri"],
            "status": (each.get("health") or {}).get("status"),
            "problem": None if (text := health_of(each)) in ("ok", "idle", None) else text,
            "in_flight": each["in_flight"],
        }
        for each in deployments
    ]
