"""Approvals of all partitions: the inbox in pages, one approval, and decisions.

A decision goes to the partition of its invocation, which takes only the first one. So it does not matter which node is asked,
or how many at the same time.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from holdfast.cluster.errors import BadRequest, Conflict, NotFound, Unavailable, check
from holdfast.cluster.routing.merging import Slice, format_cursor, merge, parse_cursor
from holdfast.cluster.routing.reader import Reader
from holdfast.cluster.routing.router import Leaders
from holdfast.sdk.ids import ApprovalId, BadId, PartitionNumber, numbers_of, parse_approval, partition_of
from holdfast.sdk.journal import Decided, unpack_decided
from holdfast.statemachine.commands import Decide
from holdfast.statemachine.effects import Code, Result
from holdfast.statemachine.inbox import RANK_BYTES, Approval, Wanted
from holdfast.statemachine.outcomes import payload_of

LEVEL: Final = 2  # From this one on handlers can ask for approvals.
BY_CHARS_MAX: Final = 200
_GONE_HINT: Final = "its invocation ended, or its code continued without it; GET /approvals lists those that wait"


class Page(NamedTuple):
    rows: list[Approval]
    cursor: str | None


class Draft(NamedTuple):
    """What somebody decides."""

    choice: str
    comment: str
    payload: bytes | None


class Made(NamedTuple):
    """The decision that counts. `is_new`: it was made just now."""

    decided: Decided
    is_new: bool


class Sender(Protocol):
    """Who decides."""

    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str: ...


class Inbox(Protocol):
    """Finds approvals, and decides about them. `Approvals` is the implementation."""

    async def find(self, id_: ApprovalId, /) -> Approval: ...

    async def decide(self, found: Approval, draft: Draft, sender: Sender, /) -> Made: ...


def read_approval_id(text: str) -> ApprovalId:
    try:
        return parse_approval(text)
    except BadId as error:
        raise BadRequest(str(error), "GET /approvals lists ids") from None


def read_draft(given: Mapping[str, Any], read_payload: Callable[[Any], bytes]) -> Draft:
    """The body of a decision. Apply checks it against the approval."""
    choice, comment = given.get("choice"), given.get("comment")
    if not isinstance(choice, str) or not choice:
        raise BadRequest('"choice" must be one of the choices of the approval', 'send JSON as in {"choice": "approve"}')
    if comment is not None and not isinstance(comment, str):
        raise BadRequest('"comment" must be a text')
    for text in (choice, comment or ""):
        if not text.isascii() and text != text.encode(errors="replace").decode():
            raise BadRequest("the decision has text that is not Unicode")
    return Draft(choice, comment or "", read_payload(given["payload"]) if "payload" in given else None)


class Approvals:
    def __init__(self, reader: Reader, router: Leaders, level: Callable[[], int]) -> None:
        """`level`: of the cluster."""
        self._reader = reader
        self._router = router
        self._level = level

    async def page(self, wanted: Wanted, cursor: str | None, limit: int) -> Page:
        """Approvals that wait, the oldest first. A short page may still have a cursor."""

        async def read(number: PartitionNumber, after: bytes, size: int) -> Slice[Approval]:
            rows, more = await self._reader.ask(number, "approvals", tuple(wanted), after, size)
            return rows, more

        after = parse_cursor(cursor, (RANK_BYTES,)) if cursor is not None else b""
        rows, more = await merge(numbers_of(self._reader.count), after, limit, read)
        return Page(rows, format_cursor(more) if more is not None else None)

    async def find(self, id_: ApprovalId) -> Approval:
        """An approval, whatever became of it. Raises NotFound, also if the id has a wrong secret."""
        number = partition_of(id_.invocation, self._reader.count)
        found: Approval | None = await self._reader.ask(number, "approval", id_.invocation, id_.step, fresh=True)
        if found is None or (id_.secret and not hmac.compare_digest(id_.secret, found.secret)):
            raise NotFound("there is no such approval", "it never existed, or its invocation was removed")
        return found

    async def decide(self, found: Approval, draft: Draft, sender: Sender) -> Made:
        """Raises NotFound if it is gone, Conflict if it was decided otherwise or timed out, and BadRequest."""
        if self._level() < LEVEL:
            raise Unavailable("approvals require that every node of the cluster runs this release")
        command = Decide(
            id=found.invocation,
            step=found.step,
            secret=found.secret,
            choice=draft.choice,
            by=sender.name[:BY_CHARS_MAX],
            by_id=sender.id,
            comment=draft.comment,
            payload=draft.payload,
        )
        return _made(await self._router.submit(found.invocation, command))

    async def figures(self, limit: int) -> tuple[int, int]:
        """How many wait, and since when the oldest does (0: none)."""
        count, oldest_ms = 0, 0
        for number in numbers_of(self._reader.count):
            services = await self._reader.ask(number, "approval_figures", limit)
            for waiting, since_ms in services.values():
                count += waiting
                oldest_ms = min(oldest_ms or since_ms, since_ms)
        return count, oldest_ms


def _made(result: Result) -> Made:
    if result.code == Code.NOT_FOUND:
        raise NotFound(result.message, _GONE_HINT)
    if result.code == Code.CONFLICT:
        comment = unpack_decided(_payload(result)).comment if result.outcome is not None else ""
        raise Conflict(result.message, details=(f"comment: {comment}",) if comment else ())
    check(result)
    return Made(unpack_decided(_payload(result)), result.code == Code.DONE)


def _payload(result: Result) -> bytes:
    assert result.outcome is not None, "a decision has an outcome"
    payload = payload_of(result.outcome)
    assert isinstance(payload, bytes), "decisions are small"
    return payload
