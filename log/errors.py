"""The errors of the log, by kind.

A `ProposalError` is a circumstance. It reaches the caller that proposed a command and says whether the command can still take
effect: `definite` means that it never will. A `StorageError` concerns the node's own disk, and most of them stop the node. An
`EngineFault` is a broken invariant: the node stops, because continuing could lose acknowledged entries.
"""

from __future__ import annotations

from pathlib import Path


class ProposalError(Exception):
    """A command was not acknowledged. `definite`: the command has not taken effect and never will."""

    definite: bool = True
    retryable: bool = True


class NotLeader(ProposalError):
    """This node does not lead the group; `leader` is the node that does, if known."""

    def __init__(self, leader: str | None) -> None:
        super().__init__(
            f"not the leader; try {leader}" if leader else "the group has no leader at the moment; try again"
        )
        self.leader = leader


class Overloaded(ProposalError):
    """A bound was reached; try again later."""


class NoRoom(ProposalError):
    """A bound on stored data was reached. Proposals succeed again when there is room."""


class NoRoomHere(NoRoom):
    """The disk of this node, or the log's share of it, is full. Another node may have room and could lead."""


class TooLarge(ProposalError):
    """The command is larger than an entry may be."""

    retryable = False


class NotHosted(ProposalError):
    """This node does not host the group, or no longer does."""


class Stopped(ProposalError):
    """This node has stopped or is about to stop; the command was not proposed."""


class BadChange(ProposalError):
    """The requested change of members is not possible."""

    retryable = False


class Superseded(ProposalError):
    """An entry of another leader took the command's place in the log."""


class OutcomeUnknown(ProposalError):
    """The leadership ended before the command was committed. The command may or may not take effect."""

    definite = False


class EngineFault(Exception):
    """An invariant of the replicated log is broken. The node must stop."""


class EngineNotAudited(Exception):
    """The installed pysyncobj is not the one whose source was audited."""


# Storage


class StorageError(Exception):
    """The node's own disk or directory cannot be used. `retryable` says whether trying again can help."""

    retryable: bool = False


class Corrupt(StorageError):
    """Bytes on the disk differ from the bytes that were written. Acknowledged entries are never repaired away."""

    def __init__(self, path: Path | str, detail: str, group: int | str | None = None, index: int | None = None) -> None:
        place = "".join(
            f", {name} {value}" for name, value in (("group", group), ("index", index)) if value is not None
        )
        super().__init__(
            f"{path}{place}: {detail}. Restore this node from its peers: copy the directory if you want to "
            "investigate the cause, then remove it and add the node again under a new name"
        )
        self.path = path
        self.detail = detail
        self.group = group
        self.index = index


class DirectoryInUse(StorageError):
    """Another process holds the lock on the data directory."""

    def __init__(self, path: Path, pid: int | None) -> None:
        holder = "another process" if pid is None else f"process {pid}"
        super().__init__(
            f"{path} is in use by {holder}. Stop that process first, or give this node a directory of its own"
        )
        self.path = path
        self.pid = pid


class WrongDirectory(StorageError):
    """The data directory belongs to another node or cluster, or is not a Holdfast data directory."""

    def __init__(self, path: Path, detail: str, advice: str) -> None:
        super().__init__(f"{path}: {detail}. {advice}")
        self.path = path
        self.detail = detail


class WrongVersion(StorageError):
    """The data directory was written in a format that this release does not understand."""

    def __init__(self, path: Path, *, found: object, understood: int) -> None:
        super().__init__(
            f"{path} is written in format {found}, this release understands format {understood}. Start the release "
            "that wrote it, or remove the directory and add the node again under a new name"
        )
        self.path = path
        self.found = found
        self.understood = understood


class NoSpace(StorageError):
    """The disk is full. Staged writes are kept, and the next commit with enough room writes them."""

    retryable = True

    def __init__(self, path: Path, detail: str) -> None:
        super().__init__(f"{path}: {detail}. Free space on this disk; the node retries the write")
        self.path = path
        self.detail = detail


class DiskFailed(StorageError):
    """A write or sync failed. The contents of the disk are unknown, so the process must restart."""

    def __init__(self, path: Path, detail: str) -> None:
        super().__init__(
            f"{path}: {detail}. Check the disk (kernel log, file system, permissions), then start the node again"
        )
        self.path = path
        self.detail = detail
