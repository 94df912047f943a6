"""What the integrations have in common."""

import logging

import pytest

from holdfast.ext.core import durable_call
from holdfast.sdk import BadPayload, Context, RetriesExhausted, RetryPolicy, Service
from tests.sdk.fake_node import FakeNode


async def test_a_durable_call_is_a_step_in_a_handler_and_a_call_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[str] = []
    service = Service("core")

    async def work(what: str) -> dict[str, str]:
        ran.append(what)
        return {"did": what}

    @service.handler
    async def handler(ctx: Context) -> None:
        assert await durable_call("n" * 300, work, "this", key="k" * 600) == {"did": "this"}
        assert await durable_call("sync", len, "four", key="second") == 4

    node = FakeNode()
    node.crash_at = lambda frame: "after" if getattr(frame, "key", "") == "=second" else None
    node.connect([service])
    invocation = node.invoke("core", "handler")
    await node.crashed.wait()
    node.crash_at = None
    node.connect([service])
    await node.result(invocation)
    (_, long), (_, short) = invocation.journal()
    assert (long.startswith("=kkk"), len(long) < 300, short) == (True, True, "=second")
    assert ran == ["this"]

    with caplog.at_level(logging.DEBUG, "holdfast.ext"):
        assert await durable_call("plain", work, "that", key="k") == {"did": "that"}
        assert await durable_call("sync", len, "four", key="k") == 4
    assert "plain runs without a step" in caplog.text


async def test_a_durable_call_gives_up_as_its_policy_says_and_takes_nothing_but_json() -> None:
    tries: list[int] = []
    service = Service("core")

    async def broken() -> None:
        tries.append(1)
        raise ConnectionError

    async def odd() -> set[int]:
        return {1}

    @service.handler
    async def handler(ctx: Context) -> None:
        with pytest.raises(RetriesExhausted):
            await durable_call("broken", broken, key="a", retry=RetryPolicy(max_attempts=2))
        await durable_call("odd", odd, key="b")

    node = FakeNode()
    node.connect([service])
    invocation = node.invoke("core", "handler")
    await invocation.paused.wait()
    assert len(tries) == 2
    assert invocation.errors[-1].kind == BadPayload.__name__
