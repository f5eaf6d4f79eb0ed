"""A task of a plain PyTorch loop in a function of the user.

The loop of the script pulls rows, and the loop of the application pulls losses. Both cannot be the caller, so the
script runs in a thread. Only one of the two runs at a time, each until it needs the other, so that they share torch's
generators as one program would.
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
from ray_app.config.strategies import list_strategies
from ray_app.devices import HOST, kind_of
from ray_app.errors import ConfigError
from ray_app.task.base import Batch
from ray_app.task.losses import Losses
from ray_app.task.metrics import Mode
from ray_app.task.transforms import Spec
from ray_app.task.whole_batches import BatchTask, Evaluated, as_mean, count_rows

if TYPE_CHECKING:
    from ray_app.config.config import Config


class _Signal(Enum):
    """Messages between the thread of the script and the application, besides rows, losses and errors."""

    WAITS = auto()
    GRADIENTS = auto()
    END = auto()
    RETURNED = auto()


class _EndedError(BaseException):
    """Ends a script's loop in the middle of a step."""


class Loop:
    """The steps of a run, for the loop of a script.

    Each iteration is one step of the run::

        def train(loop):
            optimizer = torch.optim.AdamW(loop.model.parameters())
            loop.keep(optimizer)
            for step in loop:
                for rows in step:
                    step.add(cross_entropy(loop.model(rows["image"]), rows["label"]))
                optimizer.step()
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._kept: tuple[Optimizer, LRScheduler | None] | None = None
        # The application puts rows and signals into `_requests`, the thread of the script its losses into `_replies`.
        self._requests = SimpleQueue[Any]()
        self._replies = SimpleQueue[Any]()
        self._rows: Batch | None = None

    def keep(self, optimizer: Optimizer, schedule: LRScheduler | None = None) -> None:
        """Adds the optimizer and the schedule to the state that is checkpointed and sent to joining workers.

        It must be called once, before the first step.

        Args:
            optimizer: The optimizer of the model's parameters; the script calls its `step`.
            schedule: The application steps it after every step of the run.
        """
        if self._kept is not None:
            raise RuntimeError(
                "loop.keep was called twice; call it once, before the first step, with one optimizer and one schedule"
            )
        self._kept = optimizer, schedule

    def __iter__(self) -> Iterator[LoopStep]:
        while True:
            request = self._wait(_Signal.WAITS)
            if request is _Signal.END:
                return
            self._rows = None if request is _Signal.GRADIENTS else request
            yield LoopStep(self)

    def _wait(self, reply: Any) -> Any:
        """Sends a reply to the application and waits for its next request, with the autocast state of its thread."""
        self._replies.put(reply)
        request, autocast = self._requests.get()
        for kind, (enabled, dtype) in autocast.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        return request


class LoopStep:
    """One step of the run in a script's loop.

    Iterating over it yields the micro-batches of this worker's logical workers, as columns by name. Afterwards the
    gradient of the global batch is in the parameters' `.grad`. A worker may have no micro-batch, and after a worker was
    lost the micro-batches of a step may come once more.
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
                raise RuntimeError("the loop continued without step.add(loss) for its rows")
            request = loop._wait(self._losses)
            if request is _Signal.END:
                raise _EndedError
            loop._rows = None if request is _Signal.GRADIENTS else request

    def add(self, loss: Tensor | Losses, **metrics: Tensor | float) -> None:
        """Sets the loss of the current rows; backward runs when the loop asks for the next rows.

        Args:
            loss: The mean over the rows, or one loss per row, shape (rows,), or `Losses`.
            metrics: Further metrics of the step by name, as means over the rows or as one value per row.
        """
        if self._loop._rows is None or self._losses is not None:
            raise RuntimeError("step.add was called twice for the same rows, or without rows; add losses up before it")
        rows = count_rows(self._loop._rows)
        losses = loss if isinstance(loss, Losses) else Losses(_per_row("loss", loss, rows))
        more = {name: _per_row(name, value, rows).detach().to(losses.values) for name, value in metrics.items()}
        self._losses = Losses(losses.values, losses.weights, {**losses.metrics, **more})


def _per_row(name: str, value: Any, rows: int) -> Tensor:
    """Returns a value with one number per row unchanged, and a mean for each of the rows."""
    return value if isinstance(value, Tensor) and value.shape == (rows,) else as_mean(name, value).expand(rows)


