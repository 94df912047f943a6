"""A cluster with tokens: which requests every node accepts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from holdfast.cluster.admin.routes import ROUTES
from holdfast.cluster.http.routes import PUBLIC, Route
from holdfast.sdk.ids import format_awakeable, format_id
from holdfast.statemachine.access import APPROVE, OPERATE, READ, ROLES, permits
from tests.cluster.harness import Script, World
from tests.cluster.test_three_nodes import Seat, Three, echo, three

HANDLERS: dict[str, Script] = {"echo/say": echo, "other/say": echo, "flow:workflow/run:main": echo}
NOWHERE = {
    "id": "x",
    "folder": "x",
    "name": "x",
    "version": "x",
    "key": "x",
    "action": "cancel",
    "step": "0",
    "partition": "99",
    "handler": "x",
}


class Doors:
    """Sends requests to the listeners of a node, with one token or none."""

    def __init__(self, session: aiohttp.ClientSession, world: World) -> None:
        self._session = session
        self._world = world
        self.root = (world.node.config.data / "admin-token").read_text().strip()

    async def ask(
        self, method: str, path: str, token: str | None = None, *, door: str = "admin", value: Any = None
    ) -> tuple[int, Any]:
        server = self._world.node.doors.admin if door == "admin" else self._world.node.doors.ingress
        assert server is not None
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        url = f"http://127.0.0.1:{server.port}{path}"
        async with self._session.request(method, url, json=value, headers=headers) as response:
            if response.status == 401:
                assert response.headers["WWW-Authenticate"] == 'Bearer realm="holdfast"'
            text = await response.text()
            assert token is None or token not in text or path.startswith("/tokens")
            return response.status, (await response.json() if response.content_type == "application/json" else text)

    async def create(self, *roles: str, services: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
        body = {"name": "tests", "roles": list(roles), "services": list(services), **more}
        status, made = await self.ask("POST", "/tokens", self.root, value=body)
        assert status == 201, made
        created: dict[str, Any] = made
        return created

    async def call(self, path: str, token: str | None, value: Any = 1) -> int:
        return (await self.ask("POST", path, token, door="ingress", value=value))[0]


@asynccontextmanager
async def locked(path: Path) -> AsyncIterator[tuple[Three, dict[str, Doors]]]:
    async with three(path, HANDLERS, auth="tokens") as cluster, aiohttp.ClientSession() as session:
        yield cluster, {name: Doors(session, seat) for name, seat in cluster.seats.items()}


@asynccontextmanager
async def one(path: Path) -> AsyncIterator[tuple[World, Doors]]:
    world = World(path, auth="tokens")
    await world.start()
    await world.register(HANDLERS)
    async with aiohttp.ClientSession() as session:
        yield world, Doors(session, world)
    await world.stop()


def place(route: Route) -> str:
    """A path of nothing: an accepted request fails for another reason, and is harmless."""
    path = "/".join(NOWHERE[part.strip("{}")] if part.startswith("{") else part for part in route.path.split("/"))
    return f"{path}?after=x" if route.name == "events" else path  # An accepted one would never end.


async def test_every_route_of_the_admin_api_asks_for_its_role(tmp_path: Path) -> None:
    async with one(tmp_path) as (_, doors):
        tokens = {role: (await doors.create(role))["token"] for role in ROLES}
        revoked = await doors.create("admin")
        await doors.ask("DELETE", f"/tokens/{revoked['id']}", doors.root)
        expired = await doors.create("admin", expires_in="1ms")
        await asyncio.sleep(0.01)

        for route in ROUTES:
            assert route.role == PUBLIC or route.role in ROLES

            async def status(token: str | None, route: Route = route) -> int:
                return (await doors.ask(route.method, place(route), token))[0]

            assert (await status(None) == 401) is (route.role != PUBLIC), route
            assert await status(revoked["token"]) == 401, route
            assert await status(expired["token"]) == 401, route
            assert await status("hf_node_wrong") == 401, route
            for role, token in tokens.items():
                allowed = route.role == PUBLIC or permits([role], route.role)
                found = await status(token)
                assert (found not in (401, 403)) if allowed else (found == 403), (route, role, found)


async def test_the_role_approve_decides_approvals_and_steps_in_doubt_and_changes_nothing_else() -> None:
    opened = [(route.method, route.path) for route in ROUTES if route.role == APPROVE]
    closed = [route for route in ROUTES if route.acts and route.role != PUBLIC and not permits([APPROVE], route.role)]

    assert opened == [("POST", "/approvals/{id}"), ("POST", "/invocations/{id}/steps/{step}/decide")]
    assert permits([OPERATE], APPROVE) and not permits([READ], APPROVE) and closed


async def test_the_ingress_asks_for_a_token_that_may_invoke_the_service(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors):
        for_all = (await doors.create("invoke"))["token"]
        for_echo = (await doors.create("invoke", services=("echo",)))["token"]
        reader = (await doors.create("read", "operate", "approve"))["token"]

        assert await doors.call("/echo/say", None) == 401
        assert await doors.call("/echo/say", "hf_nobody_secret") == 401
        assert await doors.call("/echo/say", reader) == 403
        assert await doors.call("/other/say", for_echo) == 403
        assert await doors.call("/nothing/say", for_echo) == 403, (
            "whoever may not call it does not learn that it is not there"
        )
        assert await doors.call("/nothing/say", for_all) == 404
        for path in ("/echo/say", "/other/say"):
            assert await doors.call(path, for_all) == 200
        assert await doors.call("/echo/say", for_echo) == 200
        assert await doors.call("/echo/say", doors.root) == 200
        assert (await doors.ask("GET", "/holdfast/health", door="ingress"))[0] == 200
        for start in world.endpoints[0].starts:
            assert "authorization" not in str(start).lower() and "hf_" not in str(start)


async def test_outcomes_promises_and_awakeables_ask_for_a_token_too(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors):
        for_all = (await doors.create("invoke"))["token"]
        for_echo = (await doors.create("invoke", services=("echo",)))["token"]
        status, sent = await doors.ask("POST", "/other/say/send", for_all, door="ingress", value=1)
        assert status == 202
        ident = world.node.serving.router.mint("echo", None)
        paths = [
            ("GET", f"/holdfast/invocation/{sent['invocationId']}/attach", 404, 200),
            ("GET", f"/holdfast/invocation/{format_id(ident)}/output", 404, 404),
            ("GET", "/holdfast/workflow/flow/key/output", 403, 404),
            ("POST", "/holdfast/workflow/flow/key/promises/name/resolve", 403, 200),
            ("POST", f"/holdfast/awakeables/{format_awakeable(ident, 1)}/resolve", 404, 404),
        ]

        for method, path, restricted, unrestricted in paths:
            assert (await doors.ask(method, path, door="ingress"))[0] == 401, path
            assert (await doors.ask(method, path, for_echo, door="ingress"))[0] == restricted, path
            assert (await doors.ask(method, path, for_all, door="ingress"))[0] == unrestricted, path


async def test_a_token_counts_on_every_node_at_once_until_it_is_revoked(tmp_path: Path) -> None:
    async with locked(tmp_path) as (cluster, doors):
        await cluster.led()

        for name in cluster.seats:
            began_at = time.monotonic()
            made = await doors[name].create("invoke", "read")
            answers = await asyncio.gather(*(each.call("/echo/say", made["token"]) for each in doors.values()))
            assert answers == [200] * 3, f"created on {name}"
            usual_s = time.monotonic() - began_at  # Of a change that all nodes must know, on this machine at this time.
            assert (await doors[name].ask("DELETE", f"/tokens/{made['id']}", doors[name].root))[0] == 200
            revoked_at = time.monotonic()
            while any([await each.call("/echo/say", made["token"]) != 401 for each in doors.values()]):
                assert time.monotonic() - revoked_at < max(1.0, 5 * usual_s), "known on every node within a second"
                await asyncio.sleep(0.01)


async def test_the_own_token_of_a_node_is_for_that_node(tmp_path: Path) -> None:
    async with locked(tmp_path) as (_, doors):
        assert (await doors["n1"].ask("GET", "/cluster", doors["n1"].root))[0] == 200
        assert (await doors["n2"].ask("GET", "/cluster", doors["n1"].root))[0] == 401


async def test_a_token_of_one_cluster_is_nothing_to_another(tmp_path: Path) -> None:
    async with one(tmp_path / "a") as (_, first), one(tmp_path / "b") as (_, second):
        token = (await first.create("admin"))["token"]

        assert (await first.ask("GET", "/cluster", token))[0] == 200
        assert (await second.ask("GET", "/cluster", token))[0] == 401


async def test_a_rotated_token_is_shown_and_accepted_with_both_secrets_for_a_while(tmp_path: Path) -> None:
    async with one(tmp_path) as (_, doors):
        made = await doors.create("read")

        status, rotated = await doors.ask("POST", f"/tokens/{made['id']}/rotate", doors.root, value={"keep_old": "1h"})

        assert status == 200 and rotated["token"] != made["token"] and rotated["previous_secret_until"]
        for token in (made["token"], rotated["token"]):
            assert (await doors.ask("GET", "/cluster", token))[0] == 200
        status, again = await doors.ask("POST", f"/tokens/{made['id']}/rotate", doors.root, value={})
        assert status == 200 and again["previous_secret_until"] is None
        for token, expected in ((made["token"], 401), (rotated["token"], 401), (again["token"], 200)):
            assert (await doors.ask("GET", "/cluster", token))[0] == expected


async def test_the_list_of_tokens_has_no_secrets(tmp_path: Path) -> None:
    async with one(tmp_path) as (_, doors):
        made = await doors.create("invoke", services=("echo",), expires_in="90d")

        _, listed = await doors.ask("GET", "/tokens", doors.root)

        [shown] = listed["tokens"]
        assert made["token"].rsplit("_", 1)[1] not in str(listed) and "digest" not in str(listed)
        assert (shown["id"], shown["roles"], shown["services"]) == (made["id"], ["invoke"], ["echo"])
        assert shown["created_by"] == "node" and shown["expires_at"] and not shown["expired"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "name"),
        ({"name": "x" * 101, "roles": ["read"]}, "name"),
        ({"name": "a\nb", "roles": ["read"]}, "name"),
        ({"name": "x"}, "roles"),
        ({"name": "x", "roles": []}, "roles"),
        ({"name": "x", "roles": ["root"]}, "invoke, read, approve, operate, admin"),
        ({"name": "x", "roles": "read"}, "roles"),
        ({"name": "x", "roles": ["read"], "services": ["a"]}, "invoke"),
        ({"name": "x", "roles": ["invoke"], "services": [1]}, "services"),
        ({"name": "x", "roles": ["read"], "expires_in": "soon"}, "expires_in"),
        ({"name": "x", "roles": ["read"], "expires_in": "0s"}, "expires_in"),
        ({"name": "x", "roles": ["read"], "expires_in": 5}, "expires_in"),
        ({"name": "x", "roles": ["read"], "secret": "mine"}, "there is no field 'secret'"),
    ],
)
async def test_a_wrong_request_for_a_token_is_refused_with_the_reason(
    tmp_path: Path, body: dict[str, Any], says: str
) -> None:
    async with one(tmp_path) as (world, doors):
        status, answer = await doors.ask("POST", "/tokens", doors.root, value=body)

        assert status == 400 and says in answer["message"] + str(answer["hint"])
        assert not world.node.ground.meta.state.tokens.by_id


async def test_the_last_use_of_a_token_is_shown(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors):
        made = await doors.create("read")
        unused = await doors.create("read")
        assert (await doors.ask("GET", "/cluster", made["token"]))[0] == 200
        assert world.node.doors.token_use is not None

        await world.node.doors.token_use.report()

        _, listed = await doors.ask("GET", "/tokens", doors.root)
        last = {each["id"]: each["last_used_at"] for each in listed["tokens"]}
        assert last[made["id"]] is not None and last[unused["id"]] is None
        applied = world.node.ground.meta.applied
        assert (await doors.ask("GET", "/cluster", made["token"]))[0] == 200
        await world.node.doors.token_use.report()
        assert world.node.ground.meta.applied == applied, "a second use within ten minutes is not reported"


async def test_the_own_token_of_a_node_outlives_a_restart(tmp_path: Path) -> None:
    async with locked(tmp_path) as (cluster, doors):
        token = (await doors["n1"].create("invoke"))["token"]
        before = doors["n3"].root
        seat: Seat = cluster.seats["n3"]
        await seat.kill()
        await seat.start()
        await cluster.led()
        async with aiohttp.ClientSession() as session:
            again = Doors(session, seat)

            assert again.root == before
            assert (await again.ask("GET", "/cluster", before))[0] == 200
            assert await again.call("/echo/say", token) == 200
