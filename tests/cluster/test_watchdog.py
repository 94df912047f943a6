"""A hung loop is distinguished from a running one, from outside."""

from __future__ import annotations

import asyncio
import json
import logging
import select
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from holdfast.cluster.config import HostPort
from holdfast.cluster.observe import watchdog
from holdfast.cluster.observe.watchdog import Watchdog
from tests.cluster.harness import eventually


def probe(port: int) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return response.status, json.loads(response.read())["message"]
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["message"]


async def test_a_hung_loop_is_reported_with_its_place_and_probes_are_still_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "BLOCKED_S", 0.2)
    monkeypatch.setattr(watchdog, "HUNG_S", 0.3)
    caplog.set_level(logging.WARNING)
    it = Watchdog(HostPort("127.0.0.1", 0))
    it.start()
    seen: list[tuple[int, str]] = []
    released = threading.Event()

    def ask() -> None:
        """Ask from outside of the loop, until the hang is reported."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and (not seen or seen[-1][0] != 503):
            seen.append(probe(port))
        released.set()

    def hold_up_the_loop() -> None:
        released.wait(30)

    port = it.port
    asking = threading.Thread(target=ask)
    asking.start()
    hold_up_the_loop()
    asking.join()

    status, text = seen[-1]
    assert status == 503 and "the loop has not run for" in text
    await eventually(lambda: "the loop runs again" in caplog.text, "the end of it in the log")
    assert "in hold_up_the_loop" in caplog.text, "the stack says who held it up"
    assert it.blocked == 1 and it.blocked_s > 0.2 and it.lag_s_max > 0.2
    assert (await asyncio.to_thread(probe, port))[0] == 200
    await it.stop()


async def test_slow_clients_keep_no_probe_out() -> None:
    it = Watchdog(HostPort("127.0.0.1", 0))
    it.start()
    port, ending, opened = it.port, threading.Event(), [0]

    def flood() -> None:
        """One byte every now and then, on as many connections as there are places; closed ones are opened again."""
        slow: dict[int, socket.socket] = {}
        while not ending.is_set():
            for number in range(32):
                each = slow.get(number)
                try:
                    if each is None:
                        source = (f"127.0.0.{8 + number // 16}", 0)
                        each = slow[number] = socket.create_connection(("127.0.0.1", port), 30, source)
                        each.sendall(b"GET ")
                        opened[0] += 1
                    each.sendall(b"/")
                    if select.select([each], [], [], 0)[0] and not each.recv(1):
                        raise ConnectionError("closed")
                except OSError:
                    slow.pop(number).close()
                ending.wait(0.005)
        for each in slow.values():
            each.close()

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        await eventually(lambda: opened[0] >= 32, "every place taken")
        for _ in range(20):
            assert (await asyncio.to_thread(probe, port))[0] == 200
        await eventually(lambda: opened[0] >= 96, "slow requests end, although bytes keep coming")
        assert (await asyncio.to_thread(probe, port))[0] == 200
    finally:
        ending.set()
        await asyncio.to_thread(flooding.join)
        await it.stop()


async def test_one_address_keeps_its_place_for_the_newest_probe() -> None:
    it = Watchdog(HostPort("127.0.0.1", 0))
    it.start()
    slow: list[socket.socket] = []
    for _ in range(watchdog.PER_ADDRESS_MAX):
        slow.append(socket.create_connection(("127.0.0.1", it.port), 30))
        await asyncio.sleep(0.01)

    assert (await asyncio.to_thread(probe, it.port))[0] == 200
    assert await asyncio.to_thread(slow[0].recv, 1) == b"", "the oldest made room"

    for each in slow:
        each.close()
    await it.stop()


async def test_a_running_loop_is_reported_as_running_and_a_stopped_watchdog_does_not_answer() -> None:
    it = Watchdog(HostPort("127.0.0.1", 0))
    it.start()
    port = it.port

    status, text = await asyncio.to_thread(probe, port)

    assert status == 200 and text.startswith("the loop runs")
    await it.stop()
    with pytest.raises(OSError):
        await asyncio.to_thread(probe, port)


def test_the_thread_ends_with_the_loop_that_it_watches() -> None:
    before = set(threading.enumerate())

    async def start() -> None:
        Watchdog().start()

    asyncio.run(start())

    [thread] = [each for each in threading.enumerate() if each not in before and each.name == "watchdog"]
    thread.join(60)
    assert not thread.is_alive()
