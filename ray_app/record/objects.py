"""Names of objects in buckets, as URIs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self
from urllib.parse import parse_qsl, urlsplit

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
                f"A path must not hold credentials (got {cls.scheme}://***@{parts.netloc.rpartition('@')[2]}{parts.path}), as it is stored"
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
