"""Pages of other origins in a real browser: whatever they send to a node, they can neither act nor read answers.

The node requires no tokens, as on an engineer's machine. Each attack is also made on a node without the checks, and must
succeed there: otherwise it would prove nothing.
"""

from __future__ import annotations

import asyncio
import html
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from holdfast.cluster.http.browsers import Browsers
from holdfast.sdk import Context, Server, Service
from holdfast.sdk.ids import NodeId
from holdfast.statemachine.members import REMOVED
from tests.browser.chromium import Tab, browser, find
from tests.cluster.harness import FakeEndpoint, Handled, Script, World, eventually
from tests.cluster.test_tokens import one

pytestmark = pytest.mark.slow("starts a browser")

SECRET = "tell-nobody"
#: The ways in which a page tries to send requests. Its answers are the parts that it could read.
SENDERS = """
const texts = [];
async function ask(url, options) {
  try {
    const response = await fetch(url, options);
    texts.push(await response.text());
  } catch {}
}
async function post(url, body) {
  for (const mode of ["cors", "no-cors"]) {
    for (const type of ["text/plain", "application/x-www-form-urlencoded", "application/json", ""]) {
      const headers = type === "" ? {} : { "Content-Type": type };
      const data = type === "" ? new Blob([body]) : body;
      await ask(url, { method: "POST", mode, headers, credentials: "include", body: data });
    }
  }
  navigator.sendBeacon(url, new Blob([body], { type: "text/plain" }));
  await form(url, body, "text/plain");
}
async function form(url, body, encoding) {
  const frame = document.createElement("iframe");
  frame.name = "f" + Math.random();
  document.body.append(frame);
  const form = document.createElement("form");
  Object.assign(form, { method: "POST", action: url, enctype: encoding, target: frame.name });
  const field = document.createElement("input");
  // The body becomes name=value, so a little goes into a field that nobody reads.
  Object.assign(field, body ? { name: body.slice(0, -1) + ',"x":"', value: '"}' } : { name: "a", value: "b" });
  form.append(field);
  document.body.append(form);
  const loaded = new Promise((resolve) => { frame.onload = resolve; setTimeout(resolve, 1500); });
  form.submit();
  await loaded;
  read(frame);
}
function read(frame) {
  try { texts.push(frame.contentDocument.documentElement.outerHTML); } catch {}
}
async function embed(url) {
  for (const kind of ["script", "img", "iframe", "link"]) {
    const element = document.createElement(kind);
    const loaded = new Promise((resolve) => {
      element.onload = () => { texts.push("loaded " + kind); resolve(); };
      element.onerror = resolve;
      setTimeout(resolve, 1500);
    });
    if (kind === "link") { element.rel = "stylesheet"; element.href = url; } else { element.src = url; }
    document.body.append(element);
    await loaded;
    if (kind === "iframe") { texts.pop(); read(element); }
  }
}
"""

#: What the console shows of its user.
SIGNED_IN = "document.getElementById('signed-in')?.textContent.replace(/\\s+/g, ' ').trim() === '%s %s'"
#: The requests of the node's own page.
SIGN_IN = """
async function signIn(token) {
  const headers = { "Content-Type": "application/json" };
  return (await fetch("/session", { method: "POST", headers, body: JSON.stringify({ token }) })).status;
}
"""


@pytest.fixture(autouse=True)
def _browser_installed() -> None:
    """Skip before a node is started, which a skip in the middle of a test would leave running."""
    find()


async def echo(handled: Handled) -> None:
    handled.output(handled.input)


async def hold(handled: Handled) -> None:
    """Never end, so that a test can kill it."""
    await asyncio.Event().wait()


HANDLERS: dict[str, Script] = {f"{SECRET}/say": echo, f"{SECRET}/hold": hold}


