"""The rows of the dry run: a few short rows, and the longest row once unless it costs too much; and the messages of
refusals.
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
from ray_app.preflight import rare_rows
from ray_app.preflight.metric_checks import MAX_ROWS
from ray_app.preflight.prepare import prepare
from ray_app.task.base import Batch
from ray_app.task.language_model import CausalLanguageModel
from ray_app.task.module import ModuleTask

ROWS, LONG = 300, 200
BERT = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 60},
    **{"num_labels": 3, "attn_implementation": "eager"},
}
GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 60, "bos_token_id": 0, "eos_token_id": 0}
ACCURACY = {"class_path": "torchmetrics.classification.MulticlassAccuracy", "init_args": {"num_classes": 3}}


def write(folder: Path, long_at: int | None = 3, first_tag: int = 0) -> str:
    """Writes texts of 3 to 18 tokens with a tag for each token; one text may be long."""
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
    arguments = {
        **{"model": model, "inputs": {"input_ids": "tokens", "attention_mask": "tokens.mask"}, "output": "logits"},
        **{"target": "tags" if kind == "Token" else "label", "classes_last": kind == "Token"},
        **{"loss": {"class_path": "torch.nn.CrossEntropyLoss"}, **init_args},
    }
    return {"class_path": "ray_app.task.module.ModuleTask", "init_args": arguments}


def start(tmp_path: Path, task: dict[str, Any], path: str, **fields: Any) -> Any:
    settings = {
        "data__path": path,
        "data__eval_path": path,
        "data__global_batch_size": 16,
        "run__storage_path": str(tmp_path / "runs"),
    }
    return prepare(load_config(task=task, **settings, **fields))


def refusal_of(*arguments: Any, **fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        start(*arguments, **fields)
    return str(caught.value)


# --- The rows of the dry run.


@pytest.mark.rest
@pytest.mark.parametrize("long_at", [3, ROWS - 1])
def test_the_longest_row_is_run_through_the_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_at: int
) -> None:
    lengths, forward = list[int](), ModuleTask.forward

    def record_length(self: ModuleTask, model: nn.Module, batch: Batch) -> Any:
        lengths.append(batch["tokens"].shape[1])
        return forward(self, model, batch)

    monkeypatch.setattr(ModuleTask, "forward", record_length)
    start(tmp_path, texts(metrics={"accuracy": ACCURACY}), write(tmp_path / "data", long_at))
    assert lengths.count(LONG) == 1
    assert len(lengths) <= 23 + MAX_ROWS, "the metrics run on truncated rows, one at a time; two runs are timed"


@pytest.mark.rest
def test_a_row_above_the_cost_limit_is_skipped_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, task = write(tmp_path / "data"), texts(positions=LONG - 1)
    assert (
        f"data.path {path}: The model cannot be trained on rows of {LONG} numbers in 'tokens' or 'tags'"
        in refusal_of(tmp_path, task, path)
    )
    monkeypatch.setattr(rare_rows, "MAX_OPERATIONS", 1e6)
    start(tmp_path, task, path)
    messages = [record.message for record in caplog.records if "is not tried before the start" in record.message]
    assert len(messages) == 2, "one message for the training data and one for the evaluation data"
    assert messages[0].startswith(
        f"The longest row of data.path {path} ({2 * LONG} numbers) is not tried before the start"
    )


# --- The messages of refusals.


@pytest.mark.rest
def test_the_padding_of_a_target_is_not_a_class(tmp_path: Path) -> None:
    path = write(tmp_path / "data", None)
    start(tmp_path, texts(pad_with=59, metrics={"accuracy": ACCURACY}), path)
    start(tmp_path, texts(pad_with=59, pad_to=16), path)
    assert "is padded with 60, but the model has no embedding for 60" in refusal_of(tmp_path, texts(pad_with=60), path)


@pytest.mark.rest
def test_an_error_in_an_evaluation_of_lists_is_not_attributed_to_their_length(tmp_path: Path) -> None:
    path = write(tmp_path / "data", None)
    two_classes = {**ACCURACY, "init_args": {"num_classes": 2}}
    message = refusal_of(tmp_path, texts("Sequence", metrics={"accuracy": two_classes}), path)
    assert "The dry run with one row failed: ValueError: If `preds` have one dimension more than `target`" in message
    assert "cannot be evaluated on rows" not in message
    assert "The model cannot be trained on" not in message
    ignored = write(tmp_path / "ignored", first_tag=-100)
    message = refusal_of(tmp_path, texts(metrics={"accuracy": ACCURACY}), ignored)
    assert "cannot be" not in message
    assert "evaluating rows 0 to 1" in message
    start(
        tmp_path,
        texts(metrics={"accuracy": {**ACCURACY, "init_args": {"num_classes": 3, "ignore_index": -100}}}),
        ignored,
    )


class Turns(CausalLanguageModel):
    """A language model for two optimizers that take turns."""

    def loss_for_optimizer(self, turn: str, model: nn.Module, batch: Batch) -> Tensor:
        assert turn in ("first", "second")
        return self.loss(self.forward(model, batch), batch)


@pytest.mark.rest
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
    config["init_args"]["n_positions"] = LONG - 1
    assert f"the longest row of data.path {path} ({LONG} numbers)" in refusal_of(tmp_path, task, path, optimizers=turns)
    assert torch.is_grad_enabled()
