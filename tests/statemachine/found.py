"""Read what random programs left in the states, for the simulations of the model and of whole clusters to judge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgpack

from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import unpack_step
from holdfast.statemachine import queries, refs, survey
from holdfast.statemachine.commands import Payload, Ref
from holdfast.statemachine.txn import ReadTxn


def plain(_: ReadTxn, payload: Payload) -> bytes:
    """The identity: no values are kept in a store beside the state."""
    assert isinstance(payload, bytes)
    return payload


def objects_in(
    states: Iterable[ReadTxn], value_in: Callable[[ReadTxn, Payload], bytes] = plain
) -> tuple[dict[str, int], dict[str, list[str]]]:
    """(sums by key, the order in which each sender's messages were seen)"""
    sums: dict[str, int] = {}
    seen: dict[str, list[str]] = defaultdict(list)
    for txn in states:
        cursor: bytes | None = b""
        while cursor is not None:
            objects, cursor = survey.keys(txn, "objects", "", cursor, 100)
            for _, each in objects:
                values, _ = queries.eager_state(txn, each.id, 1 << 20)
                held = {name: value_in(txn, value) for name, value in values.items()}
                if "sum" in held:
                    sums[each.key] = int(held["sum"])
                for line in held.get("log", b"").decode().splitlines():
                    sender, number = line.split()
                    seen[sender].append(f"{each.key} {number}")
    return sums, dict(seen)


def value_of(txn: ReadTxn, ident: InvocationId, key: str, whole: Callable[[Ref], bytes] | None = None) -> int:
    """The value that `once` returns: found in the program by the path in its step key."""
    [raw] = queries.journal(txn, ident, 0, 1)
    step = unpack_step(refs.filled_step(raw, whole or partial(queries.whole, txn)))
    node: Any = msgpack.unpackb((step.outcome or [0, b""])[1])
    for part in key[1:].split("/"):
        number, *branches = part.split(".")
        node = node[int(number)]
        for branch in branches:
            node = node[1][int(branch)]
        if node[0] == "try":
            node = node[1]
    assert node[0] == "once", node
    return int(node[1])
