"""What nodes say to each other about their logs, and the gate every message passes before an engine sees it.

A frame is one msgpack array of messages; a message is an array `[kind, group, epoch, fields...]`. `decode` is total: it returns
messages whose every field has the right type and lies within its bound, or raises `Malformed`, and the link that
carried the frame is closed. So the engine never meets a hole in a list of entries, a term from the future of its own
message, or a number that is not one. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_, itemgetter, le
from typing import Any, Final, NamedTuple, NewType, TypeAlias

import msgpack

NodeId = NewType("NodeId", str)
GroupId = NewType("GroupId", int)

#: An entry as the engine holds it: (command, index, term). The order is pysyncobj's.
Entry: TypeAlias = tuple[bytes, int, int]

# The first byte of an entry's command says what it is. 0 and 1 are pysyncobj's numbers.
COMMANDS: Final = 0
NOOP: Final = 1
SEAL: Final = 4
ENTRY_KINDS: Final = frozenset({COMMANDS, NOOP, SEAL})

INT_MAX: Final = 2**63 - 1
GROUP_MAX: Final = 2**32 - 1
NODE_BYTES_MAX: Final = 64
MEMBERS_MAX: Final = 15
ENTRIES_MAX: Final = 4096
ENTRY_BYTES_MAX: Final = 8 * 1024 * 1024
DETAIL_BYTES_MAX: Final = 64 * 1024
APP_BYTES_MAX: Final = 16 * 1024 * 1024
REASON_BYTES_MAX: Final = 1024
MESSAGES_MAX: Final = 65536


class Malformed(Exception):
    """A peer sent what no correct peer sends."""


class Append(NamedTuple):
    """Leader to follower: these entries follow (prev_index, prev_term); everything up to `commit` is committed."""

    term: int
    prev_index: int
    prev_term: int
    commit: int
    entries: tuple[Entry, ...]


class AppendAck(NamedTuple):
    """Follower to leader: my log equals yours up to `index`, on disk."""

    term: int
    index: int  # type: ignore[assignment]


class AppendReject(NamedTuple):
    """Follower to leader: I do not hold (index, its term); try from `hint`. With a higher term: you are deposed."""

    term: int
    index: int  # type: ignore[assignment]
    hint: int


class Heartbeat(NamedTuple):
    """Leader to follower: I lead; `commit` is within what you acknowledged. `sequence` numbers the round."""

    term: int
    commit: int
    sequence: int


class HeartbeatAck(NamedTuple):
    """Follower to leader: when round `sequence` reached me, nobody with a higher term had my vote."""

    term: int
    sequence: int


class PreVote(NamedTuple):
    """Would you vote for me in `term`? Nothing is promised or stored by asking or answering (Raft thesis §9.6)."""

    term: int
    last_index: int
    last_term: int


class PreVoteReply(NamedTuple):
    """`term` is the answerer's own, `asked` the term of the question."""

    term: int
    asked: int
    granted: bool


class RequestVote(NamedTuple):
    """Vote for me in `term`. `transfer`: the leader itself asked me to, so its heartbeats are no reason to refuse."""

    term: int
    last_index: int
    last_term: int
    transfer: bool


class Vote(NamedTuple):
    term: int
    granted: bool


class TimeoutNow(NamedTuple):
    """Leader to its chosen successor: campaign at once."""

    term: int


class Offer(NamedTuple):
    """Leader to a follower whose next entry is trimmed: fetch the state at (index, index_term) instead."""

    term: int
    index: int  # type: ignore[assignment]
    index_term: int
    detail: bytes


class Config(NamedTuple):
    """The group lives in this message's epoch, with these members, and began after (seed_index, seed_term)."""

    members: tuple[NodeId, ...]
    seed_index: int
    seed_term: int


class App(NamedTuple):
    """Bytes for the rooms above, in order with everything else on the link."""

    payload: bytes


class Appends(NamedTuple):
    """Leader to follower: what `Append` says, of several groups and with one entry each: group, epoch, term, prev_index,
    prev_term, commit, the entry's term and its command, of each in turn. It belongs to no group itself."""

    flat: Sequence[Any]


