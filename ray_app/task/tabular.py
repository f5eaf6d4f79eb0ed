"""Classification and regression over the columns of a table with a multi-layer perceptron."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ray_app.plan.manifest import ColumnFacts, DataFacts
from ray_app.task.annotations import MetricCollection
from ray_app.task.base import Batch, Rows, Task, need_column
from ray_app.task.classification import Classification, ClassWeights, add_row_weights
from ray_app.task.fields import OptionalColumn, decode_sample_weights, need_finite, need_sample_weights
from ray_app.task.losses import Losses
from ray_app.task.table_encoding import category_count, describe_other_values, encode_rows, plain_encoding
from ray_app.task.table_network import DROPOUT, MemberNetwork, TableNetwork, optimizer_fields, training_fields
from ray_app.task.table_statistics import (
    Missing,
    TableSettings,
    count_inputs,
    count_values,
    fit_encoding,
)

Categories = list[str] | Literal["auto"]
"""The columns of categories; `auto`: columns of text with at most 256 values that occur twice on average."""
_NUMBERS = ("number", "integer")


class TabularTask(Task):
    """Base of both tabular tasks: encodes the features of a row as numbers and categories, and builds the network.

    `prepare` computes the encoding (`ray_app.task.table_encoding`) from the rows that are trained on, as `fitted`.

    Args:
        label: Column to predict.
        features: Columns to predict it from: numbers, arrays (flattened), and text as categories; default: all others
            of these kinds but index columns, integers that identify their rows, `row_id`, `label`, `target`, and text
            in which few values repeat.
        hidden: Width of every hidden layer. Default: a network that fits tables, with its optimizer, batch size and
            epochs unless the configuration has these (docs/start/tables.md); with `scale` [256, 256].
        dropout: Probability of a zeroed activation after every hidden layer. Default: 0.3 in the default network, or 0.
        scale: Numbers are divided by it.
        missing: What becomes of a missing value, by column, and as `default` for the others: auto, refuse, mean,
            median, indicator (the mean, and a further input that says that it was missing), category (a category of its
            own), or {constant: VALUE}. Statistics are of the rows that are trained on. Default: auto, which is the
            median and such an input for numbers and dates, and a category of its own for text.
        categories: Columns of text, booleans or integers that are categories, or auto: columns of text in which values
            repeat, the 256 most frequent of them. A value that the rows to train on lack is the category other.
        dates: Parts of columns of dates, times or ISO 8601 texts, by column: year, month, day, weekday (0 is Monday),
            hour, minute, all in UTC, and seconds, those since the first date of the rows that are trained on. Default
            for dates and texts that are all dates: seconds, month, day, weekday and hour.
        log: Columns of numbers to take ln(1 + value) of.
        standardize: Whether numbers and parts of dates get mean 0 and standard deviation 1 over the rows that are
            trained on, after missing values are filled and logarithms taken; or the columns for which they do. Default:
            unless `scale` is set, median 0 and an interquartile range like that of such numbers, within -3 and 3. The
            target of a regression is standardized, too, unless this is false; losses, metrics and predictions are in
            its own unit.
        embedding: Width of an embedding of each category; default: categories are one-hot.
        sample_weight: Column with the weight of each row in the training loss, numbers of at least 0. It is no feature.
            Evaluation data has the column, too, although evaluation does not use it.
    """

    weights: list[float] | None = None
    """The weight of each class."""

    def __init__(
        self,
        label: str = "target",
        features: list[str] | None = None,
        hidden: list[int] | None = None,
        dropout: float | None = None,
        scale: float = 1.0,
        missing: Missing | None = None,
        categories: Categories = "auto",
        dates: dict[str, list[str]] | None = None,
        log: list[str] | None = None,
        standardize: bool | list[str] | None = None,
        embedding: int | None = None,
        sample_weight: str | None = None,
    ) -> None:
        self.label, self.features = label, features
        self.sample_weight = sample_weight
        # Numbers that a setting scales, such as pixels, get the plain network of the guides.
        self.hidden = hidden if hidden is not None or scale == 1 else [256, 256]
        self.dropout = dropout
        self.scale = scale
        self.missing, self.categories = missing, categories
        self.dates, self.log = dates, log
        self.standardize, self.embedding = standardize, embedding
        self.inputs = self.rows = 0

    def prepare(self, data: DataFacts) -> TabularTask:
        """Computes the encoding from the data, unless the task has it, and counts the inputs; see `Task.prepare`."""
        need_sample_weights(data, self.sample_weight, [self.label])
        prepared = copy.copy(self)
        if self.fitted is None:
            settings = TableSettings(
                self.targets(),
                self.features,
                self.missing or {},
                self.categories,
                self.dates or {},
                self.log or [],
                self.standardize,
                self.scale,
                None if isinstance(self, Classification) else self.label,
                self.hidden is None,
            )
            prepared.fitted, prepared.left_out = fit_encoding(settings, data)
        # A run that continues has its encoding, and the rows that it is trained on.
        prepared.rows = self.rows or data.num_rows
        assert prepared.fitted is not None
        prepared.features = [column["name"] for column in prepared.fitted["columns"]]
        for column in prepared.columns():
            if column not in self.targets():
                kinds = ("number", "integer", "array", "text", "other")
                need_column(data, column, kinds, "features", may_lack=isinstance(column, OptionalColumn))
        prepared.inputs = count_inputs(data, prepared.fitted)
        return prepared

    @property
    def category_columns(self) -> list[dict[str, Any]]:
        """The encoding of the columns of categories."""
        return [column for column in (self.fitted or {"columns": []})["columns"] if column["kind"] == "category"]

    def columns(self) -> list[str]:
        """Returns the columns to read, see `Task.columns`."""
        assert self.features is not None, "prepare() must be called first"
        fitted = self.fitted or {"columns": []}
        optional = {c["name"] for c in fitted["columns"] if c["fill"] is not None or c.get("own_class")}
        return [*(OptionalColumn(name) if name in optional else name for name in self.features), *self.targets()]

    def targets(self) -> list[str]:
        """Returns the column of labels, and that of the weights of rows; see `Task.targets`."""
        return [self.label, *self.weight_columns()]

    @property
    def encoding(self) -> dict[str, Any] | None:
        """The encoding of raw rows; None if `features` is one column of arrays as it is, which need no names."""
        if self.fitted is None or len(self.features or []) > 1 or self.inputs == 1:
            return self.fitted
        plain = plain_encoding(self.features or [], self.scale)
        return None if {name: self.fitted.get(name) for name in plain} == plain else self.fitted

    def describe_differences(self, data: DataFacts) -> list[str]:
        """Returns a note for each category column with values that the rows that were trained on lack."""
        present = [column for column in self.category_columns if column["name"] in data.columns]
        counted = count_values(data, [column["name"] for column in present])
        rows = f"{data.num_rows:,} rows of {data.path}"
        notes = [describe_other_values(column, counted[column["name"]], rows) for column in present]
        return [note for note in notes if note is not None]

    def takes_column(self, name: str, facts: ColumnFacts) -> bool:
        """Whether a feature can be encoded from a column of another type; see `Task.takes_column`.

        Numbers come from numbers of any type, categories from numbers and text, and dates from dates and text.
        """
        kinds = {column["name"]: column["kind"] for column in (self.fitted or {"columns": []})["columns"]}
        is_array = any(one == name and kind == "array" for one, kind, _ in self.data_schema["columns"])
        if kinds.get(name) == "number":
            return not is_array and facts.kind in _NUMBERS
        if kinds.get(name) == "category":
            return facts.kind in (*_NUMBERS, "text")
        return kinds.get(name) == "date" and (facts.kind == "text" or facts.is_date)

    def decode(self, rows: Rows) -> dict[str, npt.NDArray]:
        """Decodes rows into `features` (rows, inputs) float32, `categories` (rows, columns) and `label` (rows,)."""
        assert self.features is not None, "prepare() must be called first"
        fields = encode_rows(self.fitted or plain_encoding(self.features, self.scale), rows)
        stored = rows[self.label]
        if isinstance(stored, np.ndarray):
            need_finite(f"column {self.label!r}", stored)
        label = self._decode_label(stored)
        need_finite(f"column {self.label!r} as float32", label)
        return {**fields, "label": label, **decode_sample_weights(self.sample_weight, rows)}

    def augment(self, batch: Batch, keys: Tensor) -> Batch:
        """Adds the weights of rows; see `Task.augment`."""
        del keys
        return add_row_weights(batch, self.weights)

    def _decode_label(self, values: Any) -> npt.NDArray:
        raise NotImplementedError

    def _outputs(self) -> int:
        raise NotImplementedError

    def optimizer_fields(self) -> dict[str, Any]:
        """Returns the optimizer and the schedule of the default network; see `Task.optimizer_fields`."""
        return optimizer_fields(self.rows) if self.hidden is None else {}

    def configuration_fields(self) -> dict[str, Any]:
        """Returns batch size, epochs and checkpoints of the default network; see `Task.configuration_fields`."""
        return training_fields(self.rows) if self.hidden is None else {}

    def build_model(self) -> nn.Module:
        """Builds the model, see `Task.build_model`."""
        fitted = self.fitted or {}
        sizes = [category_count(column) for column in self.category_columns]
        knots, target = fitted.get("knots"), fitted.get("target")
        width = self.inputs + sum(self.embedding or size for size in sizes)
        if self.hidden is None:
            width += sum(max(0, len(ends) - 1) for ends in knots or ())
            network: nn.Module = MemberNetwork(
                width, self._outputs(), DROPOUT if self.dropout is None else self.dropout
            )
        else:
            layers: list[nn.Module] = []
            for units in self.hidden:
                layers += [nn.Linear(width, units), nn.ReLU()]
                if self.dropout:
                    layers.append(nn.Dropout(self.dropout))
                width = units
            network = nn.Sequential(*layers, nn.Linear(width, self._outputs()))
            if not sizes and target is None:
                return network
        return TableNetwork(network, sizes, self.embedding, knots, target)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Computes the outputs of the network, shape (rows, outputs)."""
        fields = [batch[name] for name in ("categories", "features") if name in batch]
        return model(*fields)


