"""Tasks without a class: a configuration alone trains a model, bit-identically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from ray_app import check_task, load_config
from ray_app.config.config import Config
from ray_app.errors import ConfigError, DataError
from ray_app.preflight.prepare import prepare
from tests.support.paths import ROOT
from tests.support.pictures import table_data, write_pictures
from tests.support.task_checks import all_ok, levels

V2 = "torchvision.transforms.v2."


@pytest.fixture
def pictures(tmp_path: Path) -> dict[str, Any]:
    return write_pictures(tmp_path / "pictures")


def config_of(data: dict[str, Any], tmp_path: Path, **init_args: Any) -> Config:
    return load_config(
        task={"class_path": "ray_app.task.module.ModuleTask", "init_args": init_args},
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001}},
        **{f"data__{name}": value for name, value in data.items()},
        run__storage_path=str(tmp_path / "runs"),
        scaling__max_workers=4,
        train__epochs=2,
    )


def assert_trains(config: Config, ignored_topic: str = "") -> None:
    """Asserts that all checks pass: one worker equals four, a resume, evaluation and export; see `check_task`."""
    check = check_task(config)
    assert levels(check, ignored_topic) == all_ok(ignored_topic), check


RESIZE = [{"class_path": V2 + "Resize", "init_args": {"size": [16, 16]}}]
RANDOM = [
    {"class_path": V2 + "RandomResizedCrop", "init_args": {"size": [16, 16], "scale": [0.5, 1.0]}},
    {"class_path": V2 + "RandomHorizontalFlip"},
]

TO_FLOAT = {
    "class_path": V2 + "ToDtype",
    "init_args": {"dtype": {"class_path": "tests.support.small_models.float32_dtype"}, "scale": True},
}


@pytest.mark.rest
def test_a_configuration_trains_a_classifier_with_random_augmentations(
    pictures: dict[str, str], tmp_path: Path
) -> None:
    config = config_of(
        pictures,
        tmp_path,
        model={"class_path": "tests.support.small_models.per_image", "init_args": {"outputs": 2}},
        inputs=["image"],
        target="large",
        loss={"class_path": "torch.nn.CrossEntropyLoss", "init_args": {"label_smoothing": 0.1}},
        metrics={
            "accuracy": {
                "class_path": "torchmetrics.classification.MulticlassAccuracy",
                "init_args": {"num_classes": 2},
            }
        },
        transforms=[*RANDOM, {"class_path": V2 + "RandAugment"}],
        evaluate_transforms=RESIZE,
        mean=[0.5],
        std=[0.25],
        best_metric="accuracy",
        best_mode="max",
    )
    assert_trains(config)


@pytest.mark.rest
def test_the_configuration_of_the_page_segments_images(pictures: dict[str, Any], tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "conf" / "segmentation.yaml").read_text())
    assert_trains(config_of(pictures, tmp_path, **config["task"]["init_args"]))


@pytest.mark.rest
def test_a_configuration_trains_a_regression_on_images(pictures: dict[str, str], tmp_path: Path) -> None:
    config = config_of(
        pictures,
        tmp_path,
        model={"class_path": "tests.support.small_models.per_image", "init_args": {"outputs": 1}},
        inputs=["image"],
        target="area",
        loss={"class_path": "torch.nn.HuberLoss"},
        metrics={"error": {"class_path": "torchmetrics.MeanAbsoluteError"}},
        evaluate_transforms=RESIZE,
    )
    assert_trains(config)


@pytest.mark.rest
def test_a_configuration_trains_a_transformer_on_texts(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    labels = random.integers(0, 2, 64)
    tokens = [random.integers(1 + 40 * label, 41 + 40 * label, random.integers(3, 30)).tolist() for label in labels]
    data = table_data(tmp_path / "texts", {"tokens": pa.array(tokens, pa.list_(pa.int32())), "label": labels})
    bert = {
        "vocab_size": 100,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = config_of(
        {**data, "by_length": "tokens"},
        tmp_path,
        model={
            "class_path": "transformers.BertForSequenceClassification",
            "init_args": {"config": {"class_path": "transformers.BertConfig", "init_args": {**bert, "num_labels": 2}}},
        },
        inputs={"input_ids": "tokens", "attention_mask": "tokens.mask"},
        target="label",
        output="logits",
        loss={"class_path": "torch.nn.CrossEntropyLoss"},
        metrics={
            "accuracy": {
                "class_path": "torchmetrics.classification.MulticlassAccuracy",
                "init_args": {"num_classes": 2},
            }
        },
        pad_to=8,
    )
    assert_trains(config)


@pytest.mark.rest
def test_the_check_decodes_its_rows_as_training_does(pictures: dict[str, str], tmp_path: Path) -> None:
    config = config_of(
        pictures,
        tmp_path,
        model={"class_path": "tests.support.small_models.per_image", "init_args": {"outputs": 2}},
        inputs=["image"],
        target="large",
        loss={"class_path": "torch.nn.CrossEntropyLoss"},
        transforms=[*RESIZE, {"class_path": "tests.support.small_models.FlipEveryThird"}],
        evaluate_transforms=RESIZE,
    )
    findings = {finding.topic: (finding.level, finding.text) for finding in check_task(config).findings}
    failed = {topic for topic, (level, _) in findings.items() if level == "failed"}
    assert failed & {"training", "workers"}, "the steps of the check did not decode rows as training does"
    level, text = findings["randomness"]
    assert level == "failed"
    assert text.startswith("decode_training returns another result if it is called again with the same rows, keys")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": {"class_path": "torchvision.models.resnet81"}}, "torchvision.models has no 'resnet81'. Did you"),
        ({"model": {"class_path": "torch.nn.Linear", "init_args": {"inputs": 3}}}, "torch.nn.Linear cannot be created"),
        ({"model": {"class_path": "builtins.dict"}}, "makes a dict; it must make an nn.Module"),
        ({"inputs": ["picture"]}, "has no column 'picture'"),
        ({"inputs": []}, "inputs is empty"),
        ({"evaluate_transforms": []}, "give them one size"),
        ({"loss": {"class_path": "torch.nn.CrossEntropyLoss", "arguments": {}}}, "has arguments next to class_path"),
        (
            {"transforms": [{"class_path": V2 + "RandomResizedCrop", "init_args": {"size": [24, 24]}}]},
            "ModuleTask decodes 'image' of a training row to uint8 of shape (3, 24, 24), but of an evaluation row to"
            " uint8 of shape"
            " (3, 16, 16); both must be the same in every epoch. Let task.init_args.transforms and evaluate_transforms"
            " return the same size",
        ),
        (
            {"transforms": [*RANDOM, {"class_path": V2 + "Normalize", "init_args": {"mean": [0.5], "std": [0.5]}}]},
            "A training row cannot be decoded: TypeError: Input tensor should be a float tensor. Got torch.uint8.",
        ),
        ({"transforms": [*RANDOM, TO_FLOAT]}, "make float32 of the image 'image'; leave ToDtype out, the"),
        (
            {"transforms": [*RESIZE, TO_FLOAT], "evaluate_transforms": [*RESIZE, TO_FLOAT]},
            "make float32 of the image 'image'; leave",
        ),
        ({"transforms": [{"class_path": V2 + "RandomHorizontalFlip"}]}, "of a training row to uint8 of shape (3, "),
    ],
)
def test_invalid_arguments_are_refused_with_a_remedy(
    changed: dict[str, Any], message: str, pictures: dict[str, str], tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {
        "model": {"class_path": "tests.support.small_models.per_image", "init_args": {"outputs": 2}},
        "inputs": ["image"],
        "target": "large",
        "loss": {"class_path": "torch.nn.CrossEntropyLoss"},
        "evaluate_transforms": RESIZE,
    }
    with pytest.raises((ConfigError, DataError)) as caught:
        prepare(config_of(pictures, tmp_path, **(arguments | changed)))
    assert message in str(caught.value)
