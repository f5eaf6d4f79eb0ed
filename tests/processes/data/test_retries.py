"""Read tasks retry transient errors of S3."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_app.data import reader as reader_module
from ray_app.data.dataset import open_dataset
from ray_app.data.probes import probe
from ray_app.data.reader import Reader, fetch_in_process, plan_all_reads
from ray_app.errors import DataError, StorageError
from ray_app.retry import Retry
from ray_app.storage.files import put_atomic
from ray_app.storage.object_stores import ObjectPath
from tests.support.s3_server import S3Server


@pytest.mark.parametrize("task_rows", [100, 2], ids=["whole row groups", "slices"])
def test_read_tasks_retry_transient_errors_of_s3(
    s3_folder: ObjectPath, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, task_rows: int
) -> None:
    monkeypatch.setattr(reader_module, "_RETRY", Retry(0.01, factor=1.0, attempts=4))
    stream = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": list(range(20))}), stream)
    put_atomic(s3_folder / "a.parquet", stream.getvalue().to_pybytes())
    dataset = open_dataset(str(s3_folder))
    reader = Reader(dataset.root, ["a"], dict, probe(dataset, ["a"], dict))
    specs = plan_all_reads(dataset.manifest, task_rows)
    read: Any = lambda: sum(table.num_rows for table in fetch_in_process(reader, specs))  # noqa: E731
    s3_server.reset()
    s3_server.fail(r"(GET|HEAD) .*a\.parquet", times=3, status=400)
    assert read() == 20
    assert len(s3_server.requests(r"(GET|HEAD) .*a\.parquet")) > 3
    s3_server.fail(r"(GET|HEAD) .*a\.parquet", times=-1, status=400)
    with pytest.raises(StorageError, match=r"a\.parquet"):
        read()
    s3_server.reset()
    s3_server.fail(r"(GET|HEAD) .*a\.parquet", times=-1, status=403)
    with pytest.raises(DataError, match="missing or not readable") as caught:
        read()
    assert not isinstance(caught.value, StorageError)
    assert len(s3_server.requests(r"(GET|HEAD) .*a\.parquet")) == 1
