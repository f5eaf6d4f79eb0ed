"""Ingest in tasks of a Ray cluster."""

import os
import threading
from pathlib import Path

import pyarrow as pa
import pytest
import ray.data

from ray_app import ingest_table
from ray_app.data.parquet_files import FOOTERS_FILE, load_footers
from ray_app.errors import DataError
from ray_app.ingest import shuffle
from ray_app.ingest.ingest import IngestOptions, ingest, run_on_cluster
from tests.support.ingest_inputs import read_columns

pytestmark = pytest.mark.usefixtures("ray_cluster")


def content(folder: Path) -> dict[str, object]:
    """Returns every file; of the stored footers all but the times at which the files were written."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: footers(path) if path.name == FOOTERS_FILE else path.read_bytes() for name, path in files.items()}


def footers(kept: Path) -> list[dict[str, object]]:
    stored = load_footers(kept.parent)
    assert stored is not None
    return stored.table.drop_columns("version").to_pylist()


def test_ingest_on_a_cluster_writes_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "BUCKET_BYTES", 200)
    (tmp_path / "in").mkdir()
    for i in range(5):
        (tmp_path / "in" / f"{i}.csv").write_text("a,y\n" + "".join(f"{j},{'uv'[j % 2]}\n" for j in range(10)))
    contents = []
    for out, run in (("here", None), ("cluster", run_on_cluster)):
        options = IngestOptions(
            "csv", str(tmp_path / out), str(tmp_path / "in"), label="y", split_bytes=1, eval_fraction=0.3
        )
        ingest(options, *([run] if run else []))
        contents.append(content(tmp_path / out))
    assert contents[0] == contents[1]
    assert len(contents[0]) > 8
    (tmp_path / "in" / "3.csv").write_text("a,y\n1,u\n2,\n")
    with pytest.raises(DataError, match="rows without a value"):
        ingest(
            IngestOptions("csv", str(tmp_path / "refused"), str(tmp_path / "in"), label="y", split_bytes=1),
            run_on_cluster,
        )
    assert not list(tmp_path.glob("refused*"))


def test_an_error_in_a_task_of_the_cluster_keeps_its_type() -> None:
    def process_of_even(number: int) -> int:
        if number % 2:
            raise DataError(f"{number} is odd")
        return os.getpid()

    with pytest.raises(DataError, match="1 is odd"):
        list(run_on_cluster(process_of_even, range(8)))
    assert os.getpid() not in list(run_on_cluster(process_of_even, [0, 2]))


@pytest.mark.rest
def test_a_data_set_of_ray_data_is_stored_in_its_order(tmp_path: Path) -> None:
    """Its blocks become ready in another order, since the first ones take longest."""

    def wait(batch: pa.Table) -> pa.Table:
        threading.Event().wait(0.3 if batch["x"][0].as_py() < 100 else 0)
        return batch

    rows = pa.table({"x": range(400), "kind": ["a", "b"] * 200})
    blocks = ray.data.from_arrow([rows.slice(first, 50) for first in range(0, 400, 50)])
    summary = ingest_table(str(tmp_path / "out"), blocks.map_batches(wait, batch_format="pyarrow"), label="kind")
    assert summary.parts[""].classes == ["a", "b"]
    stored = read_columns(tmp_path / "out")
    assert (stored["x"], stored["label"]) == (list(range(400)), [0, 1] * 200)
