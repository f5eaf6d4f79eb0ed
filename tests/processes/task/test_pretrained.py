"""A configured model of `transformers` begins with the weights of a folder, and trains bit-identically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from ray_app import load_config
from ray_app.errors import ConfigError
from ray_app.preflight.prepare import prepare
from ray_app.task.module import ModuleTask
from ray_app.testing import WorkerPool, cache_windows
from ray_app.train.job import Job
from tests.support.bit_identity import train_on_workers
from tests.support.local_world import make_job
from tests.support.pictures import table_data

LABELS, ROWS = 3, 48
ZERO_LR = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.0}}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a small BERT; its weights differ from those that a run draws."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {
        "num_labels": LABELS,
        "max_position_embeddings": 32,
        "vocab_size": 60,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12345)
        model = BertForSequenceClassification(BertConfig(**sizes))
    folder = tmp_path_factory.mktemp("pretrained") / "weights"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    random = np.random.default_rng(0)
    labels = np.arange(ROWS) % LABELS
    tokens = [random.integers(1 + 19 * label, 20 + 19 * label, random.integers(3, 20)).tolist() for label in labels]
    return table_data(
        tmp_path_factory.mktemp("pretrained") / "texts",
        {"tokens": pa.array(tokens, pa.list_(pa.int32())), "label": labels},
    )


def init_args(folder: Path) -> dict[str, Any]:
    return {
        "model": {
            "class_path": "transformers.AutoModelForSequenceClassification.from_pretrained",
            "init_args": {"pretrained_model_name_or_path": str(folder), "num_labels": LABELS, "dtype": "float32"},
        },
        "inputs": {"input_ids": "tokens", "attention_mask": "tokens.mask"},
        "target": "label",
        "output": "logits",
        "loss": {"class_path": "torch.nn.CrossEntropyLoss"},
    }


def job_of(folder: Path, data: dict[str, Any], weights: Path, **fields: Any) -> Job:
    task = ModuleTask(**init_args(weights))
    return make_job(folder, data["path"], task=task, data__by_length="tokens", **fields)


@pytest.mark.rest
def test_a_run_begins_with_the_weights_of_the_folder(
    worker_pool: WorkerPool, tmp_path: Path, data: dict[str, Any], weights: Path
) -> None:
    from safetensors.torch import load_file

    stored = load_file(weights / "model.safetensors")
    parameters = worker_pool.train_new_run(
        job_of(tmp_path / "still", data, weights, train__epochs=1, optimizer=ZERO_LR), 2, cache_windows
    ).snapshot.model
    trained = {name: values for name, values in parameters.items() if name in stored}
    assert trained.keys() == stored.keys()
    assert all(torch.equal(values, stored[name]) for name, values in trained.items())


@pytest.mark.rest
def test_training_is_bit_identical_on_one_worker_and_on_two(
    worker_pool: WorkerPool, tmp_path: Path, data: dict[str, Any], weights: Path
) -> None:
    job = job_of(tmp_path / "run", data, weights, train__epochs=6)
    alone = train_on_workers(worker_pool, job, (1, 2))
    assert alone.steps[-1][1] < alone.steps[0][1], "the loss did not fall"


def test_a_folder_without_weights_is_refused_before_the_start(tmp_path: Path, data: dict[str, Any]) -> None:
    task = {"class_path": "ray_app.task.module.ModuleTask", "init_args": init_args(tmp_path / "nowhere")}
    config = load_config(
        task=task, data__path=data["path"], data__global_batch_size=12, run__storage_path=str(tmp_path / "runs")
    )
    with pytest.raises(ConfigError, match="nowhere"):
        prepare(config)
    assert not (tmp_path / "runs").exists()
