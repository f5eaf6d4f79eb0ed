"""A small task for the rows of a table, with its model, and fields of two rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from ray_app.task.tabular import TabularClassification

FIELDS = {
    "features": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
    "label": np.array([0, 1]),
    "scale": np.array([2.0, 3.0], np.float32),
}


def tabular_task(kind: type[TabularClassification]) -> tuple[Any, nn.Module]:
    task = kind.__new__(kind)
    vars(task).update(label="label", features=["a"], hidden=[4], dropout=0.5, scale=1.0, inputs=3, num_classes=2)
    return task, task.build_model()
