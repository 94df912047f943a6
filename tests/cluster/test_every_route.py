"""Every route of both doors with every kind of token, and nothing that any of them gives away."""

from __future__ import annotations

import asyncio
import logging
import string
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.cluster.admin.routes import ROUTES
from holdfast.cluster.config import Config, describe
from holdfast.cluster.errors import Circumstance, Unauthorized
from holdfast.cluster.http.access import ROOT, STRANGER, Access, Principal, make_token
from holdfast.cluster.http.exchange import Answer, Exchange, Request
from holdfast.cluster.http.routes import PUBLIC
from holdfast.cluster.ingress.ingress import Ingress
from holdfast.cluster.ingress.routes import ROUTES as INGRESS_ROUTES
from holdfast.sdk.ids import InvocationId, format_approval, format_awakeable, format_id
from holdfast.statemachine.access import ADMIN, INVOKE, ROLES, CreateToken, Tokens, permits
from tests.cluster.test_tokens import one, place

ID = format_id(InvocationId(bytes(16)))
#: Values for the placeholders in paths of the ingress: of nothing, but well-formed.
NOTHING = {
    "attach": ID,
    "output": ID,
    "resolve_awakeable": format_awakeable(InvocationId(bytes(16)), 1),
    "decide_approval": format_approval(InvocationId(bytes(16)), 1, bytes(8)),
    "reject_awakeable": format_awakeable(InvocationId(bytes(16)), 1, bytes(8)),
}
OWN = [
    (
        route.method,
        route.path.format(id=NOTHING.get(route.name, ""), name="flow", key="none", promise="p"),
        "flow" if route.service else "",
    )
    for route in INGRESS_ROUTES
    if route.role != PUBLIC
]
HANDLERS = (("POST", "/echo/say", "echo"), ("POST", "/echo/say/send", "echo"), ("POST", "/flow/k/run/send", "flow"))
LETTERS = string.ascii_letters + string.digits


def test_every_route_of_the_ingress_names_a_role_and_a_method() -> None:
    public = {(route.method, route.path) for route in INGRESS_ROUTES if route.role == PUBLIC}

    assert public == {("GET", "/holdfast/health"), ("HEAD", "/holdfast/health")}
    assert all(route.role == INVOKE for route in INGRESS_ROUTES if route.role != PUBLIC)
    assert all(hasattr(Ingress, f"_on_{route.name}") for route in INGRESS_ROUTES)
    assert all(route.service or "{name}" not in route.path for route in INGRESS_ROUTES), (
        "tokens may be for some services"
    )


def test_every_route_of_the_admin_api_names_a_role() -> None:
    public = [(route.method, route.path) for route in ROUTES if route.role == PUBLIC]

    assert all(route.role in ROLES for route in ROUTES if route.role != PUBLIC)
    assert not [path for method, path in public if method != "GET" and "sign" not in path and "session" not in path]


async def test_every_route_of_both_doors_asks_every_token(tmp_path: Path) -> None:
    async with one(tmp_path / "one") as (_, doors), one(tmp_path / "other") as (_, elsewhere):
        revoked, expired = await doors.create(*ROLES), await doors.create(*ROLES, expires_in="1ms")
        await doors.ask("DELETE", f"/tokens/{revoked['id']}", doors.root)
        await asyncio.sleep(0.01)
        genuine = (await doors.create("admin"))["token"]
        foreign = (await elsewhere.create(*ROLES))["token"]
        refused: dict[str, str | None] = {
            "none": None,
            "expired": expired["token"],
            "revoked": revoked["token"],
            "of another cluster": foreign,
            "of a node of another cluster": elsewhere.root,
            "with another secret": f"{genuine.rpartition('_')[0]}_{foreign.rpartition('_')[2]}",
            "cut": genuine[:-1],
        }
        roles = {role: (await doors.create(role))["token"] for role in ROLES}
        wrong_service = (await doors.create("invoke", services=("other",)))["token"]
        right_service = {name: (await doors.create("invoke", services=(name,)))["token"] for name in ("echo", "flow")}

        async def status(method: str, path: str, token: str | None, door: str) -> int:
            return (await doors.ask(method, path, token, door=door))[0]

        paths = [(route.method, place(route), "admin") for route in ROUTES if route.role != PUBLIC]
        paths += [(method, path, "ingress") for method, path, _ in (*OWN, *HANDLERS)]
        for method, path, door in paths:
            for kind, token in refused.items():
                assert await status(method, path, token, door) == 401, (method, path, kind)
        for method, path, service in (*OWN, *HANDLERS):
            for role, token in roles.items():
                found = await status(method, path, token, "ingress")
                assert (found == 403) is not permits([role], INVOKE), (path, role, found)
                assert found not in (401, 500), (path, role, found)
            if service:
                assert await status(method, path, wrong_service, "ingress") == 403, path
                assert await status(method, path, right_service[service], "ingress") not in (401, 403), path
        assert (await doors.ask("GET", "/cluster", genuine))[0] == 200
        assert (await elsewhere.ask("GET", "/cluster", foreign))[0] == 200


