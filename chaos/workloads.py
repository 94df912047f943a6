"""Clients of a chaos run: they behave like a careful program, and record every answer.

A client knows a few nodes and prefers one. If that node does not answer (a broken connection, a refusal, a timeout),
the client asks another node with the same idempotency key, so nothing can happen twice and nothing is given up. At the
end of a run every operation has an answer, or is evidence. Each failed try is recorded with its time and node;
`verdict` decides whether that node had an excuse.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from holdfast.chaos.cluster import NodeCluster
from holdfast.chaos.history import Kind, Outcome, Recorder, Value
from holdfast.sdk.ids import format_id, idempotent_id

SILENCE_S: Final = 8.0  # After this long beyond the operation's own time, another node is asked.
AVOID_S: Final = 5.0  # A client avoids a node that was silent for this long.
PAUSE_S: Final = 0.05
THINK_S: Final = 0.08
KEY_LIFE_S: Final = 10.0
COUNTERS: Final = 6
LEAVES: Final = 12
INBOXES: Final = 3
REGISTERS: Final = 3


@dataclass(slots=True)
class Ask:
    """One operation of a client, from the first try to the answer."""

    work: str
    mark: str
    node: str  # asked first
    asked: float
    planned_s: float = 0.0  # the operation's own time: a sleep
    answered: float | None = None  # None: not yet, or never
    tries: int = 1

    @property
    def took_s(self) -> float:
        """Time beyond the planned duration."""
        return (time.monotonic() if self.answered is None else self.answered) - self.asked - self.planned_s


@dataclass(frozen=True, slots=True)
class Failed:
    """A try that did not lead to an answer."""

    work: str
    mark: str
    node: str
    began: float
    ended: float
    what: str  # "refused", "stale", "broken", "silent", "status 503"; see `_broken`
    message: str


@dataclass(slots=True)
class Seen:
    """All answers that clients received, for the verdict."""

    asks: list[Ask] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    flows: dict[str, list[str]] = field(default_factory=dict)  # mark -> nonces of its steps, as answered
    counts: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # key -> what adds returned
    leaves: Counter[str] = field(default_factory=Counter)  # key -> expected number of calls
    inboxes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # key -> marks of its senders
    naps: list[dict[str, Any]] = field(default_factory=list)  # mark, seconds, began, ended, chosen
    retries: dict[str, list[Any]] = field(default_factory=dict)  # mark -> all answers to the same request
    registers: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)  # answers that are wrong in themselves


class Asker:
    """Sends the requests of all clients to the nodes."""

    def __init__(self, cluster: NodeCluster, seen: Seen) -> None:
        self.cluster = cluster
        self.seen = seen
        self._avoid: dict[str, float] = {}
        # Idle connections are closed long before a node would close them, so a broken one is significant.
        reuse = aiohttp.TraceConfig()
        reuse.on_connection_reuseconn.append(_reused)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=10),
            headers={"Authorization": f"Bearer {cluster.token}"},
            trace_configs=[reuse],
        )

    async def close(self) -> None:
        await self._session.close()

    async def ask(
        self,
        ask: Ask,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        key: str | None = None,
        finals: Sequence[int] = (200, 202),
    ) -> Any:
        """Try until there is an answer. The run cancels this if it takes too long."""
        self.seen.asks.append(ask)
        headers = {} if key is None else {"Idempotency-Key": key}
        data = b"" if body is None else json.dumps(body).encode()
        if body is not None:
            headers["Content-Type"] = "application/json"
        node = self._prefer(ask.node)
        while True:
            began = time.monotonic()
            used_before: list[bool] = []
            try:
                async with self._session.request(
                    method,
                    self.cluster.url(node) + path,
                    data=data or None,
                    headers=headers,
                    timeout=aiohttp.ClientTimeout(total=SILENCE_S + ask.planned_s),
                    trace_request_ctx=used_before,
                ) as response:
                    text = await response.read()
                    self._check_id(ask, node, path, key, response)
                    if response.status in finals:
                        ask.answered = time.monotonic()
                        return json.loads(text) if text else None
                    what, message = f"status {response.status}", text.decode(errors="replace")[:300]
            except TimeoutError:
                what, message = "silent", ""
                self._avoid[node] = time.monotonic() + AVOID_S
            except (aiohttp.ClientError, OSError) as error:
                what, message = _broken(error, used_before)
            self.seen.failed.append(Failed(ask.work, ask.mark, node, began, time.monotonic(), what, message))
            ask.tries += 1
            node = self._next(node)
            await asyncio.sleep(PAUSE_S)

    def _check_id(self, ask: Ask, node: str, path: str, key: str | None, response: aiohttp.ClientResponse) -> None:
        """Check that an answer belongs to its request: it must name the id derived from the idempotency key."""
        told = response.headers.get("x-holdfast-id")
        if key is None or told is None:
            return
        service, *keyed, handler = path.removeprefix("/").split("/")
        expected = format_id(idempotent_id(service, keyed[0] if keyed else None, handler, key))
        if told != expected:
            self.seen.wrong.append(f"{ask.mark} at {node}: asked for {expected}, and the answer was that of {told}")

    async def ask_once(self, node: str, path: str) -> float:
        """For measurements: the time at which one node answered. Raises unless it answers with success."""
        began = time.monotonic()
        used_before: list[bool] = []
        try:
            async with self._session.post(
                self.cluster.url(node) + path,
                timeout=aiohttp.ClientTimeout(total=60),
                trace_request_ctx=used_before,
            ) as response:
                text = await response.text()
                if response.status == 200:
                    return time.monotonic()
                what, message = f"status {response.status}", text[:300]
        except TimeoutError:
            what, message = "silent", ""
        except (aiohttp.ClientError, OSError) as error:
            what, message = _broken(error, used_before)
        failed = Failed("probe", path, node, began, time.monotonic(), what, message)
        self.seen.failed.append(failed)
        raise ConnectionError(f"{node}: {what} {message}")

    def _prefer(self, node: str) -> str:
        return self._next(node) if self._avoid.get(node, 0.0) > time.monotonic() else node

    def _next(self, node: str) -> str:
        names = list(self.cluster.names)
        at = names.index(node) if node in names else -1  # It may have been removed.
        after = [name for name in [*names[at + 1 :], *names[: at + 1]] if name != node]
        welcome = [name for name in after if self._avoid.get(name, 0.0) <= time.monotonic()]
        return (welcome or after)[0]


def _broken(error: Exception, used_before: list[bool]) -> tuple[str, str]:
    """How a try ended without an answer.

    Refused: there was no connection, so nothing was sent. Stale: the peer closed a pooled connection just when it was
    reused, which HTTP cannot prevent. Broken: the node had accepted the request."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "refused", text
    return ("stale" if used_before else "broken"), text


