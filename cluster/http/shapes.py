"""The shapes of answers that both doors give."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict


class Health(TypedDict):
    status: Literal["ok"]
    warnings: NotRequired[Annotated[list[str], "what needs an operator, although the node can serve requests"]]
