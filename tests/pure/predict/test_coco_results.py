"""Detected objects are written as results of COCO, which pycocotools reads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from pycocotools.coco import COCO

from ray_app.errors import ConfigError
from ray_app.predict.actor import encode_part
from ray_app.predict.predict import PreparedPrediction, read_categories, write_coco_results
from ray_app.task.ragged import Ragged

ANNOTATIONS = {
    "images": [{"id": 7, "file_name": "a.png", "width": 40, "height": 30}, {"id": 9, "file_name": "b.png"}],
    "annotations": [],
    "categories": [{"id": 90, "name": "brush"}, {"id": 3, "name": "car"}],
}


def predicted(tmp_path: Path, **outputs: Ragged) -> PreparedPrediction:
    """Returns a finished prediction of two images in two parts."""
    for number, image_id in enumerate((9, 7)):
        some = {name: values[number : number + 1] for name, values in outputs.items()}
        carried = pa.table({"row_id": [str(image_id)], "image_id": [image_id]})
        (tmp_path / f"part-{number}.parquet").write_bytes(encode_part(carried, some, "x"))
    parts = {number: (f"part-{number}.parquet", []) for number in range(2)}
    return cast(Any, SimpleNamespace(out=tmp_path, job=SimpleNamespace(parts=parts)))


def objects(labels: list[list[int]]) -> dict[str, Ragged]:
    boxes = [[[1.5, 2, 5, 9.25]] * len(row) for row in labels]
    return {
        "boxes": Ragged.of(boxes, np.float32, row_shape=(4,)),
        "labels": Ragged.of(labels, np.int64),
        "scores": Ragged.of([[0.5 / (n + 1) for n in range(len(row))] for row in labels], np.float32),
    }


@pytest.fixture
def annotation_file(tmp_path: Path) -> str:
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(ANNOTATIONS))
    return str(path)


def test_results_have_the_ids_of_coco(tmp_path: Path, annotation_file: str) -> None:
    file = write_coco_results(predicted(tmp_path, **objects([[1, 2], []])), annotation_file)
    results = json.loads(Path(str(file)).read_text())
    assert results == [
        {"image_id": 9, "category_id": 3, "bbox": [1.5, 2.0, 3.5, 7.25], "score": 0.5},
        {"image_id": 9, "category_id": 90, "bbox": [1.5, 2.0, 3.5, 7.25], "score": 0.25},
    ]
    loaded = COCO(annotation_file).loadRes(str(file))
    assert [one["category_id"] for one in loaded.loadAnns(loaded.getAnnIds(imgIds=[9]))] == [3, 90]


def test_no_detected_object_is_an_empty_list(tmp_path: Path, annotation_file: str) -> None:
    file = write_coco_results(predicted(tmp_path, **objects([[], []])), annotation_file)
    assert json.loads(Path(str(file)).read_text()) == []


def test_predictions_that_are_no_objects_of_these_categories_are_refused(tmp_path: Path, annotation_file: str) -> None:
    with pytest.raises(ConfigError, match="predicts the label 3"):
        write_coco_results(predicted(tmp_path, **objects([[3], []])), annotation_file)
    with pytest.raises(ConfigError, match="does not detect objects"):
        write_coco_results(predicted(tmp_path, scores=Ragged.of([[1], [2]], np.float32)), annotation_file)
    with pytest.raises(ConfigError, match="is not a file with categories"):
        read_categories(str(tmp_path / "absent.json"))