class AppendAcks(NamedTuple):
    """Follower to leader: what `AppendAck` says, of several groups: group, epoch, term and index of each, in turn.

    It belongs to no group itself.
    """

    flat: Sequence[int]


class Farewell(NamedTuple):
    """Why this session ends now, from the side that ends it. It belongs to no group and is the last thing said."""

    reason: bytes


Message: TypeAlias = (
    Append
    | AppendAck
    | AppendReject
    | Heartbeat
    | HeartbeatAck
    | PreVote
    | PreVoteReply
    | RequestVote
    | Vote
    | TimeoutNow
    | Offer
    | Config
    | App
    | Farewell
    | AppendAcks
    | Appends
)


class Envelope(NamedTuple):
    """A message of one epoch of one group."""

    group: GroupId
    epoch: int
    message: Message


KINDS: Final[tuple[type[Any], ...]] = (
    Append,
    AppendAck,
    AppendReject,
    Heartbeat,
    HeartbeatAck,
    PreVote,
    PreVoteReply,
    RequestVote,
    Vote,
    TimeoutNow,
    Offer,
    Config,
    App,
    Farewell,
    AppendAcks,
    Appends,
)
_NUMBER: Final = {kind: number for number, kind in enumerate(KINDS)}
#: How many fields follow (kind, group, epoch), and which of them are booleans or bytes. The rest are bounded integers.
_WIDTH: Final = {number: len(kind._fields) for number, kind in enumerate(KINDS)}
_BOOL_AT: Final = {_NUMBER[PreVoteReply]: 2, _NUMBER[RequestVote]: 3, _NUMBER[Vote]: 1}
_APPEND: Final = _NUMBER[Append]
_APPEND_ACK: Final = _NUMBER[AppendAck]
_OFFER: Final = _NUMBER[Offer]
_CONFIG: Final = _NUMBER[Config]
_APP: Final = _NUMBER[App]
_FAREWELL: Final = _NUMBER[Farewell]
_APPEND_ACKS: Final = _NUMBER[AppendAcks]
_APPENDS: Final = _NUMBER[Appends]
APPENDS_WIDTH: Final = 8
ACKS_WIDTH: Final = 4
_BYTES_MAX: Final = {_OFFER: DETAIL_BYTES_MAX, _APP: APP_BYTES_MAX, _FAREWELL: REASON_BYTES_MAX}

_first = itemgetter(0)
_PLAIN: Final = frozenset({int, bool, float, str, bytes, type(None)})
_pack = msgpack.Packer(use_bin_type=True, autoreset=True).pack
#: What the constructor of a NamedTuple does, without the Python function around it that costs as much again. For the few
#: that are made for each group in each round; the fields are as many as the class names.
build: Final = tuple.__new__


def encode(envelopes: list[Envelope]) -> bytes:
    """One frame. Entries travel as [term, command, term, command, ...]: their indices follow from `prev_index`."""
    rows: list[tuple[Any, ...]] = []
    for group, epoch, message in envelopes:
        if type(message) is Append:
            term, prev_index, prev_term, commit, entries = message
            if len(entries) == 1:  # As a rule.
                flat: Sequence[Any] = entries[0][2], entries[0][0]
            else:
                flat = [part for command, _, entry_term in entries for part in (entry_term, command)]
            rows.append((_APPEND, group, epoch, term, prev_index, prev_term, commit, flat))
        else:
            rows.append((_NUMBER[type(message)], group, epoch, *message))
    frame: bytes = _pack(rows)
    return frame


def alike(some: list[Envelope], others: list[Envelope]) -> bool:
    """Whether two frames are the same. Equality is not enough: as tuples, Vote(1, True) equals AppendAck(1, 1)."""
    if len(some) != len(others):
        return False
    if all(map(is_, some, others)):  # So it is with what a host sends to followers that keep up.
        return True
    return some == others and all(type(one[2]) is type(other[2]) for one, other in zip(some, others, strict=True))


