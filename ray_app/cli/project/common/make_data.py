"""Makes data/train and data/eval: positions on a wavy surface and the height there."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def write_data(folder: Path, train_rows: int = 4000, eval_rows: int = 1000) -> None:
    """Writes the Parquet files of both parts to a folder."""
    random = np.random.default_rng(0)
    for part, rows in (("train", train_rows), ("eval", eval_rows)):
        x, y = random.uniform(-1, 1, (2, rows))
        table = pa.table({"x": x, "y": y, "height": np.sin(3 * x) * np.cos(2 * y)})
        (folder / part).mkdir(parents=True, exist_ok=True)
        pq.write_table(table, folder / part / "part-0.parquet", row_group_size=500)


if __name__ == "__main__":
    write_data(Path("data"))
