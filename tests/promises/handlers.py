"""The handlers of the tests of the promises, in a process of their own. Each effect is a line in the oracle's file."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from holdfast.sdk import (
    Context,
    ObjectContext,
    RetryPolicy,
    Service,
    TerminalError,
    VirtualObject,
    Workflow,
    WorkflowContext,
    current_step,
    serve,
)

ORACLE: list[Path] = []
VERSION: list[str] = ["1"]


def effect(step: str, **more: Any) -> str:
    """One write of one line: it is complete or absent."""
    line = json.dumps({"step": step, "pid": os.getpid(), "at": time.time(), **more}) + "\n"
    fd = os.open(ORACLE[0], os.O_WRONLY | os.O_APPEND)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)
    return step


def gated(step: str, gate: str, mark: str) -> str:
    """Begins, then waits for a file: the test decides when, and which process is killed in the meantime."""
    effect(f"{step} begins", mark=mark)
    while not os.path.exists(gate):
        time.sleep(0.01)
    return effect(step, mark=mark)


three = Service("three")


@three.handler
async def run(ctx: Context, given: dict[str, str]) -> list[str]:
    """Three steps; the last one waits for its gate."""
    mark = given["mark"]
    one = await ctx.run("one", lambda: effect("one", mark=mark))
    two = await ctx.run("two", lambda: effect("two", mark=mark))
    last = await ctx.run("three", gated, "three", given["gate"], mark)
    return [one, two, last]


@three.handler
async def quick(ctx: Context, mark: str) -> list[str]:
    return [await ctx.run(step, effect_of(step, mark)) for step in ("one", "two", "three")]


def effect_of(step: str, mark: str) -> Any:
    return lambda: effect(step, mark=mark, key=current_step().effect_key)


@three.handler
async def branches(ctx: Context, given: dict[str, Any]) -> list[str]:
    """Ten at once; each waits for its own gate."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(branch(ctx, number, f"{given['gate']}-{number}", given["mark"])) for number in range(10)
        ]
    return [task.result() for task in tasks]


async def branch(ctx: Context, number: int, gate: str, mark: str) -> str:
    return await ctx.run(f"branch {number}", gated, f"branch {number}", gate, mark)


@three.handler
async def maze(ctx: Context, number: int) -> list[str]:
    """Loops, conditions, exceptions, generators and tasks around steps."""
    path: list[str] = []
    for turn in range(3):
        try:
            await ctx.run("maybe", stumble, number + turn)
        except TerminalError:
            path.append(f"caught {turn}")
        sides = [ctx.run(f"side {side}", "{}.{}".format, turn, side) for side in range(2 + number % 2)]
        path += await asyncio.gather(*sides)
        await ctx.sleep(0.01)
    total = 0
    async for value in numbers(ctx):
        total += value
    return [*path, f"sum {total}"]


def stumble(number: int) -> None:
    if number % 3 == 0:
        raise TerminalError("stumbled")


async def numbers(ctx: Context) -> AsyncIterator[int]:
    for number in range(5):
        yield await ctx.run("number", abs, number)


failing = Service("failing")


@failing.handler
async def run_fails(ctx: Context, given: dict[str, Any]) -> str:
    """A step that fails until it was tried often enough; the policy gives up before or after."""

    def attempt() -> str:
        effect("try", mark=given["mark"])
        tried = sum(given["mark"] in line and '"try"' in line for line in ORACLE[0].read_text().splitlines())
        if tried < given["succeeds"]:
            raise ConnectionError(f"try {tried}")
        return f"worked at try {tried}"

    policy = RetryPolicy(initial=given.get("initial", 0.05), factor=1.0, max_attempts=given["attempts"])
    return await ctx.run("try", attempt, retry=policy)


@failing.handler
async def terminal(ctx: Context, mark: str) -> None:
    effect("terminal", mark=mark)
    raise TerminalError("no seats", code=409)


@failing.handler
async def crashes(ctx: Context, given: dict[str, Any]) -> str:
    """The handler itself fails, not one of its steps."""
    effect("attempt", mark=given["mark"])
    tried = sum(given["mark"] in line and '"attempt"' in line for line in ORACLE[0].read_text().splitlines())
    if tried < given["succeeds"]:
        raise RuntimeError(f"attempt {tried}")
    return f"worked at attempt {tried}"


