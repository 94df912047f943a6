"""The content of a pong while the event loop of a handler process is blocked: for how long, by which handler, and where.

The watchdog's thread sends it without the loop. A pong of WebSocket may carry up to 125 bytes, needs no grant of flow control,
and is ignored by receivers that do not know its content.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgpack

from holdfast.sdk.bounds import check_msgpack

#: RFC 6455, 5.5: the largest payload of a control frame.
_BYTES_MAX: Final = 125
_HANDLER_BYTES: Final = 60
_HEADERS_BYTES: Final = 10  # The headers of the list, the number and the two texts.
_MS_MAX: Final = 2**32 - 1


class Blocking(NamedTuple):
    """The event loop is blocked."""

    milliseconds: int  # The duration so far.
    handler: str  # `service/handler`; empty if unknown.
    place: str  # file:line; the beginning of a long path is cut.


def pack_blocking(blocking: Blocking) -> bytes:
    handler = _tail(blocking.handler, _HANDLER_BYTES)
    place = _tail(blocking.place, _BYTES_MAX - _HEADERS_BYTES - len(handler.encode()))
    packed: bytes = msgpack.packb([min(blocking.milliseconds, _MS_MAX), handler, place])
    assert len(packed) <= _BYTES_MAX, "a control frame carries at most 125 bytes"
    return packed


def read_blocking(data: bytes) -> Blocking | None:
    """None: this pong has other content, as most do. Accepts any bytes."""
    if not data or len(data) > _BYTES_MAX:
        return None
    try:
        check_msgpack(data, 4, 1)
        fields = msgpack.unpackb(data)
    except ValueError:
        return None
    if type(fields) is not list or len(fields) != 3:
        return None
    milliseconds, handler, place = fields
    if type(milliseconds) is not int or not 0 <= milliseconds <= _MS_MAX:
        return None
    if type(handler) is not str or type(place) is not str:
        return None
    return Blocking(milliseconds, _printable(handler), _printable(place))


def _tail(text: str, bytes_max: int) -> str:
    """The end of a text, which is the most telling part of a path or a name."""
    data = text.encode("utf-8", "replace")
    if len(data) <= bytes_max:
        return data.decode()
    mark = "…"
    return mark + data[len(data) - bytes_max + len(mark.encode()) :].decode(errors="ignore")


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)
