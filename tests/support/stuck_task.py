"""A task that stalls in its read tasks."""

import threading
from pathlib import Path
from typing import Any

import ray

from ray_app.task.image import ImageClassification


class StuckTask(ImageClassification):
    """Digits; `decode` returns a few times in read tasks, and then stalls for ever.

    Args:
        folder: The folder in which each call of `decode` in a read task writes a file.
        calls: Number of calls in read tasks that return.
        pixel_max: See `ImageClassification`.
    """

    def __init__(self, folder: str, calls: int = 3, pixel_max: float = 16.0) -> None:
        super().__init__(pixel_max=pixel_max)
        self.folder, self.calls = folder, calls

    def decode(self, rows: Any) -> Any:
        """Decodes digits, or stalls."""
        if not ray.is_initialized() or ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
            return super().decode(rows)
        number = len(list(Path(self.folder).glob("call-*")))
        Path(self.folder, f"call-{number}").touch()
        if number >= self.calls:
            Path(self.folder, "stuck").touch()
            threading.Event().wait()
        return super().decode(rows)
