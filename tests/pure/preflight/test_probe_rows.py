"""What the trial before a start takes: a few short rows, and the longest once, if that is not too much; and what it
says was wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from ray_app import load_config
from ray_app.errors import ConfigError
from ray_app.preflight import context
from ray_app.preflight.context import RowProbe
from ray_app.preflight.metric_checks import MAX_ROWS
from ray_app.preflight.prepare import prepare
from ray_app.task.base import Batch
from ray_app.task.language_model import CausalLanguageModel
from ray_app.task.module import ModuleTask
from ray_app.task.ragged import Ragged, repeat_rows

ROWS, LONG = 300, 200
BERT = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 60},
    **{"num_labels": 3, "attn_implementation": "eager"},
}
GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 60, "bos_token_id": 0, "eos_token_id": 0}
ACCURACY = {"class_path": "torchmetrics.classification.MulticlassAccuracy", "init_args": {"num_classes": 3}}


def write(folder: Path, long_at: int | None = 3, first_tag: int = 0) -> str:
    """Texts of 3 to 18 tokens, one of which may be long, with a tag for each token."""
    folder.mkdir()
    lengths = [3 + n % 16 if n != long_at else LONG for n in range(ROWS)]
    table = {
        "tokens": pa.array([np.arange(length) % 60 for length in lengths], pa.list_(pa.int64())),
        "tags": pa.array([[first_tag, *(np.arange(length - 1) % 3)] for length in lengths], pa.list_(pa.int64())),
        "label": np.arange(ROWS) % 3,
    }
    pq.write_table(pa.table(table), folder / "part.parquet", row_group_size=100)
    return str(folder)


def texts(kind: str = "Token", positions: int = 256, **init_args: Any) -> dict[str, Any]:
    config = {"class_path": "transformers.BertConfig", "init_args": {**BERT, "max_position_embeddings": positions}}
    model = {"class_path": f"transformers.BertFor{kind}Classification", "init_args": {"config": config}}
    given = {
        **{"model": model, "inputs": {"input_ids": "tokens", "attention_mask": "tokens.mask"}, "output": "logits"},
        **{"target": "tags" if kind == "Token" else "label", "classes_last": kind == "Token"},
        **{"loss": {"class_path": "torch.nn.CrossEntropyLoss"}, **init_args},
    }
    return {"class_path": "ray_app.task.module.ModuleTask", "init_args": given}


def start(tmp_path: Path, task: dict[str, Any], path: str, **fields: Any) -> Any:
    given = {
        "data__path": path,
        "data__eval_path": path,
        "data__global_batch_size": 16,
        "run__storage_path": str(tmp_path / "runs"),
    }
    return prepare(load_config(task=task, **given, **fields))


def refused(*given: Any, **fields: Any) -> str:
    with pytest.raises(ConfigError) as found:
        start(*given, **fields)
    return str(found.value)


# --- what it takes


@pytest.mark.parametrize("long_at", [3, ROWS - 1])
def test_the_longest_row_is_taken_through_the_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_at: int
) -> None:
    seen, forward = list[int](), ModuleTask.forward

    def seeing(self: ModuleTask, model: nn.Module, batch: Batch) -> Any:
        seen.append(batch["tokens"].shape[1])
        return forward(self, model, batch)

    monkeypatch.setattr(ModuleTask, "forward", seeing)
    start(tmp_path, texts(metrics={"accuracy": ACCURACY}), write(tmp_path / "data", long_at))
    assert seen.count(LONG) == 1
    assert len(seen) <= 13 + MAX_ROWS, "the metrics are tried with rows that are cut, each by itself"
    assert sorted(seen)[-3:] == [16, 32, LONG], "two are for the estimate"


@pytest.mark.parametrize(("limit", "value"), [("MAX_OPERATIONS", 1e6), ("max_probe_bytes", lambda: 1e6)])
def test_a_row_that_would_take_too_much_is_not_tried_and_that_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit: str, value: Any
) -> None:
    path, task = write(tmp_path / "data"), texts(positions=LONG - 1)
    assert f"data.path {path}: Rows of {LONG} numbers in 'tokens' or 'tags' cannot be trained on" in refused(
        tmp_path, task, path
    )
    monkeypatch.setattr(context, limit, value)
    start(tmp_path, task, path)
    told = [record.message for record in caplog.records if "is not tried before the start" in record.message]
    assert len(told) == 2, "the data to train and to evaluate on"
    assert told[0].startswith(
        f"The longest row of data.path {path} ({2 * LONG} numbers) is not tried before the start: it would take about"
    )


@pytest.mark.parametrize("multiple", [1, 24])
def test_what_a_long_row_takes_follows_from_short_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, multiple: int
) -> None:
    found, of_costs = list[float](), context._extrapolate

    def continued(*given: Any) -> float:
        found.append(of_costs(*given))
        return found[-1]

    monkeypatch.setattr(context, "_extrapolate", continued)
    prepared = start(tmp_path, texts(pad_to=multiple), write(tmp_path / "data"))
    operations, largest = found
    task = prepared.job.task
    state = context.RowProbe(task, _State(task.build_model()))  # type: ignore[arg-type]
    row = Ragged.of([np.arange(LONG) % 60], np.int64, 0, multiple)
    rows = {"tokens": repeat_rows(row), "tags": repeat_rows(Ragged.of([np.arange(LONG) % 3], np.int64, 0, multiple))}
    flops, sizes = context._measure_cost(state, rows)
    padded = -(-LONG // multiple) * multiple
    assert flops == pytest.approx(operations, rel=0.01)
    assert max(sizes) >= 2 * 2 * padded**2 * 4, "scores of two rows and two heads, each number with each"
    assert max(sizes) == pytest.approx(largest, rel=0.05)


class _State:
    """A model that is trained, and no turns."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.turns = model, None

    def train(self) -> None:
        self.model.train()


