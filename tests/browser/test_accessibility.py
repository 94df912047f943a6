"""Everybody can use the console: axe finds nothing serious, the keyboard reaches everything, and long lists stay light."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import Tab, find
from tests.browser.test_console import PAGES, Console, console
from tests.cluster.serving import HANDLERS

pytestmark = pytest.mark.slow("starts a browser")

AXE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"
CHECK = """
const found = await axe.run(document, {resultTypes: ["violations"]});
return found.violations.filter((each) => ["serious", "critical"].includes(each.impact))
  .map((each) => `${each.id}: ${each.nodes.map((node) => node.html.slice(0, 200)).join(" | ")}`);
"""
#: What makes a page wider than its place.
WIDER = """
const main = document.querySelector("main");
if (main.scrollWidth <= main.clientWidth) return [];
return [main, ...main.querySelectorAll("*")].filter((each) => each.getBoundingClientRect().right > main.clientWidth + 1
  && !each.closest(".scroll-x")).map((each) => `${each.tagName} ${each.className} ${each.textContent.slice(0, 60)}`);
"""
#: A row of the list, for the time it takes to show others: script, style and layout, without painting.
SCROLL = """
const box = document.querySelector(".virtual");
const took = [];
for (let at = 0; at < 60; at += 1) {
  const began = performance.now();
  box.scrollTop = (box.scrollHeight - box.clientHeight) * (at % 30) / 29;
  box.dispatchEvent(new Event("scroll"));
  await new Promise((resolve) => setTimeout(resolve));
  box.getBoundingClientRect();
  took.push(performance.now() - began);
}
return took.sort((a, b) => a - b)[30];
"""
FOCUSED = """
const at = document.activeElement;
const style = getComputedStyle(at);
return {
  name: (at.textContent.trim() || at.getAttribute("aria-label") || at.title || at.name || at.tagName).replace(/\\s+/g, " "),
  tag: at.tagName, visible: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0,
  dialog: Boolean(at.closest("dialog")), main: Boolean(at.closest("main")),
};
"""


@pytest.fixture(autouse=True)
def _browser_installed() -> None:
    """Skip before a node is started."""
    find()


@pytest.fixture(scope="module")
def axe() -> str:
    if not AXE.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("there is no npm on this machine, which installs axe-core in tests/browser")
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            pytest.skip(f"npm cannot install axe-core: {done.stderr[-300:]}")
    return AXE.read_text()


async def seed(page: Console) -> dict[str, str]:
    """Invocations in every state that a page shows, by their handler."""
    await page.world.register(HANDLERS)
    ids = {}
    for path in ("echo/say", "trips/book", "agent/wait", "flaky/fail", "flaky/stop", "payments/pay", "counter/a/add"):
        status, answer = await page.doors.ask("POST", f"/{path}/send", page.doors.root, door="ingress", value=1)
        assert status == 202, answer
        ids[path] = answer["invocationId"]
    return ids


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
async def test_axe_finds_nothing_serious(tmp_path: Path, axe: str, theme: str, width: int, height: int) -> None:
    async with console(tmp_path, width, height) as page:
        ids = await seed(page)
        await page.tab.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        await page.tab.open(f"{page.base}/")
        await page.tab.until("document.getElementById('token') !== null")
        await page.tab.send("Runtime.evaluate", expression=axe)
        assert await page.tab.run(CHECK) == [], "the page to sign in"
        await page.sign_in_with((await page.doors.create("admin"))["token"])

        places = [
            *PAGES,
            "services/counter?handler=add",
            "objects/counter",
            "objects/counter/a",
            "sql?q=select+id,+status+from+invocations",
            *(f"invocations/{id_}" for id_ in ids.values()),
            *(f"invocations/{ids['trips/book']}?tab={tab}" for tab in ("journal", "tree", "state", "record")),
            f"invocations/{ids['trips/book']}?step=1",
            "nothing",
        ]
        for place in places:
            await page.go(place)
            await page.tab.until("document.querySelector('main h1, main h2') !== null")
            await quiet(page.tab)
            assert await page.tab.run(CHECK) == [], place
            assert await page.tab.run(WIDER) == [], f"{place} scrolls sideways"

        await page.go(f"invocations/{ids['flaky/fail']}")
        for opener in ('[data-action="cancel"]', ".command"):
            await page.click(opener)
            await page.tab.until("document.querySelector('dialog[open]') !== null")
            assert await page.tab.run(CHECK) == [], opener
            await page.tab.press("Escape")
            await page.tab.until("document.querySelector('dialog') === null")


async def quiet(tab: Tab) -> None:
    """Wait until nothing of the page has changed for a moment, at most two seconds: a live page never stops."""
    await tab.run(
        "await new Promise((resolve) => { let timer = setTimeout(resolve, 250);"
        "const watch = new MutationObserver(() => { clearTimeout(timer); timer = setTimeout(resolve, 250); });"
        "watch.observe(document, {subtree: true, childList: true}); setTimeout(resolve, 2000); })"
    )


async def tabbed(tab: Tab, times: int) -> list[dict[str, Any]]:
    """What the focus comes to."""
    found = []
    for _ in range(times):
        await tab.press("Tab")
        found.append(await tab.run(FOCUSED))
    return found


async def test_the_keyboard_reaches_every_action_and_shows_where_it_is(tmp_path: Path) -> None:
    async with console(tmp_path) as page:
        ids = await seed(page)
        await page.sign_in("operate", "invoke")
        for place in (
            f"invocations/{ids['flaky/fail']}",
            "services/counter?handler=add",
            "cluster",
            "objects/counter/a",
        ):
            await page.go(place)
            await page.tab.until("document.querySelector('main h1') !== null")
            await quiet(page.tab)
            wanted = await page.tab.run(
                "return [...document.querySelectorAll('main button, main input, main select, main textarea, main summary')]"
                ".filter((each) => !each.disabled && each.checkVisibility()).length"
            )
            await page.tab.run("document.querySelector('main').focus()")
            seen = [each for each in await tabbed(page.tab, 80) if each["main"]]

            controls = [each for each in seen if each["tag"] in ("BUTTON", "INPUT", "SELECT", "TEXTAREA", "SUMMARY")]
            assert len(controls) >= wanted > 0, (place, wanted, [each["name"] for each in controls])
            assert [each for each in seen if not each["visible"]] == [], place


async def test_a_dialog_keeps_the_focus_and_gives_it_back(tmp_path: Path) -> None:
    async with console(tmp_path) as page:
        ids = await seed(page)
        await page.sign_in("operate")
        await page.go(f"invocations/{ids['flaky/fail']}")
        focused = "return document.activeElement.outerHTML"

        await page.tab.until("document.querySelector('[data-action=cancel]') !== null")
        await page.tab.run("document.querySelector('[data-action=cancel]').focus()")
        opener = await page.tab.run(focused)
        await page.tab.press("Enter")
        await page.tab.until("document.querySelector('dialog[open]') !== null")
        # At the end of a dialog the browser itself has a turn, which the page sees as its body.
        outside = [each for each in await tabbed(page.tab, 8) if not each["dialog"] and each["tag"] != "BODY"]
        await page.tab.press("Escape")
        await page.tab.until("document.querySelector('dialog') === null")

        assert outside == []
        await page.tab.until("document.activeElement.matches('[data-action=cancel]')")
        assert await page.tab.run(focused) == opener
        await page.tab.press("Enter")
        await page.tab.until("document.querySelector('dialog[open]') !== null")
        await page.tab.run("document.querySelector('dialog .actions button').click()")
        await page.tab.until("document.querySelector('dialog') === null")
        await page.tab.until("document.activeElement.matches('[data-action=cancel]')")  # A button closed it.
        assert not await page.is_cancelled(ids["flaky/fail"]), "Escape is a no"

        menu = "document.querySelector('#actions .menu button')"
        await page.tab.run(f"{menu}.focus(); {menu}.click()")
        await page.tab.until("document.querySelector('[data-action=kill]') !== null")
        await page.tab.press("Tab")
        await page.tab.run("document.querySelector('[data-action=kill]').focus()")
        await page.tab.press("Enter")
        await page.tab.until("document.querySelector('dialog[open]') !== null")
        await page.tab.press("Escape")
        await page.tab.until("document.querySelector('dialog') === null")
        await page.tab.until(f"document.activeElement === {menu}")

        await page.go(f"invocations/{ids['trips/book']}")
        await page.tab.until("document.querySelectorAll('.wf-row').length === 3")
        await page.tab.run("document.querySelectorAll('.wf-row')[1].focus()")
        await page.tab.press("Enter")
        await page.tab.until("document.querySelector('.drawer')?.contains(document.activeElement)")
        await page.tab.press("Escape")
        await page.tab.until("document.querySelector('.drawer') === null")
        # The focus returns once the drawer is gone.
        await page.tab.until(
            "document.activeElement.matches('.wf-row') && document.activeElement.textContent.includes('hotel')"
        )


async def test_an_operator_is_told_what_an_act_will_do(tmp_path: Path) -> None:
    async with console(tmp_path) as page:
        ids = await seed(page)
        await page.sign_in("operate")
        await page.go(f"invocations/{ids['flaky/fail']}")
        says = {"cancel": "its handler may compensate first", "kill": "no compensation runs"}

        for action, effect in says.items():
            if action == "kill":
                await page.click("#actions .menu button")
            await page.click(f'[data-action="{action}"]')
            await page.tab.until("document.querySelector('dialog[open]') !== null")
            question = await page.tab.run("return document.querySelector('dialog').textContent")
            assert f"{action.capitalize()} flaky/fail?" in question and effect in question, question
            assert "Keep as it is" in question
            await page.tab.press("Escape")
            await page.tab.until("document.querySelector('dialog') === null")


async def test_a_list_of_ten_thousand_is_as_light_as_a_short_one(tmp_path: Path) -> None:
    count = 10_000
    async with console(tmp_path) as page:
        gate = asyncio.Semaphore(64)

        async def send() -> None:
            async with gate:
                path = "/shop/hold/send?delay=10h"
                assert (await page.doors.ask("POST", path, page.doors.root, door="ingress", value=1))[0] == 202

        for _ in range(500):
            await send()
        await page.sign_in("read")
        await page.go("invocations?service=shop")
        loaded = "document.querySelector('.foot')?.textContent.includes('%s')"
        await page.tab.until("document.querySelectorAll('.invocation-row.line').length > 10")
        nodes = "return document.querySelectorAll('*').length"
        bottom = "(document.querySelector('.virtual').scrollTop = 1e9, %s)"
        last = "document.querySelector('.virtual .line:last-child').getAttribute('aria-rowindex') === '%s'"
        await page.tab.until(bottom % (loaded % "500 invocations"))
        await page.tab.until(bottom % (last % "501"))  # Both are counted with the last row in view.
        few, quick = await page.tab.run(nodes), await page.tab.run(SCROLL)
        await page.go("overview")

        await asyncio.gather(*(send() for _ in range(count - 500)))
        await page.go("invocations?service=shop&status=scheduled")
        await page.tab.until("document.querySelectorAll('.invocation-row.line').length > 10")
        await page.tab.until(bottom % (loaded % "10,000 invocations"))
        await page.tab.until(bottom % (last % "10001"))
        many, slow = await page.tab.run(nodes), await page.tab.run(SCROLL)

        rows = await page.tab.run("return document.querySelectorAll('.invocation-row.line').length")
        assert rows < 60, "only the rows in view exist"
        assert many < few * 1.2, "the page does not grow with the list"
        assert slow < quick * 4 + 8, f"a step takes {slow:.1f} ms among 10,000 rows, {quick:.1f} ms among 500"


async def test_a_question_ends_with_the_page_that_asked_it(tmp_path: Path) -> None:
    async with console(tmp_path) as page:
        ids = await seed(page)
        await page.sign_in("operate")
        await page.go("cluster")
        await page.shows("Partitions")
        await page.go(f"invocations/{ids['flaky/fail']}")
        await page.click('[data-action="cancel"]')
        await page.tab.until("document.querySelector('dialog[open]') !== null")

        await page.tab.run("history.back()")
        await page.shows("Partitions")

        await page.tab.until("document.querySelector('dialog') === null")
        assert not await page.is_cancelled(ids["flaky/fail"])
