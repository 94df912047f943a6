"""Tries to make the replicated log lose data: real processes, real disks, real faults, and a checker.

    python -m holdfast.chaos.log --seconds 600 [--nodes 3|5] [--net proxy|netns] [--seed n] [--out DIR]

Clients write, swap and read registers and append-only sets while nodes are killed, stopped and cut off, members are
replaced and leaders moved. Then everything is repaired. The log must recover by itself, every key is read once more,
all members must hold the same log, and the recorded history must have an order that explains every answer. Exits with
status 0 if no violation was found, else with 1 and an explanation. docs/chaos.md explains the report.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from holdfast.chaos.history import History, Outcome, Recorder, load
from holdfast.chaos.judgement import Report
from holdfast.chaos.linearizable import judge
from holdfast.chaos.log_clients import Client, read_everything
from holdfast.chaos.log_cluster import Connection, LogCluster, Lost, Net, Unreachable
from holdfast.chaos.nemesis import Event, Fault, FaultLog, Schedule, every_kind
from holdfast.chaos.netns import NotPermitted

CLIENTS: Final = 8
GROUPS: Final = 3
TAIL_S: Final = 4.0
LIVENESS_S: Final = 60.0
AGREE_S: Final = 60.0
CHANGE_S: Final = 10.0
PROGRESS_EVERY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Plan:
    seconds: float
    nodes: int = 3
    net: Net = Net.PROXY
    seed: int = 0
    forgetful: bool = False

    def command(self) -> str:
        words = ["python -m holdfast.chaos.log", f"--seconds {self.seconds:g}", f"--nodes {self.nodes}"]
        words += [f"--net {self.net}", f"--seed {self.seed}"] + (["--forgetful"] if self.forgetful else [])
        return " ".join(words)


@dataclass(slots=True)
class Result:
    """The result of a run: `ok` is true if there is no evidence against the log."""

    command: str
    took_s: float = 0.0
    operations: dict[str, dict[str, int]] = field(default_factory=dict)  # kind -> outcome -> count
    keys: int = 0
    judged: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    changes: dict[str, int] = field(default_factory=dict)  # leadership transfers and changes of members, by outcome
    restarts: int = 0
    terms: dict[int, int] = field(default_factory=dict)  # group -> term at the end
    epochs: dict[int, int] = field(default_factory=dict)
    longest_gap_s: float = 0.0  # between two acknowledged operations
    longest_gap_during: str = ""
    alive_after_s: float | None = None  # from the last repair until every group had acknowledged an operation
    violations: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)  # other evidence against the log

    @property
    def ok(self) -> bool:
        return not (self.violations or self.undecided or self.complaints) and self.judged > 0

    def count(self, outcome: Outcome) -> int:
        return sum(counts.get(outcome, 0) for counts in self.operations.values())

    def __str__(self) -> str:
        lines = [f"{'operation':>10} {'ok':>8} {'fail':>6} {'unknown':>8}"]
        for kind, counts in sorted(self.operations.items()):
            lines.append(f"{kind:>10} {counts.get('ok', 0):8} {counts.get('fail', 0):6} {counts.get('info', 0):8}")
        lines.append(f"faults ({sum(self.faults.values())}): " + listed(self.faults))
        lines.append(f"changes ({sum(self.changes.values())}): " + listed(self.changes))
        lines.append(f"{self.restarts} restarts; terms {self.terms}, epochs {self.epochs} at the end, by group")
        lines.append(f"longest time without an acknowledgement: {self.longest_gap_s:.2f} s, {self.longest_gap_during}")
        if self.alive_after_s is not None:
            lines.append(f"all groups acknowledged again {self.alive_after_s:.2f} s after the last repair")
        lines.append(f"judged {self.judged} operations on {self.keys} keys in a run of {self.took_s:.0f} s")
        for kind, found in (("VIOLATION", self.violations), ("UNDECIDED", self.undecided), ("WRONG", self.complaints)):
            lines += [f"{kind}: {text}" for text in found]
        lines.append("nothing lost, nothing contradicted" if self.ok else "THE LOG FAILED THIS RUN")
        lines.append(f"again: {self.command}")
        return "\n".join(lines)


def listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


# -- the run -------------------------------------------------------------------------------------------------------------


async def run(plan: Plan, out: Path, *, show: Callable[[str], None] = lambda _: None) -> Result:
    """Run a plan. History, faults, the nodes' logs and data go to `out`, which must not exist."""
    out.mkdir(parents=True)
    began = time.monotonic()
    result = Result(plan.command())
    faults = FaultLog(out / "faults.jsonl")
    async with LogCluster(out, members=plan.nodes, groups=GROUPS, net=plan.net, forgetful=plan.forgetful) as cluster:
        with Recorder(out / "history.jsonl") as recorder:
            await put_under_stress(plan, cluster, recorder, faults, result, show)
        result.complaints += await disagreements(cluster, result)
        result.complaints += cluster.deaths
        result.restarts = cluster.restarts
    history = load(out / "history.jsonl")
    result.faults = dict(faults.begun())
    count_operations(history, result)
    find_longest_gap(history, faults.events, result)
    take_verdicts(judge(history.operations), result)
    result.took_s = time.monotonic() - began
    (out / "report.json").write_text(json.dumps({"ok": result.ok, **asdict(result)}, indent=2) + "\n")
    return result


