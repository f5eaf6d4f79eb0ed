"""Tasks and models that evaluate a row by the rows of its batch, and the same ones with the remedy."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

from ray_app.task.base import Batch, Task
from ray_app.task.ragged import Arrays

ROWS = 53


def write_data(folder: Path) -> str:
    """Writes rows of two views, tokens of different lengths, tokens of one length, and a label."""
    generator = np.random.default_rng(0)
    views = [pa.FixedSizeListArray.from_arrays(generator.normal(size=ROWS * 4).astype(np.float32), 4) for _ in range(2)]
    tokens = [generator.integers(1, 9, length) for length in generator.integers(3, 20, ROWS)]
    even = pa.array(list(generator.integers(1, 9, (ROWS, 12))), pa.list_(pa.int64()))
    folder.mkdir()
    columns = {"x": views[0], "y": views[1], "tokens": pa.array(tokens, pa.list_(pa.int64())), "even": even}
    pq.write_table(pa.table(columns | {"label": np.arange(ROWS) % 3}), folder / "part.parquet")
    return str(folder)


class Views(nn.Module):
    """Two projections, one of each view."""

    def __init__(self) -> None:
        super().__init__()
        self.of_x, self.of_y = nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the projections, (rows, 2, 8)."""
        return functional.normalize(torch.stack([self.of_x(x), self.of_y(y)], 1), dim=2)


def info_nce(outputs: Tensor) -> Tensor:
    """Returns the loss of each row against all others of the batch, (rows,)."""
    x, y = outputs.unbind(1)
    return functional.cross_entropy(x @ y.T / 0.1, torch.arange(len(x)), reduction="none")


class Contrastive(Task):
    """Compares the two views of each row with those of all rows of the batch."""

    def columns(self) -> list[str]:
        """See `Task.columns`."""
        return ["x", "y"]

    def build_model(self) -> nn.Module:
        """See `Task.build_model`."""
        return Views()

    def decode(self, rows: Any) -> Arrays:
        """See `Task.decode`."""
        return {name: np.asarray(rows[name], np.float32) for name in ("x", "y")}

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """See `Task.loss`."""
        return info_nce(outputs)


class ContrastiveModule(pl.LightningModule):
    """The same for Lightning; `total` logs a sum instead."""

    def __init__(self, total: bool = False) -> None:
        super().__init__()
        self.model, self.total = Views(), total

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """See `Views`."""
        return self.model(x, y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Returns the loss."""
        return info_nce(self(*batch)).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs the loss."""
        outputs = self(*batch)
        self.log("val_loss", outputs.square().sum() if self.total else info_nce(outputs).mean())

    def configure_optimizers(self) -> Any:
        """See Lightning."""
        return torch.optim.SGD(self.parameters(), 0.1)


class Recurrent(nn.Module):
    """The scores of three classes by the last state of a GRU; with a mask, the state after the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(8, 3)
        self.gru = nn.GRU(4, 8, batch_first=True)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the scores."""
        states = self.gru(self.embed(tokens))[0]
        last = torch.full((len(tokens),), tokens.shape[1]) if mask is None else mask.sum(1)
        return self.head(states[torch.arange(len(tokens)), last.clamp(min=1) - 1])


def pooled() -> nn.Module:
    """Returns a model of tokens with a convolution and a mean over all of them, padding included."""
    return nn.Sequential(
        nn.Embedding(9, 4), _Swap(), nn.Conv1d(4, 8, 3, padding=1), nn.ReLU(), _Mean(), nn.Linear(8, 3)
    )


class _Swap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Returns the axes as convolutions take them."""
        return x.transpose(1, 2)


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Returns the mean over the last axis."""
        return x.mean(2)


class BySize(nn.Module):
    """Scores of three classes, other ones in batches of more than four rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the scores."""
        return self.head(x) * (2 if len(x) > 4 else 1)


def normalized(norm: str) -> nn.Module:
    """Returns a model from four features to three classes with a layer that normalizes."""
    layers: dict[str, list[nn.Module]] = {
        "batch": [nn.BatchNorm1d(6, track_running_stats=False)],
        "pixels": [nn.Unflatten(1, (3, 2)), nn.BatchNorm1d(3, track_running_stats=False), nn.Flatten()],
        "running": [nn.BatchNorm1d(6)],
        "instance": [nn.Unflatten(1, (3, 2)), nn.InstanceNorm1d(3), nn.Flatten()],
    }
    return nn.Sequential(nn.Linear(4, 6), *layers[norm], nn.Linear(6, 3))


def configured(model: str, inputs: list[str], **init_args: Any) -> dict[str, Any]:
    """Returns the configuration of a `ModuleTask` with a model of this module."""
    accuracy = {"class_path": "torchmetrics.classification.MulticlassAccuracy", "init_args": {"num_classes": 3}}
    return {
        "class_path": "ray_app.task.module.ModuleTask",
        "init_args": {
            "model": {"class_path": f"{__name__}.{model}", "init_args": init_args.pop("model_args", {})},
            "inputs": inputs,
            "target": "label",
            "loss": {"class_path": "torch.nn.CrossEntropyLoss"},
            "metrics": {"accuracy": accuracy},
            **init_args,
        },
    }


def contrastive(total: bool | None = None) -> dict[str, Any]:
    """Returns the configuration of the contrastive task, or of its Lightning module."""
    if total is None:
        return {"class_path": f"{__name__}.Contrastive"}
    module = {"class_path": f"{__name__}.ContrastiveModule", "init_args": {"total": total}}
    return {"class_path": "ray_app.task.lightning.LightningTask", "init_args": {"module": module, "batch": ["x", "y"]}}


DEPENDENT_TASKS = {
    "contrastive": contrastive(),
    "padding": configured("Recurrent", ["tokens"]),
    "batch statistics": configured("normalized", ["x"], model_args={"norm": "batch"}),
}
"""A task for each kind of dependence."""