async def _reused(session: aiohttp.ClientSession, context: Any, parameters: Any) -> None:
    context.trace_request_ctx.append(True)


class Workers:
    """All workloads of a run. `stop` lets each finish what it began."""

    def __init__(self, asker: Asker, recorder: Recorder, seed: int) -> None:
        self._asker = asker
        self._seen = asker.seen
        self._recorder = recorder
        self._seed = seed
        self._began = time.monotonic()
        self._marks = 0
        self._values: dict[str, Value] = {}
        self.stop = asyncio.Event()

    def kinds(self) -> dict[str, tuple[Callable[[random.Random], Awaitable[None]], int]]:
        """Workload -> its operation, and how many clients run it."""
        return {
            "flow": (self.flow, 3),
            "counter": (self.counter, 2),
            "tree": (self.tree, 1),
            "approval": (self.approval, 3),
            "nap": (self.nap, 3),
            "retry": (self.retry, 1),
            "register": (self.register, 4),
        }

    def start(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        return [
            tasks.create_task(self._work(operate, random.Random(f"{self._seed} {name} {number}")), name=name)
            for name, (operate, count) in self.kinds().items()
            for number in range(count)
        ]

    async def _work(self, operate: Callable[[random.Random], Awaitable[None]], chance: random.Random) -> None:
        while not self.stop.is_set():
            await operate(chance)
            await asyncio.sleep(chance.uniform(0, THINK_S))

    def _ask(self, work: str, chance: random.Random, planned_s: float = 0.0, mark: str | None = None) -> Ask:
        if mark is None:
            self._marks += 1
            mark = f"{work}-{self._marks}"
        return Ask(work, mark, chance.choice(list(self._asker.cluster.names)), time.monotonic(), planned_s)

    def _generation(self) -> int:
        return int((time.monotonic() - self._began) / KEY_LIFE_S)

    # -- operations --------------------------------------------------------------------------------------------------

    async def flow(self, chance: random.Random) -> None:
        ask = self._ask("flow", chance)
        self._seen.flows[ask.mark] = await self._asker.ask(ask, "/flow/three", ask.mark, key=ask.mark)

    async def counter(self, chance: random.Random) -> None:
        ask = self._ask("counter", chance)
        key = f"c{chance.randrange(COUNTERS)}"
        answer = await self._asker.ask(ask, f"/counter/{key}/add", ask.mark, key=ask.mark)
        self._seen.counts[key].append(answer)

    async def tree(self, chance: random.Random) -> None:
        ask = self._ask("tree", chance)
        leaves = chance.sample([f"l{number}" for number in range(LEAVES)], 4)
        inbox = f"i{chance.randrange(INBOXES)}.{self._generation()}"
        answer = await self._asker.ask(
            ask, "/tree/branch", {"mark": ask.mark, "leaves": leaves, "inbox": inbox}, key=ask.mark
        )
        self._seen.leaves.update(leaves)
        self._seen.inboxes[inbox].append(ask.mark)
        self._seen.flows[ask.mark] = answer["nonces"]

    async def nap(self, chance: random.Random) -> None:
        seconds = round(chance.choice((0.05, 0.4, 1.5, 4.0)) * chance.uniform(0.5, 1.5), 3)
        ask = self._ask("nap", chance, seconds)
        answer = await self._asker.ask(ask, "/sleeper/nap", {"mark": ask.mark, "seconds": seconds}, key=ask.mark)
        self._woke(ask.mark, seconds, answer, "late")

    async def approval(self, chance: random.Random) -> None:
        """Started without waiting, answered by another request (or not at all), fetched at the end."""
        seconds = round(chance.uniform(0.3, 5.0), 3)
        begin = self._ask("approval", chance)
        mark = begin.mark
        await self._asker.ask(begin, f"/approval/{mark}/wait/send", {"mark": mark, "seconds": seconds})
        if chance.random() < 0.6:
            await asyncio.sleep(chance.uniform(0, seconds))
            # It may be gone because the timer was first. Both are correct; the outcome tells which one happened.
            path = f"/holdfast/workflow/approval/{mark}/promises/answer/resolve"
            await self._asker.ask(self._ask("approve", chance, mark=mark), path, "ann", finals=(200, 404, 409))
        attach = self._ask("attach", chance, seconds, mark)
        answer = await self._asker.ask(attach, f"/holdfast/workflow/approval/{mark}/attach", method="GET")
        if answer["chosen"] == "answer" and answer["who"] != "ann":
            self._seen.wrong.append(f"{mark}: answered by {answer['who']!r}, whom nobody knows")
        self._woke(mark, seconds, answer, answer["chosen"])

    def _woke(self, mark: str, seconds: float, answer: dict[str, Any], chosen: str) -> None:
        self._seen.flows[mark] = answer["nonces"]
        nap = {"mark": mark, "seconds": seconds, "began": answer["began"], "ended": answer["ended"], "chosen": chosen}
        self._seen.naps.append(nap)

    async def retry(self, chance: random.Random) -> None:
        """Sends the same request to several nodes at once, and once more after it was answered."""
        first = self._ask("retry", chance)
        mark = first.mark
        body, key = f"{mark}", mark
        others = [self._ask("retry", chance, mark=mark) for _ in range(chance.randint(1, 3))]
        answers = await asyncio.gather(
            *(self._asker.ask(ask, "/flow/three", body, key=key) for ask in (first, *others))
        )
        again = self._ask("retry", chance, mark=mark)
        answers.append(await self._asker.ask(again, "/flow/three", body, key=key))
        self._seen.retries[mark] = answers
        self._seen.flows[mark] = answers[0]

    async def register(self, chance: random.Random) -> None:
        key = f"r{chance.randrange(REGISTERS)}.{self._generation()}"
        self._seen.registers.add(key)
        kind = chance.choices((Kind.READ, Kind.WRITE, Kind.CAS), (5, 3, 2))[0]
        await self.operate_register(kind, key, chance)

    async def operate_register(self, kind: Kind, key: str, chance: random.Random) -> None:
        ask = self._ask("register", chance)
        argument: Value = None
        body: Any = None
        if kind is Kind.WRITE:
            argument = body = ask.mark
            handler = "write"
        elif kind is Kind.CAS:
            argument = (self._values.get(key), ask.mark)
            body = list(argument)
            handler = "swap"
        else:
            handler = chance.choice(("read", "read_alone"))
        number = self._recorder.invoke(ask.mark, key, kind, argument)
        answer = await self._asker.ask(ask, f"/register/{key}/{handler}", body, key=uuid.uuid4().hex)
        self._recorder.end(number, Outcome.OK, None if kind is Kind.WRITE else answer)
        if kind is Kind.READ:
            self._values[key] = answer
