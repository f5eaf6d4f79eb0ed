"""The interface of a task: a class in a file of the user's own, named by `task.class_path`."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ray_app.config.import_paths import TASK_OPTIMIZER, iter_class_paths
from ray_app.errors import ConfigError
from ray_app.plan.manifest import ColumnFacts, DataFacts
from ray_app.task.annotations import MetricCollection
from ray_app.task.answers import row_answers
from ray_app.task.fields import (
    Mistake,
    class_names,
    count_classes,
    need_column,
    need_finite,
    refuse_missing,
    to_model_types,
)
from ray_app.task.interventions import Intervener
from ray_app.task.losses import Losses
from ray_app.task.ragged import LENGTHS, Arrays, to_array
from ray_app.task.transforms import uniform

if TYPE_CHECKING:
    from ray_app.config.config import Config

__all__ = ["Batch", "Mistake", "Rows", "Task", "class_names", "count_classes", "need_column", "uniform"]

Batch = dict[str, Tensor]
Rows = dict[str, Any]
"""Rows as read, by column: NumPy arrays of numbers or arrays, `Ragged` lists of numbers, lists of `bytes` or `str`."""
WeightUpdate = list[tuple[nn.Parameter, Tensor, Tensor]]
"""Parameters that a phase of a step has updated, each with its value before and after the phase."""
step_updates: ContextVar[Sequence[WeightUpdate]] = ContextVar("step_updates", default=())
"""The changes of the phases before the present one of a step, for `Task.loss_for_optimizer` of a task with phases."""
_NUMERIC_KINDS = ("number", "integer", "array", "list")
_MIN_UNIT_VALUES = 100_000
"""A module with fewer parameters is not worth an all-gather of its own."""


class Task(ABC):
    """The model, the decoding of rows, the loss and the metrics of a training.

    An instance is made from the configuration on the driver and pickled to the readers, the workers and the evaluator,
    so it holds settings, not tensors. All randomness must come from torch's default generators or from the `keys` that
    `augment` gets: then the result does not depend on the number of workers. A task must implement `columns`,
    `build_model` and `loss`.
    """

    best_metric: ClassVar[str] = "loss"
    """The metric that decides which checkpoint is best, unless `evaluate.metric` names another."""
    best_mode: ClassVar[str] = "min"
    """Whether a lower (`min`) or a higher (`max`) value of `best_metric` is better."""
    seeds_all_generators: ClassVar[bool] = False
    """Whether user code in `build_model` may draw from Python's and NumPy's generators, seeded from torch's."""
    keeps_modes: ClassVar[bool] = False
    """Whether layers that `build_model` returns in evaluation mode stay in it, as Lightning's trainer leaves them."""
    has_means_over_rows: ClassVar[bool] = False
    """Whether the mean loss of an epoch is over its rows, also where that of a step is over the weights of rows."""
    functions: ClassVar[tuple[str, ...]] = ()
    """Arguments that are import paths of functions: their files are part of a run, and no package can change them."""
    sample_weight: str | None = None
    """Column with the weight of each row in the training loss, of a task that has such weights."""
    classes: list[str] = []  # noqa: RUF012 - replaced, never changed
    """Names of the classes in the order of their indices; set by `prepare` of a classification."""
    data_schema: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed
    """Columns and classes of the training data, see `ray_app.task.schema`; set after `prepare`."""
    fitted: dict[str, Any] | None = None
    """What `prepare` has computed from the rows that are trained on, plain JSON; stored with a run and a package."""
    left_out: dict[str, str] = {}  # noqa: RUF012 - replaced, never changed
    """Reasons why `prepare` leaves out columns, for the lines at the start of a run."""

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """Restores a prepared task from the `vars` of it, without calling `__init__`.

        A task imports what its settings name, so settings of others go through `restore`.
        """
        task = cls.__new__(cls)
        vars(task).update(settings)
        return task

    def restore(self, settings: dict[str, Any], owner: str) -> Self:
        """Returns a task with the settings of a prepared one, which are data: all code is that of this task.

        An import path, with its arguments, must be the same at the same place in this task, the one of the
        configuration; so must be an argument that is a dictionary, since libraries import what some of these name.

        Args:
            settings: The `vars` of the prepared task, as a run or a package keeps them.
            owner: The run or the package, the beginning of a sentence.

        Raises:
            ConfigError: The settings name other code, or are none.
        """
        if not isinstance(settings, dict):
            raise ConfigError(
                f"{owner} is damaged: the settings of its task are {type(settings).__name__}, not a dictionary."
            )
        configured, arguments = vars(self), inspect.signature(type(self)).parameters
        for name in sorted(configured.keys() | settings.keys()):
            ours, theirs = configured.get(name), settings.get(name)
            # A column may be called class_path, too; an import path has a dot.
            paths = [path for *_, path in iter_class_paths("", [ours, theirs]) if "." in path]
            is_code = bool(paths) or name in self.functions
            if ours != theirs and (is_code or (name in arguments and isinstance(theirs, dict))):
                raise ConfigError(
                    f"{owner} is refused, and none of its code was executed: its task has {name} = {theirs!r}, but the"
                    f" configured task has {ours!r}. Only the configuration decides which code is imported: use the one"
                    " of the training."
                )
        return self.from_settings(configured | settings)

    def prepare(self, data: DataFacts) -> Task:
        """Checks the data set and returns the task with settings completed from it, such as the number of classes.

        Called on the driver before anything starts. Not overridden: returns this task.

        Raises:
            DataError: The data set does not fit; the message says what to do. Not overridden, and `decode` neither: a
                column is missing, has missing values, or holds values that `decode` does not support.
        """
        if type(self).decode is Task.decode:
            refuse_missing(data, self.columns())
            for name in self.columns():
                need_column(data, name, _NUMERIC_KINDS, f"task {type(self).__name__}, which leaves `decode` out,")
        return self

    def describe_differences(self, data: DataFacts) -> list[str]:
        """Returns notes on values of other data that the data trained on lacks, for the start of its evaluation.

        Not overridden: no notes.
        """
        del data
        return []

    def takes_column(self, name: str, facts: ColumnFacts) -> bool:
        """Whether `decode` takes a column of other data with another type than that trained on; not overridden: no."""
        del name, facts
        return False

    def validate_config(self, config: Config) -> list[str]:
        """Returns a sentence for each setting with which the task cannot be trained; it says what to do.

        Not overridden: no problems. Called on the driver, before anything starts.
        """
        del config
        return []

    @abstractmethod
    def columns(self) -> list[str]:
        """Returns the names of the columns to read; a row without a value is bad, except in an `OptionalColumn`."""

    def targets(self) -> list[str]:
        """Returns the `columns` that only the loss and the metrics need.

        A prediction does not read them, and its `decode` gets zeros for them.
        """
        return []

    def weight_columns(self) -> list[str]:
        """Returns those of the `targets` that are weights of rows, and no values to predict: `sample_weight`."""
        return [self.sample_weight] if isinstance(self.sample_weight, str) else []

    def decode(self, rows: Rows) -> Arrays:
        """Decodes rows into named fields: arrays of one shape per row, (rows, ...), or `Ragged`.

        It runs on any CPU of the cluster.

        Not overridden: the columns by their names; fractions as float32, integers as int64, lists of these as `Ragged`,
        arrays of integers unchanged; a value that is NaN or infinite as float32 is refused.

        The arrays are used without copying and must not change afterwards. A batch has a ragged field `x` as `x`,
        padded to its longest row, and as `x_lengths`.

        Raises:
            Exception: Any, for rows that cannot be decoded; the reader determines the row and names it.
        """
        fields = {name: to_model_types(rows[name]) for name in self.columns()}
        for name, values in fields.items():
            need_finite(f"column {name!r}", values)
        return fields

    def decode_training(self, rows: Rows, keys: npt.NDArray[np.int64]) -> Arrays:
        """Decodes rows to train on into fields like those of `decode`, differently in every epoch.

        Override it to randomize rows, such as by random crops, in the readers instead of in `augment` on the device. It
        requires that decoded rows are not cached (`data.cache`).

        Args:
            rows: As in `decode`.
            keys: A 63-bit integer for each row, a hash of (seed, epoch, row): the only source of randomness to use
                here, see `ray_app.task.transforms.drawing`.
        """
        del keys
        return self.decode(rows)

    @property
    def has_epoch_decode(self) -> bool:
        """Whether rows to train on are decoded by `decode_training`: the task overrides it."""
        return type(self).decode_training is not Task.decode_training

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Builds the model; torch's generators are seeded before the call."""

    def augment(self, batch: Batch, keys: Tensor) -> Batch:
        """Returns a training batch after random changes on the device.

        Args:
            batch: The decoded fields, each (rows, ...).
            keys: One 63-bit integer per row, a hash of (seed, epoch, row), shape (rows,), on the CPU: the only source
                of randomness to use here, so that a row is augmented alike wherever it is processed.
        """
        del keys
        return batch

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        """Returns the modules that `train.strategy: fsdp` makes units of.

        The strategy gathers the parameters of a unit together while the unit computes. The other parameters form one
        more unit. Each unit must be called as a module wherever its parameters are used.

        Not overridden: the modules with 100,000 parameters or more in an `nn.Sequential` or `nn.ModuleList`. Override
        it if the blocks of a model are elsewhere.
        """
        units: list[nn.Module] = []
        for child in model.children():
            if isinstance(child, nn.Sequential | nn.ModuleList):
                units += Task.shard_units(self, child)
            elif sum(p.numel() for p in child.parameters()) >= _MIN_UNIT_VALUES:
                units.append(child)
        return units

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Runs the model on a batch and returns its outputs.

        Not overridden: calls the model with the fields of `columns` that are not `targets`, in that order, a ragged
        field followed by its lengths.

        Raises:
            ConfigError: Not overridden, and `decode` returns fields of other names.
        """
        names = [name for name in self.columns() if name not in self.targets()]
        if absent := [name for name in names if name not in batch]:
            raise ConfigError(
                f"{type(self).__name__} leaves `forward` out, so its model is called with its columns"
                f" {', '.join(names)}; decoded fields are {', '.join(batch)}, without {', '.join(absent)}. Write"
                " `forward`, or let `decode` name its fields as the columns."
            )
        return model(*(batch[field] for name in names for field in (name, name + LENGTHS) if field in batch))

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> Tensor | Losses:
        """Returns the loss of every row, shape (rows,); the step computes their mean over all workers.

        Return `Losses` where the mean is over tokens or boxes and not over rows, or to record further metrics.
        """

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor | Losses:
        """Returns the losses of a training batch, as `loss` does; the step calls backward of their sum.

        Override it where training is more than one `forward` and `loss`: several forward passes, gradient penalties,
        auxiliary losses. It is called once per logical worker and step, with torch's generators seeded for both, so
        random numbers drawn from them do not depend on the number of workers.
        """
        return self.compute_loss(model, self.forward(model, batch), batch)

    def compute_loss(self, model: nn.Module, outputs: Any, batch: Batch) -> Tensor | Losses:
        """Returns `loss` of the outputs of a model, in training and in an evaluation.

        Override it where the loss has parameters, which are a part of the model.
        """
        del model
        return self.loss(outputs, batch)

    def running_metrics(
        self, total: list[float], states: Sequence[Any], is_first: bool
    ) -> tuple[list[float], dict[str, float]]:
        """Returns the states of metrics over the rows of an epoch so far, and these metrics by name.

        Every worker calls it after a step in which `training_loss` has returned `Losses.states`.

        Args:
            total: The states that the step before has returned; empty in the first step.
            states: The states of each logical worker with rows, in the order of the logical workers.
            is_first: Whether the step is the first one of its epoch.
        """
        raise NotImplementedError

    def loss_for_optimizer(self, turn: str, model: nn.Module, batch: Batch) -> Tensor | Losses:
        """Returns the losses of a training batch for one of several alternating optimizers (`optimizers`).

        Not overridden: those of `training_loss`.

        Args:
            turn: The name of the optimizer that this step, or phase, updates; only its parameters get gradients.
            model: The model; in a phase its parameters are those that the phases before have left (`step_updates`), and
                have to be afterwards.
            batch: The training batch, the same in all phases.
        """
        del turn
        return self.training_loss(model, batch)

    def initial_loss_scale(self) -> list[float] | None:
        """Returns the state of the first step's `LossScale` for a model that computes in float16; None without one."""
        return None

    def phases(self) -> list[str]:
        """Returns the names of the `optimizers` in the order in which each step uses them; [] if steps take turns."""
        return []

    def moving_parameters(self, model: nn.Module) -> list[Tensor]:
        """Returns the parameters that a forward of training writes, alike for all rows, before it uses them.

        As with buffers, every logical worker begins a step with the same values, and the optimizer moves the ones that
        logical worker 0 has written.
        """
        del model
        return []

    def apply_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Updates the parameters by the gradients in their `.grad`, those of the global batch, equal on all workers.

        Override it where an update is more than `optimizer.step()`: constraints on weights, other rules for some
        parameters. All workers call it in the same state and must end in the same state; with `central_storage` only
        rank 0 calls it, and with `local_sgd` every replica, in its own state and with its own gradient.
        """
        del model
        optimizer.step()

    @property
    def has_own_optimizer(self) -> bool:
        """Whether the task makes an optimizer where the configuration has none: it overrides `configure_optimizers`."""
        return type(self).configure_optimizers is not Task.configure_optimizers

    def optimizer_fields(self) -> dict[str, Any]:
        """Returns fields of the configuration for the optimizer that the task defines, if the configuration has none.

        They are `optimizer`, and `schedule` if it has one. Not overridden: the optimizer that `configure_optimizers`
        makes in the workers, if the task has one.
        """
        return {"optimizer": {"class_path": TASK_OPTIMIZER}} if self.has_own_optimizer else {}

    def configuration_fields(self) -> dict[str, Any]:
        """Returns values of fields of the configuration by their dotted names, such as `evaluate.patience`.

        They apply where the configuration leaves a field at its default. Not overridden: none.
        """
        return {}

    def configure_optimizers(self, model: nn.Module) -> tuple[Optimizer, LRScheduler | None]:
        """Makes the optimizer, and a schedule or None; called if the configuration has no optimizer.

        The schedule is stepped after every step.

        Raises:
            ConfigError: The task does not override it, and `optimizer` names `OwnOptimizer` all the same.
        """
        raise ConfigError(
            f"{type(self).__name__} creates no optimizer for a {type(model).__name__}; set `optimizer` to another"
            " class."
        )

    def eval_outputs(self, model: nn.Module, batch: Batch) -> Any:
        """Computes the outputs of an evaluated batch, which `loss` and `update` get.

        Not overridden: those of `forward`. Override it where `loss` or `update` need more than a prediction does.
        """
        return self.forward(model, batch)

    def intervener(self) -> Intervener | None:
        """Returns the code that may change the run between two epochs, in the driver's process; None if there is none.

        All workers wait for it after each epoch.
        """
        return None

    def finish(self, model: nn.Module) -> None:
        """Frees what the task keeps of a model in this process; called when the training of the model has ended."""
        del model

    def metrics(self) -> MetricCollection:
        """Makes the metrics of one evaluation; the mean loss is added as `loss`. Not overridden: no further metrics."""
        from torchmetrics import MetricCollection

        return MetricCollection({})

    def update(self, metrics: MetricCollection, outputs: Any, batch: Batch) -> None:
        """Updates the metrics with one evaluated batch. Not overridden: with the outputs and the only target.

        Raises:
            ConfigError: Not overridden, and there are metrics without exactly one target.
        """
        targets = self.targets()
        if len(metrics) and len(targets) != 1:
            raise ConfigError(
                f"{type(self).__name__} has metrics but leaves `update` out, which then compares the outputs with the"
                f" only target; its `targets` are {', '.join(targets) or 'none'}. Write `update`."
            )
        if len(metrics):
            metrics.update(outputs, batch[targets[0]])

    def predictions(self, outputs: Any, batch: Batch) -> Arrays:
        """Returns the columns that a batch prediction writes, with a value for every row.

        A column is an array of numbers or text, (rows, ...), or `Ragged`, which becomes lists. Not overridden: the
        outputs themselves, a single tensor as `predicted`.

        Args:
            outputs: From `forward`, on the CPU.
            batch: The decoded fields that they were computed from, on the model's device, such as the lengths of lists.

        Raises:
            ConfigError: Not overridden, and the outputs are neither a tensor nor a dictionary of tensors.
        """
        del batch
        named = outputs if isinstance(outputs, dict) else {"predicted": outputs}
        if other := {type(value).__name__ for value in named.values() if not isinstance(value, Tensor)}:
            raise ConfigError(
                f"{type(self).__name__} leaves `predictions` out, so predictions are the outputs of its `forward`,"
                f" which must be a tensor or a dictionary of tensors, but are, or contain, {', '.join(sorted(other))}."
                " Write `predictions`, which returns an array for each column, or let `forward` return tensors."
            )
        return {name: to_array(values) for name, values in named.items()}

    def answers(self, outputs: Any, batch: Batch) -> list[Any]:
        """Returns what a prediction says of each row to a person: names of classes with probabilities, or numbers.

        Not overridden: `predicted` of `predictions`, or all columns by name if there are others.

        Args:
            outputs: From `forward`, on the CPU.
            batch: As in `predictions`.
        """
        return row_answers(self.predictions(outputs, batch))

    @property
    def encoding(self) -> dict[str, Any] | None:
        """The encoding of raw rows of a table (`ray_app.task.table_encoding`), which a package applies, if any."""
        return None

    def export_files(self, model: nn.Module, folder: Path) -> None:
        """Writes further files into the folder of an export, from which programs without ray_app load the model.

        Not overridden: writes nothing.

        Args:
            model: The trained model, on the CPU, in evaluation mode; it must not be changed.
            folder: Folder of the export, which has `export.json` and the folders `code` and `data` already.
        """
        del model, folder

    def mistakes(self, outputs: Any, batch: Batch, max_rows: int) -> list[Mistake]:
        """Returns the wrong predictions of an evaluated batch with the highest confidence, for the report.

        Args:
            outputs: From `forward`.
            batch: The decoded fields, each (rows, ...).
            max_rows: The largest number of rows to return.
        """
        del outputs, batch, max_rows
        return []

    def picture(self, batch: Batch, row: int) -> bytes | None:
        """Returns a row of an evaluated batch as PNG for the report, None if it has no picture."""
        del batch, row
        return None
