"""Failed attempts as commands: what counts against an invocation, and when it waits for an operator."""

from __future__ import annotations

import logging
from random import Random
from typing import Any, Final, Protocol

from holdfast.cluster.handlers.attempts import Owner
from holdfast.cluster.registry.machine import Target
from holdfast.log.errors import ProposalError
from holdfast.sdk.ids import DeploymentId, InvocationId, format_id
from holdfast.sdk.journal import cut_text
from holdfast.statemachine.commands import FailAttempt, Retry
from holdfast.statemachine.effects import Result
from holdfast.statemachine.outcomes import details_of, failed

logger = logging.getLogger(__name__)

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
        if logger.isEnabledFor(logging.DEBUG):
            # Without its message, which is the handler's and may have what nobody should find in a log.
            code, _, kind, *_ = (*details_of(failure), "")
            id_ = format_id(attempt.id)
            fields = {"invocation_id": id_, "attempt": attempt.epoch}
            logger.debug("%s failed an attempt: %s %s", id_, code, kind, extra=fields)
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

    def unoffered(
        self, invocation: InvocationId, epoch: int, *, service: str, handler: str, deployment: DeploymentId | None
    ) -> FailAttempt:
        """No deployment offers the handler. A pinned invocation waits for an operator, others for a deployment."""
        where = f"deployment {deployment}" if deployment is not None else "any registered deployment"
        return FailAttempt(
            id=invocation,
            epoch=epoch,
            failure=failed(503, f"{service}/{handler} is not offered by {where}", "NoDeployment"),
            retry=Retry(initial_ms=1000, max_interval_ms=60_000, max_attempts=0),
            jitter_ms=self._rng.getrandbits(31),
            retry_after_ms=0,
            pause=deployment is not None,
        )

    def of_protocol(self, attempt: Failing, why: str) -> FailAttempt:
        """The attempt's SDK violated the protocol. A retry rarely helps, so the invocation soon waits for an operator."""
        command = self.of_attempt(attempt, failed(500, cut_text(why), "ProtocolError"))
        attempts = min(command.retry.max_attempts or PROTOCOL_ATTEMPTS, PROTOCOL_ATTEMPTS)
        return command._replace(retry=command.retry._replace(max_attempts=attempts))


def refuse(owner: Owner, command: FailAttempt) -> None:
    """An attempt cannot start. While this node leads, nothing else would start it if the command did not arrive."""

    def answered(answer: Result | ProposalError) -> None:
        if isinstance(answer, ProposalError) and not owner.ended:
            owner.redispatch(command.id, command.epoch)

    owner.partition.submit(command, answered)
