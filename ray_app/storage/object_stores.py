"""Objects in buckets of S3, Google Cloud Storage and Azure Blob Storage, for runs, exports and data.

`ObjectPath` is a location in a bucket. All stores are reached through obstore, with time limits and retries. Every
failure is an `OSError`; its number says the kind, see `_classify`. botocore, which is imported at the first use of S3,
finds the credentials of profiles: static ones, those of a single sign-on, of an assumed role or of another program.
"""

from __future__ import annotations

import errno
import functools
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from ray_app.config.import_paths import require
from ray_app.errors import ConfigError

PART_BYTES = 16 << 20
"""Larger objects are read by concurrent requests of this size, and uploaded in parts of it."""
CONNECTIONS = 64
"""The number of simultaneous requests of a process to a bucket."""
_PARALLEL_READS = 16
_PARALLEL_PARTS = 4
_MAX_PARTS = 10_000
_CREDENTIALS_LIFE = timedelta(minutes=5)
"""After this time obstore asks botocore again, which renews credentials that expire."""
_CONNECT_TIMEOUT_S = 5
_TIMEOUT_S = 30
"""The time limit of a request, for each `PART_BYTES` that it carries."""
_ATTEMPTS = 3
_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Pauses before a conditional put is tried again."""
_CACHED_BYTES = 1 << 16
"""Larger objects are fetched by each read."""


def _endpoint(options: dict[str, str]) -> str | None:
    """Returns the URL of the server that the query of a URI names; None for the provider's own."""
    endpoint = options.get("endpoint_override")
    return endpoint if not endpoint or "://" in endpoint else f"{options.get('scheme', 'https')}://{endpoint}"


def _azure_config(options: dict[str, str]) -> dict[str, Any]:
    account = options.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT")
    if not account:
        raise OSError(
            errno.ENXIO, "az:// needs the name of the storage account, as ?account_name=... or AZURE_STORAGE_ACCOUNT"
        )
    key, token = os.environ.get("AZURE_STORAGE_KEY"), os.environ.get("AZURE_STORAGE_SAS_TOKEN")
    return {"account_name": account, "account_key": key, "sas_key": token, "endpoint": _endpoint(options)}


@dataclass(frozen=True)
class _ObjectStore:
    """An object store.

    Args:
        store: Name of its class in obstore.
        config: Returns the arguments of this class for the parameters of a URI.
        options: The parameters that a URI may have.
        credentials: Where credentials come from, for messages.
        container: What a URI begins with, for messages.
    """

    store: str
    config: Callable[[dict[str, str]], dict[str, Any]]
    options: Sequence[str]
    credentials: str
    container: str = "bucket"


_OBJECT_STORES = {
    "s3": _ObjectStore(
        "S3Store",
        lambda options: _s3_config(_endpoint(options), options.get("region"), "anonymous" in options),
        ("endpoint_override", "region", "scheme", "anonymous"),
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the role of the machine",
    ),
    "gs": _ObjectStore(
        "GCSStore",
        lambda options: {"base_url": _endpoint(options)},
        ("endpoint_override", "scheme", "anonymous"),
        "GOOGLE_APPLICATION_CREDENTIALS, the login of gcloud, or the account of the machine",
    ),
    "az": _ObjectStore(
        "AzureStore",
        _azure_config,
        ("account_name", "endpoint_override", "scheme", "anonymous"),
        "AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN, AZURE_CLIENT_ID with its secret or token, or the identity of the"
        " machine",
        container="container",
    ),
}


@functools.cache
def credential_variables() -> frozenset[str]:
    """Returns the environment variables that the stores take credentials from."""
    return frozenset(re.findall(r"[A-Z]+(?:_[A-Z]+)+", " ".join(kind.credentials for kind in _OBJECT_STORES.values())))


