"""Any history of a journal, against a model that keeps whole lists: at any time, and after every crash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from holdfast.log import group_log, journal, spans
from holdfast.log.errors import Corrupt
from holdfast.log.journal import Journal
from holdfast.log.messages import COMMANDS, Entry, GroupId, NodeId
from holdfast.log.records import Configuration
from holdfast.log.rows import RECENT, Rows
from holdfast.log.store import LmdbStore, Store
from tests.log.journals import everything
from tests.sim.disk import SimDisk

MEMBERS = (NodeId("n1"), NodeId("n2"), NodeId("n3"))


@dataclass
class Twin:
    """The expected state of a group."""

    epoch: int = 0
    term: int = 0
    vote: NodeId | None = None
    base: int = 0
    base_term: int = 0
    commit: int = 0
    entries: list[Entry] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.base + len(self.entries)

    def term_of(self, index: int) -> int | None:
        if index == self.base:
            return self.base_term
        return self.entries[index - self.base - 1][2] if self.base < index <= self.last else None

    def rebase(self, index: int, term: int) -> None:
        self.entries = self.entries[index - self.base :]
        self.base, self.base_term = index, term


@dataclass(frozen=True)
class Stone:
    """A forgotten group."""

    epoch: int
    term: int
    vote: NodeId | None


Model = dict[GroupId, Twin | Stone]


def copy_of(model: Model) -> Model:
    return {
        group: replace(twin, entries=list(twin.entries)) if isinstance(twin, Twin) else twin
        for group, twin in model.items()
    }


class History:
    def __init__(self, seed: int, open_store: Callable[[], Store], patch: pytest.MonkeyPatch) -> None:
        self.rng = rng = Random(seed)
        bounds: dict[str, tuple[ModuleType, list[int]]] = {
            "TRIM_ENTRIES": (group_log, [1, 2, 5, 2048]),
            "TAIL_BYTES_MIN": (journal, [20, 50]),
            "TAILS_BYTES": (journal, [50, 200, 2000, 1 << 22]),
            "CHECKED_ENTRIES": (group_log, [1, 3, 1024]),
            "SLICE_ENTRIES": (group_log, [1, 3, 4096]),
            "PIECE_ENTRIES": (group_log, [1, 3, 256]),
            "SPANS_MAX": (spans, [2, 4, 64]),
        }
        for name, (module, choices) in bounds.items():
            patch.setattr(module, name, rng.choice(choices))
        self.rows = Rows(
            groups_min=rng.choice([1, 1, 2, 4]),
            group_bytes_max=rng.choice([60, 200, 16384]),
            row_bytes_max=rng.choice([100, 400, 1 << 20]),
            recent_bytes=rng.choice([0, 100, 500, 3000, 1 << 21]),
            filed_every=rng.choice([1, 3, 64]),
            retired_max=rng.choice([1, 2, 16]),
            kept_bytes=rng.choice([0, 100, 1000, 1 << 20]),
            sparse=rng.choice([1, 1, 4]),
            moved_max=rng.choice([1, 2, 256]),
            commits_every=rng.choice([1, 2, 8]),
        )
        self.groups = [GroupId(number) for number in rng.sample(range(1, 200), rng.choice([1, 2, 5, 8]))]
        self.open_store = open_store
        self.store = open_store()
        self.journal = Journal(self.store, self.rows)
        self.model: Model = {}
        self.disk: Model = {}  # The durable state,
        self.flying: Model | None = None  # and that of the current commit.
        self.written = 0

    def twins(self) -> dict[GroupId, Twin]:
        return {group: twin for group, twin in self.model.items() if isinstance(twin, Twin)}

    # -- what can happen -------------------------------------------------------------------------------------------------

    def append(self, group: GroupId, size: int) -> None:
        twin, log = self.twins()[group], self.journal.groups[group]
        if twin.term == 0:
            self.raise_term(group, None)
        self.written += 1
        entry = bytes([COMMANDS]) + b"%d" % self.written + bytes(size), twin.last + 1, twin.term
        log.append(entry)
        twin.entries.append(entry)

    def raise_term(self, group: GroupId, vote: NodeId | None) -> None:
        twin = self.twins()[group]
        twin.term, twin.vote = twin.term + 1, vote
        self.journal.groups[group].set_vote(twin.term, vote)

    def truncate(self, group: GroupId) -> None:
        twin = self.twins()[group]
        if twin.last > twin.commit:
            low = self.rng.randint(twin.commit + 1, twin.last)
            self.journal.groups[group].truncate(low)
            del twin.entries[low - twin.base - 1 :]
            if self.rng.random() < 0.6:
                self.raise_term(group, None)

    def commit_some(self, group: GroupId) -> None:
        twin = self.twins()[group]
        twin.commit = self.rng.randint(twin.commit, twin.last)
        self.journal.groups[group].set_commit(twin.commit)

    def trim(self, group: GroupId) -> None:
        twin = self.twins()[group]
        index = self.rng.randint(twin.base, twin.commit)
        self.journal.groups[group].trim(index)
        twin.rebase(index, twin.term_of(index) or 0)

    def install(self, group: GroupId) -> None:
        """A state replaces the log, except for entries after it."""
        twin, rng = self.twins()[group], self.rng
        index = twin.commit + rng.randint(1, 6)
        term = twin.term_of(index)
        if term is not None and rng.random() < 0.6:
            twin.rebase(index, term)
        else:
            term = twin.term + 1 if term == twin.term else twin.term + rng.choice([0, 0, 1])
            if term > twin.term:
                twin.term, twin.vote = term, None
            twin.base, twin.base_term, twin.entries = index, term, []
        twin.commit = index
        self.journal.groups[group].reset(index, term)

    def several(self, group: GroupId) -> None:
        """Many changes of one group between two commits."""
        for _ in range(self.rng.randint(2, 6)):
            step = self.rng.choice([self.append_one, self.append_one, self.append_one, self.truncate, self.install])
            step(group)

    def append_one(self, group: GroupId) -> None:
        self.append(group, self.rng.choice([0, 30, 30, 250]))

    def append_many(self, _: GroupId) -> None:
        twins = list(self.twins())
        for group in self.rng.sample(twins, self.rng.randint(1, len(twins))):
            self.append(group, self.rng.choice([0, 5, 60]))

    def forget(self, group: GroupId) -> None:
        twin = self.twins()[group]
        self.journal.forget(group)
        self.model[group] = Stone(twin.epoch, twin.term, twin.vote)
        if self.rng.random() < 0.5:
            self.create(group)

    def create(self, group: GroupId) -> None:
        before = self.model.get(group)
        assert not isinstance(before, Twin)
        twin = Twin() if before is None else Twin(before.epoch + self.rng.choice([0, 1]), before.term, before.vote)
        self.journal.create(group, Configuration(twin.epoch, MEMBERS))
        self.model[group] = twin
        for _ in range(self.rng.randint(0, 3)):
            self.append(group, 3)

    def begin(self) -> None:
        if self.flying is None and self.journal.dirty:
            self.store.stage(self.journal.take_writes())
            if isinstance(self.store, SimDisk):
                self.store.begun = True
            self.flying = copy_of(self.model)

    def end(self) -> None:
        if self.flying is None:
            return
        self.store.commit()
        self.disk, self.flying = self.flying, None
        self.journal.persisted()
        self.compare(Journal(self.store, self.rows), self.disk)

    def crash(self) -> None:
        keep = self.rng.random() < 0.5 and self.flying is not None
        if isinstance(self.store, SimDisk):
            self.store.lose_power(keep_pending=keep)
        else:
            if keep:
                self.store.commit()
            self.store.close()
            self.store = self.open_store()
        if keep and self.flying is not None:
            self.disk = self.flying
        self.flying = None
        self.journal = Journal(self.store, self.rows)
        self.compare(self.journal, self.disk)
        self.model = copy_of(self.disk)
        for group, twin in self.twins().items():
            twin.commit = self.journal.groups[group].commit  # It may be behind.

    def damage(self) -> None:
        """One bit flips, or one key is lost: that is refused, or concerns nothing that is ever read."""
        assert isinstance(self.store, SimDisk)
        name = self.rng.choice(self.store.tables())
        key = self.rng.choice(self.store.keys(name))
        at = self.rng.randrange(1 << 20)
        self.store.flip_bit(name, key, at)
        # Rows also hold entries that were trimmed, truncated or moved, where damage does not matter if everything else
        # is intact.
        unread = name.startswith("log.") and int.from_bytes(key, "big") <= self.durable_base(name)
        unread |= name == RECENT and int.from_bytes(key, "big") < self.store.filed
        try:
            journal = Journal(self.store, self.rows)
            self.compare(journal, self.disk)
        except Corrupt:
            pass
        else:
            assert unread, f"bit {at} of {key.hex()} in {name} was accepted"
        self.store.flip_bit(name, key, at)

    def durable_base(self, table: str) -> int:
        twin = self.disk[GroupId(int(table.removeprefix("log.")))]
        assert isinstance(twin, Twin)
        return twin.base

    # -- what must be ----------------------------------------------------------------------------------------------------

    def compare(self, journal: Journal, model: Model) -> None:
        """A newly opened journal, and the durable state."""
        assert set(journal.groups) == {group for group, twin in model.items() if isinstance(twin, Twin)}
        for group, twin in model.items():
            if isinstance(twin, Stone):
                stone = journal.tombstones[group]
                assert (stone.configuration.epoch, stone.term, stone.vote) == (twin.epoch, twin.term, twin.vote)
                continue
            log = journal.groups[group]
            assert everything(log) == twin.entries
            assert (log.base_index, log.base_term, log.durable) == (twin.base, twin.base_term, twin.last)
            assert (log.configuration.epoch, log.term, log.vote) == (twin.epoch, twin.term, twin.vote)
            assert twin.base <= log.commit <= twin.last

    def check(self) -> None:
        rng = self.rng
        for group, twin in self.twins().items():
            log, durable = self.journal.groups[group], self.disk.get(group)
            assert (log.base_index, log.last_index, log.commit) == (twin.base, twin.last, twin.commit)
            assert (log.base_term, log.term, log.vote) == (twin.base_term, twin.term, twin.vote)
            assert log.last_term == (log.term_of(log.last_index) or 0)
            assert log.filed <= log.flying_last <= log.last_index
            assert len(log.places) == log.flying_last - log.filed
            assert len(log.headers) == log.last_index - log.flying_last
            assert log.last_index - log.filed <= len(log.tail)
            assert log.fresh_bytes == sum(log.lengths(log.flying_last + 1))
            for index in (twin.base - 1, twin.base, rng.randint(twin.base, twin.last), twin.last, twin.last + 1):
                assert log.term_of(index) == twin.term_of(index)
            if twin.entries:
                low = rng.randint(twin.base + 1, twin.last)
                found = log.entries(low, rng.randint(low, twin.last), bytes_max=rng.choice([1, 100, 1 << 20]))
                assert found and found == twin.entries[low - twin.base - 1 :][: len(found)]
            for index in range(twin.base + 1, log.durable + 1):
                assert isinstance(durable, Twin) and durable.last >= index
                assert (
                    index <= durable.base or durable.entries[index - durable.base - 1] == log.entries(index, index)[0]
                )

    def run(self, steps: int) -> None:
        rng = self.rng
        one_group: list[tuple[Callable[[GroupId], None], float]] = [
            (self.append_many, 12), (self.append_one, 5), (self.truncate, 3), (self.commit_some, 6), (self.trim, 2),
            (self.install, 2), (self.several, 1.5), (self.forget, 2), (lambda g: self.raise_term(g, MEMBERS[0]), 1),
        ]  # fmt: skip
        whole: list[tuple[Callable[[], None], float]] = [(self.begin, 14), (self.end, 14), (self.crash, 1)]
        if isinstance(self.store, SimDisk):
            whole.append((lambda: self.damage() if self.flying is None and self.disk else None, 0.5))
        weights = [weight * rng.choice([0.3, 1, 1, 2]) for _, weight in (*one_group, *whole)]
        for _ in range(steps):
            missing = [group for group in self.groups if group not in self.twins()]
            if missing and (len(missing) == len(self.groups) or rng.random() < 0.05):
                self.create(rng.choice(missing))
            (number,) = rng.choices(range(len(weights)), weights)
            if number < len(one_group):
                one_group[number][0](rng.choice(list(self.twins())))
            else:
                whole[number - len(one_group)][0]()
            self.check()
        for _ in range(3):
            self.end()
            self.begin()
        self.end()
        self.crash()
        assert sorted(self.journal._unfiled.values()) == list(self.journal._unfiled.values())
        rows = self.store.scan(RECENT, b"", b"\xff" * 9, bytes_max=1 << 30, count_max=1 << 20)
        numbers = [int.from_bytes(key, "big") for key, _ in rows]
        assert not numbers or numbers == list(range(self.journal.first_row, self.journal.next_row))


@pytest.mark.parametrize("seed", range(300))
def test_any_history_on_a_disk_that_forgets(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDisk("d")
    History(seed, lambda: disk, monkeypatch).run(150)


@pytest.mark.parametrize("seed", range(40))
def test_any_history_on_lmdb(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_store() -> LmdbStore:
        return LmdbStore.open(tmp_path / "data", node="n1", cluster="c1", map_bytes=1 << 16)

    history = History(seed, open_store, monkeypatch)
    history.run(120)
    history.store.close()
