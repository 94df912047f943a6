"""A process with durable agents and scripted models, for tests that kill it. It writes what happens to a file.

python -m tests.ext.agents_app PORT FILE
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from pathlib import Path

from pydantic_ai import Agent, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.function import AgentInfo, FunctionModel

from holdfast.ext.pydantic_ai import HoldfastDurability
from holdfast.sdk import Context, Service, serve
from holdfast.sdk.attempt import Attempt

FILE = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(os.devnull)
service = Service("agents")


def note(*words: object) -> None:
    """One line, at once: a killed process loses nothing that it wrote."""
    with FILE.open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def scripted(*turns: list[ToolCallPart] | str) -> FunctionModel:
    def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        turn = turns[sum(isinstance(each, ModelResponse) for each in messages)]
        note("model")
        return ModelResponse(parts=[TextPart(turn)] if isinstance(turn, str) else list(turn))

    return FunctionModel(model)


tourist = Agent(
    scripted(
        [ToolCallPart("look", {"n": n}, f"c{n}") for n in range(4)],
        [ToolCallPart("look", {"n": 9}, "c0")],
        "seen it all",
    ),
    name="tourist",
    capabilities=[HoldfastDurability()],
)


@tourist.tool_plain
async def look(n: int) -> int:
    """The first two are quick, the others wait in the first life of the process."""
    note("begin", n, time.monotonic_ns())
    if n in (2, 3) and not Path(f"{FILE}.second").exists():
        await asyncio.sleep(3600)
    await asyncio.sleep(0.3)
    note("end", n, time.monotonic_ns())
    return n


@service.handler
async def travel(ctx: Context) -> str:
    async with tourist.iter("Rome?") as run:
        await ctx.run("inside", note, "inside")
        async for _ in run:
            pass
    assert run.result is not None
    return run.result.output


async def approve(ctx: Context, call: ToolCallPart) -> bool:
    answer = ctx.awakeable(bool)
    await ctx.run("ask", note, "ask", answer.id)
    return await answer.future


payer = Agent(
    scripted([ToolCallPart("pay", {"eur": 5}, "c1")], "paid"),
    name="payer",
    capabilities=[HoldfastDurability(approve=approve)],
)


@payer.tool_plain(requires_approval=True)
async def pay(eur: int) -> str:
    note("pay", eur)
    return "ok"


@service.handler
async def settle(ctx: Context) -> str:
    return (await payer.run("Pay.", message_history=[])).output


@service.handler
async def memory(ctx: Context) -> int:
    """The memory of the process in KiB, and nothing of the garbage."""
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


@service.handler
async def attempts(ctx: Context) -> int:
    """The attempts in memory, this one included."""
    gc.collect()
    return sum(isinstance(each, Attempt) for each in gc.get_objects())


if __name__ == "__main__":
    serve([service], port=int(sys.argv[1]), suspend_after=0.5)
