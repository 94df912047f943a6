"""From the text of a setting to a store: a directory or an S3 bucket."""

from __future__ import annotations

from pathlib import Path

from holdfast.snapshots.directory import DirectoryStore
from holdfast.snapshots.stores import Store, check_store_url


def open_store(url: str, *, hasty: bool = False) -> Store:
    """A directory, file:///directory or s3://bucket/prefix?endpoint_url=...&region=...&style=path|virtual&profile=...

    `hasty`: for small objects that somebody waits for. A server that does not answer is given up soon.
    """
    place = check_store_url(url)
    if isinstance(place, Path):
        return DirectoryStore(place)
    from holdfast.snapshots.s3 import S3Store  # boto3 takes a while to load.

    return S3Store(place.hasty() if hasty else place)
