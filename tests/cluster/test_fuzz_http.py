"""Invalid requests over real HTTP, at both listeners of a node: always an answer, never a 500, and the node keeps
working.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

from tests.cluster.harness import PATIENCE_S
from tests.cluster.serving import Serving, run

WORDS = [
    "invocations", "deployments", "services", "cluster", "health", "journal", "steps", "decide", "state", "kill",
    "restart", "purge", "resume", "echo", "counter", "signup", "say", "add", "run", "send", "holdfast", "invocation",
    "workflow", "awakeables", "attach", "output", "promises", "resolve", "reject", "k", "0", "1", "-1", "", "..", "%00",
    "%2F", "%ff", "%", "inv_" + "0" * 32, "awk_" + "f" * 40, "dp_0", "ü", "x" * 700,
]  # fmt: skip
PARAMETERS = [
    "", "?", "?limit=1", "?limit=99999999999999999999", "?status=active", "?status=,", "?older_than=1s", "?cursor=AAAAAA",
    "?service=echo", "?force=true", "?force=maybe", "?step=1", "?to=newest", "?start=4294967295", "?delay=1s", "?%ff=%ff",
    "?a=" + "b" * 3000,
]  # fmt: skip
BODIES = [
    b"", b"{}", b"[]", b"null", b"1", b"\xff\xfe", b"[" * 20_000, b'{"uri": "http://127.0.0.1:1"}', b'{"values": {"a": 1}}',
    b'{"value": 1}', b'{"again": true}', b'{"failure": 1}', b'{"uri": "http://\\u0000"}', b'{"remove": ["\\udfff"]}',
    json.dumps({"values": {"x" * 300: 1}}).encode(),
]  # fmt: skip
HEADERS: list[dict[str, str]] = [
    {}, {"Idempotency-Key": "k"}, {"Idempotency-Key": "\xff"}, {"Content-Type": "\xe9"}, {"Content-Encoding": "gzip"},
    {"X-" + "a" * 100: "b" * 4000}, {"Expect": "100-continue"},
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_nonsense_is_answered_and_never_with_a_500(tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(at: Serving) -> None:
        rng = random.Random(seed)

        async def one() -> None:
            door = rng.choice((at.node.doors.urls.admin, at.node.doors.urls.ingress))
            path = "/".join(rng.choice(WORDS) for _ in range(rng.randint(0, 5)))
            url = URL(f"{door}/{path}{rng.choice(PARAMETERS)}", encoded=True)
            method = rng.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"))
            # Requests for an outcome may wait: nothing resolves these.
            waits = path.endswith("attach") or "signup" in path
            try:
                async with asyncio.timeout(0.3 if waits else PATIENCE_S):
                    async with at.http.request(
                        method, url, data=rng.choice(BODIES), headers=rng.choice(HEADERS)
                    ) as response:
                        body = await response.read()
            except TimeoutError:
                assert waits, url
                return
            except aiohttp.ClientResponseError as error:
                # An unparsable request has no method, so the refusal of a HEAD has a body.
                assert method == "HEAD" and error.status == 400, (url, error)
                return
            assert response.status != 500, (method, url, body, caplog.text)
            if door == at.node.doors.urls.admin and response.content_type == "text/plain":
                assert response.status == 400, (method, url, body)  # Not HTTP at all: refused below the application.
            elif response.status >= 400 and method != "HEAD":
                assert {"code", "message", "source", "hint"} <= set(json.loads(body)), (method, url, body)

        for _ in range(60):
            await asyncio.gather(*(one() for _ in range(5)))
        assert (await at.call("echo/say", b"7")) == (200, 7)
        assert (await at.admin("GET", "/health"))[0] == 200

    with caplog.at_level(logging.ERROR):
        run(tmp_path, scenario)


def test_torn_and_odd_bytes_on_the_socket_leave_the_node_working(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        rng = random.Random(7)
        whole = (
            b"POST /echo/say HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nIdempotency-Key: a\r\n\r\n"
        )
        whole += b"3\r\nabc\r\n0\r\n\r\n"
        ports = [int(url.rpartition(":")[2]) for url in (at.node.doors.urls.ingress, at.node.doors.urls.admin)]
        for number in range(150):
            raw = bytearray(whole)
            for _ in range(rng.randint(0, 4)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            _, writer = await asyncio.open_connection("127.0.0.1", ports[number % 2])
            writer.write(bytes(raw[: rng.randint(1, len(raw))]))
            if rng.random() < 0.5:
                await writer.drain()
                await asyncio.sleep(0)
            writer.transport.abort()

        assert (await at.call("echo/say", b"7")) == (200, 7)
        async with asyncio.timeout(PATIENCE_S):
            while at.exchange.active:
                await asyncio.sleep(0.01)
        assert at.exchange.active_bytes == 0

    run(tmp_path, scenario)
