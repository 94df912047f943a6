"""Deployments and services in the admin API."""

from __future__ import annotations

import json
import logging
from typing import Final

from holdfast.cluster.admin.healths import Healths
from holdfast.cluster.admin.parameters import AdminRequest, Parameters, json_answer, read_body
from holdfast.cluster.admin.shapes.deployments import Deployment, DeploymentRemoved, Deployments, Registration, Services
from holdfast.cluster.admin.views import (
    show_deployment,
    show_deployment_row,
    show_service,
    show_service_row,
)
from holdfast.cluster.errors import BadRequest, EndpointFailed
from holdfast.cluster.http.exchange import Answer
from holdfast.cluster.registry.registry import METADATA_BYTES_MAX, Registry, normalize_uri
from holdfast.cluster.registry.views import show_preview
from holdfast.cluster.routing.reader import Reader
from holdfast.sdk.ids import DeploymentId
from holdfast.statemachine.queries import ServiceStatistics

NEVER_INVOKED: Final = ServiceStatistics({}, *[0] * (len(ServiceStatistics._fields) - 1))

logger = logging.getLogger(__name__)


class DeploymentAdmin:
    def __init__(self, registry: Registry, reader: Reader, healths: Healths) -> None:
        self._registry = registry
        self._reader = reader
        self._healths = healths

    async def on_register(self, request: AdminRequest) -> Answer:
        given = await read_body(request, Registration)
        uri, force, metadata = given.get("uri"), given.get("force", False), given.get("metadata")
        dry_run = given.get("dry_run", False)
        if not isinstance(uri, str):
            raise BadRequest('"uri" is missing', 'send JSON as in {"uri": "http://127.0.0.1:9080"}')
        if type(force) is not bool:
            raise BadRequest('"force" must be true or false')
        if type(dry_run) is not bool:
            raise BadRequest('"dry_run" must be true or false')
        metadata = {} if metadata is None else metadata
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise BadRequest('"metadata" must be an object of texts')
        if len(json.dumps(metadata)) > METADATA_BYTES_MAX:
            raise BadRequest(f'"metadata" is larger than {METADATA_BYTES_MAX} bytes')
        uri = normalize_uri(uri)
        request.note(uri=uri, force=force)
        try:
            if dry_run:
                request.note(dry_run=True)
                return json_answer(200, show_preview(await self._registry.preview(uri)))
            registered = await self._registry.register(uri, force=force, metadata=metadata)
        except EndpointFailed as error:
            shown = error.shown_to(request.request.principal.roles)
            if shown is error:
                logger.warning("discovery: %s", error.detail or error.message)
            raise shown from None
        request.note(id=registered.deployment.id)
        return json_answer(
            201 if registered.created else 200, await self._show_deployment(request, registered.deployment.id)
        )

    async def _show_deployment(self, request: AdminRequest, id_: DeploymentId) -> Deployment:
        deployment = await self._registry.certainly(lambda: self._registry.get_deployment(id_))
        in_flight = await self._reader.in_flight(id_)
        healths = await self._healths.of(request, id_)
        return show_deployment(deployment, self._registry.state, in_flight, healths)

    async def on_deployments(self, request: AdminRequest) -> Answer:
        in_flight = (await self._reader.statistics()).deployments
        state, healths = self._registry.state, await self._healths.of(request, None)
        shown: Deployments = {
            "deployments": [
                show_deployment_row(
                    deployment,
                    state,
                    in_flight.get(deployment.id, 0),
                    [each for each in healths if each.deployment == deployment.id],
                )
                for deployment in sorted(state.deployments.values(), key=lambda each: (-each.created_ms, each.id))
            ]
        }
        return json_answer(200, shown)

    async def on_deployment(self, request: AdminRequest) -> Answer:
        return json_answer(200, await self._show_deployment(request, DeploymentId(request.path["id"])))

    async def on_remove(self, request: AdminRequest) -> Answer:
        parameters = Parameters(request, "force")
        id_ = DeploymentId(request.path["id"])
        await self._registry.remove(id_, force=parameters.truth("force"), in_flight=self._reader.in_flight)
        removed: DeploymentRemoved = {"id": id_, "status": "Removed"}
        return json_answer(200, removed)

    async def on_services(self, request: AdminRequest) -> Answer:
        figures = (await self._reader.statistics()).services
        state = self._registry.state
        rows = []
        for name in sorted(state.offers):
            found = self._registry.service(name)
            assert found is not None, "GET /services lists the services"
            counts = figures[name].by_status if name in figures else {}
            rows.append(show_service_row(*found, state, counts))
        shown: Services = {"services": rows}
        return json_answer(200, shown)

    async def on_service(self, request: AdminRequest) -> Answer:
        name = request.path["name"]
        found = await self._registry.certainly(lambda: self._registry.get_service(name))
        figures = (await self._reader.statistics()).services.get(name, NEVER_INVOKED)
        return json_answer(200, show_service(*found, self._registry.state, figures))
