"""A real Jupyter kernel, spoken to as a notebook speaks to it."""

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
    """One kernel; a context manager that ends it if it still lives.

    Args:
        files: For its files.
        here: The folder that it works in.
        env: More environment variables.
    """

    def __init__(self, files: Path, here: Path, **env: str) -> None:
        with kernel(files) as name:
            self._manager = KernelManager(kernel_name=name)
            self._manager.start_kernel(cwd=str(here), env=os.environ | env)
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=_READY_S)
        self._cell, self.said = "", ""

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
        self.said, self._cell = "", self._client.execute(code)

    def run(self, code: str, limit_s: float) -> str:
        """Executes a cell; returns what it showed as text."""
        self.start(code)
        return self.end(limit_s)

    def end(self, limit_s: float) -> str:
        """Waits for the end of the cell; returns what it showed as text."""
        self._listen(limit_s, lambda: False)
        return self.said

    def wait_until(self, is_there: Callable[[], Any], limit_s: float) -> None:
        """Waits until something has happened while the cell is executed."""
        assert self._listen(limit_s, is_there), f"the cell ended before that: {self.said}"

    def interrupt(self) -> None:
        """What the stop button does."""
        self._manager.interrupt_kernel()

    def shutdown(self) -> list[psutil.Process]:
        """What closing it does; returns the processes below it that still live then."""
        assert self._manager.provisioner is not None
        below = psutil.Process(self._manager.provisioner.pid).children(recursive=True)  # type: ignore[attr-defined]
        self._manager.shutdown_kernel()
        return psutil.wait_procs(below, timeout=30)[1]

    def _listen(self, limit_s: float, is_there: Callable[[], Any]) -> bool:
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            if is_there():
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
            self.said += content.get("text", "") + content.get("data", {}).get("text/plain", "")
        raise TimeoutError(f"not within {limit_s:g} s; the cell said: {self.said}")
