"""One chaos run on a whole cluster: workloads, faults, repair, and the verdict.

The seed determines the faults, their times and victims, and the clients' requests; the cluster's reaction depends on
real time. So a seed repeats the plan, not the run. `python -m holdfast.chaos` is the command; docs/chaos.md explains
its report.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from holdfast.chaos import oracle, replicas, report, verdict
from holdfast.chaos.cluster import SNAPSHOT_SETTINGS, NodeCluster
from holdfast.chaos.faults import Family, Turn, a_round, shuffled
from holdfast.chaos.history import Kind, Recorder, load
from holdfast.chaos.linearizable import judge
from holdfast.chaos.outage import Outage
from holdfast.chaos.verdict import Found, Weather, Window, percentile
from holdfast.chaos.workloads import Ask, Asker, Seen, Workers

OFF_S: Final = (0.5, 2.5)
BACK_S: Final = 20.0  # How long the next fault waits for all nodes and handlers to be back.
STUCK_S: Final = 60.0
CAUGHT_UP_S: Final = 30.0
STORE_HEALED_S: Final = 120.0  # A failed upload is retried after 30 s, then after 60 s.
OPERATIONS_S: Final = 25.0
TAIL_S: Final = 2.0
LATE_S: Final = 3.0
SAMPLE_S: Final = 0.1
#: If this process got no CPU for this long, a leader may not have either: half a second of silence starts an election.
STARVED_S: Final = 0.3
PROGRESS_EVERY_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Plan:
    seconds: float
    nodes: int = 3
    seed: int = 0
    only: str | None = None  # faults whose name contains this
    replication: int | None = None  # None: every node has a replica of every partition
    s3: bool = True  # if a server is available

    def command(self) -> str:
        replication = f" --replication {self.replication}" if self.replication else ""
        only = f" --only {self.only!r}" if self.only else ""
        only += "" if self.s3 else " --no-s3"
        return f"python -m holdfast.chaos --seconds {self.seconds:g} --nodes {self.nodes}{replication} --seed {self.seed}{only}"


@dataclass(frozen=True, slots=True)
class Gap:
    """Time from a fault on a leader until a request to one of its partitions, sent at once by another node, was answered."""

    kind: str  # "kill", "stop", "cut"
    fault: str
    partition: int
    seconds: float


@dataclass(slots=True)
class Result:
    command: str
    seed: int
    nodes: int
    took_s: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    operations: dict[str, int] = field(default_factory=dict)  # answered, by workload
    effects: int = 0
    repeated: int = 0  # steps that ran again because their attempt was lost before its journal had them
    repeated_by: dict[str, int] = field(default_factory=dict)  # the same by the fault that was nearest
    judged: int = 0  # operations on registers
    equal_replicas: int = 0  # whose state was compared with another one's at the same entry, when all was over
    sound_snapshots: int = 0  # found on the nodes' disks, and read to their end
    faults: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # faults that this machine cannot have, and why
    kills: int = 0
    aimed: dict[str, dict[str, int]] = field(default_factory=dict)  # fault -> "hit" or "missed" its moment, how often
    died_of_a_full_disk: int = 0
    gaps: list[Gap] = field(default_factory=list)
    latency_s: dict[str, float] = field(default_factory=dict)  # of requests answered by the node first asked
    slowest: dict[str, Any] = field(default_factory=dict)
    slowest_of_all: dict[str, Any] = field(default_factory=dict)  # those included whose node was killed or silent
    latest_timer_s: float = 0.0
    excused: dict[str, int] = field(default_factory=dict)
    healed_s: float | None = None  # from the last repair until all was answered and nothing was in flight
    violations: dict[str, list[str]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.violations and sum(self.operations.values()) > 0

    def gap_figures(self) -> dict[str, dict[str, float]]:
        figures = {}
        for kind in ("kill", "stop", "cut"):
            values = [gap.seconds for gap in self.gaps if gap.kind == kind]
            if values:
                figures[kind] = {
                    "count": len(values),
                    "p50_s": round(percentile(values, 0.5), 3),
                    "p99_s": round(percentile(values, 0.99), 3),
                    "worst_s": round(max(values), 3),
                }
        return figures

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "gap_figures": self.gap_figures(), **asdict(self)}

    def __str__(self) -> str:
        total = sum(self.operations.values())
        lines = [f"{total} operations in {self.took_s:.0f} s: {listed(self.operations)}"]
        by = f": {listed(self.repeated_by)}" if self.repeated else ""
        lines.append(
            f"{self.effects} effects outside, {self.repeated} of them repeated by attempts lost to a fault{by}"
        )
        lines.append(f"{sum(self.faults.values())} faults: {listed(self.faults)}; {self.kills} processes killed")
        if self.aimed:
            lines.append("aimed kills: " + "; ".join(f"{name}: {listed(each)}" for name, each in self.aimed.items()))
        if self.died_of_a_full_disk:
            lines.append(f"a node ended {self.died_of_a_full_disk} times for want of the last byte of its disk")
        lines += [f"left out: {name}: {why}" for name, why in self.left_out.items()]
        lines.append(
            f"{self.equal_replicas} replicas are equal, {self.sound_snapshots} snapshots on their disks are whole"
        )
        for kind, figures in self.gap_figures().items():
            lines.append(
                f"gap after a leader's {kind}: p50 {figures['p50_s']:.3f} s, p99 {figures['p99_s']:.3f} s, "
                f"worst {figures['worst_s']:.3f} s, of {figures['count']:.0f} partitions"
            )
        lines.append(
            "requests answered by the node first asked: "
            + ", ".join(f"{name} {value * 1000:.0f} ms" for name, value in self.latency_s.items())
        )
        lines.append(f"slowest of those: {told(self.slowest)}")
        lines.append(f"slowest of all: {told(self.slowest_of_all)}")
        lines.append(f"tries that failed with an excuse: {listed(self.excused)}")
        if self.healed_s is not None:
            lines.append(f"nothing in flight {self.healed_s:.1f} s after the last repair")
        for promise, sentences in self.violations.items():
            lines += [f"VIOLATION: {promise}: {sentence}" for sentence in sentences[: verdict.SHOWN_MAX]]
            if len(sentences) > verdict.SHOWN_MAX:
                lines.append(f"VIOLATION: {promise}: and {len(sentences) - verdict.SHOWN_MAX} more")
        count = sum(len(sentences) for sentences in self.violations.values())
        lines.append("0 violations" if self.ok else f"THE CLUSTER FAILED THIS RUN: {count} violations")
        lines.append(f"again: {self.command}")
        return "\n".join(lines)


def listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def told(slowest: dict[str, Any]) -> str:
    if not slowest:
        return "none"
    return f"{slowest['seconds']:.2f} s ({slowest['mark']} at {slowest['node']}, during: {slowest['during']})"


class Soak:
    """One run. Everything it records goes to `out`."""

    def __init__(self, plan: Plan, out: Path, show: Callable[[str], None] = lambda _: None) -> None:
        self.plan = plan
        self.out = out
        self.show = show
        self.seen = Seen()
        self.windows: list[Window] = []
        self.starved: list[Window] = []
        self.weather: list[Weather] = []
        self.gaps: list[Gap] = []
        self.counts: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.messages: dict[str, list[str]] = {}
        self.stuck: list[str] = []
        self.outages: list[Outage] = []
        self.found: dict[str, list[str]] = {}
        self.lives: dict[str, tuple[float, float | None]] = {}
        self._probes: set[asyncio.Task[None]] = set()
        self._now_broken = ""
        self._began = time.monotonic()
        self._healed = 0.0

    async def run(self) -> Result:
        self.out.mkdir(parents=True)
        result = Result(self.plan.command(), self.plan.seed, self.plan.nodes)
        began = time.monotonic()
        async with NodeCluster(
            self.out,
            nodes=self.plan.nodes,
            replication=self.plan.replication,
            small_disk=True,
            shared_store=self.plan.s3,
            settings=SNAPSHOT_SETTINGS,
        ) as cluster:
            self.outages, self.found, self.lives = cluster.outages, cluster.found, cluster.lives
            if cluster.small_disk is None:
                result.left_out["full disk"] = cluster.no_small_disk
            if not cluster.has_store:
                result.left_out["S3"] = cluster.no_store
            asker = Asker(cluster, self.seen)
            try:
                with Recorder(self.out / "history.jsonl") as recorder:
                    await self._put_under_stress(cluster, asker, recorder)
            finally:
                await asyncio.gather(*self._probes, return_exceptions=True)
                await asker.close()
            result.healed_s = None if self.stuck else time.monotonic() - self._healed
            self.stuck += await self._catch_up(cluster)
            self._look_at_store(cluster)
            await cluster.end_processes()
            self._look_at_disks(cluster, result)
            deaths, result.kills = list(cluster.deaths), cluster.kills
            result.died_of_a_full_disk = cluster.died_of_a_full_disk
            result.aimed = {name: dict(counts) for name, counts in cluster.aimed.items()}
        result.began, result.ended = self._began, time.monotonic()
        self._judge(result, deaths)
        result.took_s = time.monotonic() - began
        self._write(result)
        return result

    # -- the run -----------------------------------------------------------------------------------------------------

    async def _put_under_stress(self, cluster: NodeCluster, asker: Asker, recorder: Recorder) -> None:
        self._began = time.monotonic()
        workers = Workers(asker, recorder, self.plan.seed)
        async with asyncio.TaskGroup() as tasks:
            working = workers.start(tasks)
            beside = [tasks.create_task(self._sample(cluster)), tasks.create_task(self._tell())]
            try:
                await asyncio.sleep(TAIL_S)
                await self._keep_breaking(cluster, asker)
                self._healed = time.monotonic()
                await asyncio.gather(*(cluster.answers(name) for name in cluster.names))
                await asyncio.sleep(TAIL_S)
            finally:
                workers.stop.set()
                self._now_broken = "nothing: waiting for the last answers"
                _, slow = await asyncio.wait(working, timeout=STUCK_S)
                for task in [*slow, *beside]:
                    task.cancel()
        self.stuck += verdict.unanswered(self.seen.asks, self._healed)
        self.stuck += await self._in_flight(cluster)
        await self._read_everything(cluster, asker, workers)

    async def _keep_breaking(self, cluster: NodeCluster, asker: Asker) -> None:
        chance = random.Random(f"{self.plan.seed} faults")
        finish = self._began + self.plan.seconds
        # A short run does not spend most of its time in one long silence.
        every = a_round(cluster, chance, pause_s_max=30.0 if self.plan.seconds >= 600 else 6.0)
        if self.plan.only is not None:
            every = [turn for turn in every if self.plan.only in turn.fault.name]
        turns: list[Turn] = []
        while True:
            await self._all_back(cluster)
            await asyncio.sleep(chance.uniform(*OFF_S))
            if time.monotonic() >= finish or not every:
                return
            turns = turns or shuffled(every, chance)
            # Operations take time, so a run that is nearly over chooses something shorter.
            late = finish - time.monotonic() < OPERATIONS_S
            at = next((at for at, turn in enumerate(turns) if not (late and turn.family is Family.MEMBERS)), 0)
            await self._strike(cluster, asker, turns.pop(at), chance)

    async def _all_back(self, cluster: NodeCluster) -> None:
        deadline = time.monotonic() + BACK_S
        while not await self._is_calm(cluster) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def _is_calm(self, cluster: NodeCluster) -> bool:
        """Whether recovery can be measured: without handlers no request is answered, regardless of leaders."""
        return not any(cluster.is_out(name) for name in cluster.names) and await cluster.handlers_answer()

    async def _strike(self, cluster: NodeCluster, asker: Asker, turn: Turn, chance: random.Random) -> None:
        fault = turn.fault
        led = {name: cluster.views.led_by(name) for name in cluster.names}
        calm = await self._is_calm(cluster)
        since = time.monotonic()
        self._now_broken = fault.name
        outages = len(cluster.outages)
        try:
            await fault.begin(cluster)
            self._now_broken = fault.describe()
            if calm and fault.instant:
                self._measure_gaps(cluster, asker, fault.name, since, cluster.outages[outages:], led)
            await asyncio.sleep(turn.draw_s(chance))
        finally:
            await fault.end(cluster)
            self._now_broken = ""
            window = Window(
                fault.name, fault.describe(), since, time.monotonic(), excuses=fault.excuses, family=turn.family
            )
            self.windows.append(window)
            with (self.out / "faults.jsonl").open("a") as file:
                file.write(json.dumps(asdict(window)) + "\n")
        at = since - self._began
        self.show(f"{at:6.1f} s  {window.until - window.since:5.1f} s  {fault.name}: {window.target}")

    def _measure_gaps(
        self,
        cluster: NodeCluster,
        asker: Asker,
        fault: str,
        since: float,
        outages: list[Outage],
        led: dict[str, list[int]],
    ) -> None:
        """Immediately send a request through another node to every partition that lost its leader."""
        lonely = cluster.without_majority()
        if outages and all(outage.until is None for outage in outages):
            victims = {outage.node for outage in outages}
            since = min(outage.since for outage in outages)
            kind = "stop" if any(outage.why == "stopped" for outage in outages) else "kill"
        elif not outages and lonely:
            victims, kind = set(lonely), "cut"
        else:
            return
        others = [name for name in cluster.names if name not in victims and name not in lonely]
        if len(others) < len(cluster.names) // 2 + 1 or "+" in fault:
            return  # Without a majority nothing can continue, and with two faults the cause is ambiguous.
        members = cluster.views.members()
        for victim in victims:
            for partition in led[victim]:
                replicas = members.get(partition, cluster.names)
                if len(victims.intersection(replicas)) * 2 >= len(replicas):
                    continue  # Few replicas on many nodes: this partition has lost its majority.
                node = others[partition % len(others)]
                probe = asyncio.create_task(self._probe(asker, node, partition, kind, fault, since))
                self._probes.add(probe)
                probe.add_done_callback(self._probes.discard)

    async def _probe(self, asker: Asker, node: str, partition: int, kind: str, fault: str, since: float) -> None:
        path = f"/register/{asker.cluster.key_in('register', partition)}/read"
        with contextlib.suppress(ConnectionError):  # It is recorded among the clients' answers.
            answered = await asker.ask_once(node, path)
            self.gaps.append(Gap(kind, fault, partition, answered - since))

    async def _sample(self, cluster: NodeCluster) -> None:
        while True:
            lonely = cluster.without_majority()
            if not self.weather or self.weather[-1].lonely != lonely:
                self.weather.append(Weather(time.monotonic(), lonely))
            slept = time.monotonic()
            await asyncio.sleep(SAMPLE_S)
            woke = time.monotonic()
            if woke - slept > SAMPLE_S + STARVED_S:
                self.starved.append(Window("a busy machine", f"no core for {woke - slept:.1f} s", slept, woke))

    async def _tell(self) -> None:
        before = 0
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            done = sum(ask.answered is not None for ask in self.seen.asks)
            rate = (done - before) / PROGRESS_EVERY_S
            before = done
            now = f"; now: {self._now_broken}" if self._now_broken else ""
            self.show(f"{time.monotonic() - self._began:6.1f} s  {done} answered, {rate:.0f}/s{now}")

    async def _in_flight(self, cluster: NodeCluster) -> list[str]:
        """Invocations that have not completed: sent ones are waited for, stuck ones are evidence."""
        deadline = time.monotonic() + STUCK_S
        while True:
            page = await cluster.ask_admin("/invocations?status=active&limit=50")
            active = page["invocations"]
            if not active:
                return []
            if time.monotonic() > deadline:
                return [f"an invocation has not completed {STUCK_S:g} s after the last repair: {it}" for it in active]
            await asyncio.sleep(0.2)

    async def _catch_up(self, cluster: NodeCluster) -> list[str]:
        """Check that every replica catches up once there are no more requests."""
        deadline = time.monotonic() + CAUGHT_UP_S
        while (behind := cluster.views.behind(cluster.names)) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return [f"{sentence}, {CAUGHT_UP_S:g} s after the last answer" for sentence in behind]

    def _look_at_store(self, cluster: NodeCluster) -> None:
        since_s = time.monotonic() - max(cluster.store_failed_at, self._began)
        if since_s > STORE_HEALED_S:
            for name, error in cluster.views.store_errors().items():
                cluster.broken("the store is used again", f"{name}, {since_s:.0f} s after its last fault: {error}")

    def _look_at_disks(self, cluster: NodeCluster, result: Result) -> None:
        places = {name: cluster.data(name) for name in cluster.names}
        compared = replicas.compare(places)
        for sentence in compared.wrong:
            cluster.broken("replicas are equal", sentence)
        unsound, result.sound_snapshots = replicas.unsound_snapshots(places)
        for sentence in unsound:
            cluster.broken("snapshots are whole", sentence)
        result.equal_replicas = compared.equal

    async def _read_everything(self, cluster: NodeCluster, asker: Asker, workers: Workers) -> None:
        chance = random.Random(f"{self.plan.seed} last")

        async def read(path: str) -> Any:
            ask = Ask("last", path, chance.choice(list(cluster.names)), time.monotonic())
            return await asyncio.wait_for(asker.ask(ask, path), STUCK_S)

        try:
            for key in list(self.seen.counts):
                self.counts[key] = await read(f"/counter/{key}/count")
            for key in list(self.seen.leaves):
                self.sizes[key] = await read(f"/leaf/{key}/size")
            for key in list(self.seen.inboxes):
                self.messages[key] = await read(f"/inbox/{key}/messages")
            for key in sorted(self.seen.registers):
                await asyncio.wait_for(workers.operate_register(Kind.READ, key, chance), STUCK_S)
        except TimeoutError:
            self.stuck.append("a key could not be read after the end of all faults")

    # -- the verdict -------------------------------------------------------------------------------------------------

    def _judge(self, result: Result, deaths: list[str]) -> None:
        seen, faults = self.seen, [window for window in self.windows if window.excuses]
        effects = oracle.load(self.out / "oracle.jsonl")
        found = Found()
        causes = sorted([*faults, *self.starved], key=lambda window: window.since)
        repeated, repeated_by = verdict.repeated_steps(effects, causes)
        result.repeated, result.repeated_by = repeated_by.total(), dict(repeated_by)
        found.add("no journaled step runs again", repeated)
        found.add("no accepted request is lost", verdict.missing_steps(effects, seen.flows))
        found.add("no request is carried out twice", verdict.doubled_invocations(effects))
        found.add("no request is carried out twice", verdict.different_answers(seen.retries))
        found.add("one writer per key", verdict.two_writers(effects))
        found.add("counters are exact", verdict.wrong_counts(seen.counts, self.counts))
        found.add("calls happen once", verdict.wrong_sizes(seen.leaves, self.sizes))
        found.add("messages arrive once and in order", verdict.wrong_inboxes(seen.inboxes, self.messages))
        found.add("no timer is early", verdict.early_timers(seen.naps))
        found.add("no timer is lost", verdict.late_timers(seen.naps, causes, late_s=LATE_S))
        errors, excused = verdict.errors_of_live_nodes(
            seen.failed, self.outages, self.weather, faults, time.monotonic()
        )
        found.add("no client error from a live node", errors)
        found.add("nothing is stuck", self.stuck)
        found.add("no process ends by itself", deaths)
        found.add("answers make sense", seen.wrong)
        for promise, sentences in self.found.items():
            found.add(promise, sentences)
        registers = judge(load(self.out / "history.jsonl").operations)
        found.add("registers are linearizable", [it.explanation for it in registers.violations])
        found.add("registers are linearizable", [f"key {it.key!r}: undecided" for it in registers.gave_up])
        result.violations = found.by_promise
        result.judged = registers.judged
        result.effects = len(effects)
        result.excused = dict(excused)
        result.gaps = self.gaps
        result.faults = dict(Counter(window.name for window in self.windows))
        self._measure(result)

    def _measure(self, result: Result) -> None:
        answered = [ask for ask in self.seen.asks if ask.answered is not None]
        result.operations = dict(Counter(ask.work for ask in answered))
        first = [ask for ask in answered if ask.tries == 1]
        times = [ask.took_s for ask in first]
        result.latency_s = {name: percentile(times, share) for name, share in (("p50", 0.5), ("p99", 0.99))}
        result.slowest = self._slowest(first)
        result.slowest_of_all = self._slowest(answered)
        late = [nap["ended"] - nap["began"] - nap["seconds"] for nap in self.seen.naps if nap["chosen"] == "late"]
        result.latest_timer_s = max(late, default=0.0)

    def _slowest(self, asks: list[Ask]) -> dict[str, Any]:
        if not asks:
            return {}
        slowest = max(asks, key=lambda ask: ask.took_s)
        assert slowest.answered is not None
        near = verdict.during(self.windows, slowest.asked, slowest.answered, aftermath_s=1.0)
        return {
            "seconds": slowest.took_s,
            "mark": slowest.mark,
            "node": slowest.node,
            "during": "; ".join(window.target for window in near) or "no fault",
        }

    def _write(self, result: Result) -> None:
        (self.out / "report.json").write_text(json.dumps(result.to_json(), indent=2) + "\n")
        with (self.out / "asks.jsonl").open("w") as file:
            file.writelines(json.dumps(asdict(ask)) + "\n" for ask in self.seen.asks)
        with (self.out / "failed.jsonl").open("w") as file:
            file.writelines(json.dumps(asdict(failed)) + "\n" for failed in self.seen.failed)
        page = report.page(
            title=f"Chaos run, seed {result.seed}",
            subtitle=f"{result.nodes} nodes under load for {result.ended - result.began:.0f} s. Again: {result.command}",
            ok=result.ok,
            cards=self._cards(result),
            summary=str(result),
            began=result.began,
            ended=result.ended,
            asks=self.seen.asks,
            windows=self.windows,
            outages=self.outages,
            lives=self.lives,
            violations=result.violations,
            gaps=result.gap_figures(),
            aimed=result.aimed,
            left_out=result.left_out,
        )
        (self.out / "report.html").write_text(page)

    @staticmethod
    def _cards(result: Result) -> list[report.Card]:
        cards = [
            report.Card(f"{sum(result.operations.values()):,}", "operations answered"),
            report.Card(str(sum(result.faults.values())), f"faults, of {len(result.faults)} kinds"),
            report.Card(str(result.kills), "processes killed"),
            report.Card(f"{result.effects:,}", f"effects outside, {result.repeated} repeated"),
        ]
        for kind, figures in result.gap_figures().items():
            cards.append(report.Card(f"{figures['worst_s'] * 1000:.0f} ms", f"worst gap, leader {kind}"))
        slowest = result.slowest.get("seconds", 0.0)
        cards.append(report.Card(f"{slowest:.2f} s", "slowest answer of the node first asked"))
        cards.append(report.Card(str(result.equal_replicas), "replicas compared, equal"))
        return cards
