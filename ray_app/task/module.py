"""A task that is configured without code: an `nn.Module`, its input columns, its target, a loss and metrics."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ray_app.config.import_paths import require
from ray_app.errors import ConfigError, DataError
from ray_app.plan.manifest import DataFacts
from ray_app.task.annotations import MetricCollection
from ray_app.task.answers import class_answers, label_answers
from ray_app.task.base import Batch, Mistake, Rows, Task, class_names, need_column
from ray_app.task.classification import find_mistakes, predict_classes
from ray_app.task.configured_arguments import (
    TASK_LOSS,
    Activation,
    activation_of,
    attach_loss,
    compute_row_losses,
    need_channels,
    need_flat,
    need_lists,
    need_numbers,
    need_one_size,
    need_specs,
    probabilities,
    reduction_of,
    refuse_values,
    resolve_best_mode,
    target_range,
)
from ray_app.task.fields import (
    convert_column,
    need_as_long,
    need_finite,
    refuse_missing,
    strip_padding,
    too_many_classes,
)
from ray_app.task.images import IMAGE, MASK, decode_columns, is_image_column, is_mask, normalize_images
from ray_app.task.losses import Losses
from ray_app.task.metric_states import is_classification
from ray_app.task.metrics import Mode
from ray_app.task.ragged import LENGTHS, Arrays, Field, Ragged
from ray_app.task.transforms import Spec, instantiate, instantiate_module, instantiate_once

_MASK_SUFFIX = ".mask"
_KINDS = ("number", "integer", "array", "bytes", "list")


class ModuleTask(Task):
    """A task of a model, a loss and metrics by their import paths::

        task:
          class_path: ray_app.task.module.ModuleTask
          init_args:
            model: {class_path: torchvision.models.resnet18, init_args: {num_classes: 10}}
            inputs: [image]
            target: label
            loss: {class_path: torch.nn.CrossEntropyLoss, init_args: {label_smoothing: 0.1}}
            metrics:
              accuracy: {class_path: torchmetrics.classification.MulticlassAccuracy, init_args: {num_classes: 10}}
            transforms:
              - {class_path: torchvision.transforms.v2.RandomResizedCrop, init_args: {size: 224}}
            evaluate_transforms:
              - {class_path: torchvision.transforms.v2.Resize, init_args: {size: [224, 224]}}

    The model gets columns of numbers as float32, integers as int64, lists of numbers padded to the longest of a
    micro-batch, arrays unchanged, and images (encoded files, and arrays of uint8 with two or three axes) as float32
    from 0 to 1, channels first.

    Args:
        model: The module, or a function that returns one; values of `init_args` may be specifications themselves, such
            as the configuration of a `transformers` model.
        inputs: Columns in the order of the model's arguments, or by their names: `{input_ids: tokens, attention_mask:
            tokens.mask}`, where `.mask` is 1 for the tokens of a list and 0 for what it is padded with.
        target: Column that the outputs are compared with; beside images it may be their masks, encoded (PNG of one
            channel or a palette) or integers of two axes: int64 class indices of pixels, which go through the same
            transforms.
        loss: Called with outputs and target, such as `torch.nn.CrossEntropyLoss`. The mean is over the global batch; a
            row with several loss values (pixels, except those of `ignore_index`) counts once for each. Lists as
            `weight` and `pos_weight` are weights of classes. A target of the outputs' shape is converted to their type
            (`torch.nn.BCEWithLogitsLoss`). A loss that has parameters or buffers is a part of the model, `task_loss`:
            it is trained and stored with it.
        output: The key or attribute of the model's outputs to compare, where they are a dictionary or an object:
            `logits`, `out`.
        classes_last: Whether the scores of classes are on the last axis of the outputs, as models of `transformers`
            return them for each token, and not on the second axis, where torch's losses expect them.
        metrics: `torchmetrics` by the name that they are recorded under.
        activation: The function that turns outputs into probabilities for metrics of `torchmetrics.classification`:
            `sigmoid`, `softmax` (over the classes) or `none`. Default: the one that matches the loss of torch or
            torchvision (`sigmoid` for `BCEWithLogitsLoss`, `softmax` for `CrossEntropyLoss`), `none` for other losses.
            Other metrics get the outputs unchanged.
        train_accuracy: Whether the accuracy of each training step is recorded beside its loss; the target must be
            classes, or 0 and 1 for a loss such as `torch.nn.BCEWithLogitsLoss`.
        transforms: Transforms of rows to train on, applied in the readers; random ones draw from the key of the row,
            which differs in every epoch.
        evaluate_transforms: Transforms of rows to evaluate and to predict on; the shapes must be those that
            `transforms` give.
        exif_orientation: Whether encoded images and masks are rotated and mirrored by their EXIF orientation, as
            viewers show them, before the transforms; false: they are decoded as stored.
        mean: Subtracted from images after scaling to [0, 1], one per channel or one for all.
        std: Images are divided by it after `mean` is subtracted, one per channel or one for all.
        pad_with: The value that lists are padded with.
        pad_to: Padded lengths are rounded up to a multiple of it.
        max_length: The number of values of a list that are used, from its beginning; default: all.
        best_metric: The metric that decides which checkpoint is best.
        best_mode: Whether a lower (`min`) or a higher (`max`) value of it is better; default: by the metric's
            `higher_is_better`, `min` for a loss.
    """

    def __init__(
        self,
        model: Spec,
        inputs: list[str] | dict[str, str],
        target: str,
        loss: Spec,
        output: str | None = None,
        classes_last: bool = False,
        metrics: dict[str, Spec] | None = None,
        activation: Activation | None = None,
        train_accuracy: bool = False,
        transforms: list[Spec] | None = None,
        evaluate_transforms: list[Spec] | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        pad_with: float = 0,
        pad_to: int = 1,
        max_length: int | None = None,
        best_metric: str = "loss",
        best_mode: Mode | None = None,
        exif_orientation: bool = True,
    ) -> None:
        if not inputs:
            raise ConfigError("task.init_args.inputs is empty; name the input columns of the model.")
        self.model, self.inputs = model, inputs
        self.target, self.loss_spec = target, loss
        self.output = output
        self.metric_specs = metrics or {}
        self.transforms = transforms or []
        self.evaluate_transforms = evaluate_transforms or []
        self.classes_last = classes_last
        self.train_accuracy = train_accuracy
        self.exif_orientation = exif_orientation
        self.activation = activation
        self.mean = mean or [0.0]
        self.std = std or [1.0]
        self.pad_with = pad_with
        self.pad_to = pad_to
        self.max_length = max_length
        need_specs(
            model=model,
            metrics=self.metric_specs,
            transforms=self.transforms,
            evaluate_transforms=self.evaluate_transforms,
        )
        need_numbers(self.mean, self.std, pad_to, max_length)
        if type(self).loss is ModuleTask.loss:
            need_specs(loss=loss)
            reduction_of(loss)
        self.best_metric = best_metric  # type: ignore[misc]
        self.best_mode = resolve_best_mode(best_metric, best_mode, self.metric_specs)  # type: ignore[misc]
        self.kinds: dict[str, str] = {}
        # Columns that may have infinite values.
        self.infinite: list[str] = []
        self.ranges: dict[str, list[float]] = {}
        self.classes: list[str] = []
        # The values of the target that the loss and the model allow, see `target_range`; the preflight sets it.
        self.target_range: list[int] | None = None

    def prepare(self, data: DataFacts) -> ModuleTask:
        """Checks the columns and returns the task with their kinds, ranges and classes; see `Task.prepare`."""
        prepared = copy.copy(self)
        prepared.kinds = {}
        refuse_missing(data, self.columns())
        facts = {
            name: need_column(data, name, _KINDS, "target" if name == self.target else "model")
            for name in self.columns()
        }
        need_lists(
            data,
            facts,
            (name.removesuffix(_MASK_SUFFIX) for name in self._input_names() if name.endswith(_MASK_SUFFIX)),
        )
        if type(self).loss is ModuleTask.loss:
            need_flat(data, self.target, facts[self.target])
        beside_images = any(is_image_column(facts[name]) for name in self.columns_of_model())
        for name, column in facts.items():
            is_target = name not in self.columns_of_model()
            if is_target and beside_images and is_mask(column):
                prepared.kinds[name] = MASK
            else:
                prepared.kinds[name] = IMAGE if is_image_column(column) else column.kind
            if prepared.kinds[name] == IMAGE:
                need_channels(name, column, mean=self.mean, std=self.std)
            if column.kind == "bytes":
                require("torchvision", f"Decoding the images of column {name!r}")
                if not self.evaluate_transforms:
                    need_one_size(data, name, self.exif_orientation)
        if (self.transforms or self.evaluate_transforms) and IMAGE not in prepared.kinds.values():
            raise DataError(
                f"task.init_args.transforms are for images, but none of the columns {', '.join(self.columns())} of"
                f" {data.path} holds images."
            )
        if self.transforms or self.evaluate_transforms:
            require("torchvision", "task.init_args.transforms or evaluate_transforms")
        prepared.ranges = {
            name: [column.minimum, column.maximum]
            for name, column in facts.items()
            if prepared.kinds[name] in ("integer", "list") and column.minimum is not None and column.maximum is not None
        }
        target = facts[self.target]
        low, high = target.minimum, target.maximum
        if target.kind == "integer" and low is not None and high is not None and low >= 0:
            count = int(high) + 1
            prepared.classes = [] if too_many_classes(data, count) and not data.classes else class_names(data, count)
        # A metric that cannot be made is refused here, and not at the first evaluation.
        if self.metric_specs:
            self.metrics()
        # A package keeps it as data, since only the loss itself, an object of any class, knows it.
        prepared.activation = self._activation()
        return prepared

    def _input_names(self) -> list[str]:
        return list(self.inputs.values() if isinstance(self.inputs, dict) else self.inputs)

    def columns_of_model(self) -> list[str]:
        """Returns the columns that the model gets, those of `inputs`."""
        return list(dict.fromkeys(name.removesuffix(_MASK_SUFFIX) for name in self._input_names()))

    def columns(self) -> list[str]:
        """Returns the columns to read, see `Task.columns`."""
        return list(dict.fromkeys([*self.columns_of_model(), self.target]))

    def targets(self) -> list[str]:
        """Returns the target columns, see `Task.targets`."""
        return [] if self.target in self.columns_of_model() else [self.target]

    @property
    def has_epoch_decode(self) -> bool:
        """Whether the task has transforms for training."""
        return bool(self.transforms)

    def decode(self, rows: Rows) -> Arrays:
        """Decodes rows and applies `evaluate_transforms`; see the class for the types of fields."""
        return self._decoded(
            rows, instantiate_once(self.evaluate_transforms, "task.init_args.evaluate_transforms"), None
        )

    def decode_training(self, rows: Rows, keys: npt.NDArray[np.int64]) -> Arrays:
        """Decodes rows and applies `transforms`; see the class for the types of fields."""
        return self._decoded(rows, instantiate_once(self.transforms, "task.init_args.transforms"), keys)

    def _decoded(self, rows: Rows, transforms: Sequence[Any], keys: npt.NDArray[np.int64] | None) -> Arrays:
        if self.classes_last:
            need_as_long(rows, self.target, self.columns_of_model())
        images = {name: kind for name, kind in self.kinds.items() if kind in (IMAGE, MASK)}
        fields: dict[str, Field] = {
            name: self._values(rows[name], kind) for name, kind in self.kinds.items() if name not in images
        }
        for name, values in fields.items():
            need_finite(f"column {name!r}", values, name in self.infinite)
        if images:
            stored = {name: rows[name] for name in images}
            fields |= decode_columns(stored, images, transforms, keys, self.exif_orientation)
        self.refuse_target(fields)
        return fields

    def _values(self, values: Any, kind: str) -> Field:
        field = convert_column(values, kind)
        if not isinstance(field, Ragged):
            return field
        cut = field if self.max_length is None else field.cut(self.max_length)
        return cut.padded_with(self.pad_with, self.pad_to)

    def build_model(self) -> nn.Module:
        """Builds the model, see `Task.build_model`; a loss that has parameters or buffers becomes a part of it."""
        model = instantiate_module(self.model, "task.init_args.model")
        if type(self).loss is ModuleTask.loss:
            attach_loss(model, self.loss_spec)
        return model

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        """Returns the units of `Task.shard_units`, and the loss that is a part of the model."""
        units = super().shard_units(model)
        return list(dict.fromkeys([*units, model.get_submodule(TASK_LOSS)])) if hasattr(model, TASK_LOSS) else units

    def _input(self, batch: Batch, name: str) -> Tensor:
        """Returns a column of a batch, or its padding mask, as the model gets it."""
        column = name.removesuffix(_MASK_SUFFIX)
        values = batch[column]
        if name.endswith(_MASK_SUFFIX):
            return (torch.arange(values.shape[1], device=values.device) < batch[column + LENGTHS][:, None]).long()
        if self.kinds[column] == MASK:
            return values.long()
        if self.kinds[column] == IMAGE:
            return normalize_images(values, 255, self.mean, self.std)
        return values

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Runs the model on a batch and returns the part of its outputs that is compared with the target."""
        if isinstance(self.inputs, dict):
            outputs = model(**{argument: self._input(batch, name) for argument, name in self.inputs.items()})
        else:
            outputs = model(*(self._input(batch, name) for name in self.inputs))
        if self.output is not None:
            return outputs[self.output] if isinstance(outputs, dict) else getattr(outputs, self.output)
        return outputs

    def _compared(self, outputs: Any, batch: Batch) -> tuple[Any, Tensor]:
        """Returns outputs and target in matching shapes; an axis of one score is removed, and integers become int64."""
        target = self._input(batch, self.target)
        if isinstance(outputs, Tensor) and outputs.ndim == target.ndim + 1:
            if self.classes_last:
                outputs = outputs.movedim(-1, 1)
            elif outputs.shape[-1] == 1 and outputs.shape[:-1] == target.shape:
                outputs = outputs.squeeze(-1)
            # A model of pixels with one score each has it on the second axis.
            elif outputs.shape[1] == 1 and outputs.shape[:1] + outputs.shape[2:] == target.shape:
                outputs = outputs.squeeze(1)
        return outputs, target if target.is_floating_point() else target.long()

    def note_target_range(self, model: nn.Module, batch: Batch) -> None:
        """Derives from the outputs for some rows which values of the target the loss takes.

        `decode` then refuses rows with other values, and so does this method. Nothing is derived for a subclass with a
        loss of its own.
        """
        if type(self).loss is not ModuleTask.loss or type(self).training_loss is not ModuleTask.training_loss:
            return
        outputs, target = self._compared(self.forward(model, batch), batch)
        self.target_range = target_range(self.loss_spec, outputs, target)
        values, is_value = batch[self.target], self._target_mask(batch)
        self.refuse_target({self.target: (values if is_value is None else values[is_value]).numpy()})

    def refuse_target(self, fields: Arrays) -> None:
        """Raises ValueError for target values that the loss does not take, see `note_target_range`."""
        if self.target_range is not None:
            target = fields[self.target]
            values = target.values if isinstance(target, Ragged) else target
            refuse_values(self.target, values, self.target_range, self.kinds[self.target] == MASK)

    def _target_mask(self, batch: Batch) -> Tensor | None:
        """Returns which values of a target of lists are not padding, None for another target."""
        return self._input(batch, self.target + _MASK_SUFFIX).bool() if self.kinds[self.target] == "list" else None

    def loss(self, outputs: Any, batch: Batch) -> Tensor | Losses:
        """Computes the loss of every row, see `compute_row_losses`, by a loss that is no part of the model."""
        return self._row_losses(None, outputs, batch)

    def _row_losses(self, loss: nn.Module | None, outputs: Any, batch: Batch) -> Tensor | Losses:
        compared, is_value = self._compared(outputs, batch), self._target_mask(batch)
        return compute_row_losses(self.loss_spec, *compared, self.train_accuracy, is_value, loss)

    def compute_loss(self, model: nn.Module, outputs: Any, batch: Batch) -> Tensor | Losses:
        """Returns `loss`, or that of the loss that is a part of the model; see `Task.compute_loss`."""
        loss = getattr(model, TASK_LOSS, None)
        return self.loss(outputs, batch) if loss is None else self._row_losses(loss, outputs, batch)

    def metrics(self) -> MetricCollection:
        """Makes the configured metrics."""
        from torchmetrics import MetricCollection

        metrics = {
            name: instantiate(spec, f"task.init_args.metrics.{name}") for name, spec in self.metric_specs.items()
        }
        return MetricCollection(metrics, compute_groups=False)

    def update(self, metrics: MetricCollection, outputs: Any, batch: Batch) -> None:
        """Updates the metrics, see `Task.update`; of lists they get (values,) and (values, classes) without padding."""
        if not self.metric_specs:
            return
        outputs, target = self._compared(outputs, batch)
        likely = probabilities(outputs, self._activation())
        if (is_value := self._target_mask(batch)) is not None:
            outputs, likely = (
                (scores.movedim(1, -1) if scores.ndim > target.ndim else scores)[is_value]
                for scores in (outputs, likely)
            )
            target = target[is_value]
            # Some metrics raise an error for an update without values.
            if not target.numel():
                return
        for metric in metrics.values(copy_state=False):
            metric.update(likely if is_classification(metric) else outputs, target)

    def _activation(self) -> Activation:
        if self.activation is not None:
            return self.activation
        return activation_of(json.dumps(self.loss_spec)) if type(self).loss is ModuleTask.loss else "none"

    def _classifies(self, outputs: Any) -> bool:
        return isinstance(outputs, Tensor) and outputs.ndim == 2 and 1 < outputs.shape[1] == len(self.classes)

    def predictions(self, outputs: Any, batch: Batch) -> Arrays:
        """Returns the predicted classes if the outputs are scores of classes, otherwise the outputs.

        If a row has one score for each class, the columns are those of `predict_classes`. If each pixel or token has
        scores, `predicted_index` has the indices of their classes. Otherwise `predicted` has the outputs, see
        `Task.predictions`.

        If the target is a column of lists, each row is as long as its list: outputs for the padding are left out.
        """
        if type(self).loss is ModuleTask.loss and self.kinds[self.target] == "list" and isinstance(outputs, Tensor):
            name, values = "predicted", outputs
            if self.classes_last and outputs.ndim == 3:
                name, values = "predicted_index", outputs.argmax(2)
            return {name: strip_padding(values, batch, self.columns_of_model())}
        if self._classifies(outputs):
            return predict_classes(outputs, self.classes)
        axes = outputs.ndim if isinstance(outputs, Tensor) else 0
        if self.kinds[self.target] == MASK and axes == 4 and outputs.shape[1] > 1:
            return {"predicted_index": outputs.argmax(1).numpy()}
        if self.classes_last and axes == 3:
            return {"predicted_index": outputs.argmax(2).numpy()}
        return super().predictions(outputs, batch)

    def answers(self, outputs: Any, batch: Batch) -> list[Any]:
        """Returns classes by name, labels by name where the target is an array of 0 and 1, or numbers."""
        is_scores = isinstance(outputs, Tensor) and outputs.ndim in (1, 2)
        if self._classifies(outputs):
            return class_answers(outputs.float().softmax(1), self.classes)
        if not is_scores or self.kinds[self.target] == "list":
            return super().answers(outputs, batch)
        scores = outputs.float().reshape(len(outputs), -1)
        if self._activation() != "sigmoid" and not self.loss_spec["class_path"].endswith(".BCELoss"):
            return scores[:, 0].tolist() if scores.shape[1] == 1 else super().answers(outputs, batch)
        likely = scores.sigmoid() if self._activation() == "sigmoid" else scores
        if scores.shape[1] == 1:
            classes = self.classes if len(self.classes) == 2 else ["0", "1"]
            return class_answers(torch.cat([1 - likely, likely], 1), classes)
        return label_answers(likely, [str(label) for label in range(scores.shape[1])])

    def mistakes(self, outputs: Any, batch: Batch, max_rows: int) -> list[Mistake]:
        """Returns the wrong predictions with the highest confidence, see `Task.mistakes`."""
        return find_mistakes(outputs, batch[self.target], self.classes, max_rows) if self._classifies(outputs) else []
