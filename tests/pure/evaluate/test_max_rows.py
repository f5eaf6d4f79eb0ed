"""`evaluate.max_rows`: an evaluation of a part of the data, the same rows each time, from all row groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_app.config.config import Config
from ray_app.config.import_paths import OptimizerSpec
from ray_app.config.sections import ClassSpec
from ray_app.data.reader import fetch_in_process, load_all
from ray_app.plan.manifest import Manifest
from ray_app.preflight.prepare import prepare

TABULAR = ClassSpec("ray_app.task.tabular.TabularRegression", {"label": "y", "features": ["x"], "standardize": False})


@given(st.lists(st.lists(st.integers(0, 50), max_size=4), max_size=4), st.integers(1, 300))
def test_a_part_has_an_equal_share_of_each_row_group(files: list[list[int]], max_rows: int) -> None:
    manifest = Manifest.from_files([(str(i), groups) for i, groups in enumerate(files)])
    part = manifest.thin_out(max_rows)
    assert part.num_rows == min(max_rows, manifest.num_rows)
    share = max_rows / max(1, manifest.num_rows)
    pairs = zip(part.rows, manifest.rows, strict=True)
    assert all(abs(rows - whole * share) < 1 or rows == whole for rows, whole in pairs)
    assert (part.paths, part.num_row_groups) == (manifest.paths, manifest.num_row_groups)


@pytest.mark.parametrize(
    ("max_rows", "expected"),
    [(8, [0, 1, 10, 11, 12, 13, 30, 31]), (1, [30]), (None, list(range(40))), (99, list(range(40)))],
)
def test_a_run_evaluates_on_the_first_rows_of_each_row_group(
    tmp_path: Path, max_rows: int | None, expected: list[int]
) -> None:
    (tmp_path / "data").mkdir()
    for name, start, stop in (("a", 0, 10), ("b", 10, 30), ("c", 30, 40)):
        values = np.arange(start, stop, dtype=np.float32)
        table = pa.table({"x": values, "y": values % 3})
        pq.write_table(table, tmp_path / "data" / f"{name}.parquet")
    fields: dict[str, Any] = {
        "data__path": str(tmp_path / "data"),
        "data__eval_path": str(tmp_path / "data"),
        "data__global_batch_size": 8,
        "evaluate__max_rows": max_rows,
        "run__name": "run",
        "run__storage_path": str(tmp_path / "runs"),
        "tracking__enabled": False,
    }
    config = Config(task=TABULAR, optimizer=OptimizerSpec("torch.optim.SGD", {"lr": 0.1})).replace(**fields)
    evaluation = prepare(config).evaluation_job
    assert evaluation is not None
    arrays = load_all(fetch_in_process, evaluation.data).arrays
    assert np.asarray(arrays["features"]).ravel().tolist() == expected
