"""Making a backup of the whole cluster, from any node: one point in time for all partitions, then everything to a store.

The point (docs/adr/0003). All leaders *hold* messages between partitions; then each opens a read transaction; then the hold is
over, after milliseconds, and the copying goes on beside the work. A hold may expire and a new leader knows of none, so nothing
rests on it: how far the messages are is read from the very transactions that are copied, and if they do not fit together, the
round is made again. The meta group comes last, because partitions refer to deployments; if those changed in between, the round
is made again too: one that came and went would be missed.

A backup is finished when its manifest is written. Whatever ends it before leaves something that nobody takes for one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast import __version__
from holdfast.cluster.backup.copies import (
    DONE,
    FAILED,
    WAITING,
    Copies,
)
from holdfast.cluster.errors import BadRequest, Conflict, NotFound
from holdfast.cluster.partition.door import Partition
from holdfast.cluster.peers.rpc import Refused, Unanswered
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.cluster.values.shared_store import Objects
from holdfast.log.errors import ProposalError
from holdfast.snapshots.backups import (
    BEGUN,
    MANIFEST,
    META,
    Manifest,
    Part,
    Stored,
    delete_backup,
    encode_manifest,
    new_id,
    read_manifest,
)
from holdfast.snapshots.errors import BadStoreUrl, SnapshotError
from holdfast.snapshots.errors import NotFound as NotStored
from holdfast.snapshots.opening import open_store
from holdfast.snapshots.stores import Store, check_store_url
from holdfast.snapshots.work import in_thread
from holdfast.statemachine.marks import Marks, why_not_together
from holdfast.statemachine.meta import MetaState, encode_state
from holdfast.statemachine.tables import SCHEMA

logger = logging.getLogger(__name__)

TRIES: Final = 8
RETRY_S: Final = 0.5
LEADERS_S: Final = 30.0  # So long it waits until every partition has a leader.
HOLD_S: Final = 10.0  # A hold ends by itself after this; it is ended after milliseconds.
POLL_S: Final = 0.2
LOST_S: Final = 30.0  # A node that does not answer for so long is lost, and its copies with it.
ASK_S: Final = 5.0
STOPPING_S: Final = 0.5  # A node that stops waits for nobody: the others let go by themselves.
KEPT: Final = 20  # Ended ones that are shown.

RUNNING: Final = "running"
SUCCEEDED: Final = "succeeded"
ENDED_BADLY: Final = "failed"
CANCELLED: Final = "cancelled"


class BackupFailed(Exception):
    """It is given up. Nothing was written that could be taken for a backup."""


class TryAgain(Exception):
    """This round came to nothing; the next one may not."""


@dataclass
class Job:
    """One backup that this node makes, or made."""

    id: str
    url: str
    began_ms: int
    status: str = RUNNING
    doing: str = "looking at the store"
    rounds: int = 0
    error: str | None = None
    held_ms: float | None = None
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    manifest: Manifest | None = None
    ended_ms: int | None = None
    task: asyncio.Task[None] | None = None

    def show(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "to": self.url,
            "status": self.status,
            "doing": self.doing if self.status == RUNNING else None,
            "rounds": self.rounds,
            "error": self.error,
            "began_ms": self.began_ms,
            "ended_ms": self.ended_ms,
            "held_ms": round(self.held_ms, 1) if self.held_ms is not None else None,
            "bytes": self.manifest.bytes if self.manifest is not None else None,
            "partitions": [self.rows[number] for number in sorted(self.rows)],
        }


class Backups:
    """One per node. Everything here happens on the loop's thread."""

    def __init__(
        self,
        home: Snapshots,
        objects: Objects,
        hosted: Mapping[int, Partition],
        *,
        count: Callable[[], int],
        leader: Callable[[int], str | None],
        meta: Callable[[], MetaState],
        meta_fresh: Callable[[], Awaitable[None]],
        connected: Callable[[], Collection[str]],
    ) -> None:
        self.copies = Copies(home, objects, hosted)
        self._home = home
        self._count = count
        self._leader = leader
        self._meta = meta
        self._meta_fresh = meta_fresh
        self._connected = connected
        self._jobs: dict[str, Job] = {}
        self._stopping = False
        #: What must hold of the marks of all partitions.
        self.why_not_together: Callable[[Mapping[int, Marks]], str | None] = why_not_together
        home.rpc.serve("backup-show", self._serve_show)
        home.rpc.serve("backup-cancel", self._serve_cancel)

    # -- for operators -----------------------------------------------------------------------------------------------

    def begin(self, url: Any) -> dict[str, Any]:
        """Returns at once; `show` says how far it is."""
        hint = 'send JSON as in {"to": "s3://bucket/prefix"}; a directory must be one that all nodes share'
        if not isinstance(url, str):
            raise BadRequest('"to" is missing', hint)
        try:
            check_store_url(url)
        except BadStoreUrl as error:
            raise BadRequest(str(error), hint) from None
        running = next((job for job in self._jobs.values() if job.status == RUNNING), None)
        if running is not None:
            raise Conflict(
                f"this node is making the backup {running.id} already",
                f"wait for it, or cancel it: DELETE /cluster/backups/{running.id}",
            )
        for ended in list(self._jobs)[:-KEPT]:
            del self._jobs[ended]
        job = Job(new_id(), url, time.time_ns() // 1_000_000)
        self._jobs[job.id] = job
        job.task = asyncio.ensure_future(self._run(job))
        return job.show()

    def recent(self) -> list[dict[str, Any]]:
        """What this node makes or made since it started, newest first."""
        return [job.show() for job in reversed(self._jobs.values())]

    async def show(self, id_: str) -> dict[str, Any]:
        job = self._jobs.get(id_)
        return job.show() if job is not None else await self._elsewhere("backup-show", id_)

    async def cancel(self, id_: str) -> dict[str, Any]:
        """Ends it, and removes what it wrote. One that has ended stays as it is."""
        job = self._jobs.get(id_)
        if job is None:
            return await self._elsewhere("backup-cancel", id_)
        if job.task is not None and job.status == RUNNING:
            job.task.cancel()
            await asyncio.gather(job.task, return_exceptions=True)
        return job.show()

    async def _elsewhere(self, method: str, id_: str) -> dict[str, Any]:
        for peer in sorted(self._connected()):
            try:
                async with asyncio.timeout(ASK_S):
                    found: dict[str, Any] | None = await self._home.rpc.ask(peer, method, id_)
            except (Unanswered, Refused, TimeoutError):
                continue
            if found is not None:
                return found
        raise NotFound(
            f"no node makes a backup {id_!r:.100}",
            "a node that was restarted has forgotten what it was making; holdfast backup list --from shows what is whole",
        )

    async def _serve_show(self, peer: str, id_: Any) -> dict[str, Any] | None:
        return await self.show(id_) if id_ in self._jobs else None

    async def _serve_cancel(self, peer: str, id_: Any) -> dict[str, Any] | None:
        return await self.cancel(id_) if id_ in self._jobs else None

    async def stop(self) -> None:
        """When this returns no thread of ours reads a state. What was written stays: without a manifest it is no backup."""
        self._stopping = self.copies.stopping = True
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.copies.stop()

    # -- the whole of it ---------------------------------------------------------------------------------------------

    async def _run(self, job: Job) -> None:
        """Its status changes last: whoever sees it ended finds the store as it will stay."""
        store: Store | None = None
        status, cancelled = ENDED_BADLY, False
        try:
            store = await in_thread(lambda _: open_store(job.url))  # boto3 is loaded here, which takes a while.
            await in_thread(lambda _: _write_begun(store, job, self._home.config.node))
            job.manifest = await self._make(job, store)
            status = SUCCEEDED
            logger.info(
                "the backup %s is in %s: %d bytes, messages held for %.0f ms",
                job.id, job.url, job.manifest.bytes, job.held_ms or 0.0,
            )  # fmt: skip
        except asyncio.CancelledError:
            status, cancelled = CANCELLED, True
        except (BackupFailed, SnapshotError, OSError) as error:
            job.error = str(error)
        except Exception as error:
            logger.exception("the backup %s failed", job.id)
            job.error = f"{type(error).__name__}: {error}"
        if status != SUCCEEDED:
            logger.warning("the backup %s to %s: %s", job.id, job.url, job.error or status)
            if store is not None and not self._stopping:
                job.doing = "removing what was written"
                await self._clean_up(store, job.id)
        job.status, job.ended_ms = status, time.time_ns() // 1_000_000
        if cancelled:
            raise asyncio.CancelledError

    async def _make(self, job: Job, store: Store) -> Manifest:
        why = ""
        for job.rounds in range(1, TRIES + 1):
            token = f"{job.id}/{job.rounds}"
            by_node: dict[str, list[int]] = {}
            try:
                by_node = await self._leaders(job)
                parts, meta = await self._round(job, token, by_node)
                return await in_thread(lambda _: self._finish(job.id, store, parts, meta))  # noqa: B023
            except TryAgain as again:
                why = str(again)
                logger.warning("the backup %s is begun again: %s", job.id, why)
                job.doing = f"begun again: {why}"
            finally:
                await self._all(by_node, "backup-abort", lambda _: token, quietly=True)  # noqa: B023
            await asyncio.sleep(RETRY_S * job.rounds)
        raise BackupFailed(f"given up after {TRIES} tries: {why}")

    async def _leaders(self, job: Job) -> dict[str, list[int]]:
        """The partitions by who leads them."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LEADERS_S
        while True:
            by_node: dict[str, list[int]] = {}
            headless = []
            for number in range(self._count()):
                leader = self._leader(number)
                if leader is None:
                    headless.append(number)
                else:
                    by_node.setdefault(leader, []).append(number)
                job.rows[number] = _row(number, leader)
            if not headless:
                return by_node
            if loop.time() > deadline:
                raise BackupFailed(f"partitions without a leader: {headless}. Look at holdfast cluster status")
            job.doing = f"waiting for a leader of partitions {headless}"
            await asyncio.sleep(POLL_S)

    async def _round(self, job: Job, token: str, by_node: Mapping[str, list[int]]) -> tuple[list[Part], bytes]:
        job.doing = "finding a point in time"
        try:
            await self._meta_fresh()
            before, revisions = set(self._meta().deployments), dict(self._meta().revisions)
            marks = await self._begin(job, token, by_node)
            why = self.why_not_together(marks)
            if why is not None:
                raise TryAgain(why)
            await self._meta_fresh()
        except ProposalError as error:
            raise TryAgain(str(error)) from None
        state = self._meta()
        if before - set(state.deployments) or revisions != state.revisions:
            raise TryAgain("a deployment was registered or removed meanwhile")
        meta = encode_state(state)
        job.doing = "copying"
        await self._all(by_node, "backup-send", lambda _: [token, job.url, f"{job.id}/"])
        return await self._sent(job, token, by_node), meta

    async def _begin(self, job: Job, token: str, by_node: Mapping[str, list[int]]) -> dict[int, Marks]:
        """Every partition has a read transaction open. What stands in them."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(HOLD_S):
                await self._hold(token, by_node)
                answers = await self._all(by_node, "backup-begin", lambda numbers: [token, numbers])
        except TimeoutError:
            raise TryAgain(f"not every leader answered within {HOLD_S:.0f} s") from None
        finally:
            await self._all(by_node, "backup-release", lambda numbers: [token, numbers], quietly=True)
            job.held_ms = (time.monotonic() - began) * 1000
        marks = {number: Marks(*rest) for answer in answers for number, *rest in answer}
        assert set(marks) == set(range(self._count())), "every partition was asked for"
        return marks

    async def _hold(self, token: str, by_node: Mapping[str, list[int]]) -> None:
        await self._all(by_node, "backup-hold", lambda numbers: [token, numbers, HOLD_S])

    async def _sent(self, job: Job, token: str, by_node: Mapping[str, list[int]]) -> list[Part]:
        """Until every copy is in the store."""
        answered = dict.fromkeys(by_node, time.monotonic())
        while True:
            answers = await asyncio.gather(
                *(self._ask(node, "backup-status", token, ASK_S) for node in by_node), return_exceptions=True
            )
            for node, answer in zip(by_node, answers, strict=True):
                if isinstance(answer, Refused):
                    raise TryAgain(str(answer))
                if isinstance(answer, BaseException):
                    if time.monotonic() > answered[node] + LOST_S:
                        raise TryAgain(f"{node} is lost: {answer}")
                    continue
                answered[node] = time.monotonic()
                for number, doing, done, total, note, error, stored in answer:
                    job.rows[number] = _row(number, node, doing, done, total, note, stored)
                    if doing == FAILED:
                        why, again = error
                        raise TryAgain(why) if again else BackupFailed(f"partition {number}: {why}")
            if all(row["doing"] == DONE for row in job.rows.values()):
                return [Part(**job.rows[number]["stored"]) for number in sorted(job.rows)]
            await asyncio.sleep(POLL_S)

    def _finish(self, id_: str, store: Store, parts: list[Part], meta: bytes) -> Manifest:
        """The manifest makes it a backup: it is written when everything it names is seen from here."""
        for part in parts:
            try:
                size = store.stat(f"{id_}/{part.object}").size
            except NotStored:
                raise BackupFailed(
                    f"{part.node} wrote {part.object}, but {self._home.config.node} does not find it in {store.url}. "
                    "A directory must be one that all nodes share"
                ) from None
            if size != part.bytes:
                raise BackupFailed(f"{store.url}: {part.object} has {size} bytes instead of {part.bytes}")
        store.put_bytes(meta, f"{id_}/{META}")
        manifest = Manifest(
            id=id_,
            cluster=self._home.config.cluster,
            identity=self._home.identity(),
            created_ms=time.time_ns() // 1_000_000,
            release=__version__,
            schema=SCHEMA,
            partitions=len(parts),
            parts=tuple(parts),
            meta=Stored(META, len(meta), hashlib.sha256(meta).hexdigest()),
        )
        named = {f"{id_}/{each.object}" for each in (*parts, manifest.meta)}
        for found in store.list(f"{id_}/"):
            if found.name not in named and not found.name.endswith(f"/{BEGUN}"):
                store.delete(found.name)  # Of a round that came to nothing.
        store.put_bytes(encode_manifest(manifest), f"{id_}/{MANIFEST}")
        if read_manifest(store, id_) != manifest:
            raise BackupFailed(f"{store.url}: the manifest is not what was written a moment ago")
        return manifest

    async def _clean_up(self, store: Store, id_: str) -> None:
        """As far as it goes: without a manifest it is not a backup anyway."""
        try:
            await in_thread(lambda _: delete_backup(store, id_))
        except Exception as error:
            logger.warning("what the backup %s wrote to %s is left there: %s", id_, store.url, error)

    # -- asking nodes ------------------------------------------------------------------------------------------------

    async def _ask(self, node: str, method: str, argument: Any, seconds: float) -> Any:
        """Bounded: a node may be silent while its link is up."""
        async with asyncio.timeout(seconds):
            if node == self._home.config.node:
                return await self.copies.handlers[method](argument)
            return await self._home.rpc.ask(node, method, argument)

    async def _all(
        self,
        by_node: Mapping[str, list[int]],
        method: str,
        argument: Callable[[list[int]], Any],
        *,
        quietly: bool = False,
    ) -> list[Any]:
        """The answers of all nodes. A node that does not do it ends the round, unless it is done quietly."""

        seconds = HOLD_S if not quietly else STOPPING_S if self._stopping else ASK_S
        answers = await asyncio.gather(
            *(self._ask(node, method, argument(numbers), seconds) for node, numbers in by_node.items()),
            return_exceptions=True,
        )
        for node, answer in zip(by_node, answers, strict=True):
            if isinstance(answer, Refused | Unanswered) and not quietly:
                raise TryAgain(str(answer))
            if isinstance(answer, TimeoutError) and not quietly:
                raise TryAgain(f"{node} does not answer")
            if isinstance(answer, BaseException) and not quietly:
                raise answer
        return answers


def _row(
    number: int,
    node: str | None,
    doing: str = WAITING,
    done: int = 0,
    total: int = 0,
    note: str | None = None,
    stored: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "partition": number, "node": node, "doing": doing, "bytes": done, "of_bytes": total, "note": note,
        "stored": stored,
    }  # fmt: skip


def _write_begun(store: Store | None, job: Job, node: str) -> None:
    """Says early what is wrong with the store, and later who did not finish."""
    assert store is not None
    begun = {"id": job.id, "node": node, "began_ms": job.began_ms, "release": __version__}
    store.put_bytes(json.dumps(begun).encode(), f"{job.id}/{BEGUN}")