@dataclass(frozen=True)
class ObjectPath:
    """A location in a bucket, with those methods of `pathlib.Path` that a run directory needs.

    A small object that was listed is fetched once: a second read of the same version needs no request.

    Args:
        scheme: The scheme of the store: `s3`, `gs` or `az`.
        bucket: The bucket; Azure calls it a container.
        key: The object's key, or a prefix without its last slash.
        query: The query of the URI, which says how to connect to the server.
        etag: Version of the object, if a listing returned it.
        size: Size of the object in bytes, if a listing returned it.
        changed_s: Time of the last change, seconds since 1970, if a listing returned it.
    """

    scheme: str
    bucket: str
    key: str
    query: str = ""
    etag: str = field(default="", compare=False, repr=False)
    size: int | None = field(default=None, compare=False, repr=False)
    changed_s: int = field(default=0, compare=False, repr=False)

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Returns the location that a URI names: `SCHEME://bucket/prefix?option=...`.

        Raises:
            ConfigError: The scheme or an option is unknown, there is no bucket, or the URI contains credentials.
        """
        scheme = uri.partition("://")[0]
        if scheme not in _OBJECT_STORES:
            *others, last = [f"{name}://{kind.container}/prefix" for name, kind in _OBJECT_STORES.items()]
            raise ConfigError(
                f"{uri!r} uses {scheme}://; allowed are folders that all nodes see, and {', '.join(others)} and {last}."
            )
        kind, parts = _OBJECT_STORES[scheme], urlsplit(uri)
        if "@" in parts.netloc:
            raise ConfigError(
                f"A path must not hold credentials (got"
                f" {scheme}://***@{parts.netloc.rpartition('@')[2]}{parts.path}), as it is stored"
                f" with the run. Use {kind.credentials}, on every node."
            )
        unknown = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True) if name not in kind.options]
        key = parts.path.strip("/")
        is_key = not key or not {"", ".", ".."} & set(key.split("/"))
        if unknown or not parts.netloc or parts.fragment or not is_key:
            raise ConfigError(
                f"{uri!r} is not a location on {scheme}://{f', {unknown[0]!r} is unknown' if unknown else ''}. Write"
                f" {scheme}://{kind.container}/prefix, with ?{'=...&'.join(kind.options)}=... as needed."
            )
        return cls(scheme, parts.netloc, key, parts.query)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}" + (f"?{self.query}" if self.query else "")

    def __truediv__(self, name: str) -> Self:
        return self._at(f"{self._prefix}{name}")

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The prefix that contains this location."""
        return self._at(self.key.rpartition("/")[0])

    def is_relative_to(self, root: ObjectPath) -> bool:
        """Returns whether this location is `root` or below it."""
        return (self.scheme, self.bucket) == (root.scheme, root.bucket) and f"{self.key}/".startswith(root._prefix)

    def exists(self) -> bool:
        """Returns whether the object exists."""
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def stat(self) -> Self:
        """Returns this location with the version, size and time of the object."""
        with self._errors() as store:
            return self._listed(store.head(self.key))

    def read_bytes(self) -> bytes:
        """Returns the content of the object, which concurrent requests fetch if it is large."""
        is_small = self.size is not None and self.size <= _CACHED_BYTES
        return _read_version(self, self.etag) if self.etag and is_small else self._read()

    def read_text(self) -> str:
        """Returns the content of the object as UTF-8."""
        return self.read_bytes().decode()

    def read_ranges(self, ranges: Sequence[tuple[int, int]], etag: str = "") -> list[bytes]:
        """Returns the bytes of ranges of the object, which concurrent requests fetch.

        Args:
            ranges: First byte and end of each range.
            etag: Version of the object; if it is given, another one is an error.
        """
        parts = [
            (i, low, min(low + PART_BYTES, end))
            for i, (begin, end) in enumerate(ranges)
            for low in range(begin, end, PART_BYTES)
        ]

        def fetch(part: tuple[int, int, int]) -> bytes:
            options = {"range": part[1:]} | ({"if_match": etag} if etag else {})
            with self._errors() as store:
                return bytes(store.get(self.key, options=options).bytes())

        if len(parts) == 1 == len(ranges):
            # A thread for each of a hundred thousand footers would take longer than the footers.
            return [fetch(parts[0])]
        contents: list[list[bytes]] = [[] for _ in ranges]
        with ThreadPoolExecutor(max(1, min(len(parts), _PARALLEL_READS))) as pool:
            for (i, _, _), content in zip(parts, pool.map(fetch, parts), strict=True):
                contents[i].append(content)
        return [b"".join(pieces) for pieces in contents]

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes the object; whether it existed is not said by all stores."""
        del missing_ok
        with suppress(FileNotFoundError), self._errors() as store:
            store.delete(self.key)

    def put(self, data: bytes | mmap.mmap, if_absent: bool) -> bool:
        """Writes the object, see `storage.files.put_atomic`; returns whether it was written.

        A large object is uploaded in parts and appears with the last request. A writer that is killed leaves the parts,
        which a lifecycle rule of the bucket removes. With `if_absent` it is one request, for which S3 and Azure have a
        limit of 5 GB, and an existing object with the same content counts as written: if the answer to a put is lost,
        the repeated put finds the object of the first.
        """
        if if_absent:
            return self._put_absent(data) or (self.stat().size == len(data) and self._read() == data[:])
        part_bytes = max(PART_BYTES, -(-len(data) // _MAX_PARTS))
        with self._errors(min(len(data), part_bytes)) as store:
            store.put(self.key, data, chunk_size=part_bytes, max_concurrency=_PARALLEL_PARTS)
        return True

    def listing(self) -> dict[str, Self]:
        """Returns the objects below this prefix, see `storage.files.list_tree`.

        obstore lists objects by which consoles show folders without the slash at the end of their keys; only a request
        distinguishes them from empty files.
        """
        with self._errors() as store:
            listed = [self._listed(meta) for chunk in store.list(self.key or None) for meta in chunk]
        return {
            path.key.removeprefix(self._prefix): path
            for path in listed
            if path.key != self.key and (path.size or path.exists())
        }

    def entries(self) -> tuple[list[Self], list[str]]:
        """Returns the objects directly below this prefix, and the names of the folders there."""
        with self._errors() as store:
            answer = store.list_with_delimiter(self.key or None)
        objects = [self._listed(meta) for meta in answer["objects"] if meta["path"] != self.key]
        return objects, [prefix.rpartition("/")[2] for prefix in answer["common_prefixes"]]

    def is_folder(self) -> bool:
        """Returns whether an object lies below this prefix."""
        with self._errors() as store:
            return any(meta["path"] != self.key for chunk in store.list(self.key or None) for meta in chunk)

    def remove_tree(self) -> None:
        """Removes all objects below this prefix."""
        while keys := [path.key for path in self.listing().values()]:
            # Google and Azure raise this for an object that another process has removed meanwhile.
            with suppress(FileNotFoundError), self._errors() as store:
                store.delete(keys)
                break

    @property
    def _prefix(self) -> str:
        """The prefix of the keys below this location; empty if it is the whole bucket."""
        return f"{self.key}/".lstrip("/")

    @property
    def _kind(self) -> _ObjectStore:
        return _OBJECT_STORES[self.scheme]

    def _at(self, key: str) -> Self:
        return replace(self, key=key, etag="", size=None, changed_s=0)

    def _listed(self, meta: Any) -> Self:
        """Returns the location of an object that the store describes."""
        changed_s = int(meta["last_modified"].timestamp())
        return replace(self, key=meta["path"], etag=meta["e_tag"] or "", size=meta["size"], changed_s=changed_s)

    def _read(self) -> bytes:
        with self._errors() as store:
            answer = store.get(self.key)
            size, etag = answer.meta["size"], answer.meta["e_tag"] or ""
            if size <= PART_BYTES:
                return bytes(answer.bytes())
        return self.read_ranges([(0, size)], etag)[0]

    def _put_absent(self, data: bytes | mmap.mmap) -> bool:
        """Puts the object by one request unless it exists; returns whether it did.

        An answer that does not come does not say whether the object was written, so the put is tried again. S3 also
        refuses a put while another conditional one is running; then there is no object yet.
        """
        failures = 0
        for pause_s in (*_PAUSES_S, None):
            try:
                with self._errors(len(data)) as store:
                    store.put(self.key, data, mode="create", use_multipart=False)
                return True
            except FileExistsError:
                if self.exists():
                    return False
                if pause_s is None:
                    raise
            except TimeoutError:
                failures += 1
                if failures == _ATTEMPTS or pause_s is None:
                    raise
            time.sleep(pause_s)
        raise AssertionError

    @contextmanager
    def _errors(self, num_bytes: int = 0) -> Iterator[Any]:
        """Gives the store for a request with so many bytes, and turns its errors into those that a disk would raise."""
        from obstore.exceptions import BaseError

        raised: tuple[type[Exception], ...] = (OSError, ValueError, BaseError)
        if self.scheme == "s3":
            require("botocore", "s3://")
            from botocore.exceptions import BotoCoreError, ClientError

            raised += BotoCoreError, ClientError
        try:
            with _opening:
                store = open_store(self.scheme, self.bucket, self.query, _TIMEOUT_S * (1 + num_bytes // PART_BYTES))
            yield store
        except raised as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            number, reason = _classify(error, self._kind.credentials)
            if number == errno.ENOENT:
                raise FileNotFoundError(number, reason, str(self)) from error
            raise OSError(number, f"{self}: {reason}") from error


@functools.lru_cache(maxsize=4096)
def _read_version(path: ObjectPath, etag: str) -> bytes:
    del etag
    return path._read()


_opening = threading.Lock()


@functools.lru_cache(maxsize=256)
def open_store(scheme: str, bucket: str, query: str, timeout_s: int) -> Any:
    """Returns the store of a bucket, one per process; many threads may use it."""
    import obstore.store

    options = dict(parse_qsl(query))
    config = _OBJECT_STORES[scheme].config(options) | {"skip_signature": "anonymous" in options or None}
    is_http = (config.get("endpoint") or config.get("base_url") or "").startswith("http://")
    return getattr(obstore.store, _OBJECT_STORES[scheme].store)(
        bucket,
        client_options={
            "allow_http": is_http,
            "connect_timeout": timedelta(seconds=_CONNECT_TIMEOUT_S),
            "timeout": timedelta(seconds=timeout_s),
        },
        retry_config={"max_retries": _ATTEMPTS - 1, "retry_timeout": timedelta(seconds=_ATTEMPTS * timeout_s)},
        **{name: value for name, value in config.items() if value is not None},
    )


_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_DENIED = {"401", "403", "AccessDenied", "ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
_NO_CREDENTIALS = re.compile(
    r"token request|//169\.254\.169\.254|credential provider|locate credentials|config profile|SSO (token|session)",
    re.IGNORECASE,
)


def _classify(error: Exception, credentials: str) -> tuple[int, str]:
    """Returns the number of the system's error that an error of an object store is like, and what to say.

    This is the one place that distinguishes the errors of object stores: `ENOENT` there is no such object, `ENXIO` no
    such bucket, `EACCES` the credentials are missing or do not suffice, `EEXIST` the object exists, `ESTALE` it was
    changed meanwhile, `ETIMEDOUT` the server does not answer, `EIO` anything else. obstore has classes for some of
    them and for some requests only, so the status and the code in its text count.
    """
    from obstore import exceptions as kinds

    text, _, debug = str(error).partition("\n\nDebug source")
    status = re.search(r"status code: (\d{3})", text)
    code = re.search(r"<Code>(\w+)</Code>", text) or re.search(r"An error occurred \((\w+)\)", text)
    message = re.search(r"<Message>\s*([^<\n]*)", text) or re.search(r"operation(?: \(.*?\))?: (.*)", text)
    text = " ".join(text.split())
    answer = " ".join(match[1] for match in (status, code, message) if match)
    cause, codes = answer or text.rpartition(" - ")[2], {match[1] for match in (status, code) if match}
    if codes & _NO_BUCKET:
        result = errno.ENXIO, f"the bucket does not exist ({cause}). Create it, or correct the path."
    elif isinstance(error, kinds.AlreadyExistsError):
        result = errno.EEXIST, f"the object exists, or is being written ({cause})."
    elif isinstance(error, kinds.PreconditionError | kinds.NotModifiedError):
        result = errno.ESTALE, "the object changed while it was read."
    elif _NO_CREDENTIALS.search(text):
        result = errno.EACCES, f"no credentials were found or renewed ({text}). Set {credentials}."
    elif isinstance(error, kinds.PermissionDeniedError | kinds.UnauthenticatedError) or codes & _DENIED:
        result = errno.EACCES, f"access is refused ({cause}). Check the credentials ({credentials}) and their rights."
    elif isinstance(error, FileNotFoundError):
        result = errno.ENOENT, "No such object"
    elif "redirect without LOCATION" in text:
        result = errno.EIO, "the bucket is in another region. Set ?region=... or AWS_REGION."
    elif isinstance(error, kinds.InvalidPathError | ValueError):
        result = errno.EIO, f"{text}."
    elif answer:
        result = errno.EIO, f"the server refused or failed ({answer})."
    else:
        kind = "time-out" if "Timeout" in debug else "".join(re.findall(r'message: "([^"]+)"', debug)[-1:])
        advice = "Check the address and the network."
        result = errno.ETIMEDOUT, f"the server does not answer ({cause}{kind and f', {kind}'}). {advice}"
    return result


def _s3_config(endpoint: str | None, region: str | None, anonymous: bool) -> dict[str, Any]:
    """Returns the configuration of obstore's `S3Store`, with what the environment and the profile say.

    Raises:
        PermissionError: There are no credentials.
    """
    import botocore.session

    session = botocore.session.get_session()
    profile = session.get_scoped_config()
    environment = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    endpoint = endpoint or environment or profile.get("endpoint_url")
    region = region or os.environ.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
    config = {"region": region, "endpoint": endpoint}
    if anonymous:
        return config
    credentials = session.get_credentials()
    if credentials is None:
        raise PermissionError(
            errno.EACCES,
            "no credentials for s3:// were found. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, on"
            " every node, or give the machine a role; ?anonymous=true reads public data",
        )

    def provide() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LIFE,
        }

    return config | {"credential_provider": provide}
