"""Authentication and authorization: the sender of a request, and its permissions.

A client sends a token, `Authorization: Bearer hf_<id>_<secret>`. The meta group has the SHA-256 of its secret, so every
node can check it. Before a node refuses a token, it asks the meta group: the token may just have been created or
rotated on another node. If the meta group is unreachable, the answer is 503, because the token may be valid.

Each node also has an admin token of its own, in a file that only its user can read: a user that can read that file can
also read the data beside it. It serves to create the first real token, and works while the cluster has no quorum.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import string
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.cluster.config import BadConfig, Config
from holdfast.cluster.errors import Forbidden, Unauthorized, Unavailable
from holdfast.log.errors import ProposalError
from holdfast.statemachine.access import ADMIN, APPROVE, INVOKE, OPERATE, Token, Tokens, permits

PREFIX: Final = "hf"
ID_LENGTH: Final = 12
SECRET_LENGTH: Final = 43  # 256 bits.
_LETTERS: Final = string.ascii_letters + string.digits
#: Longer than any token: nothing longer is hashed.
TOKEN_LENGTH_MAX: Final = 128
ROOT: Final = "node"  # The id of the token in a node's own file.
ROOT_FILE: Final = "admin-token"
GIVEN_LENGTH_MIN: Final = 32  # For a secret that was not generated here.
HINT: Final = (
    "send a token: Authorization: Bearer hf_…; `holdfast token create` makes one, and for the first it needs the node's own: "
    f"--token-file with the file {ROOT_FILE} in the data directory of the node"
)


class Principal(NamedTuple):
    """The sender of a request. `id` is that of its token."""

    id: str
    name: str
    roles: tuple[str, ...]
    services: frozenset[str] = frozenset()  # The only services that it may invoke; empty: all.

    def check(self, role: str) -> None:
        """Raises Unauthorized or Forbidden."""
        if not self.roles:
            raise Unauthorized("this request needs a token", HINT)
        if not permits(self.roles, role):
            raise Forbidden(
                f"the token {self.id} ({self.name}) has the roles {', '.join(self.roles)}, but this request needs {role}",
                "use a token with that role",
            )

    @property
    def is_stranger(self) -> bool:
        """Whether authentication is on, and the sender has not shown who it is."""
        return not self.id and not self.roles

    @property
    def may_invoke_all(self) -> bool:
        return permits(self.roles, INVOKE) and not self.services

    def may_invoke(self, service: str) -> bool:
        return permits(self.roles, INVOKE) and (not self.services or service in self.services)

    def check_service(self, service: str) -> None:
        if not self.may_invoke(service):
            self.check(INVOKE)
            raise Forbidden(
                f"the token {self.id} ({self.name}) may invoke {', '.join(sorted(self.services))}, but not {service:.200}",
                "use a token for that service",
            )

    def check_approval(self, service: str) -> None:
        """Whether it may decide for invocations of this service. Operators may for all."""
        self.check(APPROVE)
        if self.services and service not in self.services and not permits(self.roles, OPERATE):
            raise Forbidden(
                f"the token {self.id} ({self.name}) may decide for {', '.join(sorted(self.services))}, but not for "
                f"{service:.200}",
                "use a token for that service",
            )


#: Any sender, if authentication is off.
ANYBODY: Final = Principal("", "anybody", (ADMIN,))
#: A sender without a token, if authentication is on.
STRANGER: Final = Principal("", "a stranger", ())
_ROOT_PRINCIPAL: Final = Principal(ROOT, "this node's admin token", (ADMIN,))


def make_token(id_: str = "") -> tuple[str, str, bytes]:
    """A new token: its id, its text, which cannot be recovered later, and the digest to store."""
    id_ = id_ or "".join(secrets.choice(_LETTERS) for _ in range(ID_LENGTH))
    secret = "".join(secrets.choice(_LETTERS) for _ in range(SECRET_LENGTH))
    return id_, f"{PREFIX}_{id_}_{secret}", digest_of(secret)


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()


def secret_digest(token: str) -> bytes:
    """Of the secret of a whole token."""
    return digest_of(_split(token.strip())[1])


class Access:
    """Checks tokens. `fresh` returns when this node knows every token that was created before the call."""

    def __init__(
        self,
        tokens: Callable[[], Tokens],
        *,
        root: str,
        now_ms: Callable[[], int],
        fresh: Callable[[], Awaitable[None]],
    ) -> None:
        self._tokens = tokens
        self._root = digest_of(_split(root)[1])
        self._now_ms = now_ms
        self.fresh = fresh
        self.used_ms: dict[str, int] = {}  # Since the last report; see `take_used`.
        self.refused = 0

    async def authenticate(self, authorization: str | None) -> Principal:
        """The owner of the token in this header. Raises Unauthorized if it is not valid."""
        if authorization is None:
            return STRANGER
        scheme, _, text = authorization.partition(" ")
        if scheme.lower() != "bearer" or len(text) > TOKEN_LENGTH_MAX:
            raise Unauthorized("the header Authorization has no bearer token", HINT)
        id_, secret = _split(text.strip())
        digest = digest_of(secret)
        if id_ == ROOT:
            if hmac.compare_digest(digest, self._root):
                return _ROOT_PRINCIPAL
            raise self._refuse()
        principal = self._known(id_, digest)
        if principal is None and id_ and not self._is_expired(id_):
            # It may just have been created or rotated on another node.
            try:
                await self.fresh()
            except ProposalError:
                raise Unavailable("this node cannot check the token now: it cannot reach a majority") from None
            principal = self._known(id_, digest)
        if principal is None:
            raise self._refuse()
        return principal

    def digests(self, id_: str) -> tuple[bytes, ...]:
        """Of the secrets under which this token is valid now, as far as this node knows."""
        if id_ == ROOT:
            return (self._root,)
        token = self._tokens().by_id.get(id_)
        if token is None or self._is_expired(id_):
            return ()
        return (token.digest, token.old_digest) if self._now_ms() < token.old_until_ms else (token.digest,)

    def principal(self, id_: str) -> Principal:
        """The owner of a token that was found valid."""
        if id_ == ROOT:
            return _ROOT_PRINCIPAL
        token = self._tokens().by_id[id_]
        self.used_ms[id_] = self._now_ms()
        return Principal(id_, token.name, tuple(token.roles), frozenset(token.services))

    def expires_ms(self, id_: str) -> int:
        """When a token expires; 0: never."""
        token = self._tokens().by_id.get(id_)
        return token.expires_ms if token is not None else 0

    def _is_expired(self, id_: str) -> bool:
        token = self._tokens().by_id.get(id_)
        return token is not None and 0 < token.expires_ms <= self._now_ms()

    def _known(self, id_: str, digest: bytes) -> Principal | None:
        token = self._tokens().by_id.get(id_)
        now_ms = self._now_ms()
        if token is None or not _matches(token, digest, now_ms):
            return None
        return self.principal(id_)

    def _refuse(self) -> Unauthorized:
        """The same for every reason, so that strangers learn nothing about existing tokens."""
        self.refused += 1
        return Unauthorized("the token is not valid: it is unknown, revoked or expired", HINT)

    def take_used(self) -> dict[str, int]:
        used, self.used_ms = self.used_ms, {}
        return used


def _matches(token: Token, digest: bytes, now_ms: int) -> bool:
    is_current = hmac.compare_digest(token.digest, digest)
    is_previous = hmac.compare_digest(token.old_digest, digest) and now_ms < token.old_until_ms
    return (is_current or is_previous) and not 0 < token.expires_ms <= now_ms


def _split(text: str) -> tuple[str, str]:
    """The id and the secret of a token; empty if it is malformed."""
    prefix, _, rest = text.partition("_")
    id_, _, secret = rest.partition("_")
    return (id_, secret) if prefix == PREFIX and id_ and secret else ("", "")


def open_root(config: Config) -> str:
    """The admin token of a node: the configured one, or else its own, which is created if it does not exist."""
    if (known := read_root(config)) is not None:
        return known
    path = config.data / ROOT_FILE
    _, text, _ = make_token(ROOT)
    making = path.with_name(f"{ROOT_FILE}.new")
    making.unlink(missing_ok=True)
    descriptor = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(descriptor)
    making.replace(path)
    return text


def read_root(config: Config) -> str | None:
    """The admin token of a node that exists already. None: the node has yet to create one. Raises BadConfig, OSError."""
    if config.admin_token_file is not None:
        text = _read_root(config.admin_token_file)
        if text is None or len(_split(text)[1]) < GIVEN_LENGTH_MIN:
            raise BadConfig(
                f"admin_token_file: {config.admin_token_file} must hold a token as in hf_{ROOT}_<secret>, "
                f"with a secret of at least {GIVEN_LENGTH_MIN} characters"
            )
        return text
    path = config.data / ROOT_FILE
    try:
        text = _read_root(path)
    except FileNotFoundError:
        return None
    if text is None:
        raise BadConfig(f"{path} does not hold the admin token of a node: delete it, and the node creates a new one")
    return text


def find_token_faults(config: Config) -> list[str]:
    """Reasons why a node cannot start with the admin token that it would read."""
    if config.auth != "tokens":
        return []
    try:
        read_root(config)
    except BadConfig as error:
        return [str(error)]
    except OSError as error:
        return [f"admin token: {error}"]
    return []


def _read_root(path: Path) -> str | None:
    """None: it is not a valid token."""
    text = path.read_text(errors="replace").strip()
    return text if _split(text)[0] == ROOT and len(text) <= TOKEN_LENGTH_MAX else None
