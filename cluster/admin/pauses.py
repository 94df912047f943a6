"""Pauses in the admin API: what leaders may not start. Invocations that are paused one by one are another matter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from holdfast.cluster.admin.choices import REASON_MAX
from holdfast.cluster.admin.parameters import AdminRequest, json_answer, read_body
from holdfast.cluster.admin.proposals import propose
from holdfast.cluster.admin.shapes.cluster import BegunPause, NewPause, Pauses, PauseScope, Resumed
from holdfast.cluster.admin.views import show_pause
from holdfast.cluster.errors import BadRequest, Conflict
from holdfast.cluster.http.exchange import Answer
from holdfast.cluster.registry.registry import Registry
from holdfast.cluster.registry.spread import Spread
from holdfast.statemachine.effects import Code, Result
from holdfast.statemachine.meta import MetaCommand
from holdfast.statemachine.pauses import Halt, Release, Scope, name_scope

NAME_BYTES_MAX: Final = 4096
LIST_HINT: Final = "`holdfast pause --list` shows what is paused (GET /pauses)"


class PauseAdmin:
    def __init__(self, registry: Registry, spread: Spread) -> None:
        self._registry = registry
        self._spread = spread

    async def on_pauses(self, request: AdminRequest) -> Answer:
        return json_answer(200, self._show())

    async def on_begin_pause(self, request: AdminRequest) -> Answer:
        given = await read_body(request, NewPause)
        scope = read_scope(given)
        reason, stop = given.get("reason"), given.get("stop", False)
        if not isinstance(reason, str) or not 0 < len(reason.strip()) <= REASON_MAX or not reason.isprintable():
            raise BadRequest(
                f'"reason" must be a text of 1 to {REASON_MAX} printable characters',
                "it tells others why nothing starts",
            )
        if type(stop) is not bool:
            raise BadRequest('"stop" must be true or false')
        await self._registry.certainly(lambda: self._check_exists(scope))
        request.note(scope=name_scope(scope), reason=reason.strip(), stop=stop)
        by = request.request.principal.name
        result = await self._propose(Halt(*scope, by=by, reason=reason.strip(), recall=stop))
        standing = self._registry.state.pauses.by_scope.get(scope)
        if standing is None:
            raise Conflict(f"{name_scope(scope)} was resumed by another request in the meantime", LIST_HINT)
        shown: BegunPause = {**show_pause(standing), "not_confirmed": await self._spread.missing()}
        return json_answer(201 if result.code == Code.DONE else 200, shown)

    async def on_end_pause(self, request: AdminRequest) -> Answer:
        scope = read_scope(await read_body(request, PauseScope))
        request.note(scope=name_scope(scope))
        await self._propose(Release(*scope))
        resumed: Resumed = {"resumed": name_scope(scope), "still_paused": self._show()}
        return json_answer(200, resumed)

    async def _propose(self, command: MetaCommand) -> Result:
        return await propose(self._registry, command, what="pauses", hint=LIST_HINT)

    def _check_exists(self, scope: Scope) -> None:
        """A misspelt name would pause nothing. Running invocations may be pinned to a service that is no longer current."""
        service, key = scope
        if not service:
            return
        found = self._registry.service(service)
        offered = [found[0]] if found is not None else []
        offered += [
            each
            for deployment in self._registry.state.deployments.values()
            if (each := deployment.service(service)) is not None
        ]
        if not offered:
            raise self._registry.unknown(service, "")
        if key is not None and all(each.kind == "service" for each in offered):
            raise BadRequest(f"the handlers of {service} have no keys", "pause the whole service: leave out the key")

    def _show(self) -> Pauses:
        standing = self._registry.state.pauses.by_scope.values()
        everything = next((show_pause(each) for each in standing if not each.scope[0]), None)
        return {
            "all": everything,
            "services": [show_pause(each) for each in standing if each.scope[0] and each.scope[1] is None],
            "keys": [show_pause(each) for each in standing if each.scope[1] is not None],
        }


def read_scope(given: Mapping[str, Any]) -> Scope:
    service, key = given.get("service"), given.get("key")
    for name, value in (("service", service), ("key", key)):
        if value is not None and not (isinstance(value, str) and _is_name(value)):
            raise BadRequest(f'"{name}" must be a text of at most {NAME_BYTES_MAX} bytes')
    if service == "":
        raise BadRequest('"service" must not be empty', "leave it out for everything")
    if key is not None and service is None:
        raise BadRequest('"key" needs a "service": keys belong to services')
    return service or "", key


def _is_name(text: str) -> bool:
    try:
        return len(text.encode()) <= NAME_BYTES_MAX
    except UnicodeEncodeError:
        return False
