"""The message numbers between partitions in one partition's state, and whether the states of several partitions fit
together.

Messages from p to q are numbered without gaps. p keeps each message until q has it; q accepts each number once. States of
p and q, each taken at a point of its own history, fit together exactly when

    trimmed(p, q) <= taken(q, p) <= sent(p, q)

A message that was trimmed but not taken would be lost: p no longer has it, and q does not have it yet. If a message was
taken but not sent, p would later give its number to another message, and q would skip that one as already taken
(docs/adr/0003).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from holdfast.sdk.ids import PartitionNumber
from holdfast.statemachine.records import unpack
from holdfast.statemachine.tables import OUTBOX, SENT, TAKEN, after, partition_bytes, partition_in_key
from holdfast.statemachine.txn import ReadTxn


class Marks(NamedTuple):
    """The newest sequence exchanged with each other partition. A missing partition means 0."""

    sent: dict[PartitionNumber, int]
    taken: dict[PartitionNumber, int]
    trimmed: dict[PartitionNumber, int]


def read_marks(txn: ReadTxn) -> Marks:
    sent = {partition_in_key(key): unpack(raw) for key, raw in txn.scan(SENT, after(SENT))}
    taken = {partition_in_key(key): unpack(raw) for key, raw in txn.scan(TAKEN, after(TAKEN))}
    return Marks(sent, taken, {target: _trimmed(txn, target, newest) for target, newest in sent.items()})


def _trimmed(txn: ReadTxn, target: PartitionNumber, sent: int) -> int:
    prefix = OUTBOX + partition_bytes(target)
    for key, _ in txn.scan(prefix, after(prefix)):
        return int.from_bytes(key[5:], "big") - 1
    return sent


def why_not_together(marks: Mapping[PartitionNumber, Marks]) -> str | None:
    """What would be lost or repeated if these partitions continued from these states. None: nothing."""
    for source, mine in marks.items():
        for target, its in marks.items():
            sent, trimmed = mine.sent.get(target, 0), mine.trimmed.get(target, 0)
            taken = its.taken.get(source, 0)
            if taken > sent:
                return f"partition {target} has message {taken} of partition {source}, which has sent {sent}"
            if trimmed > taken:
                return f"partition {source} forgot message {trimmed} to partition {target}, which has {taken}"
    return None
