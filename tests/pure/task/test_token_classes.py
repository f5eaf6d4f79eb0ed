"""One value per token of a list: losses, metrics and predictions leave out the padding of rows."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from ray_app.data.arrays import spec_of_values, to_column
from ray_app.data.dataset import open_dataset
from ray_app.data.probes import probe
from ray_app.data.reader import Reader, RowSource, fetch_in_process, load_all
from ray_app.driver.result import Result
from ray_app.errors import DataError
from ray_app.models.inputs import WithoutTargets
from ray_app.predict.actor import PredictActor, encode_part
from ray_app.runlog.paths import RunPaths
from ray_app.task.losses import Losses, sum_losses
from ray_app.task.metrics import combine, score
from ray_app.task.module import ModuleTask
from ray_app.task.ragged import Arrays, Ragged, concat_fields, to_batch
from ray_app.task.whole_batches import BatchTask
from tests.support.pictures import table_data

CROSS_ENTROPY = {"class_path": "torch.nn.CrossEntropyLoss"}
TOKENS = [[4, 1, 5], [7], [], [3, 3, 9, 8, 2], [6, 2]]


class OfToken(nn.Module):
    """Scores each token by itself; the shape is (rows, tokens, outputs) or (rows, outputs, tokens)."""

    def __init__(self, outputs: int = 3, last: bool = True) -> None:
        super().__init__()
        self.scores = nn.Embedding.from_pretrained(
            torch.randn(100, outputs, generator=torch.Generator().manual_seed(outputs))
        )
        self.last = last

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the scores."""
        scores: Tensor = self.scores(tokens)
        return scores if self.last else scores.movedim(2, 1)


def tagging_task(classes_last: bool = True, kind: str = "list", **init_args: Any) -> ModuleTask:
    arguments = {
        "model": {"class_path": f"{__name__}.OfToken"},
        "inputs": ["tokens"],
        "target": "tags",
        "loss": CROSS_ENTROPY,
    } | init_args
    task = ModuleTask(**arguments, classes_last=classes_last)
    task.kinds = {"tokens": "list", "tags": kind}
    return task


def ragged_of(rows: list[list[int]]) -> Ragged:
    return Ragged.of(rows, np.int64)


def rows_of_ragged(values: Any) -> list[Any]:
    assert isinstance(values, Ragged)
    return [values.row(i).tolist() for i in range(len(values))]


WITHOUT_TAGS: Arrays = WithoutTargets(tagging_task())({"tokens": ragged_of(TOKENS)})


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    ("task", "model", "name"),
    [
        (tagging_task(), OfToken(), "predicted_index"),
        (tagging_task(pad_to=4), OfToken(), "predicted_index"),
        (tagging_task(False), OfToken(3, last=False), "predicted"),
        (tagging_task(False), OfToken(1), "predicted"),
    ],
)
def test_predictions_of_tokens_are_as_long_as_their_rows(
    task: ModuleTask, model: OfToken, name: str, size: int
) -> None:
    rows = task.decode({"tokens": ragged_of(TOKENS), "tags": np.zeros(5, np.int64)})
    batches = [to_batch(rows, slice(low, low + size)) for low in range(0, 5, size)]
    predictions = concat_fields([task.predictions(task.forward(model, batch), batch)[name] for batch in batches])
    scores = [[model.scores.weight[token] for token in row] for row in TOKENS]
    expected: list[Any] = [[int(token_scores.argmax()) for token_scores in row] for row in scores]
    if name == "predicted":
        expected = [
            [token_scores.tolist() if len(token_scores) > 1 else token_scores.item() for token_scores in row]
            for row in scores
        ]
    assert rows_of_ragged(predictions) == expected


