"""The sample deployment of `make demo`: an order is charged, reserved and shipped. Each step writes a line to a file.

python -m holdfast.chaos.demo_app --host 127.0.0.1 --port 9080 --oracle FILE
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path
from typing import Final

from holdfast.chaos.oracle import Oracle
from holdfast.sdk import Context, Service, current_step, serve

#: How long a partner takes to answer.
PARTNER_S: Final = 0.002

_oracle: list[Oracle] = []

orders = Service("orders")


@orders.handler
async def place(ctx: Context, order: str) -> list[str]:
    """Three steps, one after the other. Whichever process dies, no journaled step runs again."""
    charged = await ctx.run("charge", partner, order, 0, ctx.attempt)
    reserved = await ctx.run("reserve", partner, order, 1, ctx.attempt)
    shipped = await ctx.run("ship", partner, order, 2, ctx.attempt)
    return [charged, reserved, shipped]


async def partner(order: str, number: int, attempt: int) -> str:
    """What the partner's books say."""
    step = current_step()
    receipt = _oracle[0].tell(
        mark=order,
        work="orders",
        invocation=step.invocation_id,
        step=step.key,
        number=number,
        attempt=attempt,
        key=None,
    )
    await asyncio.sleep(PARTNER_S)
    return receipt


def main() -> None:
    parser = argparse.ArgumentParser(description="The handlers of the demo.")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--oracle", type=Path, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    _oracle.append(Oracle(options.oracle))
    serve([orders], host=options.host, port=options.port)


if __name__ == "__main__":
    main()
