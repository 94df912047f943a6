"""Random programs of durable code, and a model that predicts how each of them ends.

A program is data: a list of operations, each a list that begins with its name. It is also its own input, so one
interpreter (`attempt.py`) plays every handler. The result of a program is the sum of its operations' results, or the
failure of the first one that failed. Anything that depends on the interleaving (which write is first, how often an
attempt is lost) is kept out of results, and checked by sums and orders instead.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

from holdfast.sdk.journal import CANCELLED, KILLED, pack_outcome
from holdfast.statemachine.commands import Mode

Body = list[list[Any]]
NEVER = "never"
DEPTH_MAX = 4


class Failed(Exception):
    """A program ends with this failure: [1, code, message, kind]."""

    def __init__(self, outcome: list[Any]) -> None:
        super().__init__(outcome[2])
        self.outcome = outcome


@dataclass
class Root:
    """A program that a client starts. `ending`: what the client does to it some time after its start."""

    number: int
    body: Body
    key: str | None
    mode: int
    ending: str = ""  # "", "cancel" or "kill"
    start_ms: int = 0
    ending_ms: int = 0


@dataclass
class Model:
    """What must be true in the end, whatever faults occurred."""

    sums: Counter[str] = field(default_factory=Counter)  # by object key
    orders: dict[str, list[str]] = field(default_factory=dict)  # by sender: what one object must have seen, in order
    promises: dict[str, int] = field(default_factory=dict)  # by workflow key: the value that resolves its promise
    workflows: dict[str, int] = field(default_factory=dict)  # results, because a workflow runs once

    def outcome_of(self, root: Root) -> list[Any]:
        if root.ending == "cancel":
            return pack_outcome(CANCELLED)
        if root.ending == "kill":
            return pack_outcome(KILLED)
        try:
            return [0, pack_int(self.run(root.body, root.key))]
        except Failed as failed:
            return failed.outcome

    def run(self, body: Body, key: str | None) -> int:
        return sum(self.operation(op, key) for op in body)

    def operation(self, op: list[Any], key: str | None) -> int:
        match op:
            case ["run", value] | ["once", value] | ["awake", value] | ["approve", value]:
                return int(value)
            case ["flaky", failures, attempts, value]:
                if failures < attempts:
                    return int(value)
                times = "once" if attempts == 1 else f"{attempts} times"
                raise Failed([1, 500, f"flaky failed {times}: no luck", "RetriesExhausted"])
            case ["sleep" | "abandon", _]:
                return 0
            case ["call", child_key, _, body]:
                return self.run(body, child_key)
            case ["send", child_key, body]:
                self.run(body, child_key)
                return 0
            case ["workflow", child_key, body]:
                if child_key not in self.workflows:
                    self.workflows[child_key] = self.run(body, child_key)
                return self.workflows[child_key]
            case ["promise", _]:
                assert key is not None
                return self.promises[key]
            case ["add", value]:
                assert key is not None
                self.sums[key] += value
                return 0
            case ["log", sender, number]:
                assert key is not None
                self.orders.setdefault(sender, []).append(f"{key} {number}")
                return 0
            case ["par", bodies]:
                return self.parallel(bodies, key)
            case ["try", body]:
                try:
                    return self.run(body, key)
                except Failed:
                    return 1000
            case ["fail", code]:
                raise Failed([1, code, "as it was told", "TerminalError"])
            case _:
                raise AssertionError(op)

    def parallel(self, bodies: list[Body], key: str | None) -> int:
        """All branches run to their end; then the first failure in the order of the branches counts."""
        total, first = 0, None
        for body in bodies:
            try:
                total += self.run(body, key)
            except Failed as failed:
                first = first or failed
        if first is not None:
            raise first
        return total


def pack_int(value: int) -> bytes:
    return str(value).encode()


class Generator:
    """Generate programs without deadlocks: the holder of a key calls only keys of a deeper level."""

    def __init__(self, random: Random, model: Model) -> None:
        self.random = random
        self.model = model
        self.count = 0
        self.workflows: list[list[Any]] = []

    def unique(self) -> int:
        self.count += 1
        return self.count

    def root(self, number: int) -> Root:
        random = self.random
        if random.random() < 0.25:
            ending = random.choice(["cancel", "kill"])
            body = self.endless(random.randrange(4))
            return Root(number, body, None, Mode.PLAIN, ending, random.randrange(200), random.randrange(2000))
        key = f"0-{random.randrange(3)}" if random.random() < 0.3 else None
        mode = Mode.PLAIN if key is None else Mode.EXCLUSIVE
        return Root(number, self.body(1, mode, random.randrange(1, 6)), key, mode, "", random.randrange(500))

    def endless(self, depth: int) -> Body:
        """A program that only a cancellation ends, and that only has to pass it on to its calls."""
        random = self.random
        before = [random.choice([["run", 1], ["sleep", random.randrange(100)]]) for _ in range(random.randrange(3))]
        if not depth:
            return [*before, [NEVER]]
        return [*before, ["call", None, Mode.PLAIN, self.endless(depth - 1)], ["run", 1]]

    def body(self, level: int, mode: int, size: int) -> Body:
        return [self.operation(level, mode) for _ in range(size)]

    def operation(self, level: int, mode: int) -> list[Any]:
        random = self.random
        if mode == Mode.EXCLUSIVE and random.random() < 0.4:
            return ["add", random.randrange(1, 10)]
        if mode == Mode.WORKFLOW and random.random() < 0.4:
            return ["promise", "p"]
        names = ["run", "run", "flaky", "once", "sleep", "awake", "abandon"]
        if level < DEPTH_MAX:
            names += ["call", "call", "keyed", "keyed", "sends", "workflow", "par", "par", "try"]
        if random.random() < 0.03:
            return ["fail", random.choice([400, 409, 500])]
        return self.named(random.choice(names), level, mode)

    def named(self, name: str, level: int, mode: int) -> list[Any]:
        random = self.random
        match name:
            case "run" | "once" | "awake":
                return [name, random.randrange(100)]
            case "flaky":
                return ["flaky", random.randrange(4), random.randrange(2, 5), random.randrange(100)]
            case "sleep" | "abandon":
                return [name, random.randrange(500)]
            case "call":
                return ["call", None, Mode.PLAIN, self.body(level + 1, Mode.PLAIN, random.randrange(4))]
            case "keyed":
                mode = random.choice([Mode.EXCLUSIVE, Mode.EXCLUSIVE, Mode.SHARED])
                key = f"{level}-{random.randrange(3)}"
                return ["call", key, mode, self.body(level + 1, mode, random.randrange(4))]
            case "sends":
                sender, key = f"s{self.unique()}", f"{level}-{random.randrange(3)}"
                return ["try", [["send", key, [["log", sender, number]]] for number in range(random.randrange(1, 4))]]
            case "workflow":
                return self.workflow()
            case "par":  # Branches that write the same state would race, as they do in any program.
                return [
                    "par",
                    [self.body(level + 1, Mode.PLAIN, random.randrange(3)) for _ in range(random.randrange(5))],
                ]
            case "try":
                return ["try", self.body(level + 1, mode, random.randrange(3))]
            case _:
                raise AssertionError(name)

    def workflow(self) -> list[Any]:
        """Its body never fails, so it does not matter which call is first."""
        if self.workflows and self.random.random() < 0.3:
            return self.random.choice(self.workflows)
        key = f"w{self.unique()}"
        self.model.promises[key] = self.random.randrange(100)
        self.workflows.append(
            ["workflow", key, [["promise", "p"], ["run", self.random.randrange(100)], ["promise", "p"]]]
        )
        return self.workflows[-1]


def generate(random: Random, more: int = 0) -> tuple[list[Root], Model]:
    model = Model()
    generator = Generator(random, model)
    return [generator.root(number) for number in range(random.randrange(3, 8) + more)], model


def ask_people(part: list[Any]) -> None:
    """Replace all awakeables of a program by approvals, which have the same results."""
    if part[:1] == ["awake"]:
        part[0] = "approve"
    for each in part:
        if isinstance(each, list):
            ask_people(each)
