"""Names of objects in buckets, as URIs.

A run directory on S3, or on what speaks its protocol: whole objects, conditional puts, multipart uploads that end on an
error.

botocore is imported where it is needed, so that a run on local storage does not pay for it.

Data on Google Cloud Storage and Azure Blob Storage: read through pyarrow, never written.
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
    """A place in a bucket, with those methods of `pathlib.Path` that need no server.

    Args:
        bucket: The bucket; a container, as Azure calls it.
        key: The object's key, or a prefix without its last slash.
        query: How the server is reached, as it stands in the URI.
        etag: Version of the object, if it was listed.
        size: Its bytes, likewise.
    """

    bucket: str
    key: str
    query: str = ""
    etag: str = field(default="", compare=False, repr=False)
    size: int | None = field(default=None, compare=False, repr=False)
    scheme: ClassVar[str]
    options: ClassVar[Sequence[str]]
    """What the query may hold."""
    credentials: ClassVar[str]
    """Where they come from, for messages."""

    @classmethod
    def parse(cls, uri: str) -> Self:
        """The place that a URI names: `SCHEME://bucket/prefix?option=...`.

        Raises:
            ConfigError: There is no bucket, an option is unknown, or credentials stand in the URI.
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
        """The prefix that it is in."""
        return replace(self, key=self.key.rpartition("/")[0], etag="", size=None)

    @property
    def below(self) -> str:
        """What the keys of everything below it begin with; nothing, if it is the whole bucket."""
        return f"{self.key}/".lstrip("/")


logger = logging.getLogger(__name__)

PART_BYTES = 16 << 20
"""Larger files go up in parts of this size; a few of them at once are all the memory that an upload takes."""
_PARALLEL_PARTS, _MOST_PARTS = 4, 10_000
_DELETED_PER_CALL = 1000
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S, _ATTEMPTS = 5, 30, 3
_CONFLICT_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)


@dataclass(frozen=True)
class S3Path(ObjectPath):
    """A place on S3, with those methods of `pathlib.Path` that a run directory needs.

    `s3://bucket/prefix` has the query parameters `endpoint_override`, `scheme` and `region` as pyarrow knows them. What
    goes wrong is an `OSError`, as on a disk; a missing object is a `FileNotFoundError`. Reading a version that was
    listed a second time asks no server.
    """

    scheme: ClassVar[str] = "s3"
    options: ClassVar[Sequence[str]] = ("endpoint_override", "region", "scheme")
    credentials: ClassVar[str] = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the role of the machine"

    def exists(self) -> bool:
        """Whether there is such an object."""
        try:
            with self._errors():
                self._client.head_object(**self._place)
        except FileNotFoundError:
            return False
        return True

    def read_bytes(self) -> bytes:
        """The whole object."""
        return _read_version(self, self.etag) if self.etag else self._read()

    def read_text(self) -> str:
        """The whole object as UTF-8."""
        return self.read_bytes().decode()

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes the object; S3 does not say whether it was there."""
        del missing_ok
        with self._errors():
            self._client.delete_object(**self._place)

    def put(self, data: bytes, if_absent: bool) -> bool:
        """See `record.files.put_atomic`. With `if_absent` an object of the same content counts as written.

        The answer to a put can be lost; the repeated one then meets what the first has written.
        """
        with self._errors():
            if len(data) <= PART_BYTES and not if_absent:
                self._client.put_object(**self._place, Body=data)
                return True
            written = self._put_absent(data) if len(data) <= PART_BYTES else self._put_parts(data, if_absent)
            return written or self._read() == data

    def listing(self, temporary: bool = False) -> dict[str, S3Path]:
        """See `record.files.listing`; `temporary` asks for uploads instead that were begun and not ended."""
        prefix, found = self.below, {}
        with self._errors():
            if temporary:
                for upload in self._uploads():
                    found[upload["Key"].removeprefix(prefix)] = S3Path(self.bucket, upload["Key"], self.query)
                return found
            for entry in self._entries():
                name = entry["Key"].removeprefix(prefix)
                if name and not name.endswith("/"):  # what consoles put for a folder is no file
                    found[name] = replace(self / name, etag=entry["ETag"], size=entry["Size"])
        return found

    def _entries(self) -> Iterator[Any]:
        """What S3 says of every object below this prefix."""
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.below):
            yield from page.get("Contents", ())

    def folders(self) -> list[str]:
        """See `record.files.folders`; one request per thousand folders, however much is in them."""
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
        """Ends the uploads that were begun below this prefix, so that their parts take no room."""
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
    def _place(self) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.key}

    @property
    def _client(self) -> Any:
        return _client(self.query)

    def _read(self) -> bytes:
        """Reads the object; a connection that breaks in the middle is not tried again by botocore, so it is here."""
        from botocore.exceptions import BotoCoreError

        with self._errors():
            for attempt in range(1, _ATTEMPTS + 1):
                body = self._client.get_object(**self._place)["Body"]
                try:
                    return bytes(body.read())
                except BotoCoreError:
                    if attempt == _ATTEMPTS:
                        raise
        raise AssertionError

    def _put_absent(self, data: bytes) -> bool:
        """Puts the object unless there is one; waits while another such put of it is under way."""
        from botocore.exceptions import ClientError

        for pause_s in (*_CONFLICT_PAUSES_S, None):
            try:
                self._client.put_object(**self._place, Body=data, IfNoneMatch="*")
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
        """Uploads in parts; the object appears with the last call, or not at all. With `if_absent` returns whether
        there was none.
        """
        from botocore.exceptions import ClientError

        client, size, view = self._client, max(PART_BYTES, -(-len(data) // _MOST_PARTS)), memoryview(data)
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        upload = self._place | {"UploadId": client.create_multipart_upload(**self._place)["UploadId"]}

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
        """Turns what botocore raises into what a disk would."""
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
    """One client per server and process; it may be used by many threads. Importing botocore and reading its models
    takes half a second.
    """
    require("botocore", "s3://")
    import botocore.session
    from botocore.config import Config

    options = dict(parse_qsl(query))
    endpoint = options.get("endpoint_override")
    if endpoint and "://" not in endpoint:
        endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
    is_other = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    config = Config(
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=_READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        max_pool_connections=32,
        s3={"addressing_style": "path"} if is_other else {},
    )
    return botocore.session.get_session().create_client(
        "s3", region_name=options.get("region"), endpoint_url=endpoint, config=config
    )


@functools.lru_cache(maxsize=4096)
def _read_version(path: S3Path, etag: str) -> bytes:
    del etag
    return path._read()


def _abort(client: Any, upload: dict[str, str]) -> None:
    """Ends an upload, so that its parts take no room; where that fails, `listing(temporary=True)` still shows it."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        client.abort_multipart_upload(**upload)
    except (BotoCoreError, ClientError) as error:
        logger.warning("The upload of s3://%s/%s could not be ended: %s", upload["Bucket"], upload["Key"], error)