# -- whatever is sent as a token


class Behind:
    """Remembers who came through."""

    def __init__(self) -> None:
        self.seen: list[Principal] = []

    async def handle(self, request: Request) -> Answer:
        self.seen.append(request.principal)
        return Answer(200, b"{}")

    def name_act(self, request: Request) -> None: ...

    def stop(self, why: str) -> None: ...


class Empty:
    length: int | None = 0

    def whole(self) -> bytes | None:
        return b""

    async def chunks(self) -> AsyncIterator[bytes]:
        yield b""


ID_A, TOKEN_A, DIGEST_A = make_token()
ROOT_TOKEN = make_token(ROOT)[1]
pieces = st.one_of(
    st.sampled_from([
        "Bearer", "bearer", "Basic", "BEARER", "hf", "_", "hf_", ROOT, ID_A, TOKEN_A, ROOT_TOKEN, TOKEN_A[:-1], " ", "\t", "",
        ",", "\x00", "\r\n", "é", "\udc80", "=", TOKEN_A.rpartition("_")[2], ROOT_TOKEN.rpartition("_")[2], "x" * 129,
    ]),
    st.text(max_size=8),
    st.text(LETTERS, min_size=1, max_size=60),
)  # fmt: skip
headers = st.one_of(
    st.lists(pieces, max_size=6).map("".join),
    st.tuples(st.integers(0, len(TOKEN_A) - 1), st.sampled_from(LETTERS)).map(
        lambda change: f"Bearer {TOKEN_A[: change[0]]}{change[1]}{TOKEN_A[change[0] + 1 :]}"
    ),
)


@settings(max_examples=400, deadline=None)
@given(headers)
@example(f"Bearer {TOKEN_A}")
@example(f"Bearer  {TOKEN_A} ")
@example(f"Bearer {TOKEN_A}_")
@example(f"Bearer {TOKEN_A}\n")
@example("Bearer " + "hf_" * 40)
def test_any_header_is_the_principal_of_its_token_or_is_refused(header: str) -> None:
    tokens = Tokens()
    tokens.create(CreateToken(ID_A, "a", [INVOKE], [], DIGEST_A, ROOT), 1)
    behind = Behind()

    async def fresh() -> None: ...

    async def main() -> Answer:
        access = Access(lambda: tokens, root=ROOT_TOKEN, now_ms=lambda: 2, fresh=fresh)
        exchange = Exchange(Config(), behind, source="ingress", access=access)
        given_headers = {"Host": "localhost", "Authorization": header}
        return await exchange.answer("GET", "/", given_headers, Empty())

    answer = asyncio.run(main())

    scheme, _, text = header.partition(" ")
    is_token = scheme.lower() == "bearer" and text.strip() in (TOKEN_A, ROOT_TOKEN)
    assert answer.status == (200 if is_token else 401)
    assert [who.id for who in behind.seen] == ([] if not is_token else [ID_A if TOKEN_A in text else ROOT])
    for own in (TOKEN_A, ROOT_TOKEN):
        assert own.rpartition("_")[2].encode() not in answer.body


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*ROLES, "none", ""]), max_size=4), st.sampled_from([*ROLES]))
def test_a_principal_has_no_role_that_its_token_does_not_include(roles: list[str], needed: str) -> None:
    principal = Principal("t", "t", tuple(roles))

    try:
        principal.check(needed)
    except Circumstance as error:
        assert error.status == (403 if roles else 401)
        assert not any(needed in ROLES.get(role, ()) for role in roles)
    else:
        assert any(needed in ROLES.get(role, ()) for role in roles)
    with pytest.raises(Unauthorized):
        STRANGER.check(needed)


