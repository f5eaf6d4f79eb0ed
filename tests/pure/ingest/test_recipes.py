"""A recipe of the pages for data that no reader of ours reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ingest_inputs import example, read_columns, write_tfrecord
from tests.support.pages import blocks
from tests.support.paths import ROOT


def test_records_of_the_object_detection_api_become_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(*boxes: list[float], labels: list[int]) -> bytes:
        sides = {
            f"image/object/bbox/{side}": [box[i] for box in boxes]
            for i, side in enumerate(("xmin", "ymin", "xmax", "ymax"))
        }
        size = {"image/encoded": [b"image"], "image/width": [20], "image/height": [10]}
        return example(**size, **sides, **{"image/object/class/label": labels})

    two = record([0.0, 0.0, 0.5, 0.5], [0.25, 0.5, 1.0, 1.0], labels=[2, 1])
    write_tfrecord(tmp_path / "records" / "train-0.tfrecord", record(labels=[]), two)
    monkeypatch.chdir(tmp_path)
    [code] = [block.text for block in blocks(ROOT / "docs" / "detection.md") if "image/object/bbox" in block.text]
    exec(code, {})
    columns = read_columns(tmp_path / "datasets" / "records")
    assert dict(zip(map(len, columns["boxes"]), columns["boxes"], strict=True)) == {
        0: [],
        2: [[0, 0, 10, 5], [5, 5, 20, 10]],
    }
    assert sorted(columns["labels"]) == [[], [2, 1]]
    assert columns.keys() == {"row_id", "image", "boxes", "labels"}
