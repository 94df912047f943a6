"""Judges a history: is there one order of its operations that explains every answer and respects real time?

Linearizability is local (Herlihy and Wing), so each key is judged alone. Registers are judged by search: the
algorithm of Wing and Gong with Lowe's memory of the configurations already seen. Append-only sets need no search:
`linearizable_sets` judges them exactly.

The answer is never a silent pass. A search that would exceed its bound of work says `GaveUp`, which is not a pass;
neither is a history in which nothing was judged. A violation names the shortest prefix of the history that fails.

An operation of unknown outcome (`info`) may take effect at any time after its invocation, or never. Left alone, k of
them double the search k times. Three rules keep the search exact and small; each says that if an order exists, then
one exists that obeys the rule:
  needed    an unknown operation takes effect only if the operation after it could not do without it (else drop it),
            nor come before it with the same effect (else let it wait);
  in turn   of unknown operations with equal effect, the one invoked first is used first;
  not idle  an unknown operation that would change nothing is not used.
The order with the fewest unknown operations, each as late as possible, and then in order of invocation, obeys all
three at once, so none of the rules can remove the last witness.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.chaos.history import BadHistory, Kind, Operation, Outcome, Value, to_json
from holdfast.chaos.judgement import (
    SHOWN_MAX,
    GaveUp,
    Linearizable,
    Report,
    Verdict,
    prefix_until,
    relevant_of,
    violation_of,
)
from holdfast.chaos.linearizable_sets import adds_of, elements_of, judge_set, reads_are_ordered

REFUSED = -1
REGISTER_KINDS = frozenset({Kind.READ, Kind.WRITE, Kind.CAS})
SET_KINDS = frozenset({Kind.ADD, Kind.READ_ALL})
REMEMBERING = 5  # What a remembered configuration costs beside a step: the bound of work is one of memory, too.


def judge(operations: Iterable[Operation], *, work_max: int = 5_000_000) -> Report:
    """Judge every key of a history. `work_max` bounds the search per key."""
    by_key: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        by_key[operation.key].append(operation)
    verdicts: dict[str, Verdict] = {}
    judged = 0
    for key, group in by_key.items():
        kinds = {operation.kind for operation in group}
        if kinds <= REGISTER_KINDS:
            verdicts[key] = judge_register(group, work_max=work_max)
        elif kinds <= SET_KINDS:
            verdicts[key] = judge_set(group)
        else:
            raise BadHistory(f"key {key!r} is used both as a register and as a set")
        judged += len(relevant_of(group))
    return Report(judged, verdicts)


def judge_register(operations: Sequence[Operation], *, work_max: int, initial: Value = None) -> Verdict:
    return search(operations, Register(operations, initial), work_max=work_max)


# --- models -----------------------------------------------------------------------------------------------------------

Step = Callable[[int], int]


class Model(Protocol):
    """What an object does in a sequential world. States are numbers, so that configurations are cheap to remember."""

    initial: int

    def step(self, operation: Operation) -> Step:
        """The operation as a function from the state before to the state after, or to REFUSED."""

    def likeness(self, operation: Operation) -> Hashable:
        """Equal for operations of unknown outcome that have the same effect in every state."""

    def describe(self, state: int) -> str: ...


class Register:
    """One value, with read, write and compare-and-swap.

    Values that no read returned and no swap expected are one value to the checker: nothing can tell them apart.
    """

    UNSEEN = 0

    def __init__(self, operations: Sequence[Operation], initial: Value = None) -> None:
        self._numbers: dict[str, int] = {}
        self._values: list[Value] = [None]
        for operation in operations:
            if operation.kind is Kind.CAS:
                self._see(_pair(operation)[0])
            elif operation.kind is Kind.READ and operation.outcome is Outcome.OK:
                self._see(operation.result)
        self.initial = self._number(initial)

    def step(self, operation: Operation) -> Step:
        match operation.kind, operation.outcome:
            case Kind.READ, Outcome.OK:
                value = self._number(operation.result)
                return lambda state: state if state == value else REFUSED
            case Kind.WRITE, _:
                value = self._number(operation.argument)
                return lambda state: value
            case Kind.CAS, outcome:
                old, new = map(self._number, _pair(operation))
                if outcome is Outcome.INFO:
                    return lambda state: new if state == old else state
                if operation.result is True:
                    return lambda state: new if state == old else REFUSED
                if operation.result is False:
                    return lambda state: REFUSED if state == old else state
        raise BadHistory(f"no operation of a register: {operation}")

    def likeness(self, operation: Operation) -> Hashable:
        if operation.kind is Kind.CAS:
            return operation.kind, *map(self._number, _pair(operation))
        return operation.kind, self._number(operation.argument)

    def describe(self, state: int) -> str:
        return "a value that nobody read" if state == self.UNSEEN else repr(self._values[state])

    def _see(self, value: Value) -> None:
        text = _text(value)
        if text not in self._numbers:
            self._numbers[text] = len(self._values)
            self._values.append(value)

    def _number(self, value: Value) -> int:
        return self._numbers.get(_text(value), self.UNSEEN)


class AppendOnlySet:
    """Elements in the order in which they were added, each at most once; a read returns all of them.

    `judge_set` judges the same object without search; this model lets the search judge it too, as its twin in tests.
    """

    initial = 0

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._ordered = reads_are_ordered(operations)
        self._adds = adds_of(operations)
        self._bits = {element: 1 << offset for offset, element in enumerate(self._adds)}
        # In order: a state is a node of a tree whose edges are elements. Out of order: a bit mask of elements.
        self._nodes: dict[tuple[int, Value], int] = {}

    def step(self, operation: Operation) -> Step:
        if operation.kind is Kind.ADD:
            element = operation.argument
            if self._ordered:
                return lambda state: self._child(state, element)
            bit = self._bits[element]
            return lambda state: state | bit
        if operation.kind is Kind.READ_ALL and operation.outcome is Outcome.OK:
            wanted = self.initial
            for element in elements_of(operation):
                if self._ordered:
                    wanted = self._child(wanted, element)
                elif element in self._bits:
                    wanted |= self._bits[element]
                else:
                    return lambda state: REFUSED
            return lambda state: state if state == wanted else REFUSED
        raise BadHistory(f"no operation of an append-only set: {operation}")

    def likeness(self, operation: Operation) -> Hashable:
        return operation.kind, operation.argument

    def describe(self, state: int) -> str:
        return f"state {state}"

    def _child(self, parent: int, element: Value) -> int:
        return self._nodes.setdefault((parent, element), len(self._nodes) + 1)


# --- search -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Furthest:
    """The latest return that no order got past, and the states in which they were stuck there."""

    node: int = 0
    states: set[int] = field(default_factory=set)

    def blocked(self, node: int, state: int) -> None:
        if node > self.node:
            self.node = node
            self.states = set()
        if node == self.node and len(self.states) < SHOWN_MAX:
            self.states.add(state)


@dataclass(frozen=True, slots=True)
class _Stuck:
    culprit: Operation
    states: frozenset[int]


def search(operations: Sequence[Operation], model: Model, *, work_max: int) -> Verdict:
    """Look for an order. If there is none, say at which return the history became impossible."""
    key = operations[0].key if operations else ""
    answer = _explore(operations, model, work_max)
    if answer is None:
        return Linearizable(key)
    if isinstance(answer, int):
        return GaveUp(key, answer)
    # The search knew the results of operations that were still open at the return where it got stuck, so an observer
    # may have seen the contradiction only later, but never earlier. A prefix of a linearizable history is
    # linearizable, so the first return at which it shows is found by halving.
    ends = sorted({it.deadline for it in operations if answer.culprit.deadline <= it.deadline < math.inf})

    def fails(end: float) -> bool:
        return isinstance(_explore(prefix_until(operations, end), model, work_max), _Stuck)

    offset = 0 if fails(ends[0]) else bisect_left(ends, True, lo=1, key=fails)  # It mostly shows at once.
    end = ends[min(offset, len(ends) - 1)]
    shortest = _explore(prefix_until(operations, end), model, work_max)
    if isinstance(shortest, _Stuck):
        answer = shortest
    possible = sorted(map(model.describe, answer.states))
    return violation_of(key, operations, answer.culprit, "the state could only be " + " or ".join(possible), end)


def _explore(operations: Sequence[Operation], model: Model, work_max: int) -> _Stuck | int | None:
    """None: an order exists. A number: undecided after that many steps."""
    relevant = relevant_of(operations)
    known = [operation for operation in relevant if operation.outcome is Outcome.OK]
    everything = known + [operation for operation in relevant if operation.outcome is Outcome.INFO]
    steps = [model.step(operation) for operation in everything]
    # Of each kind of unknown operation only the eldest not yet used is a candidate (the rule `in turn`).
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for number in range(len(known), len(everything)):
        alike[model.likeness(everything[number])].append(number)
    queues = list(alike.values())  # In order of the eldest.
    taken = [0] * len(queues)

    # Events in order of time. Those of known operations form a linked list, from which operations are lifted as they
    # are ordered. At equal times invocations come first: operations that touch in one instant are concurrent.
    events = [(operation.invoked, False, number) for number, operation in enumerate(everything)]
    events += [(operation.deadline, True, number) for number, operation in enumerate(known)]
    events.sort()
    operation_of = [-1] + [number for _, _, number in events]
    is_return = [False] + [returns for _, returns, _ in events]
    following = [0] * (len(events) + 1)
    previous = [0] * (len(events) + 1)
    call_node = [0] * len(everything)
    return_node = [0] * len(known)
    for node in range(1, len(events) + 1):
        number = operation_of[node]
        (return_node if is_return[node] else call_node)[number] = node
        if number < len(known):
            following[previous[0]], previous[node], previous[0] = node, previous[0], node

    def lift(node: int) -> None:
        following[previous[node]] = following[node]
        previous[following[node]] = previous[node]

    def put_back(node: int) -> None:
        following[previous[node]] = node
        previous[following[node]] = node

    # A configuration: which known operations are ordered (all below `low`, and `window` from there), which unknown
    # ones are used, the state, and, because the rule `needed` looks back, the unknown operation just used and the
    # state before it.
    state, low, window, used, last, before = model.initial, 0, 0, 0, -1, REFUSED
    seen: set[tuple[int, int, int, int, int, int]] = set()
    stack: list[tuple[int, int, int, int, int, int, int, int]] = []
    furthest = _Furthest()
    work = 0
    # The candidates in a configuration: known operations invoked before the first return, then, at that return,
    # the head of each queue of unknown ones. Unknown ones come last because most histories do without them.
    node, queue = following[0], 0
    while low < len(known):
        work += 1
        if work > work_max:
            return work_max
        assert node, "an operation not yet ordered has its return in the list, and nothing is taken beyond a return"
        is_unknown = is_return[node]
        if not is_unknown:
            number = operation_of[node]
        elif queue < len(queues) and call_node[queues[queue][0]] < node:
            number = queues[queue][taken[queue]] if taken[queue] < len(queues[queue]) else -1
            if number < 0 or call_node[number] > node:
                queue += 1
                continue
        else:
            furthest.blocked(node, state)
            if not stack:
                return _Stuck(everything[operation_of[furthest.node]], frozenset(furthest.states))
            node, queue, state, low, window, used, last, before = stack.pop()
            if is_return[node]:
                taken[queue] -= 1
                queue += 1
            else:
                put_back(return_node[operation_of[node]])
                put_back(node)
                node = following[node]
            continue

        after = steps[number](state)
        allowed = after != REFUSED and not (is_unknown and after == state)
        if allowed and (last < 0 or _needed(steps, last, number, before, after, is_unknown)):
            next_low, next_window, next_used = low, window, used
            if is_unknown:
                next_used |= 1 << (number - len(known))
            else:
                next_window |= 1 << (number - low)
                while next_window & 1:
                    next_window >>= 1
                    next_low += 1
            next_last, next_before = (number, state) if is_unknown else (-1, REFUSED)
            configuration = (next_low, next_window, next_used, after, next_last, next_before)
            if configuration not in seen:
                seen.add(configuration)
                work += REMEMBERING
                stack.append((node, queue, state, low, window, used, last, before))
                if is_unknown:
                    taken[queue] += 1
                else:
                    lift(node)
                    lift(return_node[number])
                state, low, window, used, last, before = after, next_low, next_window, next_used, next_last, next_before
                node, queue = following[0], 0
                continue
        if is_unknown:
            queue += 1
        else:
            node = following[node]
    return None


def _needed(steps: Sequence[Step], last: int, number: int, before: int, after: int, is_unknown: bool) -> bool:
    """Whether `number` needs the unknown operation `last`, used just before it, to be where it is."""
    without = steps[number](before)
    if without == REFUSED:
        return True
    if without == after:
        return False
    waits = steps[last](without) == after
    # Of two unknown operations that commute, one order must remain: that of their invocation.
    return not (waits and (not is_unknown or number < last))


# --- append-only sets, without search ---------------------------------------------------------------------------------


def _pair(operation: Operation) -> tuple[Value, Value]:
    match operation.argument:
        case (old, new):
            return old, new
    raise BadHistory(f"the argument of cas must be (old, new): {operation}")


def _text(value: Value) -> str:
    """Tells 1 from True and from 1.0, which Python holds equal."""
    return json.dumps(to_json(value))
