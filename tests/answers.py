"""Compares every answer of a node in the process of the tests with the schema of its route and status.

The `conftest.py` of tests/cluster and tests/cli turn it on. It looks at both doors: at the bodies of answers, at
the events of streams, and at the bodies of requests that were accepted. Schemas are closed here: a field that is not described
is an error, as one that is missing or has the wrong type. So no schema can be wrong for long.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import cache
from typing import Any, Final, is_typeddict

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from holdfast.cluster.admin.app import Admin
from holdfast.cluster.admin.routes import ROUTES as ADMIN_ROUTES
from holdfast.cluster.errors import Circumstance, Error
from holdfast.cluster.http.exchange import JSON, Answer, Body, Exchange, split_target
from holdfast.cluster.http.routes import EventStream, Raw, Route, match, shape_of, shapes_of
from holdfast.cluster.ingress.ingress import Ingress
from holdfast.cluster.ingress.routes import ROUTES as INGRESS_ROUTES
from holdfast.cluster.ingress.shapes import Accepted
from holdfast.cluster.schemas import REFERENCE, Components, schema_of

TABLES: Final = {"admin": ADMIN_ROUTES, "ingress": INGRESS_ROUTES}
WRITTEN_MAX: Final = 1500  # characters of a wrong body that a failure shows


def is_time(value: object) -> bool:
    return not isinstance(value, str) or (len(value) == 24 and value[10] == "T" and value.endswith("Z"))


_FORMATS: Final = FormatChecker([])
_FORMATS.checks("date-time")(is_time)


class Answers:
    """What was wrong with answers, until somebody asks."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.checked = 0
        self._fine: set[int] = set()  # Hashes: most bodies are asked for many times.

    def check(self, route: Route | None, method: str, target: str, answer: Answer) -> Answer:
        where = f"{method} {target:.200} {answer.status}"
        if answer.stream is not None:
            described = shapes_for(route, answer.status) or ()
            events = next((each for each in described if isinstance(each, EventStream)), None)
            if events is None:
                self.wrong.append(f"{where}: the route describes no stream of events")
                return answer
            answer.stream.chunks = self._watched(answer.stream.chunks, events, where)
            return answer
        if answer.status >= 400:
            self._compare(answer.body, Error, where)
        elif route is None:
            if answer.status == 202:
                self._compare(answer.body, Accepted, where)
        else:
            shapes = shapes_for(route, answer.status)
            if shapes is None:
                self.wrong.append(f"{where}: the route of {route.name!r} does not describe this status")
            else:
                self._compare_with_any(answer, shapes, where)
        return answer

    def check_request(self, route: Route, body: bytes, what: str) -> None:
        """One that was accepted. `body`: as much as was read."""
        if is_typeddict(route.body):
            self._compare(body, route.body, f"the body of {what}")
        elif body:
            self.wrong.append(f"the body of {what} was read, but its route has no `body`")

    def _compare_with_any(self, answer: Answer, shapes: tuple[Any, ...], where: str) -> None:
        raw = {each.content_type for each in shapes if isinstance(each, Raw)}
        kind = answer.content_type.partition(";")[0]
        if "*/*" in raw or kind in raw or answer.status in (204, 304):
            return
        if None in shapes:
            return  # To HEAD: the server leaves the body out.
        typed = [each for each in shapes if not isinstance(each, Raw | EventStream)]
        if kind != JSON or not typed:
            self.wrong.append(f"{where}: {kind} is not described")
            return
        found = [errors_in(answer.body, each) for each in typed]
        if all(found):
            self._report(where, answer.body, found[0])
        self.checked += 1

    def _compare(self, body: bytes, shape: Any, where: str) -> None:
        known = hash((body, shape.__name__))
        if known in self._fine:
            return
        self.checked += 1
        if found := errors_in(body, shape):
            self._report(f"{where} ({shape.__name__})", body, found)
        else:
            self._fine.add(known)

    def _report(self, where: str, body: bytes, errors: list[str]) -> None:
        self.wrong.append(f"{where}: {'; '.join(errors[:5])}\n    {body.decode(errors='replace'):.{WRITTEN_MAX}}")

    async def _watched(self, chunks: AsyncIterator[bytes], events: EventStream, where: str) -> AsyncIterator[bytes]:
        assert isinstance(chunks, AsyncGenerator)
        async with aclosing(chunks):
            async for chunk in chunks:
                for block in chunk.decode().split("\n\n"):
                    self._check_event(block, events, where)
                yield chunk

    def _check_event(self, block: str, events: EventStream, where: str) -> None:
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if "event" not in lines:
            return
        shape = events.events.get(lines["event"])
        if shape is None:
            self.wrong.append(f"{where}: the event {lines['event']!r} is not described")
        else:
            self._compare(lines["data"].encode(), shape, f"{where}, event {lines['event']}")


