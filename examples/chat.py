"""A chat session per user as a virtual object: its history is its state, and two messages never race.

holdfast dev --app examples.chat:app
curl localhost:8080/chat/ada/say --json '"Good morning"'
curl localhost:8080/chat/ada/history -X POST
curl localhost:8080/chat/ada/forget -X POST
"""

from __future__ import annotations

from holdfast.sdk import ObjectContext, VirtualObject, endpoint, serve

HISTORY_MAX = 100

chat = VirtualObject("chat")


@chat.handler
async def say(ctx: ObjectContext, message: str) -> str:
    """One message at a time per user, in order of arrival."""
    history: list[str] = await ctx.get("history", list[str]) or []
    answer: str = await ctx.run("answer", compose_answer, message, len(history))
    ctx.set("history", [*history, f"you: {message}", f"me: {answer}"][-HISTORY_MAX:])
    return answer


@chat.handler(shared=True)
async def history(ctx: ObjectContext) -> list[str]:
    """A shared handler: it may run while a message is handled."""
    return await ctx.get("history", list[str]) or []


@chat.handler
async def forget(ctx: ObjectContext) -> None:
    ctx.clear_all()


def compose_answer(message: str, heard: int) -> str:
    """Stands in for a model."""
    return f"You said {message!r}; we have exchanged {heard} lines before."


app = endpoint([chat])

if __name__ == "__main__":
    serve([chat])
