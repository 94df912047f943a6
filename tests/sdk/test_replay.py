"""Code whose operations differ from its journal gets the difference, for every operation."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast.sdk import Context, Service, Workflow, WorkflowContext
from holdfast.sdk.ids import InvocationId, format_awakeable, format_id
from holdfast.sdk.journal import Failure
from holdfast.sdk.serde import ANY, serde_for
from tests.sdk.fake_node import FakeNode

OTHER = format_id(InvocationId(bytes(range(16))))
ANOTHER = format_id(InvocationId(bytes(range(1, 17))))

#: The code of the first attempt and of the second, and the expected error.
Do = Callable[[WorkflowContext], Any]
CHANGES: dict[str, tuple[Do, Do, list[str]]] = {
    "argument of a call": (
        lambda ctx: ctx.call("other/echo", "fig"),
        lambda ctx: ctx.call("other/echo", "pear"),
        ["The argument differs", "echo' (key 'other/echo'): \"pear\", hash "],
    ),
    "key of a call": (
        lambda ctx: ctx.call("other/echo", 1, key="a"),
        lambda ctx: ctx.call("other/echo", 1, key="b"),
        ["The key differs", "'a'", "'b'"],
    ),
    "argument of a send": (
        lambda ctx: ctx.send("other/echo", [1, 2]),
        lambda ctx: ctx.send("other/echo", [2, 1]),
        ["The argument differs", "[2,1]"],
    ),
    "delay of a send": (
        lambda ctx: ctx.send("other/echo", 1, delay=50_000),
        lambda ctx: ctx.send("other/echo", 1, delay=50_001),
        ["The delay in milliseconds differs", "50000000", "50001000"],
    ),
    "value of a set": (
        lambda ctx: ctx.set("name", {"a": 1}),
        lambda ctx: ctx.set("name", {"a": 2}),
        ["The value differs", '{"a":1}', '{"a":2}'],
    ),
    "long value of a set": (
        lambda ctx: ctx.set("name", "x" * 10_000),
        lambda ctx: ctx.set("name", "y" * 10_000),
        ["The value differs", "x" * 199 + "…", "y" * 199 + "…"],
    ),
    "duration of a sleep": (
        lambda ctx: ctx.sleep(1),
        lambda ctx: ctx.sleep(2),
        ["The duration in milliseconds differs", "1000", "2000"],
    ),
    "value of a promise": (
        lambda ctx: ctx.promise("p").resolve("yes"),
        lambda ctx: ctx.promise("p").resolve("no"),
        ["The outcome differs", '"no"'],
    ),
    "rejection of a promise": (
        lambda ctx: ctx.promise("p").reject("too dear"),
        lambda ctx: ctx.promise("p").reject("too late"),
        ["The outcome differs", "too late"],
    ),
    "value of an awakeable": (
        lambda ctx: ctx.resolve_awakeable(ctx.awakeable().id, 1),
        lambda ctx: ctx.resolve_awakeable(ctx.awakeable().id, 2),
        ["The outcome differs", ": 2, hash "],
    ),
    "awakeable that is resolved": (
        lambda ctx: ctx.resolve_awakeable(format_awakeable(InvocationId(b"\xff" * 16), 1, b"\xffsecret "), 1),
        lambda ctx: ctx.resolve_awakeable(format_awakeable(InvocationId(b"\xff" * 16), 1, b"\xffanother"), 1),
        ["The invocation differs", f"inv_{'ff' * 16}"],
    ),
    "title of an approval": (
        lambda ctx: ctx.approval("Refund 17?") and None,
        lambda ctx: ctx.approval("Refund 18?") and None,
        ["The title differs", "'Refund 17?'", "'Refund 18?'"],
    ),
    "payload of an approval": (
        lambda ctx: ctx.approval("Refund?", {"eur": 1}, key="k") and None,
        lambda ctx: ctx.approval("Refund?", {"eur": 2}, key="k") and None,
        ["The payload differs", '{"eur":1}', '{"eur":2}'],
    ),
    "name of a run with a key of its own": (
        lambda ctx: ctx.run("charge", lambda: None, key="k"),
        lambda ctx: ctx.run("refund", lambda: None, key="k"),
        ["The name differs", "'charge'", "'refund'"],
    ),
    "operation": (
        lambda ctx: ctx.run("sleep", lambda: None),
        lambda ctx: ctx.sleep(1),
        ["The operation differs", "run 'sleep'", "sleep ''"],
    ),
}


async def second_attempt(first: Do, second: Do, *, digests: bool = True) -> Failure | None:
    """The error of an attempt that runs `second` on the journal of one that ran `first`."""
    attempts: list[int] = []
    workflow = Workflow("work")

    @workflow.main
    async def main(ctx: WorkflowContext) -> str:
        attempts.append(1)
        found = (first if len(attempts) == 1 else second)(ctx)
        if isinstance(found, Awaitable):
            await found
        await ctx.run("end", lambda: None)
        await asyncio.Event().wait() if len(attempts) == 1 else None
        return "done"

    service = Service("other")

    @service.handler
    async def echo(ctx: Context, value: Any) -> Any:
        return value

    node = FakeNode()
    node.digests = digests
    node.connect([workflow, service])
    invocation = node.invoke("work", "main", key="k")
    async with asyncio.timeout(30):
        while not any(key == "end" for _, key in invocation.journal()):
            await asyncio.sleep(0.001)
        await node.crash()
        node.connect([workflow, service])
        ends = [asyncio.ensure_future(event.wait()) for event in (invocation.done, invocation.paused)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
    return invocation.errors[0] if invocation.errors else None


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_argument_pauses_and_shows_the_difference(change: str) -> None:
    first, second, texts = CHANGES[change]

    failure = asyncio.run(second_attempt(first, second))

    assert failure is not None and failure.kind == "NonDeterminismError"
    for text in texts:
        assert text in failure.message
    assert len(failure.message) < 1500


@pytest.mark.parametrize("change", CHANGES)
def test_equal_arguments_replay(change: str) -> None:
    first = CHANGES[change][0]

    assert asyncio.run(second_attempt(first, first)) is None


@pytest.mark.parametrize("change", ["argument of a call", "argument of a send", "value of a promise"])
def test_journals_of_older_nodes_have_no_hash_and_are_not_compared_there(change: str) -> None:
    first, second, _ = CHANGES[change]

    assert asyncio.run(second_attempt(first, second, digests=False)) is None


def test_headers_of_a_call_may_differ_between_attempts() -> None:
    failure = asyncio.run(
        second_attempt(
            lambda ctx: ctx.call("other/echo", 1, headers={"traceparent": "a"}),
            lambda ctx: ctx.call("other/echo", 1, headers={"traceparent": "b"}),
        )
    )

    assert failure is None


def test_a_tag_may_be_added_to_a_call_while_invocations_run() -> None:
    failure = asyncio.run(
        second_attempt(
            lambda ctx: ctx.call("other/echo", 1),
            lambda ctx: ctx.call("other/echo", 1, tags={"tenant": "acme"}),
        )
    )

    assert failure is None


def test_a_sleep_until_a_time_of_the_journal_replays_and_one_of_the_clock_does_not() -> None:
    def by_journal(ctx: Context) -> Any:
        return ctx.sleep(ctx.now().timestamp() % 1)

    def by_clock(ctx: Context) -> Any:
        return ctx.sleep(time.monotonic_ns() % 10**9 / 1e9)

    assert asyncio.run(second_attempt(by_journal, by_journal)) is None
    failure = asyncio.run(second_attempt(by_clock, by_clock))
    assert failure is not None and "The duration in milliseconds differs" in failure.message


_DUMP = """
import dataclasses, enum, sys
import pydantic
from holdfast.sdk.serde import ANY

