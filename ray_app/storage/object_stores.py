"""Objects in buckets: S3 for run directories and data, Google Cloud Storage and Azure Blob Storage for data only.

- `S3Path` has what a run directory needs: whole objects, conditional puts, and multipart uploads that are ended after
  an error. It works with every server that implements the protocol. botocore is imported at the first use, so that a
  run on local storage does not pay for it.
- `GooglePath` and `AzurePath` are read through pyarrow and never written.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar, Self
from urllib.parse import parse_qsl, urlsplit

import pyarrow.fs as pafs

from ray_app.config.import_paths import require
from ray_app.errors import ConfigError


@dataclass(frozen=True)
class ObjectPath:
    """A location in a bucket, with those methods of `pathlib.Path` that need no server.

    Args:
        bucket: The bucket; Azure calls it a container.
        key: The object's key, or a prefix without its last slash.
        query: The query of the URI, which says how to connect to the server.
        etag: Version of the object, if a listing returned it.
        size: Size of the object in bytes, if a listing returned it.
    """

    bucket: str
    key: str
    query: str = ""
    etag: str = field(default="", compare=False, repr=False)
    size: int | None = field(default=None, compare=False, repr=False)
    scheme: ClassVar[str]
    options: ClassVar[Sequence[str]]
    """The parameters that the query may have."""
    credentials: ClassVar[str]
    """The source of the credentials, for messages."""

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Returns the location that a URI names: `SCHEME://bucket/prefix?option=...`.

        Raises:
            ConfigError: There is no bucket, an option is unknown, or the URI contains credentials.
        """
        parts = urlsplit(uri)
        if "@" in parts.netloc:
            raise ConfigError(
                f"A path must not hold credentials (got"
                f" {cls.scheme}://***@{parts.netloc.rpartition('@')[2]}{parts.path}), as it is stored"
                f" with the run. Use {cls.credentials}, on every node."
            )
        unknown = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True) if name not in cls.options]
        if unknown or not parts.netloc or parts.fragment:
            raise ConfigError(
                f"{uri!r} names no place on {cls.scheme}://{f', {unknown[0]!r} is unknown' if unknown else ''}. Write"
                f" {cls.scheme}://bucket/prefix, with ?{'=...&'.join(cls.options)}=... as far as needed."
            )
        return cls(parts.netloc, parts.path.strip("/"), parts.query)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}" + (f"?{self.query}" if self.query else "")

    def __truediv__(self, name: str) -> Self:
        return replace(self, key=f"{self.key}/{name}".lstrip("/"), etag="", size=None)

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The prefix that contains this location."""
        return replace(self, key=self.key.rpartition("/")[0], etag="", size=None)

    @property
    def below(self) -> str:
        """The prefix of the keys below this location; empty if it is the whole bucket."""
        return f"{self.key}/".lstrip("/")


logger = logging.getLogger(__name__)

PART_BYTES = 16 << 20
"""Larger files are uploaded in parts of this size; an upload needs memory for a few parts."""
_PARALLEL_PARTS = 4
_MAX_PARTS = 10_000
_DELETED_PER_CALL = 1000
_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 30
_ATTEMPTS = 3
_CONFLICT_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)


@dataclass(frozen=True)
class S3Path(ObjectPath):
    """A location in S3, with those methods of `pathlib.Path` that a run directory needs.

    `s3://bucket/prefix` has the query parameters `endpoint_override`, `scheme` and `region`, as in pyarrow. Every
    failure is an `OSError`, as on a disk; a missing object is a `FileNotFoundError`. A version that was listed is
    fetched once: a second read of it needs no request.
    """

    scheme: ClassVar[str] = "s3"
    options: ClassVar[Sequence[str]] = ("endpoint_override", "region", "scheme")
    credentials: ClassVar[str] = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the role of the machine"

    def exists(self) -> bool:
        """Returns whether the object exists."""
        try:
            with self._errors():
                self._client.head_object(**self._object)
        except FileNotFoundError:
            return False
        return True

    def read_bytes(self) -> bytes:
        """Returns the content of the object."""
        return _read_version(self, self.etag) if self.etag else self._read()

    def read_text(self) -> str:
        """Returns the content of the object as UTF-8."""
        return self.read_bytes().decode()

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes the object; S3 does not say whether it existed."""
        del missing_ok
        with self._errors():
            self._client.delete_object(**self._object)

    def put(self, data: bytes, if_absent: bool) -> bool:
        """Writes the object, see `storage.files.put_atomic`; returns whether it was written.

        With `if_absent` an existing object with the same content counts as written: if the answer to a put is lost, the
        repeated put finds the object of the first.
        """
        with self._errors():
            if len(data) <= PART_BYTES and not if_absent:
                self._client.put_object(**self._object, Body=data)
                return True
            written = self._put_absent(data) if len(data) <= PART_BYTES else self._put_parts(data, if_absent)
            return written or self._read() == data

    def listing(self, temporary: bool = False) -> dict[str, S3Path]:
        """Returns the objects below this prefix, see `storage.files.list_tree`.

        Args:
            temporary: Return the unfinished uploads instead.
        """
        prefix = self.below
        paths: dict[str, S3Path] = {}
        with self._errors():
            if temporary:
                for upload in self._uploads():
                    paths[upload["Key"].removeprefix(prefix)] = S3Path(self.bucket, upload["Key"], self.query)
                return paths
            for entry in self._entries():
                name = entry["Key"].removeprefix(prefix)
                # Consoles create objects with a slash at the end to show folders.
                if name and not name.endswith("/"):
                    paths[name] = replace(self / name, etag=entry["ETag"], size=entry["Size"])
        return paths

    def _entries(self) -> Iterator[Any]:
        """Yields the entry of every object below this prefix in the listing of S3."""
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.below):
            yield from page.get("Contents", ())

    def folders(self) -> list[str]:
        """Returns the names of the folders, see `storage.files.list_folders`; one request per thousand folders."""
        with self._errors():
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self.below, Delimiter="/"
            )
            return [
                entry["Prefix"].rstrip("/").rpartition("/")[2]
                for page in pages
                for entry in page.get("CommonPrefixes", ())
            ]

    def end_uploads(self) -> None:
        """Ends the unfinished uploads below this prefix, so that their parts use no storage."""
        with self._errors():
            for upload in self._uploads():
                _abort(self._client, {"Bucket": self.bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]})

    def remove_tree(self) -> None:
        """Removes all objects below this prefix, and ends the uploads."""
        with self._errors():
            keys = [{"Key": entry["Key"]} for entry in self._entries()]
            for first in range(0, len(keys), _DELETED_PER_CALL):
                some = {"Objects": keys[first : first + _DELETED_PER_CALL], "Quiet": True}
                refused = self._client.delete_objects(Bucket=self.bucket, Delete=some).get("Errors")
                if refused:
                    raise OSError(f"{self}: {len(refused)} objects could not be removed, the first: {refused[0]}")
        self.end_uploads()

    @property
    def _object(self) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.key}

    @property
    def _client(self) -> Any:
        return _client(self.query)

    def _read(self) -> bytes:
        """Reads the object, and tries again if the connection breaks in the middle, which botocore does not do."""
        from botocore.exceptions import BotoCoreError

        with self._errors():
            for attempt in range(1, _ATTEMPTS + 1):
                body = self._client.get_object(**self._object)["Body"]
                try:
                    return bytes(body.read())
                except BotoCoreError:
                    if attempt == _ATTEMPTS:
                        raise
        raise AssertionError

    def _put_absent(self, data: bytes) -> bool:
        """Puts the object unless it exists; returns whether it did. Waits while another conditional put is running."""
        from botocore.exceptions import ClientError

        for pause_s in (*_CONFLICT_PAUSES_S, None):
            try:
                self._client.put_object(**self._object, Body=data, IfNoneMatch="*")
                return True
            except ClientError as error:
                code = error.response["Error"]["Code"]
                if code == "PreconditionFailed":
                    return False
                if code != "ConditionalRequestConflict" or pause_s is None:
                    raise
                time.sleep(pause_s)
        raise AssertionError

    def _put_parts(self, data: bytes, if_absent: bool) -> bool:
        """Uploads the object in parts; it appears with the last call, or not at all.

        Returns:
            Whether it was written; False only with `if_absent`, if the object existed.
        """
        from botocore.exceptions import ClientError

        client = self._client
        size = max(PART_BYTES, -(-len(data) // _MAX_PARTS))
        view = memoryview(data)
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        upload = self._object | {"UploadId": client.create_multipart_upload(**self._object)["UploadId"]}

        def put_part(number: int) -> dict[str, Any]:
            answer = client.upload_part(
                **upload, PartNumber=number, Body=bytes(view[(number - 1) * size : number * size])
            )
            checksum = {name: answer[name] for name in ("ChecksumCRC32", "ChecksumCRC64NVME") if name in answer}
            return {"PartNumber": number, "ETag": answer["ETag"], **checksum}

        try:
            with ThreadPoolExecutor(_PARALLEL_PARTS) as pool:
                parts = list(pool.map(put_part, range(1, -(-len(data) // size) + 1)))
            client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, **condition)
        except BaseException as error:
            _abort(client, upload)
            if isinstance(error, ClientError) and error.response["Error"]["Code"] == "PreconditionFailed":
                return False
            raise
        return True

    def _uploads(self) -> Iterator[dict[str, Any]]:
        for page in self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self.bucket, Prefix=self.below
        ):
            yield from page.get("Uploads", ())

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns the errors of botocore into those that a disk would raise."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
                raise FileNotFoundError(errno.ENOENT, "No such object", str(self)) from error
            raise OSError(f"{self}: {error}") from error
        except BotoCoreError as error:
            raise OSError(f"{self}: {error}") from error


_making_client = threading.Lock()


def _client(query: str) -> Any:
    with _making_client:
        return _make_client(query)


@functools.cache
def _make_client(query: str) -> Any:
    """Returns the client for a server, one per process; many threads may use it.

    Importing botocore and reading its models takes half a second.
    """
    require("botocore", "s3://")
    import botocore.session
    from botocore.config import Config

    options = dict(parse_qsl(query))
    endpoint = options.get("endpoint_override")
    if endpoint and "://" not in endpoint:
        endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
    is_custom_server = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    config = Config(
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=_READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        max_pool_connections=32,
        s3={"addressing_style": "path"} if is_custom_server else {},
    )
    return botocore.session.get_session().create_client(
        "s3", region_name=options.get("region"), endpoint_url=endpoint, config=config
    )


@functools.lru_cache(maxsize=4096)
def _read_version(path: S3Path, etag: str) -> bytes:
    del etag
    return path._read()


def _abort(client: Any, upload: dict[str, str]) -> None:
    """Ends an upload, so that its parts use no storage. If that fails, `listing(temporary=True)` still returns it."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        client.abort_multipart_upload(**upload)
    except (BotoCoreError, ClientError) as error:
        logger.warning("The upload of s3://%s/%s could not be ended: %s", upload["Bucket"], upload["Key"], error)


_RETRY_TIME = timedelta(seconds=60)
"""How long pyarrow retries requests to Google; its own default is a quarter of an hour."""


@dataclass(frozen=True)
class CloudPath(ObjectPath):
    """A location that is only read. Every failure is an `OSError`; a missing object is a `FileNotFoundError`."""

    @property
    @abstractmethod
    def filesystem(self) -> pafs.FileSystem:
        """The file system of pyarrow that reads it, one per server and process."""

    @property
    def path(self) -> str:
        """The path on that file system."""
        return f"{self.bucket}/{self.key}".rstrip("/")

    def exists(self) -> bool:
        """Returns whether the object exists."""
        return bool(self.filesystem.get_file_info(self.path).type == pafs.FileType.File)

    def read_bytes(self) -> bytes:
        """Returns the content of the object."""
        with self.filesystem.open_input_file(self.path) as file:
            return bytes(file.read())

    def read_text(self) -> str:
        """Returns the content of the object as UTF-8."""
        return self.read_bytes().decode()

    def listing(self) -> dict[str, CloudPath]:
        """Returns all objects below this prefix by their relative paths, in the order of these.

        Their `etag` is made of size and time, which change with the content.
        """
        entries = self.filesystem.get_file_info(pafs.FileSelector(self.path, recursive=True, allow_not_found=True))
        files = {info.path.removeprefix(f"{self.path}/"): info for info in entries if info.type == pafs.FileType.File}
        return {
            name: replace(self / name, etag=f"{info.size}-{info.mtime_ns}", size=info.size)
            for name, info in sorted(files.items())
        }

    def folders(self) -> list[str]:
        """Returns the names of the folders directly below this one.

        They are computed from the objects, since pyarrow does not list prefixes of Google, which are not objects.
        """
        return list(dict.fromkeys(name.partition("/")[0] for name in self.listing() if "/" in name))


@dataclass(frozen=True)
class GooglePath(CloudPath):
    """A location in Google Cloud Storage: `gs://bucket/prefix`."""

    scheme: ClassVar[str] = "gs"
    options: ClassVar[Sequence[str]] = ("anonymous", "endpoint_override", "scheme")
    credentials: ClassVar[str] = "GOOGLE_APPLICATION_CREDENTIALS, or the account of the machine"

    @property
    def filesystem(self) -> pafs.FileSystem:
        """See `CloudPath`."""
        return _google(self.query)


@dataclass(frozen=True)
class AzurePath(CloudPath):
    """A location in Azure Blob Storage: `az://container/prefix?account_name=...`.

    Without that parameter the account is the one of `AZURE_STORAGE_ACCOUNT`.
    """

    scheme: ClassVar[str] = "az"
    options: ClassVar[Sequence[str]] = (
        "account_name",
        "blob_storage_authority",
        "blob_storage_scheme",
        "dfs_storage_authority",
        "dfs_storage_scheme",
    )
    credentials: ClassVar[str] = (
        "AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN, or an identity that Azure's default credential finds"
    )

    @property
    def filesystem(self) -> pafs.FileSystem:
        """See `CloudPath`."""
        return _azure(self.query)


@functools.cache
def _google(query: str) -> pafs.FileSystem:
    options = dict(parse_qsl(query))
    return pafs.GcsFileSystem(
        anonymous=options.get("anonymous") == "true",
        scheme=options.get("scheme"),
        endpoint_override=options.get("endpoint_override"),
        retry_time_limit=_RETRY_TIME,
    )


@functools.cache
def _azure(query: str) -> pafs.FileSystem:
    options = dict(parse_qsl(query))
    account = options.pop("account_name", None) or os.environ.get("AZURE_STORAGE_ACCOUNT")
    if not account:
        raise OSError("az:// needs the name of the storage account, as ?account_name=... or AZURE_STORAGE_ACCOUNT")
    return pafs.AzureFileSystem(
        account,
        account_key=os.environ.get("AZURE_STORAGE_KEY"),
        sas_token=os.environ.get("AZURE_STORAGE_SAS_TOKEN"),
        **options,
    )
