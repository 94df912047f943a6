"""What the protocol of Holdfast keeps about an attempt while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.cluster.handlers.protocols.native.deferred import PendingAck


class Session:
    """One per attempt, from its first frame to its last (`Attempt.session`)."""

    __slots__ = ("pending_ack", "unsent", "version")

    def __init__(self, version: int) -> None:
        self.version = version  # Of the protocol, for all frames of the attempt.
        self.pending_ack: PendingAck | None = None  # Not sent yet, so later ones may join it.
        self.unsent = 0  # Frames with large values that are not sent yet: the attempt cannot answer them.