# -- what nobody may see


async def test_secrets_are_in_no_log_metric_error_or_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with one(tmp_path) as (world, doors):
        token = (await doors.create("admin"))["token"]
        stranger = make_token()[1]
        seen: list[str] = []
        for path in (
            "/metrics",
            "/cluster",
            "/tokens",
            "/audit",
            "/logs",
            "/openapi.json",
            "/health",
            "/",
            "/nothing/at/all",
        ):
            for each in (token, doors.root, stranger):
                seen.append(str(await doors.ask("GET", path, each)))
        for path in (
            "/echo/say",
            f"/holdfast/awakeables/{format_awakeable(InvocationId(bytes(16)), 1)}/resolve",
            "/no/such",
        ):
            seen.append(str(await doors.ask("POST", path, token, door="ingress", value=1)))
        assert world.node.doors.admin is not None
        admin: Any = world.node.doors.admin.exchange.handler

        async def breaks(request: Any) -> Answer:
            raise RuntimeError("a bug")

        admin._methods["on_cluster"] = breaks
        status, answer = await doors.ask("GET", "/cluster", token)
        assert status == 500
        seen += [str(answer), caplog.text, str(describe(world.node.config)), repr(world.node.config)]
        principal = await world.node.doors.admin.exchange._access.authenticate(f"Bearer {token}")  # type: ignore[union-attr]
        seen += [
            repr(principal),
            repr(world.node.doors.admin.exchange._access),
            str(vars(world.node.doors.admin.exchange._access)),
        ]

        for secret in (each.rpartition("_")[2] for each in (token, doors.root, stranger)):
            assert not [text[:200] for text in seen if secret in text]
        assert "a bug" in caplog.text


async def test_a_trace_of_a_refusal_has_no_secret() -> None:
    async def fresh() -> None: ...

    access = Access(Tokens, root=ROOT_TOKEN, now_ms=lambda: 1, fresh=fresh)
    refuse: list[Callable[[], Awaitable[Principal]]] = [
        lambda: access.authenticate(f"Bearer {TOKEN_A}"),
        lambda: access.authenticate(f"Basic {TOKEN_A}"),
        lambda: access.authenticate(f"Bearer {ROOT_TOKEN[:-1]}"),
    ]
    for each in refuse:
        with pytest.raises(Unauthorized) as refused:
            await each()
        trace = "".join(traceback.format_exception(refused.value))
        assert TOKEN_A[-20:] not in trace and ROOT_TOKEN[-20:-1] not in trace
        assert refused.value.__cause__ is None and (ADMIN not in str(refused.value))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_token_is_not_on_the_command_line_of_a_process(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors):
        file = tmp_path / "token"
        file.touch(0o600)
        file.write_text(doors.root)
        assert world.node.doors.admin is not None
        arguments = ["--token-file", str(file), "audit", "--follow", "--json"]
        url = f"http://127.0.0.1:{world.node.doors.admin.port}"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "holdfast", *arguments, "--admin-url", url, stdout=asyncio.subprocess.PIPE
        )
        try:
            await doors.create("read")
            assert process.stdout is not None
            async with asyncio.timeout(60):
                assert b"create_token" in await process.stdout.readline()
            cmdline = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            assert b"--token-file" in cmdline and doors.root.encode() not in cmdline
            assert doors.root.rpartition("_")[2].encode() not in cmdline
        finally:
            process.kill()
            await process.wait()
