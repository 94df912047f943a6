"""All disks are lost: a new node continues from the backup, with the same steps and waits as the old one."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.ports import free_ports
from tests.promises import handlers
from tests.promises.handlers import approval, waiting
from tests.promises.processes import PATIENCE_S, Node, World, eventually, world
from tests.promises.test_p6_waiting import until_suspended
from tests.snapshots.conftest import credentials, rclone  # noqa: F401 - fixtures
from tests.snapshots.servers import BUCKET, Server


async def holdfast(*arguments: str, **environment: str) -> str:
    """The command, as an operator runs it."""
    root = str(Path(__file__).resolve().parents[2])
    ran = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "holdfast", *arguments],
        env={**os.environ, "PYTHONPATH": root, **environment},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow("a node is started and restored several times")
async def test_a_node_that_lost_its_disk_continues_from_its_backup(
    tmp_path: Path,
    rclone: Server,  # noqa: F811
    credentials: Any,  # noqa: F811
) -> None:
    options = urlencode({"endpoint_url": rclone.endpoint_url, "region": "eu-test-1"})
    place = f"s3://{BUCKET}/{tmp_path.name}?{options}"
    async with world(tmp_path) as here:
        async with here.client() as client:
            given = {"mark": "restore", "gate": here.gate("restore")}
            steps = await client.send(handlers.run, given)
            wait = await client.send(approval, 3600.0, key="restore")
            once = await client.call(handlers.quick, "once", idempotency_key="restore")
            await eventually(lambda: here.counts(mark="restore")["three begins"] == 1, "the third step")
            await until_suspended(here, [wait])

        assert "Messages between partitions were held" in await holdfast(
            "backup", "--to", place, "--admin-url", here.node.admin
        )
        here.node.kill()
        shutil.rmtree(here.node.data)

        here.nodes[0] = new = Node("m1", tmp_path, tuple_of(free_ports(3)), {}, partitions=7)
        assert "Start it: holdfast serve" in await holdfast("restore", "--from", place, **new.settings)
        new.start()
        await here.ready()
        await restored_work_ends(here, steps, once)


async def restored_work_ends(here: World, steps: Any, once: list[str]) -> None:
    async with here.client() as client:
        await client.resolve_promise(waiting, "restore", "yes", "Ada")
        assert await client.attach_workflow(waiting, "restore", str) == "approved by Ada"
        assert await client.call(handlers.quick, "once", idempotency_key="restore") == once
        here.open("restore")
        assert await client.attach(steps.invocation_id, list[str]) == ["one", "two", "three"]
    counts = here.counts(mark="restore")
    assert (counts["one"], counts["two"]) == (1, 1), "what was journaled before the backup is not run again"
    assert here.counts(mark="once") == {"one": 1, "two": 1, "three": 1}


def tuple_of(ports: list[int]) -> tuple[int, int, int]:
    first, second, third = ports
    return first, second, third
