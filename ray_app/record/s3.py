"""A run directory on S3, or on what speaks its protocol: whole objects, conditional puts, multipart uploads that end on an error.

botocore is imported where it is needed, so that a run on local storage does not pay for it.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from urllib.parse import parse_qsl

from ray_app.config.extras import require
from ray_app.record.objects import ObjectPath

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

    `s3://bucket/prefix` has the query parameters `endpoint_override`, `scheme` and `region` as pyarrow knows them. What goes wrong is an
    `OSError`, as on a disk; a missing object is a `FileNotFoundError`. Reading a version that was listed a second time asks no server.
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
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.below, Delimiter="/")
            return [entry["Prefix"].rstrip("/").rpartition("/")[2] for page in pages for entry in page.get("CommonPrefixes", ())]

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
        """Uploads in parts; the object appears with the last call, or not at all. With `if_absent` returns whether there was none."""
        from botocore.exceptions import ClientError

        client, size, view = self._client, max(PART_BYTES, -(-len(data) // _MOST_PARTS)), memoryview(data)
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        upload = self._place | {"UploadId": client.create_multipart_upload(**self._place)["UploadId"]}

        def put_part(number: int) -> dict[str, Any]:
            answer = client.upload_part(**upload, PartNumber=number, Body=bytes(view[(number - 1) * size : number * size]))
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
        for page in self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=self.below):
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
    """One client per server and process; it may be used by many threads. Importing botocore and reading its models takes half a second."""
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
    return botocore.session.get_session().create_client("s3", region_name=options.get("region"), endpoint_url=endpoint, config=config)


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
