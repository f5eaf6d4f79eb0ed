"""Classification and regression over the columns of a table with a multi-layer perceptron."""

from __future__ import annotations

import copy
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ray_app.errors import DataError
from ray_app.plan.manifest import DataFacts
from ray_app.task.annotations import MetricCollection
from ray_app.task.base import Batch, Rows, Task, need_column
from ray_app.task.classification import Classification, ClassWeights, add_class_weights
from ray_app.task.fields import need_finite

_NUMBERS = ("number", "integer")


class _Tabular(Task):
    """Base of both tabular tasks: decodes features into one float32 vector per row, and builds the perceptron.

    Args:
        label: Column to predict.
        features: Columns to predict it from, numbers or arrays (flattened); default: all others of these kinds but
            index columns.
        hidden: Width of every hidden layer.
        dropout: Probability of a zeroed activation after every hidden layer.
        scale: Features are divided by it.
    """

    def __init__(
        self,
        label: str,
        features: list[str] | None = None,
        hidden: list[int] | None = None,
        dropout: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        self.label, self.features = label, features
        self.hidden = hidden if hidden is not None else [256, 256]
        self.dropout = dropout
        self.scale = scale
        self.inputs = 0

    def prepare(self, data: DataFacts) -> _Tabular:
        """Names the features and counts the inputs; see `Task.prepare`."""
        prepared = copy.copy(self)
        no_features = {self.label, *data.index_columns}
        usable = [
            name
            for name, facts in data.columns.items()
            if facts.kind in (*_NUMBERS, "array") and name not in no_features
        ]
        prepared.features = list(self.features) if self.features is not None else sorted(usable)
        if not prepared.features:
            raise DataError(
                f"{data.path} has no column of numbers besides {self.label!r} to predict it from; its columns are"
                f" {', '.join(sorted(data.columns))}. Name the features in task.init_args.features, or convert columns"
                " of text to numbers."
            )
        shapes = [need_column(data, name, (*_NUMBERS, "array"), "features").shape for name in prepared.features]
        prepared.inputs = int(sum(np.prod(shape, dtype=np.int64) for shape in shapes))
        return prepared

    def columns(self) -> list[str]:
        """Returns the columns to read, see `Task.columns`."""
        assert self.features is not None, "prepare() comes first"
        return [*self.features, self.label]

    def targets(self) -> list[str]:
        """Returns the target columns, see `Task.targets`."""
        return [self.label]

    def decode(self, rows: Rows) -> dict[str, npt.NDArray]:
        """Decodes rows into `features` (rows, inputs) float32 and `label` (rows,)."""
        assert self.features is not None, "prepare() comes first"
        parts = [np.asarray(rows[name]) for name in self.features]
        flat = [part.reshape(len(part), -1) for part in parts]
        # Values that overflow become infinite, which is refused below.
        with np.errstate(over="ignore"):
            features = np.concatenate(flat, axis=1).astype(np.float32) / np.float32(self.scale)
        if not np.isfinite(features).all():
            for name in self.features:
                need_finite(f"column {name!r}", np.asarray(rows[name]))
            need_finite("a feature, as float32 and divided by task.init_args.scale,", features)
        stored = np.asarray(rows[self.label])
        need_finite(f"column {self.label!r}", stored)
        label = self._decode_label(stored)
        need_finite(f"column {self.label!r} as float32", label)
        return {"features": features, "label": label}

    def _decode_label(self, values: npt.NDArray) -> npt.NDArray:
        raise NotImplementedError

    def _outputs(self) -> int:
        raise NotImplementedError

    def build_model(self) -> nn.Module:
        """Builds the model, see `Task.build_model`."""
        layers: list[nn.Module] = []
        width = self.inputs
        for units in self.hidden:
            layers += [nn.Linear(width, units), nn.ReLU()]
            if self.dropout:
                layers.append(nn.Dropout(self.dropout))
            width = units
        return nn.Sequential(*layers, nn.Linear(width, self._outputs()))

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Computes the outputs of the perceptron, shape (rows, outputs)."""
        return model(batch["features"])


class TabularClassification(Classification, _Tabular):
    """Classifies rows of a table; the 784-256-256-10 network of the guides is one configuration of it.

    Args:
        label: Column of class indices.
        features: Columns to predict it from, numbers or arrays (flattened); default: all others of these kinds but
            index columns.
        hidden: Width of every hidden layer; default: [256, 256].
        dropout: Probability of a zeroed activation after every hidden layer.
        scale: Features are divided by it.
        num_classes: Number of classes; default: read from the data.
        class_weights: The weight of each class in the training loss: a number for each class, or `balanced`, by which
            all classes have the same weight in sum. Evaluation does not use it.
        train_accuracy: Whether the accuracy of each training step is recorded beside its loss.
    """

    def __init__(
        self,
        label: str = "label",
        features: list[str] | None = None,
        hidden: list[int] | None = None,
        dropout: float = 0.0,
        scale: float = 1.0,
        num_classes: int | None = None,
        class_weights: ClassWeights = None,
        train_accuracy: bool = False,
    ) -> None:
        _Tabular.__init__(self, label, features, hidden, dropout, scale)
        self.num_classes, self.class_weights = num_classes, class_weights
        self.weights: list[float] | None = None
        self.train_accuracy = train_accuracy

    def prepare(self, data: DataFacts) -> TabularClassification:
        """Names the features and counts the classes; see `Task.prepare`."""
        prepared = super().prepare(data)
        assert isinstance(prepared, TabularClassification)
        prepared.set_classes(data)
        return prepared

    def _decode_label(self, values: npt.NDArray) -> npt.NDArray:
        return self.decode_labels(values)

    def _outputs(self) -> int:
        return self.class_count

    def augment(self, batch: Batch, keys: Tensor) -> Batch:
        """Adds the class weights; see `Task.augment`."""
        del keys
        return add_class_weights(batch, self.weights)


class TabularRegression(_Tabular):
    """Predicts a number from the other columns of a table, with squared error.

    Args:
        label: Column of numbers to predict.
        features: Columns to predict it from, numbers or arrays (flattened); default: all others of these kinds but
            index columns.
        hidden: Width of every hidden layer; default: [256, 256].
        dropout: Probability of a zeroed activation after every hidden layer.
        scale: Features are divided by it.
    """

    best_metric: ClassVar[str] = "rmse"
    best_mode: ClassVar[str] = "min"

    def __init__(
        self,
        label: str = "target",
        features: list[str] | None = None,
        hidden: list[int] | None = None,
        dropout: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__(label, features, hidden, dropout, scale)

    def prepare(self, data: DataFacts) -> _Tabular:
        """Names the features and checks the label; see `Task.prepare`."""
        need_column(data, self.label, _NUMBERS, "label")
        return super().prepare(data)

    def _decode_label(self, values: npt.NDArray) -> npt.NDArray:
        return values.astype(np.float32)

    def _outputs(self) -> int:
        return 1

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Computes the squared error of every row, shape (rows,)."""
        return (outputs[:, 0] - batch["label"]).square()

    def metrics(self) -> MetricCollection:
        """Makes mean absolute error, root mean squared error, and R2."""
        from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection, R2Score

        return MetricCollection({"mae": MeanAbsoluteError(), "rmse": MeanSquaredError(squared=False), "r2": R2Score()})

    def update(self, metrics: MetricCollection, outputs: Tensor, batch: Batch) -> None:
        """Updates the metrics with a batch, see `Task.update`."""
        metrics.update(outputs[:, 0].to(torch.float32), batch["label"])

    def predictions(self, outputs: Tensor, batch: Batch) -> dict[str, npt.NDArray]:
        """Returns the predicted number of every row as `predicted`."""
        del batch
        return {"predicted": outputs[:, 0].to(torch.float32).numpy()}
