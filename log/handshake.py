"""The handshake of the peer link, which proves who is at the other end. It does no I/O.

Received bytes go in through `receive`, bytes to send come out of `take_output`, and the result is either
`Established` or `HandshakeRefused`. The handshake opens no socket and reads no clock: the link owns the time limit.

The dialer says hello, the acceptor says hello, the dialer proves itself, and the acceptor gives its verdict, which is
also its proof. The dialer proves itself first, so a stranger who connects never gets a MAC of ours to guess the
secret from. A proof is an HMAC over the role and both hellos as sent. It covers both nonces, so an old exchange cannot
be replayed, and the role, so our own proof cannot be sent back to us. It also covers the cluster, both node ids, the
disk and the incarnation.

Before the dialer has proved itself, the acceptor sends nothing but a hello. A dialer of another cluster, or one that
wants another node, may still prove itself, against a hello that reveals nothing about us; then the verdict says why it
is refused. So a refused node can tell its operator the reason, and a stranger learns nothing. A wrong proof is closed
silently, and only our own log says why. docs/peer-link.md has the bytes.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Final

VERSION: Final = 2
MAGIC: Final = b"HLDF"
ID_BYTES_MAX: Final = 64
NONCE_BYTES: Final = 32
SECRET_BYTES_MIN: Final = 16
REASON_BYTES_MAX: Final = 200
# The most that a connection can make us hold before it has proved itself. The layout needs a tenth of it.
UNPROVED_BYTES_MAX: Final = 4096

_HEAD = struct.Struct(">4sHH")  # Magic, version, length of the rest.
_FIXED = struct.Struct(">BBQ32s")  # Role, proof, incarnation, nonce; then four ids.
_VERDICT = struct.Struct(">BB")  # Kind, length of the reason.
_BODY_BYTES_MIN: Final = _FIXED.size + 4 * 2
_BODY_BYTES_MAX: Final = _FIXED.size + 4 * (1 + ID_BYTES_MAX)
_PROOF_MARK: Final = 1
_WELCOME: Final = 2
_REFUSED: Final = 3
_PROOF_NONE: Final = 0
_PROOF_HMAC_SHA256: Final = 1
# What an acceptor tells about itself to a dialer that it will refuse.
_UNTOLD: Final = "-"
# The beginning of the reason if the dialer was removed from the cluster for good. Part of the protocol.
REMOVED: Final = "removed from the cluster"

# No label is a prefix of another, so no MAC can be mistaken for one of another purpose.
_DIALER_PROVES: Final = b"holdfast/1 dialer proves:"
_ACCEPTOR_PROVES: Final = b"holdfast/1 acceptor proves:"
_KEY_OF_DIALER: Final = b"holdfast/1 frames of dialer:"
_KEY_OF_ACCEPTOR: Final = b"holdfast/1 frames of acceptor:"


class Role(enum.IntEnum):
    DIALER = 1
    ACCEPTOR = 2


class Fault(enum.Enum):
    """The kind of refusal. Few values, so that logs can be counted by kind."""

    MALFORMED = "malformed"
    VERSION = "version"
    CLUSTER = "cluster"
    NODE = "node"
    PROOF = "proof"
    NOT_ADMITTED = "not admitted"
    REFUSED_BY_PEER = "refused by peer"
    REMOVED = "removed"


class HandshakeRefused(Exception):
    """This connection will not become a session. `fault` is the kind; the text says which node and why."""

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault
        self.reason = reason


def check_id(what: str, value: str) -> None:
    """Raise ValueError unless `value` can be sent in a hello."""
    if not 1 <= len(value.encode("utf-8", "surrogatepass")) <= ID_BYTES_MAX or not value.isprintable():
        raise ValueError(f"{what} must be 1 to {ID_BYTES_MAX} bytes of printable UTF-8, not {value!a}")


def check_secret(secret: bytes) -> None:
    if len(secret) < SECRET_BYTES_MIN:
        raise ValueError(f"the cluster secret must have at least {SECRET_BYTES_MIN} bytes, not {len(secret)}")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a node tells about itself in its hello."""

    cluster: str
    node: str
    disk: str
    incarnation: int

    def __post_init__(self) -> None:
        check_id("cluster id", self.cluster)
        check_id("node id", self.node)
        check_id("disk id", self.disk)
        if not 0 <= self.incarnation < 1 << 64:
            raise ValueError(f"incarnation must fit 64 bits, not {self.incarnation}")


