"""Attempts that failed, as commands: what is counted against an invocation, and when it waits for an operator."""

from __future__ import annotations

from random import Random
from typing import Any, Final, Protocol

from holdfast.cluster.registry.machine import Target
from holdfast.sdk.journal import cut_text
from holdfast.statemachine.commands import FailAttempt

#: Attempts of an invocation in whose name an SDK says what no correct one says; then it is paused.
PROTOCOL_ATTEMPTS: Final = 5


class Failing(Protocol):
    """The attempt that failed."""

    id: bytes
    epoch: int
    target: Target


class Failures:
    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def of_attempt(
        self, attempt: Failing, failure: list[Any], *, retry_after_ms: int = 0, pause: bool = False
    ) -> FailAttempt:
        retry = attempt.target.options.retry
        return FailAttempt(attempt.id, attempt.epoch, failure, retry, self._rng.getrandbits(31), retry_after_ms, pause)

    def of_protocol(self, attempt: Failing, why: str) -> FailAttempt:
        """It was said in its name what no correct SDK says. Trying again rarely helps, so it waits for an operator soon."""
        command = self.of_attempt(attempt, [1, 500, cut_text(why), "ProtocolError"])
        attempts = min(command.retry.max_attempts or PROTOCOL_ATTEMPTS, PROTOCOL_ATTEMPTS)
        return command._replace(retry=command.retry._replace(max_attempts=attempts))
