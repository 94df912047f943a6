"""`make demo`: three nodes on this machine, orders coming in, and every few seconds the leader is killed.

    python -m holdfast.chaos.demo [--seconds 60]

All figures are counted outside the cluster: the handlers' effects in the oracle's file, the clients' answers here.
Without a terminal it prints lines. Ctrl-C ends the demo early, with a verdict on what happened so far; a second Ctrl-C
ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from holdfast.chaos import verdict
from holdfast.chaos.cluster import NodeCluster
from holdfast.chaos.oracle import Effect
from holdfast.chaos.verdict import Weather, Window, percentile
from holdfast.chaos.workloads import Ask, Asker, Seen

CLIENTS: Final = 12
THINK_S: Final = 0.05
FIRST_KILL_S: Final = 4.0
KILL_EVERY_S: Final = 4.0
DOWN_S: Final = 1.0
PARTITIONS: Final = 8
WIDTH_MAX: Final = 110
NARROW: Final = 84  # Below this width, less is shown per node.
REFRESH_S: Final = 0.25
LINE_EVERY_S: Final = 5.0
LAST_ANSWERS_S: Final = 60.0
BLOCKS: Final = " ▁▂▃▄▅▆▇█"


class Ledger:
    """The oracle's file, read as it grows: which steps ran, and which should not have."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._stories: dict[str, list[Effect]] = defaultdict(list)
        self._wrong: dict[str, int] = {}
        self.effects: list[Effect] = []
        self.receipts: set[str] = set()

    def read(self, kills: list[Window]) -> None:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._offset += len(whole)
        changed = set()
        for line in whole.splitlines():
            effect = Effect(*json.loads(line))
            self.effects.append(effect)
            self.receipts.add(effect.nonce)
            self._stories[effect.mark].append(effect)
            changed.add(effect.mark)
        for mark in changed:
            story = sorted(self._stories[mark], key=lambda effect: effect.at)
            wrong, _ = verdict.repeated_steps(story, kills)
            wrong += verdict.doubled_invocations(story)
            if wrong:
                self._wrong[mark] = len(wrong)

    @property
    def duplicated(self) -> int:
        return sum(self._wrong.values())


