"""Read-only access to the state of all partitions, for ingress and admin.

A reader uses one consistent view per partition and never holds it across an await. Long results are read in slices with
turns of the event loop in between, so that an operator's query does not delay the work.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol

from holdfast.cluster.errors import BadRequest, NotFound, Unavailable
from holdfast.cluster.peers.rpc import Refused
from holdfast.cluster.routing.facts import FACTS, Question
from holdfast.cluster.routing.merging import Slice, format_cursor, merge, parse_cursor
from holdfast.cluster.values.shared_store import Objects, ValueLost
from holdfast.log.errors import NotHosted, ProposalError
from holdfast.log.messages import APP_BYTES_MAX
from holdfast.sdk.ids import DeploymentId, InvocationId, PartitionNumber, numbers_of, partition_key, partition_of
from holdfast.sdk.journal import Step, unpack_step
from holdfast.statemachine import explain, history, lists, queries, refs
from holdfast.statemachine.blobs import chunks_of
from holdfast.statemachine.commands import Payload, Ref
from holdfast.statemachine.effects import Status
from holdfast.statemachine.history import EndedAttempt
from holdfast.statemachine.levels import LEVEL
from holdfast.statemachine.listing import POSITION_BYTES
from holdfast.statemachine.queries import FailedAttempt, Filter, ServiceStatistics, ShownFailure, Statistics
from holdfast.statemachine.records import (
    End,
    Invocation,
    Object,
    pack_invocation,
    pack_object,
    unpack_invocation,
    unpack_object,
)
from holdfast.statemachine.txn import ReadTxn, TwoWayTxn

PAGE_OF_SCAN: Final = 1000
CLOCKS_DIFFER_MS: Final = 3_600_000  # The clocks of nodes differ by far less.
_OLDEST: Final = b"o"  # ends the cursors of lists in that order
FIRST_FILTERS: Final = 6  # fields of a filter before level 2: a node of the previous release takes no more,
FIRST_DESCRIPTION: Final = 4  # nor more of a description
STATE_BYTES_MAX: Final = APP_BYTES_MAX // 2  # state of one key in one answer, which must fit a peer's message
SLICE_CHUNKS: Final = 8  # of a large value, per read


class Summary(NamedTuple):
    """What a client that waits for an invocation needs to know about it."""

    outcome: list[Any] | None  # None: not completed
    service: str
    handler: str
    deployment: DeploymentId | None


class PartitionState(Protocol):
    def read(self) -> AbstractContextManager[TwoWayTxn]: ...


class Led(Protocol):
    @property
    def is_leader(self) -> bool: ...


class Partition(Protocol):
    """The part of `cluster.partition.door.Partition` that is used here."""

    @property
    def number(self) -> int: ...

    @property
    def state(self) -> PartitionState: ...

    @property
    def group(self) -> Led: ...


class Description(NamedTuple):
    record: Invocation
    why_not_running: str
    last_failure: FailedAttempt | None
    outcome: list[Any] | None
    history: Sequence[EndedAttempt] = ()  # oldest first
    failure: ShownFailure | None = None  # as in lists


class Page(NamedTuple):
    records: list[Invocation]
    cursor: str | None  # None: there are no more
    failures: Mapping[InvocationId, ShownFailure] = {}  # of those that failed


class Keyed(NamedTuple):
    """One virtual object or workflow."""

    record: Object | None
    state: dict[str, Payload]  # Contains references only in transit: see `Reader.keyed`.
    complete: bool


class Reader:
    """Answers queries from the replicas of the cluster.

    Queries about one invocation or key, and `in_flight`, see everything acknowledged before (see `fresh`). Lists and
    statistics show what one replica has.

    A partition that is not on this node is read on a node that has it, by the same query (`serve`).
    """

    def __init__(
        self,
        count: int,
        hosted: Mapping[PartitionNumber, Partition],
        *,
        fresh: Callable[[PartitionNumber], Awaitable[None]],
        elsewhere: Callable[[PartitionNumber, str, Any], Awaitable[Any]],
        objects: Objects,
        level: Callable[[], int] = lambda: LEVEL,
    ) -> None:
        """`level` is the cluster's level: every node supports the queries of that level."""
        self._level = level
        self.count = count
        self._hosted = hosted
        self._fresh = fresh
        self._elsewhere = elsewhere
        self._objects = objects
        self._reading = asyncio.Lock()

    async def _ask(self, number: PartitionNumber, question: str, *arguments: Any, fresh: bool = True) -> Any:
        if number not in self._hosted:
            packed = await self._elsewhere(number, "read", (number, question, arguments, fresh))
            return _QUESTIONS[question].unpack(packed) if packed is not None else None
        return await self._answer(number, question, arguments, fresh=fresh)

    async def _answer(self, number: PartitionNumber, question: str, arguments: Sequence[Any], *, fresh: bool) -> Any:
        if fresh:
            await self._fresh(number)
        partition = self._hosted.get(number)
        if partition is None:
            raise NotHosted(f"partition {number} moved away")
        with partition.state.read() as txn:
            return _QUESTIONS[question].answer(txn, *arguments)

    async def serve(self, peer: str, argument: Any) -> Any:
        """Answer the query of a node that has no replica."""
        number, question, arguments, fresh = argument
        if number not in self._hosted or question not in _QUESTIONS:
            raise Refused("NotHosted", f"partition {number} is not here")
        try:
            answer = await self._answer(number, question, arguments, fresh=fresh)
        except ProposalError as error:
            raise Refused(type(error).__name__, str(error)) from None
        if answer is None:
            return None
        packed = _QUESTIONS[question].pack(answer)
        return packed[:FIRST_DESCRIPTION] if question == "describe" and self._level() < 2 else packed

    async def lookup(self, id_: InvocationId) -> Summary | None:
        found: Summary | None = await self._ask(partition_of(id_, self.count), "lookup", id_)
        return found

    async def completed(self, number: PartitionNumber, ids: list[InvocationId]) -> list[tuple[InvocationId, list[Any]]]:
        """Those of `ids` that have an outcome."""
        found: list[tuple[InvocationId, list[Any]]] = await self._ask(number, "completed", ids)
        return found

    async def paused(self, number: PartitionNumber, ids: list[InvocationId]) -> list[InvocationId]:
        """Those of `ids` that are paused, as far as a replica knows."""
        found: list[InvocationId] = await self._ask(number, "paused", ids, fresh=False)
        return found

    async def value(self, id_: InvocationId, ref: Ref) -> bytes:
        """A large value of the partition of `id_`. Raises NotFound, StoreDown, ValueLost or a ProposalError."""
        return await self._value(partition_of(id_, self.count), ref)

    async def _value(self, number: PartitionNumber, ref: Ref) -> bytes:
        """Read a value in slices, or from the shared store. The caller may be ahead of the replica here."""
        slices: list[bytes] = []
        for first in range(0, chunks_of(refs.stored_size(ref.data)), SLICE_CHUNKS):
            found = await self._ask(number, "blob", ref.data, first, fresh=False)
            if found is None:
                found = await self._ask(number, "blob", ref.data, first)
            if found is None:
                raise NotFound("the value no longer exists")
            if isinstance(found, str):
                return refs.restored(ref, await self._stored(number, ref, found))
            slices.append(found)
            await asyncio.sleep(0)
        return refs.restored(ref, b"".join(slices))

    async def _stored(self, number: PartitionNumber, ref: Ref, name: str) -> bytes:
        """Read from the shared store.

        A lagging replica may name a deleted object, so only an up-to-date one can report a loss.
        """
        try:
            return await self._objects.get(number, ref.data, name)
        except ValueLost as error:
            now = await self._ask(number, "blob", ref.data, 0)
            if not isinstance(now, str):
                raise NotFound("the value no longer exists") from None
            if now != name:
                return await self._objects.get(number, ref.data, now)
            self._objects.report(error, f"partition {number}")
            raise

    async def describe(self, id_: InvocationId) -> Description | None:
        found: Description | None = await self._ask(partition_of(id_, self.count), "describe", id_)
        return found

    async def journal(self, id_: InvocationId, start: int, limit: int) -> list[Step] | None:
        """The steps of an invocation, or None if it does not exist."""
        steps = await self._ask(partition_of(id_, self.count), "journal", id_, start, limit)
        return [unpack_step(raw) for raw in steps] if steps is not None else None

    async def ask(self, number: PartitionNumber, question: str, *arguments: Any, fresh: bool = False) -> Any:
        """A question that nodes answer since level 2. Raises Unavailable while other nodes may run the previous release."""
        if not self.may_ask(number):
            raise Unavailable(
                f"partition {number} is on other nodes, and some nodes run a release that does not answer this",
                "finish the upgrade of all nodes",
            )
        if fresh:
            return await self._ask(number, question, *arguments, fresh=True)
        return await self._slice_of(number, question, *arguments)

    async def _slice_of(self, number: PartitionNumber, question: str, *arguments: Any) -> Any:
        """A slice of a long list. Only one is read in each turn of the loop, whatever the number of partitions and lists."""
        if number not in self._hosted:
            return await self._ask(number, question, *arguments, fresh=False)
        async with self._reading:
            found = await self._ask(number, question, *arguments, fresh=False)
            await asyncio.sleep(0)
            return found

    def may_ask(self, number: PartitionNumber) -> bool:
        return number in self._hosted or self._level() >= 2

    async def page(self, wanted: Filter, cursor: str | None, limit: int, *, oldest: bool = False) -> Page:
        """Matching invocations of all partitions, newest or oldest first. A short page may still have a cursor."""
        after = _parse_cursor(cursor, oldest=oldest)
        numbers: Collection[PartitionNumber] = numbers_of(self.count)
        if wanted.service is not None and wanted.key is not None:
            # All invocations of a key live in one partition.
            numbers = [partition_of(partition_key(wanted.service, wanted.key), self.count)]
        if wanted.parent is not None:
            wanted = await self._after_parent(wanted, wanted.parent)

        async def read(number: PartitionNumber, position: bytes, size: int) -> Slice[Invocation]:
            records, more = await self._slice(number, wanted, position, size, oldest=oldest)
            return [(lists.rank(record, oldest=oldest), record) for record in records], more

        found, more = await merge(numbers, after, limit, read)
        following = format_cursor(more + _OLDEST * oldest) if more is not None else None
        return Page(found, following, await self._failures(found))

    async def _after_parent(self, wanted: Filter, parent: InvocationId) -> Filter:
        """Calls begin after their caller, so those of a new one are found without reading all older invocations."""
        try:
            caller = await self.describe(parent)
        except ProposalError:
            return wanted  # Its partition does not answer. Its calls are found anyway.
        if caller is None:
            return wanted
        since_ms = max(caller.record.created_ms - CLOCKS_DIFFER_MS, wanted.created_since_ms or 0, 0)
        return wanted._replace(created_since_ms=since_ms)

    async def _failures(self, records: Sequence[Invocation]) -> dict[InvocationId, ShownFailure]:
        """Those of invocations that a list shows, as far as their nodes know the question."""
        by_partition: dict[PartitionNumber, list[InvocationId]] = {}
        for record in records:
            if record.failures_total or record.lapses or record.step_failures or record.end > End.SUCCEEDED:
                by_partition.setdefault(partition_of(record.id, self.count), []).append(record.id)
        asked = [number for number in by_partition if self.may_ask(number)]
        answers = await asyncio.gather(*(self._slice_of(number, "failures", by_partition[number]) for number in asked))
        return {id_: failure for answer in answers for id_, failure in answer}

    async def _slice(
        self, number: PartitionNumber, wanted: Filter, position: bytes, limit: int, *, oldest: bool
    ) -> tuple[list[Invocation], bytes | None]:
        """Read more of one partition."""
        if self._level() >= 2:
            slice_: tuple[list[Invocation], bytes | None] | None = await self._slice_of(
                number, "ordered", tuple(wanted), position, limit, oldest
            )
            if slice_ is not None:
                return slice_
        return await self._scan(number, wanted, position, limit, oldest=oldest)

    async def _scan(
        self, number: PartitionNumber, wanted: Filter, position: bytes, limit: int, *, oldest: bool
    ) -> tuple[list[Invocation], bytes | None]:
        """The same for a partition whose index is incomplete: scan all of it. An upgrade completes the index."""
        sent = tuple(wanted)
        if self._level() < 2:
            if wanted.asks_for_failures:
                raise Unavailable(
                    "invocations cannot be found by their failures while nodes run the previous release",
                    "finish the upgrade of all nodes, or leave out `failure` and `failure_code`",
                )
            sent = sent[:FIRST_FILTERS]  # A node of the previous release knows only these.
        best: list[tuple[bytes, Invocation]] = []
        after: bytes | None = b""
        passed = 0
        while after is not None:
            records, after = await self._slice_of(number, "slice", sent, after, PAGE_OF_SCAN)
            for record in records:
                where = lists.rank(record, oldest=oldest)
                if where > position and wanted.matches(record):
                    best.append((where, record))
            best.sort(key=lambda pair: pair[0])
            passed += len(best[limit:])
            del best[limit:]
        return [record for _, record in best], best[-1][0] if passed else None

    async def keyed(self, service: str, key: str) -> Keyed:
        number = partition_of(partition_key(service, key), self.count)
        keyed: Keyed = await self._ask(number, "keyed", service, key)
        state = dict(keyed.state)
        for name, payload in keyed.state.items():
            if not isinstance(payload, bytes):
                state[name] = await self._value(number, payload)
        return keyed._replace(state=state)

    async def statistics(self, *, fresh: bool = False) -> Statistics:
        """Sum over all partitions."""
        return add_statistics([await self._ask(number, "statistics", fresh=fresh) for number in numbers_of(self.count)])

    async def statistics_here(self) -> Statistics:
        """Sum over the partitions that this node leads, so that the nodes' figures add up to the cluster's."""
        led = [number for number, partition in self._hosted.items() if partition.group.is_leader]
        return add_statistics([await self._answer(number, "statistics", (), fresh=False) for number in led])

    async def in_flight(self, deployment: DeploymentId) -> int:
        """Number of incomplete invocations that are pinned to a deployment."""
        return (await self.statistics(fresh=True)).deployments.get(deployment, 0)


