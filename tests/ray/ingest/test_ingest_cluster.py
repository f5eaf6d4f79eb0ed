"""Ingest in tasks of a Ray cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ray_app.data.parquet_files import FOOTERS_FILE, load_footers
from ray_app.errors import DataError
from ray_app.ingest import shuffle
from ray_app.ingest.ingest import IngestOptions, ingest, run_on_cluster

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
