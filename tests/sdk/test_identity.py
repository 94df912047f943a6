"""Signatures of requests as an endpoint verifies them: what is refused and why, and that nothing else gets through."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import string
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster.handlers.protocols.native.signing import Signer
from holdfast.sdk import Context, Server, Service, endpoint, identity
from holdfast.sdk.identity import Identity, SignatureRefused, load_identity
from holdfast.sdk.signatures import (
    NO_BODY,
    SIGNATURE_HEADER,
    SIGNED_HEADER,
    VALID_MS,
    Signed,
    audience_of,
    format_key,
    format_signatures,
    format_signed,
    key_id,
    parse_key,
    parse_signatures,
    parse_signed,
    signed_bytes,
)
from holdfast.statemachine.identity import IdentityKey

URI = "http://10.0.0.5:9080/shop"
BODY = b"one batch"
PATH = "/invoke/shop/buy"


def key(seed: bytes) -> IdentityKey:
    private = Ed25519PrivateKey.from_private_bytes(seed)
    public = private.public_key().public_bytes_raw()
    return IdentityKey(key_id(public), public, seed, 0)


OURS, NEXT, THEIRS = key(b"1" * 32), key(b"2" * 32), key(b"3" * 32)


def headers(*keys: IdentityKey, method: str = "POST", path: str = PATH, body: bytes = BODY) -> tuple[str, str]:
    made = Signer(lambda: keys).headers(method, URI, path, hashlib.sha256(body).hexdigest())
    return made[SIGNED_HEADER], made[SIGNATURE_HEADER]


def knowing(*keys: IdentityKey, **more: Any) -> Identity:
    return Identity([format_key(one.public) for one in keys], **more)


def refused(known: Identity, signed: str | None, signature: str | None, method: str = "POST", path: str = PATH) -> str:
    with pytest.raises(SignatureRefused) as caught:
        known.check(method, path, signed, signature)
    assert caught.value.status == 401
    assert caught.value.headers["WWW-Authenticate"].startswith("Holdfast-Signature reason=")
    return str(caught.value)


def test_a_request_of_the_cluster_is_accepted_once() -> None:
    known = knowing(OURS)
    signed = headers(OURS)

    digest = known.check("POST", PATH, *signed)

    assert digest == hashlib.sha256(BODY).hexdigest()
    assert "used before" in refused(known, *signed)
    known.check("POST", PATH, *headers(OURS))


def test_the_body_must_be_the_one_that_was_signed() -> None:
    async def main() -> None:
        known = knowing(OURS)
        digest = known.check("POST", PATH, *headers(OURS))

        await known.check_body(digest, BODY)
        with pytest.raises(SignatureRefused, match="for another body"):
            await known.check_body(digest, BODY + b"!")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("signed", "known"),
    [((OURS,), (OURS, NEXT)), ((OURS, NEXT), (OURS,)), ((OURS, NEXT), (NEXT,)), ((NEXT,), (OURS, NEXT))],
)
def test_during_a_rotation_either_key_will_do(signed: tuple[IdentityKey, ...], known: tuple[IdentityKey, ...]) -> None:
    knowing(*known).check("POST", PATH, *headers(*signed))


def test_the_key_of_another_cluster_is_refused_with_what_to_do() -> None:
    said = refused(knowing(OURS), *headers(THEIRS))

    assert THEIRS.id in said and OURS.id in said and "holdfast identity show" in said


def test_a_key_that_takes_the_name_of_ours_is_refused() -> None:
    assert "does not match" in refused(knowing(OURS), *headers(THEIRS._replace(id=OURS.id)))


@pytest.mark.parametrize(("method", "path"), [("GET", PATH), ("POST", "/invoke/shop/refund"), ("POST", "/stream")])
def test_a_signature_is_for_one_method_and_path(method: str, path: str) -> None:
    assert "does not match" in refused(knowing(OURS), *headers(OURS), method=method, path=path)


@pytest.mark.parametrize(("signed", "signature"), [(None, "x"), ("x", None), (None, None)])
def test_a_request_without_a_signature_is_refused(signed: str | None, signature: str | None) -> None:
    assert "it is not signed" in refused(knowing(OURS), signed, signature)


def test_only_what_was_signed_for_this_endpoint_counts_where_it_knows_its_address() -> None:
    assert knowing(OURS, audience=[URI + "/"]).check("POST", PATH, *headers(OURS))

    said = refused(knowing(OURS, audience=["http://10.0.0.6:9080/shop"]), *headers(OURS))

    assert URI in said and "http://10.0.0.6:9080/shop" in said


@pytest.mark.parametrize(
    ("uri", "audience"),
    [
        ("http://10.0.0.5:9080/shop/", "http://10.0.0.5:9080/shop"),
        ("HTTP://Shop.Internal:80", "http://shop.internal"),
        ("https://shop.internal:443/a b/\u00fc", "https://shop.internal/a%20b/%C3%BC"),
        ("https://shop.internal/a%20b", "https://shop.internal/a%20b"),
        ("http://[::1]:9080", "http://[::1]:9080"),
        ("http://b\u00fccher.example", "http://xn--bcher-kva.example"),
    ],
)
def test_an_audience_has_one_spelling(uri: str, audience: str) -> None:
    assert audience_of(uri) == audience == audience_of(audience)
    knowing(OURS, audience=[uri])


@pytest.mark.parametrize("wrong", ["", "shop.internal:9080", "ftp://h", "http://", "http://h:port"])
def test_what_is_no_uri_is_no_audience(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"URI of an endpoint|[Pp]ort"):
        knowing(OURS, audience=[wrong])


class Time:
    now_ms = 1_790_000_000_000

    def __call__(self) -> int:
        return self.now_ms


def signed_at(time_ms: int, nonce: str = "0" * 32) -> tuple[str, str]:
    signed = format_signed(Signed(time_ms, nonce, NO_BODY, URI))
    raw = Ed25519PrivateKey.from_private_bytes(OURS.private).sign(signed_bytes("POST", PATH, signed))
    return signed, format_signatures([(OURS.id, raw)])


def test_a_signature_is_valid_for_a_short_time_in_both_directions() -> None:
    time = Time()
    known = knowing(OURS, now_ms=time)

    assert "31 s ago" in refused(known, *signed_at(time.now_ms - VALID_MS - 1000))
    assert "31 s in the future" in refused(known, *signed_at(time.now_ms + VALID_MS + 1000))
    known.check("POST", PATH, *signed_at(time.now_ms - VALID_MS))
    known.check("POST", PATH, *signed_at(time.now_ms + VALID_MS))


def test_nothing_is_accepted_twice_however_the_clock_of_the_endpoint_moves() -> None:
    time = Time()
    known = knowing(OURS, now_ms=time)
    first = signed_at(time.now_ms)
    known.check("POST", PATH, *first)
    for step_ms in (1000, VALID_MS - 2000, 10_000, 3_600_000):
        time.now_ms += step_ms
        known.check("POST", PATH, *signed_at(time.now_ms, os.urandom(16).hex()))
        refused(known, *first)

    time.now_ms = 1_790_000_000_000

    assert "used before" in refused(known, *first)


def test_the_memory_for_signatures_is_bounded_and_empties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "NONCES_MAX", 10)
    time = Time()
    known = knowing(OURS, now_ms=time)
    for number in range(10):
        known.check("POST", PATH, *signed_at(time.now_ms, f"{number:032x}"))

    with pytest.raises(SignatureRefused) as caught:
        known.check("POST", PATH, *signed_at(time.now_ms, "f" * 32))

    assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "1"})
    time.now_ms += VALID_MS + 10_000
    known.check("POST", PATH, *signed_at(time.now_ms, "f" * 32))


# -- any bytes in the headers ----------------------------------------------------------------------------------------

_SIGNED, _SIGNATURE = signed_at(Time.now_ms)
header = st.text(alphabet=string.printable + "ü\udc80", max_size=300) | st.sampled_from([_SIGNED, _SIGNATURE, ""])


@given(header, header, st.sampled_from(["GET", "POST"]), st.text(max_size=30))
def test_any_headers_are_refused_in_words_or_are_ours(signed: str, signature: str, method: str, path: str) -> None:
    known = knowing(OURS, now_ms=Time())
    if (signed, signature, method, path) == (_SIGNED, _SIGNATURE, "POST", PATH):
        return

    refused(known, signed, signature, method=method, path=path)


@given(st.data())
def test_no_change_of_a_valid_request_is_accepted(data: st.DataObject) -> None:
    """One character more, less or different, anywhere in what is signed, in the signature, or in the request line."""
    parts = [_SIGNED, _SIGNATURE, "POST", PATH]
    which = data.draw(st.integers(0, 3))
    text = parts[which]
    at = data.draw(st.integers(0, len(text)))
    inserted = data.draw(st.text(alphabet=string.ascii_letters + string.digits + "=;,-_/ ", max_size=2))
    removed = data.draw(st.integers(0, 2))
    parts[which] = text[:at] + inserted + text[at + removed :]
    # Blanks around a signature in the list mean nothing.
    if parts[which].strip(" ") == text:
        return

    refused(knowing(OURS, now_ms=Time()), parts[0], parts[1], method=parts[2], path=parts[3])


@given(st.text(max_size=200))
def test_the_readers_of_headers_and_keys_are_total(text: str) -> None:
    signed = parse_signed(text)
    assert signed is None or format_signed(signed)
    assert len(parse_signatures(text)) <= 4
    try:
        assert format_key(parse_key(text)) == text.strip()
    except ValueError as error:
        assert "holdfast identity show" in str(error)


@given(st.binary(min_size=32, max_size=32))
def test_a_key_has_one_spelling(raw: bytes) -> None:
    assert parse_key(f" {format_key(raw)}\n") == raw


def test_the_example_of_the_protocol_verifies() -> None:
    """Other SDKs are written from that page."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()
    found = dict(re.findall(r"^(x-holdfast-sign\w+): (\S+)$", page, re.MULTILINE))
    public = re.findall(r"`(ed25519:[A-Za-z0-9_\-]{43})`", page)
    time = Time()
    assert f"t={time.now_ms};" in found[SIGNED_HEADER]

    known = Identity(public, [URI], now_ms=time)

    assert known.check("GET", "/stream", found[SIGNED_HEADER], found[SIGNATURE_HEADER]) == NO_BODY


