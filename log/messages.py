"""The messages between nodes about their logs, and the checks that every message passes before an engine sees it.

A frame is one msgpack array of messages; a message is an array `[kind, group, epoch, fields...]`. `decode` is total: it returns
messages whose every field has the right type and is within its bound, or raises `Malformed`, and the session that carried the
frame ends. So the engine never sees a hole in a list of entries, an entry whose term is above its message's, or a value of the
wrong type. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import is_, itemgetter, le
from typing import Any, Final, NamedTuple, NewType, TypeAlias

import msgpack

from holdfast.sdk.bounds import TooComplex, Walk, check_msgpack
from holdfast.sdk.ids import NodeId as NodeId  # The log and the tables of members name nodes alike.

GroupId = NewType("GroupId", int)

#: An entry as the engine holds it: (command, index, term). The order is pysyncobj's.
Entry: TypeAlias = tuple[bytes, int, int]

# The first byte of an entry's command is its kind. 0 and 1 are pysyncobj's numbers.
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
MESSAGES_MAX: Final = 32768
#: Bounds on the elements of one frame (lists and their items): always at least `ELEMENTS_MIN`, then one per `ELEMENT_BYTES`
#: (an entry has two elements and more than 50 bytes), and never more than `ELEMENTS_MAX`.
ELEMENTS_MIN: Final = 192 * 1024
ELEMENT_BYTES: Final = 24
ELEMENTS_MAX: Final = 1024 * 1024
#: Frames with more elements are split before sending; only frames above this size are counted.
SPLIT_ELEMENTS: Final = 64 * 1024
SPLIT_BYTES: Final = 256 * 1024
#: A frame of more bytes than this is taken in slices: each has about that many elements or bytes, or is one message.
SLICED_BYTES: Final = 256 * 1024
SLICE_ELEMENTS: Final = 16 * 1024
SLICE_BYTES: Final = 1024 * 1024
#: Groups in one `Appends` or `AppendAcks`. A node has 4,097 at most.
TABLE_ROWS_MAX: Final = 8192
#: Of one message, which no slice can divide: an `Appends` has the most.
MESSAGE_ELEMENTS_MAX: Final = 8 * TABLE_ROWS_MAX + 8
DEPTH_MAX: Final = 4  # A frame, its messages, their fields, and tables in them.


class Malformed(Exception):
    """A peer sent something that no correct peer sends."""


class Append(NamedTuple):
    """Leader to follower: these entries follow (prev_index, prev_term), and entries up to `commit` are committed."""

    term: int
    prev_index: int
    prev_term: int
    commit: int
    entries: tuple[Entry, ...]


class AppendAck(NamedTuple):
    """Follower to leader: my log on disk equals yours up to `index`."""

    term: int
    index: int  # type: ignore[assignment]


class AppendReject(NamedTuple):
    """Follower to leader: I do not hold entry `index` with that term; try from `hint`. A higher term deposes the leader."""

    term: int
    index: int  # type: ignore[assignment]
    hint: int


class Heartbeat(NamedTuple):
    """Leader to follower: I lead. `commit` does not exceed what you acknowledged; `sequence` numbers the round."""

    term: int
    commit: int
    sequence: int


class HeartbeatAck(NamedTuple):
    """Follower to leader: when round `sequence` reached me, no candidate of a higher term had my vote."""

    term: int
    sequence: int


class PreVote(NamedTuple):
    """Would you vote for me in `term`? Asking and answering promise and store nothing (Raft thesis §9.6)."""

    term: int
    last_index: int
    last_term: int


class PreVoteReply(NamedTuple):
    """`term` is the sender's own term, `asked` the term of the question."""

    term: int
    asked: int
    granted: bool


class RequestVote(NamedTuple):
    """Vote for me in `term`. `transfer`: the leader itself asked me, so do not refuse because you hear its heartbeats."""

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
    """The group is in this message's epoch, which has these members and began after (seed_index, seed_term)."""

    members: tuple[NodeId, ...]
    seed_index: int
    seed_term: int


class App(NamedTuple):
    """Bytes for the rooms above, in order with everything else on the link."""

    payload: bytes


class Appends(NamedTuple):
    """Leader to follower: `Append` for several groups with one entry each, as a flat list.

    For each group it has group, epoch, term, prev_index, prev_term, commit, the entry's term and its command. The message
    itself belongs to no group.
    """

    flat: Sequence[Any]


