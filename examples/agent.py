"""An agent that thinks, uses tools, and asks a person before it spends money.

Every answer of the model and every result of a tool is a journaled step: after a crash the agent continues where it
was, and neither pays for the same tokens again nor books twice. The approval is raced against a timer, and waiting
costs nothing: the agent is suspended, for minutes or for weeks. The model here is a script, so the example needs no
network.

    holdfast dev --app examples.agent:app
    curl localhost:8080/agent/trip-1/run/send --json '{"goal": "a weekend in Lisbon", "budget": 900}'
    curl localhost:8080/agent/trip-1/status -X POST
    curl localhost:8080/agent/trip-1/approve --json '{"approved": true, "by": "Ada"}'
    curl localhost:8080/holdfast/workflow/agent/trip-1/attach
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from holdfast.sdk import TerminalError, Workflow, WorkflowContext, endpoint, serve

APPROVAL_WITHIN = timedelta(minutes=30)
TURNS_MAX = 8


@dataclass
class Goal:
    goal: str
    budget: int = 500
    approval_within_s: float = APPROVAL_WITHIN.total_seconds()


@dataclass
class Decision:
    approved: bool
    by: str = "somebody"


@dataclass
class Report:
    outcome: str
    turns: int
    spent: int = 0
    notes: list[str] = field(default_factory=list)


agent = Workflow("agent")


@agent.main
async def run(ctx: WorkflowContext, goal: Goal) -> Report:
    """Think, act, observe, until the model reports that it is done."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": goal.goal}]
    report = Report(outcome="gave up", turns=0)
    for _ in range(TURNS_MAX):
        ctx.set("status", "thinking")
        reply = await ctx.run("model", ask_model, messages)
        messages.append({"role": "assistant", **reply})
        report.turns += 1
        if reply["tool"] is None:
            report.outcome = reply["content"]
            ctx.set("status", "done")
            return report
        if reply["tool"] == "book" and not await approved(ctx, goal, reply["arguments"], report):
            report.outcome = "not approved"
            ctx.set("status", "not approved")
            return report
        ctx.set("status", f"using {reply['tool']}")
        result = await ctx.run(reply["tool"], use_tool, reply["tool"], reply["arguments"])
        report.spent += result.get("price", 0)
        messages.append({"role": "tool", "content": result})
    return report


async def approved(ctx: WorkflowContext, goal: Goal, arguments: dict[str, Any], report: Report) -> bool:
    """Ask a person, with a time limit."""
    if arguments["price"] > goal.budget:
        raise TerminalError(f"{arguments['price']} is over the budget of {goal.budget}", code=422)
    ctx.set("status", f"waiting for approval of {arguments['price']}")
    match await ctx.select(
        answer=ctx.promise("approval", Decision),
        late=ctx.sleep(timedelta(seconds=goal.approval_within_s)),
    ):
        case ("answer", Decision() as decision):
            report.notes.append(f"{decision.by} said {'yes' if decision.approved else 'no'}")
            return decision.approved
        case _:
            report.notes.append("nobody answered in time")
            return False


@agent.handler(shared=True)
async def approve(ctx: WorkflowContext, decision: Decision) -> str:
    """The handler behind the approval button. A second click gets an error and changes nothing."""
    await ctx.promise("approval", Decision).resolve(decision)
    return "noted"


@agent.handler(shared=True)
async def status(ctx: WorkflowContext) -> str:
    return await ctx.get("status", str) or "not started"


# The outside world: a scripted model and two tools.


def ask_model(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """A model would read the messages; the script only counts the results of tools."""
    seen = [message["content"] for message in messages if message["role"] == "tool"]
    if not seen:
        return {"content": "Let me look for a room.", "tool": "search", "arguments": {"what": messages[0]["content"]}}
    if len(seen) == 1:
        best = min(seen[0]["offers"], key=lambda offer: offer["price"])
        return {"content": "I will book the best offer.", "tool": "book", "arguments": best}
    return {"content": f"Booked {seen[1]['hotel']} for {seen[1]['price']}.", "tool": None, "arguments": {}}


def search(what: str) -> dict[str, Any]:
    return {"what": what, "offers": [{"hotel": "Miradouro", "price": 420}, {"hotel": "Baixa", "price": 380}]}


def book(hotel: str, price: int) -> dict[str, Any]:
    return {"hotel": hotel, "price": price, "confirmation": f"{hotel.upper()}-1"}


def use_tool(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return TOOLS[name](**arguments)


TOOLS: dict[str, Callable[..., dict[str, Any]]] = {"search": search, "book": book}

app = endpoint([agent])

if __name__ == "__main__":
    serve([agent])
