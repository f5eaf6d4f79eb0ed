"""Small deliveries of data for retraining, and a configuration for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ray_app.data.arrays import to_column
from ray_app.retrain.options import RetrainSection

SECTION = RetrainSection(max_age_days=30, max_drop=0.02)
VALID: dict[str, Any] = {
    "task__class_path": "ray_app.task.tabular.TabularClassification",
    "data__path": "train",
    "data__eval_path": "eval",
    "tracking__registered_model": "m",
}


def write(path: Path, rows: int, seed: int = 0, shift: float = 0.0, nulls: int = 0, groups: int = 50) -> np.ndarray:
    """Writes a file with a column of numbers, one of arrays and labels of three classes; returns the numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    x, images = rng.normal(shift, 1, rows), rng.integers(0, 255, (rows, 2, 2)).astype(np.uint8)
    field, column = to_column("image", images)
    labels = np.arange(rows) % 3
    numbers = pa.array(x, mask=np.arange(rows) < nulls)
    schema = pa.schema([pa.field("x", pa.float64()), field, pa.field("label", pa.int64())])
    pq.write_table(
        pa.Table.from_arrays([numbers, column, pa.array(labels)], schema=schema), path, row_group_size=groups
    )
    return x
