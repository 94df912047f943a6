"""Sessions of the console: a cookie in place of a token, for people at a browser.

A page must not keep a token where a script could read it. So it sends the token once, and gets a cookie that scripts cannot
read. The cookie says whose it is and until when, and is signed. No node stores it, so every node accepts it. The key is made of
the SHA-256 of the token's secret, which only the nodes know, and of the cluster's secret, because links without TLS show the
first. So a session ends when its token is revoked, expires, or loses its secret in a rotation.

Cookies do not keep ports of one host apart, and `SameSite` does not either. So a request that acts must prove, beside the
cookie, that a page of ours sent it (`Exchange`).
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from holdfast.cluster.http.access import STRANGER, Access, Principal, secret_digest
from holdfast.log.errors import ProposalError

SECURE_PREFIX: Final = "__Host-"  # Browsers take such a cookie over TLS alone, and for no other host.
ENDED_MAX: Final = 10_000  # Sessions that were signed out and would still be valid: of all tokens,
ENDED_OF_TOKEN_MAX: Final = 1_000  # and of one.
CANDIDATES_MAX: Final = 8  # Cookies in one request that are tried.
_VALUE: Final = re.compile(r"([A-Za-z0-9]{1,64})\.([0-9]{1,16})\.([0-9a-f]{32})\.([0-9a-f]{64})", re.ASCII)
_PURPOSE: Final = b"holdfast: session of the console\0"


class Session(NamedTuple):
    principal: Principal
    expires_ms: int
    cookie: str  # for Set-Cookie


class Ended:
    """Sessions that were signed out, until they expire anyway. Bounded, without ever making one valid again: beyond a bound,
    all sessions of the token with the most of them end that would expire first."""

    def __init__(self) -> None:
        self._nonces: dict[str, dict[str, int]] = {}  # By token: the random part of each cookie, and when it expires.
        self._until: dict[str, int] = {}  # By token: all sessions that expire until then have ended.
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def has(self, token: str, nonce: str, expires_ms: int) -> bool:
        return expires_ms <= self._until.get(token, 0) or nonce in self._nonces.get(token, ())

    def add(self, token: str, nonce: str, expires_ms: int, now_ms: int) -> None:
        if expires_ms <= now_ms or self.has(token, nonce, expires_ms):
            return
        self._nonces.setdefault(token, {})[nonce] = expires_ms
        self._count += 1
        if self._count > ENDED_MAX or len(self._nonces[token]) > ENDED_OF_TOKEN_MAX:
            self._forget_expired(now_ms)
        if self._count > ENDED_MAX:
            self._end_oldest(max(self._nonces, key=lambda each: len(self._nonces[each])))
        elif len(self._nonces.get(token, ())) > ENDED_OF_TOKEN_MAX:
            self._end_oldest(token)

    def _end_oldest(self, token: str) -> None:
        self._until[token] = max(self._until.get(token, 0), min(self._nonces[token].values()))
        self._keep(token, self._until[token])

    def _forget_expired(self, now_ms: int) -> None:
        for token in list(self._nonces):
            self._keep(token, now_ms)
        self._until = {token: until for token, until in self._until.items() if until > now_ms}

    def _keep(self, token: str, after_ms: int) -> None:
        nonces = self._nonces.pop(token)
        kept = {nonce: expires for nonce, expires in nonces.items() if expires > after_ms}
        self._count -= len(nonces) - len(kept)
        if kept:
            self._nonces[token] = kept


class Sessions:
    """`tell` gives other nodes the sessions that ended here, as `note_ended` takes them.

    `secure`: this node serves TLS, so cookies without the prefix `__Host-` do not count. Another server on the same host
    name, or a subdomain, could have set them.
    """

    def __init__(
        self,
        access: Access,
        *,
        cluster: str,
        secret: bytes | None,
        lifetime_s: float,
        now_ms: Callable[[], int],
        secure: bool = False,
        tell: Callable[[list[Any]], None] = lambda _: None,
    ) -> None:
        self.name = f"holdfast_{cluster}"
        self._access = access
        self._cluster = cluster
        self._secret = secret or b""
        self._lifetime_ms = round(lifetime_s * 1000)
        self._now_ms = now_ms
        self._names = (SECURE_PREFIX + self.name,) if secure else (SECURE_PREFIX + self.name, self.name)
        self._tell = tell
        self._ended = Ended()

    async def sign_in(self, token: str, *, secure: bool) -> Session:
        """Raises Unauthorized. `secure`: the browser reaches us over TLS."""
        principal = await self._access.authenticate(f"Bearer {token}")
        now_ms = self._now_ms()
        ends_ms = self._access.expires_ms(principal.id)
        expires_ms = min(now_ms + self._lifetime_ms, ends_ms or now_ms + self._lifetime_ms)
        content = f"{principal.id}.{expires_ms}.{secrets.token_hex(16)}"
        value = f"{content}.{self._sign(secret_digest(token), content)}"
        return Session(principal, expires_ms, self._cookie(value, (expires_ms - now_ms) // 1000, secure=secure))

    async def authenticate(self, headers: Mapping[str, str]) -> Principal:
        """Whose session this is. A stranger's, if the cookie is not valid or not there: so they can sign in again."""
        valid = await self._valid(headers)
        return self._access.principal(valid[0][1]) if valid else STRANGER

    async def _valid(self, headers: Mapping[str, str]) -> list[re.Match[str]]:
        now_ms = self._now_ms()
        found = [
            each
            for each in self._find(headers)
            if int(each[2]) > now_ms and not self._ended.has(each[1], each[3], int(each[2]))
        ]
        valid = [each for each in found if self._is_ours(each)]
        if found and not valid:
            # The token may have been created or rotated a moment ago, on another node.
            try:
                await self._access.fresh()
            except ProposalError:
                return []
            valid = [each for each in found if self._is_ours(each)]
        return valid

    def _is_ours(self, match: re.Match[str]) -> bool:
        id_, expires, nonce, signature = match.groups()
        content = f"{id_}.{expires}.{nonce}"
        return any(self._is_signed(digest, content, signature) for digest in self._access.digests(id_))

    async def sign_out(self, headers: Mapping[str, str], *, secure: bool) -> str:
        """The header that makes the browser forget the cookie. No connected node accepts it any more."""
        for match in await self._valid(headers):
            ended = [match[1], match[3], int(match[2])]
            self.note_ended(ended)
            self._tell(ended)
        return self._cookie("", 0, secure=secure)

    def note_ended(self, ended: list[Any]) -> None:
        """`ended` is the id of a token, the random part of the cookie, and when it expires."""
        token, nonce, expires_ms = ended
        self._ended.add(str(token), str(nonce), int(expires_ms), self._now_ms())

    def _find(self, headers: Mapping[str, str]) -> list[re.Match[str]]:
        """The cookies that may be sessions, the ones restricted to TLS first."""
        found: dict[str, list[re.Match[str]]] = {name: [] for name in self._names}
        for part in headers.get("Cookie", "").split(";"):
            name, _, value = part.strip().partition("=")
            if name in found and (match := _VALUE.fullmatch(value)) is not None:
                found[name].append(match)
        return [match for matches in found.values() for match in matches][:CANDIDATES_MAX]

    def _sign(self, digest: bytes, content: str) -> str:
        key = hmac.digest(self._secret, _PURPOSE + digest, hashlib.sha256)
        return hmac.digest(key, f"{self._cluster}\0{content}".encode(), hashlib.sha256).hex()

    def _is_signed(self, digest: bytes, content: str, signature: str) -> bool:
        return hmac.compare_digest(self._sign(digest, content), signature)

    def _cookie(self, value: str, seconds: int, *, secure: bool) -> str:
        name = SECURE_PREFIX + self.name if secure else self.name
        flags = "; Secure" if secure else ""
        return f"{name}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{flags}"
