"""The console in a real browser: its main paths, what each role sees, and that nothing in it breaks the policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.browser.chromium import Tab, browser, find
from tests.cluster.harness import Handled, Script, World
from tests.cluster.test_tokens import Doors, one

pytestmark = pytest.mark.slow("starts a browser")

PAGES = (
    "overview",
    "invocations",
    "inbox",
    "services",
    "services/echo",
    "objects",
    "cluster",
    "sql",
    "webhooks",
    "audit",
    "tokens",
)
#: Reports what the policy forbids, and what no code caught. Added to each page before its own scripts.
WATCH = """
window.problems = [];
addEventListener("securitypolicyviolation", (event) =>
  problems.push("policy: " + event.violatedDirective + " " + event.blockedURI));
addEventListener("error", (event) => problems.push("error: " + event.message));
addEventListener("unhandledrejection", (event) => problems.push("rejection: " + event.reason));
const report = console.error;
console.error = (...words) => { problems.push("console: " + words.join(" ")); report(...words); };
"""
#: Controls that a screen reader could not tell apart.
UNNAMED = """
return [...document.querySelectorAll("button, a[href], input, select, textarea")].filter((each) =>
  !(each.textContent.trim() || each.getAttribute("aria-label") || each.title || each.labels?.length))
  .map((each) => each.outerHTML);