async def put_under_stress(
    plan: Plan,
    cluster: LogCluster,
    recorder: Recorder,
    faults: FaultLog,
    result: Result,
    show: Callable[[str], None],
) -> None:
    keys: set[str] = set()
    stop = asyncio.Event()
    clients = [
        Client(f"c{number}", cluster, recorder, random.Random(f"{plan.seed} client {number}"))
        for number in range(CLIENTS)
    ]
    chance = random.Random(f"{plan.seed} faults")
    schedule = Schedule(faults_for(plan.net, chance), chance, faults, on_s=(0.5, 3.0), off_s=(0.5, 2.0))
    async with asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(client.run(keys, stop))
        changing = tasks.create_task(keep_changing(cluster, random.Random(f"{plan.seed} changes"), result))
        telling = tasks.create_task(tell_progress(clients, faults, show))
        try:
            if plan.forgetful:
                await asyncio.sleep(plan.seconds)
            else:
                await schedule.run(cluster, plan.seconds)
            await see_life(cluster, result)
            await asyncio.sleep(TAIL_S)
        finally:
            stop.set()
            changing.cancel()
            telling.cancel()
    last = Client("last", cluster, recorder, random.Random(f"{plan.seed} last"))
    silent = await read_everything(last, sorted(keys))
    last.close()
    result.keys = len(keys)
    result.complaints += [f"key {key!r} could not be read after the end of all faults" for key in silent]


def faults_for(net: Net, chance: random.Random) -> list[Fault]:
    """Routes between namespaces cannot be slow, so faults that need slow links are left out there."""
    every = every_kind(chance)
    return every if net is Net.PROXY else [fault for fault in every if "slow" not in fault.name]


async def tell_progress(clients: Sequence[Client], faults: FaultLog, show: Callable[[str], None]) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(PROGRESS_EVERY_S)
        acknowledged = sum(client.acknowledged for client in clients)
        show(f"{time.monotonic() - began:4.0f} s: {acknowledged} acknowledged, {faults.begun().total()} faults")


async def see_life(cluster: LogCluster, result: Result) -> None:
    """After all faults are repaired, every group must acknowledge again by itself."""
    healed = time.monotonic()
    connections = {name: Connection(cluster.socket(name)) for name in cluster.names}
    for group in cluster.groups:
        while True:
            if time.monotonic() > healed + LIVENESS_S:
                result.complaints.append(
                    f"group {group} acknowledged nothing for {LIVENESS_S:g} s after the last repair"
                )
                break
            leader = cluster.leader_of(group)
            with contextlib.suppress(Unreachable, Lost):
                # Not part of the history: a key that no client uses.
                request = {"do": "write", "group": group, "key": "alive", "argument": healed}
                if leader is not None and "error" not in await connections[leader].ask(request, 1.0):
                    result.alive_after_s = time.monotonic() - healed
                    break
            await asyncio.sleep(0.02)
    for connection in connections.values():
        connection.close()


async def keep_changing(cluster: LogCluster, chance: random.Random, result: Result) -> None:
    """Move leaderships and replace members all the time, during all other faults."""
    changes: Counter[str] = Counter()
    connections = {name: Connection(cluster.socket(name)) for name in cluster.names}
    try:
        while True:
            await asyncio.sleep(chance.uniform(0.5, 2.5))
            group = chance.choice(list(cluster.groups))
            leader, members = cluster.leader_of(group), cluster.members_of(group)
            what, request = wish(cluster, chance, members)
            if leader is None:
                continue
            try:
                answer = await connections[leader].ask({**request, "group": group}, CHANGE_S + 5)
                done = "error" not in answer and answer["result"] is not False
                changes[what if done else f"{what} refused"] += 1
            except (Unreachable, Lost):
                changes[f"{what} unanswered"] += 1
            result.changes = dict(changes)
    finally:
        for connection in connections.values():
            connection.close()


