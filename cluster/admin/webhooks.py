"""Webhooks in the admin API: create, list, test and delete them. A secret is shown once, in the answer that created it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

from holdfast.cluster.addresses import find_guarded
from holdfast.cluster.admin.choices import SERVICES_MAX, URL_MAX
from holdfast.cluster.admin.parameters import AdminRequest, json_answer, read_body
from holdfast.cluster.admin.proposals import propose
from holdfast.cluster.admin.shapes import webhooks
from holdfast.cluster.admin.shapes.webhooks import (
    NewWebhook,
    WebhookDeleted,
    Webhooks,
    WebhookTested,
    WebhookWithSecret,
)
from holdfast.cluster.entropy import Entropy
from holdfast.cluster.errors import BadRequest, Conflict, NotFound
from holdfast.cluster.http.exchange import Answer
from holdfast.cluster.leading.courier import Courier, encode_body
from holdfast.cluster.leading.views import show_faring
from holdfast.cluster.leading.webhooks import Faring, Farings
from holdfast.cluster.origins import host_behind_credentials
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.times import show_time
from holdfast.statemachine.meta import MetaCommand
from holdfast.statemachine.webhooks import (
    EVENT_NAMES,
    EVENTS,
    HOOK_ID_BYTES,
    CreateWebhook,
    DeleteWebhook,
    HookId,
    Webhook,
    name_of,
)

SECRET_BYTES: Final = 32
LIST_HINT: Final = "`holdfast webhooks list` shows them (GET /webhooks)"
_ID: Final = re.compile(rf"wh_([0-9a-f]{{{2 * HOOK_ID_BYTES}}})")


class WebhookAdmin:
    def __init__(
        self, registry: Registry, courier: Courier, farings: Farings, *, entropy: Entropy, now_ms: Callable[[], int]
    ) -> None:
        self._registry = registry
        self._courier = courier
        self._farings = farings
        self._entropy = entropy
        self._now_ms = now_ms

    async def on_webhooks(self, request: AdminRequest) -> Answer:
        farings = await self._farings.everywhere()
        shown: Webhooks = {
            "webhooks": [
                {**self._show(hook), **show_faring(farings.get(hook.id) or Faring(hook.id))}
                for hook in self._registry.state.webhooks.by_id.values()
            ]
        }
        return json_answer(200, shown)

    async def on_create_webhook(self, request: AdminRequest) -> Answer:
        given = await read_body(request, NewWebhook)
        url = await _read_url(given.get("url"))
        events = given.get("events")
        if not isinstance(events, list) or not events or not all(isinstance(each, str) for each in events):
            raise BadRequest(f'"events" must be a list of one or more of {", ".join(EVENTS)}')
        unknown = [each for each in events if each not in EVENTS]
        if unknown:
            raise BadRequest(f"there is no event {unknown[0]!r:.60}", f"there are: {', '.join(EVENTS)}")
        services = [] if given.get("services") is None else given["services"]
        if not isinstance(services, list) or len(services) > SERVICES_MAX or not all(map(_is_name, services)):
            raise BadRequest(f'"services" must be a list of at most {SERVICES_MAX} names of services')
        id_ = HookId(self._entropy.bytes(HOOK_ID_BYTES))
        secret = f"whsec_{self._entropy.bytes(SECRET_BYTES).hex()}"
        request.note(id=name_of(id_), host=urlsplit(url).hostname, events=",".join(sorted(set(events))))
        await self._propose(
            CreateWebhook(
                id=id_,
                url=url,
                events=sum(EVENTS[name] for name in set(events)),
                services=sorted(set(services)),
                secret=secret,
                by=request.request.principal.name,
            )
        )
        hook = self._registry.state.webhooks.by_id.get(id_)
        if hook is None:
            raise Conflict("the webhook was deleted by another request in the meantime", LIST_HINT)
        created: WebhookWithSecret = {**self._show(hook), "secret": secret}
        return json_answer(201, created)

    async def on_delete_webhook(self, request: AdminRequest) -> Answer:
        hook = await self._find(request)
        await self._propose(DeleteWebhook(hook.id))
        deleted: WebhookDeleted = {"id": name_of(hook.id), "deleted": True}
        return json_answer(200, deleted)

    async def on_test_webhook(self, request: AdminRequest) -> Answer:
        hook = await self._find(request)
        event = f"evt_test_{self._entropy.bytes(HOOK_ID_BYTES).hex()}"
        body = encode_body({
            "id": event,
            "event": "test",
            "at": show_time(self._now_ms()),
            "cluster": self._courier.cluster,
            "invocation": None,
            "failure": None,
        })  # fmt: skip
        sent = await self._courier.send(hook, event, body)
        tested: WebhookTested = {
            "id": name_of(hook.id),
            "taken": not sent.error,
            "status": sent.status or None,
            "error": sent.error or None,
        }
        return json_answer(200, tested)

    async def _find(self, request: AdminRequest) -> Webhook:
        text = request.path["id"]
        match = _ID.fullmatch(text)

        def look() -> Webhook:
            found = (
                self._registry.state.webhooks.by_id.get(HookId(bytes.fromhex(match[1]))) if match is not None else None
            )
            if found is None:
                raise NotFound(f"there is no webhook {text!r:.60}", LIST_HINT)
            return found

        return await self._registry.certainly(look) if match is not None else look()

    async def _propose(self, command: MetaCommand) -> None:
        await propose(self._registry, command, what="webhooks", hint=LIST_HINT)

    @staticmethod
    def _show(hook: Webhook) -> webhooks.Webhook:
        return {
            "id": name_of(hook.id),
            "url": hook.url,
            "events": [name for event, name in EVENT_NAMES.items() if hook.events & event],
            "services": list(hook.services),
            "created_at": show_time(hook.created_ms),
            "created_by": hook.by,
        }


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 256 and value.isprintable()


async def _read_url(value: Any) -> str:
    """Raises BadRequest. The check is repeated for the address of each connection."""
    if not isinstance(value, str) or not 0 < len(value) <= URL_MAX or not value.isascii() or not value.isprintable():
        raise BadRequest(f'"url" must be a URL of at most {URL_MAX} printable ASCII characters')
    behind = host_behind_credentials(value)
    if behind is not None:
        raise BadRequest(
            f"the URL at {behind:.253} has a user or a password in it",
            "leave them out: the receiver can verify the signature of each request instead (docs/webhooks.md)",
        )
    try:
        parts = urlsplit(value)
        host, port = parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        host, port, parts = None, 0, urlsplit("")
    if parts.scheme not in ("http", "https") or not host or not port or " " in value or parts.fragment:
        raise BadRequest('"url" must be a URL of a receiver, as in https://alerts.example/holdfast')
    guarded = await find_guarded(host, port)
    if guarded is not None:
        raise BadRequest(guarded, "link-local addresses and metadata services are refused (docs/webhooks.md)")
    return value
