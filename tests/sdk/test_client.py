"""Clients against an ingress that fails in every way: no request becomes two invocations."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from aiohttp import web

from holdfast.sdk import (
    CallFailed,
    CallTimedOut,
    Client,
    Context,
    InvocationPaused,
    NotReady,
    Service,
    SyncClient,
    Unreachable,
)
from holdfast.sdk.client import retries
from holdfast.sdk.ids import format_id, idempotent_id
from tests import sync_client

LATER_S = 0.3


class Ingress:
    """Answers from a list, then echoes; records its requests. `drop`: the connection breaks without an answer."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.seen: list[tuple[str, str, str | None, bytes]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        key = request.headers.get("Idempotency-Key")
        self.seen.append((request.method, request.raw_path, key, body))
        answer = self.answers.pop(0) if self.answers else (200, {}, body or b"null")
        if answer == "drop later":
            await asyncio.sleep(LATER_S)
        if answer in ("drop", "drop later"):
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        status, headers, payload = answer
        return web.Response(status=status, headers=headers, body=payload)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self.handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def ask(kind: type, url: str | list[str], method: str, *args: Any, retry_for: float = 20, **options: Any) -> Any:
    """The same request by either client."""
    if kind is Client:
        async with Client(url, retry_for=retry_for) as client:
            return await getattr(client, method)(*args, **options)

    def use() -> Any:
        with SyncClient(url, retry_for=retry_for) as client:
            return getattr(client, method)(*args, **options)

    return await asyncio.to_thread(use)


both = pytest.mark.parametrize("kind", [Client, SyncClient])


@both
def test_a_request_is_retried_with_the_same_idempotency_key(kind: type) -> None:
    async def main() -> None:
        busy = (503, {"Retry-After": "0"}, b'{"message":"no leader","source":"ingress"}')
        ingress = Ingress("drop", busy, (429, {"Retry-After": "0.01"}, b"slow down"), (502, {}, b""))
        async with ingress.running() as url:
            assert await ask(kind, url, "call", "greeter/greet", {"a": 1}) == {"a": 1}

        assert len(ingress.seen) == 5
        assert len(set(ingress.seen)) == 1
        assert ingress.seen[0][2]

    asyncio.run(main())


