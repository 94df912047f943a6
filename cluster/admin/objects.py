"""Virtual objects and workflows in the admin API: the state of a key."""

from __future__ import annotations

from holdfast.cluster.admin.parameters import AdminRequest, json_answer, read_body, read_size
from holdfast.cluster.admin.views import read_payload, show_keyed
from holdfast.cluster.errors import BadRequest, check
from holdfast.cluster.http.exchange import Answer
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.routing.reader import Reader
from holdfast.cluster.routing.router import Router
from holdfast.sdk.ids import partition_key
from holdfast.sdk.journal import KEY_BYTES_MAX, NAME_BYTES_MAX
from holdfast.statemachine.commands import SetState


class ObjectAdmin:
    def __init__(self, registry: Registry, router: Router, reader: Reader) -> None:
        self._registry = registry
        self._router = router
        self._reader = reader

    async def _keyed(self, request: AdminRequest) -> tuple[str, str]:
        name, key = request.path["name"], request.path["key"]
        found = await self._registry.certainly(lambda: self._registry.get_service(name))
        if found[0].kind == "service":
            raise BadRequest(f"{name} is a service without keys: it has no state")
        if not 0 < read_size(key) <= KEY_BYTES_MAX:
            raise BadRequest(f"a key must have 1 to {KEY_BYTES_MAX} bytes of UTF-8")
        return name, key

    async def on_state(self, request: AdminRequest) -> Answer:
        name, key = await self._keyed(request)
        return json_answer(200, show_keyed(name, key, await self._reader.keyed(name, key)))

    async def on_set_state(self, request: AdminRequest) -> Answer:
        name, key = await self._keyed(request)
        given = await read_body(request, {"values", "remove", "replace"}, payloads=True)
        values, remove, replace = given.get("values", {}), given.get("remove", []), given.get("replace", False)
        if not isinstance(values, dict) or type(replace) is not bool:
            raise BadRequest('"values" must be an object, and "replace" true or false')
        if not isinstance(remove, list) or not all(isinstance(each, str) for each in remove):
            raise BadRequest('"remove" must be a list of names')
        if not (values or remove or replace):
            raise BadRequest("the request changes nothing", 'send JSON as in {"values": {"count": 3}}')
        for each in (*values, *remove):
            if not 0 < read_size(each) <= NAME_BYTES_MAX:
                raise BadRequest(f"a name of state must have 1 to {NAME_BYTES_MAX} bytes of UTF-8")
        changes: dict[str, bytes | None] = dict.fromkeys(remove)
        changes.update({each: read_payload(value) for each, value in values.items()})
        check(await self._router.submit(partition_key(name, key), SetState(name, key, changes, replace)))
        return json_answer(200, show_keyed(name, key, await self._reader.keyed(name, key)))
