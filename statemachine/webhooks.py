"""The webhooks of a cluster: which addresses are told about which events.

Part of the meta group's state, and pure like all of it. The secret of a webhook is state like any other, because whichever
node leads a partition signs what it sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, NewType

from holdfast.statemachine.effects import Code, Result

HookId = NewType("HookId", bytes)

HOOKS_MAX: Final = 50
HOOK_ID_BYTES: Final = 8

#: Events, as bits of a mask. Numbers never change.
FAILED: Final = 1
PAUSED: Final = 2
COMPLETED: Final = 4
IN_DOUBT: Final = 8
ASKED: Final = 16
REMINDED: Final = 32
EVENTS: Final[Mapping[str, int]] = {
    "failed": FAILED,
    "paused": PAUSED,
    "completed": COMPLETED,
    "in-doubt": IN_DOUBT,
    "approval-requested": ASKED,
    "approval-reminder": REMINDED,
}
EVENT_NAMES: Final = {event: name for name, event in EVENTS.items()}


class CreateWebhook(NamedTuple):
    id: HookId
    url: str
    events: int
    services: list[str]  # Empty: all.
    secret: str
    by: str

    def __repr__(self) -> str:  # Neither a secret nor a URL, which may have one in its path, belongs into a log.
        return f"CreateWebhook({self.id.hex()!r}, events={self.events})"


class DeleteWebhook(NamedTuple):
    id: HookId


class Webhook(NamedTuple):
    id: HookId
    url: str
    events: int
    services: list[str]
    secret: str
    by: str
    created_ms: int

    def __repr__(self) -> str:
        return f"Webhook({self.id.hex()!r}, events={self.events})"


class Webhooks:
    def __init__(self) -> None:
        self.by_id: dict[HookId, Webhook] = {}  # The oldest first.
        #: Grows with each change. A partition knows the hooks of one version, and takes only newer ones.
        self.version = 0

    def create(self, command: CreateWebhook, now_ms: int) -> Result:
        if command.id in self.by_id or len(command.id) != HOOK_ID_BYTES:
            return Result(Code.CONFLICT, f"the id of a webhook has {HOOK_ID_BYTES} bytes and is not taken: try again")
        if len(self.by_id) >= HOOKS_MAX:
            return Result(Code.FULL, f"there are {HOOKS_MAX} webhooks already: delete those that are not needed")
        self.by_id[command.id] = Webhook(*command, created_ms=now_ms)
        self.renew(now_ms)
        return Result()

    def delete(self, command: DeleteWebhook, now_ms: int) -> Result:
        if self.by_id.pop(command.id, None) is None:
            return Result(Code.NOT_FOUND, f"there is no webhook {name_of(command.id)}")
        self.renew(now_ms)
        return Result()

    def renew(self, now_ms: int) -> None:
        """A version that no partition knows: not even one of a backup, which was made at an earlier time."""
        self.version = max(self.version + 1, now_ms)


def name_of(hook: HookId) -> str:
    return f"wh_{hook.hex()}"