class Demo:
    def __init__(self, seconds: float, root: Path, console: Console) -> None:
        self.seconds = seconds
        self.root = root
        self.console = console
        self.seen = Seen()
        self.ledger = Ledger(root / "oracle.jsonl")
        self.kills: list[Window] = []
        self.killed_at: dict[str, float] = {}
        self.deaths: dict[str, int] = defaultdict(int)
        self.gaps: list[float] = []
        self.story: deque[str] = deque(maxlen=5)
        self.stop = asyncio.Event()
        self.weather: list[Weather] = []
        self._began = time.monotonic()
        self._chance = random.Random()
        self._answers = 0
        self._rates: deque[int] = deque([0] * 60, maxlen=60)
        self._slowest: deque[float] = deque([0.0] * 5, maxlen=5)  # of each of the last seconds
        self._slowest_ever = 0.0
        self._lost_live = 0

    async def run(self) -> bool:
        """Run the demo. Returns whether every promise was kept."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end_early)
        oracle = self.root / "oracle.jsonl"
        handlers = {"handlers": ["holdfast.chaos.demo_app", "--oracle", str(oracle)]}
        self.say("starting three nodes and a process of handlers on this machine")
        starting = asyncio.create_task(self._enter(NodeCluster(self.root, partitions=PARTITIONS, handlers=handlers)))
        stopping = asyncio.create_task(self.stop.wait())
        with self.console.status("starting three nodes and a process of handlers on this machine"):
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            self.console.print("stopped before it began")
            return True
        cluster = starting.result()
        try:
            return await self._play(cluster)
        finally:
            await cluster.__aexit__(None, None, None)

    @staticmethod
    async def _enter(cluster: NodeCluster) -> NodeCluster:
        return await cluster.__aenter__()

    def _end_early(self) -> None:
        if self.stop.is_set():
            os._exit(130)  # The children die with us.
        self.stop.set()

    def say(self, line: str) -> None:
        self.story.append(line)
        if not self.console.is_terminal:
            self.console.print(line, highlight=False, soft_wrap=True)

    # -- what happens ------------------------------------------------------------------------------------------------

    async def _play(self, cluster: NodeCluster) -> bool:
        asker = Asker(cluster, self.seen)
        self._began = time.monotonic()
        self.say(f"registered {cluster.url('handlers')} over HTTP; {CLIENTS} clients place orders at all three nodes")
        clients = [asyncio.create_task(self._client(asker, number)) for number in range(CLIENTS)]
        beside = [asyncio.create_task(self._count(cluster)), asyncio.create_task(self._kill(cluster, asker))]
        showing = self._show(cluster) if self.console.is_terminal else self._tell(cluster)
        shown = asyncio.create_task(showing)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), self.seconds)
        self.stop.set()
        await beside[1]  # The node killed last is started again.
        _, slow = await asyncio.wait(clients, timeout=LAST_ANSWERS_S)
        for task in [*slow, beside[0]]:
            task.cancel()
        await asyncio.gather(*slow, *beside, shown, return_exceptions=True)
        await asker.close()
        return self._judge(cluster)

    async def _client(self, asker: Asker, number: int) -> None:
        count = 0
        while not self.stop.is_set():
            order = f"order-{number}-{count}"
            count += 1
            node = self._chance.choice(list(asker.cluster.names))
            ask = Ask("orders", order, node, time.monotonic())
            receipts = await asker.ask(ask, "/orders/place", order, key=order)
            self.seen.flows[order] = receipts
            self._answers += 1
            self._slowest[-1] = max(self._slowest[-1], ask.took_s)
            self._slowest_ever = max(self._slowest_ever, ask.took_s)
            await asyncio.sleep(self._chance.uniform(0, THINK_S))

    async def _kill(self, cluster: NodeCluster, asker: Asker) -> None:
        await self._pause(FIRST_KILL_S)
        while not self.stop.is_set():
            leader = cluster.leader()
            if leader is None or cluster.is_out(leader):
                await self._pause(0.1)
                continue
            led = cluster.views.led_by(leader)
            since = time.monotonic()
            self.killed_at[leader] = since
            self.deaths[leader] += 1
            await cluster.kill(leader, signal.SIGKILL)
            self.kills.append(Window("kill leader", f"SIGKILL {leader}", since, since + DOWN_S))
            probes = asyncio.create_task(self._measure(cluster, asker, leader, led, since))
            await self._pause(DOWN_S)
            await cluster.start(leader)
            await asyncio.gather(probes)
            while cluster.is_out(leader):
                await asyncio.sleep(0.05)
            self.kills[-1] = Window("kill leader", f"SIGKILL {leader}", since, time.monotonic())
            await self._pause(max(0.5, since + KILL_EVERY_S - time.monotonic()))

    async def _measure(self, cluster: NodeCluster, asker: Asker, victim: str, led: list[int], since: float) -> None:
        """Measure, from another node, how long it takes until orders to all of the victim's partitions are answered again."""
        others = [name for name in cluster.names if name != victim]
        asks = [
            Ask("orders", f"gap-{len(self.kills)}-{partition}", others[partition % len(others)], since)
            for partition in led
        ]

        async def place(ask: Ask, partition: int) -> None:
            key = _key_in(partition, ask.mark)
            self.seen.flows[ask.mark] = await asker.ask(ask, "/orders/place", ask.mark, key=key)
            assert ask.answered is not None
            self.gaps.append(ask.answered - since)

        before = len(self.gaps)
        await asyncio.gather(*(place(ask, partition) for ask, partition in zip(asks, led, strict=True)))
        gap = max(self.gaps[before:], default=0.0)
        self.say(
            f"{since - self._began:5.1f} s  SIGKILL {victim}, leader of {len(led)} partitions: "
            f"all answered again after {gap * 1000:.0f} ms"
        )

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), seconds)

    async def _count(self, cluster: NodeCluster) -> None:
        """Update the figures and the ledger once a second."""
        before = 0
        while True:
            await asyncio.sleep(1.0)
            self._rates.append(self._answers - before)
            before = self._answers
            self._slowest.append(0.0)
            self.ledger.read(self.kills)
            answered = list(self.seen.flows.values())
            self._lost_live = sum(receipt not in self.ledger.receipts for receipts in answered for receipt in receipts)
            lonely = cluster.without_majority()
            if not self.weather or self.weather[-1].lonely != lonely:
                self.weather.append(Weather(time.monotonic(), lonely))

    # -- what is shown -----------------------------------------------------------------------------------------------

    async def _show(self, cluster: NodeCluster) -> None:
        with Live(self._view(cluster), console=self.console, refresh_per_second=8, transient=True) as live:
            while not self.stop.is_set():
                await self._pause(REFRESH_S)
                live.update(self._view(cluster))

    async def _tell(self, cluster: NodeCluster) -> None:
        while not self.stop.is_set():
            await self._pause(LINE_EVERY_S)
            leaders = ", ".join(f"{name} leads {len(cluster.views.led_by(name))}" for name in cluster.names)
            self.say(
                f"{time.monotonic() - self._began:5.1f} s  {len(self.seen.flows)} orders, {self._rates[-1]}/s, slowest "
                f"{self._slowest_ever * 1000:.0f} ms, lost/duplicated {self._lost_live}/{self.ledger.duplicated}; {leaders}"
            )

    def _view(self, cluster: NodeCluster) -> RenderableType:
        width = min(self.console.width, WIDTH_MAX)
        inner = width - 4
        passed = time.monotonic() - self._began
        left = max(0.0, self.seconds - passed)
        return Panel(
            Group(
                self._bar(passed, inner),
                Text(),
                self._nodes(cluster, narrow=width < NARROW),
                Text(),
                self._rate_line(inner),
                self._figures(columns=2 if width < NARROW else 4),
                Text(),
                *(Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in self._last_lines()),
            ),
            title="[bold]Holdfast[/]"
            + ("" if width < NARROW else " · three nodes, and the leader is killed every few seconds"),
            subtitle=f"{left:.0f} s left · Ctrl-C ends it" if not self.stop.is_set() else "the last answers",
            width=width,
            padding=(0, 1),
        )

    def _bar(self, passed: float, width: int) -> Text:
        done = int(width * min(1.0, passed / self.seconds))
        return Text("━" * done, style="cyan") + Text("━" * (width - done), style="bright_black")

    def _nodes(self, cluster: NodeCluster, *, narrow: bool) -> Table:
        table = Table(expand=True, box=None, padding=(0, 1) if not narrow else (0, 1, 0, 0), header_style="dim")
        table.add_column("node", width=4)
        table.add_column("state", width=10 if narrow else 22, no_wrap=True)
        table.add_column("leads" if narrow else "leads partitions", ratio=1, no_wrap=True)
        if not narrow:
            table.add_column("pid", justify="right", width=8)
        table.add_column("killed", justify="right", width=6)
        leaders = cluster.views.leaders()
        meta = cluster.views.meta_leader()
        for name in cluster.names:
            pid = cluster.pid(name)
            if pid is None:
                ago = time.monotonic() - self.killed_at.get(name, time.monotonic())
                state = Text("✗ killed" + ("" if narrow else f" {ago:.1f} s ago"), style="bold red")
            elif cluster.is_out(name):
                state = Text("↻ starting", style="yellow")
            else:
                state = Text("● up", style="green")
            led = " ".join(str(number) for number in sorted(leaders) if leaders[number] == name) if pid else ""
            crown = " [dim]+ meta[/]" if meta == name and pid else ""
            process = [] if narrow else [str(pid or "·")]
            table.add_row(name, state, f"{led or '·'}{crown}", *process, str(self.deaths[name]))
        return table

    def _rate_line(self, width: int) -> Text:
        shown = list(self._rates)[-min(60, width - 24) :]
        most = max([*shown, 1])
        bars = "".join(BLOCKS[round(rate / most * (len(BLOCKS) - 1))] for rate in shown)
        return Text("orders/s ", style="dim") + Text(f"{self._rates[-1]:5d}  ", style="bold") + Text(bars, style="cyan")

    def _figures(self, *, columns: int) -> Table:
        table = Table.grid(expand=True, padding=(0, 1))
        for _ in range(columns):
            table.add_column(ratio=1, no_wrap=True)
        wrong = self._lost_live or self.ledger.duplicated
        figures = [
            _figure("answered", f"{len(self.seen.flows):,}"),
            _figure("slowest, last 5 s", f"{max(self._slowest) * 1000:.0f} ms"),
            _figure("slowest ever", f"{self._slowest_ever * 1000:.0f} ms"),
            _figure("lost / duplicated", f"{self._lost_live} / {self.ledger.duplicated}", "red" if wrong else "green"),
        ]
        for first in range(0, len(figures), columns):
            table.add_row(*figures[first : first + columns])
        return table

    def _last_lines(self) -> Iterator[str]:
        lines = list(self.story)
        yield from lines
        yield from [""] * (5 - len(lines))

    # -- the verdict -------------------------------------------------------------------------------------------------

    def _judge(self, cluster: NodeCluster) -> bool:
        end = time.monotonic()
        self.ledger.read(self.kills)
        effects = sorted(self.ledger.effects, key=lambda effect: effect.at)
        repeated, again = verdict.repeated_steps(effects, self.kills)
        doubled = verdict.doubled_invocations(effects)
        lost = verdict.unanswered(self.seen.asks, end) + verdict.missing_steps(effects, self.seen.flows)
        errors, _ = verdict.errors_of_live_nodes(self.seen.failed, cluster.outages, self.weather, self.kills, end)
        wrong = [*lost, *repeated, *doubled, *errors, *self.seen.wrong, *cluster.deaths]
        show = self._line
        show("")
        show(f"{len(self.seen.flows):,} orders accepted, {len(self.seen.flows) - len(lost):,} completed", bold=True)
        show(f"lost/duplicated: {len(lost)}/{len(repeated) + len(doubled)}", bold=True)
        killed = f"{len(self.kills)} leader{'s' if len(self.kills) != 1 else ''}"
        show(f"{killed} killed with SIGKILL; errors from nodes that lived: {len(errors)}")
        if self.gaps:
            show(
                f"from the kill until an order to each of its partitions was answered: "
                f"p50 {percentile(self.gaps, 0.5) * 1000:.0f} ms, worst {max(self.gaps) * 1000:.0f} ms"
            )
        show(f"slowest request: {self._slowest_ever * 1000:.0f} ms, its node's death included")
        if count := again.total():
            show(
                f"{count} of {len(effects):,} steps were in the middle of their work when a leader died, and ran again"
            )
        for sentence in wrong[:20]:
            show(f"WRONG: {sentence}")
        if not wrong and self.seen.flows:
            show("every order was carried out, each step once journaled never again: kept", good=True)
        return not wrong and bool(self.seen.flows)

    def _line(self, line: str, *, bold: bool = False, good: bool = False) -> None:
        style = "bold green" if good else "bold" if bold else None
        self.console.print(Text(line, style=style or ""), soft_wrap=not self.console.is_terminal)


def _figure(name: str, value: str, color: str = "default") -> Text:
    return Text(f"{name}\n", style="dim") + Text(value, style=f"bold {color}")


def _key_in(partition: int, mark: str) -> str:
    """An idempotency key whose invocation belongs to a partition: the id is computed from the key."""
    from holdfast.sdk.ids import idempotent_id, partition_of

    number = 0
    while partition_of(idempotent_id("orders", None, "place", f"{mark}.{number}"), PARTITIONS) != partition:
        number += 1
    return f"{mark}.{number}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m holdfast.chaos.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    options = parser.parse_args()
    console = Console()
    root = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    kept = asyncio.run(Demo(options.seconds, root, console).run())
    if kept:
        shutil.rmtree(root, ignore_errors=True)
    else:
        console.print(f"logs and data of the nodes are in {root}")
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
