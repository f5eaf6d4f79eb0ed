"""Refusals and warnings of a start before the first step: classes, columns, labels, micro-batches of one row, masks,
tasks, the time of reading and evaluation.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
from ray.exceptions import AuthenticationError

from ray_app.cli.ingest import main
from ray_app.cluster.ray_private import connection_errors
from ray_app.config.config import Config
from ray_app.config.import_paths import OptimizerSpec
from ray_app.config.sections import ClassSpec
from ray_app.data.dataset import open_dataset
from ray_app.data.reader import Reader, cut_reads, fetch_in_process, load_all
from ray_app.errors import BadRowError, ConfigError, DataError
from ray_app.plan.manifest import ColumnFacts, DataFacts, find_similar_names
from ray_app.plan.order import Segment
from ray_app.predict.predict import refuse_missing_values
from ray_app.preflight import dry_run as dry_run_module
from ray_app.preflight.checks import Check
from ray_app.preflight.context import CheckResult, PreflightContext, ReadingRates
from ray_app.preflight.prepare import Prepared, claim, prepare
from ray_app.task.classification import classification_metrics
from ray_app.task.module import ModuleTask
from ray_app.task.schema import named_classes, refuse_other_names, refuse_other_schema, schema_of
from tests.support.local_world import TinyImages, make_job, write_images

TABULAR = "ray_app.task.tabular.TabularClassification"
MODULE = "ray_app.task.module.ModuleTask"
CROSS_ENTROPY = {"class_path": "torch.nn.CrossEntropyLoss"}


def write(folder: Path, columns: dict[str, Any], classes: list[str] | None = None) -> Path:
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "part-0.parquet")
    if classes is not None:
        (folder / "_dataset.json").write_text(json.dumps({"classes": classes}))
    return folder


def write_labelled(folder: Path, labels: list[int], classes: list[str] | None = None, **columns: Any) -> Path:
    return write(folder, {"x": [i / len(labels) for i in range(len(labels))], "label": labels, **columns}, classes)


def config_of(data: Path, task: str, init_args: dict[str, Any], **fields: Any) -> Config:
    settings = {
        "data__path": str(data),
        "data__global_batch_size": 8,
        "train__strategy": "single",
        "tracking__enabled": False,
    }
    settings |= {"run__name": "run", "run__storage_path": str(data.parent / "runs")}
    return Config(task=ClassSpec(task, init_args), optimizer=OptimizerSpec("torch.optim.SGD", {"lr": 0.1})).replace(
        **(settings | fields)
    )


def prepare_tabular(data: Path, init_args: dict[str, Any] | None = None, **fields: Any) -> Prepared:
    return prepare(config_of(data, TABULAR, {"hidden": [2]} | (init_args or {}), **fields))


LABELS = [0, 1] * 8


@pytest.mark.parametrize("names", [["dog", "cat"], ["dog", "owl"]], ids=["another order", "some of the classes"])
def test_evaluation_data_is_numbered_by_the_names_of_the_training_data(tmp_path: Path, names: list[str]) -> None:
    trained = ["cat", "dog", "owl"]
    train = write_labelled(tmp_path / "a", [0, 1, 2, 1] * 4, trained)
    prepared = prepare_tabular(train, data__eval_path=str(write_labelled(tmp_path / "b", LABELS, names)))
    assert prepared.job.eval_source is not None
    labels = load_all(fetch_in_process, prepared.job.eval_source).arrays["label"]
    assert [trained[label] for label in labels] == [names[label] for label in LABELS]


def test_evaluation_data_with_another_class_is_refused(tmp_path: Path) -> None:
    train = write_labelled(tmp_path / "a", LABELS, ["cat", "dog"])
    evaluation = write_labelled(tmp_path / "b", LABELS, ["dog", "owl"])
    with pytest.raises(DataError, match=r"Class 0 is 'dog' in data\.eval_path .*b and 'cat' in data\.path .*a"):
        prepare_tabular(train, data__eval_path=str(evaluation))


def test_a_class_that_was_not_trained_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Class 2 is 'owl' in predict\.data p and none in the model"):
        refuse_other_names(["cat", "dog"], ["cat", "dog", "owl"], "predict.data p", "the model")


def test_the_refusal_of_other_classes_has_the_option_that_numbers_them_alike(tmp_path: Path) -> None:
    trained = ["no", "yes", "it's both"]
    with pytest.raises(DataError, match=r"or ingest predict\.data p again with the classes of the model") as caught:
        refuse_other_names(trained, ["yes"], "predict.data p", "the model")
    option = shlex.split(str(caught.value).partition("allow: ")[2].removesuffix("."))
    (tmp_path / "one.csv").write_text("x,answer\n1.5,yes\n")
    source = ["--source", "csv", "--input", str(tmp_path / "one.csv"), "--label", "answer"]
    assert main([*source, "--out", str(tmp_path / "one"), *option]) == 0
    refuse_other_names(trained, open_dataset(str(tmp_path / "one")).facts.classes, "predict.data p", "the model")
    # The rows of a class that was not trained on cannot be ingested with that option.
    for names, classes in ((trained, ["owl"]), ([str(n) for n in range(101)], ["1"])):
        with pytest.raises(DataError) as caught:
            refuse_other_names(names, classes, "predict.data p", "the model")
        assert "--classes" not in str(caught.value)


def test_class_names_that_equal_their_indices_do_not_count_as_names() -> None:
    assert named_classes(["0", "1"]) is None
    assert named_classes(["1", "0"]) == ["1", "0"]


def test_a_run_resumes_only_with_the_classes_of_its_first_start(tmp_path: Path) -> None:
    data = write_labelled(tmp_path / "a", LABELS, ["cat", "dog"])
    claim(prepare_tabular(data), 1)
    prepare_tabular(data)
    (data / "_dataset.json").write_text(json.dumps({"classes": ["dog", "cat"]}))
    with pytest.raises(DataError, match=r"Class 0 is 'dog' in .*a and 'cat' in the data that 'run' began with"):
        prepare_tabular(data)


def test_parameters_of_an_export_with_other_classes_are_refused(tmp_path: Path) -> None:
    data = write_labelled(tmp_path / "a", LABELS, ["cat", "dog"])
    model = prepare_tabular(data).job.task.build_model()
    export = tmp_path / "export"
    export.mkdir()
    safetensors.torch.save_file(model.state_dict(), export / "model.safetensors")
    for names in (["cat", "dog"], ["0", "1"]):
        (export / "package.json").write_text(json.dumps({"classes": names}))
        prepare_tabular(data, train__init_from=str(export / "model.safetensors"))
    (export / "package.json").write_text(json.dumps({"classes": ["dog", "cat"]}))
    with pytest.raises(DataError, match=r"Class 0 is 'cat' in data\.path .*a and 'dog' in train\.init_from"):
        prepare_tabular(data, train__init_from=str(export / "model.safetensors"))


@pytest.mark.parametrize(
    ("trained", "other", "fits"),
    [
        (ColumnFacts("number", "float64"), ColumnFacts("integer", "int64"), True),
        (ColumnFacts("integer", "int64"), ColumnFacts("number", "float64"), False),
        (ColumnFacts("number", "float64"), ColumnFacts("text"), False),
        (ColumnFacts("array", "|u1", (2, 2)), ColumnFacts("array", "<f4", (2, 2)), False),
        (ColumnFacts("array", "<f4", (2,)), ColumnFacts("array", "<i8", (2,)), True),
        (ColumnFacts("array", "<i8", (2,)), ColumnFacts("array", "|u1", (2,)), False),
        (ColumnFacts("list", "list<item: int64>"), ColumnFacts("list", "list<item: double>"), False),
        (ColumnFacts("list", "list<item: int64>"), ColumnFacts("list", "list<item: int32>"), True),
        (ColumnFacts("bytes"), ColumnFacts("text"), False),
    ],
)
def test_a_column_of_another_type_is_refused(trained: ColumnFacts, other: ColumnFacts, fits: bool) -> None:
    schema = schema_of(DataFacts("a", 1, {"x": trained}), ["x"])
    assert json.loads(json.dumps(schema)) == schema
    facts = DataFacts("b", 1, {"x": other})
    if fits:
        refuse_other_schema(schema, facts, "b", "a")
        return
    with pytest.raises(DataError, match=r"Column 'x' of b holds .*; in a it holds .* Both must have one type"):
        refuse_other_schema(schema, facts, "b", "a")


def test_a_pandas_index_is_not_a_feature(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [0.5] * 16, "label": LABELS}).sample(frac=1, random_state=0)
    for name, index in (("unnamed", None), ("named", "customer")):
        frame.rename_axis(index).to_parquet(tmp_path / f"{name}.parquet")
        prepared = prepare_tabular(tmp_path / f"{name}.parquet")
        assert prepared.job.task.columns() == ["x", "label"]
        assert (
            f"Columns not used: '{index or '__index_level_0__'}' (integer, which numbers the rows; name the column"
            in prepared.columns[1]
        )


@pytest.mark.parametrize("name", ["", "Unnamed: 0", "__index_level_0__"])
def test_an_unnamed_column_is_a_feature_only_if_configured(tmp_path: Path, name: str) -> None:
    data = write_labelled(tmp_path / "a", LABELS, **{name: list(range(16))})
    assert prepare_tabular(data).job.task.columns() == ["x", "label"]
    assert prepare_tabular(data, {"features": [name]}).job.task.columns() == [name, "label"]


def test_the_start_reports_unused_columns_with_a_reason(tmp_path: Path) -> None:
    price = [str(i) for i in range(16)]
    price[7] = "?"
    letters = [bytes([65 + i]) for i in range(16)]
    data = write_labelled(tmp_path / "a", LABELS, ["cat", "dog"], price=price, city=["Ulm"] * 16, scan=letters)
    used, unused = prepare_tabular(data).columns
    assert used == "Columns used: city, x; to predict label, 2 classes: cat, dog"
    assert (
        unused == "Columns not used: 'price' (text with 16 different values in 16 rows; categories can name it),"
        " 'scan' (bytes)"
    )


@pytest.mark.parametrize(("names", "similar"), [
    (["True", "true", "no"], [["True", "true"]]),
    (["yes", "yes ", " Yes"], [["yes", "yes ", " Yes"]]),
    (["caf\u00e9", "cafe\u0301"], [["caf\u00e9", "cafe\u0301"]]),
    (["new york", "newyork"], []),
])  # fmt: skip
def test_class_names_that_differ_in_case_or_blanks_are_similar(names: list[str], similar: list[list[str]]) -> None:
    assert find_similar_names(names) == similar


@pytest.mark.parametrize(("labels", "message"), [
    ([5, 3_000_000_000] * 8, r"from 5 to 3000000000, which makes 3000000001 classes: more than the 16 rows"),
    ([94110, 94720] * 8, r"from 94110 to 94720, which makes 94721 classes"),
    (np.array([5, 2**63] * 8, np.uint64), r"which makes \d+ classes: more than the 16 rows"),
    ([-1, 1] * 8, r"from -1 to 1; 2 classes allow 0 to 1"),
])  # fmt: skip
def test_labels_that_are_identifiers_are_refused(tmp_path: Path, labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare_tabular(write_labelled(tmp_path / "a", labels))


def test_the_configured_number_of_classes_is_accepted(tmp_path: Path) -> None:
    prepared = prepare_tabular(write_labelled(tmp_path / "a", [5, 90] * 8), {"num_classes": 100})
    assert ", 100 classes" in prepared.columns[0]


def test_more_classes_than_the_maximum_are_refused_even_with_more_rows(tmp_path: Path) -> None:
    data = write(tmp_path / "a", {"x": np.zeros(100_002, np.float32), "label": np.arange(100_002) % 100_001})
    with pytest.raises(DataError, match="which makes 100001 classes: more than 100000"):
        prepare_tabular(data)


def test_an_integer_target_of_squared_error_makes_no_classes(tmp_path: Path) -> None:
    arguments = {
        "model": {"class_path": "tests.support.odd_tasks.normalized", "init_args": {"norm": "batch"}},
        "target": "label",
    }
    arguments |= {"inputs": ["x"], "loss": {"class_path": "torch.nn.MSELoss"}}
    data = write(tmp_path / "a", {"x": [[0.5] * 4] * 16, "label": [10**9] * 16})
    assert ModuleTask(**arguments).prepare(open_dataset(str(data)).facts).classes == []


def test_many_classes_have_no_confusion_matrix() -> None:
    assert "confusion_matrix" in classification_metrics(2048)
    assert sorted(map(str, classification_metrics(2049))) == ["accuracy", "calibration_error"]


def prepare_normalized(folder: Path, norm: str, rows: int = 16, **fields: Any) -> Prepared:
    features = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(4.0 * rows, dtype=np.float32)), 4)
    data = write(folder, {"x": features, "label": [i % 2 for i in range(rows)]})
    model = {"class_path": "tests.support.odd_tasks.normalized", "init_args": {"norm": norm}}
    return prepare(
        config_of(data, MODULE, {"model": model, "inputs": ["x"], "target": "label", "loss": CROSS_ENTROPY}, **fields)
    )


def test_micro_batches_of_one_row_with_batch_norm_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"1 of the model is a BatchNorm1d, .* smallest valid"):
        prepare_normalized(tmp_path / "a", "batch", scaling__logical_workers=8)
    with pytest.raises(ConfigError, match=r"and 5 rows of data, some of the 4 logical workers .* have"):
        prepare_normalized(tmp_path / "b", "batch", rows=5, scaling__logical_workers=4)
    assert not prepare_normalized(tmp_path / "c", "batch", scaling__logical_workers=4).warnings
    assert not prepare_normalized(tmp_path / "d", "spatial", scaling__logical_workers=8).warnings


def test_a_last_micro_batch_of_one_row_is_warned_of(tmp_path: Path) -> None:
    [warning] = prepare_normalized(tmp_path / "a", "batch", rows=17, scaling__logical_workers=2).warnings
    assert warning.startswith(
        "In the last step of an epoch, 1 of 2 logical workers have one row, of which the batch normalization 1 cannot"
    )
    assert not prepare_normalized(
        tmp_path / "b", "batch", rows=17, scaling__logical_workers=2, data__last_batch="drop"
    ).warnings


def write_masks(folder: Path, values: list[int]) -> Path:
    masks = [np.full((4, 4), value, np.uint8) for value in values]
    shape = pa.list_(pa.list_(pa.uint8(), 4), 4)
    images = pa.array(
        [np.zeros((4, 4, 3), np.uint8).tolist()] * len(values), pa.list_(pa.list_(pa.list_(pa.uint8(), 3), 4), 4)
    )
    return write(folder, {"image": images, "mask": pa.array([mask.tolist() for mask in masks], shape)})


def prepare_segmentation(
    data: Path, loss: dict[str, Any], classes: int = 2, eval_path: Path | None = None, **init_args: Any
) -> Prepared:
    model = {"class_path": "tests.support.odd_tasks.pixels", "init_args": {"classes": classes}}
    arguments = {"model": model, "inputs": ["image"], "target": "mask", "loss": loss} | init_args
    return prepare(config_of(data, MODULE, arguments, data__eval_path=eval_path and str(eval_path)))


def test_a_mask_with_255_is_refused_with_its_values_and_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Row 0 of .*: the mask 'mask' has the values 255; .* 2 classes allow 0"):
        prepare_segmentation(write_masks(tmp_path / "a", [255] * 8), CROSS_ENTROPY)
    prepare_segmentation(write_masks(tmp_path / "b", [255] * 8), CROSS_ENTROPY | {"init_args": {"ignore_index": 255}})


def test_an_evaluation_mask_with_unknown_values_is_refused(tmp_path: Path) -> None:
    train, evaluation = write_masks(tmp_path / "a", [0, 1] * 4), write_masks(tmp_path / "b", [0, 255] * 4)
    with pytest.raises(ConfigError, match=r"data\.eval_path .*b, in the first rows: the mask 'mask' has the values"):
        prepare_segmentation(train, CROSS_ENTROPY, eval_path=evaluation)


def test_a_later_mask_with_other_values_is_a_bad_row(tmp_path: Path) -> None:
    prepared = prepare_segmentation(write_masks(tmp_path / "a", [0, 0, 255, 0]), CROSS_ENTROPY)
    reader = prepared.job.source.reader
    assert isinstance(reader, Reader)
    [spec] = cut_reads(prepared.job.plan.manifest, [Segment(0, 0, 4)], 4)
    with pytest.raises(BadRowError, match="row group 0, row 2: the mask 'mask' has the values 255"):
        list(reader.read(spec))


def test_a_mask_with_255_is_refused_for_a_binary_loss(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the mask 'mask' has the values 255; .* allow 0 to 1"):
        prepare_segmentation(
            write_masks(tmp_path / "a", [255] * 8), {"class_path": "torch.nn.BCEWithLogitsLoss"}, classes=1
        )


@pytest.mark.parametrize("loss", ["HiddenIgnoreIndex", "ModuloTargets"])
def test_a_user_defined_loss_may_accept_other_mask_values(tmp_path: Path, loss: str) -> None:
    prepare_segmentation(write_masks(tmp_path / "a", [255] * 8), {"class_path": f"tests.support.odd_tasks.{loss}"})


def test_a_binary_loss_ignores_no_value(tmp_path: Path) -> None:
    data = write(tmp_path / "a", {"x": [[0.5]] * 8, "y": [[-100.0]] * 8})
    model = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 1, "out_features": 1}}
    task = {"model": model, "inputs": ["x"], "target": "y", "loss": {"class_path": "torch.nn.BCEWithLogitsLoss"}}
    with pytest.raises(ConfigError, match=r"the target 'y' has the values -100; .* allow 0 to 1"):
        prepare(config_of(data, MODULE, task))


def test_a_task_with_its_own_training_loss_accepts_any_target(tmp_path: Path) -> None:
    model = {"class_path": "tests.support.odd_tasks.pixels", "init_args": {"classes": 2}}
    task = {"model": model, "inputs": ["image"], "target": "mask", "loss": CROSS_ENTROPY}
    prepare(config_of(write_masks(tmp_path / "a", [255] * 8), "tests.support.odd_tasks.CustomTrainingLoss", task))


@pytest.mark.parametrize("strategy", ["single", "ddp", "central_storage", "fsdp", "local_sgd", "parameter_server"])
def test_a_model_that_cannot_be_pickled_is_accepted(tmp_path: Path, strategy: str) -> None:
    model = {"class_path": "tests.support.odd_tasks.locked_pixels", "init_args": {"classes": 2}}
    task = {"model": model, "inputs": ["image"], "target": "mask", "loss": CROSS_ENTROPY}
    prepare(config_of(write_masks(tmp_path / "a", [0, 1] * 4), MODULE, task, train__strategy=strategy))


@pytest.mark.parametrize("strategy", ["single", "ddp", "parameter_server"])
@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("lock", "UnpicklableTask.resource"),
        ("generator", "UnpicklableTask.resource"),
        ("deep", "UnpicklableTask.resource['locks'][0]"),
    ],
)
def test_a_task_that_cannot_be_pickled_is_refused(tmp_path: Path, strategy: str, content: str, name: str) -> None:
    data = write(tmp_path / "a", {"x": [0.5] * 8, "y": [1.0] * 8})
    config = config_of(data, "tests.support.odd_tasks.UnpicklableTask", {"content": content}, train__strategy=strategy)
    with pytest.raises(ConfigError) as caught:
        prepare(config)
    assert str(caught.value).startswith(f"{name} of the task cannot be sent to other processes, because it is a ")
    prepare(config.replace(task={"class_path": config.task.class_path, "init_args": {"content": "nothing"}}))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (AuthenticationError("the token is missing"), "requires a token.*RAY_AUTH_MODE=token"),
        (OSError("AF_UNIX path length cannot exceed 107 bytes: /a/b"), "set RAY_TMPDIR to a short folder"),
        (ConnectionError("no head"), "does not answer: no head.*RAY_ADDRESS.*RAY_AUTH_MODE=token"),
        (ValueError("Bad address: 'X'.\n  1. Unset RAY_ADDRESS"), r"setting: Bad address: 'X'\. Check the address"),
        (OSError("no route"), "no route"),
    ],
)
def test_connection_errors_name_the_fix(error: Exception, message: str) -> None:
    kind = OSError if message == "no route" else ConfigError
    with pytest.raises(kind, match=message), connection_errors():
        raise error


def test_a_missing_value_in_prediction_data_is_named(tmp_path: Path) -> None:
    dataset = open_dataset(str(write(tmp_path / "a", {"x": [0.5, 1.0, None, 2.0]})))
    with pytest.raises(DataError, match=r"part-0\.parquet, row 2: column 'x' of predict\.data .* has no value"):
        refuse_missing_values(dataset, ["x"])


@pytest.mark.parametrize(("kept", "is_warned"), [(1, True), (2, False)])
def test_a_run_with_one_checkpoint_starts_with_a_warning(tmp_path: Path, kept: int, is_warned: bool) -> None:
    data = write_labelled(tmp_path / "data", [0, 1] * 8)
    prepared = prepare(config_of(data, TABULAR, {}, checkpoint__keep_last=kept))
    assert any(text.startswith("checkpoint.keep_last is 1") for text in prepared.warnings) == is_warned


def test_a_prepared_run_has_numbers_for_all_and_auto(tmp_path: Path) -> None:
    data = write_labelled(tmp_path / "data", [0, 1] * 8)
    config = config_of(data, TABULAR, {}, scaling__max_workers="all", scaling__gpus_per_worker="auto")
    scaling = prepare(config).job.config.scaling
    assert (scaling.max_workers, scaling.gpus_per_worker) == (1, 0)


@pytest.fixture
def dry_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the checks that run rows through the task, as they are made; none has passed before the test."""
    names, execute = list[str](), Check.execute

    def note(check: Check, context: PreflightContext) -> CheckResult | None:
        names.extend({check.name}.intersection(["one row", "metrics"]))
        return execute(check, context)

    monkeypatch.setattr(Check, "execute", note)
    monkeypatch.setattr("ray_app.preflight.prepare._passed", {})
    return names


