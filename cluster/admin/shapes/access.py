"""Who may do what, and who did: tokens, sessions, the audit trail and the identity of the cluster."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from holdfast.cluster.admin.choices import SERVICES_MAX, TOKEN_NAME_MAX
from holdfast.cluster.schemas import Duration, Keywords, Time, one_of
from holdfast.statemachine.access import ROLES


class SignIn(TypedDict):
    token: Annotated[str, Keywords(minLength=1)]


class Session(TypedDict):
    """Who sends this request."""

    signed_in: bool
    id: Annotated[str | None, "of the token"]
    name: str
    roles: list[str]
    services: Annotated[list[str], "the only services that the role invoke covers; empty: all"]
    asks_for_tokens: Annotated[bool, "false: this node accepts requests without a token"]
    node: NotRequired[Annotated[str, "this and the following are for those who may read"]]
    cluster: NotRequired[str]
    version: NotRequired[str]
    expires_at: NotRequired[Annotated[Time | None, "after signing in: when the session ends"]]


class SignedOut(TypedDict):
    signed_in: Literal[False]


class NewToken(TypedDict):
    name: Annotated[str, "the person or program that gets it", Keywords(minLength=1, maxLength=TOKEN_NAME_MAX)]
    roles: Annotated[list[Annotated[str, one_of(ROLES)]], Keywords(minItems=1)]
    services: NotRequired[
        Annotated[
            list[str] | None,
            "the only services that the role invoke covers; none: all of them",
            Keywords(maxItems=SERVICES_MAX),
        ]
    ]
    expires_in: NotRequired[Annotated[Duration | None, "a duration: 12h, 90d; default: it never expires"]]


class Rotation(TypedDict):
    keep_old: NotRequired[Annotated[Duration | None, "how long the previous secret stays valid: 1h"]]


class Token(TypedDict):
    """A token without its secret."""

    id: str
    name: str
    roles: list[Annotated[str, one_of(ROLES)]]
    services: Annotated[list[str], "the only services that the role invoke covers; empty: all"]
    created_at: Time | None
    created_by: Annotated[str | None, "the id of a token"]
    expires_at: Annotated[Time | None, "null: never"]
    expired: bool
    previous_secret_until: Annotated[Time | None, "after a rotation: until when the old secret is valid"]
    last_used_at: Annotated[Time | None, "to within some minutes"]


class TokenWithSecret(Token):
    """A token with its secret, which is shown this once."""

    token: Annotated[str, "to send as `Authorization: Bearer`"]


class Tokens(TypedDict):
    tokens: list[Token]


class TokenRevoked(TypedDict):
    id: str
    revoked: Literal[True]


class ActPrincipal(TypedDict):
    id: Annotated[str | None, "of a token; null: there was none"]
    name: str


class Act(TypedDict):
    """A request that changed something, or was refused because its sender may not change that."""

    sequence: int
    at: Time | None
    principal: ActPrincipal
    address: Annotated[str | None, "of the client, as the node sees it"]
    node: Annotated[str, "that answered"]
    door: Annotated[str, one_of(["admin", "ingress"])]
    method: str
    action: Annotated[str, "as in kill, register, create_token"]
    targets: Annotated[dict[str, str], "the objects that it concerns, by kind"]
    outcome: Annotated[str, "unknown: the client disconnected first", one_of(["done", "refused", "failed", "unknown"])]
    status: Annotated[int | None, "of the answer"]
    error: Annotated[str | None, "its kind"]
    unrecorded: Annotated[int, "acts before this one that the node did not record, because there were too many"]


class AuditPage(TypedDict):
    acts: list[Act]
    cursor: Annotated[int | None, "send it to get the next page; null: this is the last"]
    newest: Annotated[int, "the sequence of the newest act of all"]
    complete: Annotated[bool, "false: this node may not know the newest acts"]


class IdentityKey(TypedDict):
    id: str
    public_key: str
    created_at: Time | None


class Identity(TypedDict):
    """The public keys by which handlers recognise this cluster."""

    keys: list[IdentityKey]
    rotating: Annotated[bool, "there are two keys, until the rotation is finished"]


class IdentityRotation(TypedDict):
    finish: NotRequired[Annotated[bool, "stop using the older key"]]