counter = VirtualObject("counter")


@counter.handler
async def add(ctx: ObjectContext, mark: str) -> int:
    """Between enter and leave, no other invocation of this key may run."""
    await ctx.run("enter", lambda: effect("enter", mark=mark, key=ctx.key, id=ctx.invocation_id))
    count = (await ctx.get("count", int) or 0) + 1
    ctx.set("count", count)
    await ctx.run("leave", lambda: effect("leave", mark=mark, key=ctx.key, id=ctx.invocation_id))
    return count


@counter.handler(shared=True)
async def read(ctx: ObjectContext) -> int:
    return await ctx.get("count", int) or 0


@counter.handler
async def hold(ctx: ObjectContext, given: dict[str, str]) -> int:
    """Reads, waits at its gate, then writes: like a zombie that writes too late."""
    count = await ctx.get("count", int) or 0
    await ctx.run("hold", gated, "hold", given["gate"], given["mark"])
    ctx.set("count", count + 1)
    return count + 1


waiting = Workflow("waiting")


@waiting.main
async def approval(ctx: WorkflowContext, seconds: float) -> str:
    begun = ctx.now()
    match await ctx.select(yes=ctx.promise("yes", str), late=ctx.sleep(seconds)):
        case ("yes", who):
            return f"approved by {who}"
        case _:
            await ctx.run("late", lambda: effect("late", mark=ctx.key, waited=time.time() - begun.timestamp()))
            return "late"


refunds = Service("refunds")


@refunds.handler
async def refund(ctx: Context, given: dict[str, Any]) -> str:
    """Asks people, but not for longer than this. Then the code goes on without them, until its gate opens."""
    mark = given["mark"]
    decision = await ctx.race(
        ctx.approval(f"Refund {mark}?", {"eur": 240}, assignee="finance"), ctx.sleep(given["seconds"])
    )
    if decision is None:
        return await ctx.run("late", gated, "late", given["gate"], mark)
    await ctx.run("refund", lambda: effect("refund", mark=mark, eur=decision.payload["eur"]))
    return f"{decision.choice} by {decision.by}"


@refunds.handler
async def expires(ctx: Context, given: dict[str, Any]) -> list[Any]:
    begun = ctx.now()
    decision = await ctx.approval(f"Refund {given['mark']}?", timeout=given["seconds"])
    return [decision.choice, decision.approved, decision.timed_out, (decision.decided_at - begun).total_seconds()]


versions = VirtualObject("versions")


@versions.handler
async def wait(ctx: ObjectContext) -> list[str]:
    """Reports which code ran before and after a wait."""
    before = VERSION[0]
    recorded = await ctx.run("before", lambda: VERSION[0])
    awakeable = ctx.awakeable(str)
    await ctx.run("publish", lambda: effect("waits", mark=ctx.key, awakeable=awakeable.id))
    await awakeable.future
    return [recorded, before, VERSION[0]]


@versions.handler(shared=True)
async def current(ctx: ObjectContext) -> str:
    return VERSION[0]


neighbours = Service("neighbours")


@neighbours.handler
async def end_process(ctx: Context, given: dict[str, str]) -> None:
    """Like an operating system that kills a process for its memory use."""
    mark = given["mark"]
    await ctx.run("before", lambda: effect("before", mark=mark))

    def end() -> None:
        effect("end", mark=mark)
        os._exit(137)

    await ctx.run("end", end)


@neighbours.handler
async def block(ctx: Context, given: dict[str, Any]) -> str:
    """Like code that blocks instead of awaiting."""
    await ctx.run("before", lambda: effect("before", mark=given["mark"]))
    time.sleep(given["seconds"])
    return "done"


@neighbours.handler
async def take_time(ctx: Context, given: dict[str, Any]) -> str:
    def slow() -> str:
        effect("slow begins", mark=given["mark"])
        time.sleep(given["seconds"])
        return effect("slow", mark=given["mark"])

    return await ctx.run("slow", slow)


SERVICES = [three, failing, counter, waiting, refunds, versions, neighbours]

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--oracle", type=Path, required=True)
    parser.add_argument("--version", default="1")
    options = parser.parse_args()
    ORACLE.append(options.oracle)
    VERSION[0] = options.version
    serve(SERVICES, port=options.port)
