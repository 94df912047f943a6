"""Bounds on bytes from outside, checked before they are parsed, at a cost that is bounded itself.

A parser makes an object of 56 bytes or more out of one byte (`[]` in JSON, 0x90 in msgpack), reserves room for as many
elements as a header claims, and does it all in one call that nothing interrupts. So a message of permitted size can
still fill the memory and block the event loop for seconds. Both costs grow with the number of elements, which is
bounded here. docs/limits.md lists the bounds and their worst-case cost.

Nothing here does I/O or keeps state between calls, and each function is total: it returns, or raises `TooComplex`.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

import msgpack

#: Messages up to this size have at most as many elements as bytes, so their claims are checked against their length, in
#: C.
SMALL_BYTES: Final = 64 * 1024
#: Elements of a message, unless its reader sets another bound.
ELEMENTS_MAX: Final = 128 * 1024
DEPTH_MAX: Final = 64
DIGITS_MAX: Final = 128  # of a number in JSON


class TooComplex(ValueError):
    """Too many elements, nested too deep, or malformed."""


# -- msgpack -----------------------------------------------------------------------------------------------------------


def _sizes() -> bytes:
    """The length of an element by its first byte, if that determines it; else 0."""
    sizes = bytearray(256)
    sizes[0x00:0x80] = b"\x01" * 0x80  # positive fixint
    sizes[0xE0:0x100] = b"\x01" * 0x20  # negative fixint
    sizes[0xC0] = sizes[0xC2] = sizes[0xC3] = 1  # nil, false, true
    sizes[0x80] = sizes[0x90] = 1  # an empty map, an empty list
    sizes[0xA0:0xC0] = bytes(range(1, 33))  # fixstr
    for offset, size in enumerate((5, 9, 2, 3, 5, 9, 2, 3, 5, 9, 3, 4, 6, 10, 18)):  # floats, integers, fixext
        sizes[0xCA + offset] = size
    return bytes(sizes)


_SIZES: Final = _sizes()
#: The number of bytes after the first that hold the length of a string or bytes, and other bytes of the header.
_LENGTHS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXTENSIONS: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}
#: The number of bytes that hold the number of elements, and how many elements each of them counts as.
_CONTAINERS: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


class Walk:
    """Steps over the elements of a msgpack message one by one, without creating objects."""

    __slots__ = ("at", "raw", "seen")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.at = 0
        self.seen = 0  # elements, so far

    def header(self) -> int | None:
        """The number of elements of the array that begins here, which is entered; None if it is not an array."""
        raw, at = self.raw, self.at
        first = raw[at] if at < len(raw) else 0
        self.seen += 1
        if 0x90 <= first < 0xA0:
            self.at = at + 1
            return first & 15
        if first in (0xDC, 0xDD):
            width = _CONTAINERS[first][0]
            self.at = at + 1 + width
            return int.from_bytes(raw[at + 1 : self.at], "big")
        return None

    def skip(self, elements_max: int, depth_max: int = DEPTH_MAX) -> None:
        """Move past the element that begins here. A header is trusted only within the bounds and the length of the
        message."""
        raw, at, sizes = self.raw, self.at, _SIZES
        end = len(raw)
        room = elements_max - 1
        left = 1  # elements of the innermost open container
        outer: list[int] = []
        while True:
            while left:
                left -= 1
                if at >= end:
                    raise TooComplex("the message is cut off")
                first = raw[at]
                if size := sizes[first]:
                    at += size
                    continue
                if first < 0xA0:
                    at += 1
                    count = first & 15 if first >= 0x90 else 2 * (first & 15)
                elif (width := _LENGTHS.get(first)) is not None:
                    at += 1 + width + int.from_bytes(raw[at + 1 : at + 1 + width], "big")
                    continue
                elif (head := _CONTAINERS.get(first)) is not None:
                    count = int.from_bytes(raw[at + 1 : at + 1 + head[0]], "big") * head[1]
                    at += 1 + head[0]
                elif (width := _EXTENSIONS.get(first)) is not None:
                    at += 2 + width + int.from_bytes(raw[at + 1 : at + 1 + width], "big")
                    continue
                else:
                    raise TooComplex("0xc1 is not msgpack")
                room -= count
                if room < 0:
                    raise TooComplex(f"more than {elements_max} elements")
                if count > end - at:
                    raise TooComplex("the message is cut off")
                if count:
                    outer.append(left)
                    left = count
                    if len(outer) > depth_max:
                        raise TooComplex(f"nested deeper than {depth_max}")
            if not outer:
                break
            left = outer.pop()
        if at > end:
            raise TooComplex("the message is cut off")
        self.at = at
        self.seen += elements_max - room


def check_msgpack(raw: bytes, elements_max: int = ELEMENTS_MAX, depth_max: int = DEPTH_MAX) -> None:
    """Whether a message can be parsed at bounded cost. Other errors are harmless and left to the parser."""
    if len(raw) <= min(SMALL_BYTES, elements_max):
        unpacker = msgpack.Unpacker(max_buffer_size=SMALL_BYTES)
        unpacker.feed(raw)
        try:
            unpacker.skip()
        except Exception as error:
            raise TooComplex(f"not msgpack: {error or type(error).__name__}") from None
        return
    Walk(raw).skip(elements_max, depth_max)


# -- JSON --------------------------------------------------------------------------------------------------------------

_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


def check_json(raw: bytes, elements_max: int, depth_max: int = DEPTH_MAX) -> None:
    """Every value but the first follows a comma, a colon or an opening bracket. C functions count these.

    In most documents the count is within the bound although it includes those in strings. If not, strings are left out.
    """
    if _values(raw) > elements_max or raw.count(b"[") + raw.count(b"{") > depth_max:
        raw = _without_strings(raw, elements_max)
        if _values(raw) > elements_max:
            raise TooComplex(f"more than {elements_max} elements")
        # Each round removes the innermost level.
        brackets = raw.translate(None, _NOT_BRACKETS)
        for _ in range(depth_max):
            if not brackets:
                break
            brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if brackets.count(b"[") + brackets.count(b"{"):
            raise TooComplex(f"nested deeper than {depth_max}, or brackets do not match")


def _values(raw: bytes) -> int:
    return 1 + raw.count(b",") + raw.count(b":") + raw.count(b"[") + raw.count(b"{")


def _without_strings(raw: bytes, elements_max: int) -> bytes:
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if raw.count(b'"') > 2 * elements_max:
        raise TooComplex(f"more than {elements_max} elements")
    return b"".join(raw.split(b'"')[::2])


def load_json(raw: bytes, elements_max: int, depth_max: int = DEPTH_MAX) -> Any:
    """Raises ValueError for anything but JSON in UTF-8, and its subclass TooComplex if parsing would cost too much."""
    check_json(raw, elements_max, depth_max)
    text = raw.decode()  # Bytes of other encodings would evade the count.
    try:
        return json.loads(text.removeprefix("\ufeff"), parse_int=_integer, parse_float=_float, parse_constant=_constant)
    except RecursionError:
        raise TooComplex("nested too deep") from None


def _integer(text: str) -> int:
    """The cost of reading and writing an integer grows with the square of its digits."""
    if len(text) > DIGITS_MAX:
        raise TooComplex(f"a number of more than {DIGITS_MAX} digits")
    return int(text)


def _float(text: str) -> float:
    if len(text) > DIGITS_MAX:
        raise TooComplex(f"a number of more than {DIGITS_MAX} digits")
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is out of the range of numbers")
    return number


def _constant(name: str) -> float:
    """Python reads and writes NaN, Infinity and -Infinity, which JSON does not have."""
    raise ValueError(f"{name} is not a number in JSON")


# -- for error texts ---------------------------------------------------------------------------------------------------


def shown(value: Any, most: int = 60) -> str:
    """A value for an error text: `repr` of a large value would cost more than refusing it saves."""
    if isinstance(value, str | bytes):
        text = repr(value[:most])
    elif value is None or isinstance(value, bool | int | float):
        text = repr(value)
    elif isinstance(value, list | tuple | dict):
        text = f"a {type(value).__name__} of {len(value)}"
    else:
        text = type(value).__name__
    return text[:most]
