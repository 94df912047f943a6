"""Logs of handlers as JSON: each record says which invocation, attempt and step it belongs to."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.sdk import Context, Service
from holdfast.sdk.ids import parse_id
from holdfast.sdk.logs import InvocationFilter, JsonFormatter, configure
from holdfast.sdk.trace_context import read_parent, step_span
from tests.sdk.fake_node import FakeNode

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """What the logger `shop` and those of services write, as JSON."""
    found: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(json.loads(self.format(record)))

    handler = Keep()
    handler.addFilter(InvocationFilter())
    handler.setFormatter(JsonFormatter("n1"))
    loggers = [logging.getLogger(name) for name in ("shop", "holdfast.service")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield found
    for logger in loggers:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def test_records_of_a_handler_say_where_they_belong_even_if_a_library_writes_them(lines: list[dict[str, Any]]) -> None:
    service = Service("shop")
    library = logging.getLogger("shop.library")

    @service.handler
    async def buy(ctx: Context) -> None:
        ctx.log.info("begins", extra={"price": 12})
        library.info("in the handler")
        await ctx.run("charge", lambda: library.info("in the step"))

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("shop", "buy", headers={"traceparent": TRACEPARENT, "tracestate": "holdfast=1"})
        await node.result(invocation)

    asyncio.run(main())

    begins, handler, step = lines
    assert begins["message"] == "begins" and begins["price"] == 12 and begins["logger"] == "holdfast.service.shop"
    for line in lines:
        assert line["invocation"] == begins["invocation"] and line["invocation"].startswith("inv_")
        assert (line["service"], line["handler"], line["attempt"], line["trace_id"]) == ("shop", "buy", 1, TRACE)
        assert (line["level"], line["node"]) == ("info", "n1") and line["time"].endswith("Z")
    assert "step" not in handler and step["step"] == "charge"
    assert step["span_id"] == step_span(parse_id(step["invocation"]), "charge") and "span_id" not in handler


def test_records_from_elsewhere_have_no_invocation(lines: list[dict[str, Any]]) -> None:
    logging.getLogger("shop").warning("%s %d", "text", 7)

    (line,) = lines
    assert {*line} == {"time", "level", "logger", "message", "node"} and line["message"] == "text 7"


def test_any_record_is_one_line_of_json() -> None:
    formatter = JsonFormatter()
    record = logging.makeLogRecord({"name": "a", "levelname": "ERROR", "msg": "one\ntwo \ud800" + "x" * 100_000})
    record.number, record.nan, record.thing, record.level = 1, float("nan"), object(), "mine"
    try:
        raise ValueError("why")
    except ValueError:
        record.exc_info = sys.exc_info()

    text = formatter.format(record)

    line = json.loads(text)
    assert "\n" not in text and len(text) < 40_000 and line["message"].endswith("characters)")
    assert (line["level"], line["level_"], line["number"], line["nan"]) == ("error", "mine", 1, "nan")
    assert line["error"].startswith("Traceback") and "ValueError: why" in line["error"]
    text.encode()


def test_a_wrong_format_or_level_is_an_error_that_says_what_there_is() -> None:
    with pytest.raises(ValueError, match="there are text, json"):
        configure(format="xml", stream=io.StringIO())
    with pytest.raises(ValueError, match="there are debug, info, warning, error"):
        configure(level="loud", stream=io.StringIO())


@pytest.mark.parametrize(("variable", "value"), [("HOLDFAST_LOG_FORMAT", "xml"), ("HOLDFAST_LOG_LEVEL", "loud")])
def test_the_process_of_handlers_refuses_wrong_variables(variable: str, value: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast.sdk", "examples.hello:app"],
        env={variable: value, "PATH": ""},
        capture_output=True,
        text=True,
    )

    assert ended.returncode == 1 and value in ended.stderr and "there are" in ended.stderr


@pytest.mark.parametrize(
    ("header", "valid"),
    [
        (TRACEPARENT, True),
        (TRACEPARENT[:-2] + "00", True),
        ("01" + TRACEPARENT[2:] + "-more", True),  # A later version may say more.
        (TRACEPARENT + "-more", False),
        ("ff" + TRACEPARENT[2:], False),
        (TRACEPARENT.upper(), False),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        ("", False),
        ("nonsense", False),
    ],
)
def test_only_a_valid_traceparent_counts(header: str, valid: bool) -> None:
    assert (read_parent({"traceparent": header}) is not None) == valid