# -- queries: each reads one view of one partition, and knows how its answer is encoded --------------------------------


def _lookup(txn: ReadTxn, id_: InvocationId) -> Summary | None:
    record = queries.load(txn, id_)
    if record is None:
        return None
    outcome = queries.outcome(txn, id_) if record.status == Status.COMPLETED else None
    return Summary(outcome, record.service, record.handler, record.deployment)


def _completed(txn: ReadTxn, ids: list[InvocationId]) -> list[tuple[InvocationId, list[Any]]]:
    found = [(invocation, queries.outcome(txn, invocation)) for invocation in ids]
    return [(invocation, outcome) for invocation, outcome in found if outcome is not None]


def _blob(txn: ReadTxn, blob: bytes, first: int) -> bytes | str | None:
    """A slice of a large value, or the name of its object in the shared store."""
    last = min(first + SLICE_CHUNKS, chunks_of(refs.stored_size(blob)))
    try:
        if name := queries.place(txn, blob):
            return name
        return b"".join([queries.chunk(txn, blob, index) for index in range(first, last)])
    except queries.Gone:
        return None


def _describe(txn: ReadTxn, id_: InvocationId) -> Description | None:
    record = queries.load(txn, id_)
    if record is None:
        return None
    return Description(
        record=record,
        why_not_running=explain.why_not_running(txn, id_),
        last_failure=queries.last_failure(txn, id_),
        outcome=queries.outcome(txn, id_) if record.status == Status.COMPLETED else None,
        history=history.attempts(txn, id_) if record.lapses else (),
        failure=queries.shown_failure(txn, record),
    )