def _shown(value: Any) -> str:
    """For an error. Of what has parts only the kind: lists in lists in lists could not even be printed."""
    return f"{value!r:.40}" if type(value) in _PLAIN else f"a {type(value).__name__}"


def _integers(values: Sequence[Any], what: str) -> None:
    for value in values:
        if type(value) is not int or not 0 <= value <= INT_MAX:
            raise Malformed(f"{what}: {_shown(value)} is not an integer from 0 to 2^63-1")


def _entries(flat: Any, term: int, prev_index: int, prev_term: int) -> tuple[Entry, ...]:
    if type(flat) is list and len(flat) == 2:  # As a rule. What is wrong with it is named below.
        entry_term, command = flat
        if (
            type(entry_term) is int
            and prev_term <= entry_term <= term
            and prev_index < INT_MAX
            and type(command) is bytes
            and 1 <= len(command) <= ENTRY_BYTES_MAX
            and command[0] in ENTRY_KINDS
        ):
            return ((command, prev_index + 1, entry_term),)
    if type(flat) is not list or len(flat) % 2 or len(flat) > 2 * ENTRIES_MAX:
        raise Malformed("append: entries are not a bounded list of pairs")
    entries: list[Entry] = []
    index, newest = prev_index, prev_term
    pairs = iter(flat)
    for entry_term, command in zip(pairs, pairs, strict=True):
        index += 1
        if type(entry_term) is not int or not newest <= entry_term <= term:
            raise Malformed(f"append: the term of entry {index} is not between its predecessor's and the leader's")
        if type(command) is not bytes or not 1 <= len(command) <= ENTRY_BYTES_MAX or command[0] not in ENTRY_KINDS:
            raise Malformed(f"append: entry {index} is not a command of a known kind and size")
        newest = entry_term
        entries.append((command, index, entry_term))
    if index > INT_MAX:
        raise Malformed("append: index out of range")
    return tuple(entries)


def _members(value: Any) -> tuple[NodeId, ...]:
    if type(value) is not list or not 1 <= len(value) <= MEMBERS_MAX:
        raise Malformed("config: members are not a list of 1 to 15")
    for name in value:
        if type(name) is not str or not 1 <= len(name.encode(errors="surrogatepass")) <= NODE_BYTES_MAX:
            raise Malformed("config: a member is not a name of 1 to 64 bytes")
    if value != sorted(set(value)):
        raise Malformed("config: members are not sorted and distinct")
    return tuple(value)


def _table(flat: Any, width: int, what: str) -> None:
    if type(flat) is not list or not width <= len(flat) <= width * MESSAGES_MAX or len(flat) % width:
        raise Malformed(f"{what}: not a bounded list of {width} fields each")


def _all_integers(values: list[Any], what: str) -> None:
    """As `_integers`, for many: by functions in C."""
    if set(map(type, values)) != {int} or min(values) < 0 or max(values) > INT_MAX:
        _integers(values, what)


def _acks(flat: Any) -> AppendAcks:
    _table(flat, ACKS_WIDTH, "acknowledgements")
    _all_integers(flat, "acknowledgements")
    if max(flat[::ACKS_WIDTH]) > GROUP_MAX:
        raise Malformed("acknowledgements: a group is out of range")
    return AppendAcks(flat)


def _appends(flat: Any) -> Appends:
    _table(flat, APPENDS_WIDTH, "appends")
    commands = flat[7::APPENDS_WIDTH]
    numbers = flat.copy()
    del numbers[7::APPENDS_WIDTH]
    _all_integers(numbers, "appends")
    if max(flat[::APPENDS_WIDTH]) > GROUP_MAX or max(flat[3::APPENDS_WIDTH]) == INT_MAX:
        raise Malformed("appends: a group or an index is out of range")
    entry_terms = flat[6::APPENDS_WIDTH]
    if not (all(map(le, flat[4::APPENDS_WIDTH], entry_terms)) and all(map(le, entry_terms, flat[2::APPENDS_WIDTH]))):
        raise Malformed("appends: the term of an entry is not between its predecessor's and the leader's")
    if (
        set(map(type, commands)) != {bytes}
        or not 1 <= min(map(len, commands)) <= max(map(len, commands)) <= ENTRY_BYTES_MAX
    ):
        raise Malformed("appends: an entry is not a command of a known size")
    if not set(map(_first, commands)) <= ENTRY_KINDS:
        raise Malformed("appends: an entry is not a command of a known kind")
    return Appends(flat)


