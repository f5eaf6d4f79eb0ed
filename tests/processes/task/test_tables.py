"""A tabular task with nothing but its name is bit-identical on any number of workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ray_app import load_config
from ray_app.testing import WorkerPool, make_job
from tests.support.bit_identity import train_on_workers


def test_the_default_network_is_bit_identical_on_any_number_of_workers(worker_pool: WorkerPool, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    numbers = random.normal(size=150)
    columns = {
        "size": pa.array([None if i % 7 == 0 else 1000 * x for i, x in enumerate(numbers)]),
        "kind": pa.array([["small", "large", None][i % 3] for i in range(150)]),
        "target": pa.array(300_000 + 50_000 * numbers + 1_000 * random.normal(size=150)),
    }
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "data" / "part-0.parquet", row_group_size=40)
    config = load_config(
        task__class_path="ray_app.task.tabular.TabularRegression",
        data__path=str(tmp_path / "data"),
        scaling__max_workers=4,
        train__max_steps=7,
    )
    job = make_job(config, tmp_path / "run")
    train_on_workers(worker_pool, job, (1, 2, 3))
