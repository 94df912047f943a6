"""A store in an S3 bucket, through boto3: AWS, MinIO, Ceph, rclone, or any other compatible server.

botocore retries requests (standard mode: exponential backoff with jitter, `attempts` in total). A download that breaks
off resumes where it ended. Uploads larger than one part use multipart, so an object appears whole or not at all. The
signature of every uploaded part covers the sha256 of its bytes (`payload_signing_enabled`). S3 checks it before it
accepts the part, and every server with signatures supports it, unlike the newer checksum headers.

There are no conditional writes, because some servers silently ignore `If-None-Match`. They are not needed, because each
name is written once.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    ReadTimeoutError,
    ResponseStreamingError,
    SSOError,
    TokenRetrievalError,
)
from s3transfer.exceptions import CancelledError
from s3transfer.manager import TransferManager
from s3transfer.subscribers import BaseSubscriber

from holdfast.snapshots.errors import (
    BucketMissing,
    Cancelled,
    Denied,
    NotFound,
    StoreError,
    StoreFailed,
    Unreachable,
)
from holdfast.snapshots.files import SteadyWriter, open_private
from holdfast.snapshots.stores import S3Place, Stat, check_name, check_prefix, probe
from holdfast.snapshots.work import PIECE_BYTES, FewThreads, Work

_DENIED: Final = {
    "403", "401", "AccessDenied", "AllAccessDisabled", "AuthorizationHeaderMalformed", "ExpiredToken", "Forbidden",
    "InvalidAccessKeyId", "InvalidToken", "RequestTimeTooSkewed", "SignatureDoesNotMatch", "Unauthorized",
}  # fmt: skip
_CREDENTIALS: Final = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    TokenRetrievalError,
    SSOError,
    ProfileNotFound,
)
_BROKEN: Final = (IncompleteReadError, ResponseStreamingError, ReadTimeoutError, ConnectionError, HTTPClientError)
_MISSING: Final = {"404", "NoSuchKey", "NotFound"}
_UPLOAD_THREADS: Final = 4
_BACKOFF_MIN_S: Final = 0.1
_BACKOFF_MAX_S: Final = 20.0
_POLL_S: Final = 0.05


def _is_here(url: str | None) -> bool:
    """Whether the URL points to the loopback address of this machine."""
    host = urlsplit(url).hostname if url else None
    if host is None:
        return False
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class S3Store:
    def __init__(self, place: S3Place) -> None:
        self.place = place
        try:
            session = boto3.session.Session(profile_name=place.profile, region_name=place.region)
            style = place.style if place.style != "auto" else ("path" if place.endpoint_url else "virtual")
            self._client: Any = session.client(
                "s3",
                endpoint_url=place.endpoint_url,
                # Signing needs a region. Servers other than AWS mostly ignore its value.
                region_name=place.region or session.region_name or "us-east-1",
                config=Config(
                    signature_version="s3v4",
                    retries={"mode": "standard", "total_max_attempts": place.attempts},
                    connect_timeout=place.connect_timeout_s,
                    read_timeout=place.read_timeout_s,
                    max_pool_connections=4 * _UPLOAD_THREADS,
                    # A proxy set in the environment is for outside traffic. None means: as the environment says.
                    proxies={} if _is_here(place.endpoint_url) else None,
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                    s3={"addressing_style": style, "payload_signing_enabled": True},
                ),
            )
        except ProfileNotFound as error:
            raise Denied(self.url, str(error)) from error
        except (NoRegionError, ValueError) as error:
            raise StoreFailed(self.url, str(error)) from error

    @property
    def url(self) -> str:
        where = f" at {self.place.endpoint_url}" if self.place.endpoint_url else ""
        return f"s3://{self.place.bucket}/{self.place.prefix}{where}"

    def close(self) -> None:
        self._client.close()

    # Writing

    def put(self, source: Path, name: str, work: Work | None = None) -> None:
        work = work or Work()
        key = self._key(name)
        work.begin(source.stat().st_size)
        seen = _Seen()
        rate = None if work.throttle is None else work.throttle.bytes_per_second
        config = TransferConfig(
            multipart_threshold=self.place.part_bytes,
            multipart_chunksize=self.place.part_bytes,
            max_concurrency=_UPLOAD_THREADS,
            max_bandwidth=rate,
        )
        # Its own threads would hold up the end of the process as long as the store is silent.
        transfers = TransferManager(self._client, config, executor_cls=FewThreads)
        with self._edge(name), source.open("rb") as file, transfers as manager:
            future = manager.upload(file, self.place.bucket, key, subscribers=[seen])
            try:
                while not future.done():
                    time.sleep(_POLL_S)
                    work.show(seen.sent)
                    if work.is_cancelled:
                        future.cancel()  # This also aborts the multipart upload.
                future.result()
            except CancelledError:
                raise Cancelled from None
        work.end()

    def put_bytes(self, data: bytes, name: str) -> None:
        with self._edge(name):
            self._client.put_object(Bucket=self.place.bucket, Key=self._key(name), Body=data)

    # Reading

    def get(self, name: str, to: Path, work: Work | None = None) -> None:
        work = work or Work()
        size = self.stat(name).size
        with open(to, "ab", buffering=0, opener=open_private) as target:
            if os.fstat(target.fileno()).st_size > size:
                target.truncate(0)  # Not a prefix of this object.
            work.begin(size, os.fstat(target.fileno()).st_size)
            failures = 0
            while (have := os.fstat(target.fileno()).st_size) < size:
                try:
                    self._append(name, target.fileno(), have=have, size=size, work=work)
                except (Unreachable, StoreFailed):
                    # Progress resets the count, so a link that breaks every few hundred megabytes still gets everything
                    # across.
                    failures = 0 if os.fstat(target.fileno()).st_size > have else failures + 1
                    if failures >= self.place.attempts:
                        raise
                    work.pause(random.uniform(0, min(_BACKOFF_MIN_S * 2**failures, _BACKOFF_MAX_S)))
            os.fsync(target.fileno())
        work.end()

    def _append(self, name: str, fd: int, *, have: int, size: int, work: Work) -> None:
        with self._edge(name):
            response = self._client.get_object(
                Bucket=self.place.bucket, Key=self._key(name), Range=f"bytes={have}-{size - 1}"
            )
        body = response["Body"]
        try:
            # Check the header, not the status: rclone answers ranges with 200. If a server ignored the range, we would
            # append the beginning of the object to its middle.
            if have and not str(response.get("ContentRange", "")).startswith(f"bytes {have}-"):
                raise StoreFailed(self.url, f"{name}: the server did not return the requested range")
            writer = SteadyWriter(fd)
            while True:
                with self._edge(name):
                    piece = body.read(PIECE_BYTES)
                if not piece:
                    break
                writer.write(piece)
                work.step(len(piece))
            if os.fstat(fd).st_size < size:
                raise Unreachable(self.url, f"the download of {name} broke off")
        finally:
            body.close()

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        end = "" if length is None else str(offset + length - 1)
        wanted = {} if offset == 0 and length is None else {"Range": f"bytes={offset}-{end}"}
        failures = 0
        while True:
            try:
                with self._edge(name):
                    response = self._client.get_object(Bucket=self.place.bucket, Key=self._key(name), **wanted)
                    data: bytes = response["Body"].read()
                return data
            except _BehindTheEnd:
                return b""
            except Unreachable:  # The body broke off: botocore retries only what happens before the body.
                failures += 1
                if failures >= self.place.attempts:
                    raise
                time.sleep(random.uniform(0, min(_BACKOFF_MIN_S * 2**failures, _BACKOFF_MAX_S)))

    def stat(self, name: str) -> Stat:
        with self._edge(name):
            found = self._client.head_object(Bucket=self.place.bucket, Key=self._key(name))
        return Stat(name, found["ContentLength"], _ms(found["LastModified"]))

    def list(self, prefix: str = "") -> list[Stat]:
        skip = len(self.place.prefix)
        found: list[Stat] = []
        with self._edge(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.place.bucket, Prefix=self.place.prefix + check_prefix(prefix)
            )
            for page in pages:
                found += [
                    Stat(item["Key"][skip:], item["Size"], _ms(item["LastModified"]))
                    for item in page.get("Contents", ())
                ]
        return sorted(found)

    def delete(self, name: str) -> None:
        with self._edge(name):
            self._client.delete_object(Bucket=self.place.bucket, Key=self._key(name))

    def check(self) -> None:
        probe(self)

    def _key(self, name: str) -> str:
        return self.place.prefix + check_name(name)

    # Errors

    @contextmanager
    def _edge(self, name: str) -> Iterator[None]:
        """The only place that translates errors of boto3 to ours."""
        try:
            yield
        except ClientError as error:
            self._refused(error, name)
        except _CREDENTIALS as error:
            raise Denied(self.url, f"there are no usable credentials ({error})") from error
        except _BROKEN as error:
            raise Unreachable(self.url, str(error)) from error
        except (BotoCoreError, Boto3Error) as error:
            raise StoreFailed(self.url, f"{name}: {error}") from error

    def _refused(self, error: ClientError, name: str) -> NoReturn:
        answer = error.response
        code = str(answer.get("Error", {}).get("Code", ""))
        status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        said = str(answer.get("Error", {}).get("Message", "")) or code
        if code == "InvalidRange" or status == 416:
            raise _BehindTheEnd(self.url, name) from error
        if code == "NoSuchBucket":
            raise BucketMissing(self.url, f"there is no bucket {self.place.bucket!r}") from error
        if code in _MISSING or status == 404:
            # A HEAD response has no body, so it does not say whether the object or the bucket is missing.
            if code == "404" and not self._bucket_exists():
                raise BucketMissing(self.url, f"there is no bucket {self.place.bucket!r}") from error
            raise NotFound(self.url, name) from error
        if code in _DENIED or status in (401, 403):
            raise Denied(self.url, f"{code}: {said}") from error
        if status in (301, 307, 400) and code in ("301", "PermanentRedirect", "AuthorizationQueryParametersError"):
            raise StoreFailed(self.url, f"{code}: {said}; is the region right?") from error
        raise StoreFailed(self.url, f"{name}: {code} {said} (HTTP {status})") from error

    def _bucket_exists(self) -> bool:
        try:
            self._client.head_bucket(Bucket=self.place.bucket)
        except ClientError as error:
            return str(error.response.get("Error", {}).get("Code")) not in ("404", "NoSuchBucket")
        except (BotoCoreError, Boto3Error):
            return True  # Unknown; report the missing object.
        return True


class _BehindTheEnd(StoreError):
    """The object ends before the requested range."""

    def __init__(self, store: str, name: str) -> None:
        super().__init__(store, f"{name} ends before the requested range", "It is not the expected object")


class _Seen(BaseSubscriber):  # type: ignore[misc]  # It has no types.
    """Counts the bytes sent by the upload's threads. Retrying a part subtracts its bytes again."""

    def __init__(self) -> None:
        self.sent = 0

    def on_progress(self, bytes_transferred: int, **_: object) -> None:
        self.sent += bytes_transferred


def _ms(when: Any) -> int:
    return int(when.timestamp() * 1000)