def test_a_part_has_one_prediction_per_token_for_every_batch_size() -> None:
    task = tagging_task()
    actor = PredictActor.__new__(PredictActor)
    actor._device, actor._predict = torch.device("cpu"), lambda batch: task.forward(OfToken(), batch)
    fields = {name: spec_of_values(values) for name, values in WITHOUT_TAGS.items()}
    columns = {name: to_column(name, values)[1] for name, values in WITHOUT_TAGS.items()}
    parts = []
    for size in (1, 2, 5):
        actor._job = SimpleNamespace(fields=fields, batch_size=size, model=SimpleNamespace(task=task))
        parts.append(encode_part(pa.table({"position": range(5)}), actor._outputs(pa.table(columns), 0), "x"))
    assert parts[0] == parts[1] == parts[2]
    predicted = pq.read_table(pa.BufferReader(parts[0]))["predicted_index"].to_pylist()
    assert [len(row) for row in predicted] == [len(row) for row in TOKENS]


def test_a_result_predicts_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Result, "load_model", lambda self, checkpoint: OfToken())
    evaluate = SimpleNamespace(batch_size=2)
    job = SimpleNamespace(config=SimpleNamespace(evaluate=evaluate), paths=RunPaths(Path("run")))
    monkeypatch.setattr(Result, "_job", job)
    predictions = Result(Path("run"), {}, tagging_task()).predict({"tokens": ragged_of(TOKENS)})
    assert [len(row) for row in rows_of_ragged(predictions["predicted_index"])] == [len(row) for row in TOKENS]


class Halved(OfToken):
    """Returns the scores of every second token."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the scores."""
        return super().forward(tokens)[:, ::2]


def test_outputs_that_match_no_padded_list_are_refused() -> None:
    batch = to_batch(WITHOUT_TAGS)
    with pytest.raises(DataError, match=r"the shape \(5, 3\), but the padded lists of the rows are 'tokens' to 5;"):
        tagging_task().predictions(tagging_task().forward(Halved(), batch), batch)


CLASSIFICATION = "torchmetrics.classification"
ACCURACY = {"class_path": f"{CLASSIFICATION}.MulticlassAccuracy", "init_args": {"num_classes": 3, "average": "micro"}}


def test_a_chunk_that_has_only_empty_rows_is_evaluated() -> None:
    task, rows = tagging_task(metrics={"accuracy": ACCURACY}), [[4, 1, 5], [7], [], []]
    tags = [[int(OfToken().scores.weight[token].argmax()) for token in row] for row in rows]
    arrays = task.decode({"tokens": ragged_of(rows), "tags": ragged_of(tags)})
    evaluation = combine(task, score(task, OfToken(), arrays, 2, torch.device("cpu")))
    assert evaluation.values["accuracy"] == 1
    assert evaluation.values == combine(task, score(task, OfToken(), arrays, 4, torch.device("cpu"))).values


@pytest.mark.parametrize("rows", [[[4]], [[4], [7]], [[4], []], [[4, 1], [7]]])
@pytest.mark.parametrize(("outputs", "loss"), [(3, CROSS_ENTROPY), (1, {"class_path": "torch.nn.MSELoss"})])
def test_the_loss_of_a_micro_batch_of_one_token_per_row_is_the_mean_over_tokens(
    rows: Any, outputs: int, loss: Any
) -> None:
    task, model = tagging_task(False, loss=loss), OfToken(outputs, last=outputs == 1)
    tags = [[token % 3 for token in row] for row in rows]
    batch = to_batch(task.decode({"tokens": ragged_of(rows), "tags": ragged_of(tags)}))
    sums = sum_losses(task, Losses.of(task.loss(task.forward(model, batch), batch)))
    scores, target = model.scores.weight[[*chain(*rows)]], torch.tensor([*chain(*tags)])
    expected = nn.CrossEntropyLoss()(scores, target) if outputs == 3 else nn.MSELoss()(scores[:, 0], target.float())
    assert sums.loss / sums.weight == pytest.approx(expected.item())


