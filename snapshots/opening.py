"""Opens the store that a URL in the configuration names: a directory or an S3 bucket."""

from __future__ import annotations

from pathlib import Path

from holdfast.snapshots.directory import DirectoryStore
from holdfast.snapshots.stores import Store, check_store_url


def open_store(url: str, *, hasty: bool = False) -> Store:
    """Accepts a directory, file:///directory or
    s3://bucket/prefix?endpoint_url=...&region=...&style=path|virtual&profile=...

    `hasty` uses short timeouts, for small objects that a request is waiting for.
    """
    place = check_store_url(url)
    if isinstance(place, Path):
        return DirectoryStore(place)
    from holdfast.snapshots.s3 import S3Store  # boto3 takes a while to load.

    return S3Store(place.hasty() if hasty else place)
