"""Show and rotate the identity of the cluster over the admin API. Private keys never leave the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.cluster.admin.views import show_time
from holdfast.cluster.errors import BadRequest
from holdfast.cluster.registry.identity import IdentityKeys
from holdfast.sdk.signatures import format_key


class IdentityAdmin:
    def __init__(self, keys: IdentityKeys) -> None:
        self._keys = keys

    def show(self) -> dict[str, Any]:
        keys = [
            {"id": key.id, "public_key": format_key(key.public), "created_at": show_time(key.created_ms)}
            for key in self._keys.state.keys
        ]
        return {"keys": keys, "rotating": len(keys) > 1}

    async def rotate(self, given: Mapping[str, Any]) -> dict[str, Any]:
        finish = given.get("finish", False)
        if type(finish) is not bool:
            raise BadRequest('"finish" must be true or false')
        await (self._keys.finish_rotation() if finish else self._keys.begin_rotation())
        return self.show()
