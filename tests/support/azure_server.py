"""An emulator of Azure Blob Storage on loopback: Azurite, a program of npm, that keeps everything in memory."""

import re
import shutil
import subprocess

import pyarrow.fs as pafs
import pytest

from ray_app.storage.object_stores import ObjectPath

PROGRAM = "azurite-blob"
CONTAINER, ACCOUNT = "data", "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key of every Azurite, from its documentation."""
_UNTIL_THE_PARENT_IS_GONE = '"$@" & cat; kill $!'
_OPTIONS = ("--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent", "--blobPort", "0")


class AzureServer:
    """The emulator's process, with a container. Its key is expected in AZURE_STORAGE_KEY."""

    def __init__(self) -> None:
        program = shutil.which(PROGRAM)
        if program is None:
            pytest.skip("no Azurite on PATH; `.ci/run` shows how to install it")
        command = ["sh", "-c", _UNTIL_THE_PARENT_IS_GONE, "sh", program, *_OPTIONS]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        listens = next(
            filter(None, (re.search(r"successfully listens on http://(\S+)", line) for line in self._process.stdout)),
            None,
        )
        assert listens is not None, "Azurite did not start"
        self.address = listens[1]
        addresses = {f"{part}_storage_authority": self.address for part in ("blob", "dfs")}
        schemes = {f"{part}_storage_scheme": "http" for part in ("blob", "dfs")}
        pafs.AzureFileSystem(ACCOUNT, account_key=KEY, **addresses, **schemes).create_dir(CONTAINER)

    def path(self, prefix: str) -> ObjectPath:
        """Returns a path on the server, which contains the server's address."""
        server = f"account_name={ACCOUNT}&endpoint_override={self.address}/{ACCOUNT}&scheme=http"
        return ObjectPath.parse(f"az://{CONTAINER}/{prefix}?{server}")

    def put(self, prefix: str, content: bytes) -> None:
        """Writes an object."""
        self.path(prefix).put(content, if_absent=False)

    def close(self) -> None:
        """Ends the process."""
        # This closes its input, and waits for the end of its output.
        self._process.communicate()
