"""Clients of a chaos run: they record every answer, and never repeat a request that may have taken effect.

After a definite refusal (the node says so, or the request was never sent), the client tries another node. Silence after
a request was sent is an unknown outcome: the operation stays open in the history forever. Keys are used for a few
seconds and then read only once more at the very end. So each key's history stays small enough to judge, and old
acknowledgements are checked after everything that happened since.
"""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from collections.abc import Sequence

from holdfast.chaos.history import Kind, Outcome, Recorder, Value, from_json, to_json
from holdfast.chaos.log_cluster import Connection, LogCluster, Lost, Unreachable

REGISTERS = 5
SETS = 3
KEY_LIFE_S = 10.0
THINK_S = 0.04
ANSWER_S = 3.0  # How long a client waits for an answer before it calls the outcome unknown.
PATIENCE_S = 20.0  # How long it retries after definite refusals.


class Client:
    def __init__(self, name: str, cluster: LogCluster, recorder: Recorder, chance: random.Random) -> None:
        self._name = name
        self._cluster = cluster
        self._recorder = recorder
        self._chance = chance
        self._connections = {node: Connection(cluster.socket(node)) for node in cluster.names}
        self._leaders: dict[int, str] = {}
        self.acknowledged = 0
        self.patience_s = PATIENCE_S
        self._values = 0
        self._seen: dict[str, Value] = {}

    async def run(self, keys: set[str], stop: asyncio.Event) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        while not stop.is_set():
            generation = int((clock() - began) / KEY_LIFE_S)
            await self._operate(generation, keys)
            await asyncio.sleep(self._chance.uniform(0, THINK_S))
        self.close()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    async def _operate(self, generation: int, keys: set[str]) -> None:
        if self._chance.random() < REGISTERS / (REGISTERS + SETS):
            key = f"r{self._chance.randrange(REGISTERS)}.{generation}"
            kind = self._chance.choices((Kind.READ, Kind.WRITE, Kind.CAS), (4, 4, 2))[0]
        else:
            key = f"s{self._chance.randrange(SETS)}.{generation}"
            kind = self._chance.choices((Kind.ADD, Kind.READ_ALL), (6, 4))[0]
        keys.add(key)
        argument: Value = None
        if kind in (Kind.WRITE, Kind.ADD, Kind.CAS):
            self._values += 1
            argument = f"{self._name}:{self._values}"
            if kind is Kind.CAS:
                argument = (self._seen.get(key), argument)
        outcome, result = await self.ask(kind, key, argument)
        if outcome is Outcome.OK and kind is Kind.READ:
            self._seen[key] = result

    async def ask(self, kind: Kind, key: str, argument: Value = None) -> tuple[Outcome, Value]:
        """One operation of the history, with as many attempts as are safe."""
        number = self._recorder.invoke(self._name, key, kind, argument)
        outcome, result = await self._attempt(kind, key, argument)
        self._recorder.end(number, outcome, result)
        self.acknowledged += outcome is Outcome.OK
        return outcome, result

    async def _attempt(self, kind: Kind, key: str, argument: Value) -> tuple[Outcome, Value]:
        group = zlib.crc32(key.encode()) % len(self._cluster.groups) + 1
        request: dict[str, object] = {"do": kind.value, "group": group, "key": key}
        if kind not in (Kind.READ, Kind.READ_ALL):
            request["argument"] = to_json(argument)
        deadline = time.monotonic() + self.patience_s
        while True:
            node = self._leaders.get(group) or self._chance.choice(self._cluster.names)
            try:
                answer = await self._connections[node].ask(request, ANSWER_S)
            except Unreachable:
                answer = {"error": "Unreachable", "definite": True, "leader": None}
            except Lost:
                answer = {"error": "Lost", "definite": False, "leader": None}
            if "error" not in answer:
                self._leaders[group] = node
                return Outcome.OK, from_json(answer["result"])
            self._leaders.pop(group, None)
            if not answer["definite"]:
                return Outcome.INFO, None
            if time.monotonic() > deadline:
                return Outcome.FAIL, None
            if answer["leader"] is not None and answer["leader"] != node:
                self._leaders[group] = answer["leader"]
            await asyncio.sleep(self._chance.uniform(0, 0.02))


async def read_everything(client: Client, keys: Sequence[str]) -> list[str]:
    """Read every key one last time. Returns the keys without an answer."""
    silent = []
    for key in keys:
        kind = Kind.READ if key.startswith("r") else Kind.READ_ALL
        for _ in range(5):  # A read may be repeated any number of times.
            outcome, _ = await client.ask(kind, key)
            if outcome is Outcome.OK:
                break
        else:
            silent.append(key)
    return silent
