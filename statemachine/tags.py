"""Invocations by their tags: one row for each tag of each invocation, newest first, and nothing for those without tags.

A key has hashes of name and value, because both together may be longer than a key. Readers compare the tags of the record,
so two tags with one hash do no harm.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from holdfast.statemachine.records import Invocation
from holdfast.statemachine.state import State
from holdfast.statemachine.tables import TAGGED, position

HASH_BYTES: Final = 8


def rows_with(name: str, value: str) -> bytes:
    """The prefix of the rows of invocations that have this tag. The position follows."""
    return rows_named(name) + hash_of(value)


def rows_named(name: str) -> bytes:
    """The prefix of the rows of invocations that have a tag of this name."""
    return TAGGED + hash_of(name)


def hash_of(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=HASH_BYTES).digest()


def add(state: State, record: Invocation) -> None:
    for name, value in (record.tags or {}).items():
        state.put(rows_with(name, value) + position(record.created_ms, record.id), b"")


def remove(state: State, record: Invocation) -> None:
    for name, value in (record.tags or {}).items():
        state.delete(rows_with(name, value) + position(record.created_ms, record.id))
