"""Making a backup of the whole cluster from any node: one point in time for all partitions, then upload everything.

The point in time (docs/adr/0003): all leaders *hold* messages between partitions, then each opens a read transaction.
The hold ends after milliseconds, and the copies are made in the background. A hold may expire, and a new leader does
not know of it, so correctness does not depend on it. The progress of messages is read from the transactions that are
copied; if the copies are inconsistent with each other, the round is repeated. The meta group is read last, because
partitions refer to deployments. If deployments changed in between, the round is repeated too, because a deployment that
was added and removed meanwhile would be missing.

A backup is finished when its manifest is written. If it ends earlier, what remains is not mistaken for a backup.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, TypedDict
from urllib.parse import urlsplit

from holdfast import __version__
from holdfast.cluster.addresses import find_guarded
from holdfast.cluster.backup.copies import (
    DONE,
    FAILED,
    WAITING,
    Copies,
)
from holdfast.cluster.backup.newest import NewestBackup
from holdfast.cluster.errors import BadRequest, Conflict, Forbidden, NotFound
from holdfast.cluster.peers.rpc import Refused, Unanswered
from holdfast.cluster.schemas import one_of
from holdfast.cluster.snapshotting.service import Snapshots
from holdfast.log.errors import ProposalError
from holdfast.sdk.ids import PartitionNumber, numbers_of
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
from holdfast.snapshots.stores import S3Place, Store, check_store_url
from holdfast.snapshots.work import ABANDON_S, in_thread
from holdfast.statemachine.access import ADMIN, permits
from holdfast.statemachine.marks import Marks, why_not_together
from holdfast.statemachine.meta import MetaState, encode_state
from holdfast.statemachine.tables import SCHEMA

logger = logging.getLogger(__name__)

TRIES: Final = 8
RETRY_S: Final = 0.5
LEADERS_S: Final = 30.0  # How long to wait until every partition has a leader.
HOLD_S: Final = 10.0  # A hold expires after this. Normally it is released after milliseconds.
POLL_S: Final = 0.2
LOST_S: Final = 30.0  # A node that is silent for this long is lost, and its copies with it.
ASK_S: Final = 5.0
STOPPING_S: Final = 0.5  # A stopping node does not wait: the other nodes release their copies by themselves.
KEPT: Final = 20  # Number of ended backups that are shown.

RUNNING: Final = "running"
SUCCEEDED: Final = "succeeded"
ENDED_BADLY: Final = "failed"
CANCELLED: Final = "cancelled"
REASON_HIDDEN: Final = "it failed; the log of the node has the reason, and the role admin sees it here"


class StoredPart(TypedDict):
    """The snapshot of one partition in the backup."""

    object: Annotated[str, "its name in the store"]
    bytes: int
    sha256: str
    partition: PartitionNumber
    index: Annotated[int, "of its last entry"]
    term: Annotated[int, "of that entry"]
    node: Annotated[str, "that took it"]


class BackupPart(TypedDict):
    """How far one partition is."""

    partition: PartitionNumber
    node: Annotated[str | None, "that copies it"]
    doing: Annotated[str, "in words"]
    bytes: Annotated[int, "copied"]
    of_bytes: int
    note: Annotated[str | None, "what went wrong, while it is tried again; only for the role admin"]
    stored: StoredPart | None


class Backup(TypedDict):
    id: str
    to: Annotated[str, "the place"]
    status: Annotated[str, one_of([RUNNING, SUCCEEDED, ENDED_BADLY, CANCELLED])]
    doing: Annotated[str | None, "while it runs: in words"]
    rounds: Annotated[int, "how often it began to look for a point in time that all partitions share"]
    error: Annotated[str | None, "why it failed; only the role admin sees the reason"]
    began_ms: Annotated[int, "milliseconds since 1970"]
    ended_ms: Annotated[int | None, "milliseconds since 1970"]
    held_ms: Annotated[float | None, "for how long writes waited"]
    bytes: Annotated[int | None, "of the whole backup, once it succeeded"]
    partitions: list[BackupPart]


class BackupFailed(Exception):
    """The backup was given up. Nothing it wrote can be mistaken for a backup."""


class TryAgain(Exception):
    """This round failed; the next one may succeed."""


@dataclass
class Job:
    """A backup that this node is making or has made."""

    id: str
    url: str
    began_ms: int
    status: str = RUNNING
    doing: str = "checking the store"
    rounds: int = 0
    error: str | None = None
    held_ms: float | None = None
    rows: dict[PartitionNumber, BackupPart] = field(default_factory=dict)
    manifest: Manifest | None = None
    ended_ms: int | None = None
    task: asyncio.Task[None] | None = None

    def show(self) -> Backup:
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


def read_place(given: Any) -> str:
    """The place of a backup that a request names."""
    hint = 'send JSON as in {"to": "s3://bucket/prefix"}; a directory must be shared by all nodes'
    if not isinstance(given, str):
        raise BadRequest('"to" is missing', hint)
    try:
        check_store_url(given)
    except BadStoreUrl as error:
        raise BadRequest(str(error), hint) from None
    return given


async def check_place(place: str, configured: str, roles: Sequence[str]) -> None:
    """Raises Forbidden or BadRequest. A node writes with its own credentials and rights, so the place is for an
    administrator to choose, unless the setting `snapshots` already has it.
    """
    if is_within(place, configured):
        return
    if not permits(roles, ADMIN):
        raise Forbidden(
            "only the role admin may back up to another place than the store in the setting `snapshots`",
            "use a place in that store, or a token with the role admin",
        )
    where = check_store_url(place)
    if isinstance(where, S3Place) and where.endpoint_url is not None:
        url = urlsplit(where.endpoint_url)
        if url.hostname and (guarded := await find_guarded(url.hostname, 443)) is not None:
            raise BadRequest(guarded, "give the endpoint_url of an S3 service")


def is_within(place: str, configured: str) -> bool:
    """Whether a place is in the configured store: the same bucket at the same endpoint, or below the same directory."""
    if not configured:
        return False
    one, other = check_store_url(place), check_store_url(configured)
    if isinstance(one, S3Place) and isinstance(other, S3Place):
        return (one.bucket, one.endpoint_url, one.profile) == (other.bucket, other.endpoint_url, other.profile)
    if not isinstance(one, Path) or not isinstance(other, Path) or ".." in one.parts:
        return False
    return one.absolute().is_relative_to(other.absolute())


def show_to(roles: Sequence[str], job: Backup) -> Backup:
    """A backup as a client with these roles sees it. Reasons tell what is at an address or on a disk of the nodes."""
    if permits(roles, ADMIN):
        return job
    doing = job["doing"]
    return {
        **job,
        "error": REASON_HIDDEN if job["error"] else None,
        "doing": doing.partition(":")[0] if doing else doing,
        "partitions": [{**row, "note": None} for row in job["partitions"]],
    }


class Backups:
    """One per node. Everything here runs on the event loop's thread."""

    def __init__(
        self,
        home: Snapshots,
        copies: Copies,
        *,
        partitions: int,
        leader: Callable[[PartitionNumber], str | None],
        meta: Callable[[], MetaState],
        meta_fresh: Callable[[], Awaitable[None]],
        connected: Callable[[], Collection[str]],
    ) -> None:
        self.copies = copies
        self._home = home
        self._partitions = partitions
        self._leader = leader
        self._meta = meta
        self._meta_fresh = meta_fresh
        self._connected = connected
        self._jobs: dict[str, Job] = {}
        self._stopping = False
        self.newest = NewestBackup(home.config.data, home.rpc, connected)
        #: Checks that the marks of all partitions are consistent with each other.
        self.why_not_together: Callable[[Mapping[PartitionNumber, Marks]], str | None] = why_not_together
        home.rpc.serve("backup-show", self._serve_show)
        home.rpc.serve("backup-cancel", self._serve_cancel)

    # -- for operators -----------------------------------------------------------------------------------------------

    def begin(self, url: str) -> Backup:
        """Start a backup and return at once; `show` returns its progress."""
        running = next((job for job in self._jobs.values() if job.status == RUNNING), None)
        if running is not None:
            raise Conflict(
                f"this node is already making the backup {running.id}",
                f"wait for it, or cancel it: DELETE /cluster/backups/{running.id}",
            )
        for ended in list(self._jobs)[:-KEPT]:
            del self._jobs[ended]
        job = Job(new_id(self._home.clock.wall_s(), self._home.environment.entropy.token(3)), url, self._now_ms())
        self._jobs[job.id] = job
        job.task = asyncio.ensure_future(self._run(job))
        return job.show()

    def recent(self) -> list[Backup]:
        """Backups that this node is making or has made since it started, newest first."""
        return [job.show() for job in reversed(self._jobs.values())]

    async def show(self, id_: str) -> Backup:
        job = self._jobs.get(id_)
        return job.show() if job is not None else await self._elsewhere("backup-show", id_)

    async def cancel(self, id_: str) -> Backup:
        """Cancel a running backup and remove what it wrote. An ended backup is unchanged."""
        job = self._jobs.get(id_)
        if job is None:
            return await self._elsewhere("backup-cancel", id_)
        if job.task is not None and job.status == RUNNING:
            job.task.cancel()
            await asyncio.gather(job.task, return_exceptions=True)
        return job.show()

    async def _elsewhere(self, method: str, id_: str) -> Backup:
        for peer in sorted(self._connected()):
            try:
                async with asyncio.timeout(ASK_S):
                    found: Backup | None = await self._home.rpc.ask(peer, method, id_)
            except (Unanswered, Refused, TimeoutError):
                continue
            if found is not None:
                return found
        raise NotFound(
            f"no node is making a backup {id_!r:.100}",
            "a restarted node forgets the backup it was making; holdfast backup list --from shows complete backups",
        )

    async def _serve_show(self, peer: str, id_: Any) -> Backup | None:
        return await self.show(id_) if id_ in self._jobs else None

    async def _serve_cancel(self, peer: str, id_: Any) -> Backup | None:
        return await self.cancel(id_) if id_ in self._jobs else None

    def _now_ms(self) -> int:
        return int(self._home.clock.wall_s() * 1000)

    async def stop(self) -> None:
        """On return, no thread of ours reads a state. What was written stays; without a manifest it is not a backup."""
        self._stopping = self.copies.stopping = True
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.copies.stop()

    # -- one backup --------------------------------------------------------------------------------------------------

    async def _run(self, job: Job) -> None:
        """Make a backup. Its status changes last, so that the store is final once the backup is seen to have ended."""
        store: Store | None = None
        status, cancelled = ENDED_BADLY, False
        try:
            store = await in_thread(
                lambda _: self._home.environment.open_store(job.url)
            )  # Loads boto3, which takes a while.
            await in_thread(lambda _: _write_begun(store, job, self._home.config.node), abandon_after_s=ABANDON_S)
            job.manifest = await self._make(job, store)
            status = SUCCEEDED
            logger.info(
                "finished the backup %s in %s: %d bytes, messages held for %.0f ms",
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
            logger.warning("the backup %s to %s ended: %s", job.id, job.url, job.error or status)
            if store is not None and not self._stopping:
                job.doing = "removing what was written"
                await self._clean_up(store, job.id)
        job.status, job.ended_ms = status, self._now_ms()
        if status == SUCCEEDED:
            self.newest.made(job.ended_ms)
        elif status == ENDED_BADLY:
            self.newest.failed += 1
        if cancelled:
            raise asyncio.CancelledError

    async def _make(self, job: Job, store: Store) -> Manifest:
        why = ""
        for job.rounds in range(1, TRIES + 1):
            token = f"{job.id}/{job.rounds}"
            by_node: dict[str, list[PartitionNumber]] = {}
            try:
                by_node = await self._leaders(job)
                parts, meta = await self._round(job, token, by_node)
                return await in_thread(
                    lambda _: self._finish(job.id, store, parts, meta),  # noqa: B023
                    abandon_after_s=ABANDON_S,
                )
            except TryAgain as again:
                why = str(again)
                logger.warning("restarting the backup %s: %s", job.id, why)
                job.doing = f"restarting: {why}"
            finally:
                await self._all(by_node, "backup-abort", lambda _: token, quietly=True)  # noqa: B023
            await asyncio.sleep(RETRY_S * job.rounds)
        raise BackupFailed(f"gave up after {TRIES} attempts: {why}")

    async def _leaders(self, job: Job) -> dict[str, list[PartitionNumber]]:
        """The partitions, by leader."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LEADERS_S
        while True:
            by_node: dict[str, list[PartitionNumber]] = {}
            headless = []
            for number in numbers_of(self._partitions):
                leader = self._leader(number)
                if leader is None:
                    headless.append(number)
                else:
                    by_node.setdefault(leader, []).append(number)
                job.rows[number] = _row(number, leader)
            if not headless:
                return by_node
            if loop.time() > deadline:
                raise BackupFailed(f"partitions without a leader: {headless}. See holdfast cluster status")
            job.doing = f"waiting for a leader of partitions {headless}"
            await asyncio.sleep(POLL_S)

    async def _round(
        self, job: Job, token: str, by_node: Mapping[str, list[PartitionNumber]]
    ) -> tuple[list[Part], bytes]:
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
            raise TryAgain("a deployment was registered or removed during the round")
        meta = encode_state(state)
        job.doing = "copying"
        await self._all(by_node, "backup-send", lambda _: [token, job.url, f"{job.id}/"])
        return await self._sent(job, token, by_node), meta

    async def _begin(
        self, job: Job, token: str, by_node: Mapping[str, list[PartitionNumber]]
    ) -> dict[PartitionNumber, Marks]:
        """Have every partition open a read transaction, and return the marks in them."""
        began = self._home.clock.monotonic_s()
        try:
            async with asyncio.timeout(HOLD_S):
                await self._hold(token, by_node)
                answers = await self._all(by_node, "backup-begin", lambda numbers: [token, numbers])
        except TimeoutError:
            raise TryAgain(f"not every leader answered within {HOLD_S:.0f} s") from None
        finally:
            await self._all(by_node, "backup-release", lambda numbers: [token, numbers], quietly=True)
            job.held_ms = (self._home.clock.monotonic_s() - began) * 1000
        marks = {number: Marks(*rest) for answer in answers for number, *rest in answer}
        assert set(marks) == set(numbers_of(self._partitions)), "every partition was asked"
        return marks

    async def _hold(self, token: str, by_node: Mapping[str, list[PartitionNumber]]) -> None:
        await self._all(by_node, "backup-hold", lambda numbers: [token, numbers, HOLD_S])

    async def _sent(self, job: Job, token: str, by_node: Mapping[str, list[PartitionNumber]]) -> list[Part]:
        """Wait until every copy is in the store."""
        answered = dict.fromkeys(by_node, self._home.clock.monotonic_s())
        while True:
            answers = await asyncio.gather(
                *(self._ask(node, "backup-status", token, ASK_S) for node in by_node), return_exceptions=True
            )
            for node, answer in zip(by_node, answers, strict=True):
                if isinstance(answer, Refused):
                    raise TryAgain(str(answer))
                if isinstance(answer, BaseException):
                    if self._home.clock.monotonic_s() > answered[node] + LOST_S:
                        raise TryAgain(f"{node} is lost: {answer}")
                    continue
                answered[node] = self._home.clock.monotonic_s()
                for number, doing, done, total, note, error, stored in answer:
                    job.rows[number] = _row(number, node, doing, done, total=total, note=note, stored=stored)
                    if doing == FAILED:
                        why, again = error
                        raise TryAgain(why) if again else BackupFailed(f"partition {number}: {why}")
            if all(row["doing"] == DONE for row in job.rows.values()):
                return [Part(**stored) for _, row in sorted(job.rows.items()) if (stored := row["stored"]) is not None]
            await asyncio.sleep(POLL_S)

    def _finish(self, id_: str, store: Store, parts: list[Part], meta: bytes) -> Manifest:
        """Write the manifest, which completes the backup, once every object it names is visible from here."""
        for part in parts:
            try:
                size = store.stat(f"{id_}/{part.object}").size
            except NotStored:
                raise BackupFailed(
                    f"{part.node} wrote {part.object}, but {self._home.config.node} cannot find it in {store.url}. "
                    "A directory must be shared by all nodes"
                ) from None
            if size != part.bytes:
                raise BackupFailed(f"{store.url}: {part.object} has {size} bytes instead of {part.bytes}")
        store.put_bytes(meta, f"{id_}/{META}")
        manifest = Manifest(
            id=id_,
            cluster=self._home.config.cluster,
            identity=self._home.identity(),
            created_ms=self._now_ms(),
            release=__version__,
            schema=SCHEMA,
            partitions=len(parts),
            parts=tuple(parts),
            meta=Stored(META, len(meta), hashlib.sha256(meta).hexdigest()),
        )
        named = {f"{id_}/{each.object}" for each in (*parts, manifest.meta)}
        for found in store.list(f"{id_}/"):
            if found.name not in named and not found.name.endswith(f"/{BEGUN}"):
                store.delete(found.name)  # A leftover of a failed round.
        store.put_bytes(encode_manifest(manifest), f"{id_}/{MANIFEST}")
        if read_manifest(store, id_) != manifest:
            raise BackupFailed(f"{store.url}: the manifest differs from what was just written")
        return manifest

    async def _clean_up(self, store: Store, id_: str) -> None:
        """Delete what was written, as far as possible. Without a manifest it is not a backup anyway."""
        try:
            await in_thread(lambda _: delete_backup(store, id_), abandon_after_s=ABANDON_S)
        except Exception as error:
            logger.warning("could not remove what the backup %s wrote to %s: %s", id_, store.url, error)

    # -- asking nodes ------------------------------------------------------------------------------------------------

    async def _ask(self, node: str, method: str, argument: Any, seconds: float) -> Any:
        """Call a node with a timeout, because a node may be silent while its link is up."""
        async with asyncio.timeout(seconds):
            if node == self._home.config.node:
                return await self.copies.handlers[method](argument)
            return await self._home.rpc.ask(node, method, argument)

    async def _all(
        self,
        by_node: Mapping[str, list[PartitionNumber]],
        method: str,
        argument: Callable[[list[PartitionNumber]], Any],
        *,
        quietly: bool = False,
    ) -> list[Any]:
        """The answers of all nodes. A node that fails ends the round, unless `quietly` is set."""

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
    number: PartitionNumber,
    node: str | None,
    doing: str = WAITING,
    done: int = 0,
    total: int = 0,
    note: str | None = None,
    stored: StoredPart | None = None,
) -> BackupPart:
    return {
        "partition": number, "node": node, "doing": doing, "bytes": done, "of_bytes": total, "note": note,
        "stored": stored,
    }  # fmt: skip


def _write_begun(store: Store | None, job: Job, node: str) -> None:
    """Reveals problems with the store early, and records which node began the backup."""
    assert store is not None
    begun = {"id": job.id, "node": node, "began_ms": job.began_ms, "release": __version__}
    store.put_bytes(json.dumps(begun).encode(), f"{job.id}/{BEGUN}")
