"""The fetching process reads large row groups in slices; tasks of the cluster decode them."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_app.data.arrays import ArraySpec
from ray_app.data.bad_rows import Decode
from ray_app.data.dataset import Dataset, open_dataset
from ray_app.data.ray_tasks import fetch_ray
from ray_app.data.reader import POSITION, Reader, plan_all_reads
from ray_app.errors import BadRowError

pytestmark = pytest.mark.usefixtures("ray_cluster")


def decode(rows: dict[str, Any]) -> dict[str, Any]:
    return {"a": rows["a"], "pid": np.full(len(rows["a"]), os.getpid())}


def decode_but_77(rows: dict[str, Any]) -> dict[str, Any]:
    if 77 in rows["a"]:
        raise ValueError("77 is not liked")
    return decode(rows)


def read(dataset: Dataset, decode: Decode, task_rows: int) -> pa.Table:
    reader = Reader(dataset.root, ["a"], decode, {name: ArraySpec("<i8", ()) for name in ("a", "pid")})
    return pa.concat_tables(fetch_ray(reader, plan_all_reads(dataset.manifest, task_rows)))


def test_slices_are_decoded_in_tasks_and_arrive_in_order(tmp_path: Path) -> None:
    for i, rows in enumerate((500, 3, 300)):
        pq.write_table(pa.table({"a": np.arange(rows)}), tmp_path / f"{i}.parquet", row_group_size=rows)
    dataset = open_dataset(str(tmp_path))
    assert any(span.group_rows for spec in plan_all_reads(dataset.manifest, 20) for span in spec)
    table = read(dataset, decode, 20)
    columns = {name: np.frombuffer(table[name].combine_chunks().buffers()[1], "<i8") for name in ("a", "pid", POSITION)}
    assert columns["a"].tolist() == [*range(500), *range(3), *range(300)]
    assert columns[POSITION].tolist() == list(range(803))
    assert os.getpid() not in columns["pid"]
    with pytest.raises(BadRowError, match="77 is not liked"):
        read(dataset, decode_but_77, 20)
