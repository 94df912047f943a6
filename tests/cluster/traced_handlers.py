"""Handlers of the tests of tracing: a process of their own, which a test kills in the middle."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from pathlib import Path

from opentelemetry import trace

from holdfast.sdk import Context, Service, TerminalError, current_step

FOLDER = Path(os.environ.get("TRACED_FOLDER", "."))

trips = Service("trips")
mail = Service("mail")


def note(step: str) -> str:
    """Write down that the function ran, and which span was the current one."""
    context = trace.get_current_span().get_span_context()
    line = {
        "step": step,
        "span": f"{context.span_id:016x}",
        "header": current_step().traceparent,
        "process": os.getpid(),
    }
    with (FOLDER / "ran.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    return step


def charge() -> str:
    """Ends the process the first time, as kill -9 does."""
    note("charge")
    if not (FOLDER / "killed").exists():
        (FOLDER / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "charged"


@trips.handler
async def book(ctx: Context, to: str) -> str:
    await ctx.run("flight", note, "flight")
    await ctx.run("hotel", note, "hotel")
    await ctx.run("charge", charge)
    await ctx.sleep(timedelta(milliseconds=20))
    await ctx.call("mail/write", to)
    return f"booked {to}"


@trips.handler
async def refuse(ctx: Context) -> None:
    await ctx.run("look", note, "look")
    raise TerminalError("no seats", code=409)


@mail.handler
async def write(ctx: Context, to: str) -> str:
    return await ctx.run("send", note, f"to {to}")


app = [trips, mail]
