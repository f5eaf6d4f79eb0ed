"""Data on Google Cloud Storage and Azure Blob Storage: read through pyarrow, never written."""

from __future__ import annotations

import functools
import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import ClassVar
from urllib.parse import parse_qsl

import pyarrow.fs as pafs

from ray_app.record.objects import ObjectPath

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
        """All objects below this prefix by what follows it, in its order; as versions they have what changes with them."""
        found = self.filesystem.get_file_info(pafs.FileSelector(self.path, recursive=True, allow_not_found=True))
        files = {info.path.removeprefix(f"{self.path}/"): info for info in found if info.type == pafs.FileType.File}
        return {name: replace(self / name, etag=f"{info.size}-{info.mtime_ns}", size=info.size) for name, info in sorted(files.items())}

    def folders(self) -> list[str]:
        """The prefixes directly below this one: pyarrow does not list those of Google, which are nothing of their own."""
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
    """A place on Azure Blob Storage: `az://container/prefix?account_name=...`, or the account of `AZURE_STORAGE_ACCOUNT`."""

    scheme: ClassVar[str] = "az"
    options: ClassVar[Sequence[str]] = (
        "account_name",
        "blob_storage_authority",
        "blob_storage_scheme",
        "dfs_storage_authority",
        "dfs_storage_scheme",
    )
    credentials: ClassVar[str] = "AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN, or an identity that Azure's default credential finds"

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
        account, account_key=os.environ.get("AZURE_STORAGE_KEY"), sas_token=os.environ.get("AZURE_STORAGE_SAS_TOKEN"), **options
    )