def wish(cluster: LogCluster, chance: random.Random, members: Sequence[str]) -> tuple[str, dict[str, object]]:
    """A leadership transfer or a change of one member, such that the group keeps its size or has one more."""
    if chance.random() < 0.4:
        return "transfer", {"do": "transfer", "to": chance.choice(list(members))}
    outside = [name for name in cluster.names if name not in members]
    what = "remove" if not outside else chance.choice(("add", "replace"))
    after = set(members)
    if what != "add":
        after.remove(chance.choice(sorted(after)))
    if what != "remove":
        after.add(chance.choice(outside))
    return what, {"do": "change", "members": sorted(after), "timeout_s": CHANGE_S}


async def disagreements(cluster: LogCluster, result: Result) -> list[str]:
    """Check that all members of a group eventually hold the same commands in the same order."""
    found = []
    for group in cluster.groups:
        deadline = time.monotonic() + AGREE_S
        while (difference := await difference_in(cluster, group, result)) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        found += [difference] if difference else []
    return found


async def difference_in(cluster: LogCluster, group: int, result: Result) -> str | None:
    views = await cluster.statuses(group)
    members = cluster.members_of(group)
    if not set(members) <= set(views):
        return f"group {group}: {sorted(set(members) - set(views))} of its members do not answer"
    result.terms[group] = max(view["term"] for view in views.values())
    result.epochs[group] = max(view["epoch"] for view in views.values())
    states: dict[tuple[Any, ...], list[str]] = {}
    for name in members:
        view = views[name]
        states.setdefault((view["epoch"], view["machine_applied"], view["digest"]), []).append(name)
    if len(states) == 1:
        return None
    told = "; ".join(
        f"{', '.join(names)}: epoch {epoch}, {applied} applied, digest {digest}"
        for (epoch, applied, digest), names in sorted(states.items())
    )
    return f"group {group}: its members hold different logs: {told}"


# -- the report ----------------------------------------------------------------------------------------------------------


def count_operations(history: History, result: Result) -> None:
    for operation in history.operations:
        counts = result.operations.setdefault(operation.kind.value, {})
        counts[operation.outcome.value] = counts.get(operation.outcome.value, 0) + 1


def find_longest_gap(history: History, events: Sequence[Event], result: Result) -> None:
    times = sorted(
        operation.returned
        for operation in history.operations
        if operation.outcome is Outcome.OK and operation.returned is not None
    )
    if len(times) < 2:
        return
    gap, since = max((later - earlier, earlier) for earlier, later in pairwise(times))
    result.longest_gap_s = gap
    begun = [event for event in events if event.event == "begin" and since - 1.0 <= event.at <= since + gap]
    result.longest_gap_during = (
        "during " + "; ".join(event.target for event in begun) if begun else "with no fault near"
    )


def take_verdicts(report: Report, result: Result) -> None:
    result.judged = report.judged
    result.violations = [violation.explanation for violation in report.violations]
    result.undecided = [f"key {it.key!r}: gave up after {it.work} steps of search" for it in report.gave_up]


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults on real processes of the replicated log, and a judge.")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults happen (default 600)")
    parser.add_argument("--nodes", type=int, choices=(3, 5), default=3, help="members of each group (default 3)")
    parser.add_argument(
        "--net", type=Net, choices=list(Net), default=Net.PROXY, help="how links are cut (default proxy)"
    )
    parser.add_argument("--seed", type=int, help="seed of all choices; timing still varies (default: random)")
    parser.add_argument("--out", type=Path, help="a new folder that keeps history, faults, logs, data and report")
    parser.add_argument("--forgetful", action="store_true", help="plant a fault instead, to see that it is found")
    options = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    plan = Plan(options.seconds, options.nodes, options.net, seed, options.forgetful)
    print(f"{plan.seconds:g} s of faults on {plan.nodes} members and a spare, {GROUPS} groups, seed {seed}", flush=True)
    out = options.out or Path(tempfile.mkdtemp(prefix="holdfast-chaos-")) / "run"
    try:
        result = asyncio.run(run(plan, out, show=lambda line: print(line, flush=True)))
    except NotPermitted as error:
        sys.exit(f"this machine has no network namespaces for us ({error}); use --net proxy")
    print(result)
    if result.ok and options.out is None:
        shutil.rmtree(out.parent)
    else:
        print(f"everything recorded is in {out}")
    sys.exit(0 if result.ok else 1)


if __name__ == "__main__":
    main()