def _message(number: int, fields: list[Any]) -> Message:
    if number == _APPEND:
        term, prev_index, prev_term, commit, flat = fields
        _integers((term, prev_index, prev_term, commit), "append")
        return Append(term, prev_index, prev_term, commit, _entries(flat, term, prev_index, prev_term))
    if number == _APPEND_ACKS:
        return _acks(fields[0])
    if number == _APPENDS:
        return _appends(fields[0])
    if number == _CONFIG:
        _integers(fields[1:], "config")
        return Config(_members(fields[0]), fields[1], fields[2])
    if number in _BYTES_MAX:
        payload = fields[-1]
        if type(payload) is not bytes or len(payload) > _BYTES_MAX[number]:
            raise Malformed("the payload is not bytes within its bound")
        _integers(fields[:-1], "offer")
    elif (flag := _BOOL_AT.get(number)) is not None:
        if type(fields[flag]) is not bool:
            raise Malformed(f"{KINDS[number].__name__}: field {flag} is not a boolean")
        _integers(fields[:flag], KINDS[number].__name__)
    else:
        _integers(fields, KINDS[number].__name__)
    message: Message = KINDS[number](*fields)
    return message


def decode(frame: bytes) -> list[Envelope]:
    """The messages of one frame, each checked in full; `Malformed` if any is wrong."""
    try:
        rows = msgpack.unpackb(frame, raw=False, strict_map_key=True, max_map_len=0, max_ext_len=0)
    except Exception as error:
        raise Malformed(f"not msgpack: {error}") from None
    if type(rows) is not list or len(rows) > MESSAGES_MAX:
        raise Malformed("a frame is a bounded list of messages")
    envelopes: list[Envelope] = []
    for row in rows:
        if type(row) is not list or len(row) < 3:
            raise Malformed("a message is a list of kind, group, epoch and fields")
        # The two most frequent by far. What is wrong with one is named below.
        if row[0] == _APPEND_ACK and len(row) == 5:
            number, group, epoch, term, index = row
            if (
                type(number) is type(group) is type(epoch) is type(term) is type(index) is int
                and 0 <= group <= GROUP_MAX
                and 0 <= epoch <= INT_MAX
                and 0 <= term <= INT_MAX
                and 0 <= index <= INT_MAX
            ):
                envelopes.append(build(Envelope, (group, epoch, build(AppendAck, (term, index)))))
                continue
        elif row[0] == _APPEND and len(row) == 8:
            number, group, epoch, term, prev_index, prev_term, commit, flat = row
            if (
                type(number) is type(group) is type(epoch) is type(term) is int
                and type(prev_index) is type(prev_term) is type(commit) is int
                and 0 <= group <= GROUP_MAX
                and 0 <= epoch <= INT_MAX
                and 0 <= term <= INT_MAX
                and 0 <= prev_index <= INT_MAX
                and 0 <= prev_term <= INT_MAX
                and 0 <= commit <= INT_MAX
            ):
                entries = _entries(flat, term, prev_index, prev_term)
                append = build(Append, (term, prev_index, prev_term, commit, entries))
                envelopes.append(build(Envelope, (group, epoch, append)))
                continue
        number, group, epoch, *fields = row
        if type(number) is not int or _WIDTH.get(number) != len(fields):
            raise Malformed(f"unknown kind of message, or a wrong number of fields: {_shown(number)}")
        if type(group) is not int or not 0 <= group <= GROUP_MAX:
            raise Malformed(f"group {_shown(group)} is out of range")
        if type(epoch) is not int or not 0 <= epoch <= INT_MAX:
            raise Malformed(f"epoch {_shown(epoch)} is out of range")
        envelopes.append(Envelope(GroupId(group), epoch, _message(number, fields)))
    return envelopes
