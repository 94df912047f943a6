"""Exports the spans of completed invocations to an OpenTelemetry collector: OTLP over HTTP, from a thread.

Each leader exports what completes in its partitions, from the journal, at once: so a handler process that is killed loses no
span. What is not sent yet when a node is killed is lost, as with any exporter. Everything is bounded; what does not fit is
dropped and counted, and never delays an invocation.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import urlsplit

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from holdfast import __version__
from holdfast.cluster import spans
from holdfast.cluster.spans import Span
from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import unpack_step
from holdfast.statemachine import history, queries
from holdfast.statemachine.txn import ReadTxn

logger = logging.getLogger(__name__)

BATCH: Final = 512  # Spans per request.
FLUSH_S: Final = 1.0
SPANS_MAX: Final = 20_000  # That wait to be sent.
COMPLETED_MAX: Final = 10_000  # Invocations that wait to be read.
STEPS_MAX: Final = 2000  # Of one invocation; the first ones.
SLICE: Final = 200  # Steps read per turn of the event loop.
SEND_S: Final = 10.0
STOP_S: Final = 2.0
WARN_S: Final = 60.0
PATH: Final = "/v1/traces"


class HasState(Protocol):
    def read(self) -> AbstractContextManager[ReadTxn]: ...


Send: TypeAlias = Callable[[Sequence[Span]], bool]


class Tracer:
    """One per node that has a collector."""

    def __init__(self, send: Send, *, ratio: float, now_s: Callable[[], float]) -> None:
        """`send` is called in a thread, and says whether the collector has the spans."""
        self._send = send
        self.ratio = ratio
        self._now_s = now_s
        self._completed: deque[tuple[HasState, InvocationId]] = deque()
        self._spans: deque[Span] = deque()
        self._more = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._warned_s = -WARN_S
        self.exported = 0
        self.dropped = 0
        self.failures = 0

    @property
    def waiting(self) -> int:
        return len(self._spans)

    def start(self) -> None:
        self._tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._export())]

    def completed(self, state: HasState, invocation: InvocationId) -> None:
        """An invocation of a partition that this node leads has completed."""
        if len(self._completed) >= COMPLETED_MAX:
            self.dropped += 1
            return
        self._completed.append((state, invocation))
        self._more.set()

    async def stop(self) -> None:
        """Send what waits, for a moment."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(STOP_S):
                while self._completed:
                    await self._read_one(*self._completed.popleft())
                while self._spans:
                    await self._export_batch()
        except TimeoutError:
            self.dropped += len(self._spans)
            logger.warning("%d spans were not sent before the node stopped", len(self._spans))

    # -- reading -----------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            while self._completed:
                state, invocation = self._completed.popleft()
                try:
                    await self._read_one(state, invocation)
                except Exception:
                    self.dropped += 1
                    logger.exception("the spans of an invocation could not be made")
                await asyncio.sleep(0)

    async def _read_one(self, state: HasState, invocation: InvocationId) -> None:
        with state.read() as txn:
            record, outcome = queries.load(txn, invocation), queries.outcome(txn, invocation)
            if record is None or outcome is None:
                self.dropped += 1  # Its retention is over already.
                return
            ended = history.attempts(txn, invocation)
            steps = [unpack_step(raw) for raw in queries.journal(txn, invocation, 0, min(SLICE, record.length))]
        headers = steps[0].argument[0] if steps and steps[0].argument else {}
        if not spans.is_wanted(record, headers, self.ratio):
            return
        length = min(record.length, STEPS_MAX)
        while len(steps) < length:
            await asyncio.sleep(0)
            with state.read() as txn:
                found = queries.journal(txn, invocation, len(steps), min(SLICE, length - len(steps)))
            if not found:
                break
            steps += [unpack_step(raw) for raw in found]
        self._add(list(spans.of_invocation(record, steps, ended, outcome=outcome, dropped=record.length - len(steps))))

    def _add(self, made: list[Span]) -> None:
        room = max(SPANS_MAX - len(self._spans), 0)
        self._spans.extend(made[:room])
        self.dropped += len(made[room:])

    # -- sending -----------------------------------------------------------------------------------------------------

    async def _export(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S if len(self._spans) < BATCH else 0)
            while self._spans:
                await self._export_batch()

    async def _export_batch(self) -> None:
        batch = [self._spans.popleft() for _ in range(min(BATCH, len(self._spans)))]
        try:
            sent = await asyncio.to_thread(self._send, batch)
        except asyncio.CancelledError:
            self._spans.extendleft(reversed(batch))  # The node stops: they may arrive twice, under the same ids.
            raise
        except Exception as error:
            sent = False
            self._warn(f"{type(error).__name__}: {error}")
        if sent:
            self.exported += len(batch)
        else:
            self.failures += 1
            self.dropped += len(batch)
            self._warn("the collector did not accept them")

    def _warn(self, why: str) -> None:
        now = self._now_s()
        if now - self._warned_s >= WARN_S:
            self._warned_s = now
            logger.warning("spans are lost, %d so far: %s", self.dropped, why)


def open_collector(url: str, *, node: str, cluster: str) -> Send:
    """Sends spans to a collector. The setting was refused if the extra is not installed."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    kinds = {
        spans.CLIENT: SpanKind.CLIENT,
        spans.PRODUCER: SpanKind.PRODUCER,
        spans.SERVER: SpanKind.SERVER,
        spans.INTERNAL: SpanKind.INTERNAL,
    }
    resource = Resource.create(
        {
            "service.name": "holdfast",
            "service.namespace": cluster,
            "service.instance.id": node,
            "service.version": __version__,
        }
    )
    scope = InstrumentationScope("holdfast", __version__)
    parts = urlsplit(url)
    exporter = OTLPSpanExporter(endpoint=url if parts.path.strip("/") else url.rstrip("/") + PATH, timeout=SEND_S)

    def context(trace_id: str, span_id: str) -> SpanContext:
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=flags)

    def readable(span: Span) -> Any:
        return ReadableSpan(
            name=span.name,
            context=context(span.trace_id, span.span_id),
            parent=context(span.trace_id, span.parent_id) if span.parent_id else None,
            resource=resource,
            attributes=dict(span.attributes),
            kind=kinds[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error is not None else Status(StatusCode.OK),
            start_time=span.start_ms * 1_000_000,
            end_time=max(span.end_ms, span.start_ms) * 1_000_000,
            instrumentation_scope=scope,
        )

    def send(batch: Sequence[Span]) -> bool:
        return bool(exporter.export([readable(span) for span in batch]) == SpanExportResult.SUCCESS)

    return send


def of_traces(tracer: Tracer | None) -> Iterator[Metric]:
    exported = tracer.exported if tracer is not None else 0
    dropped = tracer.dropped if tracer is not None else 0
    yield CounterMetricFamily("holdfast_traces_spans", "Spans that the collector accepted.", exported)
    yield CounterMetricFamily(
        "holdfast_traces_dropped", "Spans that were lost: too many, or not accepted by the collector.", dropped
    )
    yield GaugeMetricFamily(
        "holdfast_traces_waiting", "Spans that wait to be sent.", tracer.waiting if tracer is not None else 0
    )
