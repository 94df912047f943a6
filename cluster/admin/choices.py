"""The words and limits that requests to the admin API may use: what its table of routes says, and its methods check."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from holdfast.statemachine.survey import APPROVAL, AWAKEABLE, IN_DOUBT, PROMISED, TIMED

PAGE: Final = 100
PAGE_MAX: Final = 1000
BULK: Final = 1000
BULK_MAX: Final = 100_000
STEPS_PAGE: Final = 1000
QUERY_LIMIT: Final = 1000
QUERY_LIMIT_MAX: Final = 10_000
QUERY_TIMEOUT_S: Final = 30.0
QUERY_TIMEOUT_S_MAX: Final = 120.0
OLDEST: Final = "oldest"
ORDERS: Final = ("newest", OLDEST)
LOG_LIMIT: Final = 200
PARTS: Final = ("output", "input")  # of a step that was given a value
WAITING: Final = (APPROVAL, AWAKEABLE, PROMISED, IN_DOUBT, TIMED)
Action: TypeAlias = Literal["cancel", "kill", "pause", "resume", "restart", "purge"]
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)
