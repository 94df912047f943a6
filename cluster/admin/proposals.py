"""Changes of the meta group that operators request: proposed, and refused with the error that fits."""

from __future__ import annotations

from typing import Final

from holdfast.cluster.errors import Conflict, Full, NotFound
from holdfast.cluster.registry.registry import Registry
from holdfast.statemachine.effects import Code, Result
from holdfast.statemachine.meta import MetaCommand

LEVEL: Final = 2


async def propose(registry: Registry, command: MetaCommand, *, what: str, hint: str) -> Result:
    """`what` needs level 2. `hint` is for a target that does not exist."""
    if registry.state.level < LEVEL:
        raise Conflict(
            f"{what} need every node of the cluster to run this release",
            "upgrade the others; `holdfast cluster status` shows their versions",
        )
    result = (await registry.propose(command)).result
    match result.code:
        case Code.NOT_FOUND:
            raise NotFound(result.message, hint)
        case Code.CONFLICT:
            raise Conflict(result.message)
        case Code.FULL:
            raise Full(result.message)
    return result
