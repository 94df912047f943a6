"""Errors of snapshots, stores and transfers.

Every error says what to do. `retryable` means that the same call may succeed later without intervention; the cluster
keeps working in the meantime. Errors of boto3, LMDB and the operating system are translated once, where they occur.
"""

from __future__ import annotations

from pathlib import Path


class SnapshotError(Exception):
    """Base class of the errors below."""

    retryable: bool = False


class Cancelled(SnapshotError):
    """The caller cancelled the work. At most a partial file remains, from which a later fetch resumes."""

    retryable = True

    def __init__(self) -> None:
        super().__init__("the work was cancelled")


class NoSpace(SnapshotError):
    """The disk is full. Existing files are untouched."""

    retryable = True

    def __init__(self, path: Path | str, detail: str) -> None:
        super().__init__(f"{path}: {detail}. Free space on this disk; the operation is retried")
        self.path = path


# Files


class Corrupted(SnapshotError):
    """The bytes differ from those that were written. They are never used; another copy is needed."""

    def __init__(self, place: Path | str, detail: str) -> None:
        super().__init__(
            f"{place}: {detail}. It is not used: remove it, and use an older snapshot or another node's copy"
        )
        self.place = place
        self.detail = detail


class NewerVersion(SnapshotError):
    """Written by a newer release than this one."""

    def __init__(self, place: Path | str, what: str, *, found: int, understood: int) -> None:
        super().__init__(
            f"{place} has {what} {found}, but this release supports only up to {understood}. "
            "Start the release that wrote it, or a newer one"
        )
        self.place = place
        self.found = found
        self.understood = understood


class WrongSnapshot(SnapshotError):
    """A valid snapshot, but for a different cluster, group or kind of machine."""

    def __init__(self, place: Path | str, detail: str) -> None:
        super().__init__(f"{place}: {detail}. Use the right snapshot, or correct the store in the configuration")
        self.place = place


# Stores


class StoreError(SnapshotError):
    """A store operation failed. `store` names the store, without secrets."""

    def __init__(self, store: str, detail: str, advice: str) -> None:
        super().__init__(f"{store}: {detail}. {advice}")
        self.store = store
        self.detail = detail


class Unreachable(StoreError):
    """No answer: refused, timed out, or cut off in the middle."""

    retryable = True

    def __init__(self, store: str, detail: str) -> None:
        super().__init__(store, detail, "Check the endpoint URL and the network; the operation is retried")


class StoreFailed(StoreError):
    """The store reported a failure: a server error, throttling, or an I/O error of its disk."""

    retryable = True

    def __init__(self, store: str, detail: str) -> None:
        super().__init__(store, detail, "Check the store's state and logs; the operation is retried")


class Denied(StoreError):
    """The credentials are missing, wrong, or lack permissions."""

    def __init__(self, store: str, detail: str) -> None:
        super().__init__(
            store,
            detail,
            "Check the credentials, and that they permit listing, reading, writing and deleting below the prefix",
        )


class BucketMissing(StoreError):
    """The bucket or directory does not exist. It is never created implicitly, because a typo would hide backups."""

    def __init__(self, store: str, detail: str) -> None:
        super().__init__(store, detail, "Create it, or correct its name in the configuration")


class NotFound(StoreError):
    """There is no such object."""

    def __init__(self, store: str, name: str) -> None:
        super().__init__(store, f"there is no {name}", "List the store to see what it holds")
        self.name = name


class BadStoreUrl(SnapshotError):
    """The URL of a store is invalid."""

    def __init__(self, url: str, detail: str) -> None:
        super().__init__(
            f"{url!r}: {detail}. Use a directory, file:///directory or "
            "s3://bucket/prefix?endpoint_url=https://host&region=eu-1&style=path"
        )


class S3Missing(BadStoreUrl):
    """The URL is valid, but S3 support is not installed."""

    def __init__(self, url: str) -> None:
        SnapshotError.__init__(self, f"{url!r}: S3 support is not installed. Run: pip install 'holdfast[s3]'")


# Peers


class PeerRefused(SnapshotError):
    """A peer cannot serve the snapshot, or no longer can. Its next offer may name another one."""

    retryable = True

    def __init__(self, peer: str, detail: str) -> None:
        super().__init__(f"{peer} does not serve the snapshot: {detail}. The next offer will be used instead")
        self.peer = peer
