"""The decoded rows that a trial of a study leaves to the next one in its process."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_app.data.dataset import open_dataset
from ray_app.data.reader import Decoded, RowSource
from ray_app.driver import single
from ray_app.models.inputs import open_source
from ray_app.task.tabular import TabularRegression


def test_rows_are_read_again_only_if_they_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "_rows", dict[bytes, Decoded]())

    def source(column: str) -> RowSource:
        # Each trial makes its own task.
        dataset = open_dataset(str(tmp_path))
        task = TabularRegression("y", [column], hidden=[2]).prepare(dataset.facts)
        return open_source(task, dataset, True, 1.0, None)

    pq.write_table(pa.table({name: [1.0, 2.0] for name in "abcy"}), tmp_path / "part.parquet")
    first = single.load_for_trials(source("a"))
    other = single.load_for_trials(source("b"))
    assert single.load_for_trials(source("a")) is first
    assert single.load_for_trials(source("b")) is other
    # The third one takes the memory of that which was used longest ago.
    single.load_for_trials(source("c"))
    assert single.load_for_trials(source("b")) is other
    assert single.load_for_trials(source("a")) is not first