def mean_over_members(loss: Callable[[Tensor, Batch], Tensor], outputs: Tensor, batch: Batch) -> Tensor:
    """Returns the loss of every row, (rows,); for outputs (members, rows, outputs) the mean over the members."""
    if outputs.ndim < 3:
        return loss(outputs, batch)
    members = len(outputs)
    # A loss reads one number of each row, and no inputs.
    repeated = {name: values.repeat(members) for name, values in batch.items() if values.ndim == 1}
    return loss(outputs.flatten(0, 1), repeated).reshape(members, -1).mean(0)


class TabularClassification(Classification, TabularTask):
    """Classifies rows of a table; the 784-256-256-10 network of the guides is one configuration of it.

    Arguments that are not listed are those of `TabularTask`.

    Args:
        label: Column of class indices.
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
        dropout: float | None = None,
        scale: float = 1.0,
        num_classes: int | None = None,
        class_weights: ClassWeights = None,
        train_accuracy: bool = False,
        missing: Missing | None = None,
        categories: Categories = "auto",
        dates: dict[str, list[str]] | None = None,
        log: list[str] | None = None,
        standardize: bool | list[str] | None = None,
        embedding: int | None = None,
        sample_weight: str | None = None,
    ) -> None:
        columns = (missing, categories, dates, log, standardize, embedding, sample_weight)
        TabularTask.__init__(self, label, features, hidden, dropout, scale, *columns)
        self.num_classes, self.class_weights = num_classes, class_weights
        self.weights = None
        self.train_accuracy = train_accuracy

    def prepare(self, data: DataFacts) -> TabularClassification:
        """Names the features and counts the classes; see `Task.prepare`."""
        prepared = super().prepare(data)
        assert isinstance(prepared, TabularClassification)
        prepared.set_classes(data)
        return prepared

    def _decode_label(self, values: Any) -> npt.NDArray:
        return self.decode_labels(values)

    def _outputs(self) -> int:
        return self.class_count

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Computes the cross-entropy of every row, see `Classification.loss`."""
        return mean_over_members(super().loss, outputs, batch)


