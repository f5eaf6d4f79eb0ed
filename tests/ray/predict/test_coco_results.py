"""A detector trained on annotations of COCO predicts results of COCO, by the commands of a user."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from ray_app import ingest_files
from ray_app.cli.predict import main
from ray_app.cli.train import main as train

CATEGORIES = [{"id": 90, "name": "brush"}, {"id": 3, "name": "car"}]
SIDE = 64


def write_coco(folder: Path, images: int) -> Path:
    """Writes images with one bright square each, with ids that do not count from 1; returns the JSON file."""
    folder.mkdir()
    content: dict[str, Any] = {"images": [], "annotations": [], "categories": CATEGORIES}
    random = np.random.default_rng(0)
    for number in range(images):
        left, top = random.integers(0, SIDE - 24, 2).tolist()
        pixels = random.integers(0, 60, (SIDE, SIDE, 3), dtype=np.uint8)
        pixels[top : top + 24, left : left + 24, number % 2] = 255
        Image.fromarray(pixels).save(folder / f"{number}.png")
        image_id = 1000 - 7 * number
        content["images"].append({"id": image_id, "file_name": f"{number}.png", "width": SIDE, "height": SIDE})
        box = {"bbox": [left, top, 24, 24], "area": 576, "iscrowd": 0}
        category = CATEGORIES[number % 2]["id"]
        content["annotations"].append({"id": number + 1, "image_id": image_id, "category_id": category, **box})
    (folder / "instances.json").write_text(json.dumps(content))
    return folder / "instances.json"


@pytest.mark.rest
def test_predicted_objects_are_results_of_the_annotations(ray_cluster: None, tmp_path: Path) -> None:
    annotations = write_coco(tmp_path / "photos", 8)
    ingest_files(str(tmp_path / "data"), "coco", str(annotations), eval_fraction=0)
    detector = {
        "class_path": "tests.support.small_models.detector",
        "init_args": {"num_classes": 3, "min_size": SIDE, "max_size": SIDE, "box_score_thresh": 0.0},
    }
    arguments = [
        *("--task.class_path", "ray_app.task.detection.ObjectDetection"),
        *("--task.init_args", json.dumps({"detector": detector})),
        *("--data.path", str(tmp_path / "data"), "--data.global_batch_size", "4", "--train.epochs", "1"),
        *("--train.strategy", "single", "--run.storage_path", str(tmp_path / "runs"), "--run.name", "shapes"),
        *("--tracking.enabled", "false"),
    ]
    assert train(arguments) == 0
    out = tmp_path / "out"
    options = {"run": tmp_path / "runs" / "shapes", "data": tmp_path / "data", "out": out, "coco": annotations}
    assert main([*arguments, *(f"--predict.{name}={value}" for name, value in options.items())]) == 0
    table = pq.read_table(sorted(out.glob("part-*.parquet"))).to_pylist()
    expected = [
        (row["image_id"], (3, 90)[label - 1], score)
        for row in table
        for label, score in zip(row["labels"], row["scores"], strict=True)
    ]
    results = json.loads((out / "detections.json").read_text())
    assert expected, "the detector found no object, so the test shows nothing"
    assert [(one["image_id"], one["category_id"], one["score"]) for one in results] == expected
    truth = COCO(str(annotations))
    evaluation = COCOeval(truth, truth.loadRes(str(out / "detections.json")), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    assert len(evaluation.stats) == 12
