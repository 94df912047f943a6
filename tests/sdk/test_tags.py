"""Tags: the header in which they travel, their bounds, and what clients and handlers do with them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sdk import Client, Context, MisusedContext, Service
from holdfast.sdk.tags import (
    TAG_NAME_BYTES_MAX,
    TAG_VALUE_BYTES_MAX,
    TAGS_BYTES_MAX,
    TAGS_HEADER,
    TAGS_MAX,
    BadTags,
    check_tags,
    format_tags,
    parse_tags,
    tags_in,
    with_tags,
)
from tests.sdk.fake_node import FakeNode
from tests.sdk.test_client import Ingress, ask, both

NAMES = st.text("abcXYZ019_.:/-", min_size=1, max_size=TAG_NAME_BYTES_MAX)
VALUES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=TAG_VALUE_BYTES_MAX // 4)


@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=5))
def test_the_header_brings_any_tags_back(tags: dict[str, str]) -> None:
    text = format_tags(tags)

    assert parse_tags(text) == tags
    assert text.isascii() and text.isprintable()


def test_the_header_of_the_largest_tags_fits_into_what_servers_accept() -> None:
    tags = {f"{number:x}" * 64: "ü" * 96 for number in range(7)}

    assert sum(len(name) + len(value.encode()) for name, value in tags.items()) > TAGS_BYTES_MAX * 3 // 4
    assert len(format_tags(tags)) < 8000


def test_spaces_around_commas_do_not_count() -> None:
    assert parse_tags("tenant=acme, order=17 ,kind=a=b") == {"tenant": "acme", "order": "17", "kind": "a=b"}
    assert tags_in({"X-Holdfast-Tags": "tenant=acme"}) == {"tenant": "acme"}
    assert tags_in({"other": "tenant=acme"}) == {}


WRONG: list[Any] = [
    {"": "x"}, {"a b": "x"}, {"a=b": "x"}, {"a,b": "x"}, {"ä": "x"}, {"n" * (TAG_NAME_BYTES_MAX + 1): "x"},
    {"a": ""}, {"a": "x\n"}, {"a": "\x7f"}, {"a": "\ud800"}, {"a": "ü" * 129}, {"a": 17}, {17: "a"}, ["a"],
    {f"t{number}": "x" for number in range(TAGS_MAX + 1)}, {f"t{number}": "x" * 250 for number in range(9)},
]  # fmt: skip


@pytest.mark.parametrize("tags", WRONG, ids=lambda tags: repr(tags)[:30])
def test_tags_beyond_the_bounds_are_refused(tags: Any) -> None:
    with pytest.raises(BadTags, match="tag"):
        check_tags(tags)


def test_tags_replace_those_of_the_headers() -> None:
    headers = with_tags({"X-Holdfast-Tags": "a=1", "other": "x"}, {"b": "2"})

    assert headers == {"other": "x", TAGS_HEADER: "b=2"}
    assert with_tags({TAGS_HEADER: "a=1"}, None) == {TAGS_HEADER: "a=1"}


@both
def test_both_clients_send_tags_in_the_header(kind: type) -> None:
    seen: list[str | None] = []

    class Tagged(Ingress):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            seen.append(request.headers.get(TAGS_HEADER))
            if request.path.endswith("/send"):
                return web.json_response({"invocationId": "inv_1", "status": "Accepted"})
            return web.Response(body=b"1")

    async def main() -> None:
        async with Tagged().running() as url:
            await ask(kind, url, "call", "greeter/greet", 1, tags={"tenant": "acme, Inc"})
            await ask(kind, url, "send", "greeter/greet", 1, tags={"tenant": "acme"}, delay=1)
            await ask(kind, url, "call", "greeter/greet", 1)
            with pytest.raises(BadTags):
                await ask(kind, url, "call", "greeter/greet", 1, tags={"tenant": ""})

    asyncio.run(main())
    assert seen == ["tenant=acme%2C%20Inc", "tenant=acme", None]
    assert kind is not Client or "tags" in Client.call.__annotations__


def test_calls_and_sends_have_the_tags_that_the_code_gives_them_and_inherit_none() -> None:
    service = Service("tagged")

    @service.handler
    async def callee(ctx: Context) -> dict[str, str]:
        return ctx.tags

    @service.handler
    async def caller(ctx: Context) -> list[Any]:
        ctx.send(callee, tags={"order": "18"})
        refused = ""
        try:
            ctx.call(callee, tags={"order": "x" * 300})
        except MisusedContext as error:
            refused = str(error)
        return [
            ctx.tags,
            await ctx.call(callee),
            await ctx.call(callee, tags={"order": "17"}, headers={"other": "x"}),
            await ctx.call(callee, tags=ctx.tags),
            refused,
        ]

    async def main() -> None:
        node = FakeNode()
        node.connect([service])
        result = json.loads(await node.call("tagged", "caller", headers={TAGS_HEADER: "tenant=acme"}))
        sent = [each.headers.get(TAGS_HEADER) for each in node.invocations.values() if each.handler == "callee"]

        assert result[:4] == [{"tenant": "acme"}, {}, {"order": "17"}, {"tenant": "acme"}]
        assert "256 bytes" in result[4]
        assert sorted(sent, key=str) == [None, "order=17", "order=18", "tenant=acme"]

    asyncio.run(main())
