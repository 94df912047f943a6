"""The engine's parent is the audited one, and does nothing by itself."""

from __future__ import annotations

import hashlib
import inspect

import pysyncobj.pickle
import pytest
from pysyncobj import syncobj as stock

from holdfast.log.audit import AUDITED, check_parent, source_hashes
from holdfast.log.engine import Engine
from holdfast.log.errors import EngineFault, EngineNotAudited
from holdfast.log.messages import NodeId
from tests.log.cluster import Cluster

# The parent


def test_the_installed_parent_is_the_audited_one() -> None:
    assert source_hashes() == AUDITED
    check_parent()


@pytest.mark.parametrize("name", ["_SyncObj__onMessageReceived", "_SyncObj__sendAppendEntries", "_onTick"])
def test_a_parent_whose_source_changed_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def changed(self: object, *_: object) -> None:
        """Not the audited code."""

    monkeypatch.setattr(stock.SyncObj, name, changed)
    check_parent.cache_clear()
    try:
        with pytest.raises(EngineNotAudited, match=name) as refusal:
            Cluster("a")
        assert "pysyncobj==0.3.17" in str(refusal.value)
    finally:
        check_parent.cache_clear()


def test_a_parent_without_a_method_we_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(stock.SyncObj, "_SyncObj__loadDumpFile")
    check_parent.cache_clear()
    try:
        with pytest.raises(EngineNotAudited, match=r"0\.3\.17"):
            check_parent()
    finally:
        check_parent.cache_clear()


def test_every_method_we_override_is_audited() -> None:
    """A method of the parent that our class replaces could change unnoticed if the hashes did not cover it."""
    layers = Engine.__mro__[: Engine.__mro__.index(stock.SyncObj)]
    replaced = {name for layer in layers for name in vars(layer)} & set(vars(stock.SyncObj))
    ours = {name for name in replaced if callable(getattr(stock.SyncObj, name))}

    assert [layer.__name__ for layer in layers] == ["SyncObj"] * len(layers) and len(layers) > 1
    assert ours - set(AUDITED) - {"__module__", "__doc__"} == set()
    assert {name for name in AUDITED if name in replaced} >= {
        "_SyncObj__setState",
        "_SyncObj__onBecomeLeader",
        "_onTick",
    }


def test_every_method_of_the_parent_that_touches_the_world_or_the_state_is_forbidden() -> None:
    """5, 6, 8, 10, 13, 15, 16, 26, 38: its code for dumps, forks, application and membership is unreachable."""
    c = Cluster()
    engine = c.engine("a")
    forbidden = [
        "_onTick", "_checkCommandsToApply", "_applyCommand", "_SyncObj__applyLogEntries", "_SyncObj__doApplyCommand",
        "_SyncObj__loadDumpFile", "_SyncObj__tryLogCompaction", "_SyncObj__parseChangeClusterRequest",
        "_SyncObj__doChangeCluster", "_SyncObj__changeCluster", "_SyncObj__updateClusterConfiguration",
        "_SyncObj__deleteEntriesTo",
    ]  # fmt: skip
    for name in forbidden:
        with pytest.raises(EngineFault, match="must not be reached"):
            getattr(engine, name)()


def test_the_parent_has_no_socket_thread_file_or_journal_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """7, 12, 32, 35, 36: its transport, journal files and encryption are not used."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the parent reached for the world")

    for name in ("threading.Thread.start", "socket.socket", "os.fork"):
        monkeypatch.setattr(name, refuse)
    c = Cluster()
    c.elect("a")
    assert c.write("a", b"x").index
    engine = c.engine("a")
    assert engine._SyncObj__raftLog.log is c.log("a")
    assert type(engine._SyncObj__transport).__name__ == "_Outlet"


def test_nothing_is_unpickled() -> None:
    """34"""
    for load in (pysyncobj.pickle.loads, pysyncobj.pickle.load):
        with pytest.raises(EngineFault, match="pickle is disabled"):
            load(b"anything")
    assert stock.pickle is pysyncobj.pickle


def test_the_documented_hash_is_of_the_source() -> None:
    """So that a reader can check the table of hashes by hand."""
    source = inspect.getsource(stock.SyncObj._SyncObj__setCurrentTerm)

    assert hashlib.sha256(source.encode()).hexdigest()[:16] == AUDITED["_SyncObj__setCurrentTerm"]


def test_the_engine_has_no_clock_and_no_randomness_of_its_own() -> None:
    """Two engines with the same input do the same."""

    def history() -> list[bytes]:
        c = Cluster("abcde")
        frames: list[bytes] = []
        for _ in range(40):
            c.run(0.1)
            c.crash("e") if c.members[NodeId("e")].running else c.restart("e")
            for wire in c.wires.values():
                frames += [frame for _, frame in wire]
            frames.append(repr([(c.engine(n).term, c.leaders()) for n in "abcd"]).encode())
        return frames

    assert history() == history()


def test_the_engine_stays_small_enough_to_be_worth_keeping() -> None:
    """ADR 1: beyond this, an engine of our own would be less code to trust."""
    layers = Engine.__mro__[: Engine.__mro__.index(stock.SyncObj)]
    source = [line.strip() for layer in layers for line in inspect.getsource(layer).splitlines()]
    code = [line for line in source if line and not line.startswith("#")]

    assert 100 < len(code) <= 800
