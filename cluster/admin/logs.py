"""`GET /logs`: the newest records of the logs of the nodes, as a page, or as server-sent events that go on.

The log names addresses, says why links and endpoints fail, and has the acts of the audit trail. Each of these is for
administrators, so the log is as well.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Final

from holdfast.cluster.admin.choices import LOG_LIMIT
from holdfast.cluster.admin.parameters import AdminRequest, Parameters, read_id, read_time
from holdfast.cluster.errors import BadRequest, NotFound
from holdfast.cluster.events.logs import LIMIT_MAX, AllLogs
from holdfast.cluster.http.event_stream import (
    EVENT_STREAM,
    RETRY,
    SIGN_OF_LIFE,
    SIGN_OF_LIFE_S,
    block,
    is_wanted,
    line_of,
)
from holdfast.cluster.http.exchange import Answer
from holdfast.cluster.http.streams import Stream
from holdfast.cluster.log_level import LEVELS
from holdfast.cluster.log_ring import Place, Wanted
from holdfast.sdk.ids import format_id

_PARAMETERS: Final = ("level", "invocation", "node", "since", "until", "limit")
#: How often a stream looks for new records.
LOOK_S: Final = 0.25
#: Of the id with which a client resumes: a few hundred nodes.
ID_BYTES_MAX: Final = 16 * 1024
#: The id of a client that has read nothing.
NOWHERE: Final = "-"


class LogAdmin:
    def __init__(self, node: str, logs: AllLogs, now_ms: Callable[[], int]) -> None:
        self._node = node
        self._logs = logs
        self._now_ms = now_ms

    async def on_logs(self, request: AdminRequest) -> Answer:
        parameters = Parameters(request, *_PARAMETERS)
        now_ms = self._now_ms()
        wanted = Wanted(
            _read_level(parameters.text("level")),
            _read_invocation(parameters.text("invocation")),
            read_time(parameters, "since", now_ms) or 0,
            read_time(parameters, "until", now_ms) or 0,
        )
        named = self._read_nodes(parameters.text("node"))
        limit = parameters.number("limit", LOG_LIMIT, 1, LIMIT_MAX)
        headers = request.request.headers
        if is_wanted(headers):
            if wanted.until_ms:
                raise BadRequest("until: a stream has no end", "leave it out, or ask for a page")
            after = _read_places(headers.get("Last-Event-ID"))
            return Answer(200, b"", EVENT_STREAM, stream=Stream(self._stream(wanted, limit, named, after)))
        found = await self._logs.read(wanted, limit, nodes=named or self._logs.members())
        rows = found.records()
        more = len(rows) > limit or any(page.rest for page in found.pages.values())
        lines = b", ".join(record.line for _, record in rows[-limit:])
        rest = json.dumps({"more": more, "silent": found.silent}).encode()[1:]
        return Answer(200, b'{"records": [%b], %b' % (lines, rest))

    def _read_nodes(self, text: str | None) -> frozenset[str]:
        """Empty: all."""
        names = frozenset(name.strip() for name in text.split(",")) if text is not None else frozenset[str]()
        if unknown := sorted(names - set(self._logs.members())):
            raise NotFound(
                f"there is no node {unknown[0]!r:.100}", "`holdfast cluster status` (GET /cluster) lists the nodes"
            )
        return names

    async def _stream(
        self, wanted: Wanted, limit: int, named: Collection[str], after: Mapping[str, Place] | None
    ) -> AsyncIterator[bytes]:
        """The newest records first, or those after a place; then what comes."""
        loop = asyncio.get_running_loop()
        places: dict[str, Place] = dict(after or {})
        silent: set[str] = set()
        is_first = after is None
        yield RETRY + block("hello", {"node": self._node, "resumed": not is_first}, _format(places))
        last_s = loop.time()
        while True:
            nodes = named or self._logs.members()
            found = await self._logs.read(wanted, limit, nodes=nodes, after=None if is_first else places)
            rows = found.records()[-limit:] if is_first else found.records()
            sent = b"".join(block("silent", {"node": name}) for name in found.silent if name not in silent)
            silent = set(found.silent)
            for name, page in found.pages.items():
                if page.lost and name in places:
                    sent += block("lost", {"node": name})
            for name, record in rows:
                if not is_first:
                    places[name] = Place(found.pages[name].place.run, record.sequence)
                # Every event has an id, so that a client that resumes gets no record twice.
                sent += (line_of(_format(places)) if not is_first else b"") + _event(record.line)
            places |= {name: page.place for name, page in found.pages.items()}
            if is_first and rows:
                sent += line_of(_format(places)) + b"\n"
            is_first = False
            if not sent and loop.time() - last_s >= SIGN_OF_LIFE_S:
                sent = SIGN_OF_LIFE + line_of(_format(places)) + b"\n"
            if sent:
                yield sent
                last_s = loop.time()
            if not any(page.rest for page in found.pages.values()):
                await asyncio.sleep(LOOK_S)


def _event(line: bytes) -> bytes:
    return b"event: record\ndata: %b\n\n" % line


def _read_level(text: str | None) -> int:
    if text is None:
        return logging.INFO
    if text.lower() not in LEVELS:
        raise BadRequest(f"there is no level {text!r:.60}", f"there are: {', '.join(LEVELS)}")
    return logging.getLevelNamesMapping()[text.upper()]


def _read_invocation(text: str | None) -> str:
    return "" if text is None else format_id(read_id(text))


def _format(places: Mapping[str, Place]) -> str:
    return ",".join(f"{name}:{place.run}:{place.sequence}" for name, place in sorted(places.items())) or NOWHERE


def _read_places(text: str | None) -> dict[str, Place] | None:
    """None: from the newest records on."""
    if text is None or text == NOWHERE:
        return None
    try:
        if len(text) > ID_BYTES_MAX:
            raise ValueError
        rows = [each.split(":") for each in text.split(",")]
        return {name: Place(int(run[:20]), int(sequence[:20])) for name, run, sequence in rows}
    except ValueError:
        raise BadRequest(
            f"{text!r:.80} is not the id of an event", "send the id of the last event unchanged, or none"
        ) from None
