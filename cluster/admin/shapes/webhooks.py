"""Webhooks, and events of streams."""

from __future__ import annotations

from typing import Annotated, Final, Literal, NotRequired, TypedDict

from holdfast.cluster.admin.choices import SERVICES_MAX, URL_MAX
from holdfast.cluster.leading.views import Deliveries
from holdfast.cluster.schemas import Keywords, Time, one_of
from holdfast.statemachine.webhooks import EVENTS as EVENTS_OF_WEBHOOKS

_EVENT: Final = one_of(EVENTS_OF_WEBHOOKS)


class NewWebhook(TypedDict):
    url: Annotated[str, "http or https, without user and password", Keywords(minLength=1, maxLength=URL_MAX)]
    events: Annotated[list[Annotated[str, _EVENT]], Keywords(minItems=1)]
    services: NotRequired[
        Annotated[list[str] | None, "only their invocations; all, if it is not given", Keywords(maxItems=SERVICES_MAX)]
    ]


class Webhook(TypedDict):
    id: str
    url: str
    events: list[Annotated[str, _EVENT]]
    services: Annotated[list[str], "only their invocations; empty: all"]
    created_at: Time | None
    created_by: str


class WebhookWithSecret(Webhook):
    """A webhook with its secret, which is shown this once."""

    secret: Annotated[str, "signs each request"]


class WebhookRow(Webhook, Deliveries):
    """A webhook and its deliveries."""


class Webhooks(TypedDict):
    webhooks: list[WebhookRow]


class WebhookDeleted(TypedDict):
    id: str
    deleted: Literal[True]


class WebhookTested(TypedDict):
    id: str
    taken: Annotated[bool, "the receiver accepted the event"]
    status: Annotated[int | None, "of the receiver's answer; null: there was none"]
    error: str | None


# -- the stream of events


class Hello(TypedDict):
    """The first event of each stream."""

    node: str
    resumed: Annotated[
        bool, "false: events may be missing since those that the client has seen, so read everything anew"
    ]


class Notice(TypedDict):
    """Something changed: read it anew."""

    reason: NotRequired[str]
