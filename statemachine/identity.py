"""The identity of the cluster: the key pairs with which its nodes sign their requests to handlers.

Part of the meta group's state: pure, like all of it. One pair is valid as a rule. During a rotation there are two, and requests
carry a signature of each, so an endpoint may know the old key, the new one or both. The private parts are state like any other:
every node has them, because every node signs (ADR 15).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from holdfast.statemachine.effects import Code, Result

KEYS_MAX: Final = 2
KEY_BYTES: Final = 32  # Of Ed25519, both parts.


class IdentityKey(NamedTuple):
    id: str
    public: bytes
    private: bytes
    created_ms: int

    def __repr__(self) -> str:  # A private key does not belong into a log or an assertion's message.
        return f"IdentityKey({self.id!r}, created_ms={self.created_ms})"


class AddIdentityKey(NamedTuple):
    """`known`: the ids of the keys that the proposer saw. So of two nodes that make a key at once, one succeeds."""

    id: str
    public: bytes
    private: bytes
    known: list[str]

    def __repr__(self) -> str:
        return f"AddIdentityKey({self.id!r}, known={self.known!r})"


class RetireIdentityKey(NamedTuple):
    id: str


class Identity:
    def __init__(self) -> None:
        self.keys: list[IdentityKey] = []  # The oldest first.

    def add(self, command: AddIdentityKey, now_ms: int) -> Result:
        if [key.id for key in self.keys] != list(command.known) or command.id in command.known:
            return Result(Code.CONFLICT, "the keys of the cluster changed meanwhile")
        if len(self.keys) >= KEYS_MAX:
            return Result(Code.CONFLICT, f"{KEYS_MAX} keys are valid already")
        if len(command.public) != KEY_BYTES or len(command.private) != KEY_BYTES:
            return Result(Code.CONFLICT, f"both parts of a key have {KEY_BYTES} bytes")
        self.keys = [*self.keys, IdentityKey(command.id, command.public, command.private, now_ms)]
        return Result()

    def retire(self, command: RetireIdentityKey) -> Result:
        left = [key for key in self.keys if key.id != command.id]
        if len(left) == len(self.keys):
            return Result(Code.NOT_FOUND, f"there is no key {command.id}")
        if not left:
            return Result(Code.CONFLICT, "the only key of the cluster cannot be retired")
        self.keys = left
        return Result()
