"""Sessions of the console: the meaning and lifetime of a cookie, and the limits of a cookie alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster.errors import Unauthorized
from holdfast.cluster.http import sessions
from holdfast.cluster.http.access import STRANGER, make_token
from holdfast.cluster.http.sessions import Sessions
from holdfast.statemachine.access import ADMIN, INVOKE, OPERATE, READ, RevokeToken, RotateToken
from tests.cluster.harness import World as NodeWorld
from tests.cluster.test_access import World
from tests.cluster.test_https import Files
from tests.cluster.test_tokens import HANDLERS, locked, one

HOUR_MS = 3600 * 1000


class Desk:
    """Sessions of one node, with tokens and a clock that a test sets."""

    def __init__(
        self,
        *,
        cluster: str = "c",
        secret: bytes | None = b"0123456789abcdef",
        world: World | None = None,
        tls: bool = False,
    ) -> None:
        self.world = world or World()
        self.told: list[Any] = []
        self.sessions = Sessions(
            self.world.access,
            cluster=cluster,
            secret=secret,
            lifetime_s=3600.0,
            now_ms=lambda: self.world.now_ms,
            secure=tls,
            tell=self.told.append,
        )

    async def sign_in(self, token: str, *, secure: bool = False) -> str:
        """Sign in, and return the header Cookie that a browser then sends."""
        return (await self.sessions.sign_in(token, secure=secure)).cookie.partition(";")[0]

    async def who(self, cookie: str) -> str:
        principal = await self.sessions.authenticate({"Cookie": cookie})
        assert (principal is STRANGER) == (not principal.roles)
        return principal.id


def id_of(token: str) -> str:
    return token.split("_")[1]


# -- cookies -----------------------------------------------------------------------------------------------------------


async def test_a_cookie_represents_its_token_without_containing_it() -> None:
    desk = Desk()
    token = desk.world.create(READ)

    session = await desk.sessions.sign_in(token, secure=False)

    assert session.cookie.startswith("holdfast_c=") and token.split("_")[2] not in session.cookie
    assert session.cookie.endswith("; Path=/; Max-Age=3600; HttpOnly; SameSite=Strict")
    assert session.expires_ms == desk.world.now_ms + HOUR_MS
    assert await desk.who(session.cookie.partition(";")[0]) == id_of(token)
    assert await desk.who(f"other=1; {session.cookie.partition(';')[0]}; more=2") == id_of(token)
    assert desk.world.access.take_used() == {id_of(token): desk.world.now_ms}


async def test_a_cookie_made_under_tls_is_restricted_to_tls() -> None:
    desk = Desk()

    session = await desk.sessions.sign_in(desk.world.create(READ), secure=True)

    assert session.cookie.startswith("__Host-holdfast_c=") and session.cookie.endswith("; SameSite=Strict; Secure")
    assert await desk.who(session.cookie.partition(";")[0])


async def test_a_node_with_tls_takes_only_cookies_that_are_restricted_to_tls() -> None:
    desk = Desk(tls=True)
    ours, theirs = desk.world.create(READ), desk.world.create(ADMIN)
    cookie, planted = await desk.sign_in(ours, secure=True), await desk.sign_in(theirs)

    assert await desk.who(planted) == ""
    assert await desk.who(f"{planted}; {cookie}") == await desk.who(f"{cookie}; {planted}") == id_of(ours)


async def test_wrong_cookies_do_not_hide_a_session() -> None:
    desk = Desk()
    token, other = desk.world.create(READ), desk.world.create(ADMIN)
    cookie, planted = await desk.sign_in(token, secure=True), await desk.sign_in(other)
    value = cookie.partition("=")[2]
    wrong = f"{value[:-64]}{'0' * 64}"

    assert await desk.who(f"__Host-holdfast_c=x; __Host-holdfast_c={wrong}; {cookie}") == id_of(token)
    assert await desk.who(f"holdfast_c={wrong}; {planted}") == id_of(other)
    assert await desk.who(f"{planted}; {cookie}") == id_of(token), "a cookie of TLS comes first"

    await desk.sessions.sign_out({"Cookie": f"holdfast_c={wrong}; {planted}; {cookie}"}, secure=True)
    assert await desk.who(planted) == await desk.who(cookie) == "", "no session of this browser is left"


async def test_the_cookies_of_a_request_that_are_tried_are_bounded() -> None:
    desk = Desk()
    name, _, value = (await desk.sign_in(desk.world.create(READ))).partition("=")
    wrong = f"{name}={value[:-64]}{'0' * 64}; "

    assert await desk.who(wrong * (sessions.CANDIDATES_MAX - 1) + f"{name}={value}")
    assert await desk.who(wrong * sessions.CANDIDATES_MAX + f"{name}={value}") == ""


async def test_nobody_signs_in_without_a_valid_token() -> None:
    desk = Desk()
    token = desk.world.create(READ)
    cookie = await desk.sign_in(token)

    for wrong in ("", "hf_x_y", token[:-1], cookie.partition("=")[2], "hf_node_wrong"):
        with pytest.raises(Unauthorized):
            await desk.sessions.sign_in(wrong, secure=False)


async def test_the_nodes_own_token_can_sign_in_at_that_node() -> None:
    desk, elsewhere = Desk(), Desk()

    cookie = await desk.sign_in(desk.world.root)

    assert await desk.who(cookie) == "node" and await elsewhere.who(cookie) == ""


async def test_a_changed_cookie_is_refused() -> None:
    desk = Desk()
    weak, strong = desk.world.create(READ), desk.world.create(ADMIN)
    name, _, value = (await desk.sign_in(weak)).partition("=")
    id_, expires, nonce, signature = value.split(".")

    for changed in (
        f"{id_of(strong)}.{expires}.{nonce}.{signature}", f"node.{expires}.{nonce}.{signature}",
        f"{id_}.{int(expires) + 1}.{nonce}.{signature}", f"{id_}.{expires}.{'0' * 32}.{signature}",
        f"{id_}.{expires}.{nonce}.{'0' * 64}", f"{id_}.{expires}.{nonce}", f"{id_}.{expires}.{nonce}.", "", "....",
        f"{value}x", f"{value}.", value.upper(), f"\udc80{value}", "x" * 10_000, f"{id_}.{'9' * 5000}.{nonce}.{signature}",
    ):  # fmt: skip
        assert await desk.who(f"{name}={changed}") == "", changed
    assert await desk.who(f"{name}={value}") == id_of(weak)
    assert await desk.who(f"another={value}") == "" and await desk.who("") == "" and await desk.who(";;=;") == ""


async def test_a_cookie_is_refused_by_another_cluster_and_under_another_secret() -> None:
    desk = Desk()
    cookie = await desk.sign_in(desk.world.create(READ))
    value = cookie.partition("=")[2]

    assert await Desk(world=desk.world).who(cookie) != "", "every node of the cluster takes it"
    assert await Desk(world=desk.world, secret=b"fedcba9876543210").who(cookie) == ""
    assert await Desk(world=desk.world, secret=None).who(cookie) == ""
    assert await Desk(world=desk.world, cluster="d").who(f"holdfast_d={value}") == ""


@settings(deadline=None)
@given(st.data())
def test_no_edit_of_a_cookie_makes_another_valid_one(data: st.DataObject) -> None:
    async def scenario() -> None:
        desk = Desk()
        cookie = await desk.sign_in(desk.world.create(READ))
        desk.world.create(ADMIN)
        at = data.draw(st.integers(0, len(cookie) - 1))
        length = data.draw(st.integers(0, 3))
        edited = cookie[:at] + data.draw(st.text(max_size=3)) + cookie[at + length :]

        found = await desk.who(edited)

        # Only the text around the value may change: other cookies, and blanks.
        value = cookie.partition("=")[2]
        assert not found or value in [part.strip().partition("=")[2] for part in edited.split(";")], edited

    asyncio.run(scenario())


# -- lifetime ----------------------------------------------------------------------------------------------------------


async def test_a_session_ends_after_its_time() -> None:
    desk = Desk()
    cookie = await desk.sign_in(desk.world.create(READ))

    desk.world.now_ms += HOUR_MS - 1
    assert await desk.who(cookie)
    desk.world.now_ms += 1
    assert await desk.who(cookie) == ""


async def test_a_session_never_outlives_its_token() -> None:
    desk = Desk()
    expires, revoked = desk.world.create(READ, expires_ms=5000), desk.world.create(READ)
    session = await desk.sessions.sign_in(expires, secure=False)
    first, second = session.cookie.partition(";")[0], await desk.sign_in(revoked)
    assert session.expires_ms == 5000 and "Max-Age=4;" in session.cookie
    assert await desk.who(first) and await desk.who(second)

    desk.world.now_ms = 5000
    desk.world.tokens.revoke(RevokeToken(id_of(revoked)))

    assert await desk.who(first) == await desk.who(second) == ""


async def test_a_session_ends_with_the_secret_that_opened_it() -> None:
    desk = Desk()
    token = desk.world.create(READ)
    before = await desk.sign_in(token)
    id_, new, digest = make_token(id_of(token))
    desk.world.tokens.rotate(RotateToken(id_, digest, old_until_ms=10_000), desk.world.now_ms)
    after = await desk.sign_in(new)
    assert await desk.who(before) == await desk.who(after) == id_

    desk.world.now_ms = 10_000

    assert (await desk.who(before), await desk.who(after)) == ("", id_)


async def test_a_session_has_the_current_roles_of_its_token() -> None:
    desk = Desk()
    token = desk.world.create(READ)
    cookie = await desk.sign_in(token)
    desk.world.tokens.by_id[id_of(token)] = desk.world.tokens.by_id[id_of(token)]._replace(roles=[OPERATE])

    assert (await desk.sessions.authenticate({"Cookie": cookie})).roles == (OPERATE,)


async def test_a_node_that_does_not_know_the_token_yet_asks_once() -> None:
    here, there = Desk(), Desk()
    token = there.world.create(READ)
    here.world.committed = []
    cookie = await there.sign_in(token)

    assert await here.who(cookie) == "" and here.world.asked == 1
    here.world.tokens.by_id |= there.world.tokens.by_id
    assert await here.who(cookie) == id_of(token) and here.world.asked == 1
    here.world.tokens.by_id.clear()
    here.world.down = True
    assert await here.who(cookie) == ""


async def test_signing_out_ends_every_copy_of_the_cookie() -> None:
    desk = Desk()
    token = desk.world.create(READ)
    first, second = await desk.sign_in(token), await desk.sign_in(token)
    other = Desk(world=desk.world)

    header = await desk.sessions.sign_out({"Cookie": first}, secure=False)

    assert header.startswith("holdfast_c=; ") and "Max-Age=0" in header
    assert await desk.who(first) == "" and await desk.who(second) == id_of(token)
    [ended] = desk.told
    other.sessions.note_ended(ended)
    assert await other.who(first) == "" and await other.who(second) == id_of(token)


async def test_sign_outs_of_one_token_do_not_bring_back_a_session_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "ENDED_MAX", 8)
    monkeypatch.setattr(sessions, "ENDED_OF_TOKEN_MAX", 6)
    desk = Desk()
    token, other = desk.world.create(READ), desk.world.create(READ)
    for wrong in ("", "holdfast_c=x", f"holdfast_c=a.1.{'0' * 32}.{'0' * 64}"):
        await desk.sessions.sign_out({"Cookie": wrong}, secure=False)
    assert not desk.told
    stolen = await desk.sign_in(token)
    await desk.sessions.sign_out({"Cookie": stolen}, secure=False)

    for _ in range(20):
        desk.world.now_ms += 1
        await desk.sessions.sign_out({"Cookie": await desk.sign_in(other)}, secure=False)

    assert await desk.who(stolen) == ""
    assert len(desk.sessions._ended) <= 8
    assert await desk.who(await desk.sign_in(token)) == id_of(token)
    desk.world.now_ms += 1
    assert await desk.who(await desk.sign_in(other)) == id_of(other)


async def test_no_number_of_sign_outs_makes_an_ended_session_valid_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "ENDED_OF_TOKEN_MAX", 5)
    desk = Desk()
    token = desk.world.create(READ)
    ended = []
    for _ in range(30):
        desk.world.now_ms += 1
        ended.append(await desk.sign_in(token))
        await desk.sessions.sign_out({"Cookie": ended[-1]}, secure=False)

    assert [await desk.who(each) for each in ended] == [""] * 30
    assert len(desk.sessions._ended) <= 5

    desk.world.now_ms += HOUR_MS
    for _ in range(6):
        desk.world.now_ms += 1
        await desk.sessions.sign_out({"Cookie": await desk.sign_in(token)}, secure=False)
    assert len(desk.sessions._ended) <= 6, "expired ones are forgotten"


async def test_with_many_tokens_the_one_with_most_sign_outs_loses_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "ENDED_MAX", 6)
    desk = Desk()
    many, few = desk.world.create(READ), desk.world.create(READ)
    first_of_few = await desk.sign_in(few)
    first_of_many = await desk.sign_in(many)

    for token in [many] * 5 + [few] * 3:
        desk.world.now_ms += 1
        await desk.sessions.sign_out({"Cookie": await desk.sign_in(token)}, secure=False)

    assert await desk.who(first_of_few) == id_of(few)
    assert await desk.who(first_of_many) == "", "older than one that had to be forgotten"
    assert len(desk.sessions._ended) <= 6


# -- over HTTP ---------------------------------------------------------------------------------------------------------


class Page:
    """A browser at the admin API of a node, with its own cookie jar."""

    def __init__(self, session: aiohttp.ClientSession, world: NodeWorld) -> None:
        assert world.node.doors.admin is not None and world.node.doors.ingress is not None
        self._session = session
        self.origin = f"{world.node.doors.admin.scheme}://localhost:{world.node.doors.admin.port}"
        self.ingress = f"http://127.0.0.1:{world.node.doors.ingress.port}"
        self.cookie = ""

    async def ask(
        self, method: str, path: str, value: Any = None, *, proof: dict[str, str] | None = None, url: str = ""
    ) -> tuple[int, Any]:
        """`proof`: headers that name the origin of the request; by default, those of a page of the node."""
        headers = {"Origin": self.origin, "Sec-Fetch-Site": "same-origin"} if proof is None else dict(proof)
        if self.cookie:
            headers["Cookie"] = self.cookie
        target = (url or self.origin) + path
        async with self._session.request(method, target, json=value, headers=headers) as response:
            if (given := response.headers.get("Set-Cookie")) is not None:
                assert "HttpOnly" in given and "SameSite=Strict" in given and "Path=/" in given
                self.cookie = given.partition(";")[0]
            is_json = response.content_type == "application/json"
            return response.status, (await response.json() if is_json else await response.text())

    async def sign_in(self, token: str) -> int:
        return (await self.ask("POST", "/session", {"token": token}))[0]


def jar() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())


async def test_without_a_session_the_console_shows_nothing_of_the_node(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors), jar() as session:
        page = Page(session, world)

        status, text = await page.ask("GET", "/")

        assert status == 200 and 'id="app"' in text
        assert not any(word in text for word in ("echo", world.node.config.node, "0.2"))
        for name in ("__init__.py", "%2e%2e%2fcli%2fmain.py", "vendor", ""):
            assert (await page.ask("GET", f"/console/{name}"))[0] == 404
        about = (await page.ask("GET", "/session"))[1]
        assert not {"node", "cluster", "version"} & about.keys(), "strangers learn nothing about the node"
        assert (await page.ask("GET", "/session"))[1]["signed_in"] is False
        assert await page.sign_in("hf_nobody_nothing") == 401 and not page.cookie
        for wrong in ({}, {"token": 1}, {"token": ""}, {"token": "x", "more": 1}):
            assert (await page.ask("POST", "/session", wrong))[0] == 400
        assert (await page.ask("GET", "/invocations"))[0] == 401
        assert doors.root not in text


async def test_a_user_signs_in_acts_and_signs_out(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors), jar() as session:
        token = (await doors.create("operate"))["token"]
        page = Page(session, world)

        assert await page.sign_in(token) == 200

        assert token not in page.cookie
        about = (await page.ask("GET", "/session"))[1]
        assert about["roles"] == ["operate"] and about["name"] == "tests" and about["node"] == world.node.config.node
        assert (await page.ask("POST", "/invocations/kill?service=echo"))[0] == 200
        assert (await page.ask("GET", "/tokens"))[0] == 403, "the cookie has the roles of its token"
        before = page.cookie
        assert (await page.ask("DELETE", "/session"))[0] == 200 and page.cookie.endswith("=")
        page.cookie = before
        assert (await page.ask("POST", "/invocations/kill?service=echo"))[0] == 401
        assert (await page.ask("GET", "/invocations"))[0] == 401


async def test_a_cookie_alone_changes_nothing(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors), jar() as session:
        page = Page(session, world)
        assert await page.sign_in((await doors.create("admin"))["token"]) == 200
        elsewhere: list[dict[str, str]] = [
            {}, {"Sec-Fetch-Site": "none"}, {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "cross-site"},
            {"Origin": "http://127.0.0.1:1"}, {"Origin": "http://localhost:1", "Sec-Fetch-Site": "same-site"},
            {"Origin": "null"}, {"Referer": page.origin},
        ]  # fmt: skip

        for proof in elsewhere:
            for method, path in (
                ("POST", "/invocations/kill?service=echo"),
                ("DELETE", "/session"),
                ("POST", "/tokens"),
            ):
                status, answer = await page.ask(method, path, proof=proof)
                assert status == 403, (proof, answer)

        assert (await page.ask("GET", "/invocations", proof={}))[0] == 200
        for proof in ({"Origin": page.origin}, {"Sec-Fetch-Site": "same-origin"}):
            assert (await page.ask("POST", "/invocations/kill?service=echo", proof=proof))[0] == 200


async def test_the_ingress_ignores_the_cookie_and_no_handler_gets_it(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors), jar() as session:
        page = Page(session, world)
        token = (await doors.create("admin"))["token"]
        assert await page.sign_in(token) == 200

        assert (await page.ask("POST", "/echo/say", 1, proof={}, url=page.ingress))[0] == 401
        with_token = {"Authorization": f"Bearer {token}"}
        assert (await page.ask("POST", "/echo/say", 1, proof=with_token, url=page.ingress))[0] == 200
        assert page.cookie.partition("=")[2] not in str(world.endpoints[0].starts)


async def test_a_session_is_valid_on_every_node_until_it_ends(tmp_path: Path) -> None:
    async with locked(tmp_path) as (cluster, doors), jar() as session:
        await cluster.led()
        made = await doors["n1"].create("read")
        pages = {name: Page(session, seat) for name, seat in cluster.seats.items()}

        async def sign_in() -> str:
            assert await pages["n1"].sign_in(made["token"]) == 200
            for page in pages.values():
                page.cookie = pages["n1"].cookie
            assert [(await page.ask("GET", "/invocations"))[0] for page in pages.values()] == [200] * 3
            return pages["n1"].cookie

        async def until_refused() -> None:
            async with asyncio.timeout(10):
                while any([(await page.ask("GET", "/invocations"))[0] != 401 for page in pages.values()]):
                    await asyncio.sleep(0.01)

        cookie = await sign_in()
        assert (await pages["n1"].ask("DELETE", "/session"))[0] == 200
        pages["n1"].cookie = cookie
        await until_refused()
        await sign_in()
        assert (await doors["n2"].ask("DELETE", f"/tokens/{made['id']}", doors["n2"].root))[0] == 200
        await until_refused()


async def test_over_tls_the_cookie_is_restricted_to_tls(tmp_path: Path) -> None:
    files = Files(tmp_path / "certs")
    tls: dict[str, Any] = {name: Path(file) for name, file in files.settings("admin").items()}
    world = NodeWorld(tmp_path / "node", auth="tokens", **tls)
    await world.start()
    connector = aiohttp.TCPConnector(ssl=files.trusting())
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:
        page = Page(session, world)

        assert await page.sign_in((world.node.config.data / "admin-token").read_text().strip()) == 200

        assert page.origin.startswith("https://") and page.cookie.startswith("__Host-holdfast_")
        assert (await page.ask("POST", "/invocations/kill?service=echo"))[0] == 200
        without = {"Origin": page.origin.replace("https", "http")}
        assert (await page.ask("POST", "/invocations/kill?service=echo", proof=without))[0] == 403
    await world.stop()


async def test_a_session_without_the_role_read_learns_nothing_of_the_node(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors), jar() as session:
        page = Page(session, world)
        assert await page.sign_in((await doors.create(INVOKE))["token"]) == 200

        about = (await page.ask("GET", "/session"))[1]

        assert about["signed_in"] and about["roles"] == [INVOKE] and "node" not in about
        assert (await page.ask("GET", "/services"))[0] == 403


async def test_without_authentication_there_is_no_sign_in(tmp_path: Path) -> None:
    world = NodeWorld(tmp_path)
    await world.start()
    await world.register(HANDLERS)
    async with jar() as session:
        page = Page(session, world)

        about = (await page.ask("GET", "/session"))[1]

        assert about["signed_in"] and not about["asks_for_tokens"]
        assert await page.sign_in("hf_a_b") == 409
        assert (await page.ask("DELETE", "/session"))[0] == 200
    await world.stop()


async def test_signing_in_is_audited_without_the_secret(tmp_path: Path) -> None:
    async with one(tmp_path) as (world, doors), jar() as session:
        page = Page(session, world)
        made = await doors.create("read")
        assert await page.sign_in(made["token"]) == 200
        await world.node.doors.audit.settle(10.0)

        _, answer = await doors.ask("GET", "/audit", doors.root)

        acts = [each for each in answer["acts"] if each["action"] == "sign_in"]
        assert len(acts) == 1 and made["id"] in str(acts)
        assert made["token"].split("_")[2] not in str(answer) and page.cookie not in str(answer)