class AppendAcks(NamedTuple):
    """Follower to leader: `AppendAck` for several groups, as a flat list of group, epoch, term and index.

    The message itself belongs to no group.
    """

    flat: Sequence[int]


class Farewell(NamedTuple):
    """Why the sender ends this session. It is the last message and belongs to no group."""

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
#: The number of fields after (kind, group, epoch), and which of them are booleans or bytes. The others are bounded integers.
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
_packer: Final = msgpack.Packer(use_bin_type=True, autoreset=True)
_pack = _packer.pack
#: The constructor of a NamedTuple without the Python function around it, which doubles the cost. For the few kinds made for
#: each group in each round; the caller must pass as many fields as the class has.
build: Final = tuple.__new__


def encode(envelopes: list[Envelope]) -> bytes:
    """Encode one frame. Entries travel as [term, command, term, command, ...]; their indices follow from `prev_index`."""
    rows: list[tuple[Any, ...]] = []
    for group, epoch, message in envelopes:
        if type(message) is Append:
            term, prev_index, prev_term, commit, entries = message
            if len(entries) == 1:  # The usual case.
                flat: Sequence[Any] = entries[0][2], entries[0][0]
            else:
                flat = [part for command, _, entry_term in entries for part in (entry_term, command)]
            rows.append((_APPEND, group, epoch, term, prev_index, prev_term, commit, flat))
        else:
            rows.append((_NUMBER[type(message)], group, epoch, *message))
    frame: bytes = _pack(rows)
    return frame


def encode_frames(envelopes: list[Envelope], bytes_max: int) -> list[bytes]:
    """Encode messages as one frame, or as several if they are many.

    A peer that comes back receives a window of every group that we lead in one turn, and parsing all of it at once would block
    its loop for too long.
    """
    frame = encode(envelopes)
    small = (
        len(frame) <= bytes_max
        and len(envelopes) <= MESSAGES_MAX // 2
        and (len(frame) <= SPLIT_BYTES or _elements(envelopes) <= SPLIT_ELEMENTS)
    )
    if small or len(envelopes) == 1:
        return [frame]
    middle = len(envelopes) // 2
    return encode_frames(envelopes[:middle], bytes_max) + encode_frames(envelopes[middle:], bytes_max)


def _elements(envelopes: list[Envelope]) -> int:
    """About how many elements their frame has, as a receiver counts them."""
    count = 0
    for _, _, message in envelopes:
        kind = type(message)
        if kind is Append:
            count += 8 + 2 * len(message.entries)  # type: ignore[union-attr]
        elif kind is Appends or kind is AppendAcks:
            count += 4 + len(message[0])  # type: ignore[arg-type]
        else:
            count += 8
    return count


def alike(some: list[Envelope], others: list[Envelope]) -> bool:
    """Whether two frames are the same. Equality is not enough: as tuples, Vote(1, True) equals AppendAck(1, 1)."""
    if len(some) != len(others):
        return False
    if all(map(is_, some, others)):  # The usual case: followers that keep up receive the same objects.
        return True
    return some == others and all(type(one[2]) is type(other[2]) for one, other in zip(some, others, strict=True))


def _printable(value: Any) -> str:
    """A value for an error text. Containers show only their type, because deep nesting could not be printed."""
    return f"{value!r:.40}" if type(value) in _PLAIN else f"a {type(value).__name__}"


def _integers(values: Sequence[Any], what: str) -> None:
    for value in values:
        if type(value) is not int or not 0 <= value <= INT_MAX:
            raise Malformed(f"{what}: {_printable(value)} is not an integer from 0 to 2^63-1")


def _entries(flat: Any, term: int, prev_index: int, prev_term: int) -> tuple[Entry, ...]:
    if type(flat) is list and len(flat) == 2:  # The usual case. Errors are reported below.
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
        raise Malformed("append: entries must be a bounded list of pairs")
    entries: list[Entry] = []
    index, newest = prev_index, prev_term
    pairs = iter(flat)
    for entry_term, command in zip(pairs, pairs, strict=True):
        index += 1
        if type(entry_term) is not int or not newest <= entry_term <= term:
            raise Malformed(f"append: the term of entry {index} must be between its predecessor's and the leader's")
        if type(command) is not bytes or not 1 <= len(command) <= ENTRY_BYTES_MAX or command[0] not in ENTRY_KINDS:
            raise Malformed(f"append: entry {index} must be a command of known kind and size")
        newest = entry_term
        entries.append((command, index, entry_term))
    if index > INT_MAX:
        raise Malformed("append: index out of range")
    return tuple(entries)


