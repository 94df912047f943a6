"""The invariants of a partition's tables after every command: each index agrees with the records it indexes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from holdfast.sdk.ids import InvocationId, ObjectId
from holdfast.sdk.journal import Op
from holdfast.statemachine import blobs, failing, history, inbox, queries, refs, tables, tags, timers, values
from holdfast.statemachine.commands import Mode, Ref, decode_command
from holdfast.statemachine.effects import STATUS_NAMES, Status
from holdfast.statemachine.records import (
    INDEXED,
    End,
    Invocation,
    unpack,
    unpack_blob,
    unpack_completed,
    unpack_completed_outcome,
    unpack_invocation,
    unpack_object,
)
from holdfast.statemachine.txn import ReadTxn


def check(txn: ReadTxn) -> None:
    Check(txn).everything()


class Check:
    def __init__(self, txn: ReadTxn) -> None:
        self.txn = txn
        self.active = {ident: unpack_invocation(ident, raw) for ident, raw in self.of_invocations(tables.ACTIVE)}
        self.completed = {ident: unpack_completed(ident, raw) for ident, raw in self.of_invocations(tables.COMPLETED)}
        self.steps: dict[tuple[InvocationId, int], list[Any]] = {}
        self.sizes: Counter[InvocationId] = Counter()
        self.lengths: Counter[InvocationId] = Counter()
        for key, raw in self.rows(tables.JOURNAL):
            ident, index = InvocationId(key[1:17]), int.from_bytes(key[17:], "big")
            self.steps[ident, index] = unpack(raw)
            self.sizes[ident] += len(raw)
            self.lengths[ident] += 1

    def rows(self, table: bytes) -> list[tuple[bytes, bytes]]:
        return list(self.txn.scan(table, tables.after(table)))

    def of_invocations(self, table: bytes) -> list[tuple[InvocationId, bytes]]:
        return [(InvocationId(key[1:]), raw) for key, raw in self.rows(table)]

    def everything(self) -> None:
        assert not self.active.keys() & self.completed.keys(), "active and completed are apart"
        self.journals()
        self.index()
        self.failing()
        self.waiting_steps()
        self.timers()
        self.keys()
        self.promises()
        self.approvals()
        self.retention()
        self.counters()
        self.blobs()
        self.hooks()

    def journals(self) -> None:
        for ident, record in {**self.active, **self.completed}.items():
            assert self.lengths[ident] == record.length
            assert record.status == Status.COMPLETED or self.sizes[ident] == record.size
            assert all((ident, index) in self.steps for index in range(record.length)), "a journal has no hole"
            orders = [max(self.steps[ident, index][3:5]) for index in range(record.length)]
            assert max(orders) <= record.order or record.status == Status.COMPLETED
        assert {ident for ident, _ in self.steps} <= self.active.keys() | self.completed.keys()

    def is_pending(self, ident: InvocationId, index: int) -> bool:
        op, _, _, _, done, outcome, abandoned = self.steps[ident, index][:7]
        if done or abandoned:
            return False
        assert outcome is None and op in (Op.RUN, Op.SLEEP, Op.CALL, Op.PROMISE, Op.AWAKEABLE, Op.ATTACH, Op.APPROVAL)
        return True

    def index(self) -> None:
        about = queries.meta(self.txn)
        rows = {key[1:] for key, _ in self.rows(tables.CREATED)}
        every = {**self.active, **self.completed}
        expected = {tables.position(record.created_ms, ident) for ident, record in every.items()}
        assert rows <= expected
        is_complete = about.level >= 2 and about.indexed == INDEXED
        assert not is_complete or rows == expected
        tagged = {
            tags.rows_with(name, value) + tables.position(record.created_ms, ident)
            for ident, record in every.items()
            for name, value in (record.tags or {}).items()
        }
        assert {key for key, _ in self.rows(tables.TAGGED)} == tagged
        failed = {self.failing_row(ident, record) for ident, record in every.items()} - {b""}
        listed = {key for key, _ in self.rows(tables.FAILING)}
        assert listed == failed if is_complete else listed <= failed
        retentions = {tables.kept_key(record.retention_ms) for record in self.completed.values()}
        assert not is_complete or retentions <= {key for key, _ in self.rows(tables.KEPT)}

    def failing_row(self, ident: InvocationId, record: Invocation) -> bytes:
        """Its row among the failing invocations; empty: it has none."""
        where = tables.position(record.created_ms, ident)
        if record.status == Status.COMPLETED:
            assert not record.in_failing
            return failing.rows_ended(record.code) + where if record.end != End.SUCCEEDED else b""
        shown = queries.shown_failure(self.txn, record)
        assert record.in_failing or shown is None or queries.meta(self.txn).indexed != INDEXED
        return failing.rows_of(failing.ACTIVE) + where if record.in_failing else b""

    def failing(self) -> None:
        """Failed tries of steps and unsuccessful attempts. Level 1 did not count them, so it has no rows for them."""
        tries: Counter[InvocationId] = Counter()
        for (ident, index), step in self.steps.items():
            if ident in self.active and self.is_pending(ident, index):
                op, _, argument = step[:3]
                tries[ident] += argument[1] if op == Op.RUN and len(argument) > 4 else 0
        for ident, record in self.active.items():
            assert 0 <= record.step_failures <= tries[ident]
        every = {**self.active, **self.completed}
        rows = {ident: unpack(raw) for ident, raw in self.of_invocations(tables.HISTORY)}
        assert rows.keys() == {ident for ident, record in every.items() if record.lapses}
        for ident, kept in rows.items():
            assert len(kept) == min(every[ident].lapses, history.KEPT)
        assert {key[1:] for key, _ in self.rows(tables.FAILURE)} <= every.keys()

    def waiting_steps(self) -> None:
        listed = [(key[1:17], int.from_bytes(key[17:], "big")) for key, _ in self.rows(tables.PENDING)]
        found = sorted(which for which in self.steps if which[0] in self.active and self.is_pending(*which))
        assert listed == found
        per_invocation = Counter(ident for ident, _ in listed)
        for ident, record in self.active.items():
            assert record.pending == per_invocation[ident]
            assert record.status != Status.SUSPENDED or record.pending, "who is suspended waits for something"

    def timers(self) -> None:
        every = [timers.unpack_key(key) for key, _ in self.rows(tables.TIMER)]
        listed = [timer for timer in every if timer.kind is not timers.Kind.PROMISES]
        wanted = [
            timers.of_invocation(record.due_ms, ident)
            for ident, record in self.active.items()
            if record.status in (Status.SCHEDULED, Status.BACKING_OFF)
        ]
        for (ident, index), step in self.steps.items():
            if ident not in self.active or not self.is_pending(ident, index):
                continue
            if step[0] == Op.SLEEP:
                wanted.append(timers.of_step(step[2][1], ident, index))
            elif step[0] == Op.RUN and len(step[2]) > 2 and step[2][2]:
                wanted.append(timers.of_step(step[2][2], ident, index))
            elif step[0] == Op.APPROVAL:
                found = inbox.approval(self.txn, ident, index)
                assert found is not None
                dues = {found.due_ms, found.remind_ms if not found.reminded_ms else 0} - {0}
                wanted += [timers.of_step(due_ms, ident, index) for due_ms in dues]
        assert sorted(map(timers.pack_key, listed)) == sorted(map(timers.pack_key, wanted))

    def holds(self, record: Invocation) -> bool:
        return (
            record.mode in (Mode.EXCLUSIVE, Mode.WORKFLOW)
            and record.oid != b""
            and record.status not in (Status.SCHEDULED, Status.QUEUED)
        )

    def keys(self) -> None:
        objects = {key[1:]: unpack_object(ObjectId(key[1:]), raw) for key, raw in self.rows(tables.OBJECT)}
        assert not any(keyed.is_idle for keyed in objects.values())
        holders = Counter((record.oid, record.id) for record in self.active.values() if self.holds(record))
        assert holders == Counter((oid, keyed.holder) for oid, keyed in objects.items() if keyed.holder), "one writer"
        queued = {(record.oid, record.place): record.id for record in self.active.values() if record.status == 1}
        listed = {(key[1:17], int.from_bytes(key[17:], "big")): ident for key, ident in self.rows(tables.QUEUE)}
        assert listed == queued
        waiting = Counter(oid for oid, _ in listed)
        names: Counter[bytes] = Counter()
        sizes: Counter[bytes] = Counter()
        for key, payload in self.rows(tables.VALUE):
            names[key[1:17]] += 1
            sizes[key[1:17]] += len(key) + refs.size_of(values.stored(self.txn, key, payload))
        promises = Counter(key[1:17] for key, _ in self.rows(tables.PROMISE))
        assert waiting.keys() | names.keys() | promises.keys() <= objects.keys()
        for oid, keyed in objects.items():
            assert (keyed.waiting, keyed.names, keyed.size) == (waiting[oid], names[oid], sizes[oid])
            assert keyed.promises == promises[oid]
            assert keyed.holder or not keyed.waiting, "nobody waits for a key that is free"

    def promises(self) -> None:
        listed = []
        for key, raw in self.rows(tables.PROMISE):
            outcome, waiters = unpack(raw)
            assert outcome is None or not waiters
            listed += [(ident, index, key[17:].decode()) for ident, index in waiters]
        wanted = [
            (*which, step[2][0])
            for which, step in self.steps.items()
            if step[0] == Op.PROMISE and which[0] in self.active and self.is_pending(*which)
        ]
        assert sorted(listed) == sorted(wanted)

    def approvals(self) -> None:
        """The inbox has the approvals that wait, and every other one has an outcome that can be read."""
        rank: bytes | None = b""
        listed = []
        while rank is not None:
            rows, rank = inbox.approvals(self.txn, inbox.Wanted(), rank, 100)
            listed += [(row.invocation, row.step) for _, row in rows]
        assert len(listed) == len(self.rows(tables.APPROVAL))
        wanted = []
        for which, step in self.steps.items():
            if step[0] == Op.APPROVAL:
                found = inbox.approval(self.txn, *which)
                assert found is not None
                if found.status == inbox.WAITING:
                    wanted.append(which)
        assert sorted(listed) == sorted(wanted)

    def retention(self) -> None:
        listed = [(key[9:], int.from_bytes(key[1:9], "big")) for key, _ in self.rows(tables.EXPIRY)]
        assert sorted(listed) == sorted((ident, record.due_ms) for ident, record in self.completed.items())
        about = queries.meta(self.txn)
        size = sum(len(raw) for _, raw in self.rows(tables.COMPLETED))
        assert about.completed == len(self.completed)
        assert about.completed_bytes == size + sum(
            record.size + record.blob_bytes for record in self.completed.values()
        )

    def counters(self) -> None:
        found = queries.statistics(self.txn)
        records = [*self.active.values(), *self.completed.values()]
        statuses = Counter(STATUS_NAMES[record.status] for record in records)
        assert found.by_status == {name: statuses[name] for name in STATUS_NAMES.values()} or not found.services
        pinned = Counter(record.deployment for record in self.active.values() if record.deployment is not None)
        assert found.deployments == dict(pinned)
        assert len(self.rows(tables.LISTENER)) <= sum(record.listeners for record in self.active.values())

    def blobs(self) -> None:
        """The reference count of each value is exact; a value without references has a timer that deletes it."""
        counted: Counter[bytes] = Counter()
        for ident, record in {**self.active, **self.completed}.items():
            steps = [self.steps[ident, index] for index in range(record.length)]
            found = [ref for step in steps for ref in refs.in_step(step[0], step[2], step[5])]
            counted.update(ref.data for ref in found)
            assert record.blobs == len(found)
            assert record.status == Status.COMPLETED or record.blob_bytes == sum(map(refs.size_of, found))
        for _, raw in self.rows(tables.COMPLETED):
            self.count(counted, refs.in_outcome(unpack_completed_outcome(raw)))
        for _, raw in self.rows(tables.PROMISE):
            self.count(counted, refs.in_outcome(unpack(raw)[0]))
        for key, raw in self.rows(tables.LARGE):
            assert self.txn.get(tables.VALUE + key[1:]) == b""
            self.count(counted, unpack(raw))
        for key, raw in self.rows(tables.PARCEL):
            message = self.txn.get(tables.OUTBOX + key[1:])
            assert message is not None and refs.in_command(decode_command(message)) == unpack(raw)
            for ref in unpack(raw):
                self.count(counted, ref)
        rows = {key[1:]: unpack_blob(key[1:], raw) for key, raw in self.rows(tables.BLOB)}
        pieces: Counter[bytes] = Counter()
        size = 0
        for key, data in self.rows(tables.CHUNK):
            pieces[key[1:41]] += 1
            size += len(data)
        assert pieces == Counter({blob: row.chunks for blob, row in rows.items()})
        stored = {blob: row.object for blob, row in rows.items() if row.object}
        assert all(not rows[blob].chunks and blob[:32].hex() in name for blob, name in stored.items()), "one place each"
        gone = {key[1:].decode() for key, _ in self.rows(tables.GONE)}
        assert not gone & {*stored.values()}, "what is deleted is not referred to"
        assert counted == Counter({blob: row.refs for blob, row in rows.items() if row.refs})
        assert all(blobs.is_whole(row) for row in rows.values() if row.refs), "nothing refers to half a value"
        due = [(key[9:], int.from_bytes(key[1:9], "big")) for key, _ in self.rows(tables.BLOB_DUE)]
        assert sorted(due) == sorted((blob, row.due_ms) for blob, row in rows.items() if not row.refs)
        about = queries.meta(self.txn)
        assert (about.blobs, about.blob_bytes) == (len(rows), size)
        sizes = sum(refs.stored_size(blob) for blob in stored)
        assert (about.stored, about.stored_bytes, about.gone) == (len(stored), sizes, len(gone))

    def hooks(self) -> None:
        """Each hook knows how many notices wait for it. A deleted one is here as long as there are any."""
        rows = Counter(key[1:9] for key, _ in self.rows(tables.NOTICE))
        found = queries.hooks(self.txn)
        assert rows == Counter({hook.id: hook.pending for hook in found if hook.pending})
        assert all(hook.pending for hook in found if hook.gone) and all(hook.dropped >= 0 for hook in found)
        assert not found or queries.meta(self.txn).hooks
        for hook in found:
            for notice in queries.notices(self.txn, hook.id, 10_000):
                assert 0 < notice.sequence <= queries.meta(self.txn).notices and notice.event in (1, 2, 4, 8, 16, 32)

    @staticmethod
    def count(counted: Counter[bytes], ref: Ref | None) -> None:
        if ref is not None:
            counted[ref.data] += 1