def test_a_process_runs_rows_through_the_task_of_trials_once(tmp_path: Path, dry_runs: list[str]) -> None:
    data = write(tmp_path / "a", {"x": [[0.5]] * 16, "label": LABELS, "other_label": LABELS})
    model = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 1, "out_features": 2}}
    init_args = {"model": model, "inputs": "x", "target": "label", "loss": CROSS_ENTROPY}
    config = config_of(data, MODULE, init_args)
    first = prepare(config, 1).job.task
    other_rate = config.replace(optimizer__init_args={"lr": 0.01}, run__name="other", seed=1)
    second = prepare(other_rate, 1).job.task
    assert dry_runs == ["one row", "metrics"]
    assert isinstance(first, ModuleTask)
    assert isinstance(second, ModuleTask)
    assert second.target_range == first.target_range == [0, 1, -100]
    prepare(config.replace(task__init_args=init_args | {"target": "other_label"}), 1)
    assert dry_runs == ["one row", "metrics"] * 2
    # A run that is no trial makes all checks.
    prepare(config)
    assert dry_runs == ["one row", "metrics"] * 3


def test_a_refused_dry_run_of_a_trial_is_refused_again(tmp_path: Path, dry_runs: list[str]) -> None:
    model = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 7, "out_features": 2}}
    init_args = {"model": model, "inputs": "x", "target": "label", "loss": CROSS_ENTROPY}
    config = config_of(write(tmp_path / "a", {"x": [[0.5]] * 16, "label": LABELS}), MODULE, init_args)
    for _ in range(2):
        with pytest.raises(ConfigError, match="dry run with one row failed"):
            prepare(config, 1)
    assert dry_runs == ["one row"] * 2