@both
def test_waiting_for_an_outcome_does_not_use_up_the_retry_budget(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes restart repeatedly while the client waits for an outcome. Only failing tries count."""
    monkeypatch.setattr(retries, "LONG_S", LATER_S)

    async def main() -> None:
        ingress = Ingress("drop later", "drop later")
        async with ingress.running() as url:
            assert await ask(kind, url, "call", "greeter/greet", 1, retry_for=0.25) == 1

        assert len(ingress.seen) == 3 and len(set(ingress.seen)) == 1

    asyncio.run(main())


@both
def test_two_requests_have_different_keys_and_a_given_key_is_kept(kind: type) -> None:
    async def main() -> None:
        ingress = Ingress()
        async with ingress.running() as url:
            await ask(kind, url, "call", "greeter/greet", 1)
            await ask(kind, url, "call", "greeter/greet", 1)
            await ask(kind, url, "call", "greeter/greet", 1, idempotency_key="mine")

        keys = [key for _, _, key, _ in ingress.seen]
        assert len(set(keys)) == 3
        assert keys[2] == "mine"

    asyncio.run(main())


@both
def test_a_failure_of_the_handler_is_never_retried(kind: type) -> None:
    async def main() -> None:
        body = json.dumps(
            {"code": 503, "message": "the model is down", "source": "invocation", "hint": "wait"}
        ).encode()
        ingress = Ingress((503, {"x-holdfast-id": "inv_1"}, body))
        async with ingress.running() as url:
            with pytest.raises(CallFailed) as caught:
                await ask(kind, url, "call", "greeter/greet", 1)

        failed = caught.value
        assert (failed.code, failed.source, failed.hint) == (503, "invocation", "wait")
        assert failed.invocation_id == "inv_1"
        assert "the model is down" in str(failed)
        assert len(ingress.seen) == 1

    asyncio.run(main())


@both
def test_paths_are_encoded_and_delays_are_sent(kind: type) -> None:
    async def main() -> None:
        accepted = b'{"invocationId":"inv_' + b"0" * 32 + b'","status":"Accepted"}'
        ingress = Ingress((202, {}, accepted))
        async with ingress.running() as url:
            sent = await ask(kind, url, "send", "things/put", 5, key="a/b ä%?#", delay=1.5)
            await ask(kind, url, "resolve_awakeable", "awk_" + "0" * 40, {"ok": True})
            await ask(kind, url, "decide_approval", "apr_" + "0" * 56, "approve", comment="fine", payload={"eur": 1})
            await ask(kind, url, "decide_approval", "apr_" + "0" * 56, "reject")
            await ask(kind, url, "reject_promise", "flow", "k/1", "name", "no", code=409)

        assert not sent.previously
        assert [(method, path, body) for method, path, _, body in ingress.seen] == [
            ("POST", "/things/a%2Fb%20%C3%A4%25%3F%23/put/send?delay=1500ms", b"5"),
            ("POST", f"/holdfast/awakeables/awk_{'0' * 40}/resolve", b'{"ok":true}'),
            (
                "POST",
                f"/holdfast/approvals/apr_{'0' * 56}",
                b'{"choice": "approve", "comment": "fine", "payload": {"eur": 1}}',
            ),
            ("POST", f"/holdfast/approvals/apr_{'0' * 56}", b'{"choice": "reject"}'),
            ("POST", "/holdfast/workflow/flow/k%2F1/promises/name/reject", b'{"message": "no", "code": 409}'),
        ]

    asyncio.run(main())


@both
def test_a_paused_invocation_is_reported_at_once_with_its_id(kind: type) -> None:
    async def main() -> None:
        headers = {"x-holdfast-status": "paused", "x-holdfast-id": "inv_1"}
        ingress = Ingress((503, headers, b'{"message":"inv_1 is paused: KeyError","source":"ingress"}'))
        async with ingress.running() as url:
            with pytest.raises(InvocationPaused, match="KeyError") as caught:
                await ask(kind, url, "call", "greeter/greet", 1)

        assert caught.value.invocation_id == "inv_1"
        assert len(ingress.seen) == 1

    asyncio.run(main())


@both
def test_missing_output_is_not_ready(kind: type) -> None:
    async def main() -> None:
        ingress = Ingress((470, {}, b'{"message":"has not completed"}'), (200, {}, b"7"))
        async with ingress.running() as url:
            with pytest.raises(NotReady):
                await ask(kind, url, "output", "inv_" + "0" * 32)
            assert await ask(kind, url, "output", "inv_" + "0" * 32, int) == 7

    asyncio.run(main())


@both
def test_an_unreachable_node_is_reported_after_the_given_time(kind: type) -> None:
    async def main() -> None:
        ingress = Ingress()
        async with ingress.running() as url:
            pass
        with pytest.raises(Unreachable, match="check that a node is running there"):
            if kind is Client:
                async with Client(url, retry_for=0.3) as client:
                    await client.call("a/b")
            else:
                await asyncio.to_thread(lambda: SyncClient(url, retry_for=0.3).call("a/b"))

    asyncio.run(main())


def test_an_invalid_url_of_an_ingress_is_refused() -> None:
    for url in ("localhost:8080", "ftp://host", ""):
        with pytest.raises(ValueError, match="like http"):
            Client(url)


@both
def test_a_client_moves_to_the_next_address_and_remembers_the_working_one(kind: type) -> None:
    async def main() -> None:
        busy = (503, {"Retry-After": "30"}, b'{"message":"no leader","source":"ingress"}')
        stopping, dropping, good = Ingress(busy, busy), Ingress("drop", "drop"), Ingress()
        async with stopping.running() as first, dropping.running() as second, good.running() as third:
            addresses = ["http://127.0.0.1:1", first, second, third]

            def use() -> Any:
                with SyncClient(addresses) as client:
                    return [client.call("greeter/greet", 1), client.call("greeter/greet", 2)]

            async def use_async() -> Any:
                async with Client(addresses) as client:
                    return [await client.call("greeter/greet", 1), await client.call("greeter/greet", 2)]

            async with asyncio.timeout(20):  # Retry-After of one node does not delay the others.
                assert await (use_async() if kind is Client else asyncio.to_thread(use)) == [1, 2]

        assert (len(stopping.seen), len(dropping.seen), len(good.seen)) == (1, 1, 2)
        assert stopping.seen[0] == dropping.seen[0] == good.seen[0], "one request, under one key"

    asyncio.run(main())


@both
def test_unreachable_addresses_are_reported_after_the_given_time(kind: type) -> None:
    async def main() -> None:
        with pytest.raises(Unreachable):
            await ask(kind, ["http://127.0.0.1:1", "http://127.0.0.1:2"], "call", "greeter/greet", retry_for=0.3)

    asyncio.run(main())


@both
def test_a_call_that_times_out_names_the_invocation_that_continues(kind: type) -> None:
    service = Service("slow")

    @service.handler
    async def work(ctx: Context) -> None: ...

    async def main() -> None:
        ingress = Ingress("drop later", "drop later", "drop later")
        async with ingress.running() as url:
            with pytest.raises(CallTimedOut) as caught:
                await ask(kind, url, "call", work, idempotency_key="once", timeout=0.1)
            with pytest.raises(TimeoutError):
                await ask(kind, url, "call", "slow/work", timeout=timedelta(milliseconds=50))

        expected = format_id(idempotent_id("slow", None, "work", "once"))
        assert caught.value.invocation_id == expected and "goes on" in str(caught.value)

    asyncio.run(main())


@both
def test_a_call_that_is_answered_in_time_is_not_limited_afterwards(kind: type) -> None:
    async def main() -> None:
        ingress = Ingress()
        async with ingress.running() as url:
            assert await ask(kind, url, "call", "greeter/greet", 7, timeout=30) == 7

    asyncio.run(main())


def test_the_synchronous_client_is_generated_from_the_asynchronous_one() -> None:
    assert sync_client.TARGET.read_text(encoding="utf-8") == sync_client.generated(), "run `make sync-client`"
