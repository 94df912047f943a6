"""The words and limits that requests to the admin API may use: what its table of routes says, and its methods check."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from holdfast.statemachine.survey import APPROVAL, AWAKEABLE, IN_DOUBT, PROMISED, TIMED

PAGE: Final = 100
PAGE_MAX: Final = 1000
BULK: Final = 1000
BULK_MAX: Final = 100_000
#: The lengths of texts and lists in requests.
TOKEN_NAME_MAX: Final = 100
REASON_MAX: Final = 500
URL_MAX: Final = 2048
SERVICES_MAX: Final = 100
STEPS_PAGE: Final = 1000
STEP_MAX: Final = 2**32 - 1
FAILURE_CODE_MAX: Final = 999_999
PARTITION_MAX: Final = 99_999
SEQUENCE_MAX: Final = 10**11 - 1  # of the audit trail
QUERY_LIMIT: Final = 1000
QUERY_LIMIT_MAX: Final = 10_000
QUERY_TIMEOUT_S: Final = 30.0
QUERY_TIMEOUT_S_MAX: Final = 120.0
NEWEST: Final = "newest"
OLDEST: Final = "oldest"
COMPLETED: Final = "completed"
ORDERS: Final = (NEWEST, OLDEST, COMPLETED)
LOG_LIMIT: Final = 200
PARTS: Final = ("output", "input")  # of a step that was given a value
WAITING: Final = (APPROVAL, AWAKEABLE, PROMISED, IN_DOUBT, TIMED)
#: The files of the console that are served, by the end of their name. Others (Python, licences, notes) stay in the folder.
FILES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILE_TYPES: Final = tuple(FILES.values())
Action: TypeAlias = Literal["cancel", "kill", "pause", "resume", "restart", "purge"]
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)
#: The actions that take a parameter; all of them take the others.
TAKEN_BY: Final = {"step": ("restart",), "to": ("resume", "restart")}
