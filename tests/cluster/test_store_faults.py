"""A shared store that is down, denied, missing or broken: the cluster keeps working, reports the problem, and recovers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode

import aiohttp
import pytest

from holdfast.cluster.snapshotting.keeper import Keeper
from holdfast.log.node import Group
from holdfast.snapshots.policy import Policy
from tests.cluster.harness import World, eventually, world
from tests.cluster.test_snapshots import COUNTER
from tests.snapshots.conftest import credentials, proxy, rclone  # noqa: F401 - fixtures
from tests.snapshots.fault_proxy import Fault, FaultProxy, error
from tests.snapshots.servers import BUCKET


def place(endpoint_url: str, bucket: str = BUCKET, prefix: str = "cluster") -> str:
    options = {"endpoint_url": endpoint_url, "region": "eu-test-1", "attempts": 1, "read_timeout_s": 2}
    return f"s3://{bucket}/{prefix}?{urlencode(options)}"


@asynccontextmanager
async def storing(path: Path, url: str) -> AsyncIterator[World]:
    async with world(path, partitions=1, snapshots=url, snapshot_entries=20, snapshot_interval=0.0, log_tail=0) as it:
        await it.register(COUNTER)
        kept = keeper(it)
        kept.policy = Policy(entries_max=20, interval_min_s=0.0, retry_s=0.1, retry_max_s=0.2, keep=2, tail_entries=0)
        yield it


def keeper(it: World) -> Keeper:
    return next(iter(it.node.ground.snapshots.keepers.values()))


async def get(it: World, path: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(it.node.doors.urls.admin + path) as answer:
        return await answer.json() if "json" in answer.headers["Content-Type"] else await answer.text()


async def works_on(it: World, *, count: int = 30) -> None:
    """Calls are answered, snapshots are cut and the log is trimmed, whatever the state of the store."""
    base = it.node.partitions[0].group.status().base
    for _ in range(count):
        assert (await it.call("counter/add", key="k"))[0] == 0
    await eventually(lambda: it.node.partitions[0].group.status().base > base, "a trimmed log")


async def published(it: World) -> None:
    kept = keeper(it)
    await eventually(lambda: kept.newest is not None and kept.published == kept.newest.name, "a published snapshot")


async def test_snapshots_are_published_and_old_ones_removed(
    tmp_path: Path,
    proxy: FaultProxy,  # noqa: F811
) -> None:
    async with storing(tmp_path, place(proxy.endpoint_url, prefix=tmp_path.name)) as it:
        for _ in range(4):
            await works_on(it)
            await published(it)
        await keeper(it).create()  # Of everything, so that no later one is due.
        await published(it)

        found = await get(it, "/snapshots")

        assert len(found["snapshots"]) == 2
        assert found["snapshots"][0]["index"] > found["snapshots"][1]["index"]
        shown = await get(it, "/cluster")
        assert shown["snapshots"]["error"] is None
        assert shown["partitions"][0]["snapshot"]["stored"] is True
        assert "secretkey123" not in str(shown) + str(it.node.config)


@pytest.mark.parametrize(
    ("bucket", "breaking", "said"),
    [
        (BUCKET, "down", "Check the endpoint URL"),
        (BUCKET, "errors", "the operation is retried"),
        (BUCKET, "slow", "the operation is retried"),
        ("no-such-bucket", "", "Create it, or correct its name"),
    ],
)
async def test_a_store_that_fails_is_named_and_used_again_when_it_works(
    tmp_path: Path,
    proxy: FaultProxy,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    bucket: str,
    breaking: str,
    said: str,
) -> None:
    caplog.set_level(logging.INFO, "holdfast.cluster.snapshotting")
    async with storing(tmp_path, place(proxy.endpoint_url, bucket, tmp_path.name)) as it:
        _break(proxy, breaking)
        await works_on(it)
        kept = keeper(it)
        await eventually(lambda: kept.publishing.failures >= 3, "failures of the store")

        await works_on(it)

        shown = await get(it, "/cluster")
        assert said in shown["snapshots"]["error"]
        assert said in shown["partitions"][0]["snapshot"]["error"]
        metrics = await get(it, "/metrics")
        assert 'holdfast_snapshot_failures_total{how="publish",partition="0"}' in metrics
        complaints = [record for record in caplog.records if "publishing a snapshot" in record.message]
        assert len(complaints) <= 2, "the same complaint is not repeated with every try"
        if bucket == BUCKET:
            _break(proxy, "")
            await published(it)
            assert (await get(it, "/cluster"))["snapshots"]["error"] is None
            assert any("works again" in record.message for record in caplog.records)


async def test_wrong_credentials_are_named_and_never_shown(
    tmp_path: Path,
    proxy: FaultProxy,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-right-secret")
    async with storing(tmp_path, place(proxy.endpoint_url, prefix=tmp_path.name)) as it:
        await works_on(it)
        await eventually(lambda: keeper(it).publishing.failures >= 1, "a refusal")

        shown = await get(it, "/cluster")

        assert "Check the credentials" in shown["snapshots"]["error"]
        assert "not-the-right-secret" not in str(shown) + caplog.text
        await works_on(it)


async def test_a_node_that_publishes_nothing_finds_out_that_the_store_works_again(
    tmp_path: Path,
    proxy: FaultProxy,  # noqa: F811
) -> None:
    _break(proxy, "errors")
    async with storing(tmp_path, place(proxy.endpoint_url, prefix=tmp_path.name)) as it:
        home = it.node.ground.snapshots
        home.store_policy = keeper(it).policy
        await eventually(lambda: home.store_complaints.failures >= 2, "looks at the store")
        assert (await get(it, "/cluster"))["snapshots"]["error"] is not None

        _break(proxy, "")

        await eventually(lambda: home.store_complaints.error is None, "a look at a store that works")
        assert keeper(it).published is None
        assert (await get(it, "/cluster"))["snapshots"]["error"] is None


class Deposed:
    """A group that differs only in its leader."""

    is_leader = False

    def __init__(self, group: Group) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


async def test_a_deposed_leader_no_longer_reports_the_store_of_others(
    tmp_path: Path,
    proxy: FaultProxy,  # noqa: F811
) -> None:
    async with storing(tmp_path, place(proxy.endpoint_url, prefix=tmp_path.name)) as it:
        _break(proxy, "errors")
        await works_on(it)
        kept = keeper(it)
        await eventually(lambda: kept.publishing.error is not None, "a failure of the store")

        kept.group = cast(Group, Deposed(kept.group))

        await eventually(lambda: kept.publishing.error is None, "no complaint")


def _break(server: FaultProxy, how: str) -> None:
    server.heal()
    faults = {
        "down": Fault(down=True),
        "errors": error(503, "SlowDown"),
        "slow": Fault(delay_s=5.0),
    }
    if how:
        server.faults.append(faults[how])
