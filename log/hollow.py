"""Groups that kept their log but lost their state, and what they may do until a state is restored.

A *hollow* group neither votes nor follows. It only enters new epochs with the other members, because the state that it will
receive belongs to their epoch (ADR 2, rule 5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.log.group_log import GroupLog
    from holdfast.log.records import Configuration


def why_not_fill(log: GroupLog, index: int, term: int, epoch: int) -> str | None:
    """Why the group cannot continue from the state at (index, term), cut in `epoch`; None if it can."""
    if not log.settled:
        return "the epoch of the log is not on disk yet"
    if index < log.base_index:
        return f"the state ends at entry {index}, but the log begins after entry {log.base_index}"
    known = log.term_of(index)
    if known is not None and known != term and index <= log.commit:
        return f"entry {index} has term {term} in the state, but term {known} in the log"
    if known != term and epoch != log.configuration.epoch:
        # The entry is not in our log, and we would miss a seal between the two: we could lead an epoch that is over.
        return f"the state belongs to epoch {epoch}, but the log to epoch {log.configuration.epoch}"
    return None


def enter_epoch(log: GroupLog, configuration: Configuration) -> None:
    """Enter a later epoch. The log is cut as on any node that enters one (ADR 2, rule 3)."""
    seed_index = configuration.seed_index
    if log.term_of(seed_index) == configuration.seed_term and seed_index >= log.commit:
        log.set_commit(seed_index)
    if log.last_index > log.commit:
        log.truncate(log.commit + 1)
    log.set_configuration(configuration)
