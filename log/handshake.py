"""Who is at the other end: the handshake of the peer link, without any I/O.

Bytes go in by `receive`, bytes to send come out by `take_output`, and the end is either `Established`
or `HandshakeRefused`. It opens no socket and reads no clock: the link owns the time limit.

The dialer says hello, the acceptor says hello, the dialer proves itself, the acceptor gives its verdict,
which is also its proof. The dialer proves first, so that a stranger who connects to us never gets a MAC
of ours to guess the secret from. A proof is an HMAC over the role and over both hellos as they were
sent: both nonces are in it (an old exchange cannot be replayed), the role is in it (our own proof cannot
be sent back to us), and so are the cluster, both node ids, the disk and the incarnation.

Before the dialer has proved itself nothing but our hello is said: a connection that is refused earlier is
closed without a word, and only our own log says why. docs/peer-link.md has the bytes.
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
# What a connection may make us hold before it has proved itself. The layout needs a tenth of it.
UNPROVED_BYTES_MAX: Final = 4096

_HEAD = struct.Struct(">4sHH")  # magic, version, length of the rest
_FIXED = struct.Struct(">BBQ32s")  # role, proof, incarnation, nonce; then four ids
_VERDICT = struct.Struct(">BB")  # kind, length of the reason
_BODY_BYTES_MIN: Final = _FIXED.size + 4 * 2
_BODY_BYTES_MAX: Final = _FIXED.size + 4 * (1 + ID_BYTES_MAX)
_PROOF_MARK: Final = 1
_WELCOME: Final = 2
_REFUSED: Final = 3
_PROOF_NONE: Final = 0
_PROOF_HMAC_SHA256: Final = 1

# No label is the beginning of another one, so no MAC can be taken for one of another purpose.
_DIALER_PROVES: Final = b"holdfast/1 dialer proves:"
_ACCEPTOR_PROVES: Final = b"holdfast/1 acceptor proves:"
_KEY_OF_DIALER: Final = b"holdfast/1 frames of dialer:"
_KEY_OF_ACCEPTOR: Final = b"holdfast/1 frames of acceptor:"


class Role(enum.IntEnum):
    DIALER = 1
    ACCEPTOR = 2


class Fault(enum.Enum):
    """What kind of thing was wrong. Few values, so that a log can count by them."""

    MALFORMED = "malformed"
    VERSION = "version"
    CLUSTER = "cluster"
    NODE = "node"
    PROOF = "proof"
    NOT_ADMITTED = "not admitted"
    REFUSED_BY_PEER = "refused by peer"


class HandshakeRefused(Exception):
    """This connection will not become a session. `fault` tells the kind, the text tells who and why."""

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault
        self.reason = reason


def check_id(what: str, value: str) -> None:
    """Raise ValueError unless `value` can stand in a hello."""
    if not 1 <= len(value.encode("utf-8", "surrogatepass")) <= ID_BYTES_MAX or not value.isprintable():
        raise ValueError(f"{what} must be 1 to {ID_BYTES_MAX} bytes of printable UTF-8, not {value!a}")


def check_secret(secret: bytes) -> None:
    if len(secret) < SECRET_BYTES_MIN:
        raise ValueError(f"the cluster secret must have at least {SECRET_BYTES_MIN} bytes, not {len(secret)}")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a node says of itself in its hello."""

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
    """Both sides are who they say. The keys are None where no secret is used. `rest` follows the handshake."""

    peer: Identity
    send_key: bytes | None
    receive_key: bytes | None
    rest: bytes


def _admit_all(peer: Identity) -> str | None:
    return None