class Running:
    """A script that runs in a thread, and its loop, which waits for the application.

    Raises:
        Exception: Any error of the script, from every method.
    """

    def __init__(self, train: Callable[[Loop], None], model: nn.Module) -> None:
        self._loop, self._over = Loop(model), False
        self._thread = Thread(target=self._run, args=(train,), name="script", daemon=True)
        self._thread.start()
        if self._wait_for_reply() is not _Signal.WAITS:
            raise _ended_early("has no `for step in loop`")

    def _run(self, train: Callable[[Loop], None]) -> None:
        device = next((p.device for p in self._loop.model.parameters()), None)
        try:
            # The current device belongs to a thread.
            if device is not None:
                kind_of(device).use(device)
            train(self._loop)
            self._loop._replies.put(_Signal.RETURNED)
        except BaseException as error:
            self._loop._replies.put(error)

    @property
    def kept(self) -> tuple[Optimizer, LRScheduler | None]:
        """The optimizer and the schedule that the script keeps."""
        if self._loop._kept is None:
            self.end()
            raise RuntimeError("the script keeps no optimizer; call loop.keep(optimizer) before the first step")
        return self._loop._kept

    def losses(self, rows: Batch) -> Losses:
        """Returns the losses that the script computes of a micro-batch, columns by name."""
        reply = self._request(rows)
        if isinstance(reply, Losses):
            return reply
        raise _ended_early("left the rows of a step before their end")

    def update(self) -> None:
        """Lets the script update the parameters by their gradients, and checks that it did so once."""
        assert self._loop._kept is not None
        steps: list[object] = []
        optimizer, schedule = self._loop._kept
        schedule_step = None if schedule is None else schedule.last_epoch
        hook = optimizer.register_step_post_hook(lambda *_: steps.append(None))
        reply = self._request(_Signal.GRADIENTS)
        hook.remove()
        if reply is not _Signal.WAITS:
            raise _ended_early("left `for step in loop` before it ended")
        if len(steps) != 1:
            raise RuntimeError(
                f"the script called optimizer.step {len(steps)} times in a step of its loop; call it once, after the"
                " rows"
            )
        if schedule is not None and schedule.last_epoch != schedule_step:
            raise RuntimeError(
                "the script advanced the kept schedule, which advances after every step anyway; remove schedule.step"
            )

    def end(self) -> None:
        """Ends the loop, and waits until the script has returned."""
        if not self._over:
            self._request(_Signal.END)
        self._thread.join()

    def _request(self, request: Any) -> Any:
        """Sends a request to the script, with the autocast state of this thread, and returns its reply."""
        kinds = {HOST.type, *(p.device.type for p in self._loop.model.parameters())}
        autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
        self._loop._requests.put((request, autocast))
        return self._wait_for_reply()

    def _wait_for_reply(self) -> Any:
        reply = self._loop._replies.get()
        self._over = reply is _Signal.RETURNED or isinstance(reply, BaseException)
        if isinstance(reply, BaseException) and not isinstance(reply, _EndedError):
            raise reply
        return reply


def _ended_early(how: str) -> RuntimeError:
    return RuntimeError(f"the script {how}; its loop ends by itself after the last step of the run")


_NO_COMPILE = "train.compile compiles the model of a task; compile the model in the script, and leave it out."
_LOOP_STRATEGIES = list_strategies(lambda traits: traits.can_run_user_loops)
_RUNNING: dict[nn.Module, Running] = {}
"""The running loops of this process by the model that they train."""


