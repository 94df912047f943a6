"""Operators cannot use a node to find out what listens in its network, nor send its credentials elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.backup.job import is_within
from tests.cluster.test_tokens import Doors, one

GUARDED = ("169.254.169.254", "0xa9fea9fe", "[fe80::1]", "[::ffff:169.254.169.254]")


async def see_node(doors: Doors, token: str) -> dict[str, Any]:
    _, shown = await doors.ask("GET", "/cluster", token)
    found: dict[str, Any] = next(each for each in shown["nodes"] if each["name"] == "n9")
    return found


@pytest.mark.parametrize("host", GUARDED)
async def test_a_node_at_a_link_local_or_metadata_address_is_refused(tmp_path: Path, host: str) -> None:
    async with one(tmp_path) as (_, doors):
        status, answer = await doors.ask(
            "POST", "/cluster/nodes", doors.root, value={"name": "n9", "address": f"{host}:80"}
        )

        assert status == 400 and "link-local or metadata" in answer["message"]


async def test_only_administrators_see_why_a_node_is_not_connected(tmp_path: Path) -> None:
    async with one(tmp_path) as (_, doors):
        tokens = [(await doors.create(role))["token"] for role in ("read", "operate")]
        body = {"name": "n9", "address": "127.0.0.1:1"}
        assert (await doors.ask("POST", "/cluster/nodes", tokens[1], value=body))[0] == 200
        async with asyncio.timeout(20):
            while not (shown := await see_node(doors, doors.root))["error"]:
                await asyncio.sleep(0.05)

        assert "refused" in shown["error"]
        for token in tokens:
            assert (await see_node(doors, token))["error"] == "not connected"


@pytest.mark.parametrize("place", ["s3://bucket/p?endpoint_url=http://127.0.0.1:1", "/elsewhere", "file:///elsewhere"])
async def test_only_administrators_choose_another_place_for_backups(tmp_path: Path, place: str) -> None:
    async with one(tmp_path) as (_, doors):
        operator = (await doors.create("operate"))["token"]

        status, answer = await doors.ask("POST", "/cluster/backups", operator, value={"to": place})

        assert status == 403 and "only the role admin" in answer["message"]


@pytest.mark.parametrize("host", GUARDED)
async def test_no_backup_goes_to_a_link_local_or_metadata_address(tmp_path: Path, host: str) -> None:
    async with one(tmp_path) as (_, doors):
        body = {"to": f"s3://bucket/p?endpoint_url=http://{host}"}

        status, answer = await doors.ask("POST", "/cluster/backups", doors.root, value=body)

        assert status == 400 and "link-local or metadata" in answer["message"]


async def test_only_administrators_see_why_a_backup_failed(tmp_path: Path) -> None:
    async with one(tmp_path) as (_, doors):
        reader = (await doors.create("read"))["token"]
        (tmp_path / "file").touch()
        _, job = await doors.ask("POST", "/cluster/backups", doors.root, value={"to": str(tmp_path / "file" / "x")})
        path = f"/cluster/backups/{job['id']}"
        async with asyncio.timeout(20):
            while (shown := (await doors.ask("GET", path, doors.root))[1])["status"] == "running":
                await asyncio.sleep(0.05)

        assert shown["status"] == "failed" and "file" in shown["error"]
        [listed] = (await doors.ask("GET", "/cluster/backups", reader))[1]["backups"]
        for seen in ((await doors.ask("GET", path, reader))[1], listed):
            assert seen["error"] == "it failed; the log of the node has the reason, and the role admin sees it here"


@pytest.mark.parametrize(
    ("place", "configured", "within"),
    [
        ("s3://bucket/backups?region=eu-central-1", "s3://bucket/snapshots", True),
        ("s3://other/p", "s3://bucket/p", False),
        ("s3://bucket/p?endpoint_url=http://h:1", "s3://bucket/p", False),
        ("s3://bucket/p?endpoint_url=http://h:1", "s3://bucket/x?endpoint_url=http://h:1", True),
        ("s3://bucket/p?profile=root", "s3://bucket/p", False),
        ("/store/backups", "/store", True),
        ("file:///store/backups", "/store", True),
        ("/store/../etc", "/store", False),
        ("/storeroom", "/store", False),
        ("/store", "s3://bucket/p", False),
        ("/store", "", False),
    ],
)
def test_a_place_is_within_the_store_of_snapshots(place: str, configured: str, within: bool) -> None:
    assert is_within(place, configured) is within
