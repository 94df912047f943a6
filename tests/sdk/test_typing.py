"""Type checking of user code: results are inferred from handlers, and keys are required where needed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

GOOD = """
import asyncio
from dataclasses import dataclass
from datetime import timedelta

from holdfast.sdk import Client, Context, ObjectContext, Service, ServiceRef, SyncClient, VirtualObject, Workflow
from holdfast.sdk import WorkflowContext

@dataclass
class Trip:
    city: str

@dataclass
class Receipt:
    total: int

trips = Service("trips")
counter = VirtualObject("counter")
approval = Workflow("approval")

async def reserve(trip: Trip, seats: int = 1) -> Receipt:
    return Receipt(1)

def charge(amount: int) -> str:
    return "paid"

@trips.handler
async def book(ctx: Context, trip: Trip) -> Receipt:
    reveal_type(await ctx.run("reserve", reserve, trip, 2))
    reveal_type(await ctx.run("charge", charge, 5))
    reveal_type(await asyncio.gather(ctx.run("charge", charge, 5), ctx.sleep(days=1)))
    reveal_type(await ctx.call(book, trip))
    reveal_type(await ctx.call(ping))
    reveal_type(await ctx.call(add, 5, key="a"))
    reveal_type(await ctx.call("other/handler", {"x": 1}))
    reveal_type(await ctx.call(ServiceRef("pricing").handler("quote", Trip, Receipt), trip))
    reveal_type(ctx.send(book, trip, delay=timedelta(hours=1)).invocation_id)
    reveal_type(await ctx.gather(ctx.call(ping), ctx.call(add, 5, key="a")))
    reveal_type(await ctx.timeout(ctx.call(book, trip), 5))
    reveal_type(ctx.awakeable(bool).future)
    reveal_type(await ctx.approval("Book?", trip))
    reveal_type(await ctx.race(ctx.approval("Book?"), ctx.sleep(days=2)))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ctx.call(book, trip))
    reveal_type(task.result())
    return Receipt(0)

@trips.handler(private=True)
async def ping(ctx: Context) -> str:
    return "pong"

@counter.handler
async def add(ctx: ObjectContext, amount: int) -> int:
    reveal_type(await ctx.get("count", int))
    return amount

@trips.handler
async def greet(ctx: Context, name: str = "you") -> str:
    return name

@counter.handler(shared=True)
async def read(ctx: ObjectContext, digits: int = 2) -> float:
    reveal_type(await ctx.call(greet))
    reveal_type(await ctx.call(greet, "Ada"))
    return 0.0

@approval.main
async def run(ctx: WorkflowContext, trip: Trip) -> bool:
    reveal_type(await ctx.promise("decision", bool))
    return True

async def client_code(client: Client, sync: SyncClient) -> None:
    reveal_type(await client.call(book, Trip("Rome")))
    reveal_type(await client.attach(await client.send(add, 5, key="a")))
    reveal_type(sync.call(run, Trip("Rome"), key="k"))
    reveal_type(await client.call(read, key="k"))
    reveal_type(sync.call(read, 3, key="k"))
    reveal_type(await client.attach(await client.send(greet)))
"""

REVEALED = [
    "Receipt", "str", "tuple[str, None]", "Receipt", "str", "int", "Any", "Receipt", "str", "tuple[str, int]", "Receipt",
    "Operation[bool]", "Decision[Trip]", "Decision[None] | None", "Receipt", "int | None", "str", "str", "bool", "Receipt",
    "int", "bool", "float", "float", "str",
]  # fmt: skip

BAD = [
    "await ctx.call(book, 5)",
    "await ctx.call(book)",
    "await ctx.call(add, 5)",
    "await ctx.call(ping, 5)",
    "await ctx.call(book, Trip('x'), key='k')",
    "ctx.send(add, 'x', key='k')",
    "x: int = await ctx.call(ping)",
    "await ctx.run('charge', charge, 'x')",
    "ctx.get('x')",
    "await ctx.call(greet, 5)",
    "await ctx.call(read, 'x', key='k')",
    "await ctx.call(read)",
]


def mypy(path: Path) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--config-file",
        "",
        "--cache-dir",
        str(path.parent),
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    return [line for line in done.stdout.splitlines() if path.name in line.split(":")[0]]


def test_types_are_inferred_from_handlers_and_mistakes_are_found(tmp_path: Path) -> None:
    lines = ["", "async def bad(ctx: Context) -> None:"] + [f"    {line}" for line in BAD]
    source = tmp_path / "snippet.py"
    source.write_text(GOOD + "\n".join(lines) + "\n")
    first_bad = source.read_text().splitlines().index("async def bad(ctx: Context) -> None:") + 2

    found = mypy(source)

    notes = [line.partition('Revealed type is "')[2].rstrip('"') for line in found if "Revealed type" in line]
    shown = [
        note.replace("snippet.", "")
        .replace("builtins.", "")
        .replace("holdfast.sdk.attempt.operation.", "")
        .replace("holdfast.sdk.approvals.", "")
        for note in notes
    ]
    assert shown == REVEALED
    errors = {int(line.split(":")[1]): line for line in found if " error: " in line}
    assert min(errors) >= first_bad, errors
    for offset, code in enumerate(BAD):
        assert first_bad + offset in errors, f"not found to be wrong: {code}"