_PATIENCE = timedelta(seconds=60)
"""How long pyarrow tries again to reach Google; its own default is a quarter of an hour."""


@dataclass(frozen=True)
class CloudPath(ObjectPath):
    """A place that is read. What goes wrong is an `OSError`; a missing object is a `FileNotFoundError`."""

    @property
    @abstractmethod
    def filesystem(self) -> pafs.FileSystem:
        """What reads it, one per server and process."""

    @property
    def path(self) -> str:
        """Its path on that."""
        return f"{self.bucket}/{self.key}".rstrip("/")

    def exists(self) -> bool:
        """Whether there is such an object."""
        return bool(self.filesystem.get_file_info(self.path).type == pafs.FileType.File)

    def read_bytes(self) -> bytes:
        """The whole object."""
        with self.filesystem.open_input_file(self.path) as file:
            return bytes(file.read())

    def read_text(self) -> str:
        """The whole object as UTF-8."""
        return self.read_bytes().decode()

    def listing(self) -> dict[str, CloudPath]:
        """All objects below this prefix by what follows it, in its order; as versions they have what changes
        with them.
        """
        found = self.filesystem.get_file_info(pafs.FileSelector(self.path, recursive=True, allow_not_found=True))
        files = {info.path.removeprefix(f"{self.path}/"): info for info in found if info.type == pafs.FileType.File}
        return {
            name: replace(self / name, etag=f"{info.size}-{info.mtime_ns}", size=info.size)
            for name, info in sorted(files.items())
        }

    def folders(self) -> list[str]:
        """The prefixes directly below this one: pyarrow does not list those of Google, which are nothing of
        their own.
        """
        return list(dict.fromkeys(name.partition("/")[0] for name in self.listing() if "/" in name))


@dataclass(frozen=True)
class GooglePath(CloudPath):
    """A place on Google Cloud Storage: `gs://bucket/prefix`."""

    scheme: ClassVar[str] = "gs"
    options: ClassVar[Sequence[str]] = ("anonymous", "endpoint_override", "scheme")
    credentials: ClassVar[str] = "GOOGLE_APPLICATION_CREDENTIALS, or the account of the machine"

    @property
    def filesystem(self) -> pafs.FileSystem:
        """See `CloudPath`."""
        return _google(self.query)


@dataclass(frozen=True)
class AzurePath(CloudPath):
    """A place on Azure Blob Storage: `az://container/prefix?account_name=...`, or the account of
    `AZURE_STORAGE_ACCOUNT`.
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
        retry_time_limit=_PATIENCE,
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
