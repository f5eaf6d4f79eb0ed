"""A loop of the user's own, which asks for rows, under the loop of the application, which asks for losses.

Of two that both want to call, one has to wait: the user's runs in a thread. Only one of them runs at a time, each until
it needs the other, so that they share torch's generators as one program would.

A plain PyTorch loop in a function of the user's, as a task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ray_app.config.import_paths import TASK_OPTIMIZER, OptimizerSpec, load_class
from ray_app.errors import ConfigError
from ray_app.task.base import Batch, Losses
from ray_app.task.metrics import Mode
from ray_app.task.transforms import Spec
from ray_app.task.whole_batches import BatchTask, Evaluated, as_mean, count_rows

if TYPE_CHECKING:
    from ray_app.config.config import Config


class _Signal(Enum):
    WAITS = auto()
    GRADIENTS = auto()
    END = auto()
    RETURNED = auto()


class _EndedError(BaseException):
    """Ends a loop in the middle of a step."""


class Loop:
    """What a script's own loop iterates over; each iteration is a `Step` of the run::

        def train(loop):
            optimizer = torch.optim.AdamW(loop.model.parameters())
            loop.keep(optimizer)
            for step in loop:
                for rows in step:
                    step.add(cross_entropy(loop.model(rows["image"]), rows["label"]))
                optimizer.step()

    Args:
        model: What is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._kept: tuple[Optimizer, LRScheduler | None] | None = None
        self._asked, self._told = SimpleQueue[Any](), SimpleQueue[Any]()
        self._rows: Batch | None = None

    def keep(self, optimizer: Optimizer, schedule: LRScheduler | None = None) -> None:
        """Makes what moves the model part of what is checkpointed and given to new workers; once, before the first
        step.

        Args:
            optimizer: Of the model's parameters; the script calls its `step`.
            schedule: Moved after every step, by the application.
        """
        if self._kept is not None:
            raise RuntimeError(
                "loop.keep was called twice; one optimizer, and one schedule with it, is kept, before the first step"
            )
        self._kept = optimizer, schedule

    def __iter__(self) -> Iterator[LoopStep]:
        while True:
            said = self._wait(_Signal.WAITS)
            if said is _Signal.END:
                return
            self._rows = None if said is _Signal.GRADIENTS else said
            yield LoopStep(self)

    def _wait(self, told: Any) -> Any:
        """Lets the application go on until it has something."""
        self._told.put(told)
        said, autocast = self._asked.get()
        for kind, (enabled, dtype) in autocast.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        return said


