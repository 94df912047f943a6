"""Traces: one span per invocation, attempt and step, whatever happens to the process of the handlers."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from holdfast.cluster import traces
from holdfast.cluster.config import BadConfig, load
from holdfast.cluster.spans import in_share
from holdfast.cluster.traces import Tracer
from holdfast.sdk.ids import InvocationId, parse_id
from holdfast.sdk.trace_context import (
    attempt_span,
    invocation_span,
    is_exported,
    marked,
    read_parent,
    step_span,
    trace_id_for,
)
from tests.cluster.harness import PATIENCE_S, eventually
from tests.cluster.serving import Serving, serving
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """An OTLP receiver: keeps every span it is sent."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        self.status = 200
        self.requests = 0

    async def take(self, request: web.Request) -> web.Response:
        self.requests += 1
        body = await request.read()
        if self.status != 200:
            return web.Response(status=self.status)
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append({each.key: each.value.string_value for each in of_resource.resource.attributes})
            for of_scope in of_resource.scope_spans:
                self.spans += of_scope.spans
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )

    def named(self, name: str) -> Span:
        (found,) = (span for span in self.spans if span.name == name)
        return found


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    made = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", made.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    try:
        yield made, f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


class Handlers:
    """The process of `traced_handlers`, started again whenever it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (self.port,) = free_ports(1)
        self.starts = 0
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        environment = {**os.environ, "TRACED_FOLDER": str(self.folder), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "holdfast.sdk", "tests.cluster.traced_handlers:app", "--port", str(self.port)]
        while True:
            process = await asyncio.create_subprocess_exec(*command, env=environment, cwd=ROOT)
            self.starts += 1
            try:
                await process.wait()
            except asyncio.CancelledError:
                process.terminate()
                await process.wait()
                raise

    async def register(self, at: Serving) -> None:
        while (await at.admin("POST", "/deployments", json={"uri": f"http://127.0.0.1:{self.port}"}))[0] != 201:
            await asyncio.sleep(0.05)  # It still starts.

    def ran(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "ran.jsonl").read_text().splitlines()]

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def traced(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Serving, Handlers, Collector]]:
    async with collector() as (received, url), serving(tmp_path, register=False, traces=url, **settings) as at:
        handlers = Handlers(tmp_path)
        try:
            await handlers.register(at)
            yield at, handlers, received
        finally:
            await handlers.stop()


async def test_each_step_is_one_span_although_its_process_was_killed(tmp_path: Path) -> None:
    async with traced(tmp_path) as (at, handlers, received):
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=x"}
        async with asyncio.timeout(PATIENCE_S):
            assert await at.call("trips/book", b'"Lisbon"', headers=headers) == (200, "booked Lisbon")
        await eventually(lambda: {"trips/book", "mail/write"} <= {span.name for span in received.spans})
        await asyncio.sleep(2 * traces.FLUSH_S)  # Nothing comes twice.

        counts = Counter(span.span_id.hex() for span in received.spans)
        assert handlers.starts == 2 and {*counts.values()} == {1}
        assert {span.trace_id.hex() for span in received.spans} == {TRACE}
        book, mail = received.named("trips/book"), received.named("mail/write")
        assert book.parent_span_id.hex() == CALLER and book.kind == Span.SPAN_KIND_SERVER
        id_ = parse_id(attribute(book, "holdfast.invocation.id"))
        assert book.span_id.hex() == invocation_span(id_)
        steps = {
            attribute(span, "holdfast.step.key"): span for span in received.spans if has(span, "holdfast.step.key")
        }
        assert {*steps} == {"flight", "hotel", "charge", "sleep", "mail/write", "send"}
        for key in ("flight", "hotel", "charge", "sleep", "mail/write"):
            assert steps[key].span_id.hex() == step_span(id_, key)
        first, second = (attempt_span(id_, epoch) for epoch in (1, 2))
        assert [steps[key].parent_span_id.hex() for key in ("flight", "charge")] == [first, second]
        assert steps["sleep"].end_time_unix_nano - steps["sleep"].start_time_unix_nano >= 20_000_000
        assert mail.parent_span_id == steps["mail/write"].span_id, "what is called is a child of the step"
        assert "ProcessLost" in next(span for span in received.spans if span.span_id.hex() == first).status.message
        assert received.resources[0]["service.instance.id"] == at.node.config.node
        # What libraries do in a step belongs to its span. `charge` ran twice, under one id; no other step did.
        ran = handlers.ran()
        assert [line["step"] for line in ran] == ["flight", "hotel", "charge", "charge", "to Lisbon"]
        for line in ran[:4]:
            assert line["span"] == step_span(id_, line["step"]) and line["span"] in line["header"]


def attribute(span: Span, name: str) -> Any:
    (found,) = (each.value for each in span.attributes if each.key == name)
    return getattr(found, found.WhichOneof("value"))


def has(span: Span, name: str) -> bool:
    return any(each.key == name for each in span.attributes)


async def test_a_failure_is_the_status_of_its_spans_and_no_payload_leaves(tmp_path: Path) -> None:
    async with traced(tmp_path) as (at, _, received):
        status, _ = await at.call("trips/refuse", b"")
        assert status == 409
        await eventually(lambda: len(received.spans) == 3)

        refuse = received.named("trips/refuse")
        assert refuse.status.code == Status.STATUS_CODE_ERROR and "no seats" in refuse.status.message
        assert not refuse.parent_span_id, "nobody called it: it is the root of its own trace"
        id_ = parse_id(attribute(refuse, "holdfast.invocation.id"))
        assert refuse.trace_id.hex() == trace_id_for(id_)
        assert received.named("run look").parent_span_id.hex() == attempt_span(id_, 1)
        assert b"look" not in b"".join(
            each.value.string_value.encode() for each in received.named("trips/refuse").attributes
        )
        tracer = at.node.ground.tracer
        await eventually(lambda: tracer is not None and tracer.exported == 3)
        status, body = await at.admin("GET", "/metrics")
        assert b"holdfast_traces_spans_total 3.0" in body


async def test_a_caller_who_is_not_traced_gets_no_spans(tmp_path: Path) -> None:
    async with traced(tmp_path) as (at, handlers, received):
        await at.call("trips/refuse", b"", headers={"traceparent": f"00-{TRACE}-{CALLER}-00"})
        await at.call("trips/refuse", b"")
        await eventually(lambda: len(received.spans) == 3)

        assert TRACE not in {span.trace_id.hex() for span in received.spans}
        assert [line["header"] is None for line in handlers.ran()] == [True, False]


async def test_without_the_setting_nothing_is_traced(tmp_path: Path) -> None:
    async with serving(tmp_path, register=False) as at:
        handlers = Handlers(tmp_path)
        try:
            await handlers.register(at)
            await at.call("trips/refuse", b"", headers={"traceparent": f"00-{TRACE}-{CALLER}-01"})

            assert at.node.ground.tracer is None
            (ran,) = handlers.ran()
            assert ran["header"] is None and ran["span"] == "0" * 16
        finally:
            await handlers.stop()


async def test_a_collector_that_is_down_costs_spans_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with traced(tmp_path) as (at, _, received):
        received.status = 400
        status, _ = await at.call("trips/refuse", b"")
        tracer = at.node.ground.tracer
        assert status == 409 and tracer is not None
        await eventually(lambda: tracer.dropped == 3)
        received.status = 200
        await at.call("trips/refuse", b"")

        await eventually(lambda: len(received.spans) == 3)
        assert "spans are lost" in caplog.text


async def test_what_waits_is_sent_when_the_node_stops(tmp_path: Path) -> None:
    async with traced(tmp_path) as (at, _, received):
        await at.call("trips/refuse", b"")
        await at.node.stop()

        assert len(received.spans) == 3


async def test_the_queue_of_spans_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(traces, "SPANS_MAX", 5)
    monkeypatch.setattr(traces, "FLUSH_S", 1000.0)
    async with traced(tmp_path) as (at, _, _):
        tracer: Tracer | None = at.node.ground.tracer
        assert tracer is not None
        for _ in range(4):
            await at.call("trips/refuse", b"")

        await eventually(lambda: (tracer.waiting, tracer.dropped) == (5, 7))


def test_shares_of_traces_are_the_same_on_every_node() -> None:
    ids = [trace_id_for(InvocationId(bytes([number, 7]) * 8)) for number in range(256)]

    assert all(in_share(each, 1.0) for each in ids) and not any(in_share(each, 0.0) for each in ids)
    assert 64 < sum(in_share(each, 0.5) for each in ids) < 192
    assert all(in_share(each, 0.7) for each in ids if in_share(each, 0.3))


def test_our_entry_of_tracestate_comes_first_and_once() -> None:
    assert marked("") == "holdfast=1" and marked("a=1, holdfast=0,b=2") == "holdfast=1,a=1,b=2"
    assert len(marked(",".join(f"vendor{number}=1" for number in range(99))).split(",")) == 32
    good = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    assert is_exported({**good, "tracestate": "a=1, holdfast=1"}) and not is_exported(
        {**good, "tracestate": "holdfast=10"}
    )
    assert not is_exported({"traceparent": f"00-{TRACE}-{CALLER}-00", "tracestate": "holdfast=1"})
    assert read_parent(good) == (TRACE, CALLER, True)


def test_the_settings_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    read = load(None, {"HOLDFAST_TRACES": "http://collector:4318/", "HOLDFAST_TRACES_RATIO": "0.1"})
    assert (read.traces, read.traces_ratio) == ("http://collector:4318", 0.1)
    for wrong in ({"HOLDFAST_TRACES": "collector"}, {"HOLDFAST_TRACES_RATIO": "2"}, {"HOLDFAST_TRACES_RATIO": "some"}):
        with pytest.raises(BadConfig):
            load(None, wrong)
    monkeypatch.setattr("holdfast.cluster.config.find_spec", lambda name: None)
    with pytest.raises(BadConfig, match=r"pip install 'holdfast\[otel\]'"):
        load(None, {"HOLDFAST_TRACES": "http://collector:4318"})
