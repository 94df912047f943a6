"""Deployments, their services and handlers."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict

from holdfast.cluster.admin.shapes.invocations import ServiceFigures
from holdfast.cluster.handlers.views import DeploymentHealth
from holdfast.cluster.registry.machine import MODES
from holdfast.cluster.registry.offer import MODES_BY_KIND
from holdfast.cluster.schemas import JsonSchema, Keywords, Time, one_of

_KIND: Final = one_of(MODES_BY_KIND)


class Registration(TypedDict):
    uri: Annotated[str, "where nodes reach the endpoint: http:// or https://", Keywords(minLength=1)]
    force: NotRequired[Annotated[bool, "even if callers break or a manifest changes in place"]]
    metadata: NotRequired[Annotated[dict[str, str] | None, "shown with the deployment, for people"]]
    dry_run: NotRequired[Annotated[bool, "only say what would change, and change nothing"]]


class HandlerBody(TypedDict):
    """The input or the output of a handler."""

    content_type: str
    schema: JsonSchema


class Handler(TypedDict):
    name: str
    mode: Annotated[str, one_of(MODES)]
    doc: str | None
    input: HandlerBody
    output: HandlerBody
    options: Annotated[dict[str, Any], "those that its manifest sets"]


class OfferedServiceRow(TypedDict):
    """A service as one deployment offers it, in a list."""

    name: str
    kind: Annotated[str, _KIND]
    revision: int
    current: Annotated[bool, "new invocations of the service go to this deployment"]


class OfferedService(OfferedServiceRow):
    """A service as one deployment offers it."""

    handlers: list[Handler]


class Protocol(TypedDict):
    """The handler protocol, and the versions that a deployment speaks."""

    name: str
    min: int
    max: int


class _AnyDeployment(TypedDict):
    id: str
    uri: str
    in_flight: Annotated[int, "active invocations that are pinned to it"]
    health: DeploymentHealth
    modes: Annotated[list[str], "how it can be reached: stream, request-response"]
    protocol: Protocol
    sdk: Annotated[str, "name and version"]
    metadata: Annotated[dict[str, str], "as it was registered with"]
    created_at: Time | None


class DeploymentRow(_AnyDeployment):
    """A deployment in a list."""

    services: list[OfferedServiceRow]


class Deployment(_AnyDeployment):
    """A deployment with its handlers."""

    services: list[OfferedService]


class Deployments(TypedDict):
    deployments: list[DeploymentRow]


class DeploymentRemoved(TypedDict):
    id: str
    status: Literal["Removed"]


class ServiceRevision(TypedDict):
    revision: int
    deployment: str
    uri: str


class _AnyService(TypedDict):
    name: str
    kind: Annotated[str, _KIND]
    doc: str | None
    revision: int
    deployment: Annotated[str, "the one that receives new invocations"]
    uri: Annotated[str, "of that deployment"]
    private: Annotated[bool, "only other handlers may call it"]
    invocations: Annotated[dict[str, int], "how many there are, by status; empty: there was never one"]
    revisions: list[ServiceRevision]


class ServiceRow(_AnyService):
    """A service in a list."""

    handlers: Annotated[list[str], "their names"]


class Services(TypedDict):
    services: list[ServiceRow]


class Service(_AnyService):
    """A service with its handlers."""

    handlers: list[Handler]
    options: Annotated[dict[str, Any], "those that its manifest sets"]
    totals: ServiceFigures
