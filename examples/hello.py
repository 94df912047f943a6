"""The smallest program: one handler with one step.

holdfast dev --app examples.hello:app
curl localhost:8080/hello/greet --json '"Ada"'
"""

from __future__ import annotations

from holdfast.sdk import Context, Service, endpoint, serve

hello = Service("hello")


@hello.handler
async def greet(ctx: Context, name: str) -> str:
    """Greet once: a second run after a crash finds the completed step."""
    greeting = await ctx.run("compose", compose, name)
    return greeting


def compose(name: str) -> str:
    return f"Hello, {name}!"


app = endpoint([hello])

if __name__ == "__main__":
    serve([hello])
