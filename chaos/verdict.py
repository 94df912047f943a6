"""The verdict of a run: functions from evidence to descriptions of violations. An empty result means no violation.

They use only evidence (the oracle's lines, the clients' answers, the run's own actions), never the cluster. So a test
can pass them evidence of a broken promise and check that it is found.

When may a step run twice? A step whose result was not journaled when its attempt was lost runs again in the next
attempt; this cannot be avoided. So a step must not run twice in one attempt, nor again once a later step of its
invocation was seen, because that one began after the journal had acknowledged it. An attempt must not run steps after
its successor was seen. And a step must not run again without a fault that can have ended its attempt.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from holdfast.chaos.oracle import Effect
from holdfast.chaos.outage import Outage
from holdfast.chaos.workloads import Ask, Failed

#: How long after its end a fault still excuses its consequences: elections, reconnects with backoff, restarts.
AFTERMATH_S: Final = 15.0
OUT_SLACK_S: Final = 0.5
#: A node holds a request for 15 s while there is no leader. A cut that lasts almost that long may end in a refusal.
HELD_S: Final = 10.0
#: Timers have millisecond resolution, and a disciplined clock may run 500 ppm fast.
EARLY_S: Final = 0.02
SHOWN_MAX: Final = 20
#: How a stopping node may fail a client: before it accepts the request, or with a clear answer.
GRACEFUL: Final = frozenset({"refused", "stale", "status 503"})


@dataclass(frozen=True, slots=True)
class Weather:
    """Which nodes had no majority from this moment on."""

    at: float
    lonely: frozenset[str]


@dataclass(slots=True)
class Found:
    """Violations by promise; each is a sentence."""

    by_promise: dict[str, list[str]] = field(default_factory=dict)

    def add(self, promise: str, sentences: Iterable[str]) -> None:
        found = list(sentences)
        if found:
            self.by_promise.setdefault(promise, []).extend(found)

    @property
    def total(self) -> int:
        return sum(len(sentences) for sentences in self.by_promise.values())

    def lines(self) -> list[str]:
        lines = []
        for promise, sentences in self.by_promise.items():
            lines += [f"{promise}: {sentence}" for sentence in sentences[:SHOWN_MAX]]
            if len(sentences) > SHOWN_MAX:
                lines.append(f"{promise}: and {len(sentences) - SHOWN_MAX} more")
        return lines


# -- faults as times ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """A fault, from just before it began until all was repaired."""

    name: str
    target: str
    since: float
    until: float
    excuses: bool = True  # False: no client may notice it.
    family: str = "faults"


def during(found: Sequence[Window], began: float, ended: float, *, aftermath_s: float = AFTERMATH_S) -> list[Window]:
    return [window for window in found if window.since - 1.0 <= ended and began <= window.until + aftermath_s]


def _distance(window: Window, began: float, ended: float) -> float:
    return max(window.since - ended, began - window.until, 0.0)


# -- steps -------------------------------------------------------------------------------------------------------------


def repeated_steps(effects: Sequence[Effect], faults: Sequence[Window]) -> tuple[list[str], Counter[str]]:
    """Violations, and how many steps ran again for a valid reason, by the nearest fault."""
    by_invocation: dict[str, list[Effect]] = defaultdict(list)
    for effect in effects:
        by_invocation[effect.invocation].append(effect)
    wrong: list[str] = []
    excused: Counter[str] = Counter()
    for invocation, story in by_invocation.items():
        furthest: Effect | None = None  # the latest step seen so far
        newest = story[0]  # the latest attempt seen so far
        last: dict[str, Effect] = {}
        for effect in story:
            who = f"{effect.mark} ({invocation}): step {effect.step!r} of attempt {effect.attempt}"
            before = last.get(effect.step)
            if effect.attempt < newest.attempt:
                wrong.append(f"{who} ran after attempt {newest.attempt} had begun to run steps")
            elif furthest is not None and effect.number < furthest.number:
                wrong.append(f"{who} ran again after step {furthest.step!r} was seen, so it was in the journal")
            elif before is not None and before.attempt == effect.attempt:
                wrong.append(f"{who} ran twice in one attempt")
            elif before is not None and not during(faults, before.at, effect.at):
                wrong.append(f"{who} ran again {effect.at - before.at:.3f} s later, and no fault was near")
            elif before is not None:
                near = during(faults, before.at, effect.at)
                excused[min(near, key=lambda window: _distance(window, before.at, effect.at)).name] += 1
            last[effect.step] = effect
            if furthest is None or effect.number > furthest.number:
                furthest = effect
            if effect.attempt > newest.attempt:
                newest = effect
    return wrong, excused


def missing_steps(effects: Sequence[Effect], flows: Mapping[str, Sequence[str]]) -> list[str]:
    """Checks that every answer consists of steps that ran, one for each position."""
    by_mark: dict[str, dict[str, int]] = defaultdict(dict)
    for effect in effects:
        by_mark[effect.mark][effect.nonce] = effect.number
    wrong = []
    for mark, nonces in flows.items():
        numbers = [by_mark[mark].get(nonce) for nonce in nonces]
        if numbers != list(range(len(nonces))):
            wrong.append(f"{mark}: its answer is made of steps {numbers}, of which the oracle knows {by_mark[mark]}")
    return wrong


def two_writers(effects: Sequence[Effect]) -> list[str]:
    """Checks that, for each key, all effects of one invocation come before those of the next."""
    by_key: dict[tuple[str, str], list[Effect]] = defaultdict(list)
    for effect in effects:
        if effect.key is not None:
            by_key[effect.work, effect.key].append(effect)
    wrong = []
    for (work, key), story in by_key.items():
        done: set[str] = set()
        for before, after in pairwise(story):
            if before.invocation != after.invocation:
                done.add(before.invocation)
                if after.invocation in done:
                    wrong.append(
                        f"{work}/{key}: {after.mark} wrote at {after.at:.3f}, while {before.mark} had the key since "
                        f"{before.at:.3f}"
                    )
    return wrong


def doubled_invocations(effects: Sequence[Effect]) -> list[str]:
    """Checks that one operation of a client is one invocation, however often it was sent."""
    ids: dict[tuple[str, str], set[str]] = defaultdict(set)
    for effect in effects:
        ids[effect.work, effect.mark].add(effect.invocation)
    return [
        f"{mark} became {len(found)} invocations: {sorted(found)}" for (_, mark), found in ids.items() if len(found) > 1
    ]


# -- what clients were told --------------------------------------------------------------------------------------------


def wrong_counts(returned: Mapping[str, Sequence[int]], final: Mapping[str, int]) -> list[str]:
    """Checks that every add counts once: the answers are 1 to n, and n is the final value."""
    wrong = []
    for key, answers in returned.items():
        doubled = sorted(value for value, times in Counter(answers).items() if times > 1)
        lost = sorted(set(range(1, len(answers) + 1)) - set(answers))
        if doubled or lost or final.get(key) != len(answers):
            wrong.append(
                f"counter {key}: {len(answers)} adds were answered and it stands at {final.get(key)}; "
                f"answered twice: {doubled[:10]}, never: {lost[:10]}"
            )
    return wrong


def wrong_sizes(expected: Mapping[str, int], final: Mapping[str, int]) -> list[str]:
    return [
        f"leaf {key}: called {count} times, and grew {final.get(key)} times"
        for key, count in expected.items()
        if final.get(key) != count
    ]


def wrong_inboxes(sent: Mapping[str, Sequence[str]], final: Mapping[str, Sequence[str]]) -> list[str]:
    """Checks that each message arrived once, and those of one sender in order."""
    wrong = []
    for key, marks in sent.items():
        got: dict[str, list[str]] = defaultdict(list)
        for message in final.get(key, ()):
            mark, _, number = message.rpartition(" ")
            got[mark].append(number)
        wrong += [
            f"inbox {key}: {mark} sent 0, 1, 2 and {got[mark]} arrived"
            for mark in marks
            if got[mark] != ["0", "1", "2"]
        ]
        wrong += [f"inbox {key}: messages of {mark}, who sent none" for mark in got if mark not in marks]
    return wrong


def different_answers(retries: Mapping[str, Sequence[Any]]) -> list[str]:
    return [
        f"{mark}: the same request was answered differently: {answers}"
        for mark, answers in retries.items()
        if any(answer != answers[0] for answer in answers)
    ]


def early_timers(naps: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{nap['mark']}: a timer of {nap['seconds']} s fired after {nap['ended'] - nap['began']:.3f} s"
        for nap in naps
        if nap["chosen"] == "late" and nap["ended"] - nap["began"] < nap["seconds"] - EARLY_S
    ]


def late_timers(naps: Sequence[Mapping[str, Any]], faults: Sequence[Window], *, late_s: float) -> list[str]:
    """Timers that fired late without an excuse. A timer that never fires is found as an unanswered operation."""
    return [
        f"{nap['mark']}: a timer of {nap['seconds']} s fired {late:.3f} s late, and no fault was near"
        for nap in naps
        if nap["chosen"] == "late"
        and (late := nap["ended"] - nap["began"] - nap["seconds"]) > late_s
        and not during(faults, nap["began"], nap["ended"])
    ]


def errors_of_live_nodes(
    failed: Sequence[Failed],
    outages: Sequence[Outage],
    weather: Sequence[Weather],
    faults: Sequence[Window],
    end: float,
) -> tuple[list[str], Counter[str]]:
    """Violations, and how often clients saw an excused failure, by excuse."""
    wrong: list[str] = []
    excused: Counter[str] = Counter()
    for each in failed:
        out = [
            outage
            for outage in outages
            if outage.node == each.node and outage.touches(each.began, each.ended, slack_s=OUT_SLACK_S)
        ]
        if each.what == "silent":
            excused["silent for longer than a client waits"] += 1  # Slow, and measured as such; not an error.
        elif out and all(outage.why == "told to end" for outage in out) and each.what not in GRACEFUL:
            wrong.append(
                f"{each.mark} ({each.work}) at {each.node}, which was told to end: {each.what} after "
                f"{each.ended - each.began:.3f} s: {each.message}"
            )
        elif out:
            why = next((outage.why for outage in out if outage.why != "told to end"), None)
            excused[f"the node was {why}" if why is not None else f"the node was told to end: {each.what}"] += 1
        elif lonely_s(weather, each.node, each.began, each.ended, end) > HELD_S:
            excused[f"no majority for more than {HELD_S:g} s"] += 1
        elif "disk" in each.message and any(
            window.name.startswith("full disk") for window in during(faults, each.began, each.ended, aftermath_s=2.0)
        ):
            excused["refused because a disk was full"] += 1
        else:
            near = "; ".join(window.target for window in during(faults, each.began, each.ended, aftermath_s=2.0))
            wrong.append(
                f"{each.mark} ({each.work}) at {each.node}: {each.what} after {each.ended - each.began:.3f} s"
                f" [{near or 'no fault near'}]: {each.message}"
            )
    return wrong, excused


def lonely_s(weather: Sequence[Weather], node: str, began: float, ended: float, end: float) -> float:
    """How long a node had no majority between `began` and `ended`."""
    total = 0.0
    for now, then in pairwise([*weather, Weather(end, frozenset())]):
        if node in now.lonely:
            total += max(0.0, min(ended, then.at) - max(began, now.at))
    return total


def unanswered(asks: Sequence[Ask], healed: float) -> list[str]:
    return [
        f"{ask.mark} ({ask.work}) was asked {healed - ask.asked:.1f} s before the last repair and never answered, "
        f"after {ask.tries} tries"
        for ask in asks
        if ask.answered is None
    ]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
