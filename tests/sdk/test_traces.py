"""Descriptions of an exception: in the log, and the frames that a journal keeps."""

import asyncio

import pytest

from holdfast.sdk import Context, Service, current_step, traces
from holdfast.sdk.ids import format_id
from tests.sdk.fake_node import FakeNode


def raises(depth: int) -> None:
    if depth:
        raises(depth - 1)
    raise ValueError("no")


def frames_of(depth: int) -> list[str]:
    try:
        raises(depth)
    except ValueError as error:
        return traces.frames(error)
    raise AssertionError


def test_the_innermost_frames_are_kept_with_short_paths() -> None:
    found = frames_of(2)

    assert [frame.split(" in ")[1] for frame in found] == ["frames_of", "raises", "raises", "raises"]
    assert all(frame.startswith("tests/sdk/test_traces.py:") for frame in found), found


def test_a_deep_traceback_keeps_its_last_frames() -> None:
    found = frames_of(50)

    assert len(found) == traces.FRAMES_MAX
    assert all(frame.endswith(" in raises") for frame in found)


def test_frames_of_machinery_are_left_out() -> None:
    async def inner() -> None:
        raise ValueError("no")

    async def outer() -> None:
        await asyncio.wait_for(inner(), 5)

    with pytest.raises(ValueError) as caught:
        asyncio.run(outer())

    names = [frame.split(" in ")[1].rpartition(".")[2] for frame in traces.frames(caught.value)]
    assert names[-2:] == ["outer", "inner"]
    assert not any("asyncio" in frame for frame in traces.frames(caught.value))


def test_a_group_shows_the_frames_of_its_first_exception() -> None:
    async def inner() -> None:
        raise ValueError("no")

    async def outer() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(inner())

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(outer())

    assert traces.frames(caught.value)[-1].endswith(".inner")


def test_an_exception_that_was_never_raised_has_no_frames() -> None:
    assert traces.frames(ValueError("no")) == []


def test_each_failed_try_of_a_step_is_logged_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []
    service = Service("flaky")

    def flaky() -> str:
        tries.append(current_step().number)
        if len(tries) < 3:
            raise ConnectionError("not yet")
        return "worked"

    @service.handler
    async def handler(ctx: Context) -> str:
        return await ctx.run("charge", flaky)

    async def main() -> str:
        node = FakeNode()
        node.connect([service])
        invocation = node.invoke("flaky", "handler")
        await node.result(invocation)
        return format_id(invocation.id)

    id_ = asyncio.run(main())

    records = [record for record in caplog.records if record.name == "holdfast.sdk"]
    assert [record.getMessage() for record in records] == [
        f"{id_}: step 'charge' of flaky/handler failed (attempt 1, try {number})" for number in (1, 2)
    ]
    assert all(record.__dict__["invocation_id"] == id_ and record.__dict__["step"] == "charge" for record in records)
    assert caplog.text.count("ConnectionError: not yet") == 2
    assert "in flaky" in caplog.text
    assert "sdk/run.py" not in caplog.text, "frames of the SDK say nothing to the author of a step"
