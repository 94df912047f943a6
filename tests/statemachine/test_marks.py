"""Whether states of several partitions fit together: the verdict of the marks is compared with the fate of the messages."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import pytest

from holdfast.sdk.ids import InvocationId, numbers_of, partition_of
from holdfast.statemachine import outbox, queries
from holdfast.statemachine.commands import Deliver, Invoke, Mode, TrimOutbox
from holdfast.statemachine.marks import Marks, read_marks, why_not_together
from holdfast.statemachine.memory import Memory
from tests.statemachine.rig import HOUR_MS, Rig, ident

HERE, THERE = numbers_of(2)


def test_marks_without_messages_always_fit() -> None:
    assert why_not_together({HERE: Marks({}, {}, {}), THERE: Marks({}, {}, {})}) is None
    assert why_not_together({}) is None


@pytest.mark.parametrize(
    ("trimmed", "taken", "sent", "fits"),
    [
        (0, 0, 5, True),
        (2, 2, 5, True),
        (2, 4, 5, True),
        (5, 5, 5, True),
        (3, 2, 5, False),
        (5, 4, 5, False),
        (2, 6, 5, False),
    ],
)
def test_the_mark_of_the_receiver_lies_between_trimmed_and_sent(
    trimmed: int, taken: int, sent: int, fits: bool
) -> None:
    source = Marks({THERE: sent}, {}, {THERE: trimmed})
    target = Marks({}, {HERE: taken}, {})

    assert (why_not_together({HERE: source, THERE: target}) is None) == fits
    assert (why_not_together({THERE: target, HERE: source}) is None) == fits


def test_one_unfit_pair_is_found_among_many() -> None:
    numbers = numbers_of(5)
    *_, third, fourth = numbers
    fine = {number: Marks({}, {}, {}) for number in numbers}
    wrong = {**fine, third: Marks({fourth: 7}, {}, {fourth: 7}), fourth: Marks({}, {third: 6}, {})}

    assert why_not_together(wrong) == "partition 3 forgot message 7 to partition 4, which has 6"
    assert why_not_together({**wrong, fourth: Marks({}, {third: 8}, {})}) == (
        "partition 4 has message 8 of partition 3, which has sent 7"
    )


class Source(Rig):
    """A partition that sends invocations to the other one, each under its own name."""

    def send(self, name: str) -> None:
        self.state.begin(self.txn)
        outbox.post(self.state, Invoke(there(name), "s", "h", None, Mode.PLAIN, b"", {}, 0, None, 0, HOUR_MS))
        self.state.flush()
        self.state.take_effects()


def there(name: str) -> InvocationId:
    """An id in the other partition."""
    return next(found for number in itertools.count() if partition_of(found := ident(f"{name} {number}"), 2) == THERE)


def test_marks_are_read_from_the_state() -> None:
    source, target = Source(HERE, 2), Rig(THERE, 2)
    for number in range(4):
        source.send(f"m{number}")
    first, messages = queries.outbox(source.txn, THERE, 0, 3)
    target.do(Deliver(HERE, first, messages))
    source.do(TrimOutbox(THERE, 2))

    assert read_marks(source.txn) == Marks({THERE: 4}, {}, {THERE: 2})
    assert read_marks(target.txn) == Marks({}, {HERE: 3}, {})

    source.do(TrimOutbox(THERE, 4))
    assert read_marks(source.txn).trimmed == {THERE: 4}, "an empty outbox: everything that was sent"


def test_exactly_the_states_that_fit_lose_and_repeat_no_message() -> None:
    """Continue from every pair of moments of a history: the marks must predict what happens to the messages."""
    verdicts = {True: 0, False: 0}
    sources, targets = histories()
    for (sent, source), target in itertools.product(sources, targets):
        fits = why_not_together({HERE: read_marks(source), THERE: read_marks(target)}) is None

        arrived = go_on(source, target)

        assert (arrived == [*sent, "new"]) == fits, (sent, arrived)
        verdicts[fits] += 1
    assert min(verdicts.values()) > 20, verdicts


def histories() -> tuple[list[tuple[list[str], Memory]], list[Memory]]:
    """The source after each of its changes, with the names sent by then, and the target after each of its own."""
    source, target = Source(HERE, 2), Rig(THERE, 2)
    sent: list[str] = []
    sources, targets = [(list(sent), copy.deepcopy(source.txn))], [copy.deepcopy(target.txn)]
    for number in range(9):
        sent.append(f"m{number}")
        source.send(sent[-1])
        sources.append((list(sent), copy.deepcopy(source.txn)))
        if number % 3 == 2:
            first, messages = queries.outbox(source.txn, THERE, number - 2, 2)
            for count in range(1, len(messages) + 1):
                target.do(Deliver(HERE, first, messages[:count]))
                targets.append(copy.deepcopy(target.txn))
            source.do(TrimOutbox(THERE, first + len(messages) - 1))
            sources.append((list(sent), copy.deepcopy(source.txn)))
            target.do(Deliver(HERE, *queries.outbox(source.txn, THERE, 0, 10)))
            targets.append(copy.deepcopy(target.txn))
    return sources, targets


def go_on(source_txn: Memory, target_txn: Memory) -> list[str]:
    """Send one more name from the source, and return the names that arrived in the end."""
    source, target = Source(HERE, 2), Rig(THERE, 2)
    source.txn, target.txn = copy.deepcopy(source_txn), copy.deepcopy(target_txn)
    source.send("new")
    target.do(Deliver(HERE, *queries.outbox(source.txn, THERE, 0, 100)))
    return list(arrived(target))


def arrived(target: Rig) -> Iterator[str]:
    for name in (*(f"m{number}" for number in range(9)), "new"):
        if queries.load(target.txn, there(name)) is not None:
            yield name
