"""Any `nn.Module` from the configuration alone: which columns it takes, what it is compared with, and how."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ray_app.config.import_paths import require
from ray_app.errors import ConfigError, DataError
from ray_app.plan.manifest import DataFacts
from ray_app.task.annotations import MetricCollection
from ray_app.task.base import Batch, Losses, Mistake, Rows, Task, class_names, need_column
from ray_app.task.classification import find_mistakes, predict_classes
from ray_app.task.configured_arguments import (
    Activation,
    activation_of,
    compute_row_losses,
    need_channels,
    need_flat,
    need_lists,
    need_numbers,
    need_specs,
    parse_mask_values,
    probabilities,
    reduction_of,
    refuse_values,
    resolve_best_mode,
    target_range,
)
from ray_app.task.device import constant_tensor
from ray_app.task.fields import convert_column, need_as_long, need_finite, strip_padding, too_many_classes
from ray_app.task.images import IMAGE, MASK, decode_columns, is_image_column, is_mask
from ray_app.task.metric_states import is_classification
from ray_app.task.metrics import Mode
from ray_app.task.ragged import LENGTHS, Arrays, Field, Ragged
from ray_app.task.transforms import Spec, instantiate, instantiate_once

_MASK_SUFFIX = ".mask"
_KINDS = ("number", "integer", "array", "bytes", "list")


class ModuleTask(Task):
    """A model, a loss and metrics by their import paths::

        task:
          class_path: ray_app.task.module.ModuleTask
          init_args:
            model: {class_path: torchvision.models.resnet18, init_args: {num_classes: 10}}
            inputs: [image]
            target: label
            loss: {class_path: torch.nn.CrossEntropyLoss, init_args: {label_smoothing: 0.1}}
            metrics: {accuracy: {class_path: torchmetrics.classification.MulticlassAccuracy, init_args: {num_classes:
            10}}} transforms:
              - {class_path: torchvision.transforms.v2.RandomResizedCrop, init_args: {size: 224}}
            evaluate_transforms:
              - {class_path: torchvision.transforms.v2.Resize, init_args: {size: [224, 224]}}

    Columns of numbers come to the model as float32, integers as int64, lists of numbers padded to the longest of a
    micro-batch, arrays as they are, and images (encoded files, and arrays of uint8 with two or three axes) as float32
    from 0 to 1, channels first.

    Args:
        model: The module, or a function that returns one; values of `init_args` may be specifications themselves, such
            as the configuration of a `transformers` model.
        inputs: Columns in the order of the model's arguments, or by their names: `{input_ids: tokens, attention_mask:
            tokens.mask}`, where `.mask` is 1 for the tokens of a list and 0 for what it is padded with.
        target: Column that the outputs are compared with; beside images it may be their masks, encoded (PNG of one
            channel or a palette) or integers of two axes: int64 class indices of pixels, which go through the same
            transforms.
        loss: Called with outputs and target, as `torch.nn.CrossEntropyLoss`; the mean is over the global batch: what it
            gives more than one value of for a row counts as often (pixels, but those of its `ignore_index`). Lists as
            `weight` and `pos_weight` are weights of classes; a target of the outputs' shape becomes of their type
            (`torch.nn.BCEWithLogitsLoss`).
        output: What of the model's outputs is compared, where they are a dictionary or an object: `logits`, `out`.
        classes_last: Whether the scores of classes are the last axis of the outputs, as models of `transformers` have
            them for each token, and not the second one, where torch's losses look for them.
        metrics: `torchmetrics` by the name that they are recorded under.
        activation: What makes probabilities of the outputs for metrics of `torchmetrics.classification`: `sigmoid`,
            `softmax` (over the classes) or `none`; not given: what goes with the loss, of torch and torchvision
            (`sigmoid` with `BCEWithLogitsLoss`, `softmax` with `CrossEntropyLoss`), none with losses of your own. Other
            metrics get the outputs as they are.
        train_accuracy: Whether the accuracy of each training step is recorded beside its loss; the target must be
            classes, or 0 and 1 for a loss such as `torch.nn.BCEWithLogitsLoss`.
        transforms: What is done to rows to train on, in the readers; what is random in it draws from the row's key,
            which is another one in every epoch.
        evaluate_transforms: What is done to rows to evaluate and to predict on; it must give the shapes that
            `transforms` gives.
        exif_orientation: Whether encoded images and masks are turned and mirrored as their EXIF orientation says, as
            viewers show them, before the transforms; false: they are decoded as they are stored.
        mean: Subtracted from images after scaling to [0, 1], one per channel or one for all.
        std: Images are divided by it, likewise.
        pad_with: What lists are padded with.
        pad_to: What the length of padded lists is a multiple of.
        max_length: Most numbers of a list that are used, from its beginning; not given: all.
        mask_values: The class of each value of a mask, such as {0: 0, 255: 1}; not given: the values are the classes.
        best_metric: Metric that decides which checkpoint is best.
        best_mode: Whether less (`min`) or more (`max`) of it is better; not given: as the metric's `higher_is_better`
            says, of a loss less.
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
        mask_values: dict[int, int] | None = None,
        best_metric: str = "loss",
        best_mode: Mode | None = None,
        exif_orientation: bool = True,
    ) -> None:
        if not inputs:
            raise ConfigError("task.init_args.inputs is empty; name the columns that the model takes.")
        self.model, self.inputs, self.target, self.loss_spec, self.output = model, inputs, target, loss, output
        self.metric_specs, self.transforms, self.evaluate_transforms = (
            metrics or {},
            transforms or [],
            evaluate_transforms or [],
        )
        self.classes_last, self.train_accuracy, self.exif_orientation = classes_last, train_accuracy, exif_orientation
        if activation is not None and activation not in get_args(Activation):
            raise ConfigError(
                f"task.init_args.activation is {activation!r}; it must be one of {', '.join(get_args(Activation))}."
            )
        self.activation = activation
        self.mean, self.std, self.pad_with, self.pad_to, self.max_length = (
            mean or [0.0],
            std or [1.0],
            pad_with,
            pad_to,
            max_length,
        )
        self.mask_classes = parse_mask_values(mask_values)
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
        self.ranges: dict[str, list[float]] = {}
        self.classes: list[str] = []
        # What the loss and the model allow in the target, see `target_range`; the preflight sets it.
        self.target_range: list[int] | None = None

    def prepare(self, data: DataFacts) -> ModuleTask:
        """Looks at the columns; see `Task.prepare`."""
        prepared = copy.copy(self)
        prepared.kinds = {}
        facts = {
            name: need_column(data, name, _KINDS, "target" if name == self.target else "model")
            for name in self.columns()
        }
        need_lists(
            data, facts, (name.removesuffix(_MASK_SUFFIX) for name in self._named() if name.endswith(_MASK_SUFFIX))
        )
        if type(self).loss is ModuleTask.loss:
            need_flat(data, self.target, facts[self.target])
        beside_images = any(is_image_column(facts[name]) for name in self._columns_of_model())
        for name, column in facts.items():
            is_target = name not in self._columns_of_model()
            if is_target and beside_images and is_mask(column):
                prepared.kinds[name] = MASK
            else:
                prepared.kinds[name] = IMAGE if is_image_column(column) else column.kind
            if prepared.kinds[name] == IMAGE:
                need_channels(name, column, mean=self.mean, std=self.std)
            if column.kind == "bytes":
                require("torchvision", f"Decoding the images of column {name!r}")
                if not self.evaluate_transforms:
                    raise DataError(
                        f"Column {name!r} of {data.path} holds encoded images, which may have any size; set"
                        " task.init_args.evaluate_transforms to give them one size (torchvision.transforms.v2.Resize,"
                        " CenterCrop)."
                    )
        if (self.transforms or self.evaluate_transforms) and IMAGE not in prepared.kinds.values():
            raise DataError(
                f"task.init_args.transforms are for images, and of {data.path} none of {', '.join(self.columns())} is a"
                " column of images."
            )
        known = {
            name: (column.minimum, column.maximum)
            for name, column in facts.items()
            if prepared.kinds[name] in ("integer", "list")
        }
        prepared.ranges = {
            name: [least, most] for name, (least, most) in known.items() if least is not None and most is not None
        }
        compared = facts[self.target]
        if (
            compared.kind == "integer"
            and compared.maximum is not None
            and compared.minimum is not None
            and compared.minimum >= 0
        ):
            count = int(compared.maximum) + 1
            prepared.classes = [] if too_many_classes(data, count) and not data.classes else class_names(data, count)
        return prepared

    def _named(self) -> list[str]:
        return list(self.inputs.values() if isinstance(self.inputs, dict) else self.inputs)

    def _columns_of_model(self) -> list[str]:
        return list(dict.fromkeys(name.removesuffix(_MASK_SUFFIX) for name in self._named()))

    def columns(self) -> list[str]:
        """See `Task.columns`."""
        return list(dict.fromkeys([*self._columns_of_model(), self.target]))

    def targets(self) -> list[str]:
        """See `Task.targets`."""
        return [] if self.target in self._columns_of_model() else [self.target]

    @property
    def has_epoch_decode(self) -> bool:
        """Whether there are transforms for training."""
        return bool(self.transforms)

    def decode(self, rows: Rows) -> Arrays:
        """See the class."""
        return self._decoded(
            rows, instantiate_once(self.evaluate_transforms, "task.init_args.evaluate_transforms"), None
        )

    def decode_training(self, rows: Rows, keys: npt.NDArray[np.int64]) -> Arrays:
        """See the class."""
        return self._decoded(rows, instantiate_once(self.transforms, "task.init_args.transforms"), keys)

    def _decoded(self, rows: Rows, transforms: Sequence[Any], keys: npt.NDArray[np.int64] | None) -> Arrays:
        if self.classes_last:
            need_as_long(rows, self.target, self._columns_of_model())
        images = {name: kind for name, kind in self.kinds.items() if kind in (IMAGE, MASK)}
        fields: dict[str, Field] = {
            name: self._values(rows[name], kind) for name, kind in self.kinds.items() if name not in images
        }
        for name, values in fields.items():
            need_finite(f"column {name!r}", values)
        if images:
            stored = {name: rows[name] for name in images}
            fields |= decode_columns(stored, images, transforms, keys, self.exif_orientation, self.mask_classes)
        self.refuse_target(fields)
        return fields

    def _values(self, values: Any, kind: str) -> Field:
        found = convert_column(values, kind)
        if not isinstance(found, Ragged):
            return found
        cut = found if self.max_length is None else found.cut(self.max_length)
        return cut.padded_with(self.pad_with, self.pad_to)

    def build_model(self) -> nn.Module:
        """See `Task.build_model`."""
        model = instantiate(self.model, "task.init_args.model")
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"task.init_args.model {self.model['class_path']} makes a {type(model).__name__}; it must make an"
                " nn.Module."
            )
        return model

    def _input(self, batch: Batch, name: str) -> Tensor:
        column = name.removesuffix(_MASK_SUFFIX)
        values = batch[column]
        if name.endswith(_MASK_SUFFIX):
            return (torch.arange(values.shape[1], device=values.device) < batch[column + LENGTHS][:, None]).long()
        if self.kinds[column] == MASK:
            return values.long()
        if self.kinds[column] == IMAGE:
            values = values.float() / 255
            if self.mean != [0.0] or self.std != [1.0]:
                mean, std = (constant_tensor(each, values.device)[:, None, None] for each in (self.mean, self.std))
                values = (values - mean) / std
        return values

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """What of the model's outputs is compared with the target."""
        if isinstance(self.inputs, dict):
            outputs = model(**{argument: self._input(batch, name) for argument, name in self.inputs.items()})
        else:
            outputs = model(*(self._input(batch, name) for name in self.inputs))
        if self.output is not None:
            return outputs[self.output] if isinstance(outputs, dict) else getattr(outputs, self.output)
        return outputs

    def _compared(self, outputs: Any, batch: Batch) -> tuple[Any, Tensor]:
        """Outputs and target in shapes that fit: (rows, 1) is (rows,) where the target has no such axis; integers as
        int64.
        """
        target = self._input(batch, self.target)
        if isinstance(outputs, Tensor) and outputs.ndim == target.ndim + 1:
            if self.classes_last:
                outputs = outputs.movedim(-1, 1)
            elif outputs.shape[-1] == 1 and outputs.shape[:-1] == target.shape:
                outputs = outputs.squeeze(-1)
            elif (
                outputs.shape[1] == 1 and outputs.shape[:1] + outputs.shape[2:] == target.shape
            ):  # one score of each pixel
                outputs = outputs.squeeze(1)
        return outputs, target if target.is_floating_point() else target.long()

    def note_target_range(self, model: nn.Module, batch: Batch) -> None:
        """Looks at the outputs for some rows, so that `decode` refuses rows with values that the loss does not take.

        Raises:
            ValueError: These rows have such values.
        """
        if type(self).loss is not ModuleTask.loss or type(self).training_loss is not ModuleTask.training_loss:
            return
        outputs, target = self._compared(self.forward(model, batch), batch)
        self.target_range = target_range(self.loss_spec, outputs, target)
        values, there = batch[self.target], self._there(batch)
        self.refuse_target({self.target: (values if there is None else values[there]).numpy()})

    def refuse_target(self, fields: Arrays) -> None:
        """Refuses decoded rows whose target has values that the loss does not take, as far as that is known.

        Raises:
            ValueError: There are such values.
        """
        if self.target_range is not None:
            target = fields[self.target]
            values = target.values if isinstance(target, Ragged) else target
            refuse_values(self.target, values, self.target_range, self.kinds[self.target] == MASK)

    def _there(self, batch: Batch) -> Tensor | None:
        """Which values of a target of lists are no padding; of another target None."""
        return self._input(batch, self.target + _MASK_SUFFIX).bool() if self.kinds[self.target] == "list" else None

    def loss(self, outputs: Any, batch: Batch) -> Tensor | Losses:
        """See `compute_row_losses`."""
        return compute_row_losses(
            self.loss_spec, *self._compared(outputs, batch), self.train_accuracy, self._there(batch)
        )

    def metrics(self) -> MetricCollection:
        """Those of the configuration."""
        from torchmetrics import MetricCollection

        metrics = {
            name: instantiate(spec, f"task.init_args.metrics.{name}") for name, spec in self.metric_specs.items()
        }
        return MetricCollection(metrics, compute_groups=False)

    def update(self, metrics: MetricCollection, outputs: Any, batch: Batch) -> None:
        """Compares outputs and target, of lists (values,) and (values, classes) without what they are padded with; see
        `Task.update`.
        """
        if not self.metric_specs:
            return
        outputs, target = self._compared(outputs, batch)
        known = probabilities(outputs, self._activation())
        if (there := self._there(batch)) is not None:
            outputs, known = (
                (scores.movedim(1, -1) if scores.ndim > target.ndim else scores)[there] for scores in (outputs, known)
            )
            target = target[there]
            if not target.numel():  # of which some metrics cannot be told
                return
        for metric in metrics.values(copy_state=False):
            metric.update(known if is_classification(metric) else outputs, target)

    def _activation(self) -> Activation:
        if self.activation is not None:
            return self.activation
        return activation_of(json.dumps(self.loss_spec)) if type(self).loss is ModuleTask.loss else "none"

    def _classifies(self, outputs: Any) -> bool:
        return isinstance(outputs, Tensor) and outputs.ndim == 2 and 1 < outputs.shape[1] == len(self.classes)

    def predictions(self, outputs: Any, batch: Batch) -> Arrays:
        """Returns class, number and confidence where there is one score for each class; of pixels and of tokens the
        numbers of their classes, as `predicted_index`; else the outputs as `predicted`.

        Where the target is a column of lists, each row is as long as its list: outputs for the padding are left out.
        """
        if type(self).loss is ModuleTask.loss and self.kinds[self.target] == "list" and isinstance(outputs, Tensor):
            name, values = "predicted", outputs
            if self.classes_last and outputs.ndim == 3:
                name, values = "predicted_index", outputs.argmax(2)
            return {name: strip_padding(values, batch, self._columns_of_model())}
        if self._classifies(outputs):
            return predict_classes(outputs, self.classes)
        if (
            self.kinds[self.target] == MASK
            and isinstance(outputs, Tensor)
            and outputs.ndim == 4
            and outputs.shape[1] > 1
        ):
            return {"predicted_index": outputs.argmax(1).numpy()}
        if self.classes_last and isinstance(outputs, Tensor) and outputs.ndim == 3:
            return {"predicted_index": outputs.argmax(2).numpy()}
        return super().predictions(outputs, batch)

    def mistakes(self, outputs: Any, batch: Batch, max_rows: int) -> list[Mistake]:
        """See `Task.mistakes`."""
        return find_mistakes(outputs, batch[self.target], self.classes, max_rows) if self._classifies(outputs) else []
