"""The signature of a request from a node to an endpoint: its headers and what they cover (docs/protocol.md, section 10).

Both sides of Holdfast import this module. It needs no cryptography: nodes sign in `cluster`, endpoints verify in `identity`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import re
from collections.abc import Iterable
from typing import Final, NamedTuple
from urllib.parse import quote, urlsplit

#: The signed fields, and the signatures: one for each valid key of the cluster.
SIGNED_HEADER: Final = "x-holdfast-signed"
SIGNATURE_HEADER: Final = "x-holdfast-signature"
#: In `WWW-Authenticate` of the answer that refuses a signature.
SCHEME: Final = "Holdfast-Signature"
#: A signature is valid for this long before and after the time that it names.
VALID_MS: Final = 30_000
SIGNED_LENGTH_MAX: Final = 8000
SIGNATURE_LENGTH_MAX: Final = 1000
#: The most signatures in one header. A cluster has at most two valid keys.
SIGNATURES_MAX: Final = 4
AUDIENCE_LENGTH_MAX: Final = 6200
#: A larger body is hashed in a thread.
THREAD_BYTES: Final = 1024 * 1024
NO_BODY: Final = hashlib.sha256().hexdigest()
KEY_PREFIX: Final = "ed25519:"
KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
_PORTS: Final = {"http": 80, "https": 443}
_SAFE: Final = "/%:@!$&'()*+,;=~-._"
_SIGNED: Final = re.compile(
    r"1;t=(?P<time>[0-9]{1,15});n=(?P<nonce>[0-9a-f]{32});d=(?P<digest>[0-9a-f]{64});a=(?P<to>[!-~]+)"
)
_SIGNATURE: Final = re.compile(r"(?P<key>[0-9a-f]{16})=(?P<signature>[A-Za-z0-9_\-]{86})")


class Signed(NamedTuple):
    """The signed fields in the header. Method and path are signed too, but come from the request itself."""

    time_ms: int
    nonce: str  # 32 hexadecimal digits; never used twice
    digest: str  # SHA-256 of the body, in hexadecimal digits
    audience: str  # the URI that the endpoint is registered at


def format_signed(signed: Signed) -> str:
    return f"1;t={signed.time_ms};n={signed.nonce};d={signed.digest};a={signed.audience}"


def parse_signed(text: str) -> Signed | None:
    """None: the header is malformed."""
    match = _SIGNED.fullmatch(text) if len(text) <= SIGNED_LENGTH_MAX else None
    return Signed(int(match["time"]), match["nonce"], match["digest"], match["to"]) if match is not None else None


def signed_bytes(method: str, path: str, signed_header: str) -> bytes:
    """The bytes that a signature covers. `path`: below the endpoint's base URI, as in /stream."""
    return f"holdfast signature\n{method}\n{path}\n{signed_header}".encode(errors="surrogatepass")


def format_signatures(signatures: Iterable[tuple[str, bytes]]) -> str:
    return ",".join(f"{key}={_to_base64(signature)}" for key, signature in signatures)


def parse_signatures(text: str) -> list[tuple[str, bytes]]:
    """The signatures, by id of their key. Empty: the header is malformed."""
    if len(text) > SIGNATURE_LENGTH_MAX:
        return []
    matches = [_SIGNATURE.fullmatch(part.strip(" ")) for part in text.split(",", SIGNATURES_MAX)]
    found = [(match["key"], _from_base64(match["signature"])) for match in matches if match is not None]
    is_whole = len(found) == len(matches) <= SIGNATURES_MAX
    return [(key, signature) for key, signature in found if signature is not None] if is_whole else []


def audience_of(uri: str) -> str:
    """The one spelling of the URI of an endpoint. Raises ValueError."""
    parts = urlsplit(uri.strip())
    scheme, host, port = parts.scheme.lower(), parts.hostname, parts.port
    if scheme not in _PORTS or not host:
        raise ValueError(f"{uri!r:.200} is not the URI of an endpoint, as in http://10.0.0.5:9080/shop")
    host = f"[{host}]" if ":" in host else host if host.isascii() else host.encode("idna").decode()
    place = host if port in (None, _PORTS[scheme]) else f"{host}:{port}"
    return f"{scheme}://{place}{quote(parts.path, safe=_SAFE).rstrip('/')}"


async def digest_of(body: bytes) -> str:
    """The digest of a body. A large one is hashed in a thread, so the event loop continues."""
    if len(body) > THREAD_BYTES:
        return await asyncio.to_thread(_digest, body)
    return _digest(body)


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def key_id(public: bytes) -> str:
    """A short name of a public key. It only selects the key: a signature is verified with the whole key."""
    return hashlib.sha256(public).hexdigest()[:16]


def format_key(public: bytes) -> str:
    """The form that `holdfast identity show` prints."""
    assert len(public) == KEY_BYTES, "a public key of Ed25519"
    return KEY_PREFIX + _to_base64(public)


def parse_key(text: str) -> bytes:
    """Raises ValueError."""
    rest = text.strip().removeprefix(KEY_PREFIX)
    public = _from_base64(rest) if text.strip().startswith(KEY_PREFIX) and len(rest) == 43 else None
    if public is None or len(public) != KEY_BYTES:
        raise ValueError(
            f"{text!r:.80} is not the public key of a cluster: `holdfast identity show` prints it, as in {KEY_PREFIX}…"
        )
    return public


def _to_base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _from_base64(text: str) -> bytes | None:
    """The decoded bytes. None: this is not their canonical spelling."""
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    return raw if _to_base64(raw) == text else None
