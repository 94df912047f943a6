"""Show and rotate the identity of the cluster over the admin API. Private keys never leave the state."""

from __future__ import annotations

from holdfast.cluster.admin.parameters import AdminRequest, json_answer, read_body
from holdfast.cluster.admin.shapes.access import Identity, IdentityKey, IdentityRotation
from holdfast.cluster.errors import BadRequest
from holdfast.cluster.http.exchange import Answer
from holdfast.cluster.registry.identity import IdentityKeys
from holdfast.cluster.times import show_time
from holdfast.sdk.signatures import format_key


class IdentityAdmin:
    def __init__(self, keys: IdentityKeys) -> None:
        self._keys = keys

    async def on_identity(self, request: AdminRequest) -> Answer:
        return json_answer(200, self._show())

    async def on_rotate_identity(self, request: AdminRequest) -> Answer:
        finish = (await read_body(request, IdentityRotation)).get("finish", False)
        if type(finish) is not bool:
            raise BadRequest('"finish" must be true or false')
        await (self._keys.finish_rotation() if finish else self._keys.begin_rotation())
        return json_answer(200, self._show())

    def _show(self) -> Identity:
        keys: list[IdentityKey] = [
            {"id": key.id, "public_key": format_key(key.public), "created_at": show_time(key.created_ms)}
            for key in self._keys.state.keys
        ]
        return {"keys": keys, "rotating": len(keys) > 1}
