"""An emulator of Google Cloud Storage on loopback; as a script it serves until its parent is gone. pyarrow holds
Python's lock while it reads, so it is a process of its own.
"""

from __future__ import annotations

import socket
import subprocess
import sys

from ray_app.storage.object_stores import GooglePath
from tests.support.places import ROOT

BUCKET = "data"


class GoogleServer:
    """The emulator's process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.gcs_server"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = f"127.0.0.1:{int(self._process.stdout.readline())}"

    def path(self, prefix: str) -> GooglePath:
        """A place on the server, which carries the server's address."""
        return GooglePath.parse(f"gs://{BUCKET}/{prefix}?anonymous=true&endpoint_override={self.address}&scheme=http")

    def put(self, prefix: str, content: bytes) -> None:
        """Writes an object."""
        place = self.path(prefix)
        with place.filesystem.open_output_stream(place.path) as stream:
            stream.write(content)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Serves on a free port, which it prints."""
    from gcp_storage_emulator.server import create_server

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    server.start()
    print(port, flush=True)
    sys.stdin.read()  # ends with the parent
    server.stop()


if __name__ == "__main__":
    main()