"""


@pytest.fixture(autouse=True)
def _browser_installed() -> None:
    """Skip before a node is started, which a skip in the middle of a test would leave running."""
    find()


async def hold(handled: Handled) -> None:
    """Never end, so that somebody can cancel it."""
    await asyncio.Event().wait()


async def steps(handled: Handled) -> None:
    handled.run("charge card", b'{"paid": true}')
    handled.output(b'"done"')


HANDLERS: dict[str, Script] = {"shop/hold": hold, "shop/buy": steps}


class Console:
    """The console in a tab, and the node behind it."""

    def __init__(self, tab: Tab, doors: Doors, world: World) -> None:
        assert world.node.doors.admin is not None
        self.tab = tab
        self.doors = doors
        self.world = world
        self.base = f"http://127.0.0.1:{world.node.doors.admin.port}"

    async def sign_in(self, *roles: str) -> None:
        made = await self.doors.create(*roles)
        await self.tab.open(f"{self.base}/")
        await self.sign_in_with(made["token"])

    async def sign_in_with(self, token: str) -> None:
        await self.tab.until("document.getElementById('token') !== null")
        await self.tab.run(
            f"document.getElementById('token').value = '{token}'; document.querySelector('form button').click();"
        )
        await self.tab.until("document.getElementById('signed-in') !== null")

    async def go(self, path: str) -> None:
        await self.tab.run(f"location.hash = '#/{path}'")

    async def click(self, selector: str) -> None:
        await self.tab.until(f"document.querySelector({json.dumps(selector)}) !== null")
        await self.tab.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def shows(self, text: str) -> None:
        await self.tab.until(f"document.querySelector('main')?.textContent.includes({json.dumps(text)})")

    async def send(self, handler: str) -> str:
        status, answer = await self.doors.ask("POST", f"/shop/{handler}/send", self.doors.root, door="ingress", value=1)
        assert status == 202, answer
        id_: str = answer["invocationId"]
        return id_

    async def is_cancelled(self, id_: str) -> bool:
        """Whether somebody has asked it to stop. The handlers here do not react."""
        cancelling: bool = (await self.doors.ask("GET", f"/invocations/{id_}", self.doors.root))[1]["cancelling"]
        return cancelling


@asynccontextmanager
async def console(path: Path, width: int = 1440, height: int = 900) -> AsyncIterator[Console]:
    async with one(path / "node") as (world, doors), browser(path) as chromium:
        await world.register(HANDLERS)
        tab = await chromium.tab()
        await tab.send("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        await tab.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        opened = Console(tab, doors, world)
        yield opened
        assert await tab.run("return window.problems") == [], "the policy forbids nothing that the console does"


async def test_an_operator_finds_an_invocation_and_cancels_it(tmp_path: Path) -> None:
    async with console(tmp_path) as page:
        id_ = await page.send("hold")
        await page.sign_in("operate")

        await page.go("invocations?service=shop&handler=hold")
        await page.click(f'a[href="#/invocations/{id_}"]')
        await page.tab.until("document.querySelector('#status')?.textContent.includes('running')")
        await page.tab.screenshot(tmp_path / "running.png")
        await page.click('[data-action="cancel"]')
        await page.click("#confirm")

        await page.shows("It is being cancelled.")
        assert await page.is_cancelled(id_)


async def test_a_reader_sees_everything_and_no_way_to_change_it(tmp_path: Path) -> None:
    async with console(tmp_path) as page:
        id_ = await page.send("hold")
        await page.sign_in("read")

        await page.go("invocations")
        await page.tab.until(f"document.querySelector('a[href=\"#/invocations/{id_}\"]') !== null")
        boxes = await page.tab.run("return document.querySelectorAll('main input[type=checkbox]').length")
        await page.go(f"invocations/{id_}")
        await page.tab.until("document.querySelector('#status') !== null")

        assert boxes == 0
        assert await page.tab.run("return document.querySelectorAll('[data-action]').length") == 0
        names = await page.tab.run(
            "return [...document.querySelectorAll('.rail .item')].map((each) => each.textContent.trim())"
        )
        assert "Invocations" in names and "Tokens" not in names and "Audit" not in names
        await page.go("cluster")
        await page.shows("Partitions")
        words = "return [...document.querySelectorAll('main button')].map((each) => each.textContent.trim()).join(' ')"
        offered = await page.tab.run(words)
        assert not any(word in offered for word in ("Add a node", "Back up", "Drain")), offered
        await page.go("services")
        await page.shows("shop")
        assert "Register" not in await page.tab.run(words)


async def test_the_timeline_shows_each_step_and_its_outcome(tmp_path: Path) -> None:
    async with console(tmp_path) as page:
        id_ = await page.send("buy")
        await page.sign_in("read")

        await page.go(f"invocations/{id_}")
        await page.click(".wf-row")

        await page.tab.until("document.querySelector('.drawer')?.textContent.includes('paid')")
        assert "step=1" in await page.tab.run("return location.hash"), "a link leads to the same step"
        assert await page.tab.run("return document.getElementById('restart-here')") is None


async def test_acts_on_many_name_their_number_and_want_the_word(tmp_path: Path) -> None:
    async with console(tmp_path) as page:
        ids = [await page.send("hold") for _ in range(12)]
        await page.sign_in("operate")

        await page.go("invocations?service=shop")
        await page.tab.until("document.querySelectorAll('.invocation-row.line').length === 12")
        await page.click('.head input[type="checkbox"]')
        await page.tab.run(
            "[...document.querySelectorAll('.bulk button')].find((each) => each.textContent.trim() === 'Cancel').click()"
        )
        await page.tab.until("document.getElementById('confirm-word') !== null")
        question = await page.tab.run("return document.querySelector('dialog').textContent")
        disabled = await page.tab.run("return document.getElementById('confirm').disabled")
        await page.tab.run(
            "const field = document.getElementById('confirm-word'); field.value = 'cancel';"
            "field.dispatchEvent(new Event('input', {bubbles: true}))"
        )
        await page.tab.until("!document.getElementById('confirm').disabled")
        before = [each for each in ids if await page.is_cancelled(each)]
        await page.click("#confirm")

        assert "Cancel 12 invocations?" in question and disabled
        assert before == [], "nothing happens before the word is typed"
        await page.tab.until("document.querySelector('.toast')?.textContent.includes('12 done')")
        assert all([await page.is_cancelled(each) for each in ids])


async def test_a_new_invocation_appears_while_somebody_watches(tmp_path: Path) -> None:
    async with console(tmp_path) as page:
        await page.sign_in("read")
        await page.go("invocations?service=shop")
        await page.shows("Nothing matches")

        id_ = await page.send("hold")

        await page.tab.until(f"document.querySelector('a[href=\"#/invocations/{id_}\"]') !== null")


async def test_a_link_with_a_query_runs_it(tmp_path: Path) -> None:
    async with console(tmp_path) as page:
        ids = [await page.send("hold") for _ in range(3)]
        await page.sign_in("read")

        query = {"q": "select id, handler from invocations where service = 'shop' order by id"}
        await page.go(f"sql?{urlencode(query)}")

        await page.shows("3 rows")
        links = "return [...document.querySelectorAll('.sql-row a')].map((each) => each.textContent)"
        assert await page.tab.run(links) == sorted(ids)


async def test_what_is_paused_for_everybody_is_on_every_page_until_it_is_resumed(tmp_path: Path) -> None:
    async with console(tmp_path) as page:
        await page.doors.ask(
            "POST", "/pauses", page.doors.root, value={"service": "shop", "reason": "the bank is down"}
        )
        await page.sign_in("operate")

        await page.go("cluster")
        await page.shows("the bank is down")
        await page.click(".banner button")

        await page.tab.until("document.querySelector('.banner') === null")
        assert (await page.doors.ask("GET", "/pauses", page.doors.root))[1]["services"] == []


async def test_a_second_visit_loads_no_file_again_and_asks_before_its_modules_run(tmp_path: Path) -> None:
    async with console(tmp_path) as page:
        await page.sign_in("read")
        await page.tab.open(f"{page.base}/")
        await page.tab.until("document.querySelector('.tile strong') !== null")
        loaded = await page.tab.run(
            "return performance.getEntriesByType('resource').map((each) => "
            "({path: new URL(each.name).pathname, bytes: each.transferSize, by: each.initiatorType, at: each.startTime}))"
        )
        files = [each for each in loaded if each["path"].startswith("/console/")]
        asked = [each["path"] for each in sorted(loaded, key=lambda each: each["at"]) if each not in files]

        assert len(files) > 20 and [each["path"] for each in files if each["bytes"] > 0] == []
        assert set(asked[:6]) == {"/session", "/cluster", "/deployments", "/pauses", "/services", "/statistics"}, asked


TYPE = """
const field = document.querySelector('.try-it textarea');
field.value = %s;
field.dispatchEvent(new Event('input', {bubbles: true}));
"""


async def test_a_handler_is_called_from_its_page_and_its_outcome_appears_there(tmp_path: Path) -> None:
    async with console(tmp_path) as page:
        await page.sign_in("read", "invoke")
        await page.go("services/shop?handler=buy")
        await page.tab.until("document.getElementById('call') !== null")

        await page.tab.run(TYPE % "'{\"items\": ['")
        await page.click("#call")
        await page.tab.until("document.querySelector('.try-it textarea').matches(':invalid')")
        assert (await page.doors.ask("GET", "/invocations?service=shop", page.doors.root))[1]["invocations"] == []
        await page.tab.run(TYPE % "'{\"items\": [7]}'")
        await page.click("#call")

        await page.tab.until("document.querySelector('.started .status')?.textContent.includes('succeeded')")
        assert '"done"' in await page.tab.run("return document.querySelector('.started .json').textContent")
        id_ = await page.tab.run("return document.querySelector('.started').dataset.invocation")
        journal = (await page.doors.ask("GET", f"/invocations/{id_}/journal", page.doors.root))[1]
        assert journal["steps"][0]["outcome"] == {"value": {"items": [7]}}
        await page.tab.run("document.querySelector('.started a[href*=\"invocations/\"]').click()")
        await page.tab.until("document.querySelector('#status')?.textContent.includes('succeeded')")


async def test_only_what_a_token_may_invoke_has_a_button_to_call_it(tmp_path: Path) -> None:
    async with console(tmp_path) as page:
        made = await page.doors.create("read", "invoke", services=("echo",))
        await page.tab.open(f"{page.base}/")
        await page.sign_in_with(made["token"])

        await page.go("services/echo")
        await page.shows("Try say")
        assert await page.tab.run("return document.getElementById('call') !== null")
        await page.go("services/shop")
        await page.shows("Your token may not call this")

        assert await page.tab.run("return document.getElementById('call')") is None


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (1024, 768), (390, 844)])
async def test_every_page_opens_without_a_fault_and_fits(tmp_path: Path, width: int, height: int) -> None:
    async with console(tmp_path, width, height) as page:
        id_ = await page.send("buy")
        await page.sign_in("admin")

        for path in (*PAGES, f"invocations/{id_}", "nothing"):
            await page.go(path)
            await page.tab.until("document.querySelector('main h1, main h2') !== null")
            name = path.replace("/", "-")
            await page.tab.screenshot(tmp_path / f"{name}-{width}.png")
            assert "has a fault" not in await page.tab.run("return document.querySelector('main').textContent"), path
            wider = await page.tab.run("return document.documentElement.scrollWidth - innerWidth")
            assert wider <= 0, f"{path} is {wider} px wider than the screen"
            unnamed = await page.tab.run(UNNAMED)
            assert unnamed == [], f"{path} has controls without a name"


async def test_a_node_that_does_not_answer_is_a_banner_and_not_an_empty_page(tmp_path: Path) -> None:
    async with console(tmp_path) as page:
        await page.send("hold")
        await page.sign_in("read")
        await page.go("invocations")
        await page.tab.until("document.querySelectorAll('.invocation-row.line').length === 1")

        await page.tab.send("Network.enable")
        offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        await page.tab.send("Network.emulateNetworkConditions", offline=True, **offline)
        await page.tab.until("document.querySelector('.banner') !== null")

        assert await page.tab.run("return document.querySelectorAll('.invocation-row.line').length") == 1
        await page.tab.send("Network.emulateNetworkConditions", offline=False, **offline)
        await page.tab.until("document.querySelector('.banner') === null")


async def test_search_leads_to_pages_services_and_invocations_by_keyboard(tmp_path: Path) -> None:
    async with console(tmp_path) as page:
        id_ = await page.send("buy")
        await page.sign_in("read")
        key = {"key": "k", "code": "KeyK", "windowsVirtualKeyCode": 75, "modifiers": 2}

        await page.tab.send("Input.dispatchKeyEvent", type="keyDown", **key)
        await page.tab.until(
            "document.querySelector('dialog [role=combobox]') === document.activeElement && document.activeElement"
        )
        await page.tab.send("Input.insertText", text=id_)
        await page.tab.until("document.querySelector('[role=option]')?.textContent.includes('open invocation')")
        enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        await page.tab.send("Input.dispatchKeyEvent", type="keyDown", **enter)

        await page.tab.until("document.querySelector('#status')?.textContent.includes('succeeded')")
        assert (await page.tab.run("return location.hash")).endswith(id_)