def _journal(txn: ReadTxn, id_: InvocationId, start: int, limit: int) -> list[bytes] | None:
    return queries.journal(txn, id_, start, limit) if queries.load(txn, id_) is not None else None


def _slice(txn: ReadTxn, wanted: Sequence[Any], after: bytes, limit: int) -> tuple[list[Invocation], bytes | None]:
    return queries.list_invocations(txn, Filter(*wanted), after, limit)


def _ordered(
    txn: TwoWayTxn, wanted: Sequence[Any], after: bytes, limit: int, oldest: bool
) -> tuple[list[Invocation], bytes | None] | None:
    return lists.ordered(txn, Filter(*wanted), after, limit, oldest=oldest)


def _failures(txn: ReadTxn, ids: Sequence[InvocationId]) -> list[tuple[InvocationId, ShownFailure]]:
    records = [record for id_ in ids if (record := queries.load(txn, id_)) is not None]
    found = [(record.id, queries.shown_failure(txn, record)) for record in records]
    return [(id_, failure) for id_, failure in found if failure is not None]


def _keyed(txn: ReadTxn, service: str, key: str) -> Keyed:
    record = queries.load_object(txn, service, key)
    if record is None:
        return Keyed(None, {}, True)
    return Keyed(record, *queries.eager_state(txn, record.id, STATE_BYTES_MAX))


