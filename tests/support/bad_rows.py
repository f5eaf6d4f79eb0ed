"""A task that cannot decode some rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ray_app.data.dataset import open_dataset
from ray_app.train.job import Job
from tests.support.disk_caches import TinyTexts
from tests.support.local_world import TinyImages, make_job

BAD_ROWS = (0, 13, 14, 50, 96)
"""The first and the last row, two adjacent rows, and the row of a row group that has no other."""


class BadRowImages(TinyImages):
    """A task that raises in `decode` for some rows, alone or with others."""

    def __init__(self, unreadable: tuple[int, ...] = BAD_ROWS, plain: bool = False) -> None:
        super().__init__()
        self.unreadable, self.plain = unreadable, plain

    def decode(self, rows: dict[str, Any]) -> dict[str, Any]:
        for row in rows["id"].tolist():
            if row in self.unreadable:
                raise ValueError(f"row {row} is unreadable")
        return super().decode(rows)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 5)) if self.plain else super().build_model()


class BadRowTexts(BadRowImages, TinyTexts):
    """A task that raises in `decode` for some rows, over rows of different lengths."""


def job_of(folder: Path, data: Path, task: BadRowImages, **fields: Any) -> Job:
    """Returns a job of the task; its probe row is decoded by a task without bad rows, as `prepare` does it."""
    probe_task = TinyTexts() if isinstance(task, TinyTexts) else TinyImages()
    job = make_job(
        folder,
        data,
        logical_workers=4,
        batch=12,
        task=probe_task,
        **{"data__on_bad_row": "skip", "train__epochs": 2, **fields},
    )
    return replace(job, task=task.prepare(open_dataset(str(data)).facts))
