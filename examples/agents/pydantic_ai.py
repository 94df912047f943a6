"""A durable agent of Pydantic AI. It looks at several cities at once, and asks before it pays.

`HoldfastDurability` is all that makes it durable: each request of the model and each tool is a journaled step. After a
crash the agent goes on where it was; while it waits for the answer it is suspended and takes no memory. The model here
is a script, so the example needs no network and no key. In your agent write Agent("openai:gpt-5", ...).

    pip install 'holdfast[server,pydantic-ai]'
    holdfast dev --app examples.agents.pydantic_ai:app
    curl localhost:8080/scout/ask/send --json '"A weekend in the sun, up to 300 euros."'
    curl localhost:8080/holdfast/awakeables/AWAKEABLE/resolve --json 'true'       # the id is in the log of the handler
    curl localhost:8080/holdfast/invocation/INVOCATION/attach                     # the id is in the answer of the first
"""

from __future__ import annotations

import asyncio
import logging

from pydantic_ai import Agent, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.function import AgentInfo, FunctionModel

from holdfast.ext.pydantic_ai import HoldfastDurability
from holdfast.sdk import Context, Service, endpoint, serve

logger = logging.getLogger("scout")

DEGREES = {"Lisbon": 24, "Oslo": 9, "Palermo": 27}


def script(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """What a model would do: look at the cities, book the warmest, report."""
    turn = sum(isinstance(message, ModelResponse) for message in messages)
    if turn == 0:
        return ModelResponse(parts=[ToolCallPart("weather", {"city": city}, f"w-{city}") for city in DEGREES])
    if turn == 1:
        return ModelResponse(parts=[ToolCallPart("book", {"city": "Palermo", "euros": 280}, "b-1")])
    booked = [part.content for part in messages[-1].parts if isinstance(part, ToolReturnPart)]
    return ModelResponse(parts=[TextPart(f"Palermo: {booked[0]}")])


async def approve(ctx: Context, call: ToolCallPart) -> bool:
    """Decides calls of tools that require an approval. This is handler code: it may wait for days."""
    answer = ctx.awakeable(bool)
    await ctx.run("ask", ask_boss, call.tool_name, answer.id)
    return await answer.future


def ask_boss(tool: str, awakeable: str) -> None:
    logger.warning("May the agent %s? Resolve %s", tool, awakeable)


agent = Agent(FunctionModel(script), name="scout", capabilities=[HoldfastDurability(approve=approve)])


@agent.tool_plain
async def weather(city: str) -> int:
    """The temperature. A step: the three calls of one turn run at once, and each is recorded by itself."""
    await asyncio.sleep(0.1)
    return DEGREES[city]


@agent.tool_plain(requires_approval=True)
async def book(city: str, euros: int) -> str:
    """Book a hotel."""
    return f"booked for {euros} euros"


scout = Service("scout")


@scout.handler
async def ask(ctx: Context, question: str) -> str:
    """Answer a question. Outside of a handler, agent.run works as ever."""
    return (await agent.run(question)).output


app = endpoint([scout])

if __name__ == "__main__":
    serve([scout], port=9080)
