"""Virtual objects and workflows: their keys, state, queues and promises."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict

from holdfast.cluster.admin.shapes.invocations import InvocationRow, Outcome, Shown
from holdfast.cluster.schemas import Time


class State(TypedDict):
    """The state of one key."""

    service: str
    key: str
    held_by: Annotated[str | None, "the invocation that runs with the key"]
    waiting: Annotated[int, "how many invocations wait for the key"]
    state: Annotated[dict[str, Shown], "by name"]
    complete: Annotated[bool, "false: the state is too large, and only its beginning is here"]


class StateEdit(TypedDict):
    values: NotRequired[Annotated[dict[str, Any], 'by name: any JSON value, or {"base64": "..."} for bytes']]
    remove: NotRequired[Annotated[list[str], "names of values"]]
    replace: NotRequired[Annotated[bool, "remove all names that are not in `values`"]]
    expect: NotRequired[
        Annotated[
            dict[str, Any] | None,
            "by name: the value that must still be there, or null for none; otherwise nothing changes",
        ]
    ]


class Key(TypedDict):
    """A key of a virtual object or workflow that has a holder, state or promises."""

    key: str
    held_by: Annotated[str | None, "the invocation that runs with the key"]
    waiting: Annotated[int, "how many invocations wait for the key"]
    values: Annotated[int, "how many names its state has"]
    bytes: Annotated[int, "of its state"]
    promises: int


class KeyPage(TypedDict):
    keys: list[Key]
    cursor: Annotated[str | None, "send it to get the next page; null: this is the last"]


class Waiting(TypedDict):
    """An invocation that waits for its key."""

    id: str
    handler: str
    created_at: Time | None


class Queue(TypedDict):
    holder: Annotated[InvocationRow | None, "the invocation that runs with the key"]
    waiting: Annotated[list[Waiting], "in the order in which they will run"]
    more: Annotated[bool, "others are behind them"]


class Promise(TypedDict):
    name: str
    completed: bool
    outcome: Outcome | None


class Promises(TypedDict):
    promises: list[Promise]
    more: Annotated[bool, "there are others"]