class Victim:
    """A node with state to lose, and an endpoint that an attacker wants to register."""

    def __init__(self, world: World, loot: FakeEndpoint, session: aiohttp.ClientSession) -> None:
        assert world.node.doors.admin is not None and world.node.doors.ingress is not None
        self.world = world
        self.loot = loot
        self.session = session
        self.admin = f"http://127.0.0.1:{world.node.doors.admin.port}"
        self.ingress = f"http://127.0.0.1:{world.node.doors.ingress.port}"
        self.started = 0
        self.id = ""

    async def prepare(self) -> None:
        node = {"name": "ghost", "address": "127.0.0.1:9"}
        async with self.session.post(f"{self.admin}/cluster/nodes", json=node) as response:
            assert response.status == 200, await response.text()
        async with self.session.post(f"{self.ingress}/{SECRET}/hold/send", json=1) as response:
            self.id = (await response.json())["invocationId"]
        await eventually(lambda: self.world.endpoints[0].starts, "the attempt starts")
        self.started = len(self.world.endpoints[0].starts)

    def attack(self, admin: str, ingress: str) -> str:
        """The script of a page that does as much harm as it can."""
        body = json.dumps({"uri": self.loot.uri})
        return (
            SENDERS
            + f"""
            await post("{admin}/deployments", {json.dumps(body)});
            await post("{admin}/invocations/{self.id}/kill", "");
            await post("{admin}/cluster/nodes/ghost/remove?force=true", "");
            await post("{ingress}/{SECRET}/say", "1");
            await ask("{admin}/services", {{ mode: "cors", credentials: "include" }});
            await ask("{admin}/services", {{ mode: "no-cors" }});
            await embed("{admin}/services");
            await ask("{ingress}/holdfast/health", {{ mode: "cors" }});
            return texts.join("\\n");
        """
        )

    async def damage(self, seen: str) -> set[str]:
        """The effects that the page achieved."""
        found = set()
        if len(self.world.node.ground.meta.state.deployments) > 1:
            found.add("registered a deployment")
        async with self.session.get(f"{self.admin}/invocations/{self.id}") as response:
            if (await response.json())["status"] == "completed":
                found.add("killed an invocation")
        if self.world.node.ground.meta.state.membership.nodes[NodeId("ghost")].state == REMOVED:
            found.add("removed a node")
        if len(self.world.endpoints[0].starts) > self.started:
            found.add("invoked a handler")
        if SECRET in seen or '"status"' in seen or "loaded" in seen:
            found.add("read something")
        return found


EVERYTHING = {"registered a deployment", "killed an invocation", "removed a node", "invoked a handler"}


@asynccontextmanager
async def victim(path: Path) -> AsyncIterator[Victim]:
    world = World(path)
    await world.start()
    await world.register(HANDLERS)
    loot = FakeEndpoint({"loot/take": echo})
    await loot.start()
    async with aiohttp.ClientSession() as session:
        prepared = Victim(world, loot, session)
        await prepared.prepare()
        yield prepared
    await loot.stop()
    await world.stop()


@asynccontextmanager
async def site(page: str = "<!doctype html><body>evil</body>") -> AsyncIterator[int]:
    """The attacker's own server."""

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(text=page, content_type="text/html")

    server = await asyncio.get_running_loop().create_server(web.Server(answer), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


def switch_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Browsers, "check", lambda *_: None)
    monkeypatch.setattr("holdfast.cluster.admin.parameters.check_no_form", lambda _: None)


@asynccontextmanager
async def attacker(path: Path, node: Victim, origin: str) -> AsyncIterator[str]:
    """Attack from a page of this origin, and return what it could read."""
    script = node.attack(node.admin, node.ingress)
    async with browser(path, resolve="evil.example") as chromium:
        tab = await chromium.tab()
        if origin != "null":
            async with site() as port:
                await tab.open(f"{origin}:{port}/")
                yield await tab.run(script)
            return
        # A sandboxed page has no origin.
        frame = f"<script>(async () => {{ {script} }})().then((text) => parent.postMessage(text, '*'))</script>"
        page = (
            "<!doctype html><body><script>onmessage = (event) => { window.seen = event.data; };</script>"
            f'<iframe sandbox="allow-scripts allow-forms" srcdoc="{html.escape(f"<body>{frame}</body>")}"></iframe></body>'
        )
        async with site(page) as port:
            await tab.open(f"http://evil.example:{port}/")
            await tab.until("window.seen !== undefined")
            yield await tab.run("return window.seen")


ORIGINS = ["http://evil.example", "http://127.0.0.1", "http://localhost", "null"]


@pytest.mark.parametrize("origin", ORIGINS)
async def test_a_page_of_another_origin_can_do_nothing(tmp_path: Path, origin: str) -> None:
    async with victim(tmp_path) as node, attacker(tmp_path, node, origin) as seen:
        assert await node.damage(seen) == set(), seen


@pytest.mark.parametrize("origin", ["http://evil.example", "null"])
async def test_the_same_page_succeeds_on_a_node_without_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str
) -> None:
    switch_off(monkeypatch)
    async with victim(tmp_path) as node, attacker(tmp_path, node, origin) as seen:
        assert await node.damage(seen) == EVERYTHING, "other origins still cannot read: that is the browser's own rule"


async def rebound(tab: Tab, node: Victim) -> str:
    """A name that served the attacker's page now resolves to the node: for the browser, both are one origin."""
    seen = []
    for door in (node.admin, node.ingress):
        own = f"http://rebind.example:{door.rpartition(':')[2]}"
        await tab.serve(f"{own}/attack", "<!doctype html><body>evil</body>")
        await tab.open(f"{own}/attack")
        other = node.attack(own, node.ingress) if door == node.admin else node.attack(node.admin, own)
        seen.append(await tab.run(other))
    return "\n".join(seen)


async def test_a_page_whose_name_resolves_to_loopback_can_do_nothing(tmp_path: Path) -> None:
    async with victim(tmp_path) as node, browser(tmp_path, resolve="rebind.example") as chromium:
        seen = await rebound(await chromium.tab(), node)

        assert await node.damage(seen.replace("this node is not known as", "")) == set(), seen


