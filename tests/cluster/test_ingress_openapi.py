"""The ingress describes itself and the registered handlers in OpenAPI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holdfast.cluster.ingress.openapi import openapi
from holdfast.cluster.ingress.routes import ROUTES
from holdfast.statemachine.meta import Handler, Service
from tests.cluster.ingress_rig import rig
from tests.cluster.test_tokens import one
from tests.structure import ROOT

ORDER = json.dumps({"$ref": "#/$defs/Order", "$defs": {"Order": {"type": "object"}}})


def references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [found for each in value for found in references(each)]
    if not isinstance(value, dict):
        return []
    found = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
    return found + [each for child in value.values() for each in references(child)]


def find(document: Any, reference: str) -> Any:
    for part in reference.removeprefix("#/").split("/"):
        document = document[part]
    return document


def test_every_own_route_is_described() -> None:
    paths = openapi([])["paths"]

    assert {(method.upper(), path) for path, methods in paths.items() for method in methods} == {
        (route.method, route.path) for route in ROUTES
    }


def test_handlers_are_described_with_their_schemas() -> None:
    place_order = Handler("place", "exclusive", "Place an order.", input_schema=ORDER, output_type="text/plain")
    orders = Service("orders", "object", [place_order])

    described = openapi([orders])

    place = described["paths"]["/orders/{key}/place"]["post"]
    assert [each["name"] for each in place["parameters"]] == ["key", "Idempotency-Key"]
    assert place["description"] == "Place an order." and [*place["responses"]["200"]["content"]] == ["text/plain"]
    send = described["paths"]["/orders/{key}/place/send"]["post"]
    assert "202" in send["responses"] and "200" not in send["responses"]
    assert [each["name"] for each in send["parameters"]] == ["key", "delay", "Idempotency-Key"]
    assert find(described, place["requestBody"]["content"]["application/json"]["schema"]["$ref"]) == {"type": "object"}
    assert all(find(described, reference) is not None for reference in references(described))


def test_definitions_inside_schemas_of_handlers_become_components() -> None:
    schema = {
        "type": "object",
        "properties": {
            "lines": {"type": "array", "items": {"$ref": "#/$defs/Line"}},
            "amount": {"$ref": "#/$defs/Line/properties/amount"},
            "odd": {"$ref": "#/$defs/Box[int]"},
            "again": {"$ref": "#"},
        },
        "$defs": {
            "Line": {"properties": {"amount": {"type": "integer"}, "next": {"$ref": "#/$defs/Line"}}},
            "Box[int]": {"type": "integer"},
        },
    }
    orders = Service("orders", "service", [Handler("place", "plain", input_schema=json.dumps(schema))])

    schemas = openapi([orders])["components"]["schemas"]

    at = "#/components/schemas/orders.place.input"
    assert schemas["orders.place.input.Line"]["properties"]["next"] == {"$ref": f"{at}.Line"}
    root = schemas["orders.place.input"]
    assert root["properties"]["lines"]["items"] == {"$ref": f"{at}.Line"}
    assert root["properties"]["amount"] == {"$ref": f"{at}.Line/properties/amount"}
    assert root["properties"]["odd"] == {"$ref": f"{at}/$defs/Box[int]"}, "no component may have this name"
    assert root["properties"]["again"] == {"$ref": at} and [*root["$defs"]] == ["Box[int]"]


async def test_private_handlers_are_not_described() -> None:
    async with rig() as ready:
        status, body, _ = await ready.ask("GET", "/holdfast/openapi.json")

    described = json.loads(body)
    assert status == 200
    assert "/echo/say" in described["paths"] and "/counter/{key}/add/send" in described["paths"]
    assert not [path for path in described["paths"] if path.startswith("/hidden")]


async def test_a_token_for_some_services_sees_those_alone(tmp_path: Path) -> None:
    async with one(tmp_path) as (_, doors):
        token = (await doors.create("invoke", services=("echo",)))["token"]

        status, described = await doors.ask("GET", "/holdfast/openapi.json", token, door="ingress")

    assert status == 200
    assert {path.split("/")[1] for path in described["paths"]} == {"holdfast", "echo"}


def test_every_own_route_is_on_the_page_about_http() -> None:
    page = (ROOT / "docs" / "http.md").read_text()

    missing = [route.path for route in ROUTES if route.path.rpartition("/")[0] not in page]
    assert missing == []
