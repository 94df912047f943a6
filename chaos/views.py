"""What the nodes of a chaos run last reported about their cluster: GET /cluster of each, looked at several times a second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Views:
    """Node -> its last report. A node that does not answer has none."""

    def __init__(self) -> None:
        self.by_node: dict[str, dict[str, Any]] = {}

    def leaders(self) -> dict[int, str]:
        """Partition -> its leader in the newest term that any node reported."""
        newest: dict[int, tuple[int, str]] = {}
        for view in list(self.by_node.values()):
            for each in view["partitions"]:
                if each["leader"] is not None:
                    claim = (each.get("term", 0), each["leader"])  # A node without a replica knows it only by hearsay.
                    newest[each["partition"]] = max(newest.get(each["partition"], claim), claim)
        return {number: leader for number, (_, leader) in newest.items()}

    def led_by(self, name: str) -> list[int]:
        return sorted(number for number, leader in self.leaders().items() if leader == name)

    def meta_leader(self) -> str | None:
        claims = [(view["meta"]["term"], view["meta"]["leader"]) for view in self.by_node.values()]
        known = [claim for claim in claims if claim[1] is not None]
        return max(known)[1] if known else None

    def applied(self, name: str) -> dict[int, int]:
        """Partition -> the applied index that a node last reported."""
        view = self.by_node.get(name)
        return {it["partition"]: it["applied"] for it in view["partitions"] if it["here"]} if view is not None else {}

    def log_begins(self, name: str) -> dict[int, int]:
        """Partition -> the index up to which a node's log was trimmed."""
        view = self.by_node.get(name)
        here = [it for it in view["partitions"] if it["here"]] if view is not None else []
        return {it["partition"]: it["snapshot"]["log_begins_behind"] for it in here}

    def doing(self, name: str) -> set[str]:
        """What a node last reported to do with snapshots."""
        view = self.by_node.get(name)
        return {it["snapshot"]["doing"] or "" for it in view["partitions"] if it["here"]} if view is not None else set()

    def store_errors(self) -> dict[str, str]:
        """Node -> the error of the snapshot store that it last reported."""
        return {name: error for name, view in self.by_node.items() if (error := view["snapshots"]["error"]) is not None}

    def members(self) -> dict[int, list[str]]:
        """Partition -> the nodes with a replica, by the newest epoch that any node reported."""
        newest: dict[int, tuple[int, list[str]]] = {}
        for view in list(self.by_node.values()):
            for each in view["partitions"]:
                claim = (each["epoch"], each["members"])
                newest[each["partition"]] = max(newest.get(each["partition"], claim), claim)
        return {number: members for number, (_, members) in newest.items()}

    def behind(self, names: Sequence[str]) -> list[str]:
        """Replicas that have applied less than another replica of their partition, by the last reports."""
        applied = {name: self.applied(name) for name in names}
        sentences = []
        for number, members in self.members().items():
            indexes = {name: applied[name].get(number) for name in members if name in applied}
            most = max((index for index in indexes.values() if index is not None), default=0)
            sentences += [
                f"partition {number} on {name} is at entry {index}, and another replica at {most}"
                for name, index in indexes.items()
                if index != most
            ]
        return sentences
