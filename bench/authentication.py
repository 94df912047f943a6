"""What authentication costs: microseconds of processor time per request, with tokens and without, in turns.

    python -m bench.authentication [--requests N] [--rounds N] [--invocation-us US]

A request passes through the whole exchange to a handler that answers at once, as one that invokes would. Half of the rounds ask
for tokens, of which the cluster has a thousand; the audit trail is there in both, because a node always has one. The figure to
compare with is the processor time of an empty invocation at the same place (`bench.e2e`), which `--invocation-us` gives.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import AsyncIterator
from statistics import median
from typing import Any

from holdfast.cluster.config import Config
from holdfast.cluster.http.access import ROOT, Access, make_token
from holdfast.cluster.http.audit import Audit
from holdfast.cluster.http.exchange import Answer, Exchange, Request
from holdfast.statemachine.access import INVOKE, CreateToken, Tokens

TOKENS = 1000
#: Of an empty invocation on a cluster of three nodes, on all of them: two cores at 2,650 invocations per second.
INVOCATION_US = 755.0


class Handler:
    async def handle(self, request: Request) -> Answer:
        request.principal.check_service("greeter")
        return Answer(200, b"{}")

    def name_act(self, request: Request) -> None: ...

    def stop(self, why: str) -> None: ...


class Empty:
    length: int | None = 0

    def whole(self) -> bytes | None:
        return b""

    async def chunks(self) -> AsyncIterator[bytes]:
        yield b""


async def _measure(exchange: Exchange, headers: dict[str, str], requests: int) -> float:
    body = Empty()
    gc.collect()
    began = time.process_time()
    for _ in range(requests):
        answer = await exchange.answer("POST", "/greeter/greet", headers, body, "127.0.0.1")
        assert answer.status == 200
    return (time.process_time() - began) / requests * 1e6


async def measure(requests: int, rounds: int) -> tuple[list[float], list[float]]:
    """Microseconds per request of each round: without tokens, and with them."""
    tokens = Tokens()
    now_ms = int(time.time() * 1000)
    text = ""
    for number in range(TOKENS):
        id_, text, digest = make_token()
        tokens.create(CreateToken(id_, f"client {number}", [INVOKE], ["greeter"], digest, ROOT), now_ms)

    async def fresh() -> None: ...

    async def propose(command: Any) -> None: ...

    access = Access(lambda: tokens, root=make_token(ROOT)[1], now_ms=lambda: now_ms, fresh=fresh)
    audit = Audit("n1", now_ms=lambda: now_ms, propose=propose, is_open=lambda: True)
    plain = Exchange(Config(), Handler(), source="ingress", audit=audit)
    asks = Exchange(Config(), Handler(), source="ingress", access=access, audit=audit)
    headers = {"Host": "127.0.0.1:8080", "Content-Type": "application/json", "Authorization": f"Bearer {text}"}
    without: list[float] = []
    with_tokens: list[float] = []
    for _ in range(rounds):
        without.append(await _measure(plain, headers, requests))
        with_tokens.append(await _measure(asks, headers, requests))
    assert audit.acts == 0, "invocations are not acts"
    return without, with_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=20_000, help="in each round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--invocation-us", type=float, default=INVOCATION_US, help="processor time of an empty invocation"
    )
    given = parser.parse_args()
    without, with_tokens = asyncio.run(measure(given.requests, given.rounds))
    cost = median(with_tokens) - median(without)
    print(f"without tokens  {median(without):6.2f} us per request (best {min(without):.2f}, worst {max(without):.2f})")
    print(
        f"with tokens     {median(with_tokens):6.2f} us per request (best {min(with_tokens):.2f}, worst {max(with_tokens):.2f})"
    )
    print(f"authentication  {cost:6.2f} us, {cost / given.invocation_us:.2%} of an empty invocation")


if __name__ == "__main__":
    main()
