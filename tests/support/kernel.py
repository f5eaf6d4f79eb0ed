"""A real Jupyter kernel with the client of a notebook."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from types import TracebackType
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

from tests.support.notebooks import kernel

_READY_S, _LOOK_S = 120, 0.2


class Kernel:
    """A running kernel; the context manager ends it if it is still alive.

    Args:
        files: Folder for its connection file and settings.
        cwd: Its working directory.
        env: Additional environment variables.
    """

    def __init__(self, files: Path, cwd: Path, **env: str) -> None:
        with kernel(files) as name:
            self._manager = KernelManager(kernel_name=name)
            self._manager.start_kernel(cwd=str(cwd), env=os.environ | env)
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=_READY_S)
        self._cell, self.output = "", ""

    def __enter__(self) -> Kernel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.stop_channels()
        if self._manager.has_kernel:
            self._manager.shutdown_kernel(now=True)

    def start(self, code: str) -> None:
        """Starts a cell."""
        self.output, self._cell = "", self._client.execute(code)

    def run(self, code: str, limit_s: float) -> str:
        """Executes a cell; returns its output as text."""
        self.start(code)
        return self.end(limit_s)

    def end(self, limit_s: float) -> str:
        """Waits for the end of the cell; returns its output as text."""
        self._listen(limit_s, lambda: False)
        return self.output

    def wait_until(self, condition: Callable[[], Any], limit_s: float) -> None:
        """Waits until a condition holds while the cell is executed."""
        assert self._listen(limit_s, condition), f"the cell ended while the condition was still false: {self.output}"

    def interrupt(self) -> None:
        """Interrupts the cell, as the stop button does."""
        self._manager.interrupt_kernel()

    def shutdown(self) -> list[psutil.Process]:
        """Shuts the kernel down; returns its child processes that are still alive after 30 s."""
        assert self._manager.provisioner is not None
        children = psutil.Process(self._manager.provisioner.pid).children(recursive=True)  # type: ignore[attr-defined]
        self._manager.shutdown_kernel()
        return psutil.wait_procs(children, timeout=30)[1]

    def _listen(self, limit_s: float, condition: Callable[[], Any]) -> bool:
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            if condition():
                return True
            try:
                message = self._client.get_iopub_msg(timeout=_LOOK_S)
            except Empty:
                continue
            content = message["content"]
            if message["parent_header"].get("msg_id") != self._cell:
                continue
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                return False
            assert message["msg_type"] != "error", "\n".join(content["traceback"])
            self.output += content.get("text", "") + content.get("data", {}).get("text/plain", "")
        raise TimeoutError(f"not within {limit_s:g} s; the output of the cell is: {self.output}")
