"""Definitions: a mistake is reported where it is made, and a correct definition is in the manifest."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from holdfast.cluster.handlers.protocols.native.manifest import read_manifest
from holdfast.sdk import (
    BadDefinition,
    Context,
    ObjectContext,
    RetryPolicy,
    Service,
    VirtualObject,
    Workflow,
    WorkflowContext,
)
from holdfast.sdk.endpoint import Endpoint


@dataclass
class Order:
    item: str


def wrong(define: Callable[[], Any], message: str) -> None:
    with pytest.raises(BadDefinition, match=message):
        define()


def test_bad_definitions_are_refused_with_a_reason() -> None:
    service = Service("orders")

    def sync(ctx: Context) -> None: ...

    async def no_context() -> None: ...

    async def three(ctx: Context, a: int, b: int) -> None: ...

    async def keyword(ctx: Context, *, a: int) -> None: ...

    async def unresolved(ctx: Context, a: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    async def unreadable(ctx: Context, a: Callable[[], None]) -> None: ...

    async def opaque(ctx: Context, a: Endpoint) -> None: ...

    async def good(ctx: Context) -> None: ...

    handler: Any = service.handler
    wrong(lambda: Service(""), "must begin with a letter")
    wrong(lambda: Service("a/b"), "must begin with a letter")
    wrong(lambda: Service("holdfast"), "a path of the ingress")
    wrong(lambda: handler(sync), "an async function")
    wrong(lambda: handler(no_context), "must take the context")
    wrong(lambda: handler(three), "at most one input")
    wrong(lambda: handler(keyword), "at most one input")
    wrong(lambda: handler(unresolved), "type hints cannot be resolved")
    wrong(lambda: handler(opaque), "Endpoint cannot be read from JSON")
    wrong(lambda: handler(colour="red"), "unknown option 'colour'")
    wrong(lambda: handler(name="send")(good), "a path of the ingress")
    wrong(lambda: [handler(good), handler(good)], "already has a handler named 'good'")
    wrong(lambda: Endpoint([]), "at least one")
    wrong(lambda: Endpoint([Service("empty")]), "has no handlers")
    wrong(lambda: Endpoint([service, service]), "two services are named")
    wrong(lambda: Endpoint([print]), "must be Service, VirtualObject or Workflow objects")  # type: ignore[list-item]
    workflow = Workflow("flow")
    workflow.handler(name="beside")(good)
    wrong(lambda: Endpoint([workflow]), "no main handler")
    workflow.main(name="first")(good)
    wrong(lambda: workflow.main(name="second")(good), "already has a main handler")
    wrong(lambda: workflow.handler(shared=False), "all others must be shared")


@pytest.mark.parametrize(
    "make",
    [
        lambda: RetryPolicy(factor=0.5),
        lambda: RetryPolicy(max_attempts=0),
        lambda: RetryPolicy(jitter=2),
        lambda: RetryPolicy(initial=-1),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError):
        make()


def test_a_node_accepts_the_manifest() -> None:
    service = Service("orders", retry=RetryPolicy(max_attempts=3), retention=timedelta(days=1))
    counter = VirtualObject("counter", doc="Counts.")
    flow = Workflow("flow")

    @service.handler(private=True, inactivity_timeout=5)
    async def place(ctx: Context, order: Order) -> list[Order]:
        """Places an order."""
        return [order]

    @counter.handler
    async def add(ctx: ObjectContext, n: int) -> int:
        return n

    @counter.handler(shared=True)
    async def peek(ctx: ObjectContext) -> bytes:
        return b""

    @flow.main
    async def run(ctx: WorkflowContext) -> None: ...

    @flow.handler
    async def ask(ctx: WorkflowContext) -> None: ...

    manifest = Endpoint([service, counter, flow]).manifest
    modes = {handler["name"]: handler["mode"] for entry in manifest["services"] for handler in entry["handlers"]}
    (orders,) = (entry for entry in manifest["services"] if entry["name"] == "orders")

    assert modes == {"place": "plain", "add": "exclusive", "peek": "shared", "run": "main", "ask": "shared"}
    assert orders["options"]["retry"]["max_attempts"] == 3
    assert orders["options"]["retention_ms"] == 86_400_000
    assert orders["handlers"][0]["options"] == {"inactivity_timeout_ms": 5000, "private": True}
    services, sdk, modes_found, *_ = read_manifest(json.dumps(manifest).encode())
    assert [entry.name for entry in services] == ["orders", "counter", "flow"]
    assert sdk.startswith("holdfast-python/")
    assert sorted(modes_found) == ["request-response", "stream"]


def test_a_handler_can_be_called_as_a_function() -> None:
    service = Service("orders")

    @service.handler
    async def double(ctx: Context, n: int) -> int:
        """Doubles."""
        return 2 * n

    assert asyncio.run(double(None, 4)) == 8
    assert double.__doc__ == "Doubles."
    assert repr(double) == "<handler orders/double>"


def test_a_context_of_another_kind_of_service_is_refused_where_the_handler_is_defined() -> None:
    with pytest.raises(BadDefinition, match="get Context as their context, not ObjectContext"):

        @Service("plain").handler  # type: ignore[arg-type]
        async def state(ctx: ObjectContext) -> None: ...

    with pytest.raises(BadDefinition, match="get ObjectContext as their context, not WorkflowContext"):

        @VirtualObject("object").handler  # type: ignore[arg-type]
        async def promise(ctx: WorkflowContext) -> None: ...

    @Workflow("flow").handler
    async def fine(ctx: ObjectContext) -> None: ...