def _members(value: Any) -> tuple[NodeId, ...]:
    if type(value) is not list or not 1 <= len(value) <= MEMBERS_MAX:
        raise Malformed("config: members must be a list of 1 to 15")
    for name in value:
        if type(name) is not str or not 1 <= len(name.encode(errors="surrogatepass")) <= NODE_BYTES_MAX:
            raise Malformed("config: a member must be a name of 1 to 64 bytes")
    if value != sorted(set(value)):
        raise Malformed("config: members must be sorted and distinct")
    return tuple(value)


def _table(flat: Any, width: int, what: str) -> None:
    if type(flat) is not list or not width <= len(flat) <= width * TABLE_ROWS_MAX or len(flat) % width:
        raise Malformed(f"{what}: must be a bounded list of {width} fields each")


def _all_integers(values: list[Any], what: str) -> None:
    """As `_integers`, but fast for many values: it uses functions implemented in C."""
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
        raise Malformed("appends: the term of an entry must be between its predecessor's and the leader's")
    if (
        set(map(type, commands)) != {bytes}
        or not 1 <= min(map(len, commands)) <= max(map(len, commands)) <= ENTRY_BYTES_MAX
    ):
        raise Malformed("appends: an entry must be a command of known size")
    if not set(map(_first, commands)) <= ENTRY_KINDS:
        raise Malformed("appends: an entry must be a command of known kind")
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
            raise Malformed("payload must be bytes within its bound")
        _integers(fields[:-1], "offer")
    elif (flag := _BOOL_AT.get(number)) is not None:
        if type(fields[flag]) is not bool:
            raise Malformed(f"{KINDS[number].__name__}: field {flag} must be a boolean")
        _integers(fields[:flag], KINDS[number].__name__)
    else:
        _integers(fields, KINDS[number].__name__)
    message: Message = KINDS[number](*fields)
    return message


def slices(frame: bytes) -> Iterator[bytes]:
    """A large frame as smaller ones with the same messages in order, so that one turn of a loop need not parse all of it.

    It looks no further into the frame than it is asked to. Raises `Malformed`, perhaps after the first slices.
    """
    elements_max = _elements_max(frame)
    walk = Walk(frame)
    count = walk.header()
    if count is None or count > MESSAGES_MAX:
        raise Malformed("a frame must be a bounded list of messages")
    first, begin, seen = 0, walk.at, walk.seen
    for number in range(1, count + 1):
        try:
            walk.skip(max(min(elements_max - walk.seen, MESSAGE_ELEMENTS_MAX), 1), DEPTH_MAX - 1)
        except TooComplex as error:
            raise Malformed(f"not msgpack: {error}") from None
        if number == count or walk.seen - seen >= SLICE_ELEMENTS or walk.at - begin >= SLICE_BYTES:
            yield b"".join((_packer.pack_array_header(number - first), memoryview(frame)[begin : walk.at]))
            first, begin, seen = number, walk.at, walk.seen
    if walk.at != len(frame):
        raise Malformed("not msgpack: something follows the messages")


def _elements_max(frame: bytes) -> int:
    return min(ELEMENTS_MAX, max(ELEMENTS_MIN, len(frame) // ELEMENT_BYTES))


def decode(frame: bytes) -> list[Envelope]:
    """The messages of one frame, each checked in full; `Malformed` if any is wrong."""
    try:
        check_msgpack(frame, _elements_max(frame), DEPTH_MAX)
        rows = msgpack.unpackb(frame, raw=False, strict_map_key=True, max_map_len=0, max_ext_len=0)
    except Exception as error:
        raise Malformed(f"not msgpack: {error}") from None
    if type(rows) is not list or len(rows) > MESSAGES_MAX:
        raise Malformed("a frame must be a bounded list of messages")
    envelopes: list[Envelope] = []
    for row in rows:
        if type(row) is not list or len(row) < 3:
            raise Malformed("a message must be a list of kind, group, epoch and fields")
        # The two most frequent kinds by far. Errors in them are reported below.
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
            raise Malformed(f"unknown kind of message or wrong number of fields: {_printable(number)}")
        if type(group) is not int or not 0 <= group <= GROUP_MAX:
            raise Malformed(f"group {_printable(group)} is out of range")
        if type(epoch) is not int or not 0 <= epoch <= INT_MAX:
            raise Malformed(f"epoch {_printable(epoch)} is out of range")
        envelopes.append(Envelope(GroupId(group), epoch, _message(number, fields)))
    return envelopes
