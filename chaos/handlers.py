"""The services of a chaos run. Every step reports to the oracle; each service tests one promise.

    python -m holdfast.chaos.handlers --host 127.0.0.1 --port 9080 --oracle FILE --offer flow,approval

A step returns a new random value each time it runs, so a result shows which run of the step the journal kept.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from holdfast.chaos.oracle import Oracle
from holdfast.sdk import (
    Context,
    ObjectContext,
    Service,
    VirtualObject,
    Workflow,
    WorkflowContext,
    current_step,
    serve,
)

_oracle: list[Oracle] = []

#: How long a step takes after its effect: long enough to be killed in the middle of it.
STEP_S: Final = 0.002


def step_of(
    ctx: Context, work: str, mark: str, number: int, key: str | None = None
) -> Callable[[], Coroutine[Any, Any, str]]:
    """A step: its effect first, then some time in which its result is not journaled yet."""

    async def step() -> str:
        now = current_step()
        nonce = _oracle[0].tell(
            mark=mark,
            work=work,
            invocation=now.invocation_id,
            step=now.key,
            number=number,
            attempt=ctx.attempt,
            key=key,
        )
        await asyncio.sleep(STEP_S)
        return nonce

    return step


flow = Service("flow")


@flow.handler
async def three(ctx: Context, mark: str) -> list[str]:
    """Three steps, one after the other."""
    return [await ctx.run(name, step_of(ctx, "flow", mark, at)) for at, name in enumerate(("one", "two", "three"))]


counter = VirtualObject("counter")


@counter.handler
async def add(ctx: ObjectContext, mark: str) -> int:
    """Reads, then writes, exclusively: between its first and last effect no other handler of this key may run."""
    await ctx.run("enter", step_of(ctx, "counter", mark, 0, ctx.key))
    count = (await ctx.get("count", int) or 0) + 1
    ctx.set("count", count)
    await ctx.run("leave", step_of(ctx, "counter", mark, 1, ctx.key))
    return count


@counter.handler(shared=True)
async def count(ctx: ObjectContext) -> int:
    return await ctx.get("count", int) or 0


leaf = VirtualObject("leaf")


@leaf.handler
async def grow(ctx: ObjectContext, mark: str) -> int:
    await ctx.run("grow", step_of(ctx, "leaf", mark, 0, ctx.key))
    size = (await ctx.get("size", int) or 0) + 1
    ctx.set("size", size)
    return size


@leaf.handler(shared=True)
async def size(ctx: ObjectContext) -> int:
    return await ctx.get("size", int) or 0


inbox = VirtualObject("inbox")


@inbox.handler
async def put(ctx: ObjectContext, message: str) -> None:
    messages = await ctx.get("messages", list[str]) or []
    ctx.set("messages", [*messages, message])


@inbox.handler(shared=True)
async def messages(ctx: ObjectContext) -> list[str]:
    return await ctx.get("messages", list[str]) or []


tree = Service("tree")


@tree.handler
async def branch(ctx: Context, given: dict[str, Any]) -> dict[str, Any]:
    """Calls leaves on other partitions, all at once, then sends three messages to one inbox, in order."""
    mark = given["mark"]
    begun = await ctx.run("begin", step_of(ctx, "tree", mark, 0))
    sizes = await asyncio.gather(*(ctx.call(grow, f"{mark}/{at}", key=key) for at, key in enumerate(given["leaves"])))
    for number in range(3):
        ctx.send(put, f"{mark} {number}", key=given["inbox"])
    ended = await ctx.run("end", step_of(ctx, "tree", mark, 1))
    return {"nonces": [begun, ended], "sizes": list(sizes)}


approval = Workflow("approval")


@approval.main
async def wait(ctx: WorkflowContext, given: dict[str, Any]) -> dict[str, Any]:
    """Waits for an answer with a timeout. Both ends of the wait are measured with a clock that no fault touches."""
    mark = given["mark"]
    began = await ctx.run("begin", clock_of(ctx, "approval", mark, 0))
    chosen, who = await ctx.select(answer=ctx.promise("answer", str), late=ctx.sleep(given["seconds"]))
    ended = await ctx.run("end", clock_of(ctx, "approval", mark, 1))
    return {"chosen": chosen, "who": who, "began": began[1], "ended": ended[1], "nonces": [began[0], ended[0]]}


sleeper = Service("sleeper")


@sleeper.handler
async def nap(ctx: Context, given: dict[str, Any]) -> dict[str, Any]:
    mark = given["mark"]
    began = await ctx.run("begin", clock_of(ctx, "sleeper", mark, 0))
    await ctx.sleep(given["seconds"])
    ended = await ctx.run("end", clock_of(ctx, "sleeper", mark, 1))
    return {"began": began[1], "ended": ended[1], "nonces": [began[0], ended[0]]}


def clock_of(ctx: Context, work: str, mark: str, number: int) -> Callable[[], Coroutine[Any, Any, list[Any]]]:
    step = step_of(ctx, work, mark, number)

    async def read() -> list[Any]:
        # A timer begins after its first step returned and ends before its last one begins.
        at = time.monotonic()
        nonce = await step()
        return [nonce, time.monotonic() if number == 0 else at]

    return read


register = VirtualObject("register")


@register.handler
async def write(ctx: ObjectContext, value: str) -> None:
    ctx.set("value", value)


@register.handler
async def swap(ctx: ObjectContext, given: list[str | None]) -> bool:
    old, new = given
    if await ctx.get("value", str) != old:
        return False
    ctx.set("value", new)
    return True


@register.handler(shared=True)
async def read(ctx: ObjectContext) -> str | None:
    return await ctx.get("value", str)


@register.handler
async def read_alone(ctx: ObjectContext) -> str | None:
    return await ctx.get("value", str)


SERVICES: Final = {service.name: service for service in (flow, counter, leaf, inbox, tree, approval, sleeper, register)}


def main() -> None:
    parser = argparse.ArgumentParser(description="The handlers of a chaos run.")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--oracle", type=Path, required=True)
    parser.add_argument("--offer", required=True, help="names of services, separated by commas")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    _oracle.append(Oracle(options.oracle))
    serve([SERVICES[name] for name in options.offer.split(",")], host=options.host, port=options.port, grace=2.0)


if __name__ == "__main__":
    main()
