"""Built-in tasks on texts, objects, pixels and images are bit-identical after a killed worker and a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ray_app.task.base import Task
from ray_app.task.detection import ObjectDetection
from ray_app.task.module import ModuleTask
from ray_app.testing import WorkerPool, read_trained_run, stream_windows
from ray_app.train.job import Hooks, Job
from tests.support.bit_identity import train_and_resume
from tests.support.local_world import make_job
from tests.support.pictures import table_data, write_pictures
from tests.support.shapes import write_shapes
from tests.support.shifting_world import KillOnce, train_shifting

pytestmark = pytest.mark.rest
LOSS = {"class_path": "torch.nn.CrossEntropyLoss"}
CROPS = [{"class_path": "torchvision.transforms.v2.RandomResizedCrop", "init_args": {"size": [16, 16]}}]
TaskSetup = tuple[str, Task, dict[str, Any]]


def texts(folder: Path) -> TaskSetup:
    random = np.random.default_rng(1)
    labels = random.integers(0, 2, 48)
    tokens = [random.integers(1 + 40 * label, 41 + 40 * label, random.integers(3, 30)).tolist() for label in labels]
    data = table_data(folder, {"tokens": pa.array(tokens, pa.list_(pa.int32())), "label": labels})
    bert = {
        "vocab_size": 100,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = {"class_path": "transformers.BertConfig", "init_args": {**bert, "num_labels": 2}}
    model = {"class_path": "transformers.BertForSequenceClassification", "init_args": {"config": config}}
    task = ModuleTask(model, {"input_ids": "tokens", "attention_mask": "tokens.mask"}, "label", LOSS, output="logits")
    return data["path"], task, {"data__by_length": "tokens", "train__precision": "bf16"}


def objects(folder: Path) -> TaskSetup:
    small = {
        "class_path": "tests.support.small_models.detector",
        "init_args": {"num_classes": 3, "min_size": 64, "max_size": 96},
    }
    flip = [{"class_path": "torchvision.transforms.v2.RandomHorizontalFlip"}]
    return write_shapes(folder, 48)["path"], ObjectDetection(small, transforms=flip), {}


def pixels(folder: Path) -> TaskSetup:
    model = {
        "class_path": "torch.nn.Conv2d",
        "init_args": {"in_channels": 3, "out_channels": 2, "kernel_size": 3, "padding": 1},
    }
    resize = [{"class_path": "torchvision.transforms.v2.Resize", "init_args": {"size": [16, 16]}}]
    task = ModuleTask(model, ["image"], "mask", LOSS, transforms=CROPS, evaluate_transforms=resize)
    return write_pictures(folder)["path"], task, {}


def images(folder: Path) -> TaskSetup:
    model = {"class_path": "tests.support.small_models.per_image", "init_args": {"outputs": 2}}
    resize = [{"class_path": "torchvision.transforms.v2.Resize", "init_args": {"size": [16, 16]}}]
    random = [*CROPS, {"class_path": "torchvision.transforms.v2.RandAugment"}]
    task = ModuleTask(model, ["image"], "large", LOSS, transforms=random, evaluate_transforms=resize)
    return write_pictures(folder)["path"], task, {}


@pytest.mark.parametrize("make_setup", [texts, objects, pixels, images])
def test_a_task_is_bit_identical_after_a_killed_worker_and_a_resume(
    worker_pool: WorkerPool, tmp_path: Path, make_setup: Callable[[Path], TaskSetup]
) -> None:
    path, task, fields = make_setup(tmp_path / "data")

    def job(name: str) -> Job:
        settings = {"train__epochs": 2, "checkpoint__every_epochs": None, "checkpoint__every_steps": 2}
        return make_job(tmp_path / name, Path(path), logical_workers=2, batch=16, task=task, **settings, **fields)

    first = train_and_resume(worker_pool, job("again"), (1, 2), (2, 5), resumed=1, windows=(stream_windows,))

    kill = KillOnce(tmp_path / "killed", step=4, rank=0)
    train_shifting(
        worker_pool, shrunk := job("lost"), [[0, 1], [1]], [], Hooks(after_step=kill), windows=stream_windows
    )
    assert kill.proof.exists()
    assert read_trained_run(shrunk).digests == first.digests