class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"

@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    tags: frozenset[str]

class Inner(pydantic.BaseModel):
    names: set[str]
    anything: object = None

class Model(pydantic.BaseModel):
    tags: set[str]
    inner: list[Inner]
    by_key: dict[int, frozenset[str]]

words = ["fig", "pear", "it's", "plum", "kiwi"]
values = [
    set(words),
    {frozenset(words[:3]), frozenset(words[2:])},
    {Point(1, frozenset(words)), Point(2, frozenset(words[1:]))},
    {Color.RED, Color.BLUE},
    {("a", 1), ("b", 2)},
    {"nested": [set(words)]},
    Model(tags=set(words), inner=[Inner(names=set(words), anything=set(words))], by_key={2: frozenset(words)}),
]
sys.stdout.buffer.write(b"\\n".join(map(ANY.dump, values)))
"""


def test_equal_values_are_equal_bytes_in_every_process() -> None:
    """Sets of strings iterate in a different order in every process."""
    pytest.importorskip("pydantic")

    found = [
        subprocess.run(
            [sys.executable, "-c", _DUMP],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in (1, 2, 3)
    ]

    assert found[0].startswith(b'["it')
    assert found[0] == found[1] == found[2]


def test_sets_of_plain_values_keep_the_bytes_that_journals_have() -> None:
    assert ANY.dump({"it's", "b", "a"}) == b'["it\'s","a","b"]'
    assert serde_for(set[int]).dump({10, 9, 1}) == b"[1,10,9]"
