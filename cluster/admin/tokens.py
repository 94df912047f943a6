"""Tokens as the admin API creates, shows, rotates and revokes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from holdfast.cluster.admin.choices import SERVICES_MAX, TOKEN_NAME_MAX
from holdfast.cluster.admin.parameters import AdminRequest, json_answer, read_body
from holdfast.cluster.admin.proposals import propose
from holdfast.cluster.admin.shapes import access
from holdfast.cluster.admin.shapes.access import NewToken, Rotation, TokenRevoked, Tokens, TokenWithSecret
from holdfast.cluster.durations import parse_duration_ms
from holdfast.cluster.errors import BadRequest, Conflict
from holdfast.cluster.http.access import Principal, make_token
from holdfast.cluster.http.exchange import Answer
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.times import show_time
from holdfast.statemachine.access import APPROVE, INVOKE, ROLES, CreateToken, RevokeToken, RotateToken, Token
from holdfast.statemachine.meta import MetaCommand

LIST_HINT: Final = "holdfast token list shows them (GET /tokens)"


class TokenAdmin:
    def __init__(self, registry: Registry, now_ms: Callable[[], int]) -> None:
        self._registry = registry
        self._now_ms = now_ms

    async def on_tokens(self, request: AdminRequest) -> Answer:
        tokens = self._registry.state.tokens.by_id.values()
        shown = [self._show(token) for token in sorted(tokens, key=lambda token: (token.created_ms, token.id))]
        tokens_shown: Tokens = {"tokens": shown}
        return json_answer(200, tokens_shown)

    async def on_create_token(self, request: AdminRequest) -> Answer:
        given = await read_body(request, NewToken)
        created = await self._create(request.request.principal, given)
        request.note(id=created["id"], name=created["name"], roles=",".join(created["roles"]))
        return json_answer(201, created)

    async def on_rotate_token(self, request: AdminRequest) -> Answer:
        return json_answer(200, await self._rotate(request.path["id"], await read_body(request, Rotation)))

    async def on_revoke_token(self, request: AdminRequest) -> Answer:
        id_ = request.path["id"]
        await self._propose(RevokeToken(id_))
        revoked: TokenRevoked = {"id": id_, "revoked": True}
        return json_answer(200, revoked)

    async def _create(self, principal: Principal, given: Mapping[str, Any]) -> TokenWithSecret:
        name, roles, services = given.get("name"), given.get("roles"), given.get("services")
        if not isinstance(name, str) or not 0 < len(name) <= TOKEN_NAME_MAX or not name.isprintable():
            raise BadRequest(f'"name" must be a text of 1 to {TOKEN_NAME_MAX} printable characters')
        if not _is_texts(roles) or not roles or not set(roles) <= ROLES.keys():
            raise BadRequest(f'"roles" must be a list of one or more of {", ".join(ROLES)}')
        services = [] if services is None else services
        if not _is_texts(services) or len(services) > SERVICES_MAX:
            raise BadRequest(f'"services" must be a list of at most {SERVICES_MAX} names of services')
        if services and not {INVOKE, APPROVE} & {*roles}:
            raise BadRequest('"services" restricts the roles invoke and approve, and this token has neither')
        expires_in = _read_duration(given, "expires_in")
        if expires_in == 0:
            raise BadRequest('"expires_in" must be longer than 0')
        id_, text, digest = make_token()
        await self._propose(
            CreateToken(
                id_,
                name,
                roles=sorted(set(roles)),
                services=sorted(set(services)),
                digest=digest,
                created_by=principal.id,
                expires_ms=self._now_ms() + expires_in if expires_in is not None else 0,
            )
        )
        return {**self._show(self._registry.state.tokens.by_id[id_]), "token": text}

    async def _rotate(self, id_: str, given: Mapping[str, Any]) -> TokenWithSecret:
        keep_old = _read_duration(given, "keep_old") or 0
        _, text, digest = make_token(id_)
        await self._propose(RotateToken(id_, digest, self._now_ms() + keep_old if keep_old else 0))
        token = self._registry.state.tokens.by_id.get(id_)
        if token is None or token.digest != digest:
            raise Conflict(f"the token {id_:.100} was rotated or revoked by another request in the meantime")
        return {**self._show(token), "token": text}

    async def _propose(self, command: MetaCommand) -> None:
        await propose(self._registry, command, what="tokens", hint=LIST_HINT)

    def _show(self, token: Token) -> access.Token:
        return {
            "id": token.id,
            "name": token.name,
            "roles": token.roles,
            "services": token.services,
            "created_at": show_time(token.created_ms),
            "created_by": token.created_by or None,
            "expires_at": show_time(token.expires_ms),
            "expired": 0 < token.expires_ms <= self._now_ms(),
            "previous_secret_until": show_time(token.old_until_ms) if token.old_until_ms > self._now_ms() else None,
            "last_used_at": show_time(token.used_ms),
        }


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, str) and 0 < len(each) <= 256 and each.isprintable() for each in value
    )


def _read_duration(given: Mapping[str, Any], name: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadRequest(f'"{name}" must be a duration: 12h, 90d')
    try:
        return parse_duration_ms(value)
    except ValueError as error:
        raise BadRequest(f'"{name}": {error}') from None
