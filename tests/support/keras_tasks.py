"""Tasks of the programs in `keras_programs`, with images and labels as columns."""

from pathlib import Path
from typing import Any

import torch

from ray_app.data.dataset import open_dataset
from ray_app.task.keras import KerasTask

PROGRAMS = "tests.support.keras_programs."


def task_of(data: Path, function: str, **init_args: Any) -> KerasTask:
    return KerasTask(**{"model": PROGRAMS + function, "inputs": "image", "target": "label", **init_args}).prepare(
        open_dataset(str(data)).facts
    )


def build(task: KerasTask) -> Any:
    torch.manual_seed(3)
    return task.build_model()
