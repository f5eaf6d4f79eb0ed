"""Rare rows, which are not among the first training rows: longer rows, and values that only evaluation data have."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch import Tensor, nn

from ray_app import load_config
from ray_app.data import probes
from ray_app.data.arrays import to_column
from ray_app.data.dataset import open_dataset
from ray_app.data.parquet_files import DataFile
from ray_app.data.probes import find_longest_row
from ray_app.errors import ConfigError, DataError
from ray_app.preflight.prepare import prepare
from ray_app.task.base import Batch
from ray_app.task.language_model import CausalLanguageModel

ROWS, LONGEST = 1000, 40
ACCURACY = {"class_path": "torchmetrics.classification.BinaryAccuracy"}
CROSS_ENTROPY = {"class_path": "torch.nn.CrossEntropyLoss"}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}


def write(folder: Path, classes: int = 3, words: int = 50, long_at: int | None = None) -> str:
    """Writes texts of up to 17 tokens, one possibly longer, with images, numbers and classes, in two files of five
    row groups.
    """
    folder.mkdir()
    random = np.random.default_rng(0)
    tokens = [[words - 1, *range(1, 1 + n % 16)] for n in range(ROWS)]
    if long_at is not None:
        tokens[long_at] = [1] * LONGEST
    image, image_column = to_column("image", random.integers(0, 255, (ROWS, 8, 8)).astype(np.uint8))
    table = pa.table(
        {
            "tokens": pa.array(tokens, pa.list_(pa.int32())),
            "boxes": pa.array([[[0.0, 1.0]] * 50] * ROWS, pa.list_(pa.list_(pa.float32(), 2))),
            "x": random.random(ROWS),
            "label": np.arange(ROWS) * classes // ROWS,
        }
    ).append_column(image, image_column)
    for part in range(2):
        pq.write_table(table.slice(part * ROWS // 2, ROWS // 2), folder / f"{part}.parquet", row_group_size=100)
    return str(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("rare_rows") / "plain")


def module(model: dict[str, Any], inputs: Any, **init_args: Any) -> dict[str, Any]:
    arguments = {"model": model, "inputs": inputs, "target": "label", "loss": CROSS_ENTROPY, **init_args}
    return {"class_path": "ray_app.task.module.ModuleTask", "init_args": arguments}


def texts(positions: int = 32, **init_args: Any) -> dict[str, Any]:
    config = {
        "class_path": "transformers.BertConfig",
        "init_args": {**SMALL, "num_labels": 3, "max_position_embeddings": positions},
    }
    model = {"class_path": "transformers.BertForSequenceClassification", "init_args": {"config": config}}
    return module(model, {"input_ids": "tokens", "attention_mask": "tokens.mask"}, output="logits", **init_args)


def numbers(outputs: int, **init_args: Any) -> dict[str, Any]:
    model = {"class_path": "tests.support.untyped_models.NumericColumns", "init_args": {"width": 3, "outputs": outputs}}
    return module(model, ["x"], **init_args)


IMAGES = {"class_path": "ray_app.task.image.ImageClassification"}
TABLE = {"class_path": "ray_app.task.tabular.TabularClassification", "init_args": {"features": ["x"]}}


def start(task: dict[str, Any], path: str, eval_path: str, tmp_path: Path) -> None:
    storage = str(tmp_path / "runs")
    prepare(
        load_config(
            task=task, data__path=path, data__eval_path=eval_path, data__global_batch_size=16, run__storage_path=storage
        )
    )


def refusal_of(*arguments: Any) -> str:
    with pytest.raises((ConfigError, DataError)) as caught:
        start(*arguments)
    return str(caught.value)


# --- Longer rows.


@pytest.mark.rest
@pytest.mark.parametrize("long_at", [0, 511, ROWS - 1])
def test_a_row_longer_than_the_positions_of_the_model_is_refused(tmp_path: Path, plain: str, long_at: int) -> None:
    long = write(tmp_path / "long", long_at=long_at)
    start(texts(), plain, plain, tmp_path)
    reason = f"on rows of {LONGEST} numbers in 'tokens', but on rows of one number it can. A model has a limited"
    assert f"The model cannot be trained {reason}" in refusal_of(texts(), long, plain, tmp_path)
    message = refusal_of(texts(), plain, long, tmp_path)
    assert f"data.eval_path {long}: The model cannot be evaluated {reason}" in message
    start(texts(LONGEST), long, long, tmp_path)
    start(texts(max_length=32), long, long, tmp_path)


class Shifted(CausalLanguageModel):
    """Requires training mode and the field that `augment` adds."""

    def augment(self, batch: Batch, keys: Tensor) -> Batch:
        return {**batch, "shift": keys}

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        assert model.training
        assert "shift" in batch
        return self.loss(self.forward(model, batch), batch)


@pytest.mark.rest
@pytest.mark.parametrize("name", ["ray_app.task.language_model.CausalLanguageModel", f"{__name__}.Shifted"])
def test_the_longest_row_is_also_tried_with_a_language_model(tmp_path: Path, plain: str, name: str) -> None:
    config = {
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 32,
        "vocab_size": 50,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    spec = {"config": {"class_path": "transformers.GPT2Config", "init_args": config}}
    model = {"class_path": "transformers.AutoModelForCausalLM.from_config", "init_args": spec}
    task = {"class_path": name, "init_args": {"model": model}}
    start(task, plain, plain, tmp_path)
    long = write(tmp_path / "long", long_at=ROWS - 1)
    assert f"the longest row of data.path {long} ({LONGEST} numbers)" in refusal_of(task, long, plain, tmp_path)
    assert f"the longest row of data.eval_path {long} ({LONGEST} numbers)" in refusal_of(task, plain, long, tmp_path)
    more = write(tmp_path / "more", words=60)
    assert (
        f"data.eval_path {more}: Column 'tokens' has tokens up to 59, but the model knows 50, 0 to 49."
        in refusal_of(task, plain, more, tmp_path)
    )
    config["n_positions"] = LONGEST
    start(task, long, long, tmp_path)


def test_the_longest_row_is_the_one_with_the_longest_list_of_numbers(tmp_path: Path) -> None:
    dataset = open_dataset(write(tmp_path / "long", long_at=731))
    longest = find_longest_row(dataset, ["label", "tokens", "boxes"], 100)
    assert longest is not None
    assert (longest.path, longest.row_group, longest.first, longest.rows, longest.position) == (
        "1.parquet",
        2,
        31,
        1,
        731,
    )
    shorter = find_longest_row(dataset, ["tokens"], LONGEST - 1)
    assert shorter is not None
    assert shorter.position % 16 == 15
    assert find_longest_row(dataset, ["x", "label"], 100) is None


def test_the_search_for_the_longest_row_stops_after_a_second(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, opened = count(0, 0.25), list[int]()

    def open_counted(*arguments: Any) -> DataFile:
        opened.append(len(opened))
        return DataFile(*arguments)

    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    monkeypatch.setattr(probes, "DataFile", open_counted)
    assert find_longest_row(open_dataset(plain), ["tokens"], 100) is not None
    assert len(opened) == 5, "the limit of one second has passed after the fifth row group"


def test_a_row_group_read_after_the_time_limit_still_counts(plain: str) -> None:
    longest = find_longest_row(open_dataset(plain), ["tokens"], 100, within_s=-1)
    assert longest is not None
    assert longest.position % 16 == 15, "the result is the longest row of the row group"


def test_the_search_for_the_longest_row_reads_large_rows_in_small_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    random, long = np.random.default_rng(0), 70_000
    waves = [random.integers(0, 1 << 60, 50_000) for _ in range(60)]
    waves[40] = random.integers(0, 1 << 60, long)
    table = {
        "wave": pa.array(waves, pa.list_(pa.int64())),
        "other": pa.array([[1.0] * 100] * 60),
        "y": pa.array(range(60)),
    }
    pq.write_table(pa.table(table), tmp_path / "wave.parquet")
    ticks, compute_lengths = count(0, 0.2), probes.row_lengths
    batch_rows = list[int]()

    def record_rows(rows: pa.RecordBatch) -> Any:
        batch_rows.append(rows.num_rows)
        return compute_lengths(rows)

    monkeypatch.setattr(probes, "row_lengths", record_rows)
    dataset = open_dataset(str(tmp_path))
    assert find_longest_row(dataset, ["wave"], 1 << 16) is not None
    assert sum(batch_rows) == 60
    assert max(batch_rows) * 50_000 * 8 <= 5 << 20
    assert [record.message for record in caplog.records] == [
        f"A row of {long} numbers is not tried before the start, nor is any other row of more than 65536."
    ]
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    batch_rows.clear()
    assert find_longest_row(dataset, ["wave"], 1 << 17) is not None
    assert len(batch_rows) == 6
    batch_rows.clear()
    assert find_longest_row(dataset, ["other"], 1 << 17) is not None
    assert batch_rows == [60], "the batch size depends only on the columns that are read"


def test_the_search_for_the_longest_row_skips_unreadable_files(tmp_path: Path, plain: str) -> None:
    dataset = open_dataset(write(tmp_path / "damaged"))
    for file in Path(str(dataset.root)).iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    assert find_longest_row(dataset, ["tokens"], 100) is None


# --- Values that only the evaluation data have.


@pytest.mark.rest
@pytest.mark.parametrize(
    ("task", "message"),
    [
        (IMAGES, "Column 'label' of {path} has labels from 0 to 3; 3 classes allow 0 to 2. Correct the labels or set"),
        (TABLE, "Column 'label' of {path} has labels from 0 to 3; 3 classes allow 0 to 2. Correct the labels or set"),
        (numbers(3), "the loss and the model's 3 classes allow 0 to 2. Correct the column, or give the model an"),
    ],
    ids=["images", "table", "module"],
)
def test_a_class_that_only_the_evaluation_data_have_is_refused(
    task: dict[str, Any], message: str, plain: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "more", classes=4)
    start(task, plain, plain, tmp_path)
    assert message.format(path=path) in refusal_of(task, plain, path, tmp_path)


def test_a_class_unknown_to_the_metric_alone_is_refused(tmp_path: Path) -> None:
    two, three = write(tmp_path / "two", classes=2), write(tmp_path / "three", classes=3)
    task = numbers(1, loss={"class_path": "torch.nn.BCEWithLogitsLoss"}, metrics={"accuracy": ACCURACY})
    start(task, two, two, tmp_path)
    message = refusal_of(task, two, three, tmp_path)
    assert message.startswith(f"data.eval_path {three}, in the first rows: ")
    assert "the loss and the model's 2 classes allow 0 to 1. Correct the column" in message


def test_a_class_that_model_and_metrics_have_is_accepted_in_evaluation_data(plain: str, tmp_path: Path) -> None:
    start(numbers(4), plain, write(tmp_path / "more", classes=4), tmp_path)
    start({**TABLE, "init_args": {"features": ["x"], "num_classes": 4}}, plain, str(tmp_path / "more"), tmp_path)


def test_a_token_that_only_the_evaluation_data_have_is_refused(plain: str, tmp_path: Path) -> None:
    path = write(tmp_path / "more", words=60)
    assert (
        f"data.eval_path {path}: Column 'tokens' has values up to 59, but the model has no embedding for 59"
        in refusal_of(texts(), plain, path, tmp_path)
    )
