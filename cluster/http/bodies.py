"""The body of a request as aiohttp receives it: awaited, limited in time, and decompressed piece by piece."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from typing import Final

from aiohttp import HttpVersion11, web

from holdfast.cluster.errors import BadRequest, TooSlow, UnsupportedEncoding

BODY_TIMEOUT_S: Final = 60.0
INFLATED_BYTES_MAX: Final = 256 * 1024  # of a compressed body at a time
_BROKEN: Final = (web.RequestPayloadError, ConnectionError, RuntimeError, zlib.error)


class AiohttpBody:
    __slots__ = ("_content", "_encoding", "_request", "is_awaited", "length")

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        #: Whether the client waits for 100 Continue (RFC 9110, 10.1.1).
        self.is_awaited = (
            "Expect" in request.headers
            and request.headers["Expect"].lower() == "100-continue"
            and request.version >= HttpVersion11
            and not request.content.is_eof()
        )
        self._content = request.content
        self._encoding = request.headers.get("Content-Encoding")
        self.length = request.content_length

    def whole(self) -> bytes | None:
        content = self._content
        if self._encoding is not None or not content.is_eof():
            return None
        try:
            return content.read_nowait()
        except _BROKEN as error:
            raise self._unreadable(error) from None

    async def chunks(self) -> AsyncIterator[bytes]:
        content = self._content
        inflate = _inflater(self._encoding) if self._encoding is not None else None
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                if self.is_awaited:
                    self.is_awaited = False
                    writer = self._request.writer
                    await writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    writer.output_size = 0  # The response has not begun.
                while not content.at_eof():
                    raw = await content.readany()
                    if inflate is None:
                        yield raw
                        continue
                    while raw:
                        yield inflate.decompress(raw, INFLATED_BYTES_MAX)
                        raw = inflate.unconsumed_tail
                    if inflate.unused_data:  # It would grow with all further data.
                        raise BadRequest("request body has extra data after the end of the compressed stream")
            if inflate is not None and not inflate.eof and self.length != 0:
                raise BadRequest("request body is truncated")
        except TimeoutError:
            raise TooSlow(f"request body did not arrive within {BODY_TIMEOUT_S:.0f} seconds") from None
        except _BROKEN as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> Exception:
        """What the request is refused with. A RuntimeError on an open connection is a defect; on a closed one, it was closed
        for other clients."""
        if isinstance(error, RuntimeError) and self._request.transport is not None:
            return error
        return BadRequest(f"cannot read the request body: {error}")


def _inflater(encoding: str) -> zlib._Decompress | None:
    """Decompresses in pieces, so that a small body that expands to a huge one reaches the limit before it fills the
    memory."""
    match encoding.strip().lower():
        case "identity" | "":
            return None
        case "gzip" | "x-gzip" | "deflate":
            return zlib.decompressobj(zlib.MAX_WBITS | 32)  # 32: detect gzip or zlib by the header.
        case other:
            raise UnsupportedEncoding(
                f"{other!r:.60} is not a supported content encoding", "send gzip, deflate, or an uncompressed body"
            )
