"""The oracle: an independent record of every effect of every step, outside the cluster.

A step reports to the oracle before it does anything else. One effect is one line, appended by one `write`, so a killed
process leaves complete lines, and at most a torn last one. Times are CLOCK_MONOTONIC of the machine, which faults on a
node's clock do not touch. What the lines prove is judged in `verdict`; nothing here looks at the cluster.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Effect:
    at: float
    mark: str  # of the operation that a client asked for
    work: str
    invocation: str
    step: str
    number: int  # the place of the step in its handler: a later step has a higher number
    attempt: int
    nonce: str  # new each time the step runs: tells which run the journal kept
    key: str | None  # of the object, for handlers that must be alone


class Oracle:
    """Appends a handler process's effects to the file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def tell(
        self, *, mark: str, work: str, invocation: str, step: str, number: int, attempt: int, key: str | None
    ) -> str:
        """Record an effect. Returns its nonce."""
        nonce = uuid.uuid4().hex[:12]
        fields = [time.monotonic(), mark, work, invocation, step, number, attempt, nonce, key]
        line = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError("the oracle's disk is full: this run proves nothing")
        return nonce


def load(path: Path) -> list[Effect]:
    """All effects, in order of time. A torn last line is what a killed process leaves."""
    effects = []
    if path.exists():
        lines = path.read_bytes().split(b"\n")
        lines.pop()
        for line in lines:
            fields: list[Any] = json.loads(line)
            effects.append(Effect(*fields))
    return sorted(effects, key=lambda effect: effect.at)
