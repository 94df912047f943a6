"""Nodes are killed while somebody watches: the console goes on, says what it has lost, and finds it again by itself.

The nodes are processes, killed with SIGKILL, and each page stays open: a reload would hide what these tests look for.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import Browser, Tab, browser, find
from tests.browser.test_console import WATCH
from tests.promises.handlers import add, run
from tests.promises.processes import Node, World, world

pytestmark = pytest.mark.slow("starts three nodes and a browser")

STATUS = "document.querySelector('#status')?.textContent"
TILE = "document.querySelector('.tile')?.textContent"
PILL = "document.querySelector('.pill')?.textContent"
#: What tells the user of an error. A page that has recovered shows none of it.
ERRORS = "return [...document.querySelectorAll('.banner, .notice.worst, .toast.worst')].map((each) => each.textContent)"


@pytest.fixture(autouse=True)
def _browser_installed() -> None:
    """Skip before a node is started."""
    find()


@asynccontextmanager
async def watched(path: Path) -> AsyncIterator[tuple[World, Browser]]:
    async with world(path, nodes=3, partitions=3) as here, browser(path) as chromium:
        yield here, chromium


async def opened(chromium: Browser, node: Node, page: str) -> Tab:
    tab = await chromium.tab()
    # Only the tab in front has frames, and both are watched.
    await tab.send("Emulation.setFocusEmulationEnabled", enabled=True)
    await tab.send("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
    await tab.open(f"{node.admin}/#/{page}")
    await tab.run("window.neverReloaded = true")
    return tab


async def is_intact(tab: Tab) -> bool:
    """Whether it is still the page that was opened, and nothing in it has failed. Lost connections are no fault of it."""
    problems = [each for each in await tab.run("return window.problems") if "the node does not answer" not in each]
    assert problems == []
    return bool(await tab.run("return window.neverReloaded === true"))


async def test_pages_follow_the_work_to_the_next_leader(tmp_path: Path) -> None:
    async with watched(tmp_path) as (here, chromium), here.client() as client:
        work: Any = await client.send(run, {"mark": "watched", "gate": here.gate("watched")})
        await here.saw("three begins", mark="watched")
        leader = await here.leader(here.partition(work))
        node = next(each for each in here.nodes if each is not leader)
        overview = await opened(chromium, node, "overview")
        page = await opened(chromium, node, f"invocations/{work.invocation_id}")
        await page.until(f"{STATUS}.includes('running')")
        await overview.until(f"{TILE}.includes('3/3 nodes') && {TILE}.includes('3/3 partitions')")

        leader.kill()
        await overview.until(f"{TILE}.includes('2/3 nodes') && {TILE}.includes('3/3 partitions')")
        await overview.until(f"{PILL}.includes('node {leader.name} away')")
        new = await here.leader(here.partition(work))
        assert new is not leader
        here.open("watched")
        await page.until(f"{STATUS}.includes('succeeded')")
        await page.until("document.querySelector('main').textContent.includes('three')")

        await overview.run("location.hash = '#/cluster'")
        column = "[...document.querySelectorAll('.matrix thead th')].findIndex((each) => each.textContent === '%s')"
        row = f"document.querySelectorAll('.matrix tbody tr')[{here.partition(work)}]"
        await overview.until(f"{row}?.children[{column % new.name}].querySelector('.lead') !== null")
        assert await page.run(ERRORS) == [] and await overview.run(ERRORS) == []
        assert await is_intact(page) and await is_intact(overview)
        leader.start()
        await overview.until(f"{PILL}.includes('all is well')")


async def test_a_page_says_that_its_node_is_gone_and_finds_it_again(tmp_path: Path) -> None:
    async with watched(tmp_path) as (here, chromium):
        node = here.nodes[0]
        async with here.client(here.nodes[1]) as client:
            first = await client.send(add, "before", key="a")
            page = await opened(chromium, node, "invocations?service=counter")
            await page.until(f"document.querySelector('a[href=\"#/invocations/{first.invocation_id}\"]') !== null")

            node.kill()
            await page.until("document.querySelector('.banner')?.textContent.includes('Node n1 has not answered')")
            await page.until(f"{PILL}.includes('node does not answer')")
            kept = await page.run("return document.querySelectorAll('.invocation-row.line').length")
            second = await client.send(add, "meanwhile", key="b")
            await asyncio.sleep(2.0)  # Long enough for several attempts that find nobody.
            node.start()

            await page.until("document.querySelector('.banner') === null")
            for handle in (second, await client.send(add, "after", key="c")):
                link = json.dumps(f'a[href="#/invocations/{handle.invocation_id}"]')
                await page.until(f"document.querySelector({link}) !== null")
            await page.until(f"{PILL}.includes('all is well')")
            assert kept == 1, "what was on the screen stays"
            assert await page.run(ERRORS) == []
            assert await is_intact(page)


async def test_a_node_that_hangs_is_told_apart_from_a_slow_answer_and_goes_on_where_it_was(tmp_path: Path) -> None:
    async with watched(tmp_path) as (here, chromium):
        node = here.nodes[0]
        async with here.client(here.nodes[1]) as client:
            made = await client.send(add, "before", key="a")
        page = await opened(chromium, node, "overview")
        await page.until(f"{TILE}.includes('3/3 nodes')")
        # Pages that were not opened yet are loaded meanwhile.
        for module in ("pages/invocations", "parts/filters", "parts/actions"):
            await page.until(
                f"performance.getEntriesByType('resource').some((each) => each.name.endsWith('{module}.js'))"
            )

        node.signal(signal.SIGSTOP)
        await page.run("location.hash = '#/invocations'")
        await page.until("document.querySelector('.banner')?.textContent.includes('Node n1 has not answered')")
        assert "reconnecting" in await page.run("return document.querySelector('.live').textContent")
        node.signal(signal.SIGCONT)

        await page.until("document.querySelector('.banner') === null")
        await page.until(f"document.querySelector('a[href=\"#/invocations/{made.invocation_id}\"]') !== null")
        assert await page.run(ERRORS) == []
        assert await is_intact(page)
