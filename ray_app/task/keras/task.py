"""A compiled Keras model as a task, with the loss, the metrics and the optimizer of its `compile`."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ray_app.config.import_paths import load_class
from ray_app.errors import ConfigError
from ray_app.plan.manifest import ColumnFacts, DataFacts
from ray_app.task.annotations import MetricCollection
from ray_app.task.base import Batch, step_updates
from ray_app.task.images import IMAGE
from ray_app.task.interventions import Intervener
from ray_app.task.keras import library, program
from ray_app.task.keras.callbacks import CallbackRunner, evaluates_average, monitored_fields, running_callbacks
from ray_app.task.keras.module import KerasModule, KerasPass
from ray_app.task.keras.optimizer import OPTIMIZER, describe_optimizers, refuse_sharding
from ray_app.task.losses import Losses, step_rows
from ray_app.task.metrics import Mode
from ray_app.task.ragged import Arrays, Ragged, to_array, to_batch
from ray_app.task.transforms import Spec, instantiate
from ray_app.task.user_code import user_code
from ray_app.task.whole_batches import BatchTask, Evaluated, count_rows

if TYPE_CHECKING:
    from ray_app.config.config import Config

logger = logging.getLogger(__name__)

Columns = str | list[str] | dict[str, str]
"""Columns as Keras takes them: one, several in an order, or several by the names of inputs or outputs."""
_CALLBACKS = "task.init_args.callbacks"
MODEL_FILE = "model.keras"
"""The file of an export that has the model as Keras saves it."""
_LOGGED = "logged"
_SAMPLE_ROWS = 2
_SAMPLE_LENGTHS = (16, 64, 256, 4, 1)
"""Lengths of lists with which `prepare` tries in turn to build a model that declares no shape."""
_PICTURE_SIZE = 64


class KerasTask(BatchTask):
    """A task of a program that returns a compiled `keras.Model`::

        task:
          class_path: ray_app.task.keras.KerasTask
          init_args:
            model: my_program.get_compiled_model
            inputs: image
            target: label

    The task uses the optimizer, learning-rate schedule, loss, loss weights and metrics of `compile`. An `optimizer` in
    the configuration replaces the one of `compile`.

    The model gets columns as they are stored: numbers as float32, integers, arrays, lists padded to the longest of a
    micro-batch. Encoded images, and arrays of uint8 with two or three axes, are float32 from 0 to 255, channels last
    unless the program has set `channels_first`. Where the model declares the shape of an input, a row of as many values
    gets it. Arguments that are not listed are those of `ModuleTask`.

    Args:
        model: Import path of the function, with arguments as `{class_path: ..., init_args: {...}}`. The class path
            `keras.saving.load_model` with `filepath` loads a compiled model of a `.keras` file.
        inputs: The column of the input; a list of columns for several inputs in their order, which become one side by
            side if the model has one input; or columns by the names of inputs.
        target: The column of the target; a list for several outputs, or columns by the names of outputs. Null if the
            model has its loss from `add_loss`.
        sample_weight: Column with the weight of each row, as `fit` takes it; columns in the structure of `target` for
            weights of each output.
        class_weight: The weight of each class in training, as `fit` takes it, by which weights of rows are multiplied.
        scale: Inputs are divided by it; 255 makes pixels numbers from 0 to 1.
        best_metric: The metric that decides which checkpoint is best.
        best_mode: Whether a lower (`min`) or a higher (`max`) value of it is better; default: `min` for a loss.
        callbacks: Import path of a function that returns callbacks of Keras, with arguments as `model`. They run
            between two epochs, see `ray_app.keras.fit`; with evaluation data `evaluate.where` has to be `workers`.
        evaluate_average: Whether evaluations use the average of the weights that an optimizer with `use_ema` keeps, as
            with `SwapEMAWeights`.
        infinite_target: Whether targets may be infinite, for `TerminateOnNaN`, which ends training at them.
    """

    functions: ClassVar[tuple[str, ...]] = ("model", "callbacks")
    seeds_all_generators: ClassVar[bool] = True
    """Initializers of Keras get their seeds from Python's generator, see `library.program_session`."""
    has_means_over_rows: ClassVar[bool] = True

    def __init__(
        self,
        model: str | Spec,
        inputs: Columns,
        target: Columns | None = None,
        sample_weight: Columns | None = None,
        class_weight: dict[int, float] | None = None,
        scale: float = 1,
        transforms: list[Spec] | None = None,
        evaluate_transforms: list[Spec] | None = None,
        pad_with: float = 0,
        pad_to: int = 1,
        max_length: int | None = None,
        best_metric: str = "loss",
        best_mode: Mode | None = None,
        exif_orientation: bool = True,
        callbacks: str | Spec | None = None,
        evaluate_average: bool = False,
        infinite_target: bool = False,
    ) -> None:
        columns, targets = _names_in(inputs), _names_in(target)
        batch, lists = list(dict.fromkeys([*columns, *targets])), (pad_with, pad_to, max_length)
        reading = (transforms, evaluate_transforms, None, None, *lists, best_metric, best_mode, exif_orientation)
        super().__init__(program.spec_of_program(model), batch, None, *reading)
        _need_columns(inputs, columns, scale)
        if class_weight and not isinstance(target, str):
            raise ConfigError(
                "`class_weight` is only supported for Models with a single output. Pass the weights of rows as"
                " sample_weight."
            )
        self.model_inputs = inputs
        self.model_target = target
        self.inputs = columns
        self.target = targets[0] if targets else columns[0]
        self.sample_weight = sample_weight  # type: ignore[assignment]
        # Pairs, since JSON makes text of the keys of a dictionary.
        self.class_weight = [[int(number), float(weight)] for number, weight in (class_weight or {}).items()]
        self.scale = scale
        self.evaluate_average = evaluate_average
        self.infinite = targets if infinite_target else []
        self.callbacks = None
        if callbacks is not None:
            self.callbacks = program.spec_of_program(callbacks, _CALLBACKS, "callbacks of Keras")
        # `prepare` sets these: the settings of Keras that the program expects; kind, type and shape of each column; and
        # the optimizer and the summed losses of `compile`.
        self.keras_settings: dict[str, str] = {}
        self.column_types: dict[str, list[Any]] = {}
        self.compiled: dict[str, Any] = {}
        self.monitored: dict[str, Any] | None = None

    def prepare(self, data: DataFacts) -> KerasTask:
        """Imports the program, checks the columns and builds the model; returns a task that keeps their facts."""
        settings = program.read_settings(self.model)
        prepared = super().prepare(data)
        assert isinstance(prepared, KerasTask)
        prepared.keras_settings = asdict(settings)
        prepared.column_types = {name: _type_of(data.columns[name]) for name in self.columns()}
        if not prepared.compiled:
            with torch.random.fork_rng(devices=[]), user_code(lambda: "building the model of the program"):
                module = prepared._build()
            fields = describe_optimizers(module.program, module.trained_variables(), module.steps.phases)
            prepared.compiled = {
                # A text, since the fields name classes, which `Task.restore` would refuse in a package.
                "fields": json.dumps(fields),
                "facts": list(module.facts),
                "phases": [phase.optimizer for phase in module.steps.phases],
                "train_logs": module.steps.train_logs,
                "test_logs": module.steps.test_logs,
                "loss_scale": library.loss_scale(module.program),
                "moves": bool(module.moving_parameters()),
            }
            prepared.monitored = monitored_fields(self._make_callbacks()[0])
            if self.evaluate_average and not library.inner_optimizer(module.program.optimizer).use_ema:
                raise ConfigError(
                    "SwapEMAWeights must be used when `use_ema=True` is set on the optimizer, but the model's optimizer"
                    " keeps no average. Compile the model with use_ema=True, or leave the callback out."
                )
        return prepared

    def validate_config(self, config: Config) -> list[str]:
        """Returns a problem for each setting that a Keras program cannot be trained with."""
        traits, fields = config.train.strategy_traits, self.optimizer_fields()
        is_own = config.optimizer == type(config).optimizer or config.optimizer.class_path == OPTIMIZER
        if not is_own:
            logger.info("optimizer of the configuration overrides the compiled model's optimizer.")
        facts, has_no_step = self._facts, traits.has_servers or "local_steps" in traits.train_fields
        callback_fields = self.configuration_fields()
        for name in [*facts.left_out, *(facts.carried if has_no_step else ())]:
            logger.info("The metric %s has no value over the training rows: see docs/start/keras.md.", name)
        own_metric, metric = config.evaluate.metric, callback_fields.get("evaluate.metric")
        reason = refuse_sharding(fields) if is_own and (traits.shards_parameters or traits.has_servers) else None
        arguments = fields.get("optimizer", {}).get("init_args", {})
        has_scale = self.initial_loss_scale() is not None
        problems = {
            "The program defines its optimizers; leave optimizers out.": bool(config.optimizers),
            "The train_step of the model computes gradients itself; leave train.compile, train.freeze, float16 out.": (
                bool(self.phases())
                and (config.train.compile or bool(config.train.freeze) or config.train.precision == "fp16" or has_scale)
            ),
            "A train_step of the model's own, mixed_float16, and SpectralNormalization need one state of all workers:"
            " use ddp or single.": (
                (bool(self.phases()) or has_scale or self.compiled["moves"]) and not traits.can_alternate_optimizers
            ),
            f"{', '.join(facts.kept)}: reset_state resets nothing, so Keras adds validation rows to training rows. Let"
            " it reset, or train without data.eval_path.": bool(facts.kept and config.data.evaluation_path),
            "A callback uses val_ metrics, but data.eval_path is missing. Set it.": (
                metric is not None and config.data.evaluation_path is None
            ),
            f"evaluate.metric is {own_metric!r}, but a callback monitors val_{metric}; a run uses one metric. Choose"
            " one.": None not in (metric, own_metric) and metric != own_metric,
            "train.capture needs identical steps, but Keras draws seeds on the host in each. Leave it out.": (
                config.train.capture
            ),
            f"A loss has reduction='sum', but train.strategy {config.train.strategy} has no step with all rows of a"
            " batch. Use ddp, or compile the model with reduction='sum_over_batch_size'.": (
                "sum" in facts.reductions and has_no_step
            ),
            "train.freeze is set, but the optimizer continues with a state of all weights. Compile the model again for"
            " a new optimizer.": is_own and bool(config.train.freeze) and "continues" in arguments,
            f"train.strategy is {config.train.strategy}, which updates parts of weights, but {reason}. Use ddp, compile"
            " the model with another optimizer, or name one of torch.optim in optimizer.": reason is not None,
        }
        return [problem for problem, applies in problems.items() if applies]

    @property
    def has_own_optimizer(self) -> bool:
        """Whether the task makes an optimizer in the workers; it does not, see `optimizer_fields`."""
        return False

    def optimizer_fields(self) -> dict[str, Any]:
        """Returns `optimizer` and `schedule` of the configuration as the program was compiled, see `Task`."""
        fields: dict[str, Any] = json.loads(self.compiled["fields"])
        several = fields.get("optimizers", {}).values()
        for spec in (fields.get("optimizer"), fields.get("schedule"), *several, *(one["schedule"] for one in several)):
            arguments = (spec or {}).get("init_args", {})
            # The program is code, so it is that of this task, and not what a package has for it.
            if "program" in arguments:
                arguments["program"] = json.dumps(self.model)
        if self.evaluate_average:
            fields["optimizer"]["init_args"]["evaluates_average"] = True
        return fields

    def configuration_fields(self) -> dict[str, Any]:
        """Returns the field of the metric that a callback monitors, and how batches are evaluated, see `Task`."""
        fields = self.monitored if self.monitored is not None else monitored_fields(self._make_callbacks()[0])
        is_by_batch = bool(self.compiled) and self._facts.is_by_batch
        return fields | ({"evaluate.fixed_batches": True} if is_by_batch else {})

    def intervener(self) -> Intervener | None:
        """Returns what calls the callbacks between two epochs, see `Task`."""
        callbacks, lines = self._make_callbacks()
        for line in lines:
            logger.info("%s.", line)
        return CallbackRunner(callbacks) if callbacks else None

    def _make_callbacks(self) -> tuple[list[Any], list[str]]:
        """Returns the callbacks of the program that run, and a line for each of the others."""
        if self.callbacks is None:
            return [], []
        with user_code(lambda: "creating the callbacks of the program"):
            callbacks = instantiate(self.callbacks, _CALLBACKS)
        if evaluates_average(callbacks) and not self.evaluate_average:
            raise ConfigError("SwapEMAWeights is among the callbacks; set task.init_args.evaluate_average: true.")
        return running_callbacks(callbacks)

    def columns(self) -> list[str]:
        """Returns the columns to read, see `Task.columns`."""
        return list(dict.fromkeys([*self.columns_of_model(), *_names_in(self.model_target), *self.weight_columns()]))

    def targets(self) -> list[str]:
        """Returns the columns that a prediction does not read, see `Task.targets`."""
        return [name for name in self.columns() if name not in self.columns_of_model()]

    def weight_columns(self) -> list[str]:
        """Returns the columns with weights, see `Task.weight_columns`."""
        return _names_in(self.sample_weight)

    def build_model(self) -> nn.Module:
        """Calls the function of the program, and returns its model as a module."""
        return self._build()

    @property
    def _facts(self) -> library.BatchFacts:
        return library.BatchFacts(*self.compiled["facts"])

    @property
    def _settings(self) -> library.Settings:
        return library.Settings(**self.keras_settings)

    def _build(self) -> KerasModule:
        return program.build_program(self.model, self._settings, self._samples)

    def _samples(self) -> list[program.Inputs]:
        """Returns batches of ones with targets of zeros, of which lists have several lengths."""
        has_lists = any(kind == "list" for kind, _, _ in self.column_types.values())
        lengths = _SAMPLE_LENGTHS if has_lists else _SAMPLE_LENGTHS[:1]
        columns = self.column_types.items()
        # A layer that masks zeros would leave a loss or an output without any row.
        inputs = self.columns_of_model()
        rows = (
            {name: _fill(kind, dtype, shape, n, name in inputs) for name, (kind, dtype, shape) in columns}
            for n in lengths
        )
        return [self._keras_batch(to_batch(self.decode(read)), True) for read in rows]

    def _input(self, batch: Batch, name: str) -> Tensor:
        """Returns a column of a batch as the model gets it."""
        if self.kinds.get(name) != IMAGE:
            return super()._input(batch, name)
        values = batch[name]
        values = values.float()
        if self.column_types[name][0] == "array" and len(self.column_types[name][2]) == 2:
            # Arrays of two axes stay as they are; `fit_inputs` adds an axis of channels where the model has it.
            return values.squeeze(1)
        return values if self.keras_settings["image_data_format"] == "channels_first" else values.movedim(1, -1)

    def _keras_inputs(self, batch: Batch) -> Any:
        """Returns the inputs of a batch as Keras takes them; no other columns are read."""

        def scaled(name: str) -> Tensor:
            values = self._input(batch, name)
            return values if self.scale == 1 else values / self.scale

        return _map_columns(self.model_inputs, scaled)

    def _keras_batch(self, batch: Batch, is_training: bool) -> program.Inputs:
        """Returns a batch as Keras takes it."""
        y = None
        if self.model_target is not None:
            y = _map_columns(self.model_target, lambda name: self._input(batch, name))
        return self._keras_inputs(batch), y, self._weights(batch, y, is_training)

    def _weights(self, batch: Batch, y: Any, is_training: bool) -> Any:
        """Returns the weights of rows, or of each output; None for equal weights."""
        of_rows = None
        if self.sample_weight is not None:
            of_rows = _map_columns(self.sample_weight, lambda name: batch[name].float().clone())
        if not self.class_weight or not is_training:
            return of_rows
        # Classes are integers, or the place of the highest number of a row.
        y = y.float() if y.dtype == torch.bool else y
        classes = y if y.ndim < 2 else y.argmax(-1) if y.shape[-1] > 1 else y.squeeze(-1)
        if classes.ndim > 1:
            raise ConfigError(
                f"class_weight needs one class per row, but y has the shape {tuple(y.shape)}. Pass sample_weight."
            )
        weights = torch.ones(len(y), device=y.device)
        for number, weight in self.class_weight:
            weights = torch.where(classes.round() == number, weight, weights)
        return weights if of_rows is None else of_rows * weights.reshape(-1, *[1] * (of_rows.ndim - 1))

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Returns what the model gives for a batch."""
        return model(self._keras_inputs(batch))

    def initial_loss_scale(self) -> list[float] | None:
        """Returns the scale of the `LossScaleOptimizer` of the program, see `Task`."""
        return self.compiled.get("loss_scale")

    def moving_parameters(self, model: nn.Module) -> list[Tensor]:
        """Returns the kernels of spectral normalization, see `Task`: their division depends on no rows."""
        return _module_of(model).moving_parameters()

    def phases(self) -> list[str]:
        """Returns the optimizers of the phases of the program's own `train_step`, see `Task`."""
        return [str(name) for name in self.compiled.get("phases", [])]

    def loss_for_optimizer(self, turn: str, model: nn.Module, batch: Batch) -> Tensor | Losses:
        """Returns the loss of a phase of the program's own `train_step`; by default of the first with an optimizer."""
        updates = step_updates.get()
        phase = self.phases().index(turn, len(updates))
        loss, means, states = _module_of(model).train_step(*self._keras_batch(batch, True), phase, updates)
        rows = count_rows(batch)
        return Losses(loss.expand(rows), None, {name: value.expand(rows) for name, value in means.items()}, states)

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor | Losses:
        """Returns the mean loss of a micro-batch for each of its rows, with its metrics."""
        if phases := self.phases():
            return self.loss_for_optimizer(phases[0], model, batch)
        x, y, weights = self._keras_batch(batch, True)
        rows, all_rows = count_rows(batch), step_rows.get()
        result: KerasPass = model(x, y, weights, with_loss=True, factor=(all_rows or 1) / rows)
        means, states = _module_of(model).step_metrics(x, result.targets, weights, result.outputs)
        metrics = {name: value.float().expand(rows) for name, value in means.items()}
        if result.weight is None or rows == all_rows:
            return Losses(result.loss.expand(rows), metrics=metrics, states=states)
        # A mean over weights or a mask becomes one over those of all logical workers.
        share = result.weight.float() / rows
        return Losses((result.loss * share).expand(rows), share.expand(rows), metrics, states)

    def running_metrics(
        self, total: list[float], states: Sequence[Any], is_first: bool
    ) -> tuple[list[float], dict[str, float]]:
        """Returns states and metrics of Keras over the rows of an epoch so far, see `Task.running_metrics`."""
        from ray_app.task.keras.metrics import add_states

        metrics, facts = dict(self.compiled_metrics()), self._facts
        carried = {name: metrics[name] for name in facts.carried}
        with user_code(lambda: "adding the states of metrics"):
            return add_states(carried, total, states, set(carried) - set(facts.kept) if is_first else set())

    def eval_outputs(self, model: nn.Module, batch: Batch) -> Evaluated:
        """Returns the loss of an evaluated batch, and the states of the metrics after it."""
        x, y, weights = self._keras_batch(batch, False)
        module = _module_of(model)
        if self.compiled.get("test_logs") is not None:
            return module.test_step(x, y, weights)
        result: KerasPass = model(x, y, weights, with_loss=True)
        return Evaluated(result.loss, {}, module.metric_states(x, result.targets, weights, result.outputs))

    def metrics(self) -> MetricCollection:
        """Makes the metrics that the model was compiled with."""
        from torchmetrics import MetricCollection

        from ray_app.task.keras.metrics import KerasMetric
        from ray_app.task.metric_classes import Logged

        logs, metrics = self.compiled.get("test_logs"), self.compiled_metrics()
        kept: dict[str, Any] = {name: KerasMetric(metric) for name, metric in metrics if logs is None or name in logs}
        return MetricCollection(kept if logs is None else kept | {_LOGGED: Logged()}, compute_groups=False)

    def compiled_metrics(self) -> list[tuple[str, Any]]:
        """Returns the metrics of Keras that the model was compiled with by their names, in Keras' order."""
        return _make_metrics(type(self), json.dumps(vars(self)), load_class(self.model["class_path"]))

    def update(self, metrics: MetricCollection, outputs: Evaluated, batch: Batch) -> None:
        """Updates the metrics with the states that they have after a batch."""
        for name, metric in metrics.items(keep_base=True, copy_state=False):
            if name == _LOGGED:
                metric.update(outputs.logged, count_rows(batch))
            else:
                metric.update(outputs.metrics[str(name)])

    def is_reported(self, name: str) -> bool:
        """Returns whether Keras has a loss in its history: `loss`, or `val_loss`, if a step returns it."""
        logs = self.compiled.get({"loss": "train_logs", "val_loss": "test_logs"}.get(name, ""))
        return logs is None or "loss" in logs

    def export_files(self, model: nn.Module, folder: Path) -> None:
        """Writes `model.keras` into an export, which Keras loads with any backend and without ray_app."""
        _module_of(model).saved_program().save(folder / MODEL_FILE)

    def predictions(self, outputs: Any, batch: Batch) -> Arrays:
        """Returns what the model gives, as `Model.predict` does; several outputs by their names."""
        del batch
        if isinstance(outputs, Mapping):
            return {str(name): to_array(values) for name, values in outputs.items()}
        if isinstance(outputs, list | tuple):
            return {f"predicted_{number}": to_array(values) for number, values in enumerate(outputs)}
        return {"predicted": to_array(outputs)}


