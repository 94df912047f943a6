"""Backups to a real S3 server that fails: retries, reports, and that no incomplete backup is accepted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import pytest
import pytest_asyncio

from holdfast.snapshots.backups import Manifest, find_backup, list_backups
from holdfast.snapshots.errors import Unreachable
from holdfast.snapshots.opening import open_store
from tests.cluster.bookkeeping import Books, books, ended, handlers
from tests.cluster.harness import eventually
from tests.snapshots.conftest import credentials, proxy, rclone  # noqa: F401 - fixtures
from tests.snapshots.fault_proxy import Fault, FaultProxy, Question, error
from tests.snapshots.servers import BUCKET


@pytest_asyncio.fixture
async def it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Books]:
    monkeypatch.setattr("holdfast.cluster.backup.copies.UPLOAD_RETRY_S", 0.05)
    async with handlers() as server, books(tmp_path / "old", ("n1",), server) as running:
        running.work(clients=2)
        await running.more(2)
        yield running


@pytest.fixture
def place(tmp_path: Path, proxy: FaultProxy) -> str:  # noqa: F811
    options = {"endpoint_url": proxy.endpoint_url, "region": "eu-test-1", "attempts": 1, "read_timeout_s": 20}
    return f"s3://{BUCKET}/{tmp_path.name}?{urlencode(options)}"


def is_upload(question: Question) -> bool:
    return question.method == "PUT" and ".snapshot" in question.path


async def test_a_failed_upload_is_retried_and_reported(it: Books, place: str, proxy: FaultProxy) -> None:  # noqa: F811
    proxy.faults.append(replace(error(503, "SlowDown"), matches=is_upload))
    node = it.nodes[0]
    job = node.serving.backups.begin(place)
    await eventually(lambda: any(row["note"] for row in node.serving.backups.recent()[0]["partitions"]), "a note")
    proxy.heal()

    job = await ended(node, job["id"])

    assert job["status"] == "succeeded" and job["rounds"] == 1, job
    find_backup(open_store(place), job["id"])


async def test_a_store_that_goes_away_for_good_leaves_no_backup(
    it: Books,
    place: str,
    proxy: FaultProxy,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.cluster.backup.copies.UPLOAD_TRIES", 2)
    proxy.faults.append(Fault(is_upload, times=1, spoil=lambda _, answer: answer))  # One upload passes,
    proxy.faults.append(Fault(lambda question: began_uploading(proxy, question), down=True))  # then all fail.

    job = await it.backup(place)

    assert job["status"] == "failed" and "Check the endpoint URL and the network" in (job["error"] or ""), job
    with pytest.raises(Unreachable):
        list_backups(open_store(place))
    proxy.heal()
    assert not any(isinstance(found, Manifest) for found in list_backups(open_store(place)))
    again = await it.backup(place)
    assert again["status"] == "succeeded", again
    await it.more(1)


def began_uploading(proxy: FaultProxy, question: Question) -> bool:  # noqa: F811
    return sum(map(is_upload, proxy.requests)) > 1


async def test_wrong_credentials_are_reported_at_once_and_never_shown(
    it: Books, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-right-secret")

    job = await it.backup(place)

    assert job["status"] == "failed" and job["rounds"] == 0
    assert "Check the credentials" in (job["error"] or "") and "not-the-right-secret" not in str(job)