def test_a_row_with_more_tags_than_tokens_is_named(tmp_path: Path) -> None:
    tokens = [[1 + n % 9] * (1 + n % 16) for n in range(64)]
    tags = [[0] * (len(row) + (n == 37)) for n, row in enumerate(tokens)]
    data = {"tokens": pa.array(tokens, pa.list_(pa.int32())), "tags": pa.array(tags, pa.list_(pa.int64()))}
    dataset = open_dataset(table_data(tmp_path / "tagged", data)["path"])
    for task, message in (
        (
            tagging_task(max_length=2),
            r"row group 2, row 5: 7 numbers in 'tags', 6 in 'tokens'; there must be one for each of these",
        ),
        (tagging_task(max_length=2, inputs={"tokens": "tokens", "labels": "tags"}), None),
        (tagging_task(False), None),
    ):
        prepared = task.prepare(dataset.facts)
        fields = probe(dataset, prepared.columns(), prepared.decode)
        source = RowSource(Reader(dataset.root, prepared.columns(), prepared.decode, fields), dataset.manifest, 64)
        with nullcontext() if message is None else pytest.raises(DataError, match=message):
            load_all(fetch_in_process, source)
    without_tags = WithoutTargets(tagging_task())({"tokens": ragged_of(TOKENS)})
    assert len(without_tags["tags"]) == len(TOKENS), "the substitute for the tags has one value per row"


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.int16, np.int8, np.uint8, np.uint16, np.bool_])
@pytest.mark.parametrize("labels", [False, True])
def test_classes_in_arrays_may_have_any_integer_type(kind: Any, labels: bool) -> None:
    metric = (
        {"class_path": f"{CLASSIFICATION}.MultilabelAccuracy", "init_args": {"num_labels": 3}} if labels else ACCURACY
    )
    arguments = {"loss": {"class_path": "torch.nn.BCEWithLogitsLoss"}} if labels else {}
    task, model = (
        tagging_task(not labels, "array", **arguments, train_accuracy=True, metrics={"accuracy": metric}),
        OfToken(1 if labels else 3),
    )
    tokens = ragged_of([[4, 1, 5], [7, 2, 2]])
    tags = np.array([[0, 1, 1], [1, 0, 1]])
    results = []
    for typed_tags in (tags, tags.astype(kind)):
        batch, metrics = to_batch(task.decode({"tokens": tokens, "tags": typed_tags})), task.metrics()
        outputs = task.forward(model, batch)
        task.update(metrics, outputs, batch)
        results.append((sum_losses(task, Losses.of(task.loss(outputs, batch))), metrics.compute()))
    assert results[0] == results[1]


class Boxed(BatchTask):
    """A task that accepts lists of lists as its target."""

    def eval_outputs(self, model: nn.Module, batch: Any) -> Any:
        """Raises an error, since no test of this file evaluates."""
        raise NotImplementedError


def test_a_target_of_lists_of_lists_is_refused(tmp_path: Path) -> None:
    boxes = [[[0.0, 1.0, 2.0, 3.0]] * (1 + n % 4) for n in range(16)]
    kinds = {"boxes": pa.list_(pa.list_(pa.float32())), "fixed": pa.list_(pa.list_(pa.float32(), 4))}
    columns = {name: pa.array(boxes, kind) for name, kind in kinds.items()}
    tokens = pa.array([[1] * (1 + n % 4) for n in range(16)], pa.list_(pa.int64()))
    facts = open_dataset(table_data(tmp_path / "boxes", columns | {"tokens": tokens})["path"]).facts
    for name in kinds:
        with pytest.raises(DataError, match=f"target names '{name}', but this column of .* holds lists of lists, "):
            tagging_task(target=name, loss={"class_path": "torch.nn.MSELoss"}).prepare(facts)
        assert Boxed({"class_path": "x"}, ["tokens", name], name).prepare(facts).kinds[name] == "list"
        assert tagging_task(inputs=[name], target="tokens").prepare(facts).kinds[name] == "list"
