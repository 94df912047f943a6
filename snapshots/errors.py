"""What can go wrong with snapshots, by kind.

Every error says what to do. `retryable` means that the same call may succeed later without anybody changing anything;
the cluster works on in the meantime. Errors of boto3, LMDB and the operating system are translated into these once, at the
edge where they appear.
"""

from __future__ import annotations

from pathlib import Path


class SnapshotError(Exception):
    """The parent of all below."""

    retryable: bool = False


class Cancelled(SnapshotError):
    """Whoever started the work ended it. Nothing is left behind but a partial file that a later fetch goes on with."""

    retryable = True

    def __init__(self) -> None:
        super().__init__("the work was cancelled")


class NoSpace(SnapshotError):
    """The disk is full. What was there before is untouched."""

    retryable = True

    def __init__(self, path: Path | str, detail: str) -> None:
        super().__init__(f"{path}: {detail}. Free space on this disk; it is tried again")
        self.path = path


# Files


class Corrupted(SnapshotError):
    """The bytes are not the bytes that were written. They are never used; another copy has to be."""

    def __init__(self, place: Path | str, detail: str) -> None:
        super().__init__(
            f"{place}: {detail}. It is not used: take an older snapshot or another node's copy, and remove this one"
        )
        self.place = place
        self.detail = detail


class NewerVersion(SnapshotError):
    """Written by a later release than this one."""

    def __init__(self, place: Path | str, what: str, *, found: int, understood: int) -> None:
        super().__init__(
            f"{place} is written in {what} {found}, this release understands up to {understood}. "
            "Start the release that wrote it, or a later one"
        )
        self.place = place
        self.found = found
        self.understood = understood


class WrongSnapshot(SnapshotError):
    """A sound snapshot, but of another cluster, group or kind of machine than the one it is wanted for."""

    def __init__(self, place: Path | str, detail: str) -> None:
        super().__init__(f"{place}: {detail}. Look for the right snapshot, or for the wrong store in the configuration")
        self.place = place


# Stores


class StoreError(SnapshotError):
    """A store did not do what it was asked. `store` names it, without secrets."""

    def __init__(self, store: str, detail: str, advice: str) -> None:
        super().__init__(f"{store}: {detail}. {advice}")
        self.store = store
        self.detail = detail


class Unreachable(StoreError):
    """No answer: refused, timed out, or cut off in the middle."""

    retryable = True

    def __init__(self, store: str, detail: str) -> None:
        super().__init__(store, detail, "Check the endpoint URL and the network; it is tried again")


class StoreFailed(StoreError):
    """The store answered that it failed: a server error, throttling, an I/O error of its disk."""

    retryable = True

    def __init__(self, store: str, detail: str) -> None:
        super().__init__(store, detail, "Look at the store's own state and logs; it is tried again")


class Denied(StoreError):
    """No credentials, wrong ones, or not enough rights."""

    def __init__(self, store: str, detail: str) -> None:
        super().__init__(
            store, detail, "Check the credentials and that they allow to list, read, write and delete below the prefix"
        )


class BucketMissing(StoreError):
    """The bucket, or the directory, is not there. It is never created on the fly: a typing error would hide backups."""

    def __init__(self, store: str, detail: str) -> None:
        super().__init__(store, detail, "Create it, or correct its name in the configuration")


class NotFound(StoreError):
    """There is no such object."""

    def __init__(self, store: str, name: str) -> None:
        super().__init__(store, f"there is no {name}", "List the store to see what there is")
        self.name = name


class BadStoreUrl(SnapshotError):
    """The place of a store cannot be understood."""

    def __init__(self, url: str, detail: str) -> None:
        super().__init__(
            f"{url!r}: {detail}. Write a directory, file:///directory or "
            "s3://bucket/prefix?endpoint_url=https://host&region=eu-1&style=path"
        )


class S3Missing(BadStoreUrl):
    """The place is understood, but what speaks to it is not installed."""

    def __init__(self, url: str) -> None:
        SnapshotError.__init__(self, f"{url!r}: S3 support is not installed. Run: pip install 'holdfast[s3]'")


# Peers


class PeerRefused(SnapshotError):
    """A peer answered that it cannot serve the snapshot (any more). Its next offer may name another one."""

    retryable = True

    def __init__(self, peer: str, detail: str) -> None:
        super().__init__(f"{peer} does not serve the snapshot: {detail}. The next offer is taken instead")
        self.peer = peer
