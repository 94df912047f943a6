"""The OpenAPI documents of both doors, and the comparison of every answer with them (`tests.answers`)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import validate

from holdfast.cluster.admin.openapi import openapi as admin_document
from holdfast.cluster.admin.routes import ROUTES
from holdfast.cluster.events.feed import KINDS
from holdfast.cluster.http.exchange import JSON, PARAMETERS_MAX, Answer
from holdfast.cluster.http.routes import Raw, shapes_of
from holdfast.cluster.ingress.openapi import openapi as ingress_document
from holdfast.sdk.ids import InvocationId, format_id
from holdfast.statemachine.meta import Handler, Service
from tests.answers import Answers, route_of
from tests.cluster.serving import Serving, run, serving

SERVICES = [
    Service(
        "orders",
        "object",
        [Handler("place", "exclusive", "Place an order.", input_schema='{"type": "object"}', output_type="text/plain")],
    ),
    Service("echo", "service", [Handler("say", "plain", output_schema='{"type": "string"}')]),
]
DOCUMENTS = pytest.mark.parametrize(
    "document", [admin_document(), ingress_document(SERVICES)], ids=["admin", "ingress"]
)


def operations(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [operation for methods in document["paths"].values() for operation in methods.values()]


@DOCUMENTS
def test_the_documents_are_valid(document: dict[str, Any]) -> None:
    validate(json.loads(json.dumps(document)))


@DOCUMENTS
def test_no_operation_shares_its_id_and_no_path_its_form(document: dict[str, Any]) -> None:
    """Generated clients name functions after the ids, and OpenAPI forbids paths that differ in names of placeholders only."""
    ids = [operation["operationId"] for operation in operations(document)]
    forms = [re.sub(r"\{[^}]*\}", "{}", path) for path in document["paths"]]

    assert len(ids) == len({*ids}) and len(forms) == len({*forms})


@DOCUMENTS
def test_every_component_is_used(document: dict[str, Any]) -> None:
    text = json.dumps(document)

    assert [name for name in document["components"]["schemas"] if f'"#/components/schemas/{name}"' not in text] == []


@DOCUMENTS
def test_every_operation_has_the_schema_of_its_answers_and_of_errors(document: dict[str, Any]) -> None:
    for operation in operations(document):
        assert operation["responses"]["default"] == {"$ref": "#/components/responses/Error"}
        for status, response in operation["responses"].items():
            has_body = status not in ("304", "default") and not operation["operationId"].endswith("_head")
            assert ("content" in response) is has_body, (operation["operationId"], status)


def test_each_action_has_an_operation_with_its_own_parameters() -> None:
    paths = admin_document()["paths"]

    def parameters(path: str) -> list[str]:
        return [each["name"] for each in paths[path]["post"]["parameters"]]

    assert parameters("/invocations/{id}/cancel") == ["id"]
    assert parameters("/invocations/{id}/resume") == ["id", "to"]
    assert parameters("/invocations/{id}/restart") == ["id", "step", "to"]
    assert {"service", "to", "dry_run"} <= {*parameters("/invocations/resume")}
    assert paths["/invocations/restart"]["post"]["operationId"] == "restart_on_many"


def test_an_answer_may_have_one_of_several_bodies() -> None:
    described = admin_document()["paths"]["/deployments"]["post"]["responses"]

    def schema(status: str) -> Any:
        return described[status]["content"]["application/json"]["schema"]

    deployment, preview = ({"$ref": f"#/components/schemas/{name}"} for name in ("Deployment", "ShownPreview"))
    assert (schema("201"), schema("200")) == (deployment, {"anyOf": [deployment, preview]})


def test_events_of_a_stream_are_described_by_name() -> None:
    stream = admin_document()["paths"]["/events"]["get"]["responses"]["200"]["content"]["text/event-stream"]

    assert stream["x-holdfast-events"]["hello"] == {"$ref": "#/components/schemas/Hello"}
    assert [*stream["x-holdfast-events"]] == ["hello", *KINDS, "reset"]
    attach = ingress_document([])["paths"]["/holdfast/invocation/{id}/attach"]["get"]["responses"]["200"]["content"]
    assert [*attach["text/event-stream"]["x-holdfast-events"]] == ["progress", "outcome"]


def test_a_body_is_closed_and_an_answer_open() -> None:
    """Nodes refuse unknown fields. A client must ignore them, because later releases add some."""
    schemas = admin_document()["components"]["schemas"]
    bodies = {
        shape.__name__ for route in ROUTES for shape in shapes_of(route.body) if shape and not isinstance(shape, Raw)
    }

    assert {name for name, schema in schemas.items() if schema.get("additionalProperties") is False} == bodies


def test_a_field_that_no_schema_has_is_refused(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        status, refused = await at.error("POST", "/deployments", json={"uri": "http://127.0.0.1:1", "colour": "red"})

        assert status == 400 and "'colour'" in refused["message"] and "dry_run" in refused["hint"]

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokens", {"name": "a", "roles": ["read"], "services": {}}),
        ("/webhooks", {"url": "https://alerts.example", "events": ["failed"], "services": ""}),
        ("/deployments", {"uri": "http://127.0.0.1:1", "metadata": 0}),
        ("/cluster/nodes", {"name": "n9", "address": "10.0.0.9:5122", "zone": False}),
    ],
)
def test_an_empty_value_of_another_type_is_refused(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async def scenario(at: Serving) -> None:
        assert (await at.error("POST", path, json=body))[0] == 400

    run(tmp_path, scenario)


def test_all_parameters_of_a_route_may_be_given_at_once(tmp_path: Path) -> None:
    """There were more filters than a query could have."""
    values = {
        "status": "active", "outcome": "failed", "since": "2h", "until": "1h", "older_than": "1h", "failure_code": "500",
        "completed_since": "2h", "completed_until": "1h", "parent": format_id(InvocationId(bytes(16))), "order": "oldest",
        "limit": "10", "step": "1", "to": "newest", "dry_run": "true",
    }  # fmt: skip

    def query(name: str) -> str:
        route = next(each for each in ROUTES if each.name == name)
        return "&".join(
            f"{each.name}={values.get(each.name, 'a')}" for each in route.parameters if each.name != "cursor"
        )

    async def scenario(at: Serving) -> None:
        assert (await at.admin("GET", f"/invocations?{query('invocations')}"))[0] == 200
        status, done = await at.admin("POST", f"/invocations/restart?{query('act_on_many')}")
        assert (status, done["matched"]) == (200, 0)
        _, refused = await at.error("GET", "/invocations?" + "&".join(["a=1"] * (PARAMETERS_MAX + 1)))
        assert refused["message"] == f"the query has more than {PARAMETERS_MAX} parameters"

    run(tmp_path, scenario)


def test_numbers_have_the_bounds_that_a_node_enforces(tmp_path: Path) -> None:
    numbers = [
        (route, each.name, each.schema)
        for route in ROUTES
        for each in route.parameters
        if each.schema.get("type") == "integer" and route.method == "GET"
    ]

    async def scenario(at: Serving) -> None:
        id_ = await at.send("echo/say")
        for route, name, schema in numbers:
            path = route.path.format(id=id_, name="counter", key="k")
            for value, is_taken in (
                (schema["minimum"] - 1, False),
                (schema["maximum"], True),
                (schema["maximum"] + 1, False),
            ):
                status, answer = await at.admin("GET", f"{path}?{name}={value}")
                assert (status == 200) is is_taken, (path, name, value, answer)
            if "default" in schema:
                assert schema["minimum"] <= schema["default"] <= schema["maximum"]

    assert numbers
    run(tmp_path, scenario)


# -- the comparison itself


@pytest.mark.parametrize(
    ("target", "answer", "why"),
    [
        ("/health", Answer(200, b'{"status": "ok"}'), ""),
        ("/health", Answer(200, b'{"status": "fine"}'), "'fine' is not one of"),
        ("/health", Answer(200, b'{"status": "ok", "colour": "red"}'), "'colour' was unexpected"),
        ("/health", Answer(200, b"{}"), "'status' is a required property"),
        ("/health", Answer(200, b"{"), "it is not JSON"),
        ("/health", Answer(201, b'{"status": "ok"}'), "does not describe this status"),
        ("/health", Answer(200, b"ok", "text/plain"), "text/plain is not described"),
        ("/health", Answer(503, b'{"code": 503}'), "'message' is a required property"),
        ("/metrics", Answer(200, b"a 1", "text/plain; version=0.0.4"), ""),
        (
            "/log-level",
            Answer(200, b'{"node":"n","level":"info","configured":"info","until":"soon"}', JSON),
            "date-time",
        ),
    ],
)
def test_an_answer_that_differs_from_its_schema_is_reported(target: str, answer: Answer, why: str) -> None:
    found = Answers()

    found.check(route_of("admin", "GET", target), "GET", target, answer)

    assert (why in found.wrong[0] if found.wrong else "") == (bool(why) or "")
    assert bool(found.wrong) is bool(why)


async def test_answers_of_a_node_are_compared(answers: Answers, tmp_path: Path) -> None:
    before = answers.checked
    async with serving(tmp_path) as at:
        await at.admin("GET", "/cluster")
        await at.admin("GET", "/deployments")

    assert answers.checked >= before + 3