def test_a_shortage_of_cpus_for_reading_is_warned_of() -> None:
    rates = ReadingRates(decode_s=0.0025, train_rows=3_000)
    assert rates.find_shortage(workers=1, cpus=8) == []
    [warning] = rates.find_shortage(workers=2, cpus=8)
    assert "about 6,000 rows per second" in warning
    assert "decode only about 3,200 (2.5 ms per row)" in warning
    assert "about 15 for reading" in warning


@pytest.mark.parametrize(
    ("fields", "rows", "times"),
    [
        ({}, 10_000, None),
        # 10 steps of 100 rows by 2 workers take 150 s, and an evaluation of 10,000 rows on one thread 500 s.
        ({"checkpoint__every_steps": 10}, 10_000, "3.3"),
        ({"checkpoint__every_steps": 10, "evaluate__num_cpus": 4}, 10_000, None),
        ({"checkpoint__every_steps": 10, "evaluate__where": "workers"}, 10_000, "1.7"),
        ({"checkpoint__every_steps": 10, "evaluate__where": "workers"}, 5_000, None),
        ({"checkpoint__every_steps": 100, "scaling__gpus_per_worker": 1}, 10_000, "16.7"),
        ({"checkpoint__every_steps": 100, "scaling__gpus_per_worker": 1, "evaluate__num_gpus": 1}, 10_000, None),
        # An evaluation of a few seconds.
        ({"checkpoint__every_steps": 1}, 500, None),
    ],
)
def test_an_evaluation_that_takes_longer_than_the_steps_between_checkpoints_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], rows: int, times: str | None
) -> None:
    data = write_images(tmp_path / "data", [[400]])
    shape = {"checkpoint__every_epochs": None, "train__epochs": 100, "data__eval_path": str(data)}
    job = make_job(tmp_path / "run", data, logical_workers=2, batch=100, task=TinyImages(), **(shape | fields))
    monkeypatch.setattr(dry_run_module, "seconds_per_row", lambda context, rows, evaluates: 0.05 if evaluates else 0.1)
    source = SimpleNamespace(manifest=SimpleNamespace(num_rows=rows))
    context: Any = SimpleNamespace(config=job.config, job=job, eval_rows={}, eval_source=source, rows={})
    warnings = dry_run_module.check_evaluation_time(context)
    assert [re.search(r"about ([\d.]+) times as long", warning)[1] for warning in warnings] == (
        [times] if times is not None else []
    )
