"""Judges the history of an append-only set. A read shows the order itself, so nothing needs to be searched.

The check is exact and costs about as much as reading the history: see `linearizable`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from holdfast.chaos.history import BadHistory, Kind, Operation, Outcome, Value
from holdfast.chaos.judgement import Linearizable, Verdict, prefix_until, relevant_of, violation_of

Contents = dict[int, frozenset[Value]]
Fault = tuple[Operation, str] | None


def judge_set(operations: Sequence[Operation]) -> Verdict:
    """Judge an append-only set exactly: every element added once, reads that return all of it."""
    key = operations[0].key if operations else ""
    if _fault_in_set(operations) is None:
        return Linearizable(key)
    # A prefix of a linearizable history is linearizable, so the shortest prefix that fails can be found by halving.
    ends = sorted({operation.deadline for operation in operations if operation.outcome is Outcome.OK})
    shortest = bisect_left(ends, True, key=lambda end: _fault_in_set(prefix_until(operations, end)) is not None)
    fault = _fault_in_set(prefix_until(operations, ends[shortest]))
    assert fault is not None, "the whole history is its own longest prefix"
    return violation_of(key, operations, *fault, ends[shortest])


def _fault_in_set(operations: Sequence[Operation]) -> tuple[Operation, str] | None:
    """An operation that contradicts the others, and why. None if and only if the history is linearizable."""
    ordered = reads_are_ordered(operations)
    adds = adds_of(operations)
    relevant = relevant_of(operations)
    reads = [operation for operation in relevant if operation.kind is Kind.READ_ALL]
    contents = {id(read): frozenset(elements_of(read)) for read in reads}
    return (
        _impossible_element(operations, reads, contents, adds)
        or _lost_element(relevant, reads, contents)
        or _disagreement(reads, contents, ordered)
        or _backward_read(reads, contents)
        or _impossible_time(relevant, reads, contents, adds, ordered)
    )


def _impossible_element(
    operations: Sequence[Operation], reads: Sequence[Operation], contents: Contents, adds: dict[Value, Operation]
) -> Fault:
    failed = {it.argument for it in operations if it.kind is Kind.ADD and it.outcome is Outcome.FAIL}
    for read in reads:
        if len(contents[id(read)]) < len(elements_of(read)):
            doubled = sorted({repr(it) for it in elements_of(read) if elements_of(read).count(it) > 1})
            return read, f"it shows {', '.join(doubled)} more than once"
        for element in contents[id(read)]:
            if element not in adds:
                return read, f"it shows {element!r}, " + (
                    "whose add had definitely failed" if element in failed else "which nobody had asked to add"
                )
            if adds[element].invoked > read.deadline:
                return read, f"it shows {element!r}, which was added later: {adds[element]}"
    return None


def _lost_element(relevant: Sequence[Operation], reads: Sequence[Operation], contents: Contents) -> Fault:
    acknowledged = sorted(
        (it for it in relevant if it.kind is Kind.ADD and it.outcome is Outcome.OK), key=lambda it: it.deadline
    )
    due: set[Value] = set()
    taken = 0
    for read in sorted(reads, key=lambda it: it.invoked):
        while taken < len(acknowledged) and acknowledged[taken].deadline < read.invoked:
            due.add(acknowledged[taken].argument)
            taken += 1
        if not due <= contents[id(read)]:
            missing = due - contents[id(read)]
            first = next(it for it in acknowledged if it.argument in missing)
            return read, f"{len(missing)} acknowledged elements are missing, the first by {first}"
    return None


def _disagreement(reads: Sequence[Operation], contents: Contents, ordered: bool) -> Fault:
    by_size = sorted(reads, key=lambda it: len(contents[id(it)]))
    for smaller, larger in pairwise(by_size):
        shorter = elements_of(smaller)
        agree = (
            elements_of(larger)[: len(shorter)] == shorter if ordered else contents[id(smaller)] <= contents[id(larger)]
        )
        if not agree:
            culprit, other = (smaller, larger) if smaller.deadline > larger.deadline else (larger, smaller)
            return culprit, f"neither is the beginning of the other: {other}"
    return None


def _backward_read(reads: Sequence[Operation], contents: Contents) -> Fault:
    by_return = sorted(reads, key=lambda it: it.deadline)
    finished = 0
    largest: Operation | None = None
    for read in sorted(reads, key=lambda it: it.invoked):
        while by_return[finished].deadline < read.invoked:
            if largest is None or len(contents[id(by_return[finished])]) > len(contents[id(largest)]):
                largest = by_return[finished]
            finished += 1
        if largest is not None and len(contents[id(largest)]) > len(contents[id(read)]):
            return read, f"an earlier read had shown more: {largest}"
    return None


def _impossible_time(
    relevant: Sequence[Operation],
    reads: Sequence[Operation],
    contents: Contents,
    adds: dict[Value, Operation],
    ordered: bool,
) -> Fault:
    """Give every operation the earliest moment the order in the reads allows; one must be too late if none fits.

    The reads fix the order of phases: the elements of the smallest read, the reads that show just them, the next
    elements, and so on; acknowledged elements that no read shows come last. Within a phase the order is free.
    """
    phases: list[list[Operation]] = []
    shown: frozenset[Value] = frozenset()
    for read in sorted(reads, key=lambda it: len(contents[id(it)])):
        if fresh := contents[id(read)] - shown:
            if ordered:
                phases += [[adds[element]] for element in elements_of(read)[len(shown) :]]
            else:
                phases.append([adds[element] for element in fresh])
            phases.append([])
            shown = contents[id(read)]
        elif not phases:
            phases.append([])
        phases[-1].append(read)
    phases.append(
        [it for it in relevant if it.kind is Kind.ADD and it.outcome is Outcome.OK and it.argument not in shown]
    )
    earliest = -math.inf
    bound: Operation | None = None
    for phase in phases:
        for operation in phase:
            if operation.deadline < earliest:
                return operation, f"the reads put it after an operation invoked when it had already returned: {bound}"
        for operation in phase:
            if operation.invoked > earliest:
                earliest, bound = operation.invoked, operation
    return None


def elements_of(read: Operation) -> tuple[Value, ...]:
    match read.result:
        case tuple() | frozenset() as elements:
            return tuple(elements)
    raise BadHistory(f"the result of read-all must be a tuple or a frozenset: {read}")


def reads_are_ordered(operations: Sequence[Operation]) -> bool:
    types = {type(it.result) for it in operations if it.kind is Kind.READ_ALL and it.outcome is Outcome.OK}
    if len(types) > 1:
        raise BadHistory(f"key {operations[0].key!r}: some reads are in log order and some are not")
    return frozenset not in types


def adds_of(operations: Sequence[Operation]) -> dict[Value, Operation]:
    """Element -> its add. Two adds of one element cannot be told apart, so they are refused."""
    adds: dict[Value, Operation] = {}
    for operation in operations:
        if operation.kind is Kind.ADD and operation.outcome is not Outcome.FAIL:
            if isinstance(operation.argument, bool) or not isinstance(operation.argument, (str, int)):
                raise BadHistory(f"an element must be a string or an integer: {operation}")
            if operation.argument in adds:
                raise BadHistory(f"added twice: {operation} and {adds[operation.argument]}")
            adds[operation.argument] = operation
    return adds
