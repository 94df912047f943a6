"""Handlers that fail in ways that leave traces in the state. Run as a file, with the SDK on the path."""

from __future__ import annotations

import sys

from holdfast.sdk import Context, RetryPolicy, Service, TerminalError, serve

name, port = sys.argv[1], int(sys.argv[2])
rough = Service(name)
seen: set[str] = set()


@rough.handler
async def refuse(ctx: Context, mark: str) -> None:
    raise TerminalError(f"not {mark}", code=409)


@rough.handler
async def stumble(ctx: Context, mark: str) -> list[str]:
    """A call that fails for good, a step that fails at first, and an attempt that fails at first."""

    def unsteady() -> str:
        if mark not in seen:
            seen.add(mark)
            raise RuntimeError(f"{mark} fails the first time")
        return "went well"

    try:
        await ctx.call(refuse, mark)
        refused = ""
    except TerminalError as error:
        refused = error.message
    step = await ctx.run("unsteady", unsteady, retry=RetryPolicy(initial=0.05))
    if f"{mark} again" not in seen:
        seen.add(f"{mark} again")
        raise RuntimeError(f"{mark} fails once more, outside of any step")
    return [refused, step]


@rough.handler
async def forever(ctx: Context, mark: str) -> str:
    """Waits until it is cancelled; then it compensates."""
    try:
        await ctx.sleep(3600)
    except TerminalError as error:
        code = error.code
        return await ctx.run("undo", lambda: f"undone: {code}")
    return "never"


if __name__ == "__main__":
    serve([rough], host="127.0.0.1", port=port)