def _pack_record(record: Invocation) -> tuple[InvocationId, bytes]:
    return record.id, pack_invocation(record)


def _unpack_description(row: Any) -> Description:
    record, why, failure, outcome, *later = row  # A node of the previous release sends no history.
    return Description(
        record=unpack_invocation(*record),
        why_not_running=why,
        last_failure=FailedAttempt(*failure) if failure is not None else None,
        outcome=outcome,
        history=[EndedAttempt(*each) for each in later[0]] if later else (),
        failure=ShownFailure(*later[1]) if later[1:] and later[1] is not None else None,
    )


def _unpack_statistics(row: Any) -> Statistics:
    services, *rest = row
    return Statistics({name: ServiceStatistics(*figures) for name, figures in services.items()}, *rest)


_QUESTIONS: Final[Mapping[str, Question]] = {
    **FACTS,
    "lookup": Question(_lookup, unpack=lambda row: Summary(*row)),
    "completed": Question(_completed, unpack=lambda row: [(id_, outcome) for id_, outcome in row]),
    "paused": Question(queries.paused),
    "blob": Question(_blob),
    "describe": Question(_describe, lambda it: (_pack_record(it.record), *it[1:]), _unpack_description),
    "journal": Question(_journal),
    "slice": Question(
        _slice,
        lambda it: ([_pack_record(record) for record in it[0]], it[1]),
        lambda row: ([unpack_invocation(*record) for record in row[0]], row[1]),
    ),
    "ordered": Question(
        _ordered,
        lambda it: ([_pack_record(record) for record in it[0]], it[1]),
        lambda row: ([unpack_invocation(*record) for record in row[0]], row[1]),
    ),
    "failures": Question(
        _failures,
        lambda rows: [(id_, tuple(failure)) for id_, failure in rows],
        lambda rows: [(InvocationId(id_), ShownFailure(*failure)) for id_, failure in rows],
    ),
    "keyed": Question(
        _keyed,
        lambda it: ((it.record.id, pack_object(it.record)) if it.record is not None else None, *it[1:]),
        lambda row: Keyed(unpack_object(*row[0]) if row[0] is not None else None, *row[1:]),
    ),
    "statistics": Question(queries.statistics, unpack=_unpack_statistics),
}


