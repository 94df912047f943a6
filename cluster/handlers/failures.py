"""Failed attempts as commands: what counts against an invocation, and when it waits for an operator."""

from __future__ import annotations

from random import Random
from typing import Any, Final, Protocol

from holdfast.cluster.registry.machine import Target
from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import cut_text
from holdfast.statemachine.commands import FailAttempt
from holdfast.statemachine.outcomes import failed

#: Attempts that violate the protocol before their invocation is paused.
PROTOCOL_ATTEMPTS: Final = 5


class Failing(Protocol):
    """The attempt that failed."""

    id: InvocationId
    epoch: int
    target: Target


class Failures:
    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def of_attempt(
        self, attempt: Failing, failure: list[Any], *, retry_after_ms: int = 0, pause: bool = False
    ) -> FailAttempt:
        retry = attempt.target.options.retry
        return FailAttempt(
            id=attempt.id,
            epoch=attempt.epoch,
            failure=failure,
            retry=retry,
            jitter_ms=self._rng.getrandbits(31),
            retry_after_ms=retry_after_ms,
            pause=pause,
        )

    def of_protocol(self, attempt: Failing, why: str) -> FailAttempt:
        """The attempt's SDK violated the protocol. A retry rarely helps, so the invocation soon waits for an operator."""
        command = self.of_attempt(attempt, failed(500, cut_text(why), "ProtocolError"))
        attempts = min(command.retry.max_attempts or PROTOCOL_ATTEMPTS, PROTOCOL_ATTEMPTS)
        return command._replace(retry=command.retry._replace(max_attempts=attempts))