class LoopStep:
    """One step of the run in a script's loop: iterated over, the micro-batches of the logical workers that this worker
    plays, as columns by name; afterwards the gradient of the global batch is in the parameters' `.grad`. A worker may
    have none, and after a lost worker those of a step may come once more.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._losses: Losses | None = None

    def __iter__(self) -> Iterator[Batch]:
        loop = self._loop
        while loop._rows is not None:
            self._losses = None
            yield loop._rows
            if self._losses is None:
                raise RuntimeError("the loop went on without step.add(loss) for the rows that it had")
            said = loop._wait(self._losses)
            if said is _Signal.END:
                raise _EndedError
            loop._rows = None if said is _Signal.GRADIENTS else said

    def add(self, loss: Tensor | Losses, **metrics: Tensor | float) -> None:
        """Adds the gradient of a loss of the rows at hand; backward follows when the loop asks for the next.

        Args:
            loss: The mean over the rows, or one for each, shape (rows,), or `Losses`.
            metrics: What else is recorded of the step: likewise.
        """
        if self._loop._rows is None or self._losses is not None:
            raise RuntimeError("step.add was called twice for the same rows, or without any; add losses up before it")
        rows = count_rows(self._loop._rows)
        found = loss if isinstance(loss, Losses) else Losses(_per_row("loss", loss, rows))
        more = {name: _per_row(name, value, rows).detach().to(found.values) for name, value in metrics.items()}
        self._losses = Losses(found.values, found.weights, {**found.metrics, **more})


def _per_row(name: str, value: Any, rows: int) -> Tensor:
    return value if isinstance(value, Tensor) and value.shape == (rows,) else as_mean(name, value).expand(rows)


class Running:
    """A script's loop that waits for what the application has for it.

    Args:
        train: The script's function.
        model: What it trains.

    Raises:
        Exception: Any of the script's, from every method.
    """

    def __init__(self, train: Callable[[Loop], None], model: nn.Module) -> None:
        self._loop, self._over = Loop(model), False
        self._thread = Thread(target=self._run, args=(train,), name="script", daemon=True)
        self._thread.start()
        if self._heard() is not _Signal.WAITS:
            raise _ended_early("has no `for step in loop`")

    def _run(self, train: Callable[[Loop], None]) -> None:
        place = next((p.device for p in self._loop.model.parameters()), None)
        try:
            if place is not None and place.type == "cuda":
                torch.cuda.set_device(place)
            train(self._loop)
            self._loop._told.put(_Signal.RETURNED)
        except BaseException as error:
            self._loop._told.put(error)

    @property
    def kept(self) -> tuple[Optimizer, LRScheduler | None]:
        """Optimizer and schedule of the script."""
        if self._loop._kept is None:
            self.end()
            raise RuntimeError("the script keeps no optimizer; call loop.keep(optimizer) before the first step")
        return self._loop._kept

    def losses(self, rows: Batch) -> Losses:
        """What the script makes of a micro-batch, columns by name."""
        found = self._say(rows)
        if isinstance(found, Losses):
            return found
        raise _ended_early("left the rows of a step before their end")

    def update(self) -> None:
        """Lets the script move the parameters by the gradients that they hold."""
        assert self._loop._kept is not None
        steps: list[object] = []
        optimizer, schedule = self._loop._kept
        moved = None if schedule is None else schedule.last_epoch
        hook = optimizer.register_step_post_hook(lambda *_: steps.append(None))
        found = self._say(_Signal.GRADIENTS)
        hook.remove()
        if found is not _Signal.WAITS:
            raise _ended_early("left `for step in loop` before it ended")
        if len(steps) != 1:
            raise RuntimeError(
                f"the script called optimizer.step {len(steps)} times in a step of its loop; call it once, after the"
                " rows"
            )
        if schedule is not None and schedule.last_epoch != moved:
            raise RuntimeError(
                "the script moved the schedule that it keeps, which is moved after every step anyway; leave"
                " schedule.step out"
            )

    def end(self) -> None:
        """Ends the loop, and waits for what the script does after it."""
        if not self._over:
            self._say(_Signal.END)
        self._thread.join()

    def _say(self, said: Any) -> Any:
        kind = next((p.device.type for p in self._loop.model.parameters()), "cpu")
        autocast = {each: (torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in {"cpu", kind}}
        self._loop._asked.put((said, autocast))
        return self._heard()

    def _heard(self) -> Any:
        found = self._loop._told.get()
        self._over = found is _Signal.RETURNED or isinstance(found, BaseException)
        if isinstance(found, BaseException) and not isinstance(found, _EndedError):
            raise found
        return found


def _ended_early(what: str) -> RuntimeError:
    return RuntimeError(f"the script {what}; its loop ends by itself after the last step of the run")


_STRATEGIES = ("ddp", "single")
_RUNNING: dict[nn.Module, Running] = {}
"""The loops of this process, by the model that they train."""


class LoopTask(BatchTask):
    """A script's own loop by the import path of its function, which gets a `ray_app.Loop`::

        task:
          class_path: ray_app.task.user_loop.LoopTask
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
        evaluate: Import path of a function that is called with the model and rows and returns a dictionary of means
            over these rows, `loss` among them, and of torchmetrics objects that saw them, whose states are combined.
            Needed for `data.eval_path`.
        target: Column that a prediction lacks; not given: it has all of them. The model is called with the other
            columns, in their order.
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

    def validate_config(self, config: Config) -> list[str]:
        """What the script has of its own, or what takes its model from it."""
        problems = []
        if config.optimizers is not None or config.optimizer not in (
            type(config).optimizer,
            OptimizerSpec(TASK_OPTIMIZER),
        ):
            problems.append(
                "The script makes its optimizer and keeps it (loop.keep); leave optimizer and optimizers out."
            )
        if config.train.strategy not in _STRATEGIES:
            problems.append(
                f"train.strategy is {config.train.strategy}, which needs more of a model's than the script's loop"
                f" leaves it; use {' or '.join(_STRATEGIES)}."
            )
        if config.train.compile:
            problems.append(
                "train.compile compiles the model that a task is given; compile the model in the script, and leave it"
                " out."
            )
        if config.train.capture:
            problems.append(
                "train.capture needs each step to do the same, and a script may do something else in each; leave it"
                " out."
            )
        return problems

    def _script(self) -> Callable[[Loop], None]:
        return partial(load_class(self.train), **self.settings)

    def _rows(self, batch: Batch) -> Batch:
        return {str(self.batch[place]): values for place, values in self.fields(batch).items()}

    def configure_optimizers(self, model: nn.Module) -> tuple[Optimizer, LRScheduler | None]:
        """What the script keeps; its loop waits for the first step from then on."""
        running = Running(self._script(), model)
        kept = running.kept
        _RUNNING[model] = running
        return kept

    def training_loss(self, model: nn.Module, batch: Batch) -> Losses:
        """What the script makes of a micro-batch."""
        if hasattr(model, "_orig_mod"):
            raise ConfigError(
                "train.compile compiles the model that a task is given; compile the model in the script, and leave it"
                " out."
            )
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
                f"The script makes its optimizer, and the configuration has a {type(optimizer).__name__}, or"
                " train.strategy keeps a model of its own to be moved. Leave optimizer out, and use ddp or single."
            )
        _RUNNING[model].update()

    def finish(self, model: nn.Module) -> None:
        """Lets the script do what comes after its loop."""
        if model in _RUNNING:
            _RUNNING.pop(model).end()

    def eval_outputs(self, model: nn.Module, batch: Batch) -> Evaluated:
        """What `evaluate` returns."""
        if self.evaluate is None:
            raise ConfigError(
                "data.eval_path is given, and task.init_args.evaluate is not; name the script's function, or leave it"
                " out."
            )
        from torchmetrics import Metric

        from ray_app.task.metric_classes import take_metrics

        returned = load_class(self.evaluate)(model, self._rows(batch))
        metrics = {name: value for name, value in returned.items() if isinstance(value, Metric)}
        found = {name: as_mean(name, value) for name, value in returned.items() if name not in metrics}
        if "loss" not in found:
            raise ConfigError(
                f"{self.evaluate} returned {', '.join(returned) or 'nothing'}, without loss; return it, too."
            )
        return Evaluated(found.pop("loss"), found, take_metrics(metrics))
