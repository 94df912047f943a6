"""Full disks: nodes with room lead, nodes without wait, and a cluster without any room reports it."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cluster.harness import eventually
from tests.cluster.test_three_nodes import Seat, Three, echo, three
from tests.promises.handlers import add, read
from tests.promises.processes import Node, world


def fill(*seats: Seat) -> None:
    """For the store: it must keep more free space than any disk has."""
    for seat in seats:
        seat.node.ground.log._store.free_bytes_min = 1 << 60


def empty(*seats: Seat) -> None:
    for seat in seats:
        seat.node.ground.log._store.free_bytes_min = 0


async def post(seat: Seat, path: str, data: bytes) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{seat.node.doors.urls.ingress}{path}", data=data) as answer,
    ):
        return answer.status, await answer.json()


async def calls_by_http(cluster: Three, count: int) -> None:
    """Requests to every node in turn; none may fail."""
    for number in range(count):
        for seat in cluster.up():
            assert await post(seat, "/echo/say", b"%d" % number) == (200, number)


async def is_said_to_be_full(seat: Seat, name: str) -> None:
    """Reported by both health pages, the status of the cluster and the metrics, on this node and on every other one."""
    admin, ingress = seat.node.doors.urls.admin, seat.node.doors.urls.ingress
    async with aiohttp.ClientSession() as http:
        for url in (f"{admin}/health", f"{ingress}/holdfast/health"):
            async with http.get(url) as response:
                (warning,) = (await response.json())["warnings"]
                assert response.status == 200
                assert ("this node" in warning) if seat.name == name else (f"disk of {name} is full" in warning)
        async with http.get(f"{admin}/cluster") as response:
            assert {node["name"] for node in (await response.json())["nodes"] if node["disk_full"]} == {name}
        async with http.get(f"{admin}/metrics") as response:
            text = await response.text()
    assert {line for line in text.splitlines() if re.match("holdfast_disk_full{.*} 1", line)} == {
        f'holdfast_disk_full{{node="{name}"}} 1.0'
    }


async def test_a_node_without_room_hands_its_leaderships_over_and_no_client_notices(tmp_path: Path) -> None:
    async with three(tmp_path, {"echo/say": echo}, partitions=3) as cluster:
        await cluster.led()
        full = await cluster.leader(0)
        fill(full)
        await calls_by_http(cluster, 5)  # From the beginning.

        def moved() -> bool:
            meta = full.node.ground.log.group(1)
            return not full.node.serving.router.led_here() and not meta.is_leader

        await eventually(moved, "the others lead")
        await calls_by_http(cluster, 5)
        assert all(seat.node.unhealthy() is None for seat in cluster.up()), "every request is served"
        await eventually(
            lambda: all(full.name in seat.node.serving.handover.full for seat in cluster.up()), "all know of it"
        )
        for seat in cluster.up():
            await is_said_to_be_full(seat, full.name)

        empty(full)
        await eventually(lambda: full.name not in full.node.serving.handover.full, "room again")
        await calls_by_http(cluster, 5)


async def test_a_cluster_without_room_reports_it_and_works_again_when_there_is_some(tmp_path: Path) -> None:
    async with three(tmp_path, {"echo/say": echo}, partitions=2) as cluster:
        await cluster.led()
        seats = cluster.up()
        fill(*seats)
        await eventually(
            lambda: all(len(seat.node.serving.handover.full) == 3 for seat in seats), "all know that all are full"
        )

        def all_say_so() -> bool:
            """The first full node may have begun to hand over to one that was not full yet."""
            return all("no disk space" in (seat.node.unhealthy() or "") for seat in seats)

        await eventually(all_say_so, "all say that there is no disk space")
        for seat in seats:
            status, answer = await post(seat, "/echo/say", b"1")
            assert status == 503 and "full" in answer["message"] and "free space" in answer["hint"], answer

        empty(*seats)
        await eventually(lambda: not any(seat.node.serving.handover.full for seat in seats), "room again")
        await calls_by_http(cluster, 3)


async def test_a_leader_with_room_refuses_proposals_without_a_majority_that_has_room(tmp_path: Path) -> None:
    async with three(tmp_path, {"echo/say": echo}, partitions=1) as cluster:
        await cluster.led()
        leader = await cluster.leader(0)
        others = [seat for seat in cluster.up() if seat is not leader]
        fill(*others)
        await eventually(lambda: len(leader.node.serving.handover.full) == 2, "the leader knows")
        status, answer = await post(leader, "/echo/say", b"1")
        assert status == 503 and "majority" in answer["message"], answer

        empty(*others)
        await eventually(lambda: not leader.node.serving.handover.full, "room again")
        assert await post(leader, "/echo/say", b"1") == (200, 1)


# Real file systems


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "holdfast-test", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        why = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        why = str(error)
    if why:
        pytest.skip(f"a small file system cannot be mounted, which takes root on Linux: {why}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)


def fill_to_the_last_byte(filler: Path) -> None:
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)


@pytest.mark.slow("three nodes work on small disks until these are full")
@pytest.mark.parametrize("what", ["", "state"], ids=["everything", "states-alone"])
async def test_a_disk_that_is_full_to_the_last_byte_ends_no_node_and_loses_nothing(
    tmp_path: Path, small_disk: Path, what: str
) -> None:
    """Writes that do not fit wait, the other nodes serve, and the node catches up when there is room."""
    async with world(tmp_path, nodes=3, partitions=3, settings={"HOLDFAST_FREE_BYTES_MIN": "8MiB"}) as here:
        node, filler = here.node, small_disk / "filler"
        node.kill()
        shutil.move(node.data / what, small_disk / "moved")
        (node.data / what).symlink_to(small_disk / "moved")
        node.start()
        await here.ready()
        async with here.client(here.nodes[1]) as client, here.client(node) as own:
            counts = {f"k{number}": await client.call(add, "full", key=f"k{number}") for number in range(9)}

            fill_to_the_last_byte(filler)
            until = time.monotonic() + 1.5
            while time.monotonic() < until or (what == "state" and not cannot_apply(node)):
                for key in counts:
                    counts[key] = await client.call(add, "full", key=key)
                fill_to_the_last_byte(filler)  # A transaction may have freed a page.
            assert node.running, node.tail()
            shown = (await here.ask("GET", "/cluster"))["partitions"]
            assert node.name not in {each["leader"] for each in shown}, "whoever has room leads"
            filler.unlink()
            await here.ready()

            assert node.running, node.tail()
            for key, count in counts.items():
                assert await own.call(add, "full", key=key) == count + 1
                assert await own.call(read, key=key) == count + 1


async def test_a_node_on_a_full_disk_reports_why_it_does_not_start_and_starts_when_there_is_room(
    tmp_path: Path, small_disk: Path
) -> None:
    async with (
        world(tmp_path, settings={"HOLDFAST_FREE_BYTES_MIN": "8MiB"}) as here,
        here.client() as client,
    ):
        assert await client.call(add, "full", key="k") == 1
        node, filler = here.node, small_disk / "filler"
        node.kill()
        shutil.move(node.data, small_disk / "moved")
        node.data.symlink_to(small_disk / "moved")
        fill_to_the_last_byte(filler)
        node.start()
        await eventually(lambda: not node.running, "it ends")
        assert "is full" in node.tail() and "Traceback" not in node.tail(), node.tail()

        filler.unlink()
        node.start()
        await here.ready()
        assert await client.call(read, key="k") == 1


def cannot_apply(node: Node) -> bool:
    return "committed entries cannot be applied" in node.log.read_text()
