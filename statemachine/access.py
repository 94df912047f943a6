"""Tokens: who may use the doors of the cluster, and for what. Part of the meta group's state, and as pure as the rest of
it.

The state holds the SHA-256 of a token's secret, never the secret itself. A secret has 256 random bits, so a slow hash
would add nothing. A rotated token accepts its previous secret for a while, so that its users can change over without a
gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from holdfast.statemachine.effects import Code, Result

INVOKE: Final = "invoke"  # Start invocations at the ingress and fetch their results, for all services or some.
READ: Final = "read"  # See everything, change nothing.
APPROVE: Final = "approve"  # Decide about approvals and steps in doubt; includes READ.
OPERATE: Final = "operate"  # Change invocations, deployments and nodes; includes APPROVE.
ADMIN: Final = "admin"  # Everything, and tokens.
#: Every role, and what it includes.
ROLES: Final[dict[str, frozenset[str]]] = {
    INVOKE: frozenset({INVOKE}),
    READ: frozenset({READ}),
    APPROVE: frozenset({APPROVE, READ}),
    OPERATE: frozenset({OPERATE, APPROVE, READ}),
    ADMIN: frozenset({INVOKE, READ, APPROVE, OPERATE, ADMIN}),
}

TOKENS_MAX: Final = 5000
DIGEST_BYTES: Final = 32


class Token(NamedTuple):
    id: str
    name: str  # for people; not unique
    roles: list[str]
    services: list[str]  # the only ones that INVOKE and APPROVE cover; empty: all
    digest: bytes
    created_ms: int
    created_by: str  # the id of the token that created it
    expires_ms: int = 0  # 0: never
    old_digest: bytes = b""  # accepted too, until old_until_ms
    old_until_ms: int = 0
    used_ms: int = 0  # last use; nodes report it at intervals


class CreateToken(NamedTuple):
    id: str
    name: str
    roles: list[str]
    services: list[str]
    digest: bytes
    created_by: str
    expires_ms: int = 0


class RotateToken(NamedTuple):
    """A new secret. The previous one is accepted until `old_until_ms`."""

    id: str
    digest: bytes
    old_until_ms: int = 0


class RevokeToken(NamedTuple):
    id: str


class NoteTokenUse(NamedTuple):
    """When tokens were last used, as one node saw it."""

    used_ms: dict[str, int]


class Tokens:
    def __init__(self) -> None:
        self.by_id: dict[str, Token] = {}

    def create(self, command: CreateToken, now_ms: int) -> Result:
        if len(self.by_id) >= TOKENS_MAX:
            return Result(Code.FULL, f"there are {TOKENS_MAX} tokens already: revoke those that are not needed")
        if command.id in self.by_id:
            return Result(Code.CONFLICT, f"the token id {command.id} is taken: try again")
        if not command.roles or not set(command.roles) <= ROLES.keys():
            return Result(Code.CONFLICT, f"a token needs one or more of the roles {', '.join(ROLES)}")
        if len(command.digest) != DIGEST_BYTES:
            return Result(Code.CONFLICT, f"the digest of a token has {DIGEST_BYTES} bytes")
        self.by_id[command.id] = Token(
            command.id,
            command.name,
            roles=list(command.roles),
            services=list(command.services),
            digest=command.digest,
            created_ms=now_ms,
            created_by=command.created_by,
            expires_ms=command.expires_ms,
        )
        return Result()

    def rotate(self, command: RotateToken, now_ms: int) -> Result:
        token = self.by_id.get(command.id)
        if token is None:
            return Result(Code.NOT_FOUND, f"there is no token {command.id}")
        if len(command.digest) != DIGEST_BYTES:
            return Result(Code.CONFLICT, f"the digest of a token has {DIGEST_BYTES} bytes")
        if token.digest == command.digest:
            return Result(Code.UNCHANGED, "unchanged")
        keeps_old = command.old_until_ms > now_ms
        self.by_id[command.id] = token._replace(
            digest=command.digest,
            old_digest=token.digest if keeps_old else b"",
            old_until_ms=command.old_until_ms if keeps_old else 0,
        )
        return Result()

    def revoke(self, command: RevokeToken) -> Result:
        if self.by_id.pop(command.id, None) is None:
            return Result(Code.NOT_FOUND, f"there is no token {command.id}")
        return Result()

    def note_use(self, command: NoteTokenUse) -> Result:
        for id_, used_ms in command.used_ms.items():
            token = self.by_id.get(id_)
            if token is not None and used_ms > token.used_ms:
                self.by_id[id_] = token._replace(used_ms=used_ms)
        return Result()


#: The roles that include each role. Every request passes here.
_SUFFICIENT: Final = {
    needed: frozenset(role for role, included in ROLES.items() if needed in included) for needed in ROLES
}


def permits(roles: Sequence[str], needed: str) -> bool:
    """Whether one of these roles includes the needed one."""
    assert needed in ROLES, needed
    return not _SUFFICIENT[needed].isdisjoint(roles)
