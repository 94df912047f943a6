"""What the check for linearizability says about the history of a key, and how it explains a violation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.chaos.history import Kind, Operation, Outcome

SHOWN_MAX = 10


@dataclass(frozen=True, slots=True)
class Linearizable:
    key: str


@dataclass(frozen=True, slots=True)
class Violation:
    key: str
    explanation: str
    culprit: Operation
    prefix: tuple[Operation, ...]  # The shortest that fails; what had not returned by its end stands as `info`.


@dataclass(frozen=True, slots=True)
class GaveUp:
    key: str
    work: int


Verdict = Linearizable | Violation | GaveUp


@dataclass(frozen=True, slots=True)
class Report:
    judged: int  # Operations that count: neither `fail` nor reads of unknown outcome.
    verdicts: dict[str, Verdict]

    @property
    def violations(self) -> list[Violation]:
        return [verdict for verdict in self.verdicts.values() if isinstance(verdict, Violation)]

    @property
    def gave_up(self) -> list[GaveUp]:
        return [verdict for verdict in self.verdicts.values() if isinstance(verdict, GaveUp)]

    @property
    def ok(self) -> bool:
        return self.judged > 0 and all(isinstance(verdict, Linearizable) for verdict in self.verdicts.values())

    def __str__(self) -> str:
        lines = [
            f"{self.judged} operations on {len(self.verdicts)} keys: "
            f"{len(self.violations)} violations, {len(self.gave_up)} keys undecided"
        ]
        lines += [violation.explanation for violation in self.violations]
        lines += [f"key {it.key!r}: undecided after {it.work} steps of search" for it in self.gave_up]
        return "\n".join(lines)


def prefix_until(operations: Sequence[Operation], end: float) -> list[Operation]:
    """What an observer knew at `end`: later operations are unheard of, open ones have an unknown outcome."""
    return [
        replace(it, outcome=Outcome.INFO, result=None, returned=None)
        if it.outcome is Outcome.OK and it.deadline > end
        else it
        for it in operations
        if it.invoked <= end
    ]


def relevant_of(operations: Sequence[Operation]) -> list[Operation]:
    """In order of invocation, without operations that did not happen and reads whose answer was lost."""
    return sorted(
        (
            it
            for it in operations
            if it.outcome is Outcome.OK or (it.outcome is Outcome.INFO and it.kind not in (Kind.READ, Kind.READ_ALL))
        ),
        key=lambda it: it.invoked,
    )


def violation_of(key: str, operations: Sequence[Operation], culprit: Operation, reason: str, end: float) -> Violation:
    prefix = tuple(sorted(prefix_until(operations, end), key=lambda it: it.invoked))
    beside = [
        it for it in prefix if it != culprit and it.invoked <= culprit.deadline and it.deadline >= culprit.invoked
    ]
    ahead = sorted((it for it in prefix if it.deadline < culprit.invoked), key=lambda it: it.deadline)
    lines = [f"key {key!r}: no order of the first {len(prefix)} operations explains", f"    {culprit}", f"  {reason}"]
    for title, shown, total in (
        ("  open at the same time:", beside[-SHOWN_MAX:], len(beside)),
        ("  last to return before it:", ahead[-SHOWN_MAX:], len(ahead)),
    ):
        if shown:
            lines.append(title + (f" (the last {len(shown)} of {total})" if total > len(shown) else ""))
            lines += [f"    {it}" for it in shown]
    return Violation(key, "\n".join(lines), culprit, prefix)
