"""Google Cloud Storage's XML interface on loopback, which obstore speaks: moto's S3 server with Google's conditions.

Google designed that interface after the one of S3: objects, listings and errors look alike. What differs is the header
of a conditional put, and the generation of an object in the answer. Emulators of Google's other interface
(gcp-storage-emulator) have neither its listing nor its deletion.
"""

from collections.abc import Callable, Iterable
from typing import Any

from ray_app.storage.files import to_location
from ray_app.storage.object_stores import ObjectPath
from tests.support.s3_server import S3Server, serve

BUCKET = "runs"
TOKEN = "test"
"""The expected value of GOOGLE_BEARER_TOKEN, without which obstore requests a token from the machine."""


class GoogleServer(S3Server):
    """The emulator's process."""

    module = "tests.support.gcs_server"

    def path(self, prefix: str) -> ObjectPath:
        """Returns a path on the server, which contains the server's address."""
        location = to_location(f"gs://{BUCKET}/{prefix}?endpoint_override={self.address}&scheme=http")
        assert isinstance(location, ObjectPath)
        return location


def as_google(application: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Returns an application of S3 that takes Google's requests."""

    def call(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None) == "0":
            environ["HTTP_IF_NONE_MATCH"] = "*"
        return application(
            environ,
            lambda status, headers, *more: start_response(status, [*headers, ("x-goog-generation", "1")], *more),
        )

    return call


if __name__ == "__main__":
    serve(as_google)
