"""Tasks that a configuration alone describes: configurations that work, and those refused before the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from ray_app import load_config
from ray_app.errors import ConfigError, DataError
from ray_app.preflight.prepare import prepare
from ray_app.task.fields import convert_column, to_model_types
from ray_app.task.ragged import Ragged
from ray_app.train.job import Job
from tests.support.pictures import table_data

TASKS, UNTYPED = "ray_app.task.", "tests.support.untyped_models."
MSE = {"class_path": "torch.nn.MSELoss"}
NET = {"class_path": UNTYPED + "NumericColumns", "init_args": {"width": 3}}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return table_data(
        tmp_path_factory.mktemp("configured") / "numbers", {"x": random.random(64), "y": random.random(64)}
    )


def module(**init_args: Any) -> dict[str, Any]:
    arguments = {"model": NET, "inputs": ["x"], "target": "y", "loss": MSE} | init_args
    return {"class_path": TASKS + "module.ModuleTask", "init_args": arguments}


def lightning(**init_args: Any) -> dict[str, Any]:
    arguments = {
        "module": {**NET, "class_path": UNTYPED + "LightningStyle"},
        "batch": ["x", "y"],
        "target": "y",
    } | init_args
    return {"class_path": TASKS + "lightning.LightningTask", "init_args": arguments}


@pytest.mark.parametrize(
    "task",
    [
        module(),
        module(model={**NET, "class_path": UNTYPED + "numbers"}),
        module(loss={"class_path": UNTYPED + "ScaledLoss", "init_args": {"scale": 2.0}}),
        lightning(),
        {"class_path": UNTYPED + "Untyped", "init_args": {"width": 3}},
    ],
    ids=["class", "function", "loss", "lightning", "task"],
)
def test_arguments_need_no_type_hints(task: dict[str, Any], numbers: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump({"task": task, "data": numbers, "run": {"storage_path": str(tmp_path / "runs")}}))
    prepare(load_config(file))


TM = "torchmetrics."
MEASURED: dict[str, Any] = {
    "error": {"class_path": TM + "MeanAbsoluteError"},
    "r2": {"class_path": TM + "R2Score"},
    "pairs": {
        "class_path": TM + "MetricCollection",
        "init_args": {"metrics": {"mae": {"class_path": TM + "MeanAbsoluteError"}}},
    },
}


def prepared(task: dict[str, Any], data: dict[str, Any], tmp_path: Path, **fields: Any) -> Job:
    named = {f"data__{name}": value for name, value in data.items()}
    return prepare(load_config(task=task, run__storage_path=str(tmp_path / "runs"), **named, **fields)).job


def refusal_of(task: dict[str, Any], data: dict[str, Any], tmp_path: Path, **fields: Any) -> str:
    with pytest.raises((ConfigError, DataError)) as caught:
        prepared(task, data, tmp_path, **fields)
    assert not (tmp_path / "runs").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ({}, ("loss", "min")),
        ({"best_metric": "r2"}, ("r2", "max")),
        pytest.param({"best_metric": "error"}, ("error", "min"), marks=pytest.mark.rest),
    ],
)
def test_the_best_mode_follows_from_the_metric(
    metric: dict[str, str], mode: tuple[str, str], numbers: dict[str, Any], tmp_path: Path
) -> None:
    job = prepared(module(metrics=MEASURED, **metric), numbers, tmp_path)
    assert (job.best_metric, job.best_mode) == mode
    best = {"evaluate__metric": mode[0]} if metric else {}
    again = prepared(module(metrics=MEASURED, best_metric="r2"), numbers, tmp_path, **best)
    assert (again.best_metric, again.best_mode) == (mode if metric else ("r2", "max"))


@pytest.mark.parametrize(
    ("task", "fields", "message"),
    [
        (module(best_mode="maximum"), {}, "ModuleTask got best_mode = maximum; it must be "),
        (
            module(best_metric="acc", best_mode="max"),
            {},
            "best_metric of ModuleTask is 'acc'; the task's single-valued metrics",
        ),
        (module(best_metric="acc"), {}, "task.init_args.best_metric is 'acc', but no setting defines whether"),
        (module(best_metric="mae"), {}, "The metrics are loss, error, pairs, r2. Set task.init_args.best_mode to"),
        (module(), {"evaluate__metric": "mae"}, "evaluate.metric is 'mae', but no setting defines whether"),
        (module(), {"evaluate__metric": "acc", "evaluate__mode": "max"}, "evaluate.metric is 'acc'; the task's"),
        (lightning(best_metric="accuracy"), {}, "best_metric is 'accuracy', but no setting defines whether"),
    ],
)
def test_a_best_metric_must_exist_and_have_a_mode(
    task: dict[str, Any], fields: dict[str, Any], message: str, numbers: dict[str, Any], tmp_path: Path
) -> None:
    if task["class_path"].endswith("ModuleTask"):
        task = {**task, "init_args": {**task["init_args"], "metrics": MEASURED}}
    assert message in refusal_of(task, numbers, tmp_path, **fields)


BCE = {"class_path": "torch.nn.BCEWithLogitsLoss"}
BINARY = {"class_path": TM + "classification.BinaryAccuracy"}
TAGGED = {"class_path": TM + "classification.MultilabelAccuracy", "init_args": {"num_labels": 3}}


def outputs(count: int) -> dict[str, Any]:
    return {"class_path": UNTYPED + "NumericColumns", "init_args": {"width": 3, "outputs": count}}


def bert(**config: Any) -> dict[str, Any]:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    arguments = {"vocab_size": 200, "num_labels": 4} | config
    return {
        "class_path": "transformers.BertForSequenceClassification",
        "init_args": {"config": {"class_path": "transformers.BertConfig", "init_args": small | arguments}},
    }


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Columns of classes, tags and texts; the largest numbers are not in the first row."""
    random, rows = np.random.default_rng(0), 64
    tags = random.integers(0, 2, (rows, 3))
    columns = {
        "x": random.random(rows),
        "binary": random.integers(0, 2, rows),
        "label": np.arange(rows) * 4 // rows,
        "tags": pa.array(tags.tolist(), pa.list_(pa.int64(), 3)),
        "wished": pa.array((tags > 0).tolist(), pa.list_(pa.bool_(), 3)),
        "point": pa.array(random.random((rows, 2)).tolist(), pa.list_(pa.float64(), 2)),
        "tokens": pa.array([list(range(1, 2 + n % 40)) for n in range(rows - 1)] + [[199]], pa.list_(pa.int32())),
    }
    return table_data(tmp_path_factory.mktemp("configured") / "classes", columns)


