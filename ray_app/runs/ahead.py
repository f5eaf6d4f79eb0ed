"""Imports while a cluster starts, which the driver only waits for."""

from __future__ import annotations

import importlib
import threading
from contextlib import suppress

from ray_app.importing import without_gc


def import_ahead(module: str) -> None:
    """Imports in a thread what is needed as soon as the cluster is there.

    Who imports it before that is done waits for the rest, and so does the end of the process: an import that it cuts short can abort it.
    """

    def work() -> None:
        with suppress(Exception), without_gc():  # raised again where it is needed
            importlib.import_module(module)

    threading.Thread(target=work, name="imports").start()