@dataclass(frozen=True, slots=True)
class Hello:
    role: Role
    identity: Identity
    peer: str
    proof: int
    nonce: bytes

    def encode(self) -> bytes:
        assert len(self.nonce) == NONCE_BYTES
        us = self.identity
        body = bytearray(_FIXED.pack(self.role, self.proof, us.incarnation, self.nonce))
        for text in (us.cluster, us.node, self.peer, us.disk):
            raw = text.encode()
            body.append(len(raw))
            body += raw
        assert _BODY_BYTES_MIN <= len(body) <= _BODY_BYTES_MAX
        return _HEAD.pack(MAGIC, VERSION, len(body)) + bytes(body)


@dataclass(frozen=True, slots=True)
class Established:
    """Both sides proved who they are. The keys are None without a secret. `rest` has the bytes after the handshake."""

    peer: Identity
    send_key: bytes | None
    receive_key: bytes | None
    rest: bytes


def _admit_all(peer: Identity) -> str | None:
    return None


class Handshake:
    """One side of one handshake.

    `peer` is the node that a dialer wants to reach; an acceptor learns it. `certified` has the names in the peer's TLS
    certificate, None without TLS. An acceptor calls `admit` with a peer that has proved itself: None admits it, a short
    text is the reason for refusing it, which the peer receives.
    """

    def __init__(
        self,
        *,
        role: Role,
        us: Identity,
        secret: bytes | None,
        peer: str | None = None,
        certified: Collection[str] | None = None,
        admit: Callable[[Identity], str | None] = _admit_all,
        nonce: bytes | None = None,
    ) -> None:
        assert (peer is not None) == (role is Role.DIALER), "a dialer knows the node it dials, an acceptor does not"
        if secret is not None:
            check_secret(secret)
        self._us = us
        self._secret = secret
        self._proof = _PROOF_NONE if secret is None else _PROOF_HMAC_SHA256
        self._certified = certified
        self._admit = admit
        self._nonce = secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce
        self._input = bytearray()
        self._output = bytearray()
        self._over = False
        self.proved: str | None = None  # The node at the other end, once it has proved itself to an acceptor.
        self._hint = "before it sent anything"
        self._script = self._accept() if peer is None else self._dial(peer)
        self._wanted = next(self._script)

    def take_output(self) -> bytes:
        output = bytes(self._output)
        self._output.clear()
        return output

    def receive(self, data: bytes) -> Established | None:
        """Take received bytes. None: more are needed. After a refusal `take_output` may still have a final message."""
        assert not self._over, "a finished handshake takes no more bytes"
        self._input += data
        try:
            while len(self._input) >= self._wanted:
                piece = bytes(self._input[: self._wanted])
                del self._input[: self._wanted]
                self._wanted = self._script.send(piece)
        except StopIteration as stop:
            self._over = True
            peer, send_key, receive_key = stop.value
            return Established(peer, send_key, receive_key, bytes(self._input))
        except HandshakeRefused:
            self._over = True
            raise
        assert len(self._input) < self._wanted <= UNPROVED_BYTES_MAX, "a stranger must not make us hold much"
        return None

    def explain_close(self) -> str:
        """The most likely reason why the peer closed the connection at this point."""
        return f"closed the connection {self._hint}"

    def _dial(self, peer: str) -> _Script:
        mine = Hello(Role.DIALER, self._us, peer=peer, proof=self._proof, nonce=self._nonce).encode()
        self._output += mine
        self._hint = (
            "after our hello without a reason: most likely it "
            f"{'does not accept our certificate' if self._certified is not None else 'uses TLS'}, "
            "or too many strangers are connected to it, "
            "or it runs an older release and has a different cluster id (name and founders); see its log"
        )
        hello, raw = yield from self._read_hello(Role.ACCEPTOR)
        if (misfit := self._misfit(hello)) is not None:
            raise misfit
        if hello.proof != self._proof:
            raise self._other_proof(hello)
        if hello.identity.node != peer:
            raise HandshakeRefused(
                Fault.NODE, f"node {hello.identity.node!a} answered where {peer!a} was expected: check the address"
            )
        if self._certified is not None and peer not in self._certified:
            raise HandshakeRefused(Fault.NODE, _not_certified(peer, self._certified))
        transcript = mine + raw

        self._output.append(_PROOF_MARK)
        self._output += self._mac(_DIALER_PROVES, transcript)
        self._hint = "after our proof without a reason: most likely its secret differs from ours; see its log"
        head = yield _VERDICT.size
        kind, length = _VERDICT.unpack(head)
        if kind not in (_WELCOME, _REFUSED) or length > REASON_BYTES_MAX:
            raise HandshakeRefused(Fault.MALFORMED, "its verdict is malformed")
        reason = yield length
        mac = yield self._mac_bytes
        if not hmac.compare_digest(mac, self._mac(_ACCEPTOR_PROVES, transcript + head + reason)):
            raise HandshakeRefused(Fault.PROOF, "it could not prove that it knows our secret")
        if kind == _REFUSED:
            text = reason.decode("utf-8", "replace")
            fault = Fault.REMOVED if text.startswith(REMOVED) else Fault.REFUSED_BY_PEER
            raise HandshakeRefused(fault, f"it refused us: {ascii(text)[1:-1]}")
        return hello.identity, self._key(_KEY_OF_DIALER, transcript), self._key(_KEY_OF_ACCEPTOR, transcript)

    def _accept(self) -> _Script:
        hello, raw = yield from self._read_hello(Role.DIALER)
        them, us = hello.identity, self._us
        misfit = self._misfit(hello)
        if misfit is None and them.node == us.node:
            misfit = HandshakeRefused(Fault.NODE, f"another node has the same name {them.node!a}: names must be unique")
        if misfit is not None or hello.proof != self._proof:
            us = Identity(them.cluster, hello.peer, _UNTOLD, 0)
        mine = Hello(Role.ACCEPTOR, us, peer=them.node, proof=self._proof, nonce=self._nonce).encode()
        self._output += mine
        if hello.proof != self._proof:
            raise self._other_proof(hello)  # Our hello reveals this.
        self._hint = f"after our hello: as {them.node!a} it may have expected another node or another certificate here"
        transcript = raw + mine

        mark = yield 1
        if mark[0] != _PROOF_MARK:
            raise HandshakeRefused(Fault.MALFORMED, "its proof is malformed")
        mac = yield self._mac_bytes
        if not hmac.compare_digest(mac, self._mac(_DIALER_PROVES, transcript)):
            raise HandshakeRefused(Fault.PROOF, f"as {them.node!a} it could not prove that it knows our secret")

        # It knows the secret or has a certificate of our CA, so we may tell it why.
        self.proved = them.node
        reason = None
        if self._certified is not None and them.node not in self._certified:
            reason = _not_certified(them.node, self._certified)
        elif misfit is not None:
            reason = misfit.reason
        reason = reason or self._admit(them)
        self._output += self._verdict(transcript, reason)
        if misfit is not None:
            raise misfit
        if reason is not None:
            raise HandshakeRefused(Fault.NOT_ADMITTED, f"{them.node!a} was not admitted: {reason}")
        return them, self._key(_KEY_OF_ACCEPTOR, transcript), self._key(_KEY_OF_DIALER, transcript)

    def _read_hello(self, role: Role) -> Generator[int, bytes, tuple[Hello, bytes]]:
        head = yield _HEAD.size
        magic, version, length = _HEAD.unpack(head)
        if magic != MAGIC:
            looks = " (it looks like TLS, which we do not use)" if head[:2] == b"\x16\x03" else ""
            raise HandshakeRefused(Fault.MALFORMED, f"it does not speak the peer protocol{looks}")
        if version != VERSION:
            if role is Role.DIALER:
                self._output += _HEAD.pack(MAGIC, VERSION, _BODY_BYTES_MIN)  # Enough to show our version.
            raise HandshakeRefused(
                Fault.VERSION, f"it speaks version {version} of the peer protocol, we speak version {VERSION}"
            )
        if not _BODY_BYTES_MIN <= length <= _BODY_BYTES_MAX:
            raise HandshakeRefused(Fault.MALFORMED, f"it announced a hello of {length} bytes")
        body = yield length
        hello = _decode_body(body)
        if hello.role is not role:
            raise HandshakeRefused(Fault.MALFORMED, f"it claims to be the {hello.role.name.lower()}, which is our role")
        return hello, head + body

    def _misfit(self, hello: Hello) -> HandshakeRefused | None:
        """Why this node is not one of our cluster, or wants another node than us."""
        them, us = hello.identity, self._us
        if them.cluster != us.cluster:
            same_name = them.cluster.partition("/")[0] == us.cluster.partition("/")[0]
            # A cluster id may have a second part after a slash that identifies its founders.
            why = (
                "same cluster name, but different founders or backup; every node needs the same ones: "
                if same_name
                else "different cluster: "
            )
            return HandshakeRefused(
                Fault.CLUSTER, f"{why}{them.node!a} belongs to {them.cluster!a}, {us.node!a} to {us.cluster!a}"
            )
        if hello.peer != us.node:
            return HandshakeRefused(
                Fault.NODE, f"{them.node!a} wanted {hello.peer!a} but reached {us.node!a}: check the address"
            )
        return None

    def _other_proof(self, hello: Hello) -> HandshakeRefused:
        which = "no secret, we use one" if self._secret is not None else "a secret, we use none"
        return HandshakeRefused(Fault.PROOF, f"node {hello.identity.node!a} uses {which}")

    def _verdict(self, transcript: bytes, reason: str | None) -> bytes:
        text = (reason or "").encode(errors="replace")[:REASON_BYTES_MAX]
        head = _VERDICT.pack(_WELCOME if reason is None else _REFUSED, len(text))
        return head + text + self._mac(_ACCEPTOR_PROVES, transcript + head + text)

    @property
    def _mac_bytes(self) -> int:
        return 0 if self._secret is None else hashlib.sha256().digest_size

    def _mac(self, label: bytes, text: bytes) -> bytes:
        return b"" if self._secret is None else hmac.digest(self._secret, label + text, "sha256")

    def _key(self, label: bytes, transcript: bytes) -> bytes | None:
        return None if self._secret is None else hmac.digest(self._secret, label + transcript, "sha256")


