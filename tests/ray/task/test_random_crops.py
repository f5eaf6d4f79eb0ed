"""Rows that each epoch decodes differently, read by real workers: the parameters are the same as without Ray, and
after a resume.
"""

from pathlib import Path
from typing import Any

import pytest

from ray_app import load_config, run_training
from ray_app.config.config import Config
from tests.support.pictures import write_pictures

pytestmark = [pytest.mark.rest, pytest.mark.usefixtures("ray_cluster")]
V2 = "torchvision.transforms.v2."


def config_of(data: dict[str, Any], tmp_path: Path, name: str, **fields: Any) -> Config:
    return load_config(
        task={
            "class_path": "ray_app.task.module.ModuleTask",
            "init_args": {
                "model": {"class_path": "tests.support.small_models.per_image", "init_args": {"outputs": 2}},
                "inputs": ["image"],
                "target": "large",
                "loss": {"class_path": "torch.nn.CrossEntropyLoss"},
                "transforms": [{"class_path": V2 + "RandomResizedCrop", "init_args": {"size": [16, 16]}}],
                "evaluate_transforms": [{"class_path": V2 + "Resize", "init_args": {"size": [16, 16]}}],
            },
        },
        **{f"data__{key}": value for key, value in data.items()},
        run__storage_path=str(tmp_path / "runs"),
        run__name=name,
        scaling__logical_workers=2,
        tracking__enabled=False,
        **{"train__epochs": 2, **fields},
    )


def test_random_crops_are_the_same_on_any_workers_and_after_a_resume(tmp_path: Path) -> None:
    data = write_pictures(tmp_path / "pictures")
    alone = run_training(config_of(data, tmp_path, "alone", train__strategy="single"))
    both = run_training(config_of(data, tmp_path, "both", scaling__min_workers=2, scaling__max_workers=2))
    assert both.summary["params_digest"] == alone.summary["params_digest"]
    threads = run_training(config_of({**data, "reader_threads": 2}, tmp_path, "threads", scaling__max_workers=1))
    assert threads.summary["params_digest"] == alone.summary["params_digest"]
    run_training(config_of(data, tmp_path, "resumed", train__strategy="single", train__max_steps=4))
    resumed = run_training(config_of(data, tmp_path, "resumed", train__strategy="single"))
    assert resumed.summary["params_digest"] == alone.summary["params_digest"]
    one_epoch = run_training(config_of(data, tmp_path, "other", train__strategy="single", seed=1))
    assert one_epoch.summary["params_digest"] != alone.summary["params_digest"]
