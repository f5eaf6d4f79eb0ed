"""What a data set is before a row is read: which files count, what their footers say, which columns there are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_app.data.dataset.dataset import open_dataset
from ray_app.data.read.first import first_row
from ray_app.errors import BadRowError, DataError


def write(file: Path, **columns: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns or {"a": [1, 2, 3]}), file)


def test_what_spark_has_not_finished_is_no_data(tmp_path: Path) -> None:
    for name in ("part-0.parquet", "_day=1/part-0.parquet"):
        write(tmp_path / name)
    for name in ("_temporary/0/part-1.parquet", "_started.parquet", ".hidden/part-2.parquet", "a/_temporary/part-3.parquet"):
        write(tmp_path / name)
    (tmp_path / "_SUCCESS").touch()
    assert open_dataset(str(tmp_path)).manifest.paths == ("_day=1/part-0.parquet", "part-0.parquet")


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("_delta_log/00000000000000000000.json", "Delta Lake"),
        (".hoodie/hoodie.properties", "Apache Hudi"),
        ("metadata/00001-abc.metadata.json", "Apache Iceberg"),
        ("inner/_delta_log/00000000000000000000.json", "Delta Lake"),
    ],
)
def test_a_table_whose_log_drops_rows_is_refused(tmp_path: Path, log: str, kind: str) -> None:
    write(tmp_path / "inner" / "part-0.parquet")
    assert open_dataset(str(tmp_path)).manifest.num_rows == 3
    (tmp_path / log).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / log).touch()
    with pytest.raises(DataError, match=f"is a table of {kind} .*Write the rows that do as plain Parquet"):
        open_dataset(str(tmp_path))


def test_columns_of_half_precision_have_no_known_range(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", half=pa.array(np.array([1, 2], np.float16)), whole=[1, 2])
    columns = open_dataset(str(tmp_path)).facts.columns
    assert (columns["half"].dtype, columns["half"].minimum, columns["half"].maximum) == ("float16", None, None)
    assert (columns["whole"].minimum, columns["whole"].maximum) == (1.0, 2.0)


def test_a_column_that_is_not_there_is_no_bad_row(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", width=[1.0], label=[1])
    dataset = open_dataset(str(tmp_path))
    with pytest.raises(
        DataError, match=r"no column 'widht', which the task reads .*; its columns are label, width; did you mean 'width'\?"
    ) as found:
        first_row(dataset, ["label", "widht"], dict)
    assert not isinstance(found.value, BadRowError)
