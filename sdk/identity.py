"""Verifies that a request comes from a node of the user's cluster (docs/protocol.md, section 10).

An endpoint with public keys of its cluster reads no body and accepts no stream before it has verified the signature in the
headers of the request. Verification needs the package `cryptography`, which is imported only then.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from holdfast.sdk.signatures import (
    SCHEME,
    VALID_MS,
    Signed,
    audience_of,
    digest_of,
    key_id,
    parse_key,
    parse_signatures,
    parse_signed,
    signed_bytes,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

logger = logging.getLogger("holdfast.sdk")

KEYS_VARIABLE: Final = "HOLDFAST_IDENTITY_KEYS"
AUDIENCE_VARIABLE: Final = "HOLDFAST_IDENTITY_AUDIENCE"
#: The number of signatures remembered for a minute. Beyond it, the endpoint answers 503 with Retry-After.
NONCES_MAX: Final = 262_144
_BUCKET_MS: Final = 10_000
_TELL_S: Final = 60.0
_REASON_LENGTH_MAX: Final = 250


class SignatureRefused(Exception):
    """The request does not come from a node of the cluster, or cannot be verified. The text says why."""

    def __init__(self, reason: str, *, status: int = 401) -> None:
        super().__init__(f"the request is refused: {reason}")
        self.status = status
        shown = "".join(letter if " " <= letter <= "~" and letter != '"' else "'" for letter in reason)
        self.headers = {"WWW-Authenticate": f'{SCHEME} reason="{shown[:_REASON_LENGTH_MAX]}"'}
        if status == 503:
            self.headers = {"Retry-After": "1"}


class Identity:
    """The cluster whose requests this endpoint accepts. `audience`: the URIs at which it is registered; empty: any."""

    def __init__(
        self,
        keys: Iterable[str],
        audience: Iterable[str] = (),
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        try:
            from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        except ImportError:
            raise RuntimeError(
                "identity keys need the package cryptography: pip install 'holdfast[identity]'"
            ) from None
        self._invalid = (InvalidSignature, UnsupportedAlgorithm, ValueError)
        self._keys: dict[str, Ed25519PublicKey] = {}
        for text in keys:
            public = parse_key(text)
            self._keys[key_id(public)] = Ed25519PublicKey.from_public_bytes(public)
        self._audience = {audience_of(uri) for uri in audience}
        self._now_ms = now_ms
        self._nonces = _Nonces()
        self._told_at = -_TELL_S

    def check(self, method: str, path: str, signed: str | None, signature: str | None) -> str:
        """Check the headers; return the digest of the right body. `path`: below the base URI. Raises SignatureRefused."""
        try:
            return self._check(method, path, signed, signature)
        except SignatureRefused as refused:
            self._tell(refused)
            raise

    async def check_body(self, digest: str, body: bytes) -> None:
        """Raises SignatureRefused."""
        if await digest_of(body) != digest:
            refused = SignatureRefused("its signature is for another body")
            self._tell(refused)
            raise refused

    def _check(self, method: str, path: str, signed_header: str | None, signature: str | None) -> str:
        if signed_header is None or signature is None:
            raise SignatureRefused(
                "it is not signed, and this endpoint accepts only requests that are signed by its cluster"
            )
        signed, signatures = parse_signed(signed_header), parse_signatures(signature)
        if signed is None or not signatures:
            raise SignatureRefused("the headers of its signature cannot be parsed: is the node newer than this SDK?")
        now_ms = self._now_ms()
        off_ms = now_ms - signed.time_ms
        if abs(off_ms) > VALID_MS:
            when = f"{off_ms / 1000:.0f} s ago" if off_ms > 0 else f"{-off_ms / 1000:.0f} s in the future"
            raise SignatureRefused(
                f"it was signed {when} by the clock of this endpoint, and {VALID_MS // 1000} s are allowed: "
                "synchronize the clocks of nodes and endpoint"
            )
        self._verify(signed_bytes(method, path, signed_header), signatures)
        if self._audience and signed.audience not in self._audience:
            raise SignatureRefused(
                f"it was signed for {signed.audience:.100}, and the audience of this endpoint is "
                f"{', '.join(sorted(self._audience)):.100}: register that address"
            )
        self._nonces.take(signed, now_ms)
        return signed.digest

    def _verify(self, data: bytes, signatures: list[tuple[str, bytes]]) -> None:
        known = [(self._keys[key], signature) for key, signature in signatures if key in self._keys]
        if not known:
            raise SignatureRefused(
                f"it is signed with the key {', '.join(key for key, _ in signatures)}, and this endpoint knows "
                f"{', '.join(self._keys)}: give it the keys that `holdfast identity show` prints"
            )
        for key, signature in known:
            try:
                key.verify(signature, data)
            except self._invalid:
                continue
            return
        raise SignatureRefused("its signature does not match the request")

    def _tell(self, refused: SignatureRefused) -> None:
        """Log at most one line a minute, because anyone can send refused requests."""
        now = time.monotonic()
        if now - self._told_at >= _TELL_S:
            self._told_at = now
            logger.warning("%s", refused)
        else:
            logger.debug("%s", refused)


class _Nonces:
    """The used signatures, for as long as they are valid."""

    def __init__(self) -> None:
        self._buckets: dict[int, set[bytes]] = {}
        self._count = 0
        self._forgotten_ms = 0  # Older signatures are forgotten, so they are refused even if the clock is set back.

    def take(self, signed: Signed, now_ms: int) -> None:
        """Mark a signature as used. Raises SignatureRefused if it was used before."""
        self._forget(now_ms - VALID_MS)
        number, nonce = signed.time_ms // _BUCKET_MS, bytes.fromhex(signed.nonce)
        bucket = self._buckets.get(number, set())
        if nonce in bucket or signed.time_ms < self._forgotten_ms:
            raise SignatureRefused("its signature was used before")
        if self._count >= NONCES_MAX:
            raise SignatureRefused(f"more than {NONCES_MAX} requests arrived within a minute", status=503)
        self._buckets.setdefault(number, bucket).add(nonce)
        self._count += 1

    def _forget(self, before_ms: int) -> None:
        for number in [number for number in self._buckets if (number + 1) * _BUCKET_MS <= before_ms]:
            self._count -= len(self._buckets.pop(number))
            self._forgotten_ms = max(self._forgotten_ms, (number + 1) * _BUCKET_MS)


def load_identity(keys: Iterable[str] | None, audience: Iterable[str] | None = None) -> Identity | None:
    """The arguments, or else the variables. None: this endpoint accepts unsigned requests. Raises ValueError.

    Keys that are given but empty are an error: the endpoint would be open although somebody meant to close it.
    """
    found = _listed(keys, KEYS_VARIABLE)
    uris = _listed(audience, AUDIENCE_VARIABLE)
    if found is None:
        if uris:
            raise ValueError(
                f"an audience is checked only with the keys of a cluster: set identity_keys or {KEYS_VARIABLE}"
            )
        return None
    if not found:
        name, off = (KEYS_VARIABLE, "unset it") if keys is None else ("identity_keys", "pass None")
        raise ValueError(
            f"{name} has no keys: give it those that `holdfast identity show` prints, or {off} to accept requests "
            "that are not signed"
        )
    return Identity(found, uris or ())


def _listed(given: Iterable[str] | None, variable: str) -> list[str] | None:
    """None: not given."""
    if given is None:
        given = os.environ.get(variable)
    if given is None:
        return None
    return [each for each in given.replace(",", " ").split() if each] if isinstance(given, str) else list(given)


_warned = False


def warn_if_open(host: str, identity: Identity | None) -> None:
    """Warn once per process that anyone who can reach the port can run the handlers."""
    global _warned
    if identity is None and not _warned and not _is_loopback(host):
        _warned = True
        logger.warning(
            "anyone who can reach %s can run these handlers with any input: give the endpoint the public key of its "
            "cluster (`holdfast identity show`) as identity_keys or %s, or let it listen on 127.0.0.1",
            host or "this machine", KEYS_VARIABLE,
        )  # fmt: skip


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