async def test_rebinding_succeeds_on_a_node_without_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    switch_off(monkeypatch)
    async with victim(tmp_path) as node, browser(tmp_path, resolve="rebind.example") as chromium:
        seen = await rebound(await chromium.tab(), node)

        assert await node.damage(seen) == {*EVERYTHING, "read something"}


@pytest.mark.parametrize("checks", [True, False])
async def test_a_page_cannot_reach_handlers_past_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checks: bool
) -> None:
    """Pages may open a WebSocket to every address, and read its messages."""
    if not checks:
        monkeypatch.setattr("holdfast.sdk.server.is_from_page", lambda *_: False)
    service = Service("greeter")

    @service.handler
    async def greet(ctx: Context, name: str) -> str:
        return name

    server = Server([service])
    await server.start(port=0)
    async with site() as port, browser(tmp_path, resolve="evil.example") as chromium:
        tab = await chromium.tab()
        await tab.open(f"http://evil.example:{port}/")

        heard = await tab.run(
            f"const socket = new WebSocket('{server.uri.replace('http', 'ws')}/stream');"
            "return await new Promise((resolve) => {"
            "socket.onmessage = () => resolve('a frame'); socket.onerror = () => resolve('nothing'); })"
        )

        assert heard == ("nothing" if checks else "a frame")
    await server.stop()


# -- the console -------------------------------------------------------------------------------------------------------


async def test_a_user_signs_in_and_out_at_the_page(tmp_path: Path) -> None:
    async with one(tmp_path / "node") as (world, doors), browser(tmp_path) as chromium:
        made = await doors.create("operate")
        assert world.node.doors.admin is not None
        tab = await chromium.tab()
        await tab.open(f"http://127.0.0.1:{world.node.doors.admin.port}/")
        await tab.until("document.getElementById('token') !== null")
        await tab.screenshot(tmp_path / "sign-in.png")
        fill = "document.getElementById('token').value = '%s'; document.querySelector('form button').click();"

        await tab.run(fill % "hf_nobody_nothing")
        await tab.until("document.getElementById('problem').textContent.includes('not valid')")
        await tab.run(fill % made["token"])
        await tab.until(SIGNED_IN % ("tests", "operate"))

        await tab.screenshot(tmp_path / "signed-in.png")
        assert await tab.run("return document.cookie") == "", "scripts cannot see the session"
        assert await tab.run("return getComputedStyle(document.querySelector('.rail')).display") == "flex", "styled"
        kill = "return (await fetch('/invocations/kill?service=echo', {method: 'POST'})).status"
        assert await tab.run(kill) == 200
        await tab.run("document.getElementById('sign-out').click()")
        await tab.until("document.getElementById('sign-in') !== null")
        assert await tab.run(kill) == 401


@pytest.mark.parametrize("checks", [True, False])
async def test_pages_of_other_ports_cannot_use_the_session_of_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checks: bool
) -> None:
    """They share the host, so the browser sends the cookie with their requests."""
    if not checks:
        switch_off(monkeypatch)
        monkeypatch.setattr(Browsers, "is_same_origin", lambda *_: True)
    async with one(tmp_path / "node") as (world, doors), site() as port, browser(tmp_path) as chromium:
        made = await doors.create("admin")
        assert world.node.doors.admin is not None
        admin = f"http://127.0.0.1:{world.node.doors.admin.port}"
        tab = await chromium.tab()
        await tab.open(f"{admin}/")
        assert await tab.run(f"{SIGN_IN} return await signIn('{made['token']}')") == 200
        other = await chromium.tab()
        await other.open(f"http://127.0.0.1:{port}/")
        body = json.dumps(json.dumps({"name": "thief", "roles": ["admin"]}))

        seen = await other.run(
            f"{SENDERS} await post('{admin}/tokens', {body}); await ask('{admin}/tokens', {{credentials: 'include'}});"
            f"await embed('{admin}/services'); return texts.join(' ')"
        )

        tokens = str((await doors.ask("GET", "/tokens", doors.root))[1])
        assert ("thief" in tokens) == (not checks)
        assert not any(word in seen for word in ("tests", "loaded", "echo")), seen
        assert await tab.run("return (await (await fetch('/session')).json()).name") == "tests", "still signed in"


async def test_a_link_from_another_site_opens_the_page_for_a_signed_in_user(tmp_path: Path) -> None:
    async with one(tmp_path / "node") as (world, doors), browser(tmp_path, resolve="wiki.example") as chromium:
        made = await doors.create("read")
        assert world.node.doors.admin is not None
        admin = f"http://127.0.0.1:{world.node.doors.admin.port}"
        tab = await chromium.tab()
        await tab.open(f"{admin}/")
        assert await tab.run(f"{SIGN_IN} return await signIn('{made['token']}')") == 200
        async with site(f"<!doctype html><body><a href='{admin}/'>console</a></body>") as port:
            await tab.open(f"http://wiki.example:{port}/")
            await tab.run("document.querySelector('a').click()")

            await tab.until(SIGNED_IN % ("tests", "read"))
