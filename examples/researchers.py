"""Many researchers at once, one summary: durable fan-out with plain asyncio.

Each researcher is an invocation of its own, so the researchers run on all processes that serve them. If five of ten
finish before a crash, they do not run again.

    holdfast dev --app examples.researchers:app
    curl localhost:8080/editor/write --json '{"topic": "tides", "questions": ["why?", "when?", "how high?"]}'
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from holdfast.sdk import Context, Service, TerminalError, endpoint, serve


@dataclass
class Assignment:
    topic: str
    questions: list[str]


@dataclass
class Question:
    topic: str
    question: str


@dataclass
class Finding:
    question: str
    answer: str


@dataclass
class Article:
    topic: str
    findings: list[Finding]
    summary: str


researcher = Service("researcher")
editor = Service("editor")


@researcher.handler
async def investigate(ctx: Context, question: Question) -> Finding:
    sources: list[str] = await ctx.run("search", find_sources, question.topic, question.question)
    answer: str = await ctx.run("read", read_sources, sources)
    return Finding(question.question, answer)


@editor.handler
async def write(ctx: Context, assignment: Assignment) -> Article:
    if not assignment.questions:
        raise TerminalError("an article needs at least one question", code=422)
    findings = await asyncio.gather(
        *(ctx.call(investigate, Question(assignment.topic, question)) for question in assignment.questions)
    )
    summary: str = await ctx.run("summarise", summarise, assignment.topic, len(findings))
    return Article(assignment.topic, list(findings), summary)


# These stand in for searches and models.


def find_sources(topic: str, question: str) -> list[str]:
    return [f"{topic}: an introduction", f"{topic}: {question}"]


def read_sources(sources: list[str]) -> str:
    return f"according to {' and '.join(sources)}"


def summarise(topic: str, count: int) -> str:
    return f"What {count} researchers found out about {topic}."


app = endpoint([researcher, editor])

if __name__ == "__main__":
    serve([researcher, editor])