class Handshake:
    """One side of one handshake.

    `peer` is whom a dialer means to reach; an acceptor learns it. `certified` are the names in the peer's TLS
    certificate, None without TLS. `admit` is asked by an acceptor about a peer that has proved itself: None
    lets it in, a short text is the refusal it gets to read.
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
        assert (peer is not None) == (role is Role.DIALER), "a dialer knows whom it dials, an acceptor does not"
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
        self._hint = "before it said a word"
        self._script = self._accept() if peer is None else self._dial(peer)
        self._wanted = next(self._script)

    def take_output(self) -> bytes:
        output = bytes(self._output)
        self._output.clear()
        return output

    def receive(self, data: bytes) -> Established | None:
        """Take what arrived. None: more is needed. After a refusal `take_output` may still hold a last word."""
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
        assert len(self._input) < self._wanted <= UNPROVED_BYTES_MAX, "a stranger makes us hold little"
        return None

    def explain_close(self) -> str:
        """What it most likely means that the peer closed the connection now."""
        return f"closed the connection {self._hint}"

    def _dial(self, peer: str) -> _Script:
        mine = Hello(Role.DIALER, self._us, peer, self._proof, self._nonce).encode()
        self._output += mine
        self._hint = (
            "on our hello without a reason: most likely it has another cluster id (name and founders), node id, "
            "protocol version, "
            f"{'does not accept our certificate' if self._certified is not None else 'uses TLS'}, "
            "or only one of us uses a secret (its log says which)"
        )
        hello, raw = yield from self._read_hello(Role.ACCEPTOR)
        if hello.identity.node != peer:
            raise HandshakeRefused(
                Fault.NODE, f"node {hello.identity.node!a} answers where {peer!a} was expected: check the address"
            )
        if self._certified is not None and peer not in self._certified:
            raise HandshakeRefused(Fault.NODE, _not_certified(peer, self._certified))
        transcript = mine + raw

        self._output.append(_PROOF_MARK)
        self._output += self._mac(_DIALER_PROVES, transcript)
        self._hint = "on our proof without a reason: most likely its secret is not ours (its log says)"
        head = yield _VERDICT.size
        kind, length = _VERDICT.unpack(head)
        if kind not in (_WELCOME, _REFUSED) or length > REASON_BYTES_MAX:
            raise HandshakeRefused(Fault.MALFORMED, "its verdict is malformed")
        reason = yield length
        mac = yield self._mac_bytes
        if not hmac.compare_digest(mac, self._mac(_ACCEPTOR_PROVES, transcript + head + reason)):
            raise HandshakeRefused(Fault.PROOF, "it could not prove that it knows our secret")
        if kind == _REFUSED:
            raise HandshakeRefused(Fault.REFUSED_BY_PEER, f"refused us: {reason.decode('utf-8', 'replace')!a}")
        return hello.identity, self._key(_KEY_OF_DIALER, transcript), self._key(_KEY_OF_ACCEPTOR, transcript)

    def _accept(self) -> _Script:
        hello, raw = yield from self._read_hello(Role.DIALER)
        them = hello.identity
        if them.node == self._us.node:
            raise HandshakeRefused(Fault.NODE, f"it uses our own node id {them.node!a}")
        mine = Hello(Role.ACCEPTOR, self._us, them.node, self._proof, self._nonce).encode()
        self._output += mine
        self._hint = f"on our hello: as {them.node!a} it may have expected another cluster or node here"
        transcript = raw + mine

        mark = yield 1
        if mark[0] != _PROOF_MARK:
            raise HandshakeRefused(Fault.MALFORMED, "its proof is malformed")
        mac = yield self._mac_bytes
        if not hmac.compare_digest(mac, self._mac(_DIALER_PROVES, transcript)):
            raise HandshakeRefused(Fault.PROOF, f"as {them.node!a} it could not prove that it knows our secret")

        # It knows the secret or has a certificate of our CA, so it may be told why.
        reason = None
        if self._certified is not None and them.node not in self._certified:
            reason = _not_certified(them.node, self._certified)
        reason = reason or self._admit(them)
        self._output += self._verdict(transcript, reason)
        if reason is not None:
            raise HandshakeRefused(Fault.NOT_ADMITTED, f"{them.node!a} was turned away: {reason}")
        return them, self._key(_KEY_OF_ACCEPTOR, transcript), self._key(_KEY_OF_DIALER, transcript)

    def _read_hello(self, role: Role) -> Generator[int, bytes, tuple[Hello, bytes]]:
        head = yield _HEAD.size
        magic, version, length = _HEAD.unpack(head)
        if magic != MAGIC:
            looks = " (it looks like TLS, which we do not use)" if head[:2] == b"\x16\x03" else ""
            raise HandshakeRefused(Fault.MALFORMED, f"it does not speak the peer protocol{looks}")
        if version != VERSION:
            raise HandshakeRefused(Fault.VERSION, f"it speaks version {version} of the peer protocol, we {VERSION}")
        if not _BODY_BYTES_MIN <= length <= _BODY_BYTES_MAX:
            raise HandshakeRefused(Fault.MALFORMED, f"it announces a hello of {length} bytes")
        body = yield length
        hello = _decode_body(body)
        if hello.role is not role:
            raise HandshakeRefused(Fault.MALFORMED, f"it says it is the {hello.role.name.lower()}, which we are")
        if hello.identity.cluster != self._us.cluster:
            raise HandshakeRefused(
                Fault.CLUSTER,
                f"node {hello.identity.node!a} is of cluster {hello.identity.cluster!a}, we of {self._us.cluster!a}"
                + _same_name(hello.identity.cluster, self._us.cluster),
            )
        if hello.peer != self._us.node:
            raise HandshakeRefused(
                Fault.NODE, f"node {hello.identity.node!a} wants {hello.peer!a}, we are {self._us.node!a}"
            )
        if hello.proof != self._proof:
            which = "no secret, we use one" if self._secret is not None else "a secret, we use none"
            raise HandshakeRefused(Fault.PROOF, f"node {hello.identity.node!a} uses {which}")
        return hello, head + body

    def _verdict(self, transcript: bytes, reason: str | None) -> bytes:
        text = (reason or "").encode()[:REASON_BYTES_MAX]
        head = _VERDICT.pack(_WELCOME if reason is None else _REFUSED, len(text))
        return head + text + self._mac(_ACCEPTOR_PROVES, transcript + head + text)

    @property
    def _mac_bytes(self) -> int:
        return 0 if self._secret is None else hashlib.sha256().digest_size

    def _mac(self, label: bytes, text: bytes) -> bytes:
        return b"" if self._secret is None else hmac.digest(self._secret, label + text, "sha256")

    def _key(self, label: bytes, transcript: bytes) -> bytes | None:
        return None if self._secret is None else hmac.digest(self._secret, label + transcript, "sha256")


# Yields how many bytes it wants next; returns the peer, our sending key and our receiving key.
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
                raise ValueError("an id runs over the end of the hello")
            ids.append(raw.decode("utf-8"))
            offset = end
        if offset != len(body):
            raise ValueError("the hello is longer than its parts")
        cluster, node, peer, disk = ids
        check_id("peer id", peer)
        if proof not in (_PROOF_NONE, _PROOF_HMAC_SHA256):
            raise ValueError(f"unknown proof {proof}")
        return Hello(Role(role), Identity(cluster, node, disk, incarnation), peer, proof, nonce)
    except (ValueError, IndexError) as error:
        raise HandshakeRefused(Fault.MALFORMED, f"its hello is malformed: {error}") from error


def _same_name(theirs: str, ours: str) -> str:
    """A cluster id may have a second part behind a slash, for what its name does not say: who formed it."""
    if theirs.partition("/")[0] != ours.partition("/")[0]:
        return ""
    return (
        ": the same name, but formed by other founders, or from another backup; every node must be given the same ones"
    )


def _not_certified(node: str, names: Collection[str]) -> str:
    listed = ", ".join(ascii(name) for name in sorted(names)[:4]) or "nobody"
    return f"the certificate does not name {node!a} but {listed}"
