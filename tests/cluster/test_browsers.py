"""Requests of web browsers: accepted hosts, origins and content types, and what pages of other origins may read."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster.config import BadConfig, Config, HostPort, build
from holdfast.cluster.errors import BadRequest, Circumstance, Forbidden, UnsupportedEncoding
from holdfast.cluster.http.browsers import ADMIN, INGRESS, SEEN_MAX, Browsers
from holdfast.cluster.origins import normal_origin, read_hosts, read_origins, split_host
from tests.cluster.harness import World
from tests.cluster.ingress_rig import rig
from tests.cluster.test_tokens import HANDLERS

EVIL = "http://evil.example"
SHOP = "https://shop.example"
JSON = {"Content-Type": "application/json"}


def door(which: str = ADMIN, **settings: Any) -> Browsers:
    return Browsers(build(settings), which)


def refusal(browsers: Browsers, headers: dict[str, str], method: str = "POST", target: str = "/cluster") -> str:
    """The refusal of the listener; empty if it accepts the request."""
    try:
        browsers.check(method, target, {"Host": "127.0.0.1:9070", **headers})
    except Circumstance as error:
        assert error.hint is not None or isinstance(error, BadRequest)
        return f"{error.status} {error.message} {error.hint}"
    return ""


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1:9070", "127.0.0.1", "127.9.9.9", "localhost:1", "LOCALHOST", "[::1]:9070"])
def test_loopback_is_known(host: str) -> None:
    assert not refusal(door(), {"Host": host})


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:9070", "127.0.0.1.evil.example", "localhost.evil.example", "evil.localhost",
        "192.168.1.5:9070", "n2:9070", "0.0.0.0",
    ],
)  # fmt: skip
def test_an_unknown_host_name_is_refused_even_if_it_resolves_to_loopback(host: str) -> None:
    for which in (ADMIN, INGRESS):
        said = refusal(door(which), {"Host": host})

        assert said.startswith("403") and "allowed_hosts" in said


@pytest.mark.parametrize(
    "host", ["", "a b", "evil.example/", "[::1", "[x]:1", "a:b", "a..b", "*.x", "\udc80", "h" * 300]
)
def test_an_invalid_host_is_refused(host: str) -> None:
    assert refusal(door(), {"Host": host}).startswith("400")


def test_a_node_knows_its_addresses_and_its_configured_names() -> None:
    known = door(
        admin="10.0.0.5:9070",
        ingress="node.lan:8080",
        advertise="n1.internal:5122",
        public_ingress_url="https://api.example/holdfast",
        allowed_hosts="lb.example,*.svc.example,10.9.9.9",
    )

    for name in ("10.0.0.5", "n1.internal", "N1.Internal.", "api.example", "lb.example", "a.svc.example", "10.9.9.9"):
        assert not refusal(known, {"Host": name}), name
    for name in ("10.0.0.6", "n2.internal", "svc.example", "x.lb.example", "evilsvc.example", "xapi.example"):
        assert refusal(known, {"Host": name}), name


def test_a_node_that_listens_everywhere_knows_every_address_and_no_name() -> None:
    everywhere = door(admin="0.0.0.0:9070", auth="tokens")

    assert not refusal(everywhere, {"Host": "192.168.1.5:9070"}) and not refusal(everywhere, {"Host": "[fd00::1]:9070"})
    assert refusal(everywhere, {"Host": "evil.example:9070"})
    assert not refusal(door(allowed_hosts="*", auth="tokens"), {"Host": "evil.example:9070"})


def test_the_memory_for_known_hosts_is_bounded() -> None:
    browsers = door(allowed_hosts="*", auth="tokens")

    for number in range(3 * SEEN_MAX):
        assert not refusal(browsers, {"Host": f"h{number}"})

    assert len(browsers._seen) <= SEEN_MAX


# -- origins -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": EVIL}, {"Origin": "null"}, {"Origin": ""}, {"Origin": "http://127.0.0.1:9071"},
        {"Origin": "http://127.0.0.1"}, {"Origin": "http://localhost:9070"}, {"Origin": "file://"},
        {"Origin": "http://127.0.0.1:9070, http://evil.example"}, {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "nonsense"},
        {"Origin": "http://127.0.0.1:9070", "Sec-Fetch-Site": "cross-site"},
        {"Origin": EVIL, "Sec-Fetch-Site": "same-origin"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "PUT", "OPTIONS", "HEAD"])
def test_pages_of_other_origins_can_neither_act_nor_read(headers: dict[str, str], method: str) -> None:
    for which in (ADMIN, INGRESS):
        said = refusal(door(which), {**headers, **JSON}, method)

        assert said.startswith("403"), said
        assert ("cors_origins" in said) == (which == INGRESS)


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"Origin": "http://127.0.0.1:9070"}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"},
        {"Origin": "https://127.0.0.1:9070", "Sec-Fetch-Site": "same-origin"},
        {"Origin": "https://console.example", "Sec-Fetch-Site": "same-origin"},
        {"Host": "localhost:80", "Origin": "http://localhost"},
    ],
)  # fmt: skip
def test_programs_and_pages_of_the_node_are_accepted(headers: dict[str, str]) -> None:
    for which in (ADMIN, INGRESS):
        assert not refusal(door(which, public_admin_url="https://console.example"), {**headers, **JSON})


def test_a_door_with_tls_refuses_pages_loaded_without_tls(tmp_path: Path) -> None:
    for name in ("cert", "key"):
        (tmp_path / name).touch()
    tls = {"admin_tls_cert": str(tmp_path / "cert"), "admin_tls_key": str(tmp_path / "key")}

    assert refusal(door(**tls), {"Origin": "http://127.0.0.1:9070"})
    assert not refusal(door(**tls), {"Origin": "https://127.0.0.1:9070"})
    assert not refusal(door(INGRESS, **tls), {"Origin": "http://127.0.0.1:9070"})


def test_other_sites_can_link_to_the_page_and_to_nothing_else() -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}

    assert not refusal(door(), link, "GET", "/")
    assert refusal(door(), link, "POST", "/") and refusal(door(), link, "GET", "/invocations")
    assert refusal(door(), {**link, "Sec-Fetch-Dest": "iframe"}, "GET", "/")
    assert refusal(door(), {**link, "Sec-Fetch-Mode": "no-cors"}, "GET", "/")
    assert refusal(door(INGRESS), link, "GET", "/")


def test_a_page_is_recognized_by_its_browser() -> None:
    browsers = door()

    assert browsers.is_same_origin({"Host": "h", "Origin": "http://h"})
    assert browsers.is_same_origin({"Host": "h", "Sec-Fetch-Site": "same-origin"})
    assert not browsers.is_same_origin({"Host": "h"})
    assert not browsers.is_same_origin({"Host": "h", "Sec-Fetch-Site": "none"})
    assert not browsers.is_same_origin({"Host": "h", "Origin": "http://h", "Sec-Fetch-Site": "same-site"})
    assert not browsers.is_same_origin({"Host": "h", "Origin": EVIL, "Sec-Fetch-Site": "same-origin"})


#: Random header values, built from the pieces of real ones.
PIECES = st.sampled_from(
    ["http://", "https://", "127.0.0.1", "localhost", ":9070", "evil.example", "null", "@", "[::1]", " "]
)
VALUES = st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=5).map("".join)


@given(VALUES, st.sampled_from([ADMIN, INGRESS]), st.sampled_from(["GET", "POST", "OPTIONS"]))
def test_for_any_origin_header_only_the_own_origin_is_accepted(origin: str, which: str, method: str) -> None:
    said = refusal(door(which), {"Origin": origin, **JSON}, method)

    own = {f"{scheme}://127.0.0.1:9070" for scheme in ("http", "https")}
    assert (not said) == (origin.lower() in own), said


@given(VALUES)
def test_for_any_host_header_only_known_names_are_accepted(host: str) -> None:
    if not refusal(door(), {"Host": host}):
        name = split_host(host)
        assert name == "localhost" or (name is not None and ipaddress.ip_address(name).is_loopback)


@given(VALUES, VALUES, VALUES)
def test_any_headers_are_accepted_or_refused_with_a_reason(site: str, kind: str, agent: str) -> None:
    headers = {"Sec-Fetch-Site": site, "Content-Type": kind, "User-Agent": agent, "Content-Length": "1"}

    assert refusal(door(), headers)[:3] in ("", "403", "415") and (
        site in ("same-origin", "none") or refusal(door(), headers)
    )


# -- content types -----------------------------------------------------------------------------------------------------

FORMS = (
    "application/x-www-form-urlencoded", "text/plain", "Text/Plain; charset=utf-8", "multipart/form-data; boundary=x",
)  # fmt: skip


@pytest.mark.parametrize("kind", FORMS)
def test_a_browser_cannot_send_the_body_of_a_form_but_curl_can(kind: str) -> None:
    body = {"Content-Type": kind, "Content-Length": "5"}
    for browser in (
        {"Origin": "http://127.0.0.1:9070"},
        {"Sec-Fetch-Site": "none"},
        {"User-Agent": "Mozilla/5.0 (X11)"},
    ):
        assert refusal(door(INGRESS), {**browser, **body}).startswith("415"), browser

    assert not refusal(door(INGRESS), {"User-Agent": "curl/8.5", "Accept": "*/*", **body})


def test_a_body_from_a_browser_needs_a_content_type() -> None:
    page = {"Origin": "http://127.0.0.1:9070"}

    assert refusal(door(INGRESS), {**page, "Content-Length": "5"}).startswith("415")
    assert refusal(door(INGRESS), {**page, "Transfer-Encoding": "chunked"}).startswith("415")
    assert not refusal(door(INGRESS), {**page, "Content-Length": "0"})
    assert not refusal(door(INGRESS), {**page, "Content-Length": "5", "Content-Type": "text/csv"})


async def test_the_admin_api_refuses_form_bodies(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.start()
    assert world.node.doors.admin is not None
    async with aiohttp.ClientSession() as session:
        for kind, expected in (
            *((kind, 415) for kind in FORMS),
            ("application/json", 400),
            ("application/octet-stream", 400),
        ):
            async with session.post(
                f"http://127.0.0.1:{world.node.doors.admin.port}/deployments",
                data=b"{}",
                headers={"Content-Type": kind},
            ) as response:
                assert response.status == expected, await response.text()
    await world.stop()


# -- pages that may use the ingress ------------------------------------------------------------------------------------


def test_a_page_of_an_allowed_origin_may_use_the_ingress_and_never_the_admin_api() -> None:
    headers = {"Origin": SHOP, "Sec-Fetch-Site": "cross-site", **JSON}

    assert not refusal(door(INGRESS, cors_origins=SHOP), headers)
    assert refusal(door(ADMIN, cors_origins=SHOP), headers)
    assert refusal(door(INGRESS, cors_origins=SHOP), {**headers, "Origin": "https://shop.example.evil.example"})
    assert refusal(door(INGRESS, cors_origins=SHOP), {"Sec-Fetch-Site": "cross-site"}, "GET"), "an image says no origin"
    everybody = door(INGRESS, cors_origins="*", auth="tokens")
    assert not refusal(everybody, headers) and refusal(everybody, {**headers, "Origin": "null"})


async def test_a_preflight_is_answered_for_allowed_origins_alone() -> None:
    wanted = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type, idempotency-key",
        "Access-Control-Request-Private-Network": "true",
    }
    async with rig(cors_origins=(SHOP,)) as ready:
        status, body, response = await ready.ask("OPTIONS", "/echo/say", headers={"Origin": SHOP, **wanted})

        assert (status, body) == (204, b"")
        found = {name: value for name, value in response.headers.items() if name.startswith("Access-Control")}
        assert found == {
            "Access-Control-Allow-Origin": SHOP,
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": "authorization,content-type, idempotency-key",
            "Access-Control-Allow-Private-Network": "true",
            "Access-Control-Max-Age": "600",
            "Access-Control-Expose-Headers": "x-holdfast-id, x-holdfast-status, Retry-After",
        }
        for headers in ({"Origin": EVIL, **wanted}, {"Origin": "null", **wanted}):
            status, _, response = await ready.ask("OPTIONS", "/echo/say", headers=headers)
            assert status == 403 and not any(name.startswith("Access-Control") for name in response.headers)
        status, _, _ = await ready.ask("OPTIONS", "/echo/say", headers={"Origin": SHOP})
        assert status == 405, "no preflight"
        assert not ready.partition.invoked


async def test_a_page_of_an_allowed_origin_reads_answers_and_errors() -> None:
    async with rig(cors_origins=(SHOP,)) as ready:
        for path, expected in (("/echo/say", 200), ("/nothing/say", 404)):
            status, _, response = await ready.ask("POST", path, data=b"1", headers={"Origin": SHOP, **JSON})

            assert status == expected and response.headers["Access-Control-Allow-Origin"] == SHOP
            assert response.headers["Vary"] == "Origin"
            assert "Access-Control-Allow-Credentials" not in response.headers
        _, _, response = await ready.ask("POST", "/echo/say", data=b"1")
        assert response.headers["Vary"] == "Origin" and "Access-Control-Allow-Origin" not in response.headers


async def test_a_preflight_needs_no_token(tmp_path: Path) -> None:
    world = World(tmp_path, auth="tokens", cors_origins=("*",))
    await world.start()
    assert world.node.doors.ingress is not None
    headers = {"Origin": SHOP, "Access-Control-Request-Method": "POST"}
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{world.node.doors.ingress.port}/echo/say"
        async with session.options(url, headers=headers) as response:
            assert response.status == 204 and response.headers["Access-Control-Allow-Origin"] == SHOP
        async with session.post(url, headers={"Origin": SHOP}, json=1) as response:
            assert response.status == 401 and response.headers["Access-Control-Allow-Origin"] == SHOP
    await world.stop()


# -- over HTTP ---------------------------------------------------------------------------------------------------------


async def test_both_doors_refuse_foreign_requests_before_acting_on_them(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.start()
    await world.register(HANDLERS)
    assert world.node.doors.admin is not None and world.node.doors.ingress is not None
    async with aiohttp.ClientSession() as session:
        for server, path in ((world.node.doors.admin, "/deployments"), (world.node.doors.ingress, "/echo/say")):
            for headers in ({"Host": "evil.example"}, {"Origin": EVIL}, {"Sec-Fetch-Site": "cross-site"}):
                url = f"http://127.0.0.1:{server.port}{path}"
                async with session.post(url, json={"uri": "http://127.0.0.1:1"}, headers=headers) as response:
                    assert response.status == 403, headers
                    assert not any(name.startswith("Access-Control") for name in response.headers)
    assert not world.endpoints[0].starts and len(world.node.ground.meta.state.deployments) == 1
    await world.stop()


async def test_every_answer_has_security_headers_for_browsers(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.start()
    await world.register(HANDLERS)
    assert world.node.doors.admin is not None and world.node.doors.ingress is not None
    admin, ingress = world.node.doors.admin.port, world.node.doors.ingress.port
    async with aiohttp.ClientSession() as session:
        for method, port, path, value in (
            ("GET", admin, "/", None), ("GET", admin, "/nothing", None), ("GET", admin, "/metrics", None),
            ("GET", ingress, "/", None), ("POST", ingress, "/echo/say", 1), ("GET", ingress, "/holdfast/health", None),
        ):  # fmt: skip
            async with session.request(method, f"http://127.0.0.1:{port}{path}", json=value) as response:
                headers = response.headers
                assert headers["X-Content-Type-Options"] == "nosniff" and headers["X-Frame-Options"] == "DENY"
                assert headers["Referrer-Policy"] == "no-referrer"
                assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
                policy = headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'none';") and "frame-ancestors 'none'" in policy
                assert "unsafe" not in policy and "http" not in policy
                # The page is the same for everyone, so a browser may keep it, and asks whether it has changed.
                expected = None if port == ingress else "no-cache" if path == "/" else "no-store"
                assert headers.get("Cache-Control") == expected
    await world.stop()


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (read_hosts, "a b"), (read_hosts, "http://a"), (read_hosts, "a:80"), (read_hosts, [1]), (read_hosts, "a.*.b"),
        (read_hosts, 5), (read_origins, "shop.example"), (read_origins, "https://a/b"), (read_origins, "null"),
        (read_origins, "ftp://a"), (read_origins, "https://u@a"), (read_origins, "https://*.a"), (read_origins, 5),
    ],
)  # fmt: skip
def test_a_wrong_name_or_origin_is_explained(read: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(ValueError, match="as in"):
        read(value)


def test_names_and_origins_are_normalized() -> None:
    assert read_hosts("A.example., *.B,") == ("a.example", "*.b") and read_hosts(["[::1]".strip("[]")]) == ("::1",)
    assert read_origins(["HTTPS://A:443/", "http://a:8080"]) == ("https://a", "http://a:8080")
    assert normal_origin("http://[::1]:80") == "http://[::1]" and normal_origin("null") is None
    assert split_host("[FD00::1]:80") == "fd00::1"


def test_any_page_may_call_handlers_only_if_tokens_are_required() -> None:
    with pytest.raises(BadConfig, match="cors_origins"):
        build({"cors_origins": "*"})
    assert build({"cors_origins": "*", "auth": "tokens"}).cors_origins == ("*",)


@pytest.mark.parametrize("auth", [{}, {"auth": "off"}])
def test_any_host_may_be_named_only_if_tokens_are_required(auth: dict[str, str]) -> None:
    with pytest.raises(BadConfig, match="allowed_hosts"):
        build({"allowed_hosts": "*", **auth})


def test_a_form_and_a_foreign_page_are_different_errors() -> None:
    browsers = Browsers(Config(admin=HostPort("127.0.0.1", 9070)), ADMIN)
    with pytest.raises(Forbidden):
        browsers.check("POST", "/", {"Origin": EVIL})
    with pytest.raises(UnsupportedEncoding):
        browsers.check("POST", "/", {"User-Agent": "Mozilla/5.0", "Content-Type": "text/plain"})