class LoopTask(BatchTask):
    """A task that runs the loop of a script, a function by its import path that gets a `ray_app.Loop`::

        task:
          class_path: ray_app.task.user_loop.LoopTask
          init_args:
            train: script.train
            settings: {lr: 0.003}
            evaluate: script.evaluate
            module: {class_path: script.Net}
            rows: [image, label]
            target: label

    docs/loop.md has such a script. Arguments that are not listed are those of `ModuleTask`.

    Args:
        train: Import path of the function that is called with the loop, and with `settings`, in every worker.
        module: The model, or a function that returns one.
        rows: Names of the columns that the script gets; `COLUMN.mask` as in `ModuleTask`.
        settings: Keyword arguments of `train`.
        evaluate: Import path of a function that is called with the model and rows. It returns a dictionary of means
            over these rows, `loss` among them, and of torchmetrics objects that were updated with them; the states of
            these are combined over all rows. Needed for `data.eval_path`.
        target: Column that a prediction lacks; default: a prediction has all columns. The model is called with the
            other columns in their order.
        best_metric: The mean of `evaluate` that decides which checkpoint is best.
        best_mode: Whether a lower (`min`) or a higher (`max`) value of it is better; default: `min` for a loss.
    """

    functions: ClassVar[tuple[str, ...]] = ("train", "evaluate")

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
        images, lists = (transforms, evaluate_transforms, mean, std), (pad_with, pad_to, max_length)
        super().__init__(module, rows, target, *images, *lists, best_metric, best_mode, exif_orientation)
        self.train = train
        self.settings = settings or {}
        self.evaluate = evaluate

    def validate_config(self, config: Config) -> list[str]:
        """Returns a problem for each setting that conflicts with the optimizer or the model of the script."""
        has_default = config.optimizer in (type(config).optimizer, OptimizerSpec(TASK_OPTIMIZER))
        problems = {
            "The script creates its optimizer (loop.keep); leave optimizer and optimizers out.": (
                config.optimizers is not None or not has_default
            ),
            f"train.strategy is {config.train.strategy}, which needs control over steps that belong to the script's"
            f" loop; use {_LOOP_STRATEGIES}.": not config.train.strategy_traits.can_run_user_loops,
            _NO_COMPILE: config.train.compile,
            "train.capture needs identical steps, but the steps of a script may differ; leave it out.": (
                config.train.capture
            ),
        }
        return [problem for problem, applies in problems.items() if applies]

    def _script(self) -> Callable[[Loop], None]:
        return partial(load_class(self.train), **self.settings)

    def _rows(self, batch: Batch) -> Batch:
        return {str(self.batch[index]): values for index, values in self.fields(batch).items()}

    def configure_optimizers(self, model: nn.Module) -> tuple[Optimizer, LRScheduler | None]:
        """Starts the script, up to its first step, and returns the optimizer and schedule that it keeps."""
        running = Running(self._script(), model)
        kept = running.kept
        _RUNNING[model] = running
        return kept

    def training_loss(self, model: nn.Module, batch: Batch) -> Losses:
        """Returns the losses that the script computes of a micro-batch."""
        if hasattr(model, "_orig_mod"):
            raise ConfigError(_NO_COMPILE)
        if model in _RUNNING:
            return _RUNNING[model].losses(self._rows(batch))
        # A check before the start calls this with a model that no loop trains.
        once = Running(self._script(), model)
        try:
            return once.losses(self._rows(batch))
        finally:
            once.end()

    def apply_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Lets the script update the parameters."""
        if model not in _RUNNING:
            raise ConfigError(
                f"The script creates its optimizer, but the configuration has a {type(optimizer).__name__}, or"
                f" train.strategy updates another copy of the model. Leave optimizer out, and use {_LOOP_STRATEGIES}."
            )
        _RUNNING[model].update()

    def finish(self, model: nn.Module) -> None:
        """Ends the loop of the script and waits until the script has returned."""
        if model in _RUNNING:
            _RUNNING.pop(model).end()

    def eval_outputs(self, model: nn.Module, batch: Batch) -> Evaluated:
        """Returns what the script's `evaluate` computes of a batch; raises ConfigError if that has no loss."""
        if self.evaluate is None:
            raise ConfigError(
                "data.eval_path is set, but task.init_args.evaluate is not; name the script's function, or leave"
                " data.eval_path out."
            )
        from torchmetrics import Metric

        from ray_app.task.metric_classes import take_metrics

        returned = load_class(self.evaluate)(model, self._rows(batch))
        metrics = {name: value for name, value in returned.items() if isinstance(value, Metric)}
        means = {name: as_mean(name, value) for name, value in returned.items() if name not in metrics}
        if "loss" not in means:
            raise ConfigError(
                f"{self.evaluate} returned {', '.join(returned) or 'nothing'}, without loss; return the loss as well."
            )
        return Evaluated(means.pop("loss"), means, take_metrics(metrics))
