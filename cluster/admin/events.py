"""`GET /events`: changes as they happen, as server-sent events.

https://html.spec.whatwg.org/multipage/server-sent-events.html is the format. A block that has only an id moves the place at
which a client resumes, and is no event: so it comes with a sign of life, and a client that watches little does not fall
behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from holdfast.cluster.admin.parameters import AdminRequest, Parameters, read_statuses
from holdfast.cluster.admin.shapes.webhooks import Hello, Notice
from holdfast.cluster.errors import BadRequest
from holdfast.cluster.events.feed import INVOCATION, KINDS, RESET, Event, Feed, Reader
from holdfast.cluster.events.positions import BadPositions
from holdfast.cluster.http.event_stream import EVENT_STREAM, RETRY, SIGN_OF_LIFE, SIGN_OF_LIFE_S, block, line_of
from holdfast.cluster.http.exchange import Answer
from holdfast.cluster.http.streams import Stream
from holdfast.cluster.partition import views
from holdfast.cluster.partition.changes import Change
from holdfast.cluster.partition.views import show_change
from holdfast.sdk.ids import BadId, parse_id

_Test = Callable[[Change], bool]


class EventAdmin:
    def __init__(self, node: str, feed: Feed) -> None:
        self._node = node
        self._feed = feed

    async def on_events(self, request: AdminRequest) -> Answer:
        parameters = Parameters(request, "kinds", "service", "handler", "key", "id", "status", "after")
        kinds = {*_read_kinds(parameters.text("kinds")), RESET}
        tests = _read_filter(parameters)
        # A browser repeats the URL of its first request, with the newest id in the header.
        after = request.request.headers.get("Last-Event-ID") or parameters.text("after")
        try:
            if after is not None:
                self._feed.check(after)
        except BadPositions:
            raise BadRequest(
                f"{after!r:.80} is not the id of an event", "send the id of the last event unchanged, or none"
            ) from None
        return Answer(200, b"", EVENT_STREAM, stream=Stream(self._stream(after, kinds, tests)))

    async def _stream(self, after: str | None, kinds: set[str], tests: Sequence[_Test]) -> AsyncIterator[bytes]:
        reader = await self._feed.open(after)
        loop = asyncio.get_running_loop()
        try:
            hello: Hello = {"node": self._node, "resumed": reader.resumes}
            yield RETRY + block("hello", hello, self._id_of(reader))
            last_s = loop.time()
            while True:
                events = await reader.read(max(last_s + SIGN_OF_LIFE_S - loop.time(), 0.0))
                sent = b"".join([self._text(each) for each in events if each.kind in kinds and _passes(each, tests)])
                if not sent and loop.time() - last_s >= SIGN_OF_LIFE_S:
                    sent = SIGN_OF_LIFE + line_of(self._id_of(reader)) + b"\n"
                if sent:
                    yield sent
                    last_s = loop.time()
        finally:
            self._feed.close(reader)

    def _id_of(self, reader: Reader) -> str | None:
        return reader.id if self._feed.is_resumable else None

    def _text(self, event: Event) -> bytes:
        """One event for all readers: it is encoded once."""
        if event.text is None:
            event.text = block(event.kind, _show(event), event.id if self._feed.is_resumable else None)
        return event.text


def _read_kinds(text: str | None) -> Sequence[str]:
    if text is None:
        return KINDS
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in KINDS:
            raise BadRequest(f"there is no kind of event {name!r:.60}", f"there are: {', '.join(KINDS)}")
    return names


def _read_filter(parameters: Parameters) -> list[_Test]:
    """What an invocation must be."""
    tests: list[_Test] = []
    service, handler, key = (parameters.text(name) for name in ("service", "handler", "key"))
    if service is not None:
        tests.append(lambda change: change.service == service)
    if handler is not None:
        tests.append(lambda change: change.handler == handler)
    if key is not None:
        tests.append(lambda change: change.key == key)
    if (text := parameters.text("id")) is not None:
        try:
            id_ = parse_id(text)
        except BadId as error:
            raise BadRequest(
                str(error), "it is in the header x-holdfast-id of every answer about an invocation"
            ) from None
        tests.append(lambda change: change.id == id_)
    if (statuses := read_statuses(parameters.text("status"))) is not None:
        wanted = frozenset(statuses)
        tests.append(lambda change: change.shown_status in wanted)
    return tests


def _passes(event: Event, tests: Sequence[_Test]) -> bool:
    change = event.change
    return change is None or all(test(change) for test in tests)


def _show(event: Event) -> views.Event | Notice:
    if event.change is not None:
        assert event.kind == INVOCATION, "only invocations change"
        return show_change(event.change)
    return {"reason": event.reason} if event.reason else {}