def add_statistics(each: Sequence[Statistics]) -> Statistics:
    services: dict[str, ServiceStatistics] = {}
    deployments: Counter[DeploymentId] = Counter()
    for one in each:
        deployments.update(one.deployments)
        for name, figures in one.services.items():
            known = services.get(name)
            if known is None:
                services[name] = figures
                continue
            by_status = {status: known.by_status[status] + count for status, count in figures.by_status.items()}
            totals = [mine + theirs for mine, theirs in zip(known[1:], figures[1:], strict=True)]
            services[name] = ServiceStatistics(by_status, *totals)
    return Statistics(
        services=services,
        deployments=dict(deployments),
        completed=sum(one.completed for one in each),
        completed_bytes=sum(one.completed_bytes for one in each),
        blobs=sum(one.blobs for one in each),
        blob_bytes=sum(one.blob_bytes for one in each),
        stored=sum(one.stored for one in each),
        stored_bytes=sum(one.stored_bytes for one in each),
        gone=sum(one.gone for one in each),
    )


def _parse_cursor(cursor: str | None, *, oldest: bool) -> bytes:
    if cursor is None:
        return b""
    raw = parse_cursor(cursor, (POSITION_BYTES, POSITION_BYTES + len(_OLDEST)))
    if (raw[POSITION_BYTES:] == _OLDEST) is not oldest:
        raise BadRequest("the cursor belongs to a list in the other order", "pass `order` as for the previous page")
    return raw[:POSITION_BYTES]
