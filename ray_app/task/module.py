"""Any `nn.Module` from the configuration alone: which columns it takes, what it is compared with, and how."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ray_app.config.extras import require
from ray_app.errors import ConfigError, DataError
from ray_app.plan.facts import DataFacts
from ray_app.task.annotations import MetricCollection
from ray_app.task.base import Batch, Mistake, Rows, Task, class_names, need_column
from ray_app.task.classification import class_predictions, wrong_classes
from ray_app.task.images import pixels_of
from ray_app.task.ragged import LENGTHS, Arrays, Field, Ragged
from ray_app.task.transforms import Spec, made, plain, transformed

_MASK = ".mask"
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
            metrics: {accuracy: {class_path: torchmetrics.classification.MulticlassAccuracy, init_args: {num_classes: 10}}}
            transforms:
              - {class_path: torchvision.transforms.v2.RandomResizedCrop, init_args: {size: 224}}
            evaluate_transforms:
              - {class_path: torchvision.transforms.v2.Resize, init_args: {size: [224, 224]}}

    Columns of numbers come to the model as float32, integers as int64, lists of numbers padded to the longest of a micro-batch, arrays as
    they are, and images (encoded files, and arrays of uint8 with three axes) as float32 from 0 to 1, channels first.

    Args:
        model: The module, or a function that returns one; values of `init_args` may be specifications themselves, such as the
            configuration of a `transformers` model.
        inputs: Columns in the order of the model's arguments, or by their names: `{input_ids: tokens, attention_mask: tokens.mask}`, where
            `.mask` is 1 for the tokens of a list and 0 for what it is padded with.
        target: Column that the outputs are compared with; images are class indices of pixels (masks).
        loss: Called with outputs and target, as `torch.nn.CrossEntropyLoss`; its `reduction` is set to `none`, and a row's loss is the mean
            of what it gives for the row.
        output: What of the model's outputs is compared, where they are a dictionary or an object: `logits`, `out`.
        metrics: `torchmetrics` by the name that they are recorded under.
        transforms: What is done to rows to train on, in the readers; what is random in it draws from the row's key, which is another one in
            every epoch.
        evaluate_transforms: What is done to rows to evaluate and to predict on; it must give the shapes that `transforms` gives.
        mean: Subtracted from images after scaling to [0, 1], one per channel or one for all.
        std: Images are divided by it, likewise.
        pad_with: What lists are padded with.
        pad_to: What the length of padded lists is a multiple of.
        max_length: Most numbers of a list that are used, from its beginning; not given: all.
        best_metric: Metric that decides which checkpoint is best.
        best_mode: Whether less (`min`) or more (`max`) of it is better.
    """

    def __init__(
        self,
        model: Spec,
        inputs: list[str] | dict[str, str],
        target: str,
        loss: Spec,
        output: str | None = None,
        metrics: dict[str, Spec] | None = None,
        transforms: list[Spec] | None = None,
        evaluate_transforms: list[Spec] | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        pad_with: float = 0,
        pad_to: int = 1,
        max_length: int | None = None,
        best_metric: str = "loss",
        best_mode: str = "min",
    ) -> None:
        if not inputs:
            raise ConfigError("task.init_args.inputs is empty; name the columns that the model takes.")
        self.model, self.inputs, self.target, self.loss_spec, self.output = model, inputs, target, loss, output
        self.metric_specs, self.transforms, self.evaluate_transforms = metrics or {}, transforms or [], evaluate_transforms or []
        self.mean, self.std, self.pad_with, self.pad_to, self.max_length = mean or [0.0], std or [1.0], pad_with, pad_to, max_length
        self.best_metric, self.best_mode = best_metric, best_mode  # type: ignore[misc]
        self.kinds: dict[str, str] = {}
        self.classes: list[str] = []

    def prepare(self, data: DataFacts) -> ModuleTask:
        """Looks at the columns; see `Task.prepare`."""
        prepared = copy.copy(self)
        prepared.kinds = {}
        for column in self.columns():
            facts = need_column(data, column, _KINDS, "target" if column == self.target else "model")
            image = facts.kind == "bytes" or (facts.kind == "array" and len(facts.shape) == 3 and facts.dtype == "|u1")
            prepared.kinds[column] = "image" if image else facts.kind
            if facts.kind == "bytes":
                require("torchvision", f"Decoding the images of column {column!r}")
                if not self.evaluate_transforms:
                    raise DataError(
                        f"Column {column!r} of {data.path} holds encoded images, which may have any size; set"
                        " task.init_args.evaluate_transforms to give them one size (torchvision.transforms.v2.Resize, CenterCrop)."
                    )
        if (self.transforms or self.evaluate_transforms) and "image" not in prepared.kinds.values():
            raise DataError(
                f"task.init_args.transforms are for images, and of {data.path} none of {', '.join(self.columns())} is a column of images."
            )
        facts = data.columns[self.target]
        if facts.kind == "integer" and facts.maximum is not None and facts.minimum is not None and facts.minimum >= 0:
            prepared.classes = class_names(data, int(facts.maximum) + 1)
        return prepared

    def _columns_of_model(self) -> list[str]:
        named = self.inputs.values() if isinstance(self.inputs, dict) else self.inputs
        return list(dict.fromkeys(name.removesuffix(_MASK) for name in named))

    def columns(self) -> list[str]:
        """See `Task.columns`."""
        return list(dict.fromkeys([*self._columns_of_model(), self.target]))

    def targets(self) -> list[str]:
        """See `Task.targets`."""
        return [] if self.target in self._columns_of_model() or self.kinds.get(self.target) != "integer" else [self.target]

    @property
    def decodes_by_epoch(self) -> bool:
        """Whether there are transforms for training."""
        return bool(self.transforms)

    def decode(self, rows: Rows) -> Arrays:
        """See the class."""
        return self._decoded(rows, _once(self.evaluate_transforms, "task.init_args.evaluate_transforms"), None)

    def decode_training(self, rows: Rows, keys: npt.NDArray[np.int64]) -> Arrays:
        """See the class."""
        return self._decoded(rows, _once(self.transforms, "task.init_args.transforms"), keys)

    def _decoded(self, rows: Rows, transforms: Sequence[Any], keys: npt.NDArray[np.int64] | None) -> Arrays:
        fields: dict[str, Field] = {}
        images = [name for name, kind in self.kinds.items() if kind == "image"]
        for name, kind in self.kinds.items():
            if kind == "list":
                fields[name] = self._cut(rows[name])
            elif kind != "image":
                wanted = {"number": np.float32, "integer": np.int64}.get(kind)
                fields[name] = np.asarray(rows[name], wanted) if wanted else np.asarray(rows[name])
        if not images:
            return fields
        found: dict[str, list[npt.NDArray]] = {name: [] for name in images}
        for row in range(len(rows[images[0]])):
            sample = {name: self._image(rows[name][row], name) for name in images}
            done = transformed(sample, transforms, None if keys is None else int(keys[row])) if transforms else sample
            for name in images:
                found[name].append(plain(done[name]).numpy())
        shapes = {name: sorted({one.shape for one in values}) for name, values in found.items()}
        if wrong := [name for name, several in shapes.items() if len(several) > 1]:
            raise ValueError(
                f"images of {wrong[0]!r} have the shapes {shapes[wrong[0]][:3]}; let task.init_args.transforms and evaluate_transforms give"
                " them one size (Resize, CenterCrop, RandomResizedCrop)"
            )
        return fields | {name: np.stack(values) for name, values in found.items()}

    def _image(self, stored: Any, name: str) -> Tensor:
        """A row's image or mask for transforms: channels first, a mask (height, width)."""
        from torchvision import tv_tensors

        image = pixels_of(stored) if isinstance(stored, bytes) else torch.from_numpy(np.ascontiguousarray(stored.transpose(2, 0, 1)))
        return tv_tensors.Mask(image[0]) if name == self.target else tv_tensors.Image(image)

    def _cut(self, lists: Any) -> Ragged:
        if not isinstance(lists, Ragged):
            raise ValueError("a list holds no numbers, or a missing value")
        if self.max_length is not None and (lists.lengths > self.max_length).any():
            rows = (lists.row(i)[: self.max_length] for i in range(len(lists)))
            lists = Ragged.of(rows, lists.values.dtype, row_shape=lists.row_shape)
        return lists.padded_with(self.pad_with, self.pad_to)

    def build_model(self) -> nn.Module:
        """See `Task.build_model`."""
        model = made(self.model, "task.init_args.model")
        if not isinstance(model, nn.Module):
            raise ConfigError(f"task.init_args.model {self.model['class_path']} makes a {type(model).__name__}; it must make an nn.Module.")
        return model

    def _input(self, batch: Batch, name: str) -> Tensor:
        column = name.removesuffix(_MASK)
        values = batch[column]
        if name.endswith(_MASK):
            return (torch.arange(values.shape[1], device=values.device) < batch[column + LENGTHS][:, None]).long()
        if self.kinds[column] == "image":
            values = values.float() / 255
            if self.mean != [0.0] or self.std != [1.0]:
                values = (values - values.new_tensor(self.mean)[:, None, None]) / values.new_tensor(self.std)[:, None, None]
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
        """Outputs and target in shapes that fit: (rows, 1) is (rows,) where the target has no such axis."""
        target = batch[self.target]
        if target.dtype == torch.uint8 and self.kinds[self.target] == "image":
            target = target.long()
        if isinstance(outputs, Tensor) and outputs.ndim == target.ndim + 1 and outputs.shape[-1] == 1:
            outputs = outputs.squeeze(-1)
        return outputs, target

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """The mean of what the loss gives for each row, shape (rows,)."""
        per_value = {**self.loss_spec, "init_args": {**(self.loss_spec.get("init_args") or {}), "reduction": "none"}}
        losses = _once(per_value, "task.init_args.loss")(*self._compared(outputs, batch))
        return losses.flatten(1).mean(1) if losses.ndim > 1 else losses

    def metrics(self) -> MetricCollection:
        """Those of the configuration."""
        from torchmetrics import MetricCollection

        return MetricCollection({name: made(spec, f"task.init_args.metrics.{name}") for name, spec in self.metric_specs.items()})

    def update(self, metrics: MetricCollection, outputs: Any, batch: Batch) -> None:
        """See `Task.update`."""
        if self.metric_specs:
            metrics.update(*self._compared(outputs, batch))

    def _classifies(self, outputs: Any) -> bool:
        return isinstance(outputs, Tensor) and outputs.ndim == 2 and 1 < outputs.shape[1] == len(self.classes)

    def predictions(self, outputs: Any) -> dict[str, npt.NDArray]:
        """Class, number and confidence where there is one score for each class, else the outputs as `predicted`."""
        return class_predictions(outputs, self.classes) if self._classifies(outputs) else super().predictions(outputs)

    def mistakes(self, outputs: Any, batch: Batch, most: int) -> list[Mistake]:
        """See `Task.mistakes`."""
        return wrong_classes(outputs, batch[self.target], self.classes, most) if self._classifies(outputs) else []


def _once(spec: Any, called: str) -> Any:
    """What a specification stands for, made once in a process: a task holds settings only."""
    return _made_once(json.dumps(spec), called)


@lru_cache(64)
def _made_once(spec: str, called: str) -> Any:
    return made(json.loads(spec), called)
