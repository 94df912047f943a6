"""What `holdfast top` reads: a node is asked again and again, and another one when it does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from holdfast.cli import client
from holdfast.cli.client import Failed, Unanswered
from holdfast.cluster.origins import is_loopback

#: A node that is alive answers sooner, even while it waits for others that are not.
ANSWER_S: Final = 5.0
#: How often deployments and waiting steps are read, which is more work than the rest.
SLOW_S: Final = 5.0
#: Rows that are counted of steps in doubt, and of approvals; above that, there are "or more".
COUNTED_MAX: Final = 100


class Reading(NamedTuple):
    """One look at the cluster. None: that part could not be read, and `notes` says why."""

    at: str
    at_s: float
    cluster: dict[str, Any]
    statistics: dict[str, Any] | None
    deployments: list[dict[str, Any]] | None
    in_doubt: int | None
    approvals: int | None  # None also where the nodes know of no approvals
    warnings: list[str]
    notes: list[str]


class Readings:
    """One per command. `doing` says what it waits for; another thread may look at it."""

    def __init__(self, url: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._now_s = now_s
        self._names = {url: url}  # Of the nodes known so far, by URL, the one that was asked last first.
        self._slow_at = -SLOW_S
        self._deployments: list[dict[str, Any]] | None = None
        self._in_doubt: int | None = None
        self._approvals: int | None = None
        self.doing = ""

    def read(self) -> Reading:
        """Raises Failed if no node answers that was not asked in vain before, or if a node refuses."""
        notes: list[str] = []
        cluster = self._cluster(notes)
        statistics = self._part("statistics", "/statistics", notes)
        if self._now_s() - self._slow_at >= SLOW_S:
            self._read_slowly(notes)
        warnings = self._warnings()
        self.doing = ""
        at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return Reading(
            at=at,
            at_s=self._now_s(),
            cluster=cluster,
            statistics=statistics,
            deployments=self._deployments,
            in_doubt=self._in_doubt,
            approvals=self._approvals,
            warnings=warnings,
            notes=notes,
        )

    def _cluster(self, notes: list[str]) -> dict[str, Any]:
        """From the node that answered last, or from the next one that answers."""
        urls = list(self._names)
        for place, url in enumerate(urls):
            self._url = url
            try:
                cluster: dict[str, Any] = self._ask("/cluster")
            except Failed as error:
                is_silent = isinstance(error, Unanswered)
                if len(urls) == 1 or not (is_silent or place):
                    raise
                # A token of one node, as in its file admin-token, is worth nothing at the others.
                why = "does not answer" if is_silent else f"refuses: {error.message}"
                then = f", asking {self._names[urls[place + 1]]}" if place + 1 < len(urls) else ""
                notes.append(f"{_node(self._names[url])} {why}{then}")
                if not then:
                    raise Unanswered("; ".join(notes), error.hint) from None
                continue
            self._learn(cluster)
            return cluster
        raise AssertionError("there is at least one address")

    def _learn(self, cluster: dict[str, Any]) -> None:
        """The addresses of all nodes, the one that answered first."""
        found = {self._url: str(cluster["answered_by"])}
        local = _is_local(self._url)
        for node in cluster["nodes"]:
            url = node.get("admin_url")
            # A node that listens on every address of its machine names the loopback address: of another machine than ours.
            usable = url and node["state"] != "removed" and node["name"] != cluster["answered_by"]
            if usable and (local or not _is_local(url)) and _is_as_secret(url, as_=self._url):
                found[url] = node["name"]
        self._names = found
        client.extend_token(found)

    def _read_slowly(self, notes: list[str]) -> None:
        before = len(notes)
        shown = self._part("deployments", "/deployments", notes)
        self._deployments = None if shown is None else shown["deployments"]
        parameters = {"kind": "in-doubt", "limit": COUNTED_MAX}
        waiting = self._part("steps in doubt", "/waiting", notes, parameters)
        self._in_doubt = None if waiting is None else len(waiting["waiting"])
        try:
            shown = self._part("approvals", "/approvals", notes, {"limit": COUNTED_MAX})
            self._approvals = None if shown is None else len(shown["approvals"])
        except Failed:
            self._approvals = None  # These nodes are of a release without them.
        if len(notes) == before:
            self._slow_at = self._now_s()

    def _warnings(self) -> list[str]:
        try:
            answer = client.ask(self._url, "GET", "/health", timeout_s=ANSWER_S)
            shown = answer.json()
        except Failed:
            return []  # The next reading asks another node.
        return [str(shown.get("message", "unhealthy"))] if answer.status == 503 else list(shown.get("warnings", ()))

    def _part(self, name: str, where: str, notes: list[str], parameters: dict[str, Any] | None = None) -> Any:
        """None if it cannot be read now, as while a partition has no leader."""
        try:
            return self._ask(where, parameters)
        except Unanswered as error:
            notes.append(f"no {name}: {error.message}")
            return None

    def _ask(self, where: str, parameters: dict[str, Any] | None = None) -> Any:
        self.doing = f"waiting for {self._names[self._url]}"
        return client.checked(client.ask(self._url, "GET", where, parameters=parameters, timeout_s=ANSWER_S)).json()


def _node(name: str) -> str:
    return name if "://" in name else f"node {name}"


def _is_as_secret(url: str, *, as_: str) -> bool:
    """The token of this command goes to every address that is asked: in clear text only if it did so from the beginning."""
    return urlsplit(url).scheme == "https" or urlsplit(as_).scheme != "https"


def _is_local(url: str) -> bool:
    return is_loopback(urlsplit(url).hostname or "")
