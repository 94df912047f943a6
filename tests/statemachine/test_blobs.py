"""Large values: kept once, referred to by records, and gone when nothing refers to them."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sdk.frames import TO_NODE, decode_batch
from holdfast.sdk.ids import InvocationId, PartitionNumber, partition_of
from holdfast.sdk.journal import Op, ProtocolError, unpack_step
from holdfast.statemachine import explain, queries, refs, tables
from holdfast.statemachine.blobs import (
    CHUNK_BYTES,
    KEEP_MS,
    KEPT_MS,
    created_ms_of,
    is_known,
    object_name,
)
from holdfast.statemachine.commands import (
    CompletePromise,
    CompleteStep,
    Deliver,
    FireTimers,
    ForgetObjects,
    Invoke,
    KeepBlob,
    Mode,
    PostponeAttempt,
    Purge,
    PutBlob,
    Ref,
    Restart,
    SetLimits,
    SetState,
    TouchBlob,
    TrimOutbox,
    decode_command,
    encode_command,
)
from holdfast.statemachine.effects import Code, DeleteObjects, SendCompletion, Status
from tests.statemachine import invariants
from tests.statemachine.rig import HOUR_MS, Rig, failure, ident

LARGE = b"L" * (2 * CHUNK_BYTES + 5)
OTHER = b"another large value"


def stage(rig: Rig, value: bytes) -> Ref:
    ref, stored = refs.make(value)
    for index, begin in enumerate(range(0, len(stored), CHUNK_BYTES)):
        rig.do(PutBlob(ref.data, index, bytes(stored[begin : begin + CHUNK_BYTES])))
        assert rig.result.code in (0, 200), rig.result
    return ref


def rows(rig: Rig, table: bytes) -> int:
    return len(list(rig.txn.scan(table, tables.after(table))))


def begin(rig: Rig, name: str, payload: bytes | Ref, *, key: str | None = None) -> InvocationId:
    which = ident(name, key=key)
    mode = Mode.PLAIN if key is None else Mode.EXCLUSIVE
    rig.do(Invoke(which, "greeter", "greet", key, mode, payload, {}, 0, None, -1, HOUR_MS))
    return which


def collected(rig: Rig) -> bool:
    invariants.check(rig.txn)
    rig.pass_time(KEPT_MS)
    return rows(rig, tables.BLOB) == rows(rig, tables.CHUNK) == 0


def test_equal_values_of_many_invocations_are_kept_once_until_the_last_is_purged() -> None:
    rig = Rig()
    first = begin(rig, "a", stage(rig, LARGE))
    second = begin(rig, "b", stage(rig, LARGE))

    assert (rows(rig, tables.BLOB), rows(rig, tables.CHUNK)) == (1, 3)
    assert queries.statistics(rig.txn)[-5:] == (1, len(LARGE), 0, 0, 0)
    assert [rig.load(each).blob_bytes for each in (first, second)] == [len(LARGE)] * 2
    [raw] = queries.journal(rig.txn, second, 0, 10)
    assert len(raw) < 100 and unpack_step(queries.whole_step(rig.txn, raw)).outcome == [0, LARGE]

    rig.complete(first)
    rig.complete(second)
    rig.do(Purge(first))
    assert not collected(rig)
    rig.do(Purge(second))
    rig.pass_time(KEPT_MS - 1)
    assert rows(rig, tables.CHUNK) == 3, "whoever was answered with it can still read it"
    rig.pass_time(1)
    assert rows(rig, tables.BLOB) == rows(rig, tables.CHUNK) == rows(rig, tables.BLOB_DUE) == 0
    assert queries.statistics(rig.txn)[-5:] == (0, 0, 0, 0, 0)


def test_a_reference_to_a_missing_value_is_refused_and_changes_nothing() -> None:
    rig = Rig()
    ref, stored = refs.make(LARGE)
    begin(rig, "a", ref)
    assert rig.result.code == Code.VALUE_MISSING and not rig.effects

    rig.do(PutBlob(ref.data, 1, bytes(stored[CHUNK_BYTES : 2 * CHUNK_BYTES])))
    rig.do(TouchBlob(ref.data, True))
    assert rig.result.code == 404, "not all of it"
    begin(rig, "a", ref)
    assert rig.result.code == Code.VALUE_MISSING and queries.load(rig.txn, ident("a")) is None

    stage(rig, LARGE)  # Staged by another client: its pieces fit.
    rig.do(TouchBlob(ref.data, True))
    assert rig.result.code == 200
    begin(rig, "a", ref)
    assert rig.result.code == 0
    invariants.check(rig.txn)


def test_an_unused_staged_value_expires_unless_it_is_asked_for() -> None:
    rig = Rig()
    ref = stage(rig, OTHER)
    rig.pass_time(KEPT_MS - 1)
    rig.do(TouchBlob(ref.data, True))

    rig.pass_time(KEPT_MS - 1)
    assert rows(rig, tables.BLOB) == 1
    rig.pass_time(1)
    assert rows(rig, tables.BLOB) == rows(rig, tables.CHUNK) == 0


def test_bytes_that_do_not_match_their_digest_are_discarded() -> None:
    rig = Rig()
    ref, stored = refs.make(LARGE)
    for index in range(3):
        rig.do(PutBlob(ref.data, index, b"x" * min(CHUNK_BYTES, len(stored) - index * CHUNK_BYTES)))

    assert rig.result.code == 422
    assert rows(rig, tables.BLOB) == rows(rig, tables.CHUNK) == 0
    stage(rig, LARGE)
    invariants.check(rig.txn)


@pytest.mark.parametrize(
    "piece",
    [(b"", 0, b"x"), (bytes(40), 0, b""), (refs.make(OTHER)[0].data, 1, OTHER), (refs.make(OTHER)[0].data, 0, b"x")],
)
def test_an_invalid_piece_of_a_value_is_refused(piece: tuple[bytes, int, bytes]) -> None:
    rig = Rig()
    rig.do(PutBlob(*piece))

    assert rig.result.code == 400 and rows(rig, tables.BLOB) == 0


def test_a_large_value_of_a_key_can_be_read_overwritten_and_cleared() -> None:
    rig = Rig()
    which = begin(rig, "a", b"", key="k")
    ref = stage(rig, LARGE)
    rig.step(which, Op.SET, ["x", ref])
    index = rig.step(which, Op.GET, ["x"])

    told = next(effect for effect in rig.effects if isinstance(effect, SendCompletion))
    assert told.step == index and queries.whole_outcome(rig.txn, told.outcome) == [0, b"\x01" + LARGE]
    assert rig.values("greeter", "k") == {"x": LARGE}
    keyed = queries.load_object(rig.txn, "greeter", "k")
    assert keyed is not None and keyed.size > len(LARGE)
    assert rows(rig, tables.BLOB) == 1, "for GET too"

    rig.step(which, Op.SET, ["x", b""])
    assert rig.values("greeter", "k") == {"x": b""}
    rig.step(which, Op.SET, ["x", stage(rig, OTHER)])
    rig.step(which, Op.CLEAR_ALL)
    assert rig.values("greeter", "k") == {}
    rig.complete(which)
    invariants.check(rig.txn)
    rig.do(Purge(which))
    assert collected(rig)


def test_an_operator_writes_large_values_and_removes_them() -> None:
    rig = Rig()
    rig.do(SetState("things", "k", {"x": stage(rig, LARGE), "y": stage(rig, OTHER), "z": b""}, False))
    assert rig.values("things", "k") == {"x": LARGE, "y": OTHER, "z": b""}

    rig.do(SetState("things", "k", {"x": None, "y": stage(rig, OTHER)}, True))
    assert rig.values("things", "k") == {"y": OTHER}
    rig.pass_time(KEPT_MS)
    invariants.check(rig.txn)
    assert rows(rig, tables.BLOB) == 1
    rig.do(SetState("things", "k", {}, True))
    assert collected(rig)


def test_a_promise_keeps_its_large_value_until_its_workflow_is_forgotten() -> None:
    rig = Rig()
    main = rig.invoke("w", service="flows", key="k", mode=Mode.WORKFLOW)
    rig.do(CompletePromise("flows", "k", "p", [0, stage(rig, LARGE)]))
    peeked = rig.step(main, Op.PEEK, ["p"])
    awaited = rig.step(main, Op.PROMISE, ["p"])

    steps = [unpack_step(queries.whole_step(rig.txn, raw)) for raw in queries.journal(rig.txn, main, 0, 10)]
    assert (steps[peeked].outcome, steps[awaited].outcome) == ([0, b"\x01" + LARGE], [0, LARGE])
    rig.do(CompletePromise("flows", "k", "p", [0, stage(rig, LARGE)]))
    assert rig.result.code == 200, "the same value once more is no conflict"
    rig.complete(main, [0, stage(rig, OTHER)])
    rig.pass_time(HOUR_MS)
    assert collected(rig)


def test_a_large_outcome_wakes_its_waiters_and_is_dropped_with_the_last_of_them() -> None:
    rig = Rig()
    which = rig.invoke("a")
    index = rig.step(which, Op.AWAKEABLE)
    ref = stage(rig, LARGE)
    rig.do(CompleteStep(which, index, [0, ref]))

    assert rig.load(which).blob_bytes == len(LARGE)
    rig.complete(which, [0, ref])
    assert rig.load(which).blob_bytes == 2 * len(LARGE) and rig.outcome(which) == [0, ref]
    rig.pass_time(KEPT_MS)
    assert rows(rig, tables.BLOB) == 1
    rig.do(Purge(which))
    assert collected(rig)


def test_a_restarted_invocation_keeps_what_its_steps_refer_to() -> None:
    rig = Rig()
    which = begin(rig, "a", stage(rig, LARGE))
    rig.step(which, Op.RUN, ["r"], [0, stage(rig, OTHER)])
    rig.complete(which)
    copy = ident("b")
    rig.do(Restart(which, copy, 2, None))
    assert rig.result.code == 0, rig.result
    assert rig.load(copy).blobs == 2 and rig.load(copy).blob_bytes == len(LARGE) + len(OTHER)

    rig.do(Purge(which))
    rig.pass_time(KEPT_MS)
    invariants.check(rig.txn)
    assert rows(rig, tables.BLOB) == 2
    rig.complete(copy)
    rig.do(Restart(copy, copy, 1, None))
    assert rig.load(copy).blobs == 1
    rig.pass_time(KEPT_MS)
    invariants.check(rig.txn)
    assert rows(rig, tables.BLOB) == 1
    rig.complete(copy)
    rig.do(Purge(copy))
    assert collected(rig)


def test_large_values_of_a_journal_have_a_limit() -> None:
    rig = Rig()
    rig.do(SetLimits(100, 10_000, 100, 1 << 30, 2 * len(LARGE)))
    which = begin(rig, "a", stage(rig, LARGE))
    waits = [rig.step(which, Op.AWAKEABLE) for _ in range(2)]
    for index in waits:
        rig.do(CompleteStep(which, index, [0, stage(rig, LARGE)]))

    assert rig.load(which).blob_bytes == 2 * len(LARGE)
    assert failure(rig.journal(which)[waits[1]].outcome).kind == "JournalTooLong"
    rig.step(which, Op.RUN, ["r"], [0, stage(rig, LARGE)])
    assert failure(rig.outcome(which)).code == 413
    rig.do(Purge(which))
    assert collected(rig)


def test_a_message_waits_until_its_value_has_reached_the_destination() -> None:
    pair = [Rig(partition, 2) for partition in range(2)]
    names = {partition_of(ident(name), 2): name for name in map(str, range(20))}
    caller = pair[0].invoke(names[PartitionNumber(0)])
    child = ident(names[PartitionNumber(1)])
    ref = stage(pair[0], LARGE)
    row = Invoke(child, "greeter", "help", None, Mode.PLAIN, ref, {}, 0, None, 0, HOUR_MS)
    pair[0].step(caller, Op.CALL, ["greeter", "help", None, b"", {}], child=row)

    first, messages = queries.outbox(pair[0].txn, PartitionNumber(1), 0, 10)
    assert queries.parcels(pair[0].txn, PartitionNumber(1), first, first) == [(1, [ref])]
    pair[0].pass_time(KEPT_MS)
    assert rows(pair[0], tables.BLOB) == 1, "the message holds it"
    pair[1].do(Deliver(PartitionNumber(0), first, messages))
    assert pair[1].result.code == Code.VALUE_MISSING and queries.load(pair[1].txn, child) is None

    stage(pair[1], queries.whole(pair[0].txn, ref))
    pair[1].do(Deliver(PartitionNumber(0), first, messages))
    assert pair[1].result.code == 0
    [raw] = queries.journal(pair[1].txn, child, 0, 10)
    assert unpack_step(queries.whole_step(pair[1].txn, raw)).outcome == [0, LARGE]
    pair[0].do(TrimOutbox(PartitionNumber(1), first))
    assert collected(pair[0])
    invariants.check(pair[1].txn)


# -- the encoding ------------------------------------------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=200), st.integers(0, 3))
def test_a_reference_restores_the_value_it_was_made_from(value: bytes, marks: int) -> None:
    value = b"\x01" * marks + value
    ref, stored = refs.make(value)

    assert refs.is_ref(ref) and refs.size_of(ref) == len(value) and refs.restored(ref, bytes(stored)) == value
    assert refs.restored(refs.some_of(ref), bytes(stored)) == b"\x01" + value  # type: ignore[arg-type]
    assert refs.make(b"\x01" + value)[0].data == refs.make(value)[0].data or value[:1] == b"\x01"


@given(st.binary(max_size=80))
def test_bytes_from_a_user_are_never_taken_for_a_reference(value: bytes) -> None:
    packed = msgpack.packb(refs.make(value or b"x")[0])
    for payload in (value, packed, packed[3:], b"\x01" + packed):
        command = Invoke(InvocationId(bytes(16)), "s", "h", None, 0, payload, {}, 0, None, -1, 0)
        found = decode_command(encode_command(command))
        assert found == command and refs.in_command(found) == []


@given(st.integers(0, 127), st.binary(max_size=60))
def test_an_extension_in_a_frame_is_refused(code: int, data: bytes) -> None:
    extension = msgpack.ExtType(code, data)
    for frame in (
        [22, bytes(16), 1, [0, extension]],
        [16, bytes(16), 1, 1, Op.SET, "k", ["x", extension], None],
        [16, bytes(16), 1, 1, Op.RUN, "k", ["x"], [0, extension]],
        [19, bytes(16), 1, 1, [0, extension]],
    ):
        with pytest.raises(ProtocolError):
            decode_batch(msgpack.packb([frame]), TO_NODE)


@given(st.integers(0, 127), st.binary(max_size=60))
def test_any_extension_in_a_command_is_a_reference_or_refused(code: int, data: bytes) -> None:
    rig = Rig()
    begin(rig, "a", Ref(code, data))

    assert rig.result.code == Code.VALUE_MISSING and rows(rig, tables.JOURNAL) == 0


# -- in the shared store -----------------------------------------------------------------------------------------------


def keep(rig: Rig, value: bytes, nonce: int = 1, *, made_ms: int = 0) -> tuple[Ref, str]:
    """Report an upload to the shared store, made that long before or after the time of the state."""
    ref, _ = refs.make(value)
    name = object_name(ref.data, rig.now_ms + made_ms, bytes([nonce]) * 8)
    rig.do(KeepBlob(ref.data, name))
    return ref, name


def deleted(rig: Rig) -> list[str]:
    invariants.check(rig.txn)
    return queries.objects_to_delete(rig.txn, 100)


def test_a_value_in_the_shared_store_is_counted_and_collected_like_any_other() -> None:
    rig = Rig()
    ref, name = keep(rig, LARGE)
    assert rig.result.code == 0
    rig.do(TouchBlob(ref.data, True))
    assert rig.result.code == 200

    first, second = begin(rig, "a", ref), begin(rig, "b", ref)

    assert (rows(rig, tables.BLOB), rows(rig, tables.CHUNK)) == (1, 0)
    assert queries.place(rig.txn, ref.data) == name
    figures = queries.statistics(rig.txn)
    assert (figures.blobs, figures.blob_bytes, figures.stored, figures.stored_bytes) == (1, 0, 1, len(LARGE))
    assert rig.load(first).blob_bytes == len(LARGE)
    for which in (first, second):
        rig.complete(which)
        rig.pass_time(KEPT_MS)
        assert deleted(rig) == []
        rig.do(Purge(which))
    rig.pass_time(KEPT_MS - 1)
    assert deleted(rig) == [], "whoever was answered with it can still read it"
    rig.pass_time(1)
    assert deleted(rig) == [name] and DeleteObjects() in rig.effects
    assert DeleteObjects() in queries.pending_effects(rig.txn, b"", 10)[0], "a new leader finds it in the state"
    assert (rows(rig, tables.BLOB), queries.statistics(rig.txn).gone) == (0, 1)

    rig.do(ForgetObjects([name, name, "never heard of"]))
    assert deleted(rig) == [] and DeleteObjects() not in queries.pending_effects(rig.txn, b"", 10)[0]
    assert queries.statistics(rig.txn)[-5:] == (0, 0, 0, 0, 0)


def test_the_first_upload_of_a_value_wins_and_the_object_of_the_second_is_deleted() -> None:
    rig = Rig()
    ref, first = keep(rig, LARGE, 1)
    _, second = keep(rig, LARGE, 2)

    assert rig.result.code == 200 and queries.place(rig.txn, ref.data) == first
    assert deleted(rig) == [second]
    rig.do(KeepBlob(ref.data, first))  # Sent twice, because the first answer was lost.
    assert rig.result.code == 200 and deleted(rig) == [second]


def test_a_complete_value_in_pieces_stays_and_an_incomplete_one_yields_to_an_object() -> None:
    rig = Rig()
    stage(rig, OTHER)
    _, name = keep(rig, OTHER)
    assert rig.result.code == 200 and deleted(rig) == [name] and rows(rig, tables.CHUNK) == 1

    ref, stored = refs.make(LARGE)
    rig.do(PutBlob(ref.data, 1, bytes(stored[CHUNK_BYTES : 2 * CHUNK_BYTES])))
    _, name = keep(rig, LARGE)
    assert rig.result.code == 0 and queries.place(rig.txn, ref.data) == name and rows(rig, tables.CHUNK) == 1
    rig.do(PutBlob(ref.data, 0, bytes(stored[:CHUNK_BYTES])))
    assert rig.result.code == 200 and rows(rig, tables.CHUNK) == 1, "an interrupted upload need not continue"
    invariants.check(rig.txn)


@pytest.mark.parametrize("made_ms", [-KEEP_MS - 1, KEEP_MS + 1])
def test_an_object_from_long_ago_or_from_the_future_is_refused(made_ms: int) -> None:
    rig = Rig()
    rig.do(FireTimers(1))
    ref, _ = keep(rig, LARGE, made_ms=made_ms)

    assert rig.result.code == Code.OUTDATED and rows(rig, tables.BLOB) == 0
    keep(rig, LARGE, made_ms=made_ms - 1 if made_ms > 0 else made_ms + 1)
    assert rig.result.code == 0 and queries.place(rig.txn, ref.data)


@pytest.mark.parametrize("made_ms", [-KEEP_MS, 0, KEEP_MS])
@pytest.mark.parametrize("whole_before", [False, True])
def test_a_name_is_never_reused_once_its_object_may_have_been_deleted(made_ms: int, whole_before: bool) -> None:
    """However often and in whatever order commands are repeated, every value that they keep has its object."""
    rig = Rig()
    rig.do(FireTimers(1))
    if whole_before:
        stage(rig, LARGE)
    ref, name = keep(rig, LARGE, made_ms=made_ms)
    gone = {*deleted(rig)}
    for _ in range(2 * KEPT_MS // 60_000 + 2):
        rig.pass_time(60_000)
        gone |= {*deleted(rig)}
        rig.do(ForgetObjects(deleted(rig)))
        rig.do(KeepBlob(ref.data, name))
        assert rows(rig, tables.BLOB) == 0 or queries.place(rig.txn, ref.data) not in gone
        gone |= {*deleted(rig)}
    assert gone == {name} and rows(rig, tables.BLOB) == 0


@pytest.mark.parametrize("blob", [b"", bytes(40), refs.make(OTHER)[0].data])
def test_an_object_of_another_value_is_refused(blob: bytes) -> None:
    rig = Rig()
    for name in ("", "x", object_name(refs.make(LARGE)[0].data, rig.now_ms, bytes(8)), "../" + "0" * 93, "\u0663" * 95):
        rig.do(KeepBlob(blob, name))
        assert rig.result.code == 400 and rows(rig, tables.BLOB) == 0


def test_a_value_of_a_key_in_the_shared_store_is_returned_as_a_reference() -> None:
    rig = Rig()
    ref, _ = keep(rig, OTHER)
    rig.do(SetState("things", "k", {"x": ref, "y": b"small"}, False))

    assert rig.values("things", "k") == {"x": ref, "y": b"small"}
    with pytest.raises(queries.Gone):
        queries.whole(rig.txn, ref)


def test_the_state_knows_which_objects_are_its_own() -> None:
    rig = Rig()
    _, mine = keep(rig, LARGE, 1)
    other = object_name(refs.make(LARGE)[0].data, rig.now_ms, b"otherone")

    assert is_known(rig.txn, mine) and not is_known(rig.txn, other) and not is_known(rig.txn, "README")
    assert (created_ms_of(mine), created_ms_of("README")) == (rig.now_ms, None)


def test_a_postponed_attempt_runs_again_and_counts_as_no_failure() -> None:
    rig = Rig()
    which = rig.invoke("a")
    rig.do(PostponeAttempt(which, 1, [1, 503, "the store is down", "StoreDown"], 5000))

    record = rig.load(which)
    assert (record.status, record.failures, record.failures_total) == (Status.BACKING_OFF, 0, 0)
    assert "the store is down" in explain.why_not_running(rig.txn, which)
    invariants.check(rig.txn)
    rig.pass_time(4999)
    assert rig.started() == []
    rig.pass_time(1)
    assert rig.started() == [which] and rig.load(which).epoch == 2
    rig.do(PostponeAttempt(which, 1, [1, 503, "late", ""], 5000))
    assert rig.result.code == 409 and rig.status(which) == Status.RUNNING
