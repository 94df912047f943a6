"""The linearizability check must find every violation and invent none. Brute force decides on small histories."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, count, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.chaos.history import BadHistory, Kind, Operation, Outcome, Value
from holdfast.chaos.judgement import GaveUp, Linearizable, Verdict, Violation
from holdfast.chaos.linearizable import AppendOnlySet, Register, judge, judge_register, search
from holdfast.chaos.linearizable_sets import judge_set

OK, FAIL, INFO = Outcome.OK, Outcome.FAIL, Outcome.INFO


def op(
    kind: Kind,
    invoked: float,
    returned: float | None,
    argument: Value = None,
    result: Value = None,
    outcome: Outcome = OK,
    key: str = "x",
) -> Operation:
    return Operation(f"c{invoked:g}", key, kind, argument, result, invoked, returned, outcome)


def read(invoked: float, returned: float, result: Value, key: str = "x") -> Operation:
    return op(Kind.READ, invoked, returned, result=result, key=key)


def write(invoked: float, returned: float | None, value: Value, outcome: Outcome = OK, key: str = "x") -> Operation:
    return op(Kind.WRITE, invoked, returned, value, outcome=outcome, key=key)


def cas(
    invoked: float, returned: float | None, old: Value, new: Value, swapped: bool | None, outcome: Outcome = OK
) -> Operation:
    return op(Kind.CAS, invoked, returned, (old, new), swapped, outcome)


def add(invoked: float, returned: float | None, element: Value, outcome: Outcome = OK) -> Operation:
    return op(Kind.ADD, invoked, returned, element, outcome=outcome)


def read_all(invoked: float, returned: float, *elements: Value) -> Operation:
    return op(Kind.READ_ALL, invoked, returned, result=elements)


def verdict_of(*operations: Operation) -> Verdict:
    (verdict,) = judge(operations).verdicts.values()
    return verdict


def accepted(*operations: Operation) -> bool:
    verdict = verdict_of(*operations)
    assert not isinstance(verdict, GaveUp)
    return isinstance(verdict, Linearizable)


# --- registers by hand ------------------------------------------------------------------------------------------------


def test_a_read_sees_the_write_before_it() -> None:
    assert accepted(write(1, 2, "a"), read(3, 4, "a"), write(5, 6, "b"), read(7, 8, "b"))


def test_a_register_begins_empty() -> None:
    assert accepted(read(1, 2, None), write(3, 4, "a"))
    assert not accepted(read(1, 2, "a"), write(3, 4, "a"))


def test_a_stale_read_is_found() -> None:
    assert not accepted(write(1, 2, "a"), write(3, 4, "b"), read(5, 6, "a"))


def test_a_lost_write_is_found() -> None:
    assert not accepted(write(1, 2, "a"), read(3, 4, None))


def test_a_read_may_see_either_side_of_a_concurrent_write() -> None:
    assert accepted(write(1, 2, "a"), write(3, 10, "b"), read(4, 5, "a"), read(6, 7, "b"))
    assert not accepted(write(1, 2, "a"), write(3, 10, "b"), read(4, 5, "b"), read(6, 7, "a"))


def test_two_readers_must_see_concurrent_writes_in_one_order() -> None:
    writes = (write(1, 20, "a"), write(1, 20, "b"))

    assert accepted(*writes, read(2, 3, "a"), read(2, 3, "a"), read(4, 5, "b"), read(4, 5, "b"))
    assert not accepted(*writes, read(2, 3, "a"), read(4, 5, "b"), read(6, 7, "a"))


def test_operations_that_touch_in_one_instant_are_concurrent() -> None:
    assert accepted(write(1, 2, "a"), read(2, 3, None))


def test_a_failed_write_must_not_be_seen() -> None:
    assert accepted(write(1, 2, "a", FAIL), read(3, 4, None))
    assert not accepted(write(1, 2, "a", FAIL), read(3, 4, "a"))


def test_an_unknown_write_may_appear_late_once_or_never() -> None:
    unknown = write(1, 2, "a", INFO)

    assert accepted(unknown, write(3, 4, "b"), read(5, 6, "b"))
    assert accepted(unknown, write(3, 4, "b"), read(5, 6, "b"), read(7, 8, "a"))
    assert not accepted(unknown, write(3, 4, "b"), read(5, 6, "a"), read(7, 8, "b"))
    assert not accepted(read(0, 0.5, "a"), unknown)


def test_two_unknown_writes_of_one_value_may_each_appear_once() -> None:
    unknown = (write(1, None, "a", INFO), write(5, None, "a", INFO))

    assert accepted(*unknown, read(6, 7, "a"), write(8, 9, "b"), read(10, 11, "a"))
    assert not accepted(*unknown, *(it for t in (10, 20, 30) for it in (write(t, t + 1, "b"), read(t + 2, t + 3, "a"))))


def test_an_unknown_write_never_appears_before_it_was_invoked_though_an_equal_one_did() -> None:
    early = write(1, None, "a", INFO)
    seen_twice = (read(2, 3, "a"), write(4, 5, "b"), read(6, 7, "a"))

    assert not accepted(early, *seen_twice, write(50, None, "a", INFO), read(60, 61, "a"))
    assert accepted(early, *seen_twice, write(5, None, "a", INFO), read(60, 61, "a"))


def test_a_swap_needs_the_value_it_expects() -> None:
    assert accepted(write(1, 2, "a"), cas(3, 4, "a", "b", True), read(5, 6, "b"))
    assert accepted(write(1, 2, "a"), cas(3, 4, "z", "b", False), read(5, 6, "a"))
    assert not accepted(write(1, 2, "a"), cas(3, 4, "z", "b", True))
    assert not accepted(write(1, 2, "a"), cas(3, 4, "a", "b", False))


def test_only_one_of_two_swaps_of_the_same_value_succeeds() -> None:
    assert not accepted(write(1, 2, "a"), cas(3, 9, "a", "b", True), cas(3, 9, "a", "c", True))


def test_an_unread_write_with_an_unknown_outcome_can_explain_a_refused_swap() -> None:
    assert accepted(write(1, 2, "a"), write(3, 4, "z", INFO), cas(5, 6, "a", "b", False))
    assert not accepted(write(1, 2, "a"), cas(5, 6, "a", "b", False))


def test_an_unknown_swap_applies_only_to_the_value_it_expects() -> None:
    unknown = cas(3, None, "a", "b", None, INFO)

    assert accepted(write(1, 2, "a"), unknown, read(5, 6, "a"), read(7, 8, "b"))
    assert not accepted(write(1, 2, "c"), unknown, read(5, 6, "b"))


def test_one_true_and_one_dot_zero_are_three_values() -> None:
    assert not accepted(write(1, 2, 1), read(3, 4, True))
    assert not accepted(write(1, 2, 1), read(3, 4, 1.0))


# --- what a verdict says ----------------------------------------------------------------------------------------------


def test_keys_are_judged_apart() -> None:
    report = judge([write(1, 2, 1, key="good"), read(3, 4, 1, key="good"), read(5, 6, 1, key="bad")])

    assert isinstance(report.verdicts["good"], Linearizable)
    assert [violation.key for violation in report.violations] == ["bad"]
    assert not report.ok
    assert "'bad'" in str(report)


def test_a_violation_names_the_shortest_prefix_that_fails() -> None:
    healthy = [it for t in range(0, 200, 4) for it in (write(t, t + 1, t), read(t + 2, t + 3, t))]
    stale = read(200, 201, 4)
    beside = write(200.5, 300, "beside")
    later = [write(400, 401, "later"), read(402, 403, "never written")]

    verdict = verdict_of(*healthy, stale, beside, *later)

    assert isinstance(verdict, Violation)
    assert verdict.culprit == stale
    assert len(verdict.prefix) == len(healthy) + 2
    assert {it.outcome for it in verdict.prefix if it.argument == "beside"} == {INFO}
    assert "read x -> 4" in verdict.explanation
    assert "could only be 196" in verdict.explanation
    assert "'beside'" in verdict.explanation
    assert "'later'" not in verdict.explanation


def test_a_search_beyond_its_bound_gives_up_and_is_no_pass() -> None:
    concurrent = [write(i, 100, i) for i in range(12)] + [read(200, 201, "never written")]

    report = judge(concurrent, work_max=500)

    assert [it.work for it in report.gave_up] == [500]
    assert not report.ok
    assert "undecided" in str(report)


def test_a_history_without_verdicts_is_not_a_pass() -> None:
    assert not judge([]).ok
    assert not judge([write(1, 2, 1, FAIL)]).ok


def test_a_key_is_a_register_or_a_set_never_both() -> None:
    with pytest.raises(BadHistory, match="both"):
        judge([write(1, 2, 1), add(3, 4, 1)])


def test_a_long_history_with_many_unknown_operations_is_decided() -> None:
    """Each unknown write doubles a naive search; here are more than two hundred, among three thousand operations."""
    chance = random.Random(7)
    operations: list[Operation] = []
    value: Value = None
    for at in range(1, 3001):
        dice = chance.random()
        left, right = at - chance.random() * 4, at + chance.random() * 4
        if dice < 0.08:
            value = at if chance.random() < 0.5 else value
            operations.append(write(left, None, at, INFO))
        elif dice < 0.4:
            value = at
            operations.append(write(left, right, at))
        elif dice < 0.6:
            swapped = chance.random() < 0.5
            operations.append(cas(left, right, value if swapped else -1, at, swapped))
            value = at if swapped else value
        else:
            operations.append(read(left, right, value))
    offset = next(i for i in range(2800, 3000) if operations[i].kind is Kind.READ)
    corrupted = [*operations]
    corrupted[offset] = replace(operations[offset], result="never written")

    verdict = judge_register(corrupted, work_max=5_000_000)

    assert isinstance(judge_register(operations, work_max=5_000_000), Linearizable)
    assert isinstance(verdict, Violation)
    assert verdict.culprit == corrupted[offset]


# --- append-only sets by hand -----------------------------------------------------------------------------------------


def test_reads_that_grow_are_accepted() -> None:
    assert accepted(add(1, 2, 1), read_all(3, 4, 1), add(5, 6, 2), read_all(7, 8, 1, 2))


def test_an_acknowledged_element_is_in_every_later_read() -> None:
    verdict = verdict_of(add(1, 2, 1), add(1, 2, 2), read_all(3, 4, 1), add(5, 6, 3))

    assert isinstance(verdict, Violation)
    assert "missing" in verdict.explanation
    assert verdict.culprit == read_all(3, 4, 1)


def test_an_element_that_was_never_added_is_found() -> None:
    verdict = verdict_of(add(1, 2, 1), read_all(3, 4, 1, 9))

    assert isinstance(verdict, Violation)
    assert "nobody had asked" in verdict.explanation


def test_an_element_whose_add_failed_is_found() -> None:
    verdict = verdict_of(add(1, 2, 1, FAIL), read_all(3, 4, 1))

    assert isinstance(verdict, Violation)
    assert "definitely failed" in verdict.explanation


def test_an_element_from_the_future_is_found() -> None:
    assert not accepted(read_all(1, 2, 1), add(3, 4, 1))


def test_an_element_shown_twice_is_found() -> None:
    verdict = verdict_of(add(1, 2, 1), add(1, 2, 2), read_all(3, 4, 1, 2, 1))

    assert isinstance(verdict, Violation)
    assert "more than once" in verdict.explanation


def test_reads_that_disagree_about_the_order_are_found() -> None:
    verdict = verdict_of(add(1, 9, 1), add(1, 9, 2), read_all(3, 4, 1, 2), read_all(3, 5, 2, 1))

    assert isinstance(verdict, Violation)
    assert "beginning of the other" in verdict.explanation


def test_a_read_that_goes_back_in_time_is_found() -> None:
    adds = (add(1, 20, 1), add(1, 20, 2))

    assert accepted(*adds, read_all(3, 6, 1, 2), read_all(4, 7, 1))
    verdict = verdict_of(*adds, read_all(3, 4, 1, 2), read_all(5, 6, 1))
    assert isinstance(verdict, Violation)
    assert "had shown more" in verdict.explanation


def test_the_order_shown_respects_real_time() -> None:
    assert not accepted(add(1, 2, 1), add(3, 4, 2), read_all(5, 6, 2, 1))


def test_an_element_that_no_read_shows_comes_after_all_that_are_shown() -> None:
    """The read overlaps everything; only the order of the two adds reveals it."""
    assert accepted(add(1, 2, 1), add(3, 4, 2), read_all(0, 9, 1))
    assert not accepted(add(1, 2, 1), add(3, 4, 2), read_all(0, 9, 2))


def test_an_unknown_add_may_appear_late_but_never_vanish_again() -> None:
    unknown = add(1, None, 1, INFO)

    assert accepted(unknown, read_all(3, 4), add(5, 6, 2), read_all(7, 8, 2), read_all(9, 10, 2, 1))
    assert not accepted(unknown, read_all(3, 4, 1), read_all(5, 6))


def test_reads_without_order_are_judged_as_sets() -> None:
    def unordered(invoked: float, returned: float, *elements: Value) -> Operation:
        return op(Kind.READ_ALL, invoked, returned, result=frozenset(elements))

    adds = (add(1, 9, 1), add(1, 9, 2), add(1, 9, 3))

    assert accepted(*adds, unordered(2, 3, 2), unordered(4, 5, 2, 1), unordered(6, 7, 1, 2, 3))
    assert not accepted(*adds, unordered(2, 3, 2), unordered(2, 5, 1, 3))
    with pytest.raises(BadHistory, match="log order"):
        judge([*adds, unordered(2, 3, 2), read_all(4, 5, 2)])


def test_two_adds_of_one_element_are_refused_as_indistinguishable() -> None:
    with pytest.raises(BadHistory, match="added twice"):
        judge([add(1, 2, 1), add(3, 4, 1)])


def test_the_shortest_failing_prefix_of_a_set_ends_at_the_violation() -> None:
    grown = [add(t, t + 1, t) for t in range(0, 100, 2)]
    stale = read_all(100, 101, *range(0, 96, 2))
    later = [add(t, t + 1, t) for t in range(200, 300, 2)]

    verdict = verdict_of(*grown, stale, *later, read_all(400, 401, "never added"))

    assert isinstance(verdict, Violation)
    assert verdict.culprit == stale
    assert len(verdict.prefix) == len(grown) + 1


# --- against brute force ----------------------------------------------------------------------------------------------


def explains(order: tuple[Operation, ...]) -> bool:
    """Runs the operations one after the other on a plain variable and compares every answer."""
    value: Value = None
    elements: list[Value] = []
    for it in order:
        match it.kind:
            case Kind.READ:
                if it.outcome is OK and (type(it.result), it.result) != (type(value), value):
                    return False
            case Kind.WRITE:
                value = it.argument
            case Kind.CAS:
                assert isinstance(it.argument, tuple)
                swapped = value == it.argument[0]
                if it.outcome is OK and it.result is not swapped:
                    return False
                if swapped:
                    value = it.argument[1]
            case Kind.ADD:
                elements.append(it.argument)
            case Kind.READ_ALL:
                shown = frozenset(elements) if isinstance(it.result, frozenset) else tuple(elements)
                if it.outcome is OK and it.result != shown:
                    return False
    return True


def respects_time(order: tuple[Operation, ...]) -> bool:
    return all(not later.deadline < earlier.invoked for earlier, later in combinations(order, 2))


def brute_force(operations: list[Operation]) -> bool:
    """Every order of every choice of unknown operations."""
    known = [it for it in operations if it.outcome is OK]
    unknown = [it for it in operations if it.outcome is INFO]
    return any(
        respects_time(order) and explains(order)
        for size in range(len(unknown) + 1)
        for chosen in combinations(unknown, size)
        for order in permutations([*known, *chosen])
    )


@st.composite
def executions(draw: st.DrawFn, kinds: tuple[Kind, ...], size_max: int, ordered: bool = True) -> list[Operation]:
    """A real sequential execution whose operations are then stretched so that they overlap."""
    value: Value = None
    elements: list[Value] = []
    operations = []
    names = count(1)
    for at in range(1, draw(st.integers(1, size_max)) + 1):
        kind = draw(st.sampled_from(kinds))
        fate = draw(st.sampled_from([OK, OK, OK, OK, OK, INFO, FAIL]))
        happens = fate is OK or (fate is INFO and draw(st.booleans()))
        argument: Value = None
        result: Value = None
        match kind:
            case Kind.WRITE:
                argument = draw(st.integers(1, 3))
                value = argument if happens else value
            case Kind.CAS:
                argument = (draw(st.sampled_from([None, 1, 2, 3])), draw(st.integers(1, 3)))
                result = value == argument[0]
                value = argument[1] if happens and result else value
            case Kind.ADD:
                argument = next(names)
                elements += [argument] if happens else []
            case Kind.READ:
                result = value
            case Kind.READ_ALL:
                result = tuple(elements) if ordered else frozenset(elements)
        operations.append(
            op(
                kind,
                at - draw(st.integers(0, 6)) / 2,
                None if fate is INFO else at + draw(st.integers(0, 6)) / 2,
                argument,
                result if fate is OK else None,
                fate,
            )
        )
    return operations


REGISTER = (Kind.READ, Kind.WRITE, Kind.CAS)
SET = (Kind.ADD, Kind.READ_ALL)


@given(executions(REGISTER, 60))
@settings(max_examples=150, deadline=None)
def test_the_history_of_a_real_register_is_accepted(operations: list[Operation]) -> None:
    assert isinstance(judge_register(operations, work_max=1_000_000), Linearizable)


@given(st.booleans().flatmap(lambda ordered: executions(SET, 60, ordered)))
@settings(max_examples=150, deadline=None)
def test_the_history_of_a_real_set_is_accepted(operations: list[Operation]) -> None:
    assert isinstance(judge_set(operations), Linearizable)


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_a_register_with_one_answer_changed_is_rejected_exactly_when_no_order_explains_it(data: st.DataObject) -> None:
    operations = data.draw(executions(REGISTER, 6))
    offset = data.draw(st.integers(0, len(operations) - 1))
    changed = operations[offset]
    if changed.kind is Kind.CAS and changed.outcome is OK:
        changed = replace(changed, result=not changed.result)
    elif changed.kind is Kind.READ:
        changed = replace(changed, result=data.draw(st.sampled_from([None, 1, 2, 3])))
    else:
        changed = replace(changed, argument=(1, 2) if changed.kind is Kind.CAS else data.draw(st.integers(1, 3)))
    operations[offset] = changed

    verdict = judge_register(operations, work_max=1_000_000)

    assert isinstance(verdict, Linearizable if brute_force(operations) else Violation)
    if isinstance(verdict, Violation):
        assert not brute_force(list(verdict.prefix))
        assert brute_force(without_last_return(verdict))


def without_last_return(violation: Violation) -> list[Operation]:
    """The prefix before its last operation returned: nothing was wrong yet."""
    last = max(it.deadline for it in violation.prefix if it.outcome is OK)
    return [replace(it, outcome=INFO, result=None) if it.deadline == last else it for it in violation.prefix]


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_a_set_with_one_read_changed_is_rejected_exactly_when_no_order_explains_it(data: st.DataObject) -> None:
    ordered = data.draw(st.booleans())
    operations = data.draw(executions(SET, 6, ordered).filter(lambda it: any(o.kind is Kind.READ_ALL for o in it)))
    offset = data.draw(st.sampled_from([i for i, it in enumerate(operations) if it.kind is Kind.READ_ALL]))
    shown = data.draw(st.lists(st.integers(1, 4), unique=ordered, max_size=3))
    operations[offset] = replace(
        operations[offset],
        outcome=OK,
        returned=operations[offset].returned or operations[offset].invoked + 1,
        result=tuple(shown) if ordered else frozenset(shown),
    )

    verdict = judge_set(operations)

    assert isinstance(verdict, Linearizable if brute_force(operations) else Violation)
    assert type(search(operations, AppendOnlySet(operations), work_max=1_000_000)) is type(verdict)
    if isinstance(verdict, Violation):
        assert not brute_force(list(verdict.prefix))
        assert brute_force(without_last_return(verdict))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_search_and_exact_check_agree_on_longer_sets(data: st.DataObject) -> None:
    operations = data.draw(executions(SET, 14, data.draw(st.booleans())))
    offset = data.draw(st.integers(0, len(operations) - 1))
    shift = data.draw(st.integers(-12, 12)) / 2
    it = operations[offset]
    operations[offset] = replace(
        it, invoked=it.invoked + shift, returned=None if it.returned is None else it.returned + shift
    )

    searched = search(operations, AppendOnlySet(operations), work_max=1_000_000)

    assert type(searched) is type(judge_set(operations))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_histories_of_mostly_unknown_operations_are_judged_as_brute_force_judges_them(data: st.DataObject) -> None:
    """The rules that keep unknown operations cheap must not remove the last order that explains the history."""
    operations = []
    for at in range(data.draw(st.integers(2, 6))):
        kind = data.draw(st.sampled_from(REGISTER))
        unknown = kind is not Kind.READ and data.draw(st.booleans())
        argument: Value = None
        if kind is Kind.WRITE:
            argument = data.draw(st.integers(1, 2))
        elif kind is Kind.CAS:
            argument = (data.draw(st.sampled_from([None, 1, 2])), data.draw(st.integers(1, 2)))
        result: Value = None
        if not unknown and kind is Kind.READ:
            result = data.draw(st.sampled_from([None, 1, 2]))
        elif not unknown and kind is Kind.CAS:
            result = data.draw(st.booleans())
        end = None if unknown else at + data.draw(st.integers(0, 4)) / 2
        operations.append(
            op(kind, at - data.draw(st.integers(0, 4)) / 2, end, argument, result, INFO if unknown else OK)
        )

    verdict = search(operations, Register(operations), work_max=1_000_000)

    assert isinstance(verdict, Linearizable if brute_force(operations) else Violation)