@lru_cache(4)
def _make_metrics(kind: type[KerasTask], settings: str, factory: Any) -> list[tuple[str, Any]]:
    """Returns the metrics of a task's program by their names; a process makes them once for a function `factory`."""
    del factory
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(0)
        module = kind.from_settings(json.loads(settings))._build()
    return library.compiled_metrics(module.program)


def _module_of(model: nn.Module) -> KerasModule:
    """Returns the model itself where PyTorch's compiler has wrapped it."""
    module = getattr(model, "_orig_mod", model)
    assert isinstance(module, KerasModule)
    return module


def _names_in(columns: Columns | None) -> list[str]:
    """Returns the names of columns in their order, each once."""
    if columns is None:
        return []
    names = [columns] if isinstance(columns, str) else columns.values() if isinstance(columns, dict) else columns
    return list(dict.fromkeys(names))


def _map_columns(columns: Columns | None, value_of: Callable[[str], Tensor]) -> Any:
    """Returns the values of columns in the structure in which they are named."""
    if isinstance(columns, dict):
        return {key: value_of(name) for key, name in columns.items()}
    if isinstance(columns, str):
        return value_of(columns)
    return [value_of(name) for name in columns or []]


def _need_columns(inputs: Columns, columns: list[str], scale: float) -> None:
    """Raises ConfigError for invalid columns or scale."""
    if not columns or not all(isinstance(name, str) for name in columns):
        raise ConfigError(
            f"task.init_args.inputs is {inputs!r}; name the input column of the model, or several in a list."
        )
    if not scale:
        raise ConfigError("task.init_args.scale is 0; inputs are divided by it. Leave it out, or set 255 for pixels.")


def _type_of(column: ColumnFacts) -> list[Any]:
    """Returns kind, type and shape of a column, the arguments of `_zeros`."""
    dtype = column.dtype
    if column.kind == "list":
        try:
            dtype = np.dtype(dtype).name
        except TypeError:
            # Lists may have a type of Arrow, such as list<item: int64>.
            dtype = "float32" if "double" in dtype or "float" in dtype else "int64"
    return [column.kind, dtype, list(column.shape)]


def _fill(kind: str, dtype: str, shape: list[int], length: int, value: int) -> Any:
    """Returns rows of a column as read, with one number everywhere; pictures are black."""
    if kind == "bytes":
        image = io.BytesIO()
        Image.new("RGB", (_PICTURE_SIZE, _PICTURE_SIZE)).save(image, "PNG")
        return [image.getvalue()] * _SAMPLE_ROWS
    if kind == "list":
        return Ragged.of([np.full((length, *shape), value, dtype)] * _SAMPLE_ROWS, dtype, row_shape=tuple(shape))
    return np.full((_SAMPLE_ROWS, *shape), value, dtype or ("float32" if kind == "number" else "int64"))
