"""Book a trip in three steps, and undo them if one of them fails for good (a saga).

    holdfast dev --app examples.trips:app
    curl http://127.0.0.1:8080/trips/book --json '{"name": "Ann", "to": "Lisbon"}'

Kill the handlers' process during a booking: completed steps do not run again.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass

from holdfast.sdk import Context, Service, TerminalError, current_step, serve

logger = logging.getLogger("trips")


@dataclass
class Trip:
    name: str
    to: str


@dataclass
class Receipt:
    flight: str
    hotel: str
    car: str


trips = Service("trips")


@trips.handler
async def book(ctx: Context, trip: Trip) -> Receipt:
    """Book flight, hotel and car. If one of them fails, cancel the others."""
    undo: list[tuple[str, str]] = []
    booked: dict[str, str] = {}
    try:
        for what in ("flight", "hotel", "car"):
            booked[what] = await ctx.run(what, reserve, what, trip.to)
            undo.append((what, booked[what]))
    except TerminalError:
        for what, reference in reversed(undo):
            await ctx.run(f"cancel {what}", cancel, what, reference)
        raise
    return Receipt(**booked)


async def reserve(what: str, to: str) -> str:
    """Stands in for a request to a partner: slow, and made once. The effect key makes a repetition harmless there."""
    logger.info("reserving a %s in %s (%s)", what, to, current_step().effect_key)
    await asyncio.sleep(1)
    if to == "Atlantis" and what == "car":
        raise TerminalError(f"there is no {what} in Atlantis", code=409)
    return f"{what}-{uuid.uuid4().hex[:8]}"


async def cancel(what: str, reference: str) -> None:
    logger.info("cancelling %s %s", what, reference)
    await asyncio.sleep(0.2)


app = [trips]

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    serve(app, port=9080)
