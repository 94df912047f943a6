"""Signs requests to endpoints with the keys of the cluster (docs/protocol.md, section 10).

The wall clock is used, not the node's own one, which keeps the time that the node had at its start: an endpoint compares the
time with its own clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from holdfast.sdk.signatures import (
    AUDIENCE_LENGTH_MAX,
    NO_BODY,
    SCHEME,
    SIGNATURE_HEADER,
    SIGNED_HEADER,
    Signed,
    audience_of,
    format_signatures,
    format_signed,
    signed_bytes,
)
from holdfast.statemachine.identity import IdentityKey

#: Pause after an endpoint refused a signature: an operator must change its keys first.
UNTRUSTED_S: Final = 5.0
_REASON_LENGTH_MAX: Final = 300


class Signer:
    """`keys` returns the valid keys of the cluster. Without one, nothing is signed."""

    def __init__(self, keys: Callable[[], Sequence[IdentityKey]]) -> None:
        self._keys = keys
        self._loaded: dict[bytes, Ed25519PrivateKey] = {}

    def headers(self, method: str, uri: str, path: str, digest: str = NO_BODY) -> dict[str, str]:
        """For a request to `path` below the base `uri` of a deployment, with a body of this digest."""
        keys = self._keys()
        audience = audience_of(uri)
        if not keys or len(audience) > AUDIENCE_LENGTH_MAX:
            return {}
        signed = format_signed(Signed(time.time_ns() // 1_000_000, os.urandom(16).hex(), digest, audience))
        data = signed_bytes(method, path, signed)
        signatures = [(key.id, self._load(key).sign(data)) for key in keys]
        return {SIGNED_HEADER: signed, SIGNATURE_HEADER: format_signatures(signatures)}

    def _load(self, key: IdentityKey) -> Ed25519PrivateKey:
        loaded = self._loaded.get(key.private)
        if loaded is None:
            self._loaded = {one.private: Ed25519PrivateKey.from_private_bytes(one.private) for one in self._keys()}
            loaded = self._loaded[key.private]
        return loaded


def refusal_in(status: int, headers: Mapping[str, str] | None) -> str | None:
    """The reason why the endpoint refused our signature, or None."""
    said = headers.get("WWW-Authenticate", "") if headers is not None and status == 401 else ""
    if not said.startswith(SCHEME):
        return None
    reason = said.removeprefix(SCHEME).strip().removeprefix("reason=").strip('"')
    printable = "".join(letter for letter in reason[:_REASON_LENGTH_MAX] if letter.isprintable())
    return f"the endpoint refuses the signature of this cluster: {printable or 'it gives no reason'}"
