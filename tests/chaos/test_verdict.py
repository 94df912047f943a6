"""The verdict of a chaos run, given evidence of each broken promise: it must find it, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from holdfast.chaos import verdict
from holdfast.chaos.oracle import Effect
from holdfast.chaos.outage import Outage
from holdfast.chaos.verdict import Weather, Window
from holdfast.chaos.workloads import Ask, Failed

FAULT = Window("kill leader", "SIGKILL n1", 105.0, 107.0)


def effect(at: float, step: int, attempt: int = 1, *, mark: str = "flow-1", key: str | None = None) -> Effect:
    return Effect(at, mark, "flow", f"inv_{mark}", f"step {step}", step, attempt, f"{mark}.{step}.{attempt}", key)


GOOD = [effect(100.0, 0), effect(100.1, 1), effect(100.2, 2)]


def test_steps_that_ran_once_are_right() -> None:
    assert verdict.repeated_steps(GOOD, []) == ([], Counter())
    assert verdict.missing_steps(GOOD, {"flow-1": ["flow-1.0.1", "flow-1.1.1", "flow-1.2.1"]}) == []


def test_a_step_may_run_again_when_a_fault_took_its_attempt() -> None:
    story = [effect(105.0, 0), effect(105.1, 1), effect(106.0, 1, attempt=2), effect(106.1, 2, attempt=2)]

    assert verdict.repeated_steps(story, [FAULT]) == ([], {FAULT.name: 1})

    before = Window("rolling restart", "SIGTERM of n2", FAULT.since - 8.0, FAULT.since - 5.0)
    assert verdict.repeated_steps(story, [before, FAULT])[1] == {FAULT.name: 1}, "the nearest one is the cause"


@pytest.mark.parametrize(
    ("story", "sentence"),
    [
        ([*GOOD, effect(100.3, 1)], "after step 'step 2' was seen"),
        ([effect(105.0, 0), effect(105.1, 0)], "twice in one attempt"),
        ([effect(105.0, 0), effect(105.1, 1), effect(105.2, 0, attempt=2)], "it was in the journal"),
        ([effect(105.0, 0), effect(105.1, 0, attempt=2), effect(105.2, 0)], "after attempt 2 had begun"),
        ([effect(50.0, 0), effect(51.0, 0, attempt=2)], "no fault was near"),
    ],
    ids=["doubled line", "same attempt", "journaled", "zombie", "without a fault"],
)
def test_a_step_that_ran_once_too_often_is_found(story: Sequence[Effect], sentence: str) -> None:
    (found,), _ = verdict.repeated_steps(story, [FAULT])

    assert sentence in found


def test_an_answer_made_of_a_step_that_never_ran_is_found() -> None:
    assert len(verdict.missing_steps(GOOD[:2], {"flow-1": ["flow-1.0.1", "flow-1.1.1", "flow-1.2.1"]})) == 1


def test_two_writers_of_a_key_are_found() -> None:
    one = [effect(100.0, 0, mark="a", key="k"), effect(100.1, 1, mark="a", key="k")]
    other = [effect(100.2, 0, mark="b", key="k"), effect(100.3, 1, mark="b", key="k")]
    early = [replace(each, at=each.at - 0.15) for each in other]

    assert verdict.two_writers([*one, *other]) == []
    assert verdict.two_writers(sorted([*one, *early], key=lambda each: each.at))


def test_a_request_that_became_two_invocations_is_found() -> None:
    assert verdict.doubled_invocations(GOOD) == []
    assert len(verdict.doubled_invocations([*GOOD, replace(GOOD[0], invocation="inv_2")])) == 1


def test_a_lost_or_doubled_count_is_found() -> None:
    assert verdict.wrong_counts({"c": [2, 1, 3]}, {"c": 3}) == []
    assert len(verdict.wrong_counts({"c": [1, 2, 3]}, {"c": 2})) == 1
    assert "answered twice: [2]" in verdict.wrong_counts({"c": [1, 2, 2]}, {"c": 3})[0]
    assert len(verdict.wrong_sizes({"l": 2}, {"l": 3})) == 1


def test_messages_lost_doubled_or_out_of_order_are_found() -> None:
    good = ["m 0", "n 0", "m 1", "m 2", "n 1", "n 2"]

    assert verdict.wrong_inboxes({"i": ["m", "n"]}, {"i": good}) == []
    assert len(verdict.wrong_inboxes({"i": ["m", "n"]}, {"i": good[:-1]})) == 1
    assert len(verdict.wrong_inboxes({"i": ["m", "n"]}, {"i": [*good, "m 2"]})) == 1
    assert len(verdict.wrong_inboxes({"i": ["m", "n"]}, {"i": ["m 1", "m 0", "m 2", "n 0", "n 1", "n 2"]})) == 1


def test_timers_that_fire_early_or_late_are_found() -> None:
    nap = {"mark": "n", "seconds": 1.0, "began": 10.0, "ended": 11.001, "chosen": "late"}

    assert verdict.early_timers([nap]) == [] == verdict.late_timers([nap], [], late_s=3)
    assert len(verdict.early_timers([{**nap, "ended": 10.9}])) == 1
    assert len(verdict.late_timers([{**nap, "ended": 15.0}], [FAULT], late_s=3)) == 1
    assert verdict.late_timers([{**nap, "began": 105.0, "ended": 110.0}], [FAULT], late_s=3) == []


def test_different_answers_to_one_request_are_found() -> None:
    assert verdict.different_answers({"m": [["a"], ["a"]]}) == []
    assert len(verdict.different_answers({"m": [["a"], ["b"]]})) == 1


REFUSAL = Failed("flow", "flow-9", "n2", 106.0, 106.5, "status 503", "n1 did not answer")


def test_an_error_is_excused_only_by_what_happened_to_its_own_node() -> None:
    killed = Outage("n2", "killed", 106.2, 109.0)
    other = replace(killed, node="n1")

    wrong, excused = verdict.errors_of_live_nodes([REFUSAL], [killed], [], [FAULT], 200.0)
    assert wrong == [] and excused == {"the node was killed": 1}
    (sentence,), _ = verdict.errors_of_live_nodes([REFUSAL], [other], [], [FAULT], 200.0)
    assert "flow-9" in sentence and "SIGKILL n1" in sentence


@pytest.mark.parametrize(
    ("what", "excuse"),
    [
        ("refused", "the node was told to end: refused"),
        ("stale", "the node was told to end: stale"),
        ("status 503", "the node was told to end: status 503"),
        ("broken", None),
        ("status 500", None),
    ],
)
def test_a_stopping_node_may_refuse_but_must_not_break_connections(what: str, excuse: str | None) -> None:
    told = Outage("n2", "told to end", 106.2, 109.0)
    failed = replace(REFUSAL, what=what)

    wrong, excused = verdict.errors_of_live_nodes([failed], [told], [], [FAULT], 200.0)
    assert excused == ({excuse: 1} if excuse is not None else {})
    assert len(wrong) == (excuse is None)

    killed = Outage("n2", "killed", 106.3, 109.0)
    assert verdict.errors_of_live_nodes([failed], [told, killed], [], [FAULT], 200.0)[0] == []


def test_a_node_may_refuse_only_after_a_long_time_without_a_majority() -> None:
    weather = [Weather(100.0, frozenset({"n2"})), Weather(111.0, frozenset())]
    long, short = replace(REFUSAL, began=99.0, ended=115.0), replace(REFUSAL, began=103.0, ended=115.0)

    assert verdict.errors_of_live_nodes([long], [], weather, [], 200.0)[0] == []
    assert len(verdict.errors_of_live_nodes([short], [], weather, [], 200.0)[0]) == 1


def test_a_request_without_an_answer_is_found() -> None:
    assert verdict.unanswered([Ask("flow", "f", "n1", 10.0, answered=11.0)], 20.0) == []
    assert len(verdict.unanswered([Ask("flow", "f", "n1", 10.0)], 20.0)) == 1


def test_percentiles_are_of_the_values() -> None:
    assert verdict.percentile([], 0.5) == 0.0
    assert verdict.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert verdict.percentile([3.0, 1.0, 2.0], 0.99) == 3.0