# Yields how many bytes it needs next; returns the peer, our sending key and our receiving key.
_Script = Generator[int, bytes, tuple[Identity, bytes | None, bytes | None]]


def _decode_body(body: bytes) -> Hello:
    role, proof, incarnation, nonce = _FIXED.unpack_from(body)
    offset = _FIXED.size
    ids: list[str] = []
    try:
        for _ in range(4):
            end = offset + 1 + body[offset]
            raw = body[offset + 1 : end]
            if end > len(body):
                raise ValueError("an id extends past the end of the hello")
            ids.append(raw.decode("utf-8"))
            offset = end
        if offset != len(body):
            raise ValueError("the hello has extra bytes after its ids")
        cluster, node, peer, disk = ids
        check_id("peer id", peer)
        if proof not in (_PROOF_NONE, _PROOF_HMAC_SHA256):
            raise ValueError(f"unknown proof {proof}")
        return Hello(Role(role), Identity(cluster, node, disk, incarnation), peer=peer, proof=proof, nonce=nonce)
    except (ValueError, IndexError) as error:
        raise HandshakeRefused(Fault.MALFORMED, f"its hello is malformed: {error}") from error


def _not_certified(node: str, names: Collection[str]) -> str:
    listed = ", ".join(ascii(name) for name in sorted(names)[:4]) or "no node"
    return f"the certificate does not name {node!a}, only {listed}"
