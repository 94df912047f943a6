"""Links refuse nodes that do not belong, and report why."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from holdfast.log.connection import LinkLimits
from holdfast.log.sockets import Address
from tests.log.links import Node, Run, Stranger, eventually, started

ASKING = LinkLimits(ask_min_s=0.05, ask_max_s=0.2)


def test_silent_strangers_do_not_keep_peers_out(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        limits = LinkLimits(handshakes_max=4, handshake_s=1.0)
        a, b = Node("a"), Node("b", limits=limits)
        await b.links.start()
        b.links.set_peers({"a": Address("127.0.0.1", 1)})
        silent = [await Stranger("a").connect(b.address) for _ in range(3)]
        await a.links.start()
        a.links.set_peers({"b": b.address})
        await a.until(lambda: "b" in a.live)

        more = [await Stranger("a").connect(b.address) for _ in range(6)]
        for stranger in silent + more:
            await stranger.closed()
        a.links.send("b", a.live["b"], b"x")
        await b.until(lambda: b.frames == [b"x"])
        await a.links.stop()
        await b.links.stop()

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert any("4 connections are not authenticated yet" in line for line in caplog.messages)
    assert any("did not finish the handshake" in line for line in caplog.messages)


def test_one_host_does_not_take_all_places_of_strangers(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        limits = LinkLimits(handshakes_max=4, handshakes_per_host_max=2, handshake_s=60.0)
        a, b = Node("a"), Node("b", limits=limits)
        await b.links.start()
        b.links.set_peers({"a": Address("127.0.0.1", 1)})
        crowd = [await Stranger("a").connect(b.address, source="127.0.0.2") for _ in range(5)]
        for stranger in crowd[:3]:
            await stranger.closed()

        await a.links.start()
        a.links.set_peers({"b": b.address})

        await a.until(lambda: "b" in a.live)
        await a.links.stop()
        await b.links.stop()

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert any("another comes from 127.0.0.2: the oldest one is closed" in line for line in caplog.messages)


@pytest.mark.parametrize("sources", [1, 6])
def test_strangers_that_connect_again_and_again_do_not_keep_a_restarted_peer_out(run: Run, sources: int) -> None:
    async def scenario() -> None:
        limits = LinkLimits(handshakes_max=16, handshakes_per_host_max=4, handshake_s=60.0)
        a, b = Node("a"), Node("b", limits=limits)
        await b.links.start()
        b.links.set_peers({"a": Address("127.0.0.1", 1)})
        opened = 0

        async def keep_one_open(source: str) -> None:
            nonlocal opened
            while True:
                stranger = await Stranger("a").connect(b.address, source=source)
                opened += 1
                await stranger.closed()

        hosts = [f"127.0.0.{20 + number}" for number in range(sources)]
        flood = [asyncio.create_task(keep_one_open(host)) for host in hosts for _ in range(8)]
        await eventually(lambda: opened > 10 * len(flood))

        await a.links.start()
        a.links.set_peers({"b": b.address})
        await a.until(lambda: "b" in a.live)
        a.links.send("b", a.live["b"], b"x")
        await b.until(lambda: b.frames == [b"x"])

        assert not any(task.done() for task in flood), "the flood went on"
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        await a.links.stop()
        await b.links.stop()

    run(scenario())


def test_refused_strangers_are_logged_once_per_kind_not_once_each(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        b = Node("b")
        async with started(b):
            for _ in range(20):
                stranger = await Stranger("a").connect(b.address)
                await stranger.loop.sock_sendall(stranger.sock, b"GET / HTTP/1.1\r\n\r\n")
                await stranger.closed()
            assert b.events == []

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert len([line for line in caplog.messages if "does not speak the peer protocol" in line]) == 1


@pytest.mark.parametrize(
    ("stranger", "said", "logged"),
    [
        ({"node": "a", "secret": b"w" * 16}, "its secret differs from ours", "'a' it could not prove"),
        (
            {"node": "a", "cluster": "c2"},
            "different cluster: 'a' belongs to 'c2'",
            "different cluster: 'a' belongs to 'c2', 'b' to 'c1'",
        ),
        ({"node": "aa"}, "not among the peers", "'aa' is not among the peers of 'b'"),
        ({"node": "b"}, "same name", "another node has the same name 'b'"),
        ({"node": "a", "secret": None}, "uses a secret, we use none", "'a' uses no secret, we use one"),
    ],
    ids=["secret", "cluster", "unknown", "ours", "no-secret"],
)
def test_a_node_that_does_not_belong_is_refused_and_both_sides_have_the_reason(
    run: Run, caplog: pytest.LogCaptureFixture, stranger: dict[str, Any], said: str, logged: str
) -> None:
    async def scenario() -> None:
        b = Node("b")
        async with started(b):
            b.links.set_peers({"a": Address("127.0.0.1", 1)})
            with pytest.raises(Exception, match=said):
                await (await Stranger(**stranger).connect(b.address)).greet("b")
            await eventually(lambda: any(logged in line for line in caplog.messages))
            assert b.events == []

    with caplog.at_level(logging.WARNING):
        run(scenario())


@pytest.mark.parametrize(
    ("of_a", "of_b", "said"),
    [
        ({"cluster": "c1/1"}, {"cluster": "c1/2"}, "different founders or backup"),
        ({"secret": b"v" * 16}, {}, "secret differs from ours"),
        ({"secret": None}, {}, "secret"),
    ],
    ids=["founders", "secret", "no-secret"],
)
def test_both_sides_report_why_there_is_no_link(
    run: Run, of_a: dict[str, Any], of_b: dict[str, Any], said: str
) -> None:
    """Including the side that is only dialed: it asks the dialing side, and gets the same reason."""

    async def scenario() -> None:
        a, b = Node("a", limits=ASKING, **of_a), Node("b", limits=ASKING, **of_b)
        async with started(a, b):
            await eventually(lambda: said in (a.links.status()["b"].refused or ""))
            await eventually(lambda: said in (b.links.status()["a"].refused or ""))
            assert a.events == b.events == []

    run(scenario())


def test_a_removed_node_gets_the_reason_in_either_direction_of_dialing(run: Run) -> None:
    async def scenario() -> None:
        a, b, c = (Node(name, limits=ASKING) for name in "abc")
        async with started(a, b, c):
            await eventually(lambda: all(len(node.live) == 2 for node in (a, b, c)))
            peers = {node.name: node.address for node in (a, b, c)}
            for node, removed in ((a, "c"), (b, "a")):
                rest = {name: place for name, place in peers.items() if name != removed}
                node.links.set_peers(rest, removed={removed})

            await eventually(lambda: "removed for good" in c.removed.get("a", ""))
            await eventually(lambda: "removed for good" in a.removed.get("b", ""))
            assert b.removed == {} and set(c.removed) == {"a"} and "b" in c.live, "others keep their links"

    run(scenario())


def test_a_peer_dialed_at_a_wrong_address_reports_that_the_other_is_up(run: Run) -> None:
    async def scenario() -> None:
        a, b = Node("a", limits=ASKING), Node("b", limits=ASKING)
        async with started(a, b):
            a.links.set_peers({"b": Address("127.0.0.1", 1)})
            await eventually(lambda: "does it have our address?" in b.error("a"))
            assert b.links.status()["a"].refused is None
            assert not a.links.status()["b"].connected

    run(scenario())


def test_a_dialer_s_status_shows_why_it_has_no_link(run: Run) -> None:
    async def scenario() -> None:
        a, b = Node("a", secret=b"v" * 16), Node("b")
        async with started(a, b):
            await eventually(lambda: "secret" in a.error("b"))
            status = a.links.status()["b"]

            assert not status.connected and status.session is None
            assert a.events == b.events == []

    run(scenario())
