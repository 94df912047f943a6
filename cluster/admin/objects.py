"""Virtual objects and workflows in the admin API: their keys, and the state, the queue and the promises of a key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.cluster.admin.choices import PAGE, PAGE_MAX
from holdfast.cluster.admin.parameters import AdminRequest, Parameters, json_answer, read_body, read_size
from holdfast.cluster.admin.shapes.objects import KeyPage, Promises, StateEdit
from holdfast.cluster.admin.views import read_payload, show_keyed, show_object, show_payload, show_promise, show_queue
from holdfast.cluster.errors import BadRequest, Conflict, TooLarge, check
from holdfast.cluster.http.exchange import Answer
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.routing.reader import Reader
from holdfast.cluster.routing.router import Router
from holdfast.cluster.routing.surveys import Surveys
from holdfast.sdk.ids import partition_key
from holdfast.sdk.journal import KEY_BYTES_MAX, NAME_BYTES_MAX
from holdfast.statemachine import refs
from holdfast.statemachine.commands import Payload, SetState
from holdfast.statemachine.effects import Code
from holdfast.statemachine.values import fingerprint


class ObjectAdmin:
    def __init__(self, registry: Registry, router: Router, reader: Reader, surveys: Surveys) -> None:
        self._surveys = surveys
        self._registry = registry
        self._router = router
        self._reader = reader

    async def _check_keyed(self, name: str) -> None:
        found = await self._registry.certainly(lambda: self._registry.get_service(name))
        if found[0].kind == "service":
            raise BadRequest(f"{name} is a service without keys: it has no state")

    async def _keyed(self, request: AdminRequest) -> tuple[str, str]:
        name, key = request.path["name"], request.path["key"]
        await self._check_keyed(name)
        if not 0 < read_size(key) <= KEY_BYTES_MAX:
            raise BadRequest(f"a key must have 1 to {KEY_BYTES_MAX} bytes of UTF-8")
        return name, key

    async def on_state(self, request: AdminRequest) -> Answer:
        name, key = await self._keyed(request)
        return json_answer(200, show_keyed(name, key, await self._reader.keyed(name, key)))

    async def on_keys(self, request: AdminRequest) -> Answer:
        parameters = Parameters(request, "prefix", "limit", "cursor")
        name = request.path["name"]
        await self._check_keyed(name)
        found = await self._surveys.keys(
            name,
            parameters.text("prefix") or "",
            parameters.text("cursor"),
            parameters.number("limit", PAGE, 1, PAGE_MAX),
        )
        shown: KeyPage = {"keys": [show_object(record) for record in found.records], "cursor": found.cursor}
        return json_answer(200, shown)

    async def on_queue(self, request: AdminRequest) -> Answer:
        limit = Parameters(request, "limit").number("limit", PAGE, 1, PAGE_MAX)
        found = await self._surveys.queue(*await self._keyed(request), limit)
        return json_answer(200, show_queue(found))

    async def on_promises(self, request: AdminRequest) -> Answer:
        Parameters(request)
        rows, more = await self._surveys.promises(*await self._keyed(request))
        shown: Promises = {"promises": [show_promise(*row) for row in rows], "more": more}
        return json_answer(200, shown)

    async def on_set_state(self, request: AdminRequest) -> Answer:
        name, key = await self._keyed(request)
        given = await read_body(request, StateEdit, payloads=True)
        values, remove, replace = given.get("values", {}), given.get("remove", []), given.get("replace", False)
        expect = given.get("expect")
        if not isinstance(values, dict) or type(replace) is not bool:
            raise BadRequest('"values" must be an object, and "replace" true or false')
        if not isinstance(remove, list) or not all(isinstance(each, str) for each in remove):
            raise BadRequest('"remove" must be a list of names')
        if expect is not None and not isinstance(expect, dict):
            raise BadRequest('"expect" must be an object: the values that you have seen, by name; null for none')
        if not (values or remove or replace):
            raise BadRequest("the request changes nothing", 'send JSON as in {"values": {"count": 3}}')
        for each in (*values, *remove, *(expect or ())):
            if not 0 < read_size(each) <= NAME_BYTES_MAX:
                raise BadRequest(f"a name of state must have 1 to {NAME_BYTES_MAX} bytes of UTF-8")
        changes: dict[str, bytes | None] = dict.fromkeys(remove)
        changes.update({each: read_payload(value) for each, value in values.items()})
        marks = await self._seen(name, key, expect) if expect is not None else None
        edit = SetState(name, key, changes, replace, expect=marks)
        result = await self._router.submit(partition_key(name, key), edit)
        if result.code == Code.CONFLICT and result.outcome:
            raise _changed(result.outcome)
        check(result)
        return json_answer(200, show_keyed(name, key, await self._reader.keyed(name, key)))

    async def _seen(self, service: str, key: str, expect: Mapping[str, Any]) -> dict[str, bytes | None]:
        """The fingerprints of the values that the client has seen, as JSON, in whatever way they are written. The command
        compares them again, because a handler may write in between."""
        if self._registry.state.level < 2:
            raise Conflict('"expect" needs a release that some nodes do not run yet', "finish the upgrade of all nodes")
        keyed = await self._reader.keyed(service, key)
        if not keyed.complete:
            raise TooLarge('the state of this key is too large for "expect"', "edit it without")
        found = {each: keyed.state.get(each) for each in expect}
        differing = [each for each, payload in found.items() if not _is_shown_as(payload, expect[each])]
        if differing:
            raise _changed(differing)
        return {each: None if payload is None else fingerprint(payload) for each, payload in found.items()}


def _is_shown_as(payload: Payload | None, value: Any) -> bool:
    shown = None if payload is None else show_payload(payload, refs.size_of(payload))
    return json.dumps(shown, sort_keys=True) == json.dumps(value, sort_keys=True)


def _changed(names: Sequence[str]) -> Conflict:
    return Conflict(
        f"the state has changed: {', '.join(names):.500}", "read it again, and repeat the edit on that", tuple(names)
    )
