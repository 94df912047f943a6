"""Handlers inside an existing web application: mounted in FastAPI, called from its routes.

pip install fastapi uvicorn
holdfast dev &
uvicorn examples.fastapi_app:api --port 9081
holdfast deployments register http://localhost:9081/holdfast
curl localhost:9081/orders/42 -X PUT
"""

from __future__ import annotations

import os
from typing import Any

from fastapi import FastAPI

from holdfast.sdk import Client, ObjectContext, VirtualObject, endpoint

orders = VirtualObject("orders")


@orders.handler
async def place(ctx: ObjectContext) -> dict[str, Any]:
    """Placing an order twice has the effect of placing it once, because the state records it."""
    if placed := await ctx.get("placed", str):
        return {"order": ctx.key, "receipt": placed, "again": True}
    receipt: str = await ctx.run("charge", charge, ctx.key)
    ctx.set("placed", receipt)
    return {"order": ctx.key, "receipt": receipt, "again": False}


def charge(order: str) -> str:
    return f"receipt-{order}"


api = FastAPI(title="A shop")
api.mount("/holdfast", endpoint([orders]))

client = Client(os.environ.get("HOLDFAST_INGRESS_URL", "http://localhost:8080"))


@api.put("/orders/{order}")
async def put_order(order: str) -> dict[str, Any]:
    """The web request returns when the order is placed, even if a process dies in the meantime."""
    placed: dict[str, Any] = await client.call(place, key=order)
    return placed
