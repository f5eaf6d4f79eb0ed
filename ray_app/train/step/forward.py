"""A micro-batch's rows through the model to their losses, as the configuration has them computed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ray_app.config.config import Config
from ray_app.data.feed.windows import MicroBatch
from ray_app.plan.cursor import Cursor
from ray_app.task import environment
from ray_app.task.base import Batch, Task
from ray_app.task.losses import Losses, of_rows
from ray_app.task.roi_align import use_eager_roi_align
from ray_app.train.state.seeds import seed_step

_MOST_CONSTANTS = 16


class Forward:
    """See the module.

    Args:
        config: Seed, precision, layout, compilation.
        task: Whose rows.
        device: Where it runs.
        loss: A model and rows to what the task says of them.
    """

    def __init__(self, config: Config, task: Task, device: torch.device, loss: Callable[[nn.Module, Batch], Tensor | Losses]) -> None:
        self._task, self._device, self._loss, self._seed, train = task, device, loss, config.seed, config.train
        self._autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(train.precision)
        self._compiles, self._channels_last = train.compile, train.channels_last
        if train.compile:
            environment.need_compiler(device)
        if device.type == "cuda":
            use_eager_roi_align()
        self._compiled_models: dict[nn.Module, Any] = {}
        self._constants: dict[tuple[int, float], Tensor] = {}

    def fields(self, cursor: Cursor, batch: MicroBatch) -> Batch:
        """The rows as the model takes them; the generators are then where its forward begins."""
        seed_step(self._seed, cursor.epoch, cursor.step, batch.logical_worker, self._device)
        fields = self._task.augment(batch.fields, batch.keys)
        if self._channels_last:  # not the parameters: fused optimizers take a gradient's values for ones in their layout
            fields = {name: v.contiguous(memory_format=torch.channels_last) if v.ndim == 4 else v for name, v in fields.items()}
        return fields

    def losses(self, model: nn.Module, fields: Batch, rows: int) -> Losses:
        """The losses of so many rows."""
        called = self._compiled(model) if self._compiles and rows > 1 else model
        with torch.autocast(self._device.type, self._autocast) if self._autocast else nullcontext():
            found = self._loss(called, fields)
        return of_rows(self._task, found, rows).float()

    def weights(self, rows: int, over: float, scale: float) -> Tensor:
        """One over what the mean is over, scaled, for every row of a micro-batch, shape (rows,); made once for those that are alike."""
        value = scale / over
        held = self._constants.get((rows, value))
        if held is None or held._version:  # a task's backward may have written into it
            if len(self._constants) == _MOST_CONSTANTS:
                self._constants.clear()
            held = self._constants[rows, value] = torch.full((rows,), value, device=self._device)
        return held

    def _compiled(self, model: nn.Module) -> Any:
        """A model compiled for every shape that comes, each on its own: what a shape gives must not depend on those before it."""
        if model not in self._compiled_models:
            self._compiled_models[model] = torch.compile(model, dynamic=False)
        return self._compiled_models[model]
