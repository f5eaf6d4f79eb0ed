"""Makes data/train and data/eval: positions on a wavy surface and the height there."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

random = np.random.default_rng(0)
for part, rows in (("train", 4000), ("eval", 1000)):
    x, y = random.uniform(-1, 1, (2, rows))
    table = pa.table({"x": x, "y": y, "height": np.sin(3 * x) * np.cos(2 * y)})
    Path("data", part).mkdir(parents=True, exist_ok=True)
    pq.write_table(table, f"data/{part}/part-0.parquet", row_group_size=500)