# -- where the keys come from ----------------------------------------------------------------------------------------


def test_keys_come_from_the_code_or_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    both = f"{format_key(OURS.public)}, {format_key(NEXT.public)}"
    assert load_identity(None) is None

    monkeypatch.setenv("HOLDFAST_IDENTITY_KEYS", both)
    monkeypatch.setenv("HOLDFAST_IDENTITY_AUDIENCE", URI)

    found = load_identity(None)
    assert found is not None
    found.check("POST", PATH, *headers(NEXT))


def test_keys_that_are_given_but_empty_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Service("empty")
    given: list[list[str] | str] = [[], "", " , "]
    for keys in given:
        for audience in (None, [URI]):
            with pytest.raises(ValueError, match=r"^identity_keys has no keys: .*`holdfast identity show`.* pass None"):
                endpoint([empty], identity_keys=keys, identity_audience=audience)
    with pytest.raises(ValueError, match="identity_keys has no keys"):
        Server([empty], identity_keys=[])
    for text in ("", " ", ","):
        monkeypatch.setenv("HOLDFAST_IDENTITY_KEYS", text)
        with pytest.raises(ValueError, match=r"^HOLDFAST_IDENTITY_KEYS has no keys: .* unset it"):
            load_identity(None)


def test_what_is_no_key_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="is not the public key of a cluster"):
        endpoint([Service("empty")], identity_keys=["ed25519:short"])
    monkeypatch.setenv("HOLDFAST_IDENTITY_AUDIENCE", URI)
    with pytest.raises(ValueError, match="an audience is checked only with the keys"):
        load_identity(None)


def test_a_server_on_a_public_address_without_keys_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Service("shop")

    @shop.handler
    async def buy(ctx: Context) -> str:
        return "bought"

    async def start(host: str, keys: list[str] | None = None) -> None:
        server = Server([shop], identity_keys=keys)
        await server.start(host=host, port=0)
        await server.stop()

    async def main() -> None:
        await start("127.0.0.1")
        await start("0.0.0.0", [format_key(OURS.public)])
        assert not caplog.records
        await start("0.0.0.0")
        await start("0.0.0.0")

    monkeypatch.setattr(identity, "_warned", False)
    with caplog.at_level(logging.WARNING, "holdfast.sdk"):
        asyncio.run(main())

    (record,) = caplog.records
    assert "holdfast identity show" in record.getMessage() and "0.0.0.0" in record.getMessage()