class Recorded:
    """The body of a request, and what was read of it."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self.length = body.length
        self.content = b""

    def whole(self) -> bytes | None:
        found = self._body.whole()
        self.content += found or b""
        return found

    async def chunks(self) -> AsyncIterator[bytes]:
        async for chunk in self._body.chunks():
            self.content += chunk
            yield chunk


def route_of(source: str, method: str, target: str) -> Route | None:
    try:
        segments = split_target(target)[0]
    except Circumstance:
        return None
    return next(
        (each for each in TABLES[source] if each.method == method and match(each, segments) is not None),
        None,
    )


def shapes_for(route: Route | None, status: int) -> tuple[Any, ...] | None:
    """None: the route does not describe this status."""
    if route is None:
        return None
    found = next((reply for reply in route.answers if reply[0] == status), None)
    return shapes_of(shape_of(found)) if found is not None else None


def errors_in(body: bytes, shape: Any) -> list[str]:
    try:
        value = json.loads(body)
    except ValueError as error:
        return [f"it is not JSON: {error}"]
    return [f"{error.json_path}: {error.message:.300}" for error in validator_of(shape).iter_errors(value)]


@cache
def validator_of(shape: Any) -> Draft202012Validator:
    components = Components()
    reference = schema_of(shape, components)
    for component in components.values():
        component["additionalProperties"] = False
    closed = {"$defs": components, **reference}
    text = json.dumps(closed).replace(REFERENCE, "#/$defs/")
    return Draft202012Validator(json.loads(text), format_checker=_FORMATS)


@contextmanager
def checked() -> Iterator[Answers]:
    """All exchanges of this process are watched meanwhile."""
    found = Answers()
    original = Exchange.answer

    async def answer(
        self: Exchange, method: str, target: str, headers: Mapping[str, str], body: Body, *more: Any, **named: Any
    ) -> Answer:
        if not isinstance(self.handler, Admin | Ingress):  # It is one of a test.
            return await original(self, method, target, headers, body, *more, **named)
        route = route_of(self.source, method, target)
        if self.source != "admin":
            return found.check(
                route, method, target, await original(self, method, target, headers, body, *more, **named)
            )
        recorded = Recorded(body)
        given = await original(self, method, target, headers, recorded, *more, **named)
        if route is not None and given.status < 300:
            found.check_request(route, recorded.content, f"{method} {target:.200}")
        return found.check(route, method, target, given)

    Exchange.answer = answer  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Exchange.answer = original  # type: ignore[method-assign]


@pytest.fixture(autouse=True, scope="session")
def watched_answers() -> Iterator[Answers]:
    with checked() as answers:
        yield answers


@pytest.fixture(autouse=True)
def answers(watched_answers: Answers) -> Iterator[Answers]:
    """Every answer of a node in this process, compared with its schema."""
    yield watched_answers
    wrong, watched_answers.wrong = watched_answers.wrong, []
    assert not wrong, "answers differ from their schemas:\n" + "\n".join(wrong)
