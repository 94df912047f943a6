"""An `await` of a step returns after the step is durable; running ahead of that is an option."""

import asyncio
from typing import Any

import pytest

from holdfast.sdk import Context, RetryPolicy, Service, TerminalError
from holdfast.sdk.endpoint import Endpoint
from holdfast.sdk.frames import TO_NODE, Output, Start, StepFrame, Waiting, decode_batch, encode_batch
from holdfast.sdk.ids import InvocationId
from holdfast.sdk.journal import Op, Step, pack_step
from tests.sdk.fake_node import FakeNode, Invocation

#: Enough turns of the loop for everything that can happen without the node.
TURNS = 100


class SlowNode(FakeNode):
    """A node that applies steps at once and holds its answers back until the test releases them."""

    def __init__(self) -> None:
        super().__init__()
        self.held = True

    def _flush(self) -> None:
        if not self.held:
            super()._flush()

    def release(self) -> None:
        self.held = False
        super()._flush()


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def begin(node: SlowNode, service: Service, handler: str) -> Invocation:
    """Send the START and hold everything after it back."""
    node.connect([service])
    node.held = False
    invocation = node.invoke(service.name, handler)
    await asyncio.sleep(0)
    node.held = True
    await turns()
    return invocation


def worker(run_ahead: dict[str, Any], ways: list[str]) -> Service:
    """`run_ahead` has the options of the service, the handler and the step."""
    options = {level: {"run_ahead": value} for level, value in run_ahead.items()}
    service = Service("work", **options.get("service", {}))

    async def charge() -> int:
        ways.append("charged")
        return 1

    @service.handler(name="handle", **options.get("handler", {}))
    async def handle(ctx: Context) -> int:
        receipt: int = await ctx.run("charge", charge, **options.get("step", {}))
        ways.append("went on")
        return receipt

    return service


@pytest.mark.parametrize(
    ("run_ahead", "goes_on"),
    [
        ({}, False),
        ({"service": True}, True),
        ({"handler": True}, True),
        ({"step": True}, True),
        ({"service": True, "handler": False}, False),
        ({"service": False, "handler": True}, True),
        ({"handler": True, "step": False}, False),
        ({"service": False, "handler": False, "step": True}, True),
    ],
)
def test_code_continues_before_its_step_is_durable_only_if_it_may_run_ahead(
    run_ahead: dict[str, Any], goes_on: bool
) -> None:
    ways: list[str] = []
    service = worker(run_ahead, ways)

    async def main() -> None:
        node = SlowNode()
        invocation = await begin(node, service, "handle")

        assert ways == (["charged", "went on"] if goes_on else ["charged"])
        node.release()
        assert await node.result(invocation) == b"1"
        assert ways == ["charged", "went on"]

    asyncio.run(main())


def test_run_ahead_is_a_boolean() -> None:
    with pytest.raises(TypeError, match="run_ahead must be True or False"):
        Service("work", run_ahead="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("waits", ["gather", "TaskGroup", "ctx.gather", "ctx.race", "wait"])
def test_parallel_steps_overlap_and_none_is_used_before_its_ack(waits: str) -> None:
    began: list[int] = []
    seen: list[str] = []
    service = Service("work")

    @service.handler
    async def handle(ctx: Context) -> int:
        async def step(number: int) -> int:
            began.append(number)
            while len(began) < 3:  # None returns before all of them have begun.
                await asyncio.sleep(0)
            return number

        steps = [ctx.run(f"step{number}", step, number) for number in range(3)]
        match waits:
            case "gather":
                await asyncio.gather(*steps)
            case "TaskGroup":
                async with asyncio.TaskGroup() as group:
                    for each in steps:
                        group.create_task(each)
            case "ctx.gather":
                await ctx.gather(*steps)
            case "ctx.race":
                await ctx.race(*steps)
            case "wait":
                await asyncio.wait([asyncio.create_task(each) for each in steps])
        seen.append("went on")
        return 0

    async def main() -> None:
        node = SlowNode()
        invocation = await begin(node, service, "handle")

        assert began == [0, 1, 2]
        assert seen == []
        assert len(invocation.steps) == 4
        node.release()
        assert await node.result(invocation) == b"0"

    asyncio.run(main())


@pytest.mark.parametrize("fails", ["for good", "once", "at most once"])
def test_a_failure_of_a_step_is_seen_after_it_is_durable_too(fails: str) -> None:
    tries: list[int] = []
    seen: list[str] = []
    service = Service("work")

    async def fail() -> int:
        tries.append(1)
        if fails == "for good":
            raise TerminalError("declined", code=402)
        if fails == "at most once" or len(tries) == 1:
            raise ConnectionError("down")
        return 7

    @service.handler
    async def handle(ctx: Context) -> int:
        try:
            if fails == "at most once":
                value = await ctx.run("fail", fail, effect="at_most_once")
            else:
                value = await ctx.run("fail", fail, retry=RetryPolicy(initial=0.001))
            seen.append("worked")
            return value
        except TerminalError:
            seen.append("failed")
            return 0

    async def main() -> None:
        node = SlowNode()
        invocation = await begin(node, service, "handle")
        answers = 0
        while not invocation.done.is_set():
            outcome = invocation.steps[1].outcome if len(invocation.steps) > 1 else None
            assert not seen or outcome is not None
            known = len(node.out)
            node.release()
            node.held = True
            answers += bool(known)
            await asyncio.sleep(0.001)

        assert answers >= (1 if fails == "for good" else 2)

    asyncio.run(main())

    assert seen == ["worked" if fails == "once" else "failed"]


def test_a_crash_after_a_strict_await_never_repeats_the_step() -> None:
    """Any code that runs after the `await` proves that the step is in the journal."""
    charged: list[int] = []
    after: list[int] = []
    service = Service("work")

    async def charge() -> int:
        charged.append(1)
        return 1

    @service.handler
    async def handle(ctx: Context) -> int:
        receipt = await ctx.run("charge", charge)
        after.append(len(charged))
        if len(after) == 1:
            await asyncio.Event().wait()  # It is killed here.
        return receipt

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("work", "handle")
        async with asyncio.timeout(30):
            while not after:
                await asyncio.sleep(0)
        await node.crash()
        node.connect([service])

        assert await node.result(invocation) == b"1"

    asyncio.run(main())

    assert after == [1, 1]


def test_a_request_ends_after_each_step_unless_it_may_run_ahead() -> None:
    async def main() -> None:
        for run_ahead, last in ((False, Waiting), (True, Output)):
            ways: list[str] = []
            endpoint = Endpoint([worker({"handler": run_ahead}, ways)])
            journal = [pack_step(Step(Op.INPUT, "", [{}], 1, 1, [0, b""]))]
            start = Start(
                InvocationId(bytes(16)), 1, "work", "handle", None, 1, 0, 7, journal, False, None, False, False
            )
            answer = await endpoint.invoke("work", "handle", encode_batch([start]))
            frames = decode_batch(answer, TO_NODE)

            assert type(frames[-1]) is last
            assert isinstance(frames[0], StepFrame)
            assert ("went on" in ways) is run_ahead

    asyncio.run(main())