class TabularRegression(TabularTask):
    """Predicts a number from the other columns of a table, with squared error.

    Arguments that are not listed are those of `TabularTask`.

    Args:
        label: Column of numbers to predict.
    """

    best_metric: ClassVar[str] = "rmse"
    best_mode: ClassVar[str] = "min"

    def prepare(self, data: DataFacts) -> TabularTask:
        """Names the features and checks the label; see `Task.prepare`."""
        need_column(data, self.label, _NUMBERS, "label")
        return super().prepare(data)

    def _decode_label(self, values: Any) -> npt.NDArray:
        # Values that overflow become infinite, which `decode` refuses.
        with np.errstate(over="ignore"):
            return np.asarray(values).astype(np.float32)

    def _outputs(self) -> int:
        return 1

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Computes the squared error of every row, shape (rows,), times its weight if the batch has weights."""
        return mean_over_members(_squared_errors, outputs, batch)

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor | Losses:
        """Returns the loss of every row in the unit of the target, with the gradient for a deviation of 1.

        So neither the learning rate nor the largest norm of a gradient depends on the unit.
        """
        losses = self.loss(self.forward(model, batch), batch)
        scaled = losses / ((self.fitted or {}).get("target") or {"std": 1.0})["std"] ** 2
        return scaled + (losses - scaled).detach()

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


def _squared_errors(outputs: Tensor, batch: Batch) -> Tensor:
    losses = (outputs[:, 0] - batch["label"]).square()
    return losses * batch["row_weight"] if "row_weight" in batch else losses
