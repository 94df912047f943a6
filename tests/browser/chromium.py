"""A real browser for tests, driven over the DevTools protocol, because no test client imitates browsers exactly."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PATIENCE_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-port=0",
    # Newer browsers ask the user before a public page may reach a private address. Nodes must not rely on that.
    "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests,HttpsUpgrades,HttpsFirstBalancedMode",
)  # fmt: skip

#: code, number and text of keys that are no letters
KEYS = {
    "Tab": ("Tab", 9, ""),
    "Escape": ("Escape", 27, ""),
    "Enter": ("Enter", 13, "\r"),
    " ": ("Space", 32, " "),
    "/": ("Slash", 191, "/"),
}


def find() -> str:
    """The path of the browser. Skips the test if there is none."""
    given = os.environ.get("CHROMIUM")
    found = given or next((path for name in NAMES if (path := shutil.which(name)) is not None), None)
    if found is None:
        pytest.skip("there is no Chromium on this machine: install it (apt-get install chromium), or set CHROMIUM")
    return found


class Tab:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return await self._browser.send(method, self._session, **parameters)

    async def open(self, url: str) -> None:
        """Open a page, and return when it is loaded."""
        loaded = self._browser.expect("Page.loadEventFired", self._session)
        await self.send("Page.navigate", url=url)
        async with asyncio.timeout(PATIENCE_S):
            await loaded

    async def run(self, script: str) -> Any:
        """Run the body of an async function in the page, and return its result."""
        answer = await self.send(
            "Runtime.evaluate",
            expression=f"(async () => {{ {script} }})()",
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        if "exceptionDetails" in answer:
            raise Broken(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression of the page is true. The page may be replaced meanwhile."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(Broken):
                    if await self.run(f"return Boolean({condition})"):
                        return
                await asyncio.sleep(0.05)

    async def press(self, key: str, *, modifiers: int = 0) -> None:
        """Press a key of the keyboard, as a user does. `modifiers`: 2 is Ctrl, 8 Shift."""
        code, number, text = KEYS.get(key, (f"Key{key.upper()}", ord(key.upper()[0]), key if not modifiers else ""))
        event = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
        await self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    async def serve(self, url: str, page: str) -> None:
        """From now on, answer this address with our page, whatever listens there: as an attacker's server did before its
        name was made to resolve to another machine."""
        await self.send("Fetch.enable", patterns=[{"urlPattern": url}])
        self._browser.fulfilled[self._session] = page

    async def screenshot(self, file: Path) -> None:
        answer = await self.send("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(answer["data"]))


class Broken(Exception):
    """A script failed, or the browser refused a command, for example because its page was being replaced."""


class Browser:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._count = 0
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._expected: dict[tuple[str, str], asyncio.Future[None]] = {}
        self.fulfilled: dict[str, str] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def send(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        answer = self._asked[self._count] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(message)
        async with asyncio.timeout(PATIENCE_S):
            result: dict[str, Any] = await answer
        return result

    def expect(self, event: str, session: str) -> asyncio.Future[None]:
        found = self._expected[event, session] = asyncio.get_running_loop().create_future()
        return found

    async def receive(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if (answer := self._asked.pop(data.get("id", -1), None)) is not None and not answer.done():
                if "error" in data:
                    answer.set_exception(Broken(str(data["error"])))
                else:
                    answer.set_result(data["result"])
            session = data.get("sessionId", "")
            if (expected := self._expected.pop((data.get("method", ""), session), None)) is not None:
                expected.set_result(None)
            if data.get("method") == "Fetch.requestPaused":
                task = asyncio.create_task(self._fulfill(session, data["params"]["requestId"]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _fulfill(self, session: str, request: str) -> None:
        await self.send(
            "Fetch.fulfillRequest",
            session,
            requestId=request,
            responseCode=200,
            responseHeaders=[{"name": "Content-Type", "value": "text/html"}],
            body=base64.b64encode(self.fulfilled[session].encode()).decode(),
        )

    async def tab(self) -> Tab:
        target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        tab = Tab(self, session)
        await tab.send("Page.enable")
        return tab


@asynccontextmanager
async def browser(folder: Path, *, resolve: str = "") -> AsyncIterator[Browser]:
    """`resolve`: names that resolve to 127.0.0.1."""
    profile = folder / "profile"
    rules = ", ".join(f"MAP {name} 127.0.0.1" for name in resolve.split())
    process = await asyncio.create_subprocess_exec(
        find(),
        *FLAGS,
        f"--user-data-dir={profile}",
        f"--host-resolver-rules={rules}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        place = profile / "DevToolsActivePort"
        async with asyncio.timeout(PATIENCE_S):
            while not (place.exists() and len(place.read_text().split()) == 2):
                assert process.returncode is None, "the browser ended"
                await asyncio.sleep(0.05)
        port, path = place.read_text().split()
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"ws://127.0.0.1:{port}{path}", max_msg_size=1 << 28) as socket,
        ):
            driven = Browser(socket)
            receiving = asyncio.create_task(driven.receive())
            try:
                yield driven
                with suppress(Broken, TimeoutError):
                    await driven.send("Browser.close")
            finally:
                receiving.cancel()
    finally:
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 5.0)
        if process.returncode is None:
            os.killpg(process.pid, 9)  # The group is ours: the browser was started in a group of its own.
            await process.wait()