TEXTS: dict[str, Any] = {
    "inputs": {"input_ids": "tokens", "attention_mask": "tokens.mask"},
    "target": "label",
    "output": "logits",
    "loss": {"class_path": "torch.nn.CrossEntropyLoss"},
}


@pytest.mark.parametrize(
    "task",
    [
        module(target="binary", loss=BCE, metrics={"accuracy": BINARY}, best_metric="accuracy"),
        module(target="binary", loss={**BCE, "init_args": {"pos_weight": [2]}}),
        module(model=outputs(3), target="tags", loss=BCE, metrics={"accuracy": TAGGED}),
        module(model=outputs(3), target="wished", loss={**BCE, "init_args": {"pos_weight": [1, 2, 3]}}),
        module(model=outputs(2), target="point"),
        module(
            model={"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 1}},
            inputs=["point"],
            target="x",
        ),
        module(model=outputs(4), target="label", loss={**TEXTS["loss"], "init_args": {"weight": [1, 2, 3, 4]}}),
        module(model=bert(), **TEXTS),
    ],
)
def test_binary_multilabel_and_fixed_size_list_targets_are_accepted(
    task: dict[str, Any], classes: dict[str, Any], tmp_path: Path
) -> None:
    settings = vars(prepared(task, classes, tmp_path).task)
    assert json.loads(json.dumps(settings)) == settings, "an exported package stores the settings as JSON"


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (module(model=outputs(2), target="label", loss=TEXTS["loss"]), "Column 'label' has values from 0 to 3, but"),
        (module(model=bert(num_labels=2), **TEXTS), "Column 'label' has values from 0 to 3, but there is no"),
        (module(model=bert(vocab_size=100), **TEXTS), "Column 'tokens' has values up to 199, but the model has no"),
        (module(model=bert(), **TEXTS, pad_with=300), "values up to 199 and is padded with 300, but the model has"),
        (
            module(model=bert(max_position_embeddings=8), **TEXTS),
            "The model cannot be trained on rows of 40 numbers in 'tokens'",
        ),
        (module(model=outputs(2), target="x"), "outputs have the shape (rows, 2), but the target has (rows)"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(
    task: dict[str, Any], message: str, classes: dict[str, Any], tmp_path: Path
) -> None:
    assert message in refusal_of(task, classes, tmp_path)


def test_max_length_reduces_the_positions_that_a_model_needs(classes: dict[str, Any], tmp_path: Path) -> None:
    prepared(module(model=bert(max_position_embeddings=8), **TEXTS, max_length=8), classes, tmp_path)


def test_an_argument_without_a_type_hint_is_required_and_may_be_null() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(task={"class_path": UNTYPED + "Untyped"}, data__path="data")
    assert str(caught.value) == (
        f"The configuration is refused: {UNTYPED}Untyped needs width, which is missing; set it in task.init_args."
    )
    config = load_config(task=module(model={**NET, "init_args": {"width": None}}), data__path="data")
    assert config.task.init_args["model"]["init_args"] == {"width": None}


@pytest.mark.parametrize(
    ("stored", "converted"),
    [
        (np.int16, np.int64),
        (np.uint8, np.int64),
        (np.uint32, np.int64),
        (np.bool_, np.int64),
        (np.int32, np.int32),
        (np.int64, np.int64),
        (np.float64, np.float32),
        (np.float32, np.float32),
        (np.float16, np.float32),
    ],
)
def test_list_columns_convert_to_types_that_layers_accept(stored: Any, converted: Any) -> None:
    lists = convert_column(Ragged.of([[1, 0], [1]], stored), "list")
    assert isinstance(lists, Ragged)
    assert lists.values.dtype == converted
    assert lists.values.tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="a list does not hold numbers"):
        convert_column([[1], [2]], "list")


@pytest.mark.parametrize(
    "decode",
    [lambda values: convert_column(values, "list" if isinstance(values, Ragged) else "integer"), to_model_types],
)
def test_integers_above_the_range_of_int64_are_refused(decode: Any) -> None:
    for large in (2**63, 2**64 - 1):
        for values in (np.array([1, large], np.uint64), Ragged.of([[1], [large]], np.uint64)):
            with pytest.raises(ValueError, match=f"{large} is above"):
                decode(values)
    for values in (np.array([1, 2**63 - 1], np.uint64), Ragged.of([[1], [2**63 - 1]], np.uint64)):
        decoded = decode(values)
        assert (decoded.values if isinstance(decoded, Ragged) else decoded).tolist() == [1, 2**63 - 1]