def test_the_parameters_alone_say_what_is_too_much_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Embedding(1000, 10), nn.Linear(10, 10, bias=False))
    attempt = RowProbe(ModuleTask.__new__(ModuleTask), _State(model))  # type: ignore[arg-type]
    rows = {"tokens": Ragged.of([[1] * 30, [1] * 30], np.int64)}
    monkeypatch.setattr(context, "MAX_OPERATIONS", 2 * 100 * 60)
    assert context.explain_cost(attempt, rows) is None
    monkeypatch.setattr(context, "MAX_OPERATIONS", 2 * 100 * 60 - 1)
    assert str(context.explain_cost(attempt, rows)).startswith(
        "about 1.2e+04 operations; a dry run takes at most 1e+04 and"
    )


# --- what it says


def test_what_a_target_is_padded_with_is_no_class(tmp_path: Path) -> None:
    path = write(tmp_path / "data", None)
    start(tmp_path, texts(pad_with=59, metrics={"accuracy": ACCURACY}), path)
    start(tmp_path, texts(pad_with=59, pad_to=16), path)
    assert "is padded with 60, and the model has no embedding for 60" in refused(tmp_path, texts(pad_with=60), path)


def test_a_mistake_in_an_evaluation_of_lists_is_not_their_length(tmp_path: Path) -> None:
    path = write(tmp_path / "data", None)
    two = {**ACCURACY, "init_args": {"num_classes": 2}}
    said = refused(tmp_path, texts("Sequence", metrics={"accuracy": two}), path)
    assert "The dry run with one row failed: ValueError: If `preds` have one dimension more than `target`" in said
    assert "cannot be evaluated on, rows of one can" not in said
    assert "cannot be trained on" not in said
    ignored = write(tmp_path / "ignored", first_tag=-100)
    said = refused(tmp_path, texts(metrics={"accuracy": ACCURACY}), ignored)
    assert "cannot be" not in said
    assert "evaluating rows 0 to 1" in said
    start(
        tmp_path,
        texts(metrics={"accuracy": {**ACCURACY, "init_args": {"num_classes": 3, "ignore_index": -100}}}),
        ignored,
    )


class Turns(CausalLanguageModel):
    """Two optimizers take turns."""

    def loss_for_optimizer(self, turn: str, model: nn.Module, batch: Batch) -> Tensor:
        assert turn in ("first", "second")
        return self.loss(self.forward(model, batch), batch)  # type: ignore[return-value]


def test_the_longest_row_is_tried_where_optimizers_take_turns(tmp_path: Path) -> None:
    path = write(tmp_path / "data", ROWS - 1)
    config = {"class_path": "transformers.GPT2Config", "init_args": {**GPT, "n_positions": LONG}}
    model = {"class_path": "transformers.AutoModelForCausalLM.from_config", "init_args": {"config": config}}
    task = {"class_path": f"{__name__}.Turns", "init_args": {"model": model}}
    spec = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
    turns = {
        "first": {**spec, "parameters": ["transformer.h.*"]},
        "second": {**spec, "parameters": ["transformer.[wl]*"]},
    }
    start(tmp_path, task, path, optimizers=turns)
    config["init_args"]["n_positions"] = LONG - 1  # type: ignore[index]
    assert f"the longest row of data.path {path} ({LONG} numbers)" in refused(tmp_path, task, path, optimizers=turns)
    assert torch.is_grad_enabled()
