"""The inbox of the console in a real browser: approvals are read, edited and decided there, by mouse and by keyboard."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import PATIENCE_S, find
from tests.browser.test_console import Console, console
from tests.cluster.test_approvals import asked, asks, decide, name_of, outcome

pytestmark = pytest.mark.slow("starts a browser")


@pytest.fixture(autouse=True)
def _browser_installed() -> None:
    """Skip before a node is started, which a skip in the middle of a test would leave running."""
    find()


@asynccontextmanager
async def inbox(path: Path, *roles: str, **more: Any) -> AsyncIterator[Console]:
    async with console(path) as page:
        await page.world.register({"refunds/ask": asks, "loans/ask": asks})
        made = await page.doors.create(*roles, **more)
        await page.tab.open(f"{page.base}/")
        await page.tab.until("document.getElementById('token') !== null")
        await page.tab.run(
            f"document.getElementById('token').value = '{made['token']}'; document.querySelector('form button').click();"
        )
        await page.tab.until("document.getElementById('signed-in') !== null")
        await page.go("inbox")
        yield page


async def write(page: Console, field: str, text: str) -> None:
    await page.tab.until(f"document.getElementById('{field}') !== null")
    await page.tab.run(
        f"const it = document.getElementById('{field}'); it.value = {json.dumps(text)}; "
        "it.dispatchEvent(new Event('input', { bubbles: true }));"
    )


async def press(page: Console, key: str) -> None:
    await page.tab.run(
        f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{ key: {json.dumps(key)}, bubbles: true }}));"
    )


async def shown(page: Console, invocation: str) -> Any:
    return (await page.doors.ask("GET", f"/approvals/{name_of(invocation)}", page.doors.root))[1]


async def test_somebody_approves_with_another_payload_and_a_comment(tmp_path: Path) -> None:
    async with inbox(tmp_path, "approve", name="ann") as page:
        await page.shows("Nothing waits for you")
        invocation = await asked(page.doors, "Refund order 17?")  # It appears without a reload.
        await page.shows("Refund order 17?")
        await page.shows("finance")

        await page.click("#edit-payload")
        await write(page, "approval-payload", '{"eur": ')
        await page.click("[data-choice=approve]")
        await page.shows("The payload must be JSON")
        await write(page, "approval-payload", '{"eur": 200}')
        await write(page, "approval-comment", "as discussed")
        await page.click("[data-choice=approve]")

        await page.shows("Nothing waits for you")
        decision = (await shown(page, invocation))["decision"]
        assert (decision["choice"], decision["by"]["name"], decision["comment"]) == ("approve", "ann", "as discussed")
        assert await outcome(page.doors, invocation) == ["approve", {"eur": 200}]


async def test_editing_one_field_of_a_payload_keeps_the_long_numbers_of_others(tmp_path: Path) -> None:
    async with inbox(tmp_path, "approve") as page:
        invocation = await asked(page.doors, "long")
        await page.shows("12345678901234567891")

        await page.click("#edit-payload")
        await page.tab.until("document.getElementById('approval-payload') !== null")
        text = await page.tab.run("return document.getElementById('approval-payload').value")
        await write(page, "approval-payload", text.replace("240", "200"))
        await page.click("[data-choice=approve]")

        await page.shows("Nothing waits for you")
        assert await outcome(page.doors, invocation) == ["approve", {"eur": 200, "order": 12345678901234567891}]


async def test_text_of_handlers_reads_as_it_is(tmp_path: Path) -> None:
    async with inbox(tmp_path, "approve") as page:
        await asked(page.doors, "Pay \u202e00001?")

        await page.shows("Pay \\u202e00001?")

        await page.tab.until("!document.querySelector('main').textContent.includes('\\u202e')")


async def test_a_decision_by_keyboard_asks_once_more(tmp_path: Path) -> None:
    async with inbox(tmp_path, "approve") as page:
        invocation = await asked(page.doors, "Refund order 17?")
        await page.tab.until("document.querySelector('[data-choice=reject]') !== null")

        async with asyncio.timeout(PATIENCE_S):
            while not await page.tab.run("return document.getElementById('confirm') !== null"):
                await press(page, "2")  # Keys are bound after the first paint. An open dialog ignores them.
                await asyncio.sleep(0.05)
        assert (await shown(page, invocation))["status"] == "waiting"
        await page.click("#confirm")

        await page.shows("Nothing waits for you")
        assert (await shown(page, invocation))["decision"]["choice"] == "reject"


async def test_what_somebody_else_decides_stays_in_view_and_its_buttons_go(tmp_path: Path) -> None:
    async with inbox(tmp_path, "approve") as page:
        first = await asked(page.doors, "Refund first?")
        await page.tab.until("document.querySelector('h2.answer-title')?.textContent === 'Refund first?'")
        second = await asked(page.doors, "Refund second?")
        await page.shows("Refund second?")

        await decide(page.doors, name_of(first), page.doors.root, choice="reject", comment="too much")
        await page.shows("too much")

        title = "document.querySelector('h2.answer-title').textContent"
        buttons = "document.querySelectorAll('[data-choice]').length"
        assert await page.tab.run(f"return [{title}, {buttons}]") == ["Refund first?", 0]
        assert (await shown(page, second))["status"] == "waiting"


async def test_who_may_not_decide_sees_the_approval_without_buttons(tmp_path: Path) -> None:
    async with inbox(tmp_path, "read") as page:
        await asked(page.doors, "Refund order 17?")

        await page.shows("Somebody with the role approve decides")

        assert await page.tab.run("return document.querySelectorAll('[data-choice]').length") == 0


async def test_a_token_for_another_service_sees_no_buttons(tmp_path: Path) -> None:
    async with inbox(tmp_path, "approve", services=("loans",)) as page:
        await asked(page.doors, "Refund order 17?")

        await page.shows("Somebody with the role approve for this service decides")
