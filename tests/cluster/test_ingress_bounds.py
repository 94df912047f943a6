"""Bounds of the ingress: sizes of bodies and rejections, requests and bodies in progress, connections."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator

from holdfast.sdk.ids import (
    format_awakeable,
    workflow_id,
)
from holdfast.statemachine.commands import CompletePromise
from tests.cluster.ingress_rig import Rig, run


def test_a_large_body_for_an_unknown_invocation_is_refused_unread() -> None:
    async def scenario(rig: Rig) -> None:
        awakeable = format_awakeable(workflow_id("signup", "nobody"), 7)
        hostile = b"[" + b"[]," * 1_000_000 + b"[]]"

        for which in ("resolve", "reject"):
            assert (await rig.error("POST", f"/holdfast/awakeables/{awakeable}/{which}", data=hostile))[0] == 404

        assert rig.partition.commands == []

    run(scenario)


def test_a_rejection_is_no_larger_than_its_text_can_be() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.ask("POST", "/signup/ann/run/send", data=b"wait")
        awakeable = format_awakeable(workflow_id("signup", "ann"), 7)
        promise = "/holdfast/workflow/signup/ann/promises/ok/reject"

        large = await rig.error("POST", f"/holdfast/awakeables/{awakeable}/reject", data=b"[[]," * 100_000)
        promised = await rig.error("POST", promise, data=b"[[]," * 100_000)
        await rig.ask("POST", promise, data=b"[" + b"[]," * 20_000 + b"[]]")

        assert (large[0], promised[0]) == (413, 413)
        command = rig.partition.commands[-1]
        assert isinstance(command, CompletePromise) and command.outcome[2].startswith("[[],[]")

    run(scenario)


def test_a_body_over_the_bound_is_refused_whether_announced_or_not() -> None:
    async def scenario(rig: Rig) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(4):
                yield b"x" * 600

        announced = await rig.error("POST", "/echo/say", data=b"x" * 2049)
        chunked = await rig.error("POST", "/echo/say", data=chunks())
        fits = await rig.ask("POST", "/echo/say", data=b"x" * 2048)

        assert (announced[0], chunked[0], fits[0]) == (413, 413, 200)
        assert rig.exchange.active_bytes == 0

    run(scenario, body_bytes_max=2048)


def test_a_compressed_body_is_unpacked_within_the_bound() -> None:
    async def scenario(rig: Rig) -> None:
        headers = {"Content-Encoding": "deflate"}
        small = await rig.ask("POST", "/echo/say", data=zlib.compress(b"x" * 2000), headers=headers)
        bomb = await rig.error("POST", "/echo/say", data=zlib.compress(b"x" * 10_000_000), headers=headers)
        broken = await rig.error("POST", "/echo/say", data=b"not deflate", headers=headers)
        cut = await rig.error("POST", "/echo/say", data=zlib.compress(b"x" * 2000)[:-5], headers=headers)
        gzipped = await rig.ask("POST", "/echo/say", data=gzip.compress(b"x"), headers={"Content-Encoding": "gzip"})
        strange = await rig.error("POST", "/echo/say", data=b"x", headers={"Content-Encoding": "br"})
        two = await rig.error("POST", "/echo/say", data=zlib.compress(b"x") + zlib.compress(b"y"), headers=headers)

        assert two[0] == 400, "what is behind the end is neither dropped nor kept"
        assert small[:2] == (200, b"x" * 2000) and gzipped[:2] == (200, b"x")
        assert (bomb[0], broken[0], cut[0], strange[0]) == (413, 400, 400, 415)

    run(scenario, body_bytes_max=2048)


def test_a_flood_gets_retry_after_and_accepted_work_continues() -> None:
    async def scenario(rig: Rig) -> None:
        accepted = [asyncio.ensure_future(rig.ask("POST", "/echo/say", data=b"wait")) for _ in range(8)]
        await rig.until(lambda: rig.ingress.waiting == 8)

        flood = await asyncio.gather(*(rig.ask("POST", "/echo/say", data=b"1") for _ in range(30)))
        for raw in rig.partition.invoked:
            rig.partition.complete(raw, [0, b"done"])

        assert {answer[0] for answer in flood} == {429}
        assert {answer[2].headers["Retry-After"] for answer in flood} == {"1"}
        assert [(await task)[0] for task in accepted] == [200] * 8
        assert rig.exchange.active == 0
        assert (await rig.ask("POST", "/echo/say", data=b"1"))[0] == 200

    run(scenario, requests_max=8)


def test_bodies_in_progress_are_bounded_together() -> None:
    async def scenario(rig: Rig) -> None:
        go_on = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b"x" * 700_000
            await go_on.wait()
            yield b"x"

        first = asyncio.ensure_future(rig.ask("POST", "/echo/say", data=slow()))
        await rig.until(lambda: rig.exchange.active_bytes >= 700_000)
        refused = await rig.error("POST", "/echo/say", data=b"x" * 500_000)
        go_on.set()

        assert refused[0] == 429
        assert (await first)[0] == 200
        assert rig.exchange.active_bytes == 0

    run(scenario, request_bytes_max=1024 * 1024)


def test_connections_are_bounded() -> None:
    async def scenario(rig: Rig) -> None:
        waiting = [asyncio.ensure_future(rig.ask("POST", "/echo/say", data=b"wait")) for _ in range(3)]
        await rig.until(lambda: rig.ingress.waiting == 3)

        reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
        answer = await reader.read()

        assert answer.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1\r\n" in answer
        writer.close()
        for raw in list(rig.partition.invoked):
            rig.partition.complete(raw, [0, b"done"])
        assert [(await each)[0] for each in waiting] == [200] * 3
        assert (await rig.ask("POST", "/echo/say", data=b"1"))[0] == 200

    run(scenario, connections_max=3)
