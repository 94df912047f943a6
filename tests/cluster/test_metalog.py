"""The log of the meta group, seen from a node that does not lead it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.cluster import metalog
from holdfast.cluster.metalog import MetaLog
from holdfast.cluster.rpc import Rpc
from holdfast.log.errors import ProposalError
from holdfast.log.node import Group


class LeaderAt(Rpc):
    """Whoever is asked says that so much is committed."""

    def __init__(self, index: int) -> None:
        super().__init__(lambda *_: True)
        self.index = index

    async def ask(self, *_: Any, **__: Any) -> Any:
        return self.index


def follower(applied: int) -> Group:
    group = SimpleNamespace(is_leader=False, leader="n2", status=lambda: SimpleNamespace(applied=applied))
    return cast(Group, group)


async def test_a_node_that_has_caught_up_is_fresh() -> None:
    await MetaLog("n1", lambda: follower(7), LeaderAt(7)).fresh()


async def test_a_node_that_stays_behind_never_calls_itself_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metalog, "WAIT_S", 0.05)

    with pytest.raises(ProposalError):
        await MetaLog("n1", lambda: follower(6), LeaderAt(7)).fresh()
