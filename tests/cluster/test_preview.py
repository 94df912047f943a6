"""What a registration would change, and that a dry run changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.registry.offer import Offer
from holdfast.cluster.registry.preview import Preview, preview
from holdfast.sdk.ids import DeploymentId
from holdfast.statemachine.meta import Handler, MetaState, RegisterDeployment, Service, apply
from tests.cluster.harness import FakeEndpoint
from tests.cluster.serving import HANDLERS, Serving, run

DP_1 = DeploymentId("dp_1")


def schema(*fields: str, required: tuple[str, ...] = (), kind: str = "string") -> str:
    properties = {field: {"type": kind} for field in fields}
    return json.dumps({"type": "object", "properties": properties, "required": list(required)})


OLD = Service(
    "trips",
    "object",
    [
        Handler("book", "exclusive", input_schema=schema("to", "day")),
        Handler("see", "shared"),
        Handler("drop", "shared"),
    ],
    options={"retention_ms": 1000},
)


def offered(*services: Service) -> Offer:
    return Offer(list(services), "sdk", ["stream"], [1, 2])


def with_old(uri: str = "http://old") -> MetaState:
    state = MetaState()
    apply(
        state,
        1,
        RegisterDeployment(id=DP_1, uri=uri, **offered(OLD)._asdict(), metadata={}, force=False),
    )
    return state


def test_a_new_service_is_described() -> None:
    found = preview(MetaState(), "http://new", offered(OLD))

    assert found == Preview(
        id=None, created=True, changes=["trips: new object with book, see, drop"], breaks=[], services=[(OLD, 1)]
    )


def test_the_same_manifest_at_the_same_place_changes_nothing() -> None:
    state = with_old()

    assert preview(state, "http://old", offered(OLD)) == Preview(DP_1, False, [], [], [(OLD, 1)])
    moved = preview(state, "http://new", offered(OLD))
    assert moved.created and moved.changes == ["trips: unchanged, moves here from dp_1"]


@pytest.mark.parametrize(
    ("handler", "sentence"),
    [
        (Handler("see", "exclusive"), "trips/see: mode shared → exclusive"),
        (Handler("see", "shared", doc="Sees."), "trips/see: new description"),
        (Handler("see", "shared", output_type="text/plain"), "trips/see: output type application/json → text/plain"),
        (Handler("see", "shared", options={"private": True}), "trips/see: private (default) → true"),
        (Handler("see", "shared", input_schema=schema("a")), "trips/see: input has a schema now"),
        (Handler("new", "shared"), "trips/new: new shared handler"),
        (Handler("book", "exclusive"), "trips/book: input has no schema any more"),
        (
            Handler("book", "exclusive", input_schema=schema("to", "by", required=("by", "to"))),
            "trips/book: input: field by added, required; field day removed; field to required now",
        ),
        (
            Handler("book", "exclusive", input_schema=schema("to", "day", kind="integer")),
            "trips/book: input: field day has another type; field to has another type",
        ),
        (Handler("book", "exclusive", input_schema='{"type": "array"}'), "trips/book: input schema changed"),
    ],
)
def test_every_change_of_a_handler_is_a_sentence(handler: Handler, sentence: str) -> None:
    others = [each for each in OLD.handlers if each.name != handler.name]

    found = preview(with_old(), "http://new", offered(OLD._replace(handlers=[*others, handler])))

    assert found.changes == [sentence]


def test_changes_of_a_service_are_sentences() -> None:
    new = Service("trips", "object", OLD.handlers[:2], doc="Books.", options={"retention_ms": 2000})

    found = preview(with_old(), "http://new", offered(new))

    assert found.changes == ["trips: new description", "trips: retention_ms 1000 → 2000", "trips/drop: removed"]
    assert found.breaks == ["trips/drop: was removed"] and found.services == [(new, 2)]


def test_another_manifest_at_a_known_place_needs_force() -> None:
    other = OLD._replace(name="other")

    found = preview(with_old(), "http://old", offered(other))

    assert (found.id, found.created) == ("dp_1", False)
    assert found.changes == ["other: new object with book, see, drop", "trips: dp_1 no longer offers it"]
    assert found.breaks[0].startswith("http://old is registered as dp_1 with another manifest: ")


def test_a_dry_run_over_http_registers_nothing(tmp_path: Path) -> None:
    async def scenario(at: Serving) -> None:
        other = FakeEndpoint({"counter:object/add:shared": HANDLERS["echo/say"], "fresh/say": HANDLERS["echo/say"]})
        await other.start()
        before = (await at.admin("GET", "/deployments"))[1]

        status, found = await at.admin("POST", "/deployments", json={"uri": other.uri, "dry_run": True})
        same = await at.admin("POST", "/deployments", json={"uri": at.endpoint.uri, "dry_run": True})
        wrong = await at.error("POST", "/deployments", json={"uri": other.uri, "dry_run": 1})
        after: dict[str, Any] = (await at.admin("GET", "/deployments"))[1]
        await other.stop()
        down = await at.error("POST", "/deployments", json={"uri": other.uri, "dry_run": True})

        assert status == 200 and found["dry_run"] is True and found["created"] and found["id"] is None
        assert set(found["breaks"]) == {"counter/add: was exclusive, is shared", "counter/wait: was removed"}
        assert "fresh: new service with say" in found["changes"]
        assert found["services"][1] == {"name": "fresh", "kind": "service", "revision": 1, "handlers": ["say"]}
        assert same[1]["changes"] == same[1]["breaks"] == [] and same[1]["id"] == before["deployments"][0]["id"]
        assert (wrong[0], down[0]) == (400, 502)
        assert [each["id"] for each in after["deployments"]] == [each["id"] for each in before["deployments"]]

    run(tmp_path, scenario)
