"""A plain PyTorch loop in a function of the user's, as a task."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ray_app.config.class_path import load_class
from ray_app.config.optimizers import OWN_OPTIMIZER, OptimizerSpec
from ray_app.errors import ConfigError
from ray_app.task.base import Batch
from ray_app.task.losses import Losses
from ray_app.task.rows.transforms import Spec
from ray_app.task.score.deciding import Mode
from ray_app.task.script.batches import BatchTask, Evaluated, mean_of
from ray_app.task.script.scripted import Loop, Running

if TYPE_CHECKING:
    from ray_app.config.config import Config

_STRATEGIES = ("ddp", "single")
_RUNNING: dict[nn.Module, Running] = {}
"""The loops of this process, by the model that they train."""


class LoopTask(BatchTask):
    """A script's own loop by the import path of its function, which gets a `ray_app.Loop`::

        task:
          class_path: ray_app.task.loop.LoopTask
          init_args:
            train: script.train
            settings: {lr: 0.003}
            evaluate: script.evaluate
            module: {class_path: script.Net}
            rows: [image, label]
            target: label

    docs/loop.md has such a script.

    Args:
        train: Import path of the function that is called with the loop, and with `settings`, in every worker.
        module: The model, or a function that returns one.
        rows: Columns that the script gets, by their names; `COLUMN.mask` as in `ModuleTask`.
        settings: Arguments of that function by their names.
        evaluate: Import path of a function that is called with the model and rows and returns a dictionary of means over these rows, `loss`
            among them, and of torchmetrics objects that saw them, whose states are combined. Needed for `data.eval_path`.
        target: Column that a prediction lacks; not given: it has all of them. The model is called with the other columns, in their order.
        transforms: See `ModuleTask`.
        evaluate_transforms: See `ModuleTask`.
        mean: See `ModuleTask`.
        std: See `ModuleTask`.
        pad_with: See `ModuleTask`.
        pad_to: See `ModuleTask`.
        max_length: See `ModuleTask`.
        best_metric: Which of the means that `evaluate` returns decides which checkpoint is best.
        best_mode: Whether less (`min`) or more (`max`) of it is better; not given: less, of a loss.
        exif_orientation: See `ModuleTask`.
    """

    functions: ClassVar[tuple[str, ...]] = ("train", "evaluate")
    """Arguments that are import paths of functions, whose files the result depends on."""

    def __init__(
        self,
        train: str,
        module: Spec,
        rows: list[str],
        settings: dict[str, Any] | None = None,
        evaluate: str | None = None,
        target: str | None = None,
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
        super().__init__(
            module,
            rows,
            target,
            transforms,
            evaluate_transforms,
            mean,
            std,
            pad_with,
            pad_to,
            max_length,
            best_metric,
            best_mode,
            exif_orientation,
        )
        self.train, self.settings, self.evaluate = train, settings or {}, evaluate

    def unfit(self, config: Config) -> list[str]:
        """What the script has of its own, or what takes its model from it."""
        problems = []
        if config.optimizers is not None or config.optimizer not in (type(config).optimizer, OptimizerSpec(OWN_OPTIMIZER)):
            problems.append("The script makes its optimizer and keeps it (loop.keep); leave optimizer and optimizers out.")
        if config.train.strategy not in _STRATEGIES:
            problems.append(
                f"train.strategy is {config.train.strategy}, which needs more of a model's than the script's loop leaves it; use"
                f" {' or '.join(_STRATEGIES)}."
            )
        if config.train.compile:
            problems.append("train.compile compiles the model that a task is given; compile the model in the script, and leave it out.")
        if config.train.capture:
            problems.append("train.capture needs each step to do the same, and a script may do something else in each; leave it out.")
        return problems

    def _script(self) -> Callable[[Loop], None]:
        return partial(load_class(self.train), **self.settings)

    def _rows(self, batch: Batch) -> Batch:
        return {str(self.batch[place]): values for place, values in self.fields(batch).items()}

    def own_optimizer(self, model: nn.Module) -> tuple[Optimizer, LRScheduler | None]:
        """What the script keeps; its loop waits for the first step from then on."""
        running = Running(self._script(), model)
        kept = running.kept
        _RUNNING[model] = running
        return kept

    def training_loss(self, model: nn.Module, batch: Batch) -> Losses:
        """What the script makes of a micro-batch."""
        if hasattr(model, "_orig_mod"):
            raise ConfigError("train.compile compiles the model that a task is given; compile the model in the script, and leave it out.")
        if model in _RUNNING:
            return _RUNNING[model].losses(self._rows(batch))
        once = Running(self._script(), model)  # a trial, of a model that no loop trains
        try:
            return once.losses(self._rows(batch))
        finally:
            once.end()

    def apply_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Lets the script make the step."""
        if model not in _RUNNING:
            raise ConfigError(
                f"The script makes its optimizer, and the configuration has a {type(optimizer).__name__}, or train.strategy keeps a model"
                " of its own to be moved. Leave optimizer out, and use ddp or single."
            )
        _RUNNING[model].update()

    def finish(self, model: nn.Module) -> None:
        """Lets the script do what comes after its loop."""
        if model in _RUNNING:
            _RUNNING.pop(model).end()

    def evaluated(self, model: nn.Module, batch: Batch) -> Evaluated:
        """What `evaluate` returns."""
        if self.evaluate is None:
            raise ConfigError("data.eval_path is given, and task.init_args.evaluate is not; name the script's function, or leave it out.")
        from torchmetrics import Metric

        from ray_app.task.score.logged import take_metrics

        returned = load_class(self.evaluate)(model, self._rows(batch))
        metrics = {name: value for name, value in returned.items() if isinstance(value, Metric)}
        found = {name: mean_of(name, value) for name, value in returned.items() if name not in metrics}
        if "loss" not in found:
            raise ConfigError(f"{self.evaluate} returned {', '.join(returned) or 'nothing'}, without loss; return it, too.")
        return Evaluated(found.pop("loss"), found, take_metrics(metrics))
